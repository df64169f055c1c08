"""Decides which groups are worth training on, and which prompts are worth drawing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from skyrl_train.data.trajectory import OK, PASSED, TrajectoryGroup


def is_useful(group: TrajectoryGroup) -> bool:
    """Whether the outcomes of its samples differ (DAPO, arXiv:2503.14476, eq. 11).

    Penalties for length do not count: a group without a correct answer would only teach the model to be short.
    """
    outcomes = {item.outcome for item in group.trajectories if item.status == OK}
    return len(outcomes) > 1


def has_variance(group: TrajectoryGroup) -> bool:
    """Whether the rewards used in training differ, penalties included."""
    return len({item.reward for item in group.trajectories if item.status == OK}) > 1


@dataclass(frozen=True)
class DynamicSampling:
    """`trainer.algorithm.dynamic_sampling`: draw groups until enough of a step's groups are useful.

    Type `filter` corresponds to a fraction of 1: all must be useful. Type `replace` needs fewer, and repeats useful
    groups in place of the others.
    """

    min_replace_ratio: float = 1.0
    max_sample_batches: int = -1
    """A step may draw at most this many times its size; -1 is no bound."""
    off: str = "trainer.algorithm.dynamic_sampling.type=null"
    """What turns it off, for an error."""

    def least_useful(self, size: int) -> int:
        """How many of a step's `size` groups must be useful: at least one, as otherwise there is nothing to repeat."""
        return max(1, math.ceil(round(self.min_replace_ratio * size, 6))) if size else 0

    @property
    def drops_at_once(self) -> bool:
        """Whether a group that is not useful is dropped from every step, whatever the other groups are like."""
        return self.min_replace_ratio >= 1


class Curriculum:
    """`data.curriculum`: leaves out, once, a prompt that was too hard or too easy when it was last drawn.

    A resumed run needs only `state()` and `load_state()`.
    """

    def __init__(self, min_pass_rate: float, max_pass_rate: float):
        self._min = min_pass_rate
        self._max = max_pass_rate
        self._rates: dict[str, float] = {}
        """uid -> share of samples that passed when the prompt was last drawn; absent if it was left out since then."""

    def observe(self, group: TrajectoryGroup) -> None:
        """Record the pass rate of the group's valid samples; a group without valid samples changes nothing."""
        passed = [item.outcome >= PASSED for item in group.trajectories if item.status == OK]
        if passed:
            self._rates[group.prompt.uid] = sum(passed) / len(passed)

    def leaves_out(self, uid: str) -> bool:
        """Whether the prompt is left out this time; if so, it is drawn again the next time."""
        if self._min <= self._rates.get(uid, self._min) <= self._max:
            return False
        del self._rates[uid]
        return True

    def state(self) -> dict[str, float]:
        return dict(self._rates)

    def load_state(self, state: Mapping[str, float]) -> None:
        self._rates = dict(state)
