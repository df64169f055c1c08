"""Tokenizer calls of many conversations that do not block the event loop for long."""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

from skyrl_train.aio import mark_exception_retrieved

T = TypeVar("T")
_PendingCall = tuple[int, Callable[[Any], Any], "asyncio.Future[Any]"]
"""(size, function of the tokenizer, future of its result)"""
MIN_THREAD_CHARS = 1 << 14
"""Characters or tokens from which a call runs in the thread, as it would block the event loop for milliseconds."""
_CHARS_PER_ITERATION, _CALL_OVERHEAD_CHARS = 1 << 16, 1 << 10
"""Characters per iteration of the event loop, and the overhead of a call in characters: about 10 ms per iteration."""
_EXECUTORS: WeakKeyDictionary[Any, TokenizerExecutor] = WeakKeyDictionary()


def tokenizer_executor(tokenizer: Any) -> TokenizerExecutor:
    """Return the executor of a tokenizer. Equal calls return the same executor."""
    executor = _EXECUTORS.get(tokenizer)
    if executor is None:
        executor = _EXECUTORS[tokenizer] = TokenizerExecutor(tokenizer)
    return executor


class TokenizerExecutor:
    """Runs tokenizer calls of many conversations without blocking the event loop for long.

    Calls on short texts run on the event loop in the order of submission, a bounded number of characters per iteration.
    A thread would release and take the interpreter lock in many short slices, and so delay the event loop.

    Calls on texts of at least MIN_THREAD_CHARS characters run in one thread, on a copy of the tokenizer, because other
    code may change padding or truncation of the original at any time. The copy is renewed when the chat template or
    the tokens have changed.
    """

    def __init__(self, tokenizer: Any):
        """Create the executor of a tokenizer, to which it keeps only a weak reference. Use `tokenizer_executor`."""
        self._original = ref(tokenizer)
        self._pending: WeakKeyDictionary[asyncio.AbstractEventLoop, deque[_PendingCall]] = WeakKeyDictionary()
        self._thread = ThreadPoolExecutor(1, "tokenizer")
        self._thread_copy, self._copied_state = _try_copy(tokenizer), _state(tokenizer)

    async def run(self, size: int, function: Callable[..., T], *args: Any) -> T:
        """Call `function(tokenizer, *args)` without blocking the event loop, and return its result or raise its error.

        StopIteration becomes a RuntimeError.

        Args:
            size: Number of characters or tokens that the call processes. From MIN_THREAD_CHARS on, the function runs in
                another thread on a copy of the tokenizer, otherwise on the event loop.
            function: The function.
            *args: Its other arguments.
        """
        # The future must not be a variable of this frame: it keeps the error, whose traceback keeps this frame.
        return await self._submit(size, partial(_call, function, args))  # type: ignore[no-any-return]

    def _submit(self, size: int, call: Callable[[Any], Any]) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        if size >= MIN_THREAD_CHARS:
            return loop.run_in_executor(self._thread, call, self._current_copy())
        pending = self._pending.setdefault(loop, deque())
        if not pending:
            loop.call_soon(self._run_pending, loop)
        result = mark_exception_retrieved(loop.create_future())
        pending.append((_CALL_OVERHEAD_CHARS + size, call, result))
        return result

    def _run_pending(self, loop: asyncio.AbstractEventLoop) -> None:
        pending, processed, tokenizer = self._pending[loop], 0, self._original()
        while pending and processed < _CHARS_PER_ITERATION:
            size, call, result = pending.popleft()
            if not result.done():  # it is done if the caller was canceled
                processed += size
                try:
                    result.set_result(call(tokenizer))
                except BaseException as error:
                    result.set_exception(error)
            del call, result  # an error's traceback keeps this frame, which would keep the error
        if pending:
            loop.call_soon(self._run_pending, loop)

    def _current_copy(self) -> Any:
        """Return the thread's copy of the tokenizer, renewed if the tokenizer has changed."""
        original = self._original()
        if original is not None and (state := _state(original)) != self._copied_state:
            self._thread_copy, self._copied_state = _try_copy(original), state
        return self._thread_copy


def _try_copy(tokenizer: Any) -> Any:
    try:
        return copy.deepcopy(tokenizer)
    except Exception:  # a custom tokenizer may have a lock or a file
        return tokenizer


def _state(tokenizer: Any) -> Any:
    return getattr(tokenizer, "chat_template", None), len(tokenizer), dict(tokenizer.special_tokens_map)


def _call(function: Callable[..., T], args: Any, tokenizer: Any) -> T:
    """Call the function. Replaces StopIteration, which a future does not accept."""
    try:
        return function(tokenizer, *args)
    except StopIteration as error:
        raise RuntimeError(f"StopIteration: {error}") from error
