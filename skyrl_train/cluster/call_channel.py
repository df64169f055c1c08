"""Calls to an object in another process that share messages.

A Ray call costs about half a millisecond of CPU time at either end, whatever it carries. So calls of one turn of the
event loop leave in one message, and the results that are ready leave in one message, too. `CallChannel` is the end of
the callers, `CallServer` that of the object; what carries the messages is up to their owners.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
import traceback
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple
from uuid import uuid4

from ray import cloudpickle
from ray.exceptions import RayTaskError

from skyrl_train import trace

TRACE_TRACK = "calls"
"""Track of a process's timeline that shows its calls."""


class _Call(NamedTuple):
    number: int
    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class _Result(NamedTuple):
    number: int
    value: Any
    """Return value of the method; None if it raised an exception."""
    error: bytes | None
    """The pickled exception and the text of its traceback, apart from the rest, because unpickling it may fail."""


class Message(NamedTuple):
    """Calls or results that travel together."""

    numbers: tuple[int, ...]
    """The numbers of the calls, with which they can be failed if the content cannot be unpickled."""
    content: bytes
    """The pickled calls or results."""


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
        self._outbox: list[_Call] = []
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
                calls, self._outbox = self._outbox, []
                await self._submit(self._id, self._pack(calls))
        except Exception as error:
            self._fail(error)
        finally:
            self._sending = None

    def _pack(self, calls: Sequence[_Call]) -> Message:
        try:
            return _pack_message(calls)
        except Exception:
            return _pack_message([call for call in calls if self._check_picklable(call)])

    def _check_picklable(self, call: _Call) -> bool:
        try:
            cloudpickle.dumps(call)
        except Exception as error:
            self._resolve(call.number, error=error)
            return False
        return True

    async def _collect_all(self) -> None:
        try:
            while self._unanswered:
                messages, spans = await self._collect(self._id)
                self._on_spans(spans)
                for message in messages:
                    for result in _unpack_results(message):
                        error = None if result.error is None else _unpack_error(result)
                        self._resolve(result.number, result.value, error)
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
        self._outbox = []
        for number in list(self._unanswered):
            self._resolve(number, error=error)


class CallServer:
    """The object's end: starts calls in the order of arrival, and delivers results together."""

    def __init__(self, target: object, deliver: Callable[[str, Message], None]):
        """Serve the methods of an object.

        Args:
            target: The object.
            deliver: Called with a channel's id and results for `CallChannel`, at most once per turn of the event loop.
        """
        self._target = target
        self._deliver = deliver
        self._results: dict[str, list[_Result]] = defaultdict(list)
        self._running: set[asyncio.Task[None]] = set()

    def receive(self, channel: str, message: Message) -> None:
        """Start the calls of a message on the running event loop. All of them fail if one cannot be unpickled."""
        try:
            calls = pickle.loads(message.content)
        except Exception as error:
            for number in message.numbers:
                self._finish(channel, _Result(number, None, _pack_error(error)))
            return
        for call in calls:
            task = asyncio.get_running_loop().create_task(self._run(channel, call))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _run(self, channel: str, call: _Call) -> None:
        try:
            with trace.span(call.method, track=TRACE_TRACK, overlaps=True):
                value = getattr(self._target, call.method)(*call.args, **call.kwargs)
                if inspect.isawaitable(value):
                    value = await value
            result = _Result(call.number, value, None)
        except (Exception, asyncio.CancelledError) as error:
            result = _Result(call.number, None, _pack_error(error))
        self._finish(channel, result)

    def _finish(self, channel: str, result: _Result) -> None:
        if not self._results[channel]:
            asyncio.get_running_loop().call_soon(self._send, channel)
        self._results[channel].append(result)

    def _send(self, channel: str) -> None:
        results = self._results.pop(channel)
        try:
            message = _pack_message(results)
        except Exception:
            message = _pack_message([_checked(result) for result in results])
        self._deliver(channel, message)


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
        """Wait until there are messages for a channel, then return and remove all of them in order.

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
        return self._messages.pop(channel, [])

    def fail(self, error: Exception) -> None:
        """Raise an exception from all further calls of `collect`: no more messages will arrive."""
        self._failure = error
        for channel in list(self._waiting):
            self._wake(channel)

    def _wake(self, channel: str) -> None:
        if (arrived := self._waiting.pop(channel, None)) is not None:
            arrived.set()


def _pack_message(content: Sequence[_Call] | Sequence[_Result]) -> Message:
    numbers = tuple(part.number for part in content)
    return Message(numbers, cloudpickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL))


def _unpack_results(message: Message) -> list[_Result]:
    """Return the results of a message; the same error for all of them if one cannot be unpickled."""
    try:
        results: list[_Result] = pickle.loads(message.content)
    except Exception as error:
        packed = _pack_error(error)
        return [_Result(number, None, packed) for number in message.numbers]
    return results


def _checked(result: _Result) -> _Result:
    """Return the result, or the error with which it cannot be pickled."""
    try:
        cloudpickle.dumps(result)
    except Exception as error:
        return _Result(result.number, None, _pack_error(error))
    return result


def _pack_error(error: BaseException) -> bytes:
    """Return an exception and the text of its traceback; a RuntimeError instead if it cannot be unpickled."""
    text = "".join(traceback.format_exception(error))
    try:
        if isinstance(error, Exception) and not isinstance(error, StopIteration):  # others have meanings for asyncio
            packed: bytes = cloudpickle.dumps((error.with_traceback(None), text))
            pickle.loads(packed)
            return packed
    except Exception:
        pass
    return pickle.dumps((RuntimeError(f"{type(error).__name__}: {error}"), text))


def _unpack_error(result: _Result) -> BaseException:
    assert result.error is not None
    try:
        error, text = pickle.loads(result.error)
    except Exception as unpickling:  # its class is not importable here
        return unpickling
    error.__cause__ = RayTaskError("call", text, error)
    return error  # type: ignore[no-any-return]
