"""The base of advantages and selections: it groups steps into trajectories, and trajectories by prompt."""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tensordict import NonTensorData, TensorDictBase
from torch import Tensor

from skyrl_train.tensordict.ragged import Key, rows_of, stacked

log = logging.getLogger(__name__)
EPISODE: Key = "episode"
"""Key of the episode's number; steps with different numbers belong to different trajectories."""


STATISTICS = (
    "completed_trajectories",
    "completed_decisions",
    "trajectory_return_sum",
    "trajectory_return_max",
    "successful_trajectories",
    "completed_groups",
    "written_groups",
    "dropped_groups",
    "rescued_groups",
    "selected_trajectories",
    "unselected_trajectories",
    "queued_groups",
    "queued_trajectories",
    "max_queued_trajectories_per_group",
    "abandoned",
)


@dataclass(frozen=True)
class CompleteTrajectory:
    """One trajectory: its steps in order, the last one done."""

    steps: list[TensorDictBase]
    rewards: list[float]
    """The reward of each step, or the sum over its tokens if every token has one."""
    version: int | None
    """The oldest policy version among its steps, if known."""


class GroupTransform(ABC):
    """A buffer transform that holds trajectories back until their prompt's group is complete.

    A replay buffer calls `inv` on writing.

    Trajectories may be at most `max_staleness` versions behind the newest one seen: an older one is dropped on arrival,
    and a group that contains one is dropped when a newer version arrives. If more than `max_pending` trajectories wait,
    the group that has waited longest is dropped. Without numbers at `version_key` (`track_policy_version=True` in a
    collector), nothing is stale.
    """

    def __init__(
        self,
        prompt_key: Key,
        rewards_key: Key,
        done_key: Key,
        verbose: bool,
        version_key: Key,
        max_staleness: int,
        max_pending: int,
    ):
        self.prompt_key, self.rewards_key, self.done_key = prompt_key, rewards_key, done_key
        self.verbose = verbose
        self.version_key, self.max_staleness, self.max_pending = version_key, max_staleness, max_pending
        self.queues: dict[Hashable, list[CompleteTrajectory]] = {}
        """Waiting groups by prompt, the one that has waited longest first."""
        self.newest: int | None = None
        """The newest policy version seen; `flush` forgets it."""
        self._waiting = 0
        self.reset_stats()

    def reset_stats(self) -> None:
        """Set the counters of `get_stats` to 0, and the largest return to -inf; waiting groups stay."""
        self.abandoned = 0
        """Number of dropped trajectories: too old, or in a group that was never completed."""
        self.completed_trajectories = self.completed_decisions = self.successful_trajectories = 0
        self.completed_groups = self.written_groups = self.dropped_groups = self.rescued_groups = 0
        self.selected_trajectories = self.unselected_trajectories = 0
        self.trajectory_return_sum, self.trajectory_return_max = 0.0, float("-inf")

    def get_stats(self) -> dict[str, float | int]:
        """Return counts of what arrived, was written and waits, under TorchRL's names; each is an attribute, too.

        A decision is a step, a return the sum of a trajectory's rewards, a success a return above 0. A group is
        completed when it is written or dropped, and rescued if its first trajectories alone would have been dropped.
        """
        return {name: getattr(self, name) for name in STATISTICS}

    @property
    def queued_groups(self) -> int:
        """Number of incomplete groups that wait."""
        return len(self.queues)

    @property
    def queued_trajectories(self) -> int:
        """Number of trajectories in incomplete groups."""
        return self._waiting

    @property
    def max_queued_trajectories_per_group(self) -> int:
        """Number of trajectories in the largest incomplete group; 0 without groups."""
        return max(map(len, self.queues.values()), default=0)

    @abstractmethod
    def finish(self, group: list[CompleteTrajectory]) -> list[CompleteTrajectory] | None:
        """Return the selected trajectories of a prompt's group, possibly none, or None to wait for more."""

    def inv(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        """Add complete trajectories [T] or [B, T] to their groups; return the steps [N] of completed groups, or None.

        A trajectory ends with a step that is done. Raises RuntimeError, before storing anything, if the last step
        is not done, or if another "episode" begins (in a collector's concatenated rows) before the step that is done;
        KeyError for a missing entry, TypeError for a prompt that is neither text nor tensor.
        """
        kept: list[TensorDictBase] = []
        for prompt, trajectory in list(self._trajectories(tensordict)):
            self._count(trajectory)
            if self._is_late(trajectory.version):
                self.abandoned += 1
                continue
            group = self.queues.setdefault(prompt, [])
            group.append(trajectory)
            self._waiting += 1
            chosen = self.finish(group)
            if chosen is None:
                self._bound_pending()
                continue
            self._waiting -= len(self.queues.pop(prompt))
            self.completed_groups += 1
            self.written_groups += bool(chosen)
            self.dropped_groups += not chosen
            if self.verbose:
                log.info("selected %d of a group of %d trajectories", len(chosen), len(group))
            kept += [step for trajectory in chosen for step in trajectory.steps]
        return stacked(kept) if kept else None

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return `tensordict` unchanged: reading needs no transform."""
        return tensordict

    def _count(self, trajectory: CompleteTrajectory) -> None:
        value = sum(trajectory.rewards)
        self.completed_trajectories += 1
        self.completed_decisions += len(trajectory.steps)
        self.successful_trajectories += value > 0
        self.trajectory_return_sum += value
        self.trajectory_return_max = max(self.trajectory_return_max, value)

    def flush(self) -> int:
        """Drop all waiting groups and forget the newest version; return how many trajectories were dropped."""
        given_up = self._waiting
        for prompt in list(self.queues):
            self._abandon(prompt)
        self.newest = None
        return given_up

    clear_queues = flush
    """TorchRL's name."""

    def _trajectories(self, tensordict: TensorDictBase) -> Iterator[tuple[Hashable, CompleteTrajectory]]:
        if tensordict.ndim > 1:
            for part in tensordict.unbind(0):
                yield from self._trajectories(part)
            return
        steps: list[TensorDictBase] = []
        for step in rows_of(tensordict):
            if steps and _number(step.get(EPISODE, None)) != _number(steps[0].get(EPISODE, None)):
                break
            steps.append(step)
            if bool(_entry(step, self.done_key).any()):
                yield self._prompt(steps[0]), self._trajectory(steps)
                steps = []
        if steps:
            raise RuntimeError(
                f"The last {len(steps)} steps are not done at {self.done_key!r}. Write complete trajectories "
                "(yield_completed_trajectories=True in a collector)."
            )

    def _trajectory(self, steps: Sequence[TensorDictBase]) -> CompleteTrajectory:
        rewards = [float(_entry(step, self.rewards_key).double().sum()) for step in steps]
        versions = [_number(step.get(self.version_key, None)) for step in steps]
        known = [version for version in versions if version is not None]
        return CompleteTrajectory([step.copy() for step in steps], rewards, min(known, default=None))

    def _prompt(self, step: TensorDictBase) -> Hashable:
        value = step.get(self.prompt_key, None)
        if isinstance(value, NonTensorData):
            value = value.data
        if isinstance(value, Tensor):
            return tuple(value.shape), tuple(value.reshape(-1).tolist())
        if isinstance(value, str):
            return value
        if isinstance(value, list):  # messages
            return json.dumps(value, sort_keys=True, default=repr)
        if value is None:
            raise KeyError(f"The tensordict has no prompt at {self.prompt_key!r}. Set prompt_key to its key.")
        raise TypeError(
            f"{self.prompt_key!r} holds {type(value).__name__}; a prompt must be a str, messages or a tensor."
        )

    def _is_late(self, version: int | None) -> bool:
        """True if a trajectory is too old; if it is the newest so far, drop the groups that have become too old."""
        if version is None:
            return False
        if self.newest is None or version > self.newest:
            self.newest = version
            for prompt, group in list(self.queues.items()):
                if any(e.version is not None and e.version < version - self.max_staleness for e in group):
                    self._abandon(prompt)
        return version < self.newest - self.max_staleness

    def _bound_pending(self) -> None:
        while self._waiting > self.max_pending:
            self._abandon(next(iter(self.queues)))
            log.warning("more than max_pending=%d trajectories wait; the oldest group was dropped", self.max_pending)

    def _abandon(self, prompt: Hashable) -> None:
        lost = len(self.queues.pop(prompt))
        self._waiting -= lost
        self.abandoned += lost


def _entry(step: TensorDictBase, key: Key) -> Tensor:
    value = step.get(key, None)
    if value is None:
        raise KeyError(
            f"The tensordict has no entry {key!r}; its entries are {sorted(map(str, step.keys(include_nested=True)))}. "
            "Set the key to one of these."
        )
    return value  # type: ignore[no-any-return]


def _number(value: Any) -> int | None:
    """Return the oldest version number of an entry, or None for a uuid, which has no order."""
    if isinstance(value, NonTensorData):
        value = value.data
    if isinstance(value, Tensor) and value.numel() >= 1:
        return int(value.min())
    return value if isinstance(value, int) else None
