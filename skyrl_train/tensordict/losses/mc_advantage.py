"""GRPO's advantages on tensordicts, computed when a replay buffer is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.objectives.llm.grpo import (
    MCAdvantage as TorchRLMCAdvantage,
    MCAdvantageSelector as MCAdvantageSelector,
    RayMCAdvantage as TorchRLRayMCAdvantage,
    _MCAdvantageRayActor,
)

from skyrl_train.algorithms.advantages import grpo
from skyrl_train.tensordict.losses.grouping import GroupTransform, Rows
from skyrl_train.tensordict.ragged import Key

LIMITS = ("version_key", "max_staleness", "max_pending")
RETURNS: dict[str, Callable[[Sequence[float]], float]] = {"sum": sum, "max": max, "mean": fmean}

Selector = Callable[[Tensor, int], Sequence[int] | None]
"""Function (returns [N], group_size) that returns the indices of the group's trajectories, or None for no group."""


class MCAdvantage(GroupTransform, TorchRLMCAdvantage):  # type: ignore[misc]
    """A buffer transform that writes GRPO's advantages, (R - mean(R)) / (std(R) + 1e-6), to every step of a trajectory.

    R is the trajectory's return; mean and unbiased std are over the prompt's group, of which nothing is stored until it
    is complete. The values equal the trainer's (`advantage_estimator=grpo`): a group of equal returns, or of one
    trajectory, gets 0. TorchRL's class normalizes the rewards of steps by default, and never drops old groups.
    """

    def __init__(
        self,
        grpo_size: int,
        prompt_key: Key = "query",
        rewards_key: Key = ("next", "reward"),
        advantage_key: Key = "advantage",
        done_key: Key = ("next", "done"),
        verbose: bool = False,
        *,
        trajectory_return: str | None = None,
        keep_return_bounds: tuple[float, float] | None = None,
        candidate_group_size: int | None = None,
        candidate_selection_min_size: int | None = None,
        candidate_selector: MCAdvantageSelector | Selector | None = None,
        version_key: Key = "policy_version",
        max_staleness: int = 1,
        max_pending: int = 65536,
    ):
        """Configure the groups.

        Args:
            grpo_size: Number of trajectories per group.
            prompt_key: Key of the prompt; equal prompts form a group.
            rewards_key: Key of the steps' rewards.
            advantage_key: Key under which advantages are written.
            done_key: Key that marks a trajectory's last step.
            verbose: Log every group.
            trajectory_return: "sum" (also None), "max" or "mean" of the steps' rewards.
            keep_return_bounds: (low, high): store only groups whose mean return is strictly between them (dynamic
                sampling). It requires `trajectory_return`, and so does a larger `candidate_group_size`.
            candidate_group_size: Maximum number of trajectories of a prompt from which to select a group (default:
                grpo_size). If no selection is accepted even with all candidates, they are dropped.
            candidate_selection_min_size: Number of trajectories with which selection begins (default: grpo_size).
            candidate_selector: Selects grpo_size candidates (default: MCAdvantageSelector()), or a function that does;
                if there are more, the group is accepted if their returns differ and are within bounds.
            version_key: Key of the policy's version.
            max_staleness: Maximum number of versions that a trajectory may lag behind; see GroupTransform.
            max_pending: Maximum number of trajectories that wait.

        Raises:
            ValueError: For a value that is not allowed.
        """
        settings = {name: value for name, value in locals().items() if name not in LIMITS}
        if grpo_size < 1:
            raise ValueError(f"grpo_size={grpo_size} must be at least 1.")
        if not isinstance(candidate_selector, MCAdvantageSelector | None):
            settings["candidate_selector"] = _FunctionSelector(candidate_selector)
        TorchRLMCAdvantage.__init__(**settings)
        self.trajectory_return = trajectory_return or "sum"
        self.group_size = self.candidate_group_size
        self.version_key, self.max_staleness, self.max_pending = version_key, max_staleness, max_pending

    def finish(self, group: Sequence[TensorDictBase]) -> list[Rows] | None:
        if len(group) < self.candidate_selection_min_size:
            return None
        reduce = RETURNS[self.trajectory_return]
        returns = torch.tensor([reduce(self.rewards_of(one)) for one in group], dtype=torch.float32)
        picked = self._picked(group, returns)
        if picked is None:
            return [] if len(group) >= self.candidate_group_size else None
        if len(group) > self.grpo_size:
            self._add(rescued_groups=not self._accepted(returns[: self.grpo_size]))
        self._add(selected_trajectories=len(picked), unselected_trajectories=len(group) - len(picked))
        return self._with_advantages([group[index] for index in picked], returns[picked])

    def _picked(self, group: Sequence[TensorDictBase], returns: Tensor) -> list[int] | None:
        """Return the indices of an acceptable group among the trajectories so far, or None."""
        if self.candidate_group_size == self.grpo_size:
            return list(range(len(returns))) if self._within_bounds(returns) else None
        candidates = TensorDict({"return": returns, "trajectories": lazy_stack(list(group))}, batch_size=[len(group)])
        found = self.candidate_selector.select(
            candidates.select(*self.candidate_selector.in_keys),
            group_size=self.grpo_size,
            keep_return_bounds=self.keep_return_bounds,
        )
        picked = None if found is None else list(found)
        return picked if picked is not None and self._accepted(returns[picked]) else None

    def _accepted(self, returns: Tensor) -> bool:
        return bool((returns != returns[0]).any()) and self._within_bounds(returns)

    def _within_bounds(self, returns: Tensor) -> bool:
        if self.keep_return_bounds is None:
            return True
        low, high = self.keep_return_bounds
        return bool(low < float(returns.mean()) < high)

    def _with_advantages(self, group: Sequence[TensorDictBase], returns: Tensor) -> list[Rows]:
        """Return the steps of the trajectories, with advantages in the shape of the rewards."""
        ids, valid = torch.zeros(len(group), dtype=torch.int64), torch.ones(len(group), dtype=torch.bool)
        result = []
        for trajectory, advantage in zip(group, grpo(returns, ids, valid, grpo_norm_by_std=True), strict=True):
            steps = list(trajectory.unbind(0))
            for step in steps:
                reward = step.get(self.rewards_key)
                step.set(self.advantage_key, torch.full_like(reward, float(advantage), dtype=torch.float32))
            result.append(steps)
        return result


class RayMCAdvantage(TorchRLRayMCAdvantage):  # type: ignore[misc]
    """An `MCAdvantage` whose waiting groups are in a Ray actor, for several processes that write to buffers."""

    def __init__(self, grpo_size: int, *arguments: Any, **settings: Any):
        """Start or find the actor, with MCAdvantage's arguments and TorchRL's for Ray; raise like MCAdvantage.

        Args:
            grpo_size: Number of trajectories per group.
            *arguments: Positional arguments of `MCAdvantage`.
            **settings: Keyword arguments of it, and `ray_init_config`, `remote_config` and `actor_name`.
        """
        ours = {name: settings.pop(name) for name in LIMITS if name in settings}
        options = {name: settings.pop(name, None) for name in ("ray_init_config", "remote_config", "actor_name")}
        _Actor(grpo_size, *arguments, **settings, **ours)  # raises here rather than in the Ray actor
        self.__dict__["_limits"] = ours
        super().__init__(grpo_size, *arguments, **settings, **options)

    def get_stats(self) -> dict[str, float | int]:
        """Return what `MCAdvantage.get_stats` does, of all processes."""
        stats: dict[str, float | int] = self._ray.get(self._actor.get_stats.remote())
        return stats

    def flush(self) -> int:
        """Drop all waiting groups, as `MCAdvantage.flush` does."""
        dropped: int = self._ray.get(self._actor.flush.remote())
        return dropped

    def _make_actor(self) -> Any:
        arguments, settings = self._mcadvantage_args
        # get_if_exists: of processes that start at the same time, one makes the actor
        named = {} if self._actor_name is None else {"name": self._actor_name, "get_if_exists": True}
        actor = self._ray.remote(**self._remote_config)(_Actor).options(**named)
        return actor.remote(*arguments, **settings, **self._limits)


class _Actor(_MCAdvantageRayActor):  # type: ignore[misc]
    def __init__(self, *arguments: Any, **settings: Any):
        self.transform = MCAdvantage(*arguments, **settings)

    def get_stats(self) -> dict[str, float | int]:
        return self.transform.get_stats()

    def flush(self) -> int:
        return self.transform.flush()


class _FunctionSelector(MCAdvantageSelector):  # type: ignore[misc]
    """A selector that calls a function of the returns."""

    def __init__(self, function: Selector):
        if not callable(function):
            raise ValueError(
                f"candidate_selector={function!r:.80} must be an MCAdvantageSelector, or a function: (returns, "
                "group_size) -> indices."
            )
        super().__init__()
        self.function = function

    def select(self, candidates: TensorDictBase, *, group_size: int, keep_return_bounds: Any = None) -> Any:
        return self.function(candidates["return"], group_size)
