"""Wrappers over an engine that answers from a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tensordict import TensorDict

from skyrl_train.tensordict.containers import ChatHistory
from skyrl_train.tensordict.history import History
from skyrl_train.tensordict.wrappers.base import LLMWrapperBase
from skyrl_train.testing.scripted_engine import ScriptedEngine
from skyrl_train.testing.tiny_models import byte_tokenizer

TOKENIZER = byte_tokenizer()
END = TOKENIZER.eos_token_id


def said(text: str) -> list[int]:
    return [*TOKENIZER(text)["input_ids"], END]


@pytest.fixture
def wrap() -> Callable[..., LLMWrapperBase]:
    """A wrapper whose engine answers every prompt with `answer`: a function of the request, or a text."""

    def make(answer: Any = " yes\n", **settings: Any) -> LLMWrapperBase:
        script = answer if callable(answer) else lambda request: said(answer)
        settings.setdefault("tokenizer", TOKENIZER)
        return LLMWrapperBase(ScriptedEngine(script), **settings)

    return make


@pytest.fixture
def chats() -> TensorDict:
    """Two conversations of different lengths."""
    history = History.from_chats(
        [
            [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}],
            [{"role": "user", "content": "hi"}],
        ]
    )
    return TensorDict(history=ChatHistory(prompt=history, batch_size=(2,)), batch_size=(2,))
