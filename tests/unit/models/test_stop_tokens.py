"""Tokens that end responses, and how exports name them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from skyrl_train.data.chat_templates import TEMPLATES
from skyrl_train.learner.worker import LearnerWorker
from skyrl_train.models.stop_tokens import stop_configs, stop_tokens, write_generation_config
from skyrl_train.testing.tiny_models import byte_tokenizer, save_tiny_model
from tests.support.learner_specs import tiny_spec

END_OF_SEQUENCE, END_OF_TURN = 0, 2
FILE = "generation_config.json"


def save_base_model(folder: Path, *, generation: dict[str, Any] | None) -> str:
    """Save a model that names <|endoftext|> as its end of sequence, whatever `generation` names."""
    save_tiny_model(folder)
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": END_OF_SEQUENCE}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / FILE).unlink()
    if generation is not None:
        (folder / FILE).write_text(json.dumps(generation))
    return str(folder)


def test_all_named_ends_and_the_end_of_turn_stop(tmp_path: Path):
    path = save_base_model(tmp_path, generation={"eos_token_id": [100, 101]})
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert stop_tokens(tokenizer, *stop_configs(path)) == {100, 101, END_OF_SEQUENCE, END_OF_TURN}
    assert stop_tokens(None, SimpleNamespace(eos_token_id=7), SimpleNamespace()) == {7}


@pytest.mark.parametrize(
    ("generation", "ends"),
    [
        ({"eos_token_id": 100, "top_k": 3}, [100, END_OF_TURN]),
        ({"eos_token_id": [101, 100]}, [101, 100, END_OF_TURN]),
        ({"eos_token_id": [END_OF_TURN, 100]}, [END_OF_TURN, 100]),
        ({"top_k": 3}, [END_OF_SEQUENCE, END_OF_TURN]),
        (None, [END_OF_SEQUENCE, END_OF_TURN]),
    ],
)
def test_generation_config_names_the_end_of_turn(generation: dict[str, Any] | None, ends: list[int], tmp_path: Path):
    path = save_base_model(tmp_path / "model", generation=generation)
    write_generation_config(path, AutoTokenizer.from_pretrained(path), tmp_path)
    assert json.loads((tmp_path / FILE).read_text()) == (generation or {}) | {"eos_token_id": ends}


def test_no_generation_config_is_written_without_need(tmp_path: Path):
    path = save_base_model(tmp_path / "model", generation=None)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATES["mistral"]
    write_generation_config(path, tokenizer, tmp_path)
    assert not (tmp_path / FILE).exists()


def test_learner_exports_template_and_its_end_of_turn(tmp_path: Path):
    path = save_base_model(tmp_path / "model", generation={"eos_token_id": [100, END_OF_SEQUENCE]})
    (tmp_path / "model" / "chat_template.jinja").unlink()
    worker = LearnerWorker(replace(tiny_spec(path), chat_template=TEMPLATES["chatml"]), 0, 1)
    worker._build(path)
    worker.export(str(tmp_path / "export"))
    exported = json.loads((tmp_path / "export" / FILE).read_text())
    assert exported["eos_token_id"] == [100, END_OF_SEQUENCE, END_OF_TURN]
    assert AutoTokenizer.from_pretrained(tmp_path / "export").chat_template == TEMPLATES["chatml"]
