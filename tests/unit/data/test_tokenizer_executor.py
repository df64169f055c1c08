"""Tokenizer calls of conversations: short ones run on the event loop in small portions, long ones in a thread."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from contextlib import suppress
from typing import Any

import pytest

from skyrl_train.data.tokenizer_executor import MIN_THREAD_CHARS, TokenizerExecutor, tokenizer_executor
from skyrl_train.errors import DataError
from skyrl_train.testing.tiny_models import byte_tokenizer


def test_short_calls_run_on_the_loop_in_order():
    tokenizer = byte_tokenizer()
    executor, calls_seen = TokenizerExecutor(tokenizer), []

    def encode(used: Any, text: str) -> list[int]:
        calls_seen.append((text, threading.current_thread(), used))
        if text == "bad":
            raise DataError(text)
        ids: list[int] = used.encode(text)
        return ids

    async def run() -> None:
        canceled = asyncio.ensure_future(executor.run(1, encode, "never mind"))
        calls = [asyncio.ensure_future(executor.run(3, encode, text)) for text in ("one", "bad", "two")]
        long = asyncio.ensure_future(executor.run(MIN_THREAD_CHARS, encode, "long"))
        canceled.cancel()
        one, bad, two = await asyncio.gather(*calls, return_exceptions=True)
        assert (one, two, await long) == tuple(tokenizer.encode(text) for text in ("one", "two", "long"))
        assert isinstance(bad, DataError)

    for _ in (1, 2):  # each in a new event loop
        calls_seen.clear()
        asyncio.run(run())
        main = threading.main_thread()
        on_loop = [text for text, thread, used in calls_seen if thread is main and used is tokenizer]
        assert on_loop == ["one", "bad", "two"], "a canceled call is not executed"
        ((text, _, used),) = [call for call in calls_seen if call[1] is not main]
        assert text == "long" and used is not tokenizer, "other code may change padding of the original"


@pytest.mark.parametrize("size", [0, MIN_THREAD_CHARS - 1])
def test_many_texts_do_not_block_the_loop(size: int):
    """Each iteration of the loop processes a portion, so another task runs many times before all calls are done."""
    executor, done = TokenizerExecutor(byte_tokenizer()), []

    async def run() -> int:
        calls = [asyncio.ensure_future(executor.run(size, lambda _, i=i: done.append(i))) for i in range(2000)]
        iterations = 0
        while not all(call.done() for call in calls):
            await asyncio.sleep(0)
            iterations += 1
        return iterations

    iterations = asyncio.run(run())
    assert done == list(range(2000))
    assert iterations >= (7 if size == 0 else 100)


def test_closed_loop_does_not_block_other_loops():
    executor = TokenizerExecutor(byte_tokenizer())
    loop = asyncio.new_event_loop()
    unfinished = loop.create_task(executor.run(1, lambda tokenizer: 1))
    loop.call_soon(loop.stop)
    loop.run_forever()
    unfinished.cancel()
    loop.close()

    async def run() -> int:
        async with asyncio.timeout(10):
            return await executor.run(1, lambda tokenizer: 2)

    assert asyncio.run(run()) == 2


def test_thread_copy_follows_tokenizer_changes():
    class UncopyableTokenizer:
        """A tokenizer with a lock, which cannot be copied."""

        chat_template, special_tokens_map = "a", {}

        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __len__(self) -> int:
            return 3

    async def template(tokenizer: Any) -> Any:
        return await tokenizer_executor(tokenizer).run(MIN_THREAD_CHARS, lambda used: used.chat_template)

    def raise_stop_iteration(tokenizer: Any) -> None:
        raise StopIteration("here")

    uncopyable, tokenizer = UncopyableTokenizer(), byte_tokenizer()
    assert asyncio.run(template(uncopyable)) == "a"
    assert tokenizer_executor(tokenizer) is tokenizer_executor(tokenizer)
    assert asyncio.run(template(tokenizer)) == tokenizer.chat_template
    tokenizer.chat_template = "another"
    assert asyncio.run(template(tokenizer)) == "another"
    for size in (1, MIN_THREAD_CHARS):
        with pytest.raises(RuntimeError, match="StopIteration"):
            asyncio.run(tokenizer_executor(tokenizer).run(size, raise_stop_iteration))


@pytest.mark.parametrize("size", [1, MIN_THREAD_CHARS])
def test_failed_call_is_freed_immediately(size: int):
    """The traceback of an error must not keep the arguments of the call alive."""

    class Conversation:
        pass

    async def run() -> bool:
        conversation = Conversation()
        reference = weakref.ref(conversation)

        def fail(tokenizer: Any, conversation: Conversation) -> None:
            raise DataError("no")

        with suppress(DataError):
            await TokenizerExecutor(byte_tokenizer()).run(size, fail, conversation)
        del conversation
        await asyncio.sleep(0.01)  # the thread frees its last call
        return reference() is None

    gc.collect()
    gc.disable()
    try:
        assert asyncio.run(run())
    finally:
        gc.enable()
