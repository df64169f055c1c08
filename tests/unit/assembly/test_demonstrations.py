from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.assembly.data import build_demonstrations
from skyrl_train.config.hydra import load
from skyrl_train.errors import DataError
from skyrl_train.testing.tiny_models import byte_tokenizer


@pytest.mark.defect("assistant-first")
def test_an_answer_with_which_a_demonstration_begins_is_learnt(tmp_path: Path):
    messages = [("assistant", "hello"), ("user", "hi"), ("assistant", "yes")]
    rows = tmp_path / "chats.jsonl"
    rows.write_text(json.dumps({"messages": [{"role": role, "content": text} for role, text in messages]}) + "\n")
    (found,), _ = build_demonstrations(load([f"data.train_data=['{rows}']"]), byte_tokenizer())
    learnt = [token for token, mine in zip(found.input_ids, found.loss_mask, strict=True) if mine]
    assert byte_tokenizer().decode(learnt) == "hello<|im_end|>yes<|im_end|>"


@pytest.mark.defect("demonstrations-without-their-row")
@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([{"role": "user", "content": "a \ud800"}, {"role": "assistant", "content": "b"}], "half a surrogate pair"),
        (["hi"], "'hi' is not a message"),
        ([{"role": "assistant", "content": 3}], "is not a message"),
        ([{"role": "user", "content": None}], "the content of a user message is null"),
        ([{"role": "nobody", "content": "a"}], "the chat template does not take these messages: who is nobody"),
        ([{"role": "user", "content": "a"}], "its messages hold no answer"),
        ([], "messages is .*not a list of messages"),
        ("hi", "messages is 'hi', not a list of messages"),
        (None, "no 'messages' among its columns"),
    ],
)
def test_a_row_that_is_no_demonstration_is_named(tmp_path: Path, messages: Any, says: str):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'nobody' %}{{ raise_exception('who is nobody') }}{% endif %}"
        "{% endfor %}" + tokenizer.chat_template
    )
    rows = tmp_path / "chats.jsonl"
    rows.write_text(f"{json.dumps({'messages': [{'role': 'assistant', 'content': 'yes'}]})}\n" + "\n")
    with rows.open("a") as file:
        file.write(json.dumps({"messages": messages}) + "\n")
    with pytest.raises(DataError, match=rf"chats\.jsonl, line 3: .*{says}"):
        build_demonstrations(load([f"data.train_data=['{rows}']"]), tokenizer)
