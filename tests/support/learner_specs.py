"""Learners for tests: a tiny model, one rank, every setting explicit."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from skyrl_train.algorithms.kl import k3
from skyrl_train.algorithms.losses import clipped_surrogate
from skyrl_train.algorithms.policy_objective import PolicyObjective
from skyrl_train.algorithms.reductions import assign_loss_weights, token_mean
from skyrl_train.config.choices import STRATEGIES
from skyrl_train.config.schema import FSDPConfig, OptimizerConfig
from skyrl_train.data.batch import TrainBatch
from skyrl_train.learner.worker import LearnerSpec
from tests.support.padded_reference import ragged_batch

FULL_OBJECTIVE = PolicyObjective(partial(clipped_surrogate, eps_clip_low=0.2, eps_clip_high=0.2), k3, 0.1, 0.01)
"""Objective with all terms on: policy loss, KL and entropy."""


def tiny_spec(model_path: str, **changes: Any) -> LearnerSpec:
    """Return a spec with float32 on one CPU thread, plain AdamW and all terms of the loss."""
    fields: dict[str, Any] = {
        "model_path": model_path,
        "strategy": STRATEGIES["single"],
        "device": "cpu",
        "dtype": "float32",
        "seed": 0,
        "threads": 1,
        "fsdp_config": FSDPConfig(),
        "optimizer_config": OptimizerConfig(lr=1e-3),
        "total_steps": 10,
        "objective": FULL_OBJECTIVE,
        "gradient_checkpointing": False,
        "gradient_checkpointing_use_reentrant": False,
        "model_config_kwargs": {},
        "rope_scaling": None,
        "rope_theta": None,
        "rendezvous_s": 60.0,
        "update_s": 60.0,
        "model_dtype": "float32",
        "weight_transfer_threshold_cuda_ipc_GB": 1 / 1024,
    }
    return LearnerSpec(**fields | changes)


def policy_batch(lengths: tuple[int, ...] = (9, 4, 12, 9, 2, 7, 9, 5), seed: int = 0) -> TrainBatch:
    """Return sequences with everything that the full objective reads, two per group."""
    return with_targets(ragged_batch(lengths, seed=seed), seed)


def with_targets(batch: TrainBatch, seed: int = 0) -> TrainBatch:
    """Return a copy of the batch with random values for everything that the full objective reads."""
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> torch.Tensor:
        return torch.randn(len(batch.input_ids), generator=generator) * scale * batch.loss_mask

    return assign_loss_weights(batch, partial(token_mean, max_seq_len=1)).with_tokens(
        advantages=noise(1.0),
        old_logprobs=noise(0.1) - 5.0,
        ref_logprobs=noise(0.1) - 5.0,
        rollout_logprobs=noise(0.1) - 5.0,
    )
