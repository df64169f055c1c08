"""The base of advantages and selections: it groups steps into trajectories, and trajectories by prompt."""

from __future__ import annotations

import json
import logging
from collections.abc import Hashable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from tensordict import NonTensorData, TensorDictBase, is_leaf_nontensor, lazy_stack
from torch import Tensor
from torchrl.envs import Transform
from torchrl.objectives.llm.grpo import _MCADVANTAGE_STATS, MCAdvantage as TorchRLMCAdvantage

from skyrl_train.tensordict.ragged import Key, rows_of

log = logging.getLogger(__name__)
EPISODES: tuple[Key, ...] = ("episode", ("collector", "traj_ids"))
"""Keys of numbers that differ between the steps of different trajectories."""
STEP_COUNT: Key = ("next", "step_count")
COUNTERS = (*_MCADVANTAGE_STATS, "abandoned")
Rows = list[TensorDictBase]


class GroupTransform(Transform):  # type: ignore[misc]
    """A mixin of TorchRL's buffer transforms that holds trajectories back until their prompt's group is complete.

    Trajectories may be at most `max_staleness` versions behind the newest one seen: an older one is dropped on arrival,
    and a group that contains one is dropped when a newer version arrives. If more than `max_pending` trajectories wait,
    the group that has waited longest is dropped. Without numbers at `version_key` (`track_policy_version=True` in a
    collector), nothing is stale.
    """

    group_size: int
    """Largest number of trajectories in a group."""
    queues: Any
    _stats: dict[str, Any]
    _state_lock = nullcontext()
    # What is not the same in TorchRL's transforms comes from its MCAdvantage, which can share its state.
    queued_groups = TorchRLMCAdvantage.queued_groups
    queued_trajectories = TorchRLMCAdvantage.queued_trajectories
    max_queued_trajectories_per_group = TorchRLMCAdvantage.max_queued_trajectories_per_group
    _queue_append = TorchRLMCAdvantage._queue_append
    _queue_list = TorchRLMCAdvantage._queue_list
    _get_stat = TorchRLMCAdvantage._get_stat

    def reset_stats(self) -> None:
        """Set the counters of `get_stats` to 0, and the largest return to -inf; waiting groups stay."""
        with self._state_lock:
            self._stats.update(dict.fromkeys(COUNTERS, 0), trajectory_return_max=float("-inf"))

    def get_stats(self) -> dict[str, float | int]:
        """Return counts of what arrived, was written and waits, under TorchRL's names, and "abandoned".

        A decision is a step, a return the sum of a trajectory's rewards, a success a return above 0. A group is
        completed when it is written or dropped, and rescued if its first trajectories alone would have been dropped.
        Abandoned trajectories are too old, or in a group that was never completed.
        """
        return {**TorchRLMCAdvantage.get_stats(self), "abandoned": self.abandoned}

    @property
    def abandoned(self) -> int:
        """Number of dropped trajectories: too old, or in a group that was never completed."""
        return int(self._stats["abandoned"])

    @property
    def newest(self) -> int | None:
        """The newest policy version seen; `flush` forgets it."""
        return self._stats.get("newest")

    def finish(self, group: Sequence[TensorDictBase]) -> list[Rows] | None:
        """Return the selected trajectories of a prompt's group, possibly none, or None to wait for more."""
        raise NotImplementedError

    def rewards_of(self, trajectory: TensorDictBase) -> list[float]:
        """Return the reward of each step, or the sum over its tokens if every token has one."""
        return [float(_entry(step, self.rewards_key).double().sum()) for step in trajectory.unbind(0)]

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        """Add complete trajectories [T] or [B, T] to their groups; return the steps [N] of completed groups, or None.

        A trajectory ends with a step that is done. Raises RuntimeError, before storing anything, if the last step
        is not done, or if another trajectory begins (in a collector's concatenated rows) before the step that is done,
        as the count of a StepCounter shows; KeyError for a missing entry, TypeError for a prompt that is neither text
        nor tensor.
        """
        kept: Rows = []
        with self._state_lock:
            for prompt, trajectory in list(self._trajectories(tensordict)):
                self._count(trajectory)
                if self._is_late(self._version(trajectory)):
                    self._drop_for_age(1)
                    continue
                self._queue_append(prompt, trajectory)
                group = self._queue_list(prompt)
                chosen = self.finish(group)
                if chosen is None:
                    self._bound_pending()
                    continue
                del self.queues[prompt]
                self._add(completed_groups=1, written_groups=bool(chosen), dropped_groups=not chosen)
                if self.verbose:
                    log.info("selected %d of a group of %d trajectories", len(chosen), len(group))
                kept += [step for steps in chosen for step in steps]
        return _packed(kept) if kept else None

    def flush(self) -> int:
        """Drop all waiting groups and forget the newest version; return how many trajectories were dropped."""
        with self._state_lock:
            given_up = int(self.queued_trajectories)
            self.queues.clear()
            self._add(abandoned=given_up)
            self._stats["newest"] = None
            return given_up

    clear_queues = flush
    """TorchRL's name."""

    def _add(self, **counts: float) -> None:
        for name, count in counts.items():
            self._stats[name] += count

    def _count(self, trajectory: TensorDictBase) -> None:
        value = sum(self.rewards_of(trajectory))
        self._add(completed_trajectories=1, completed_decisions=len(trajectory), trajectory_return_sum=value)
        self._add(successful_trajectories=value > 0)
        self._stats["trajectory_return_max"] = max(self._stats["trajectory_return_max"], value)

    def _trajectories(self, tensordict: TensorDictBase) -> Iterator[tuple[Hashable, TensorDictBase]]:
        if tensordict.ndim > 1:
            for part in tensordict.unbind(0):
                yield from self._trajectories(part)
            return
        steps: list[TensorDictBase] = []
        for step in rows_of(tensordict):
            if steps and not self._continues(steps[-1], step):
                break
            steps.append(step)
            if bool(_entry(step, self.done_key).any()):
                trajectory = _packed(steps)
                self.rewards_of(trajectory)
                yield self._prompt(steps[0]), trajectory
                steps = []
        if steps:
            raise RuntimeError(
                f"The last {len(steps)} steps are not done at {self.done_key!r}. Write complete trajectories "
                "(yield_completed_trajectories=True in a collector)."
            )

    def _continues(self, before: TensorDictBase, step: TensorDictBase) -> bool:
        """True unless `step` belongs to another trajectory than the step before it."""
        if any(_number(step.get(key, None)) != _number(before.get(key, None)) for key in EPISODES):
            return False
        last, count = _number(before.get(STEP_COUNT, None)), _number(step.get(STEP_COUNT, None))
        if last is None or count is None:
            return True
        return count == last + 1 and self._prompt(step) == self._prompt(before)

    def _prompt(self, step: TensorDictBase) -> Hashable:
        value = step.get(self.prompt_key, None)
        if isinstance(value, NonTensorData):
            value = value.data
        if isinstance(value, Tensor):
            return value.item() if value.numel() == 1 else (tuple(value.shape), tuple(value.reshape(-1).tolist()))
        if isinstance(value, str):
            return value
        if isinstance(value, list):  # messages
            return json.dumps(value, sort_keys=True, default=repr)
        if value is None:
            raise KeyError(f"The tensordict has no prompt at {self.prompt_key!r}. Set prompt_key to its key.")
        raise TypeError(
            f"{self.prompt_key!r} holds {type(value).__name__}; a prompt must be a str, messages or a tensor."
        )

    def _version(self, trajectory: TensorDictBase) -> int | None:
        """Return the oldest policy version among the steps, if known."""
        versions = [_number(step.get(self.version_key, None)) for step in trajectory.unbind(0)]
        return min((version for version in versions if version is not None), default=None)

    def _is_late(self, version: int | None) -> bool:
        """True if a trajectory is too old; if it is the newest so far, drop the groups that have become too old."""
        if version is None:
            return False
        if self.newest is None or version > self.newest:
            self._stats["newest"] = version
            for prompt in self._prompts():
                known = [found for one in self._queue_list(prompt) if (found := self._version(one)) is not None]
                if min(known, default=version) < version - self.max_staleness:
                    self._drop_for_age(len(self._queue_list(prompt)))
                    del self.queues[prompt]
        return version < self._stats["newest"] - self.max_staleness  # type: ignore[no-any-return]

    def _bound_pending(self) -> None:
        while len(self.queues) * self.group_size > self.max_pending and self.queued_trajectories > self.max_pending:
            oldest = self._prompts()[0]
            self._add(abandoned=len(self._queue_list(oldest)))
            del self.queues[oldest]
            log.warning("more than max_pending=%d trajectories wait; the oldest group was dropped", self.max_pending)

    def _drop_for_age(self, count: int) -> None:
        if not self._stats["abandoned"]:
            log.warning(
                "dropped %d trajectories that are more than max_staleness=%d versions old; get_stats()['abandoned'] "
                "counts further ones",
                count,
                self.max_staleness,
            )
        self._add(abandoned=count)

    def _prompts(self) -> list[Hashable]:
        """Return the prompts of waiting groups; TorchRL's shared queues hold them in a dict of a manager process."""
        return list(getattr(self.queues, "_queues", self.queues).keys())


def _packed(rows: Rows) -> TensorDictBase:
    """Stack copies of rows: densely if they have tensors of equal shapes and nothing else, else lazily."""
    stack = lazy_stack([row.copy() for row in rows])
    entries = rows[0].values(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor)
    plain = all(isinstance(entry, Tensor) for entry in entries)
    return TorchRLMCAdvantage._concrete_if_possible(stack) if plain else stack  # type: ignore[no-any-return]


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
