"""What conversations ask of a tokenizer: the short in the event loop, so much in a turn, the long in a thread."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from contextlib import suppress
from typing import Any

import pytest

from skyrl_train.errors import DataError
from skyrl_train.rollouts.conversation import MIN_THREAD_CHARS, TokenizerExecutor, tokenizer_executor
from skyrl_train.testing.tiny_models import byte_tokenizer


def test_short_calls_run_on_the_loop_in_order():
    tokenizer = byte_tokenizer()
    tokenizing, seen = TokenizerExecutor(tokenizer), []

    def encode(own: Any, text: str) -> list[int]:
        seen.append((text, threading.current_thread(), own))
        if text == "bad":
            raise DataError(text)
        ids: list[int] = own.encode(text)
        return ids

    async def run() -> None:
        cut = asyncio.ensure_future(tokenizing.run(1, encode, "never mind"))
        calls = [asyncio.ensure_future(tokenizing.run(3, encode, text)) for text in ("one", "bad", "two")]
        long = asyncio.ensure_future(tokenizing.run(MIN_THREAD_CHARS, encode, "long"))
        cut.cancel()
        one, bad, two = await asyncio.gather(*calls, return_exceptions=True)
        assert (one, two, await long) == tuple(tokenizer.encode(text) for text in ("one", "two", "long"))
        assert isinstance(bad, DataError)

    for _ in (1, 2):  # in a loop of its own each
        seen.clear()
        asyncio.run(run())
        here = [text for text, thread, own in seen if thread is threading.main_thread() and own is tokenizer]
        assert here == ["one", "bad", "two"], "one that was cancelled is not done"
        ((text, _, own),) = [one for one in seen if one[1] is not threading.main_thread()]
        assert text == "long" and own is not tokenizer, "others may set its padding meanwhile"


@pytest.mark.parametrize("size", [0, MIN_THREAD_CHARS - 1])
def test_many_texts_do_not_block_the_loop(size: int):
    """Each turn of the loop does its share: with a task that counts turns, that many more of them."""
    tokenizing, done = TokenizerExecutor(byte_tokenizer()), []

    async def run() -> int:
        calls = [asyncio.ensure_future(tokenizing.run(size, lambda _, at=at: done.append(at))) for at in range(2000)]
        turns = 0
        while not all(call.done() for call in calls):
            await asyncio.sleep(0)
            turns += 1
        return turns

    turns = asyncio.run(run())
    assert done == list(range(2000))
    assert turns >= (7 if size == 0 else 100)


def test_closed_loop_does_not_block_other_loops():
    tokenizing = TokenizerExecutor(byte_tokenizer())
    loop = asyncio.new_event_loop()
    asked = loop.create_task(tokenizing.run(1, lambda tokenizer: 1))
    loop.call_soon(loop.stop)
    loop.run_forever()
    asked.cancel()
    loop.close()

    async def run() -> int:
        async with asyncio.timeout(10):
            return await tokenizing.run(1, lambda tokenizer: 2)

    assert asyncio.run(run()) == 2


def test_thread_copy_follows_tokenizer_changes():
    class Own:
        """With what no copy can be made of."""

        chat_template, special_tokens_map = "a", {}

        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __len__(self) -> int:
            return 3

    async def template(tokenizer: Any) -> Any:
        return await tokenizer_executor(tokenizer).run(MIN_THREAD_CHARS, lambda own: own.chat_template)

    def stops(tokenizer: Any) -> None:
        raise StopIteration("here")

    own, tokenizer = Own(), byte_tokenizer()
    assert asyncio.run(template(own)) == "a"
    assert tokenizer_executor(tokenizer) is tokenizer_executor(tokenizer)
    assert asyncio.run(template(tokenizer)) == tokenizer.chat_template
    tokenizer.chat_template = "another"
    assert asyncio.run(template(tokenizer)) == "another"
    for size in (1, MIN_THREAD_CHARS):
        with pytest.raises(RuntimeError, match="StopIteration"):
            asyncio.run(tokenizer_executor(tokenizer).run(size, stops))


@pytest.mark.parametrize("size", [1, MIN_THREAD_CHARS])
def test_what_failed_is_let_go_of_at_once(size: int):
    """An error's traceback holds the frames that it went through, with all that they hold."""

    class Conversation:
        pass

    async def run() -> bool:
        asked = Conversation()
        gone = weakref.ref(asked)

        def fails(tokenizer: Any, conversation: Conversation) -> None:
            raise DataError("no")

        with suppress(DataError):
            await TokenizerExecutor(byte_tokenizer()).run(size, fails, asked)
        del asked
        await asyncio.sleep(0.01)  # a thread lets go of what it did last
        return gone() is None

    gc.collect()
    gc.disable()
    try:
        assert asyncio.run(run())
    finally:
        gc.enable()
