"""Probes of engine and trainer: after every sync, once before the first step, or never."""

from __future__ import annotations

import math
from typing import Any

import pytest

from skyrl_train.config.hydra import load_preset
from skyrl_train.experiment.publisher import build_probe

PROMPTS = [[1, 2, 3], [4]]
FLOAT32 = ["generator.model_dtype=float32", "trainer.bf16=false"]


def probe_of(*overrides: str, prompts: Any = PROMPTS) -> Any:
    learner: Any = type("Learner", (), {"sequence_logprobs": None})()
    return build_probe(load_preset(["device=cpu", *overrides]), learner, prompts)


@pytest.mark.parametrize("half", [["generator.model_dtype=bfloat16", "trainer.bf16=false"], ["trainer.bf16=true"]])
def test_half_precision_probes_first_sync(half: list[str]):
    once = probe_of(*FLOAT32, *half)
    assert (once.every_sync, once.tolerance, once.mean_tolerance) == (False, math.inf, 0.1)
    assert not once.self_test
    assert once.token_ids == [[1, 2, 3]]  # a single token has no log-prob
    assert probe_of(*FLOAT32, *half, "generator.weight_sync_check=off") is None
    every = probe_of(*FLOAT32, *half, "generator.weight_sync_check=probe")
    assert every.every_sync and every.self_test
    assert (every.tolerance, every.mean_tolerance) == (0.25, 0.1)


def test_float32_probes_only_if_configured():
    assert probe_of(*FLOAT32) is None
    every = probe_of(*FLOAT32, "generator.weight_sync_check=probe")
    assert (every.every_sync, every.tolerance, every.mean_tolerance) == (True, 1e-4, math.inf)


def test_single_token_prompts_are_not_probed():
    assert probe_of("generator.weight_sync_check=probe", prompts=[[4]]) is None
