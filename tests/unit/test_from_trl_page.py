"""docs/guides/from_trl.md: its fields exist in trl, its keys and defaults exist here, and its program trains."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

import skyrl_train as sk
from skyrl_train.config.keys import all_keys
from skyrl_train.config.prepare import prepare_config
from skyrl_train.testing.tiny_models import save_tiny_model
from tests.support.doc_pages import REPOSITORY, snippets

PAGE = (REPOSITORY / "docs" / "guides" / "from_trl.md").read_text()
FIELDS = PAGE.partition("\n## GRPOConfig fields\n")[2].partition("\n## Defaults that differ\n")[0]
ROWS = re.findall(r"^\| (.+?) \| (.+) \|$", FIELDS, re.MULTILINE)
NAMED_FIELDS = {name for field, _ in ROWS for name in re.findall(r"`(\w+)[`=]", field)}
DEPRECATED = {"vllm_importance_sampling_cap"}
SMALL = """
        "trainer.max_tokens_per_microbatch": 2048,
        "trainer.export_path": "exports",
        "trainer.ckpt_interval": -1,
        "generator.max_num_seqs": 16,
"""


@pytest.fixture(scope="module")
def grpo_config() -> Any:
    return pytest.importorskip("trl.trainer.grpo_config").GRPOConfig


def test_documented_fields_exist_in_trl(grpo_config: Any):
    assert NAMED_FIELDS - {field.name for field in dataclasses.fields(grpo_config)} == set()


def test_every_field_of_grpo_config_is_documented(grpo_config: Any):
    inherited = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    own = {field.name for field in dataclasses.fields(grpo_config)} - inherited
    assert own - NAMED_FIELDS - DEPRECATED == set()


def test_documented_keys_exist():
    keys = re.findall(r"[`\"]((?:trainer|generator|environment|data)\.[\w.]+\w)(?![\w(])", PAGE)
    assert len(keys) > 60
    assert [key for key in keys if key not in all_keys()] == []


def test_documented_settings_are_valid():
    settings = re.findall(r"`((?:trainer|generator)\.[\w.]+=[\w.-]+)`", FIELDS)
    for setting in settings:
        key, _, value = setting.partition("=")
        assert value in str(all_keys()[key].metadata.choices) or re.fullmatch(r"true|false|-?\d+", value), setting


def test_documented_defaults_are_those_of_trl(grpo_config: Any):
    theirs = {field.name: field.default for field in dataclasses.fields(grpo_config)}
    expected = {
        "num_generations": 8,
        "max_completion_length": 512,
        "beta": 0.0,
        "lr_scheduler_type": "linear",
        "weight_decay": 0.0,
        "num_train_epochs": 3.0,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_max": 3.0,
        "vllm_gpu_memory_utilization": 0.3,
        "save_steps": 500,
        "eval_strategy": "no",
    }
    assert {name: theirs[name] for name in expected} == expected


def test_documented_defaults_are_ours():
    ours = {
        "generator.n_samples_per_prompt": 5,
        "generator.sampling_params.max_generate_length": 1024,
        "trainer.max_prompt_length": 512,
        "trainer.algorithm.kl_loss_coef": 0.001,
        "trainer.algorithm.kl_estimator_type": "k3",
        "trainer.policy.optimizer_config.scheduler": "constant_with_warmup",
        "trainer.policy.optimizer_config.weight_decay": 0.01,
        "trainer.epochs": 1,
        "generator.gpu_memory_utilization": 0.8,
        "trainer.ckpt_interval": 10,
        "trainer.eval_interval": 5,
    }
    assert {key: all_keys()[key].default for key in ours} == ours


def test_documented_error_message_is_ours():
    with pytest.raises(sk.ConfigError) as error:
        prepare_config(["num_generations=8"])
    assert snippets("docs/guides/from_trl.md", "text")[-1].strip() in str(error.value)


@pytest.mark.on_demand
@pytest.mark.slow
def test_documented_program_trains(tmp_path: Path):
    path = save_tiny_model(tmp_path / "model")
    rows = [{"prompt": [{"role": "user", "content": f"Say {number}."}]} for number in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (program,) = snippets("docs/guides/from_trl.md")
    for old, new in (
        ("Qwen/Qwen2.5-0.5B-Instruct", path),
        ('"vllm"', '"transformers"'),
        ('max_generate_length": 64', 'max_generate_length": 8'),
        ('        "data.val_data": [],\n', f'        "data.val_data": [],{SMALL}'),
    ):
        assert old in program
        program = program.replace(old, new)
    (tmp_path / "train.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert re.search(r"^2 steps, last reward 1\.00$", done.stdout, re.MULTILINE)
