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
from skyrl_train.aio import with_timeout
from skyrl_train.cluster.actor_logs import redirect_output
from skyrl_train.cluster.addresses import BIND_ADDRESS, LOOPBACK, NODE_ADDRESS
from skyrl_train.cluster.node_loss import describe_lost_node
from skyrl_train.cluster.placement import ResourcePool, slot_scheduling_strategy
from skyrl_train.cluster.ray_cluster import Cluster
from skyrl_train.cluster.stack_dumps import dump_stacks_on_signal
from skyrl_train.errors import DeadlineExceeded, SkyRLError, WorkerDied
from skyrl_train.imports import import_without_gc
from skyrl_train.registry import load_object

_log = logging.getLogger(__name__)
_TRACE_ROW = "calls"
"""The row of an actor's time line that has its calls."""
_MAX_CONCURRENCY = 1_000_000
"""Of a concurrent actor: no limit, as what waits for one keeps health checks, pauses and aborts waiting behind it. Each
call under way takes 60 KiB of its memory, and no thread."""


class _WorkerActor:
    """An actor with one object of any class; it runs one call at a time."""

    def __init__(
        self,
        name: str,
        target: str,
        kwargs: Mapping[str, Any],
        plugins: Sequence[str],
        environment: Mapping[str, str],
        is_single_node: bool,
        log_path: Path | None,
        traced: bool,
    ):
        os.environ.update(environment)  # before anything imports torch
        if traced:
            trace.start_buffering()
        self._name = name
        if log_path is not None:
            redirect_output(log_path, f"{name}, process {os.getpid()}")
        dump_stacks_on_signal()
        os.environ[NODE_ADDRESS] = ray.util.get_node_ip_address()
        os.environ[BIND_ADDRESS] = LOOPBACK if is_single_node else os.environ[NODE_ADDRESS]
        import_without_gc([*plugins, target.partition(":")[0]])
        gc.freeze()  # what they define is never garbage, and half a million objects to look through
        with trace.span("start", track=_TRACE_ROW):
            self._object = load_object(target)(**kwargs)

    def __repr__(self) -> str:
        """What Ray writes before lines that it prints for this actor."""
        return self._name

    def call(self, method: str, args: Any, kwargs: Mapping[str, Any], *stored: Any) -> Any:
        """Call a method. `args`: its arguments, or the plan that makes them of what is `stored`."""
        return getattr(self._object, method)(
            *(args if isinstance(args, tuple) else args.build_arguments(*stored)), **kwargs
        )

    def call_traced(self, method: str, args: Any, kwargs: Mapping[str, Any], *stored: Any) -> Any:
        """The result of `call`, and the spans that were noted here since the last answer."""
        with trace.span(method, track=_TRACE_ROW):
            result = self.call(method, args, kwargs, *stored)
        return result, trace.drain_spans()

    def get_attribute(self, attribute: str) -> Any:
        return getattr(self._object, attribute)


class _AsyncWorkerActor(_WorkerActor):
    """An actor with one object whose methods are coroutines; it runs many calls at a time."""

    async def call(self, method: str, args: Any, kwargs: Mapping[str, Any], *stored: Any) -> Any:  # type: ignore[override]
        result = super().call(method, args, kwargs, *stored)
        return await result if inspect.isawaitable(result) else result

    async def wait_forever(self) -> None:
        """Never returns: who waits for it hears when this process is gone."""
        await asyncio.Event().wait()

    async def call_traced(self, method: str, args: Any, kwargs: Mapping[str, Any], *stored: Any) -> Any:
        with trace.span(method, track=_TRACE_ROW, overlaps=True):
            result = await self.call(method, args, kwargs, *stored)
        return result, trace.drain_spans()


class ActorProxy:
    """A handle to an object in another process: `await remote.method(...)` runs the method there.

    An exception raised there is raised here with its own type. If the process dies, `died` is raised; a call that takes
    longer than `deadline_s` raises DeadlineExceeded naming the process and the method.
    """

    def __init__(
        self,
        handle: ActorHandle,
        name: str,
        deadline_s: float,
        death_error: type[SkyRLError] = WorkerDied,
        deadlines: Mapping[str, float] | None = None,
        log_path: Path | None = None,
        is_multi_node: bool = False,
    ):
        """
        Args:
            deadlines: Method -> deadline (infinity for none), for methods that do not have `deadline_s`.
            log: Where the process prints to, which the error of its death names.
            on_many_nodes: Whether its node may be lost while we live: then that error says so.
        """
        self._log_path = log_path
        self._is_multi_node = is_multi_node
        self._deadlines = dict(deadlines or {})
        self._handle = handle
        self._name = name
        self._deadline_s = deadline_s
        self._death_error = death_error
        self._parts: Sequence[ActorProxy] = ()
        self._killed = False

    @property
    def name(self) -> str:
        return self._name

    def cache_attributes(self, **attributes: Any) -> None:
        """Store constant attributes of the object here, to be read without a call."""
        self.__dict__.update(attributes)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("__"):
            raise AttributeError(method)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self._call(self._deadlines.get(method, self._deadline_s), method, args, kwargs)

        return call

    async def call_with_deadline(self, deadline_s: float, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method with a given deadline."""
        return await self._call(deadline_s, method, args, kwargs)

    def put(self, value: Any) -> ObjectRef[Any]:
        """Put a value into shared memory, where all actors of a machine read its arrays, until it is let go of.

        It blocks, for a large one for a while: to be called in a thread.
        """
        return ray.put(value)

    async def call_with_refs(self, method: str, plan: Any, refs: Sequence[ObjectRef[Any]]) -> Any:
        """Call a method with `plan.build_arguments(*values)`, made there of what `store` has stored."""
        return await self._call(self._deadlines.get(method, self._deadline_s), method, plan, {}, *refs)

    async def get_attribute(self, attribute: str, deadline_s: float) -> Any:
        """Read an attribute; the first call waits for the constructor."""
        return await self._wait(self._handle.read.remote(attribute), "start", deadline_s)

    @property
    def actor_id(self) -> str:
        """Ray's name of the actor."""
        return str(self._handle._actor_id.hex())

    def kill(self) -> None:
        """Kill the process, and those that belong to it."""
        self._killed = True
        with ExitStack() as stack:  # the others too if that fails for one
            for process in (self, *self._parts):
                stack.callback(ray.kill, process._handle, no_restart=True)

    def link_lifetimes(self, parts: Sequence[ActorProxy], cluster: Cluster) -> None:
        """Have these processes belong to this one, which can do nothing without them: none outlives another.

        All are concurrent actors. Each part has a method `ended`, which returns or raises once it is of no use any
        more. Needs a running event loop.
        """
        self._parts = parts
        for watch in (self._end_parts(), *(self._end_after(part) for part in parts)):
            cluster.register_watcher(asyncio.get_running_loop().create_task(watch))

    async def _end_parts(self) -> None:
        with suppress(Exception):  # whoever calls this process says what it died of
            await self._wait(self._handle.lives.remote(), "wait_forever", math.inf)
        if not self._killed:
            self.kill()

    async def _end_after(self, part: ActorProxy) -> None:
        try:
            await part.call_with_deadline(math.inf, "wait_until_exit")
            how = f"{part.name} ended"
        except Exception as error:  # whatever it is: what waits for the part would wait for ever
            how = str(error)
        if not self._killed:
            _log.warning("%s is ended, as a part of it is gone: %s", self._name, how)
            self.kill()

    async def _call(
        self, deadline_s: float, method: str, args: Any, kwargs: Mapping[str, Any], *refs: ObjectRef[Any]
    ) -> Any:
        if not trace.is_enabled():
            return await self._wait(self._handle.call.remote(method, args, kwargs, *refs), method, deadline_s)
        reference: Any = self._handle.call_traced.remote(method, args, kwargs, *refs)
        result, spans = await self._wait(reference, method, deadline_s)
        trace.ingest_spans(spans, self._name)
        return result

    async def _wait(self, reference: Any, method: str, deadline_s: float) -> Any:
        future = asyncio.wrap_future(reference.future())
        try:
            return await with_timeout(deadline_s, future)
        except RayTaskError as error:
            with suppress(AttributeError):
                error.cause.raised_in = f"{self._name}.{method}"
            raise error.cause from error
        except RayActorError as error:
            see = "" if self._log_path is None else f" What it printed: {self._log_path}"
            lost = await describe_lost_node(self.actor_id) if self._is_multi_node else None
            cause = _first_cause(error) if lost is None else lost
            raise self._death_error(f"{self._name} died during {method}: {cause}{see}") from error
        except (TimeoutError, GetTimeoutError) as error:
            if isinstance(error, SkyRLError):
                raise
            raise DeadlineExceeded(f"{self._name}.{method}", deadline_s) from error


def is_ray_task_error(error: BaseException | None) -> bool:
    """Whether it is Ray's, around an exception of another process: its text is the traceback there."""
    return isinstance(error, RayTaskError)


_RAY_HINT_PREFIX = "Some common causes include"
"""How Ray goes on after the way in which a process ended: five lines about what may have killed it."""


def _first_cause(error: RayActorError) -> str:
    """The line of Ray's message with the cause: a constructor's exception, or how the process ended."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line and not line.startswith(("File", "The actor"))]
    cause = (named or lines or ["no reason given"])[-1]
    return cause.partition(_RAY_HINT_PREFIX)[0].rstrip()


def spawn(
    cluster: Cluster,
    target: str,
    kwargs: Mapping[str, Any],
    *,
    pool: ResourcePool,
    index: int,
    name: str,
    is_async: bool,
    deadline_s: float,
    death_error: type[SkyRLError] = WorkerDied,
    devices: str | None = None,
    deadlines: Mapping[str, float] | None = None,
    runs_user_code: bool = False,
) -> ActorProxy:
    """Start an actor with "module:Class"(**kwargs) in slot `index`; returns without waiting for the constructor.

    `concurrent`: for classes with coroutine methods. `devices`: the accelerators of all slots that it uses
    (placement.visible_devices), instead of only that of slot `index`. `deadlines`: see Remote. `apart`: it runs users'
    code in processes of its own, so it imports no plugins, and what it prints is left to Ray, which shows it.
    """
    shell = ray.remote(_AsyncWorkerActor if is_async else _WorkerActor)
    share = pool.slots_per_bundle / pool.actors_per_slot  # of a slot, or of all slots of a bundle
    environment = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
    if (
        pool.gpus_per_slot
    ):  # for an actor that reserves no CPU Ray sets one thread, which the engines' ranks would inherit
        environment["OMP_NUM_THREADS"] = str(pool.min_cores_per_slot)
    log, plugins = (None, ()) if runs_user_code else (cluster.actor_log_path(name), cluster.plugins)
    handle: Any = shell.options(
        # Ray counts in ten-thousandths and rounds up: three thirds of a slot would not fit into it.
        num_cpus=math.floor(pool.cpus_per_slot * share * 10_000) / 10_000 if not pool.gpus_per_slot else 0,
        num_gpus=pool.gpus_per_slot * share if devices is None else 0,
        max_concurrency=_MAX_CONCURRENCY if is_async else 1,
        scheduling_strategy=slot_scheduling_strategy(pool, index),
    ).remote(name, target, dict(kwargs), plugins, environment, cluster.is_single_node, log, trace.is_enabled())
    cluster.register_actor(handle)
    return ActorProxy(handle, name, deadline_s, death_error, deadlines, log, is_multi_node=not cluster.is_single_node)


def spawn_unpinned(
    cluster: Cluster,
    target: str,
    kwargs: Mapping[str, Any],
    *,
    options: Mapping[str, Any],
    name: str,
    deadline_s: float,
) -> ActorProxy:
    """Like `spawn` with concurrent=True, but not in a slot: Ray places it according to `options` (num_cpus, ...)."""
    shell: Any = ray.remote(_AsyncWorkerActor).options(**options)
    handle = shell.remote(
        name, target, dict(kwargs), cluster.plugins, {}, cluster.is_single_node, None, trace.is_enabled()
    )
    cluster.register_actor(handle)
    return ActorProxy(handle, name, deadline_s, is_multi_node=not cluster.is_single_node)
