"""Tokens that end responses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from transformers import AutoTokenizer

from skyrl_train.models.stop_tokens import get_stop_tokens, load_stop_configs
from tests.support.base_checkpoints import END_OF_SEQUENCE, END_OF_TURN, save_base_model


def test_all_eos_and_end_of_turn_tokens_stop(tmp_path: Path):
    path = save_base_model(tmp_path, generation={"eos_token_id": [100, 101]})
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert get_stop_tokens(tokenizer, *load_stop_configs(path)) == {100, 101, END_OF_SEQUENCE, END_OF_TURN}
    assert get_stop_tokens(None, SimpleNamespace(eos_token_id=7), SimpleNamespace()) == {7}
