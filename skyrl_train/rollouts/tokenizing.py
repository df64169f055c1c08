"""Templates and tokens of many conversations: what is short is done in the event loop, what is long in a thread."""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

from skyrl_train.tasks import unwatched

T = TypeVar("T")
_Asked = tuple[int, Callable[[Any], Any], "asyncio.Future[Any]"]
LONG = 1 << 14
"""Characters or tokens from which on a text is not for the event loop: some milliseconds."""
_PER_TURN, _EACH = 1 << 16, 1 << 10
"""Characters in one turn of the event loop, and what a call counts beside its own: some ten milliseconds in all."""
_TOKENIZINGS: WeakKeyDictionary[Any, Tokenizing] = WeakKeyDictionary()


def tokenizing_of(tokenizer: Any) -> Tokenizing:
    """The one of this tokenizer."""
    found = _TOKENIZINGS.get(tokenizer)
    if found is None:
        found = _TOKENIZINGS[tokenizer] = Tokenizing(tokenizer)
    return found


class Tokenizing:
    """A tokenizer as thousands of conversations use it at a time: what they ask is done in the order in which it came,
    as much in one turn of the event loop as leaves time for what else there is.

    Short texts are not for a thread: one that lets go of the interpreter's lock for microseconds, again and again, as a
    tokenizer does, keeps it from the event loop, which waits for it after every array and every pipe.

    The thread has a copy of its own, made anew where template or tokens have changed: whoever else has the tokenizer
    may set its padding or truncation, which would hold for what is being encoded there.
    """

    def __init__(self, tokenizer: Any):
        self._original = ref(tokenizer)
        self._asked: WeakKeyDictionary[asyncio.AbstractEventLoop, deque[_Asked]] = WeakKeyDictionary()
        self._thread = ThreadPoolExecutor(1, "tokenizer")
        self._copied, self._state = _copied(tokenizer), _state(tokenizer)

    async def run(self, size: int, function: Callable[..., T], *args: Any) -> T:
        """`function(tokenizer, *args)`, or what it raises. `size`: how many characters or tokens go through it."""
        return await self._answer(size, partial(_called, function, args))  # type: ignore[no-any-return]

    def _answer(self, size: int, work: Callable[[Any], Any]) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        if size >= LONG:
            return loop.run_in_executor(self._thread, work, self._own())
        asked = self._asked.setdefault(loop, deque())
        if not asked:
            loop.call_soon(self._work, loop)
        answer = unwatched(loop.create_future())
        asked.append((_EACH + size, work, answer))
        return answer

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        asked, done, tokenizer = self._asked[loop], 0, self._original()
        while asked and done < _PER_TURN:
            size, work, answer = asked.popleft()
            if not answer.done():  # whoever asked was cancelled
                done += size
                try:
                    answer.set_result(work(tokenizer))
                except BaseException as error:
                    answer.set_exception(error)
            del work, answer  # an error's traceback keeps this frame, which would keep the error
        if asked:
            loop.call_soon(self._work, loop)

    def _own(self) -> Any:
        """The thread's copy."""
        original = self._original()
        if original is not None and (state := _state(original)) != self._state:
            self._copied, self._state = _copied(original), state
        return self._copied


def _copied(tokenizer: Any) -> Any:
    try:
        return copy.deepcopy(tokenizer)
    except Exception:  # one of a user's own, with a lock or a file
        return tokenizer


def _state(tokenizer: Any) -> Any:
    return getattr(tokenizer, "chat_template", None), len(tokenizer), dict(tokenizer.special_tokens_map)


def _called(function: Callable[..., T], args: Any, tokenizer: Any) -> T:
    """What it returns or raises, but for StopIteration, which no future takes."""
    try:
        return function(tokenizer, *args)
    except StopIteration as error:
        raise RuntimeError(f"StopIteration: {error}") from error
