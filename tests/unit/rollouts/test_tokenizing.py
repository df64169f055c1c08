"""What conversations ask of a tokenizer is done in one thread, together, and answered to whoever asked."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from skyrl_train.errors import DataError
from skyrl_train.rollouts.tokenizing import TokenizerThread, tokenizer_thread
from skyrl_train.testing.tiny_models import byte_tokenizer


def test_what_is_asked_in_one_turn_of_the_loop_is_done_together_beside_it(monkeypatch: pytest.MonkeyPatch):
    tokenizer = byte_tokenizer()
    thread, sent, seen = TokenizerThread(tokenizer), [], []
    send = thread._send

    def watched(loop: asyncio.AbstractEventLoop) -> None:
        sent.append(loop)
        send(loop)

    monkeypatch.setattr(thread, "_send", watched)

    def encode(own: Any, text: str) -> list[int]:
        seen.append((threading.current_thread(), own))
        if text == "bad":
            raise DataError(text)
        ids: list[int] = own.encode(text)
        return ids

    async def run() -> None:
        cut = asyncio.ensure_future(thread.run(encode, "never mind"))
        calls = [asyncio.ensure_future(thread.run(encode, text)) for text in ("one", "bad", "two")]
        await asyncio.sleep(0)
        cut.cancel()
        one, bad, two = await asyncio.gather(*calls, return_exceptions=True)
        assert (one, two) == (tokenizer.encode("one"), tokenizer.encode("two"))
        assert isinstance(bad, DataError)

    for turn in (1, 2):  # in a loop of its own each
        asyncio.run(run())
        assert len(sent) == turn
    (worker,) = {one for one, _ in seen}
    assert worker is not threading.main_thread()
    assert all(own is not tokenizer for _, own in seen), "others may set its padding meanwhile"


def test_a_loop_that_ended_before_it_sent_what_was_asked_holds_up_no_other():
    thread = TokenizerThread(byte_tokenizer())
    loop = asyncio.new_event_loop()
    task = thread.run(lambda tokenizer: 1)
    asked = loop.create_task(task)
    loop.call_soon(loop.stop)
    loop.run_forever()
    asked.cancel()
    loop.close()

    async def run() -> int:
        async with asyncio.timeout(10):
            return await thread.run(lambda tokenizer: 2)

    assert asyncio.run(run()) == 2


def test_a_tokenizer_has_one_thread_which_follows_its_changes_and_need_not_be_copied():
    class Own:
        """With what no copy can be made of."""

        chat_template, special_tokens_map = "a", {}

        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __len__(self) -> int:
            return 3

    async def template(tokenizer: Any) -> Any:
        return await tokenizer_thread(tokenizer).run(lambda own: own.chat_template)

    def stops(tokenizer: Any) -> None:
        raise StopIteration("here")

    own, tokenizer = Own(), byte_tokenizer()
    assert asyncio.run(template(own)) == "a"
    assert tokenizer_thread(tokenizer) is tokenizer_thread(tokenizer)
    assert asyncio.run(template(tokenizer)) == tokenizer.chat_template
    tokenizer.chat_template = "another"
    assert asyncio.run(template(tokenizer)) == "another"
    with pytest.raises(RuntimeError, match="StopIteration: here"):
        asyncio.run(tokenizer_thread(tokenizer).run(stops))
