"""Two rewards of the same samples, compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from skyrl_train.data.trajectory import OK, PASSED, Trajectory, TrajectoryGroup
from skyrl_train.replay.scoring import Score


@dataclass
class RewardComparison:
    """Collects the samples of all steps. Statistics are over those that have both rewards."""

    old: list[float] = field(default_factory=list)
    new: list[float] = field(default_factory=list)
    passes: Counter[tuple[bool, bool]] = field(default_factory=Counter)
    """(passed in the run, passes now) -> samples. Length penalties do not count."""
    failures: Counter[str] = field(default_factory=Counter)
    """Kind -> samples that could not be scored."""
    failed_in_run: int = 0
    differing: int = 0
    """Episodes to which the environment said something else than in the run."""
    groups: Counter[tuple[bool, bool]] = field(default_factory=Counter)
    """(rewards differed in the run, rewards differ now) -> groups."""

    def add(
        self, old: Sequence[TrajectoryGroup], new: Sequence[TrajectoryGroup], scores: Sequence[Score | None]
    ) -> None:
        """Add a step: its groups as they were and as they are now, and the scores of their trajectories in order."""
        given = iter(scores)
        for before, after in zip(old, new, strict=True):
            both = []
            for one, other in zip(before.trajectories, after.trajectories, strict=True):
                if self._add(one, other, next(given)):
                    both.append((one.reward, other.reward))
            spread = tuple(len({pair[side] for pair in both}) > 1 for side in (0, 1))
            self.groups[spread[0], spread[1]] += 1

    def _add(self, one: Trajectory, other: Trajectory, score: Score | None) -> bool:
        if score is None:
            self.failed_in_run += 1
            return False
        self.differing += score.differs
        if other.status != OK:
            self.failures[other.error or "unknown"] += 1
            return False
        self.old.append(one.reward)
        self.new.append(other.reward)
        self.passes[one.outcome >= PASSED, other.outcome >= PASSED] += 1
        return True

    def numbers(self) -> dict[str, Any]:
        """Plain JSON. `correlation` is Pearson's, null if one of the rewards is the same everywhere."""
        old, new = np.asarray(self.old), np.asarray(self.new)
        known = len(old) > 0
        return {
            "samples": len(old),
            "failed_in_run": self.failed_in_run,
            "failures": dict(self.failures.most_common()),
            "environment_differs": self.differing,
            "mean": _pair(old, new, np.mean),
            "std": _pair(old, new, np.std),
            "min": _pair(old, new, np.min),
            "max": _pair(old, new, np.max),
            "changed": int((old != new).sum()),
            "largest_change": float(np.abs(new - old).max()) if known else None,
            "correlation": _correlation(old, new),
            "passes": {
                f"{'pass' if before else 'fail'}_to_{'pass' if after else 'fail'}": self.passes[before, after]
                for before in (True, False)
                for after in (True, False)
            },
            "groups": {
                "both_vary": self.groups[True, True],
                "variance_vanished": self.groups[True, False],
                "variance_appeared": self.groups[False, True],
                "neither_varies": self.groups[False, False],
            },
        }


def _pair(old: Any, new: Any, of: Any) -> dict[str, float | None]:
    return {"old": float(of(old)) if len(old) else None, "new": float(of(new)) if len(new) else None}


def _correlation(old: Any, new: Any) -> float | None:
    """Pearson's; None if one of both does not vary."""
    if len(old) < 2:
        return None
    one, other = old - old.mean(), new - new.mean()
    size = float(np.sqrt((one @ one) * (other @ other)))
    return float(one @ other) / size if size > 0 else None
