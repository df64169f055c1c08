"""Steps to trajectories, trajectories to the groups of a prompt: what advantages and selections have in common."""

from __future__ import annotations

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
"""The number that environments give a row's episode: steps of different ones are not one trajectory."""


@dataclass(frozen=True)
class Episode:
    """One trajectory: its steps in order, the last one done."""

    steps: list[TensorDictBase]
    rewards: list[float]
    """Of each step; what its tokens got in all, where every token has one."""
    version: int | None
    """The oldest policy version among its steps, where they tell."""


class GroupTransform(ABC):
    """Keeps trajectories back until their prompt's group is complete; `inv` is called by a replay buffer on writing.

    Trajectories are of versions at most `max_staleness` behind the newest seen: an older one is given up when it comes,
    a group with one when the newest does, and the group that waits longest when more than `max_pending` trajectories
    wait. Without numbers at `version_key` (`track_policy_version=True` in a collector) nothing is stale.
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
        self.queues: dict[Hashable, list[Episode]] = {}
        """Groups that wait, by prompt, the one that waits longest first."""
        self.newest: int | None = None
        """The newest policy version seen; `flush` forgets it."""
        self._waiting = 0
        self.abandoned = 0
        """Trajectories given up: too late, or their group was never completed."""

    @abstractmethod
    def finish(self, group: list[Episode]) -> list[Episode] | None:
        """What is kept of a prompt's trajectories so far: maybe nothing; None to wait for more."""

    def inv(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        """Steps of whole trajectories, [T] or [B, T], to the steps [N] of the groups that they complete, or None.

        A trajectory ends where a step is done. RuntimeError, before anything is kept, where the steps end, or another
        "episode" begins among them (a collector's rows one after the other), and the last step is not. KeyError where
        an entry is missing, TypeError for a prompt that is neither text nor tensor.
        """
        kept: list[TensorDictBase] = []
        for prompt, episode in list(self._episodes(tensordict)):
            if self._is_late(episode.version):
                self.abandoned += 1
                continue
            group = self.queues.setdefault(prompt, [])
            group.append(episode)
            self._waiting += 1
            chosen = self.finish(group)
            if chosen is None:
                self._bound_pending()
                continue
            self._waiting -= len(self.queues.pop(prompt))
            if self.verbose:
                log.info("group of %d trajectories: %d kept", len(group), len(chosen))
            kept += [step for episode in chosen for step in episode.steps]
        return stacked(kept) if kept else None

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Nothing happens on reading."""
        return tensordict

    def flush(self) -> int:
        """Gives up all groups that wait, and forgets the newest version; how many trajectories they had."""
        given_up = self._waiting
        for prompt in list(self.queues):
            self._give_up(prompt)
        self.newest = None
        return given_up

    def _episodes(self, tensordict: TensorDictBase) -> Iterator[tuple[Hashable, Episode]]:
        if tensordict.ndim > 1:
            for part in tensordict.unbind(0):
                yield from self._episodes(part)
            return
        steps: list[TensorDictBase] = []
        for step in rows_of(tensordict):
            if steps and _number(step.get(EPISODE, None)) != _number(steps[0].get(EPISODE, None)):
                break
            steps.append(step)
            if bool(_entry(step, self.done_key).any()):
                yield self._prompt(steps[0]), self._episode(steps)
                steps = []
        if steps:
            raise RuntimeError(
                f"The last {len(steps)} steps are not done at {self.done_key!r}; write whole trajectories "
                "(yield_completed_trajectories=True in a collector)."
            )

    def _episode(self, steps: Sequence[TensorDictBase]) -> Episode:
        rewards = [float(_entry(step, self.rewards_key).double().sum()) for step in steps]
        versions = [_number(step.get(self.version_key, None)) for step in steps]
        known = [version for version in versions if version is not None]
        return Episode([step.copy() for step in steps], rewards, min(known, default=None))

    def _prompt(self, step: TensorDictBase) -> Hashable:
        value = step.get(self.prompt_key, None)
        if isinstance(value, NonTensorData):
            value = value.data
        if isinstance(value, Tensor):
            return tuple(value.shape), tuple(value.reshape(-1).tolist())
        if isinstance(value, str):
            return value
        if value is None:
            raise KeyError(f"No prompt at {self.prompt_key!r}; prompt_key names another entry.")
        raise TypeError(f"{self.prompt_key!r} holds {type(value).__name__}; a prompt must be a str or a tensor.")

    def _is_late(self, version: int | None) -> bool:
        """Whether a trajectory is too old for a group; a newer one than any before makes groups too old."""
        if version is None:
            return False
        if self.newest is None or version > self.newest:
            self.newest = version
            for prompt, group in list(self.queues.items()):
                if any(e.version is not None and e.version < version - self.max_staleness for e in group):
                    self._give_up(prompt)
        return version < self.newest - self.max_staleness

    def _bound_pending(self) -> None:
        while self._waiting > self.max_pending:
            self._give_up(next(iter(self.queues)))
            log.warning("more than max_pending=%d trajectories wait; the oldest group is given up", self.max_pending)

    def _give_up(self, prompt: Hashable) -> None:
        lost = len(self.queues.pop(prompt))
        self._waiting -= lost
        self.abandoned += lost


def _entry(step: TensorDictBase, key: Key) -> Tensor:
    value = step.get(key, None)
    if value is None:
        raise KeyError(f"No entry {key!r}; entries are {sorted(map(str, step.keys(include_nested=True)))}.")
    return value  # type: ignore[no-any-return]


def _number(value: Any) -> int | None:
    """A version that counts; None for a uuid, which has no order."""
    if isinstance(value, NonTensorData):
        value = value.data
    if isinstance(value, Tensor) and value.numel() >= 1:
        return int(value.min())
    return value if isinstance(value, int) else None
