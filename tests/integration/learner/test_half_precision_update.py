"""Promise 1 for a pure bfloat16 model: its error is at most twice that of a padded run in bfloat16."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from skyrl_train.algorithms.losses import clipped_surrogate
from skyrl_train.algorithms.policy_objective import PolicyObjective
from skyrl_train.data.batch import TrainBatch
from skyrl_train.metrics import Metrics
from skyrl_train.models.logprob_model import LogprobModel
from skyrl_train.testing.tiny_models import tiny_model
from tests.support.double_precision import double_precision
from tests.support.learner_specs import with_targets
from tests.support.padded_reference import grouped_batch, padded_scores

GROUPS = 4 * ((7, (15, 20, 13)), (4, (16, 16)), (12, (14, 18, 15, 12)), (3, (20,)), (5, (9, 11)))
"""Prompt length and lengths of responses; 716 tokens are loss tokens."""
OBJECTIVE = PolicyObjective(partial(clipped_surrogate, eps_clip_low=0.2, eps_clip_high=0.2), entropy_loss_coef=0.01)
"""On-policy and without KL: rounding then moves no token across a bound, where its gradient would jump."""


@cache
def make_batch() -> TrainBatch:
    """Return a batch with advantages of 1: gradients of the head's chunks then add up instead of canceling."""
    targets = with_targets(grouped_batch(GROUPS))
    return targets.with_tokens(old_logprobs=None, advantages=targets.loss_mask.float())


def loss(logprobs: Tensor, entropy: Tensor | None) -> Tensor:
    return OBJECTIVE(make_batch(), logprobs, entropy, int(make_batch().loss_mask.sum()), Metrics())


def rounded_model(kind: str, dtype: torch.dtype) -> Any:
    """Return a model whose weights are bfloat16 numbers; it is untied, so that the head has its own gradient."""
    model: Any = tiny_model(kind, dtype=torch.bfloat16, tied=False)
    return model.to(dtype)


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: parameter.grad.double() for name, parameter in model.named_parameters()}


@cache
def padded_gradients(kind: str, dtype: torch.dtype) -> dict[str, Tensor]:
    model = rounded_model(kind, dtype)
    model.set_attn_implementation("sdpa")
    loss(*padded_scores(model, make_batch())).backward()
    return gradients(model)


@pytest.mark.parametrize("shares", [False, True], ids=["packed", "shared_prompts"])
@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_bfloat16_gradient_is_as_accurate_as_padded_one(kind: str, shares: bool) -> None:
    batch = make_batch()
    model = rounded_model(kind, torch.bfloat16)
    logprob_model = LogprobModel(model, chunk_bytes=1)  # one row per chunk
    inputs = logprob_model.lay_out(batch, batch.shared_prompt_lengths() if shares else None)
    scores = logprob_model(inputs, True)
    loss(scores.logprobs, scores.entropy).backward()
    with double_precision():
        exact = padded_gradients(kind, torch.float64)
    padded, actual = padded_gradients(kind, torch.bfloat16), gradients(model)
    total_norm = torch.stack([gradient.norm() for gradient in exact.values()]).norm()
    for name, gradient in exact.items():
        error, allowed = float((actual[name] - gradient).norm()), float((padded[name] - gradient).norm())
        assert error <= 2 * max(allowed, 1e-4 * float(total_norm)), name
