"""Steps as a probe measures them, and their configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_train.config.prepare import prepare_config
from skyrl_train.config.schema import Config
from skyrl_train.entrypoints.probe_estimate import MeasuredStep

FIXED_S, UPDATE_S, TOKEN_S, SYNC_S, REST_S = 0.5, 0.3, 0.001, 0.25, 0.125
TOKENS = 100
"""Number of tokens in the responses to one prompt."""


def measured_step(
    prompts: int, others: Mapping[str, float] | None = None, *, mini_batch: int = 4, noise: float = 1.0
) -> MeasuredStep:
    """Return a step whose phases take the constants' times. `others` are metrics that replace these."""
    tokens, updates = prompts * TOKENS, -(-prompts // mini_batch)
    seconds = {
        "generate": FIXED_S + TOKEN_S * tokens,
        "score": TOKEN_S * tokens,
        "update": UPDATE_S * updates + 2 * TOKEN_S * tokens,
        "publish": SYNC_S,
    }
    row = {f"timing/{name}_s": value * noise for name, value in seconds.items()}
    row["timing/step_s"] = (sum(seconds.values()) + REST_S) * noise
    row |= {"rollouts/tokens": tokens, "rollouts/trajectories": 4.0 * prompts, "policy/optimizer_steps": updates}
    row |= {"engines/tokens_per_s": 500.0, "response/mean_tokens": 25.0, "response/max_tokens": 32.0}
    return MeasuredStep(prompts, row | dict(others or {}))


def config(**values: Any) -> Config:
    """Return a configuration with 8 prompts per step on a CPU."""
    keys = {"trainer.train_batch_size": 8, "trainer.policy_mini_batch_size": 4} | values
    return prepare_config([f"{key}={value}" for key, value in keys.items()], has_accelerator=False).config
