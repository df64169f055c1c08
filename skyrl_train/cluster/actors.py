"""Ray actors as thin shells around plain classes, and the driver's handles to them: both ends of a call."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from skyrl_train import trace
from skyrl_train.cluster.node_loss import lost_node
from skyrl_train.cluster.output import append_output_to
from skyrl_train.cluster.placement import Slots, in_slot
from skyrl_train.cluster.runtime import Cluster
from skyrl_train.cluster.sockets import GROUP_ADDRESS, LOOPBACK, NODE_ADDRESS
from skyrl_train.cluster.stacks import write_on_signal
from skyrl_train.errors import DeadlineExceeded, SkyRLError, WorkerDied
from skyrl_train.imports import import_modules
from skyrl_train.registry import load_object
from skyrl_train.tasks import within

_log = logging.getLogger(__name__)
_CALLS = "calls"
"""The row of an actor's time line that has its calls."""
_CALLS_AT_A_TIME = 1_000_000
"""Of a concurrent actor: no limit, as what waits for one keeps health checks, pauses and aborts waiting behind it. Each
call under way takes 60 KiB of its memory, and no thread."""


class _Shell:
    """An actor with one object of any class; it runs one call at a time."""

    def __init__(
        self,
        name: str,
        target: str,
        kwargs: Mapping[str, Any],
        plugins: Sequence[str],
        environment: Mapping[str, str],
        single_machine: bool,
        log: Path | None,
        traced: bool,
    ):
        os.environ.update(environment)  # before anything imports torch
        if traced:
            trace.collect()
        self._name = name
        if log is not None:
            append_output_to(log, f"{name}, process {os.getpid()}")
        write_on_signal()
        os.environ[NODE_ADDRESS] = ray.util.get_node_ip_address()
        os.environ[GROUP_ADDRESS] = LOOPBACK if single_machine else os.environ[NODE_ADDRESS]
        import_modules([*plugins, target.partition(":")[0]])
        gc.freeze()  # what they define is never garbage, and half a million objects to look through
        with trace.span("start", row=_CALLS):
            self._object = load_object(target)(**kwargs)

    def __repr__(self) -> str:
        """What Ray writes before lines that it prints for this actor."""
        return self._name

    def call(self, method: str, args: Any, kwargs: Mapping[str, Any], *stored: Any) -> Any:
        """Call a method. `args`: its arguments, or the plan that makes them of what is `stored`."""
        return getattr(self._object, method)(*(args if isinstance(args, tuple) else args.arguments(*stored)), **kwargs)

    def call_traced(self, method: str, args: Any, kwargs: Mapping[str, Any], *stored: Any) -> Any:
        """The result of `call`, and the spans that were noted here since the last answer."""
        with trace.span(method, row=_CALLS):
            result = self.call(method, args, kwargs, *stored)
        return result, trace.hand_over()

    def read(self, attribute: str) -> Any:
        return getattr(self._object, attribute)


class _AsyncShell(_Shell):
    """An actor with one object whose methods are coroutines; it runs many calls at a time."""

    async def call(self, method: str, args: Any, kwargs: Mapping[str, Any], *stored: Any) -> Any:  # type: ignore[override]
        result = super().call(method, args, kwargs, *stored)
        return await result if inspect.isawaitable(result) else result

    async def lives(self) -> None:
        """Never returns: who waits for it hears when this process is gone."""
        await asyncio.Event().wait()

    async def call_traced(self, method: str, args: Any, kwargs: Mapping[str, Any], *stored: Any) -> Any:
        with trace.span(method, row=_CALLS, overlaps=True):
            result = await self.call(method, args, kwargs, *stored)
        return result, trace.hand_over()


class Remote:
    """A handle to an object in another process: `await remote.method(...)` runs the method there.

    An exception raised there is raised here with its own type. If the process dies, `died` is raised; a call that takes
    longer than `deadline_s` raises DeadlineExceeded naming the process and the method.
    """

    def __init__(
        self,
        handle: ActorHandle,
        name: str,
        deadline_s: float,
        died: type[SkyRLError] = WorkerDied,
        deadlines: Mapping[str, float] | None = None,
        log: Path | None = None,
        on_many_nodes: bool = False,
    ):
        """
        Args:
            deadlines: Method -> deadline (infinity for none), for methods that do not have `deadline_s`.
            log: Where the process prints to, which the error of its death names.
            on_many_nodes: Whether its node may be lost while we live: then that error says so.
        """
        self._log = log
        self._on_many_nodes = on_many_nodes
        self._deadlines = dict(deadlines or {})
        self._handle = handle
        self._name = name
        self._deadline_s = deadline_s
        self._died = died
        self._parts: Sequence[Remote] = ()
        self._killed = False

    @property
    def name(self) -> str:
        return self._name

    def know(self, **attributes: Any) -> None:
        """Store constant attributes of the object here, to be read without a call."""
        self.__dict__.update(attributes)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("__"):
            raise AttributeError(method)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self._call(self._deadlines.get(method, self._deadline_s), method, args, kwargs)

        return call

    async def call_within(self, deadline_s: float, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method with a given deadline."""
        return await self._call(deadline_s, method, args, kwargs)

    def store(self, value: Any) -> ObjectRef[Any]:
        """Put a value into shared memory, where all actors of a machine read its arrays, until it is let go of.

        It blocks, for a large one for a while: to be called in a thread.
        """
        return ray.put(value)

    async def call_stored(self, method: str, plan: Any, stored: Sequence[ObjectRef[Any]]) -> Any:
        """Call a method with `plan.arguments(*values)`, made there of what `store` has stored."""
        return await self._call(self._deadlines.get(method, self._deadline_s), method, plan, {}, *stored)

    async def read(self, attribute: str, deadline_s: float) -> Any:
        """Read an attribute; the first call waits for the constructor."""
        return await self._wait(self._handle.read.remote(attribute), "start", deadline_s)

    @property
    def id(self) -> str:
        """Ray's name of the actor."""
        return str(self._handle._actor_id.hex())

    def kill(self) -> None:
        """Kill the process, and those that belong to it."""
        self._killed = True
        with ExitStack() as stack:  # the others too if that fails for one
            for process in (self, *self._parts):
                stack.callback(ray.kill, process._handle, no_restart=True)

    def lives_with(self, parts: Sequence[Remote], cluster: Cluster) -> None:
        """Have these processes belong to this one, which can do nothing without them: none outlives another.

        All are concurrent actors. Each part has a method `ended`, which returns or raises once it is of no use any
        more. Needs a running event loop.
        """
        self._parts = parts
        for watch in (self._end_parts(), *(self._end_after(part) for part in parts)):
            cluster.owns_watch(asyncio.get_running_loop().create_task(watch))

    async def _end_parts(self) -> None:
        with suppress(Exception):  # whoever calls this process says what it died of
            await self._wait(self._handle.lives.remote(), "lives", math.inf)
        if not self._killed:
            self.kill()

    async def _end_after(self, part: Remote) -> None:
        try:
            await part.call_within(math.inf, "ended")
            how = f"{part.name} ended"
        except Exception as error:  # whatever it is: what waits for the part would wait for ever
            how = str(error)
        if not self._killed:
            _log.warning("%s is ended, as a part of it is gone: %s", self._name, how)
            self.kill()

    async def _call(
        self, deadline_s: float, method: str, args: Any, kwargs: Mapping[str, Any], *stored: ObjectRef[Any]
    ) -> Any:
        if not trace.on():
            return await self._wait(self._handle.call.remote(method, args, kwargs, *stored), method, deadline_s)
        reference: Any = self._handle.call_traced.remote(method, args, kwargs, *stored)
        result, spans = await self._wait(reference, method, deadline_s)
        trace.take_over(spans, self._name)
        return result

    async def _wait(self, reference: Any, method: str, deadline_s: float) -> Any:
        future = asyncio.wrap_future(reference.future())
        try:
            return await within(deadline_s, future)
        except RayTaskError as error:
            with suppress(AttributeError):
                error.cause.raised_in = f"{self._name}.{method}"
            raise error.cause from error
        except RayActorError as error:
            see = "" if self._log is None else f" What it printed: {self._log}"
            lost = await lost_node(self.id) if self._on_many_nodes else None
            cause = _first_cause(error) if lost is None else lost
            raise self._died(f"{self._name} died during {method}: {cause}{see}") from error
        except (TimeoutError, GetTimeoutError) as error:
            if isinstance(error, SkyRLError):
                raise
            raise DeadlineExceeded(f"{self._name}.{method}", deadline_s) from error


def carries_another(error: BaseException | None) -> bool:
    """Whether it is Ray's, around an exception of another process: its text is the traceback there."""
    return isinstance(error, RayTaskError)


_ADVICE = "Some common causes include"
"""How Ray goes on after the way in which a process ended: five lines about what may have killed it."""


def _first_cause(error: RayActorError) -> str:
    """The line of Ray's message with the cause: a constructor's exception, or how the process ended."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line and not line.startswith(("File", "The actor"))]
    cause = (named or lines or ["no reason given"])[-1]
    return cause.partition(_ADVICE)[0].rstrip()


def spawn(
    cluster: Cluster,
    target: str,
    kwargs: Mapping[str, Any],
    *,
    slots: Slots,
    index: int,
    name: str,
    concurrent: bool,
    deadline_s: float,
    died: type[SkyRLError] = WorkerDied,
    devices: str | None = None,
    deadlines: Mapping[str, float] | None = None,
    apart: bool = False,
) -> Remote:
    """Start an actor with "module:Class"(**kwargs) in slot `index`; returns without waiting for the constructor.

    `concurrent`: for classes with coroutine methods. `devices`: the accelerators of all slots that it uses
    (placement.visible_devices), instead of only that of slot `index`. `deadlines`: see Remote. `apart`: it runs users'
    code in processes of its own, so it imports no plugins, and what it prints is left to Ray, which shows it.
    """
    shell = ray.remote(_AsyncShell if concurrent else _Shell)
    share = slots.together / slots.tenants  # of a slot, or of all slots of a bundle
    environment = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
    if slots.gpus:  # for an actor that reserves no CPU Ray sets one thread, which the engines' ranks would inherit
        environment["OMP_NUM_THREADS"] = str(slots.cores)
    log, plugins = (None, ()) if apart else (cluster.log_of(name), cluster.plugins)
    handle: Any = shell.options(
        # Ray counts in ten-thousandths and rounds up: three thirds of a slot would not fit into it.
        num_cpus=math.floor(slots.cpus * share * 10_000) / 10_000 if not slots.gpus else 0,
        num_gpus=slots.gpus * share if devices is None else 0,
        max_concurrency=_CALLS_AT_A_TIME if concurrent else 1,
        scheduling_strategy=in_slot(slots, index),
    ).remote(name, target, dict(kwargs), plugins, environment, cluster.single_machine, log, trace.on())
    cluster.owns_actor(handle)
    return Remote(handle, name, deadline_s, died, deadlines, log, on_many_nodes=not cluster.single_machine)


def spawn_anywhere(
    cluster: Cluster,
    target: str,
    kwargs: Mapping[str, Any],
    *,
    options: Mapping[str, Any],
    name: str,
    deadline_s: float,
) -> Remote:
    """Like `spawn` with concurrent=True, but not in a slot: Ray places it according to `options` (num_cpus, ...)."""
    shell: Any = ray.remote(_AsyncShell).options(**options)
    handle = shell.remote(name, target, dict(kwargs), cluster.plugins, {}, cluster.single_machine, None, trace.on())
    cluster.owns_actor(handle)
    return Remote(handle, name, deadline_s, on_many_nodes=not cluster.single_machine)
