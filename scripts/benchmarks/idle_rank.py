"""A rank that takes its part of an update and does nothing with it, for control_plane.py."""

from __future__ import annotations

from typing import Any

from skyrl_train.metrics import Metrics


class IdleRank:
    """The part of a LearnerWorker that an update calls."""

    def update(self, mini_batch: Any) -> dict[str, Any]:
        assert all(len(batch) for batch in mini_batch.micro_batches)
        return Metrics().state()
