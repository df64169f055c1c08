from __future__ import annotations

import json
from pathlib import Path

import pytest

from skyrl_train.assembly.data import build_demonstrations
from skyrl_train.config.hydra import load
from skyrl_train.testing.tiny_models import byte_tokenizer


@pytest.mark.defect("assistant-first")
def test_an_answer_with_which_a_demonstration_begins_is_learnt(tmp_path: Path):
    messages = [("assistant", "hello"), ("user", "hi"), ("assistant", "yes")]
    rows = tmp_path / "chats.jsonl"
    rows.write_text(json.dumps({"messages": [{"role": role, "content": text} for role, text in messages]}) + "\n")
    (found,), _ = build_demonstrations(load([f"data.train_data=['{rows}']"]), byte_tokenizer())
    learnt = [token for token, mine in zip(found.input_ids, found.loss_mask, strict=True) if mine]
    assert byte_tokenizer().decode(learnt) == "hello<|im_end|>yes<|im_end|>"
