"""Which groups are worth training on, and which prompts worth drawing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from skyrl_train.data.trajectory import OK, PASSED, TrajectoryGroup


def is_useful(group: TrajectoryGroup) -> bool:
    """Whether its answers differ in what they are worth (DAPO, arXiv:2503.14476, eq. 11).

    Penalties for length do not count: a group without a right answer would only teach to be short.
    """
    outcomes = {item.outcome for item in group.trajectories if item.status == OK}
    return len(outcomes) > 1


def has_variance(group: TrajectoryGroup) -> bool:
    """Whether the rewards that are trained on differ, penalties included."""
    return len({item.reward for item in group.trajectories if item.status == OK}) > 1


@dataclass(frozen=True)
class DynamicSampling:
    """`trainer.algorithm.dynamic_sampling`: draw until enough groups of a step are useful.

    `filter` is a fraction of 1: all of them. `replace` needs fewer, and useful ones are repeated in the other places.
    """

    min_useful_fraction: float = 1.0
    max_batches: int = -1
    """Nothing is drawn once a step has drawn so many times its size; -1 has no bound."""

    def least_useful(self, size: int) -> int:
        """How many of a step's `size` groups must be useful: at least one, or there is nothing to repeat."""
        return max(1, math.ceil(round(self.min_useful_fraction * size, 6))) if size else 0

    @property
    def drops_at_once(self) -> bool:
        """Whether a group that is not useful has no place in any step, whatever the others are."""
        return self.min_useful_fraction >= 1


class Curriculum:
    """`data.curriculum`: leaves out, once, a prompt that was last too hard or too easy.

    `state()` and `load_state()` are all that a resumed run needs.
    """

    def __init__(self, min_pass_rate: float, max_pass_rate: float):
        self._min = min_pass_rate
        self._max = max_pass_rate
        self._rates: dict[str, float] = {}
        """uid -> share of samples that passed when the prompt was last drawn; absent when it was left out since."""

    def observe(self, group: TrajectoryGroup) -> None:
        """Note how many of its valid samples passed; a group without any says nothing."""
        passed = [item.outcome >= PASSED for item in group.trajectories if item.status == OK]
        if passed:
            self._rates[group.prompt.uid] = sum(passed) / len(passed)

    def leaves_out(self, uid: str) -> bool:
        """Whether the prompt is left out this time; then it comes back the time after."""
        if self._min <= self._rates.get(uid, self._min) <= self._max:
            return False
        del self._rates[uid]
        return True

    def state(self) -> dict[str, float]:
        return dict(self._rates)

    def load_state(self, state: Mapping[str, float]) -> None:
        self._rates = dict(state)
