"""Templates and tokens beside the event loop: what conversations ask for in one of its turns is one piece of work."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

T = TypeVar("T")
_Asked = tuple[Callable[[Any], Any], "asyncio.Future[Any]"]
_THREADS: WeakKeyDictionary[Any, TokenizerThread] = WeakKeyDictionary()


def tokenizer_thread(tokenizer: Any) -> TokenizerThread:
    """The one of this tokenizer."""
    found = _THREADS.get(tokenizer)
    if found is None:
        found = _THREADS[tokenizer] = TokenizerThread(tokenizer)
    return found


class TokenizerThread:
    """One thread that works with a copy of a tokenizer, made anew where its template or its tokens have changed.

    Whoever else has the tokenizer may set its padding or truncation, which would hold for what is being encoded here.
    """

    def __init__(self, tokenizer: Any):
        self._thread = ThreadPoolExecutor(1, "tokenizer")
        self._original = ref(tokenizer)
        self._copied, self._state = _copied(tokenizer), _state(tokenizer)
        self._asked: WeakKeyDictionary[asyncio.AbstractEventLoop, list[_Asked]] = WeakKeyDictionary()

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """`function(tokenizer, *args)`, or what it raises."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        asked = self._asked.setdefault(loop, [])
        if not asked:
            loop.call_soon(self._send, loop)
        asked.append((lambda tokenizer: function(tokenizer, *args), answer))
        return await answer

    def _send(self, loop: asyncio.AbstractEventLoop) -> None:
        original = self._original()
        if original is not None and (state := _state(original)) != self._state:
            self._copied, self._state = _copied(original), state
        self._thread.submit(_work, loop, self._asked.pop(loop), self._copied)


def _copied(tokenizer: Any) -> Any:
    try:
        return copy.deepcopy(tokenizer)
    except Exception:  # one of a user's own, with a lock or a file
        return tokenizer


def _state(tokenizer: Any) -> Any:
    return getattr(tokenizer, "chat_template", None), len(tokenizer), dict(tokenizer.special_tokens_map)


def _work(loop: asyncio.AbstractEventLoop, asked: list[_Asked], tokenizer: Any) -> None:
    told = [partial(_tell, answer, *_outcome(function, tokenizer)) for function, answer in asked]
    loop.call_soon_threadsafe(_call_all, told)


def _outcome(function: Callable[[Any], T], tokenizer: Any) -> tuple[T | None, BaseException | None]:
    try:
        return function(tokenizer), None
    except StopIteration as error:  # which a future takes for its own
        return None, RuntimeError(f"StopIteration: {error}")
    except BaseException as error:
        return None, error


def _tell(answer: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if answer.done():  # whoever asked was cancelled
        return
    if error is None:
        answer.set_result(value)
    else:
        answer.set_exception(error)


def _call_all(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()
