"""Templates and tokens beside the event loop: what conversations ask for in one of its turns is one piece of work."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")
_Asked = tuple[Callable[[Any], Any], "asyncio.Future[Any]"]


class TokenizerThread:
    """One thread that works with a copy of a tokenizer.

    Whoever else has the tokenizer may set its padding or truncation, which would hold for what is being encoded here.
    """

    def __init__(self, tokenizer: Any):
        self._thread = ThreadPoolExecutor(1, "tokenizer")
        self._tokenizer: Future[Any] = self._thread.submit(copy.deepcopy, tokenizer)
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
        self._thread.submit(self._work, loop, self._asked.pop(loop))

    def _work(self, loop: asyncio.AbstractEventLoop, asked: list[_Asked]) -> None:
        tokenizer = self._tokenizer.result()
        told = [partial(_tell, answer, *_outcome(function, tokenizer)) for function, answer in asked]
        loop.call_soon_threadsafe(_call_all, told)


def _outcome(function: Callable[[Any], T], tokenizer: Any) -> tuple[T | None, BaseException | None]:
    try:
        return function(tokenizer), None
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
