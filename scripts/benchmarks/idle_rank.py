"""A rank that receives its part of a batch and computes nothing, for control_plane.py."""

from __future__ import annotations

from typing import Any

import torch

from skyrl_train.metrics import Metrics


class IdleRank:
    """A rank with the methods of a LearnerWorker that a step calls."""

    def forward(self, micro_batches: list[Any], num_micro_batches: int, share_prompts: bool = False) -> torch.Tensor:
        return torch.zeros(sum(len(batch.input_ids) for batch in micro_batches))

    def update(self, mini_batch: Any) -> dict[str, Any]:
        assert all(len(batch) for batch in mini_batch.micro_batches)
        return Metrics().to_dict()
