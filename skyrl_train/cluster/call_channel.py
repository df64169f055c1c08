"""Calls to an object in another process that share messages.

A Ray call costs about half a millisecond of CPU time at either end, whatever it carries. So calls of one turn of the
event loop leave in one message, and the results that are ready leave in one message, too. `CallChannel` is the end of
the callers, `CallServer` that of the object; what carries the messages is up to their owners.

A message holds a bounded number of calls or bytes, because an event loop does nothing else while it pickles or
unpickles one. The memory of large arrays travels beside the pickled content, so that it is not copied into it.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import pickle
import sys
import traceback
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from itertools import accumulate, count
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

import numpy as np
from ray import cloudpickle
from ray.exceptions import RayTaskError

from skyrl_train import trace

TRACE_TRACK = "calls"
"""Track of a process's timeline that shows its calls."""
_MAX_PARTS = 256
"""Maximum number of calls or results in a message."""
_MAX_BYTES = 4 << 20
"""Size of a message to which no further call or result is added."""
_MAX_COLLECTED_BYTES = 32 << 20
"""Maximum size of several messages that are collected together."""
MIN_BUFFER_BYTES = 64 << 10
"""Size from which memory travels apart. Copying less is cheaper than handling it separately."""

ByteArray = np.ndarray[Any, np.dtype[np.uint8]]


class _Call(NamedTuple):
    number: int
    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class _Result(NamedTuple):
    number: int
    value: Any
    """Return value of the method; None if it raised an exception."""
    error: tuple[bytes, str] | None
    """The pickled exception and the text of its traceback, apart from the rest, because unpickling it may fail."""


class Message(NamedTuple):
    """Calls or results that travel together."""

    numbers: tuple[int, ...]
    """The numbers of the calls, with which they can be failed if the content cannot be unpickled."""
    content: bytes | ByteArray
    """The calls or results, pickled one after another."""
    buffers: tuple[ByteArray, ...] = ()
    """Memory of large arrays, which the content refers to in this order."""

    @property
    def memory(self) -> tuple[memoryview, ...]:
        """The memory of the content and of the buffers."""
        content = memoryview(self.content) if isinstance(self.content, bytes) else self.content.data
        return content, *(buffer.data for buffer in self.buffers)

    @property
    def num_bytes(self) -> int:
        """Size of the content and of the buffers."""
        return sum(part.nbytes for part in self.memory)

    def copy_buffers(self) -> Message:
        """Return the message with a copy of its memory, which the sender may change from now on."""
        return self._replace(buffers=tuple(buffer.copy() for buffer in self.buffers))


class CallChannel:
    """The callers' end: calls of one event loop to one object.

    Calls start in the order in which they were made. While a message is on its way, later calls wait for the next one,
    so that the number of messages falls with the load. While calls are unanswered, one request for results waits at the
    other end.
    """

    def __init__(
        self,
        submit: Callable[[str, Message], Awaitable[object]],
        collect: Callable[[str], Awaitable[tuple[Sequence[Message], Sequence[trace.Span]]]],
        on_spans: Callable[[Sequence[trace.Span]], None] = lambda spans: None,
    ):
        """Create a channel without any call.

        Args:
            submit: Sends the calls of the channel with this id to `CallServer.receive`. An exception fails all calls.
            collect: Waits until results of the channel with this id are ready, and returns them in order, with the
                trace spans of the other process. An exception fails all calls.
            on_spans: Called with these spans.
        """
        self._id = uuid4().hex
        self._submit = submit
        self._collect = collect
        self._on_spans = on_spans
        self._numbers = count()
        self._outbox: deque[_Call] = deque()
        self._unanswered: dict[int, asyncio.Future[Any]] = {}
        self._sending: asyncio.Task[None] | None = None
        self._collecting: asyncio.Task[None] | None = None

    def call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> asyncio.Future[Any]:
        """Call a method of the object, and return a future with its result or exception.

        An exception that the method raised has a RayTaskError with the traceback as its cause. Cancelling the future
        does not cancel the call.
        """
        loop = asyncio.get_running_loop()  # no attribute, so that owners can use it as a weak key of this channel
        future: asyncio.Future[Any] = loop.create_future()
        number = next(self._numbers)
        self._unanswered[number] = future
        self._outbox.append(_Call(number, method, args, kwargs))
        if self._sending is None:
            self._sending = loop.create_task(self._send_all())
        if self._collecting is None:
            self._collecting = loop.create_task(self._collect_all())
        return future

    async def _send_all(self) -> None:
        try:
            while self._outbox:  # in the first turn of this task, so all calls of the turn before are in it
                message = _pack_message(self._outbox, lambda call, error: self._resolve(call.number, error=error))
                if message is not None:
                    await self._submit(self._id, message)
        except Exception as error:
            self._fail(error)
        finally:
            self._sending = None

    async def _collect_all(self) -> None:
        try:
            while self._unanswered:
                messages, spans = await self._collect(self._id)
                self._on_spans(spans)
                for message in messages:
                    results, failure = _unpack_message(message)
                    for result in results:
                        error = None if result.error is None else _unpack_error(*result.error)
                        self._resolve(result.number, result.value, error)
                    for number in message.numbers[len(results) :]:
                        self._resolve(number, error=failure)
                    await asyncio.sleep(0)  # let the callers continue before the next message is unpickled
        except Exception as error:
            self._fail(error)
        finally:
            self._collecting = None

    def _resolve(self, number: int, value: Any = None, error: BaseException | None = None) -> None:
        future = self._unanswered.pop(number, None)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def _fail(self, error: Exception) -> None:
        """Fail all calls: the other end is gone."""
        self._outbox.clear()
        for number in list(self._unanswered):
            self._resolve(number, error=error)


class CallServer:
    """The object's end: starts calls in the order of arrival, and delivers results together.

    A method must not change large arrays that it has returned, because they are read when the results are sent.
    """

    def __init__(self, target: object, deliver: Callable[[str, Message], Awaitable[object]]):
        """Serve the methods of an object.

        Args:
            target: The object.
            deliver: Sends results to the `CallChannel` with this id. Later results wait until it returns.
        """
        self._target = target
        self._deliver = deliver
        self._outboxes: dict[str, deque[_Result]] = {}
        """Results of channels that are being delivered."""
        self._running: set[asyncio.Task[None]] = set()

    def receive(self, channel: str, message: Message) -> None:
        """Start the calls of a message on the running event loop.

        If one cannot be unpickled, it fails, and so do those after it.
        """
        calls, failure = _unpack_message(message)
        for call in calls:
            self._start_task(self._run(channel, call))
        for number in message.numbers[len(calls) :]:
            assert failure is not None
            self._finish(channel, _Result(number, None, _pack_error(failure)))

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _run(self, channel: str, call: _Call) -> None:
        try:
            with trace.span(call.method, track=TRACE_TRACK, overlaps=True):
                value = getattr(self._target, call.method)(*call.args, **call.kwargs)
                if inspect.isawaitable(value):
                    value = await value
            result = _Result(call.number, value, None)
        except (Exception, asyncio.CancelledError, SystemExit) as error:  # an exit would end the loop of all calls
            result = _Result(call.number, None, _pack_error(error))
        self._finish(channel, result)

    def _finish(self, channel: str, result: _Result) -> None:
        if channel not in self._outboxes:
            self._outboxes[channel] = deque()
            self._start_task(self._deliver_all(channel))
        self._outboxes[channel].append(result)

    async def _deliver_all(self, channel: str) -> None:
        outbox = self._outboxes[channel]
        while outbox:
            message = _pack_message(outbox, _replace_unpicklable)
            assert message is not None
            await self._deliver(channel, message)
            await asyncio.sleep(0)  # between the messages of a burst, even if delivery does not wait
        del self._outboxes[channel]


class Mailbox:
    """Messages for channels, until each channel collects its own."""

    def __init__(self) -> None:
        self._messages: dict[str, list[Message]] = defaultdict(list)
        self._waiting: dict[str, asyncio.Event] = {}
        """The channels that wait for messages."""
        self._failure: Exception | None = None

    def put(self, channel: str, message: Message) -> None:
        """Store a message."""
        self._messages[channel].append(message)
        self._wake(channel)

    async def collect(self, channel: str) -> list[Message]:
        """Wait until there are messages for a channel, then return and remove the first ones in order.

        Their size is limited, so that a burst of large results does not need memory for all of them at once.

        A call that still waits for the same channel returns nothing, because its caller was cancelled.

        Raises:
            Exception: The exception of `fail`, once the messages before it were collected.
        """
        self._wake(channel)
        if channel not in self._messages and self._failure is None:
            arrived = self._waiting[channel] = asyncio.Event()
            await arrived.wait()
        if channel not in self._messages and self._failure is not None:
            raise self._failure
        messages = self._messages.pop(channel, [])
        sizes = accumulate(message.num_bytes for message in messages)
        taken = max(1, sum(size <= _MAX_COLLECTED_BYTES for size in sizes))
        if messages[taken:]:
            self._messages[channel] = messages[taken:]
        return messages[:taken]

    def fail(self, error: Exception) -> None:
        """Raise an exception from all further calls of `collect`: no more messages will arrive."""
        self._failure = error
        for channel in list(self._waiting):
            self._wake(channel)

    def _wake(self, channel: str) -> None:
        if (arrived := self._waiting.pop(channel, None)) is not None:
            arrived.set()


P = TypeVar("P", _Call, _Result)


def _pack_message(parts: deque[P], on_error: Callable[[P, Exception], P | None]) -> Message | None:
    """Remove the first parts that fit into a message, and return the message; None if none of them can be pickled.

    Args:
        parts: Calls or results.
        on_error: Called with a part that cannot be pickled; returns a part to send instead, or None.
    """
    numbers: list[int] = []
    buffers: list[ByteArray] = []
    content = io.BytesIO()

    def keep_in_content(buffer: pickle.PickleBuffer) -> bool:
        memory = buffer.raw()
        if memory.nbytes < MIN_BUFFER_BYTES:
            return True
        buffers.append(np.frombuffer(memory, np.uint8))
        return False

    pickler = _Pickler(content, pickle.HIGHEST_PROTOCOL, buffer_callback=keep_in_content)
    while parts and len(numbers) < _MAX_PARTS:
        complete, num_buffers = content.tell(), len(buffers)
        if complete + sum(buffer.nbytes for buffer in buffers) >= _MAX_BYTES:
            break
        try:
            pickler.dump(parts[0])
        except Exception as error:
            content.truncate(complete)
            del buffers[num_buffers:]
            if numbers:  # start the next message with it, because the pickler may refer to what was removed
                break
            replacement = on_error(parts.popleft(), error)
            if replacement is None:
                return None
            parts.appendleft(replacement)
            return _pack_message(parts, on_error)
        numbers.append(parts.popleft().number)
    is_large = len(content.getbuffer()) >= MIN_BUFFER_BYTES
    packed = np.frombuffer(content.getbuffer(), np.uint8) if is_large else content.getvalue()
    return Message(tuple(numbers), packed, tuple(buffers))


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler that also leaves the memory of large tensors out of the content."""

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and type(value) is torch.Tensor and _owns_plain_memory(value):
            memory = value.detach().reshape(-1).view(torch.uint8).numpy()
            return _build_tensor, (pickle.PickleBuffer(memory), value.dtype, tuple(value.shape))
        return super().reducer_override(value)


def _owns_plain_memory(tensor: Any) -> bool:
    """Return True if a tensor is only its memory, which is large, on the CPU, and not shared with other tensors."""
    return bool(
        tensor.device.type == "cpu"
        and tensor.layout is sys.modules["torch"].strided
        and tensor.nbytes >= MIN_BUFFER_BYTES
        and tensor.untyped_storage().nbytes() == tensor.nbytes
        and tensor.is_contiguous()
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and not vars(tensor)
    )


def _build_tensor(memory: Any, dtype: Any, shape: Sequence[int]) -> Any:
    torch = sys.modules["torch"]  # imported with the dtype
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def _unpack_message(message: Message) -> tuple[list[Any], Exception | None]:
    """Return the parts of a message before the first one that cannot be unpickled, and the error with which it failed.

    Buffers in Ray's object store, which are read-only, are copied. Arrays are then as writable as they were, and do
    not occupy the store, which is small.
    """
    buffers = [buffer if buffer.flags.writeable else buffer.copy() for buffer in message.buffers]
    unpickler = pickle.Unpickler(io.BytesIO(message.memory[0]), buffers=buffers)
    parts: list[Any] = []
    try:
        while len(parts) < len(message.numbers):
            parts.append(unpickler.load())
    except Exception as error:
        return parts, error
    return parts, None


def _replace_unpicklable(result: _Result, error: Exception) -> _Result:
    return _Result(result.number, None, _pack_error(error))


def _pack_error(error: BaseException) -> tuple[bytes, str]:
    """Return an exception and the text of its traceback; a RuntimeError instead if it cannot be unpickled."""
    text = "".join(traceback.format_exception(error))
    try:
        if isinstance(error, Exception) and not isinstance(error, StopIteration):  # others have meanings for asyncio
            packed: bytes = cloudpickle.dumps(error.with_traceback(None))
            pickle.loads(packed)
            return packed, text
    except Exception:
        pass
    return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}")), text


def _unpack_error(packed: bytes, text: str) -> BaseException:
    try:
        error = pickle.loads(packed)
    except Exception:  # its class is not importable here
        error = RuntimeError(text.splitlines()[-1])
    error.__cause__ = RayTaskError("call", text, error)
    return error  # type: ignore[no-any-return]
