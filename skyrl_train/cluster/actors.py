"""Ray actors that wrap plain classes, and the proxies through which the driver calls them."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from skyrl_train import trace
from skyrl_train.aio import with_timeout
from skyrl_train.cluster.actor_logs import redirect_output
from skyrl_train.cluster.addresses import BIND_ADDRESS, LOOPBACK, NODE_ADDRESS
from skyrl_train.cluster.call_channel import TRACE_TRACK, CallChannel, CallServer, Mailbox, Message
from skyrl_train.cluster.child_process import ChildProcess, ProcessEndedError
from skyrl_train.cluster.node_loss import describe_lost_node
from skyrl_train.cluster.placement import ResourcePool, slot_scheduling_strategy
from skyrl_train.cluster.ray_cluster import Cluster
from skyrl_train.cluster.stack_dumps import dump_stacks_on_signal
from skyrl_train.errors import DeadlineExceeded, SkyRLError, WorkerDied
from skyrl_train.imports import import_without_gc
from skyrl_train.registry import load_object

_log = logging.getLogger(__name__)
_MAX_CONCURRENCY = 1_000_000
"""Ray's max_concurrency of async actors. It is effectively unlimited, so that health checks, pauses and aborts never
queue behind other calls. A pending call takes 60 KiB of memory and no thread.
"""


class _WorkerActor:
    """Ray actor that wraps one object of any class and runs one call at a time."""

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
        self._object = self._create(target, kwargs, plugins, traced)

    def _create(self, target: str, kwargs: Mapping[str, Any], plugins: Sequence[str], traced: bool) -> Any:
        import_without_gc([*plugins, target.partition(":")[0]])
        gc.freeze()  # imported modules hold half a million objects that never become garbage
        with trace.span("start", track=TRACE_TRACK):
            return load_object(target)(**kwargs)

    def __repr__(self) -> str:
        """Return the prefix that Ray prints before this actor's output."""
        return self._name

    def call(self, method: str, args: Any, kwargs: Mapping[str, Any], *values: Any) -> Any:
        """Call a method of the object.

        Args:
            method: Name of the method.
            args: Positional arguments as a tuple, or an object whose `build_arguments(*values)` returns them.
            kwargs: Keyword arguments of the method.
            *values: Values of the object references that the caller passed.
        """
        return getattr(self._object, method)(
            *(args if isinstance(args, tuple) else args.build_arguments(*values)), **kwargs
        )

    def call_traced(self, method: str, args: Any, kwargs: Mapping[str, Any], *values: Any) -> Any:
        """Return the result of `call`, and the spans that this process recorded since the last traced call."""
        with trace.span(method, track=TRACE_TRACK):
            result = self.call(method, args, kwargs, *values)
        return result, trace.drain_spans()

    def get_attribute(self, attribute: str) -> Any:
        return getattr(self._object, attribute)


class _AsyncWorkerActor(_WorkerActor):
    """Ray actor that wraps an object whose methods are coroutines, and runs its calls concurrently."""

    def _create(self, *args: Any) -> Any:
        served = super()._create(*args)
        self._mailbox = Mailbox()
        self._server = CallServer(served, self._deliver)
        return served

    async def _deliver(self, channel: str, message: Message) -> None:
        self._mailbox.put(channel, message.copy_buffers())

    async def submit(self, channel: str, message: Message) -> None:
        """Start calls of a CallChannel."""
        self._server.receive(channel, message)

    async def collect(self, channel: str) -> tuple[list[Message], list[trace.Span]]:
        """Return results for a CallChannel, and the spans that this process recorded since the last one."""
        return await self._mailbox.collect(channel), trace.drain_spans()

    async def wait_forever(self) -> None:
        """Wait forever. A pending call fails when this process dies, which notifies the caller."""
        await asyncio.Event().wait()


class _AsyncWorkerActorWithChild(_AsyncWorkerActor):
    """Ray actor whose object is in a child process."""

    _object: ChildProcess

    def _create(self, target: str, kwargs: Mapping[str, Any], plugins: Sequence[str], traced: bool) -> ChildProcess:
        return ChildProcess(self._name, target, kwargs, plugins, traced)

    async def submit(self, channel: str, message: Message) -> None:
        await self._object.submit(channel, message)

    async def collect(self, channel: str) -> tuple[list[Message], list[trace.Span]]:
        return await self._object.collect(channel)


class ActorProxy:
    """A handle to an object in an actor process.

    `await proxy.method(...)` runs the method there and returns its result. An exception that the method raises there
    is raised here with its own type. If the process dies, `death_error` is raised. A call that exceeds its deadline
    raises DeadlineExceeded, which names the process and the method.
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
        is_async: bool = False,
    ):
        """Create a proxy for an actor that `spawn` has started.

        Args:
            handle: Ray's handle of the actor.
            name: Name of the process in messages, logs and traces.
            deadline_s: Seconds that a call may take.
            death_error: Type of the exception that calls raise if the process dies.
            deadlines: Method name -> seconds, for methods with another deadline than `deadline_s`. Infinity means no
                deadline.
            log_path: File with the output of the process, which the error of its death names.
            is_multi_node: True if the actor's node can die while the driver lives. The error then says if it did.
            is_async: True if the actor runs calls concurrently. Calls of one turn of the event loop are then sent
                together.
        """
        self._is_async = is_async
        self._channels: WeakKeyDictionary[asyncio.AbstractEventLoop, CallChannel] = WeakKeyDictionary()
        """Channels of the event loops that have called an async actor."""
        self._log_path = log_path
        self._is_multi_node = is_multi_node
        self._deadlines = dict(deadlines or {})
        self._handle = handle
        self._name = name
        self._deadline_s = deadline_s
        self._death_error = death_error
        self._parts: Sequence[ActorProxy] = ()
        self._killed = False

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the channels, which belong to the event loops of this process."""
        return {name: value for name, value in self.__dict__.items() if name != "_channels"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__ |= {**state, "_channels": WeakKeyDictionary()}

    @property
    def name(self) -> str:
        """Name of the process in messages, logs and traces."""
        return self._name

    def cache_attributes(self, **attributes: Any) -> None:
        """Store constant attributes of the remote object in this proxy, so that reading them needs no call."""
        self.__dict__.update(attributes)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("__"):
            raise AttributeError(method)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self._call(self._deadlines.get(method, self._deadline_s), method, args, kwargs)

        return call

    async def call_with_deadline(self, deadline_s: float, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method with a deadline of its own.

        Args:
            deadline_s: Seconds that the call may take. Infinity means no deadline.
            method: Name of the method.
            *args: Positional arguments of the method.
            **kwargs: Keyword arguments of the method.

        Raises:
            DeadlineExceeded: The call takes longer.
            SkyRLError: The process died; of the proxy's `death_error` type.
            Exception: Whatever the method raises.
        """
        return await self._call(deadline_s, method, args, kwargs)

    def put(self, value: Any) -> ObjectRef[Any]:
        """Put a value into Ray's shared memory, where all actors of a node can read its arrays.

        Blocks, for a large value for a while, so call it in a thread. The memory is freed with the last reference.
        """
        return ray.put(value)

    async def call_with_refs(self, method: str, plan: Any, refs: Sequence[ObjectRef[Any]]) -> Any:
        """Call a method of an actor that is not async with arguments that it builds from values in shared memory.

        Raises the same errors as any other call.

        Args:
            method: Name of the method.
            plan: Object whose `build_arguments(*values)` runs in the actor and returns the positional arguments.
            refs: References that `put` returned; the actor receives their values.
        """
        return await self._call(self._deadlines.get(method, self._deadline_s), method, plan, {}, *refs)

    async def get_attribute(self, attribute: str, deadline_s: float) -> Any:
        """Read an attribute of the remote object, after its constructor has returned.

        Raises:
            DeadlineExceeded: The constructor and the read take longer than `deadline_s`.
            SkyRLError: The process died or the constructor failed; of the proxy's `death_error` type.
        """
        if not self._is_async:
            return await self._wait(self._handle.get_attribute.remote(attribute), "start", deadline_s)
        return await self._await(self._channel().call("__getattribute__", (attribute,), {}), "start", deadline_s)

    @property
    def actor_id(self) -> str:
        """Ray's id of the actor, in hex."""
        return str(self._handle._actor_id.hex())

    def kill(self) -> None:
        """Kill the process without a restart, and the processes that `link_lifetimes` has linked to it."""
        self._killed = True
        with ExitStack() as stack:  # a failure to kill one process must not spare the others
            for process in (self, *self._parts):
                stack.callback(ray.kill, process._handle, no_restart=True)

    def link_lifetimes(self, parts: Sequence[ActorProxy], cluster: Cluster) -> None:
        """Link the lifetimes of this actor and its parts: when one of them ends, all of them are killed.

        Requires a running event loop, on which watcher tasks run until the cluster closes.

        Args:
            parts: Async actors with a method `wait_until_exit`, which returns or raises once the part is unusable.
            cluster: Owner of the watcher tasks.
        """
        self._parts = parts
        for watch in (self._kill_after_own_death(), *(self._kill_after_exit(part) for part in parts)):
            cluster.register_watcher(asyncio.get_running_loop().create_task(watch))

    async def _kill_after_own_death(self) -> None:
        with suppress(Exception):  # calls to this process report the cause of its death
            await self._wait(self._handle.wait_forever.remote(), "wait_forever", math.inf)
        if not self._killed:
            self.kill()

    async def _kill_after_exit(self, part: ActorProxy) -> None:
        try:
            await part.call_with_deadline(math.inf, "wait_until_exit")
            reason = f"{part.name} exited"
        except Exception as error:  # after any failure, callers would wait for the part forever
            reason = str(error)
        if not self._killed:
            _log.warning("Killing %s, because one of its processes is gone: %s", self._name, reason)
            self.kill()

    async def _call(
        self, deadline_s: float, method: str, args: Any, kwargs: Mapping[str, Any], *refs: ObjectRef[Any]
    ) -> Any:
        if self._is_async:
            assert not refs, "calls of a channel carry no references"
            return await self._await(self._channel().call(method, args, kwargs), method, deadline_s)
        if not trace.is_enabled():
            return await self._wait(self._handle.call.remote(method, args, kwargs, *refs), method, deadline_s)
        reference: Any = self._handle.call_traced.remote(method, args, kwargs, *refs)
        result, spans = await self._wait(reference, method, deadline_s)
        trace.ingest_spans(spans, self._name)
        return result

    def _channel(self) -> CallChannel:
        """Return the channel of the running event loop to an async actor."""
        loop = asyncio.get_running_loop()
        if (channel := self._channels.get(loop)) is None:
            channel = self._channels[loop] = CallChannel(
                lambda *message: asyncio.wrap_future(self._handle.submit.remote(*message).future()),
                lambda id: asyncio.wrap_future(self._handle.collect.remote(id).future()),
                lambda spans: trace.ingest_spans(spans, self._name),
            )
        return channel

    async def _wait(self, reference: Any, method: str, deadline_s: float) -> Any:
        return await self._await(asyncio.wrap_future(reference.future()), method, deadline_s)

    async def _await(self, future: asyncio.Future[Any], method: str, deadline_s: float) -> Any:
        """Return the result of a call, or raise the method's exception, a death or an expired deadline."""
        try:
            return await with_timeout(deadline_s, future)
        except RayTaskError as error:
            if isinstance(error.cause, ProcessEndedError):
                raise self._make_death_error(method, str(error.cause)) from error
            with suppress(AttributeError):
                error.cause.raised_in = f"{self._name}.{method}"
            raise error.cause from error
        except RayActorError as error:
            lost = await describe_lost_node(self.actor_id) if self._is_multi_node else None
            cause = _first_cause(error) if lost is None else lost
            raise self._make_death_error(method, cause) from error
        except Exception as error:
            if isinstance(error.__cause__, RayTaskError):
                with suppress(AttributeError):
                    setattr(error, "raised_in", f"{self._name}.{method}")  # noqa: B010 - no attribute of its class
            elif isinstance(error, TimeoutError | GetTimeoutError) and not isinstance(error, SkyRLError):
                raise DeadlineExceeded(f"{self._name}.{method}", deadline_s) from error
            raise

    def _make_death_error(self, method: str, cause: str) -> SkyRLError:
        hint = "" if self._log_path is None else f" Its output is in {self._log_path}"
        return self._death_error(f"{self._name} died during {method}: {cause}{hint}")


def is_ray_task_error(error: BaseException | None) -> bool:
    """Return True if `error` is Ray's wrapper of another process's exception, whose text is the remote traceback."""
    return isinstance(error, RayTaskError)


_RAY_HINT_PREFIX = "Some common causes include"
"""Start of the generic hints that Ray appends to the cause of a death: five lines on what may have killed the process.
"""


def _first_cause(error: RayActorError) -> str:
    """Return the line of Ray's message with the cause: a constructor's exception, or how the process ended."""
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
    in_child_process: bool = False,
) -> ActorProxy:
    """Start an actor that runs `"module:Class"(**kwargs)` in a slot of a pool.

    Returns without waiting for the constructor. The cluster kills the actor when it closes.

    Args:
        cluster: Cluster of the run.
        target: Class of the wrapped object, as "module:Class".
        kwargs: Keyword arguments of its constructor. They must be picklable.
        pool: Reserved slots.
        index: Slot in which the actor runs.
        name: Name of the process in messages, logs and traces.
        is_async: True for classes whose methods are coroutines; their calls run concurrently.
        deadline_s: Seconds that a call may take.
        death_error: Type of the exception that calls raise if the process dies.
        devices: CUDA_VISIBLE_DEVICES of an actor that uses several slots, see `visible_devices`. None: the slot's own
            GPU.
        deadlines: Method name -> seconds, for methods with another deadline than `deadline_s`. None: no method has
            another one.
        runs_user_code: True if user code runs in child processes of the actor. It then imports no plugins, and Ray
            shows its output.
        in_child_process: True to create the object in a child process of an async actor, so that its threads do not
            share a GIL with Ray's.

    Returns:
        The proxy through which the driver calls the object.
    """
    shell = ray.remote(
        _AsyncWorkerActorWithChild if in_child_process else _AsyncWorkerActor if is_async else _WorkerActor
    )
    share = pool.slots_per_bundle / pool.actors_per_slot  # fraction of a slot, or of all slots of a bundle
    environment = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
    if pool.gpus_per_slot:  # Ray sets one thread for an actor that reserves no CPU, and engine ranks would inherit it
        environment["OMP_NUM_THREADS"] = str(pool.min_cores_per_slot)
    log, plugins = (None, ()) if runs_user_code else (cluster.actor_log_path(name), cluster.plugins)
    handle: Any = shell.options(
        # Ray counts in ten-thousandths and rounds up, so three thirds of a slot would not fit into the slot.
        num_cpus=math.floor(pool.cpus_per_slot * share * 10_000) / 10_000 if not pool.gpus_per_slot else 0,
        num_gpus=pool.gpus_per_slot * share if devices is None else 0,
        max_concurrency=_MAX_CONCURRENCY if is_async else 1,
        scheduling_strategy=slot_scheduling_strategy(pool, index),
    ).remote(name, target, dict(kwargs), plugins, environment, cluster.is_single_node, log, trace.is_enabled())
    cluster.register_actor(handle)
    return ActorProxy(
        handle,
        name,
        deadline_s,
        death_error,
        deadlines,
        log,
        is_multi_node=not cluster.is_single_node,
        is_async=is_async,
    )


def spawn_unpinned(
    cluster: Cluster,
    target: str,
    kwargs: Mapping[str, Any],
    *,
    options: Mapping[str, Any],
    name: str,
    deadline_s: float,
) -> ActorProxy:
    """Start an async actor that Ray places according to its options, and not in a reserved slot.

    Args:
        cluster: Cluster of the run.
        target: Class of the wrapped object, as "module:Class".
        kwargs: Keyword arguments of its constructor. They must be picklable.
        options: Ray's actor options, such as num_cpus.
        name: Name of the process in messages, logs and traces.
        deadline_s: Seconds that a call may take.

    Returns:
        The proxy through which the driver calls the object.
    """
    shell: Any = ray.remote(_AsyncWorkerActor).options(**options)
    handle = shell.remote(
        name, target, dict(kwargs), cluster.plugins, {}, cluster.is_single_node, None, trace.is_enabled()
    )
    cluster.register_actor(handle)
    return ActorProxy(handle, name, deadline_s, is_multi_node=not cluster.is_single_node, is_async=True)
