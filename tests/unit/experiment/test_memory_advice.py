"""A run that has no memory left is told what would need less."""

from __future__ import annotations

import re

import pytest
import torch

from skyrl_train.config.prepare import prepare
from skyrl_train.config.schema import Config
from skyrl_train.experiment.memory_fit import advice, out_of_memory


def config(path: str, *overrides: str) -> Config:
    keys = [f"trainer.policy.model.path={path}", "trainer.strategy=fsdp2", *overrides]
    return prepare(keys, has_accelerator=False).config


@pytest.mark.fault("F34")
def test_three_settings_are_named_with_what_each_saves(tiny_model_path: str):
    cfg = config(tiny_model_path, "trainer.micro_train_batch_size_per_gpu=8", "trainer.gradient_checkpointing=false")
    with pytest.raises(RuntimeError) as failed:
        torch.empty(1 << 60)
    failed.value.raised_in = "policy rank 1.update"  # type: ignore[attr-defined]
    error = out_of_memory(failed.value, cfg)
    assert error is not None
    assert str(error).startswith("policy rank 1.update: ")
    named = re.findall(r"([\w.]+=\w+) saves about ([\d.e-]+) GiB", str(error))
    assert len(named) == 3
    assert "trainer.micro_train_batch_size_per_gpu=4" in dict(named)
    sizes = [float(size) for _, size in named]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] > 0


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["trainer.max_tokens_per_microbatch=4096"], "trainer.max_tokens_per_microbatch=2048"),
        (["trainer.micro_train_batch_size_per_gpu=16"], "trainer.micro_train_batch_size_per_gpu=8"),
    ],
)
def test_the_size_that_counts_is_halved(tiny_model_path: str, overrides: list[str], wanted: str):
    assert wanted in advice(config(tiny_model_path, *overrides))


def test_other_errors_are_left_alone(tiny_model_path: str):
    cfg = config(tiny_model_path)
    assert out_of_memory(ValueError("x"), cfg) is None
    assert out_of_memory(RuntimeError("shapes do not match"), cfg) is None
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), cfg) is not None
