"""GRPO's advantages on tensordicts, computed when a replay buffer is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from skyrl_train.algorithms.advantages import grpo
from skyrl_train.tensordict.losses.grouping import CompleteTrajectory, GroupTransform
from skyrl_train.tensordict.ragged import Key

RETURNS: dict[str, Callable[[Sequence[float]], float]] = {
    "sum": sum,
    "max": max,
    "mean": lambda rewards: sum(rewards) / len(rewards),
}

Selector = Callable[[Tensor, int], Sequence[int] | None]
"""Function (returns [N], group_size) that returns the indices of the group's trajectories, or None for no group."""


class MCAdvantage(GroupTransform):
    """A buffer transform that writes GRPO's advantages, (R - mean(R)) / (std(R) + 1e-6), to every step of a trajectory.

    R is the trajectory's return; mean and std are over the prompt's group.

    The standard deviation is unbiased. The values equal the trainer's (`advantage_estimator=grpo`): a group of equal
    returns, or of one trajectory, gets 0. Nothing is stored until `grpo_size` trajectories of a prompt have arrived.
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
        candidate_selector: Selector | None = None,
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
                sampling).
            candidate_group_size: Maximum number of trajectories of a prompt from which to select a group (default:
                grpo_size). If no selection is accepted even with all candidates, they are dropped.
            candidate_selection_min_size: Number of trajectories with which selection begins (default: grpo_size).
            candidate_selector: Selects grpo_size candidates (default: `most_different`); the group is accepted if
                their returns differ and are within bounds.
            version_key: Key of the policy's version.
            max_staleness: Maximum number of versions that a trajectory may lag behind; see GroupTransform.
            max_pending: Maximum number of trajectories that wait.

        Raises:
            ValueError: For a value that is not allowed.
        """
        super().__init__(prompt_key, rewards_key, done_key, verbose, version_key, max_staleness, max_pending)
        self.grpo_size, self.advantage_key = grpo_size, advantage_key
        self.trajectory_return = trajectory_return or "sum"
        self.keep_return_bounds = keep_return_bounds
        self.candidate_group_size = grpo_size if candidate_group_size is None else candidate_group_size
        least = candidate_selection_min_size
        self.candidate_selection_min_size = grpo_size if least is None else least
        self.candidate_selector = candidate_selector or most_different
        if grpo_size < 1:
            raise ValueError(f"grpo_size={grpo_size} must be at least 1.")
        if self.trajectory_return not in RETURNS:
            raise ValueError(f"trajectory_return={trajectory_return!r} must be one of {', '.join(RETURNS)} or None.")
        if keep_return_bounds is not None and not keep_return_bounds[0] < keep_return_bounds[1]:
            raise ValueError(f"keep_return_bounds={keep_return_bounds!r} must be (low, high) with low < high.")
        if not callable(self.candidate_selector):
            raise ValueError(
                f"candidate_selector={candidate_selector!r:.80} must be a function: (returns, group_size) -> indices."
            )
        if not grpo_size <= self.candidate_selection_min_size <= self.candidate_group_size:
            raise ValueError(
                f"grpo_size={grpo_size}, candidate_selection_min_size={self.candidate_selection_min_size} and "
                f"candidate_group_size={self.candidate_group_size} must be in ascending order."
            )

    def finish(self, group: list[CompleteTrajectory]) -> list[CompleteTrajectory] | None:
        if len(group) < self.candidate_selection_min_size:
            return None
        returns = torch.tensor([RETURNS[self.trajectory_return](e.rewards) for e in group], dtype=torch.float32)
        picked = self._picked(returns)
        if picked is None:
            return [] if len(group) >= self.candidate_group_size else None
        if len(group) > self.grpo_size:
            self.rescued_groups += not self._accepted(returns[: self.grpo_size])
        self.selected_trajectories += len(picked)
        self.unselected_trajectories += len(group) - len(picked)
        chosen = [group[index] for index in picked]
        self._write(chosen, returns[picked])
        return chosen

    def _picked(self, returns: Tensor) -> list[int] | None:
        """Return the indices of an acceptable group among the trajectories so far, or None."""
        if self.candidate_group_size == self.grpo_size:
            return list(range(len(returns))) if self._within_bounds(returns) else None
        found = self.candidate_selector(returns, self.grpo_size)
        picked = None if found is None else list(found)
        return picked if picked is not None and self._accepted(returns[picked]) else None

    def _accepted(self, returns: Tensor) -> bool:
        return bool((returns != returns[0]).any()) and self._within_bounds(returns)

    def _within_bounds(self, returns: Tensor) -> bool:
        if self.keep_return_bounds is None:
            return True
        low, high = self.keep_return_bounds
        return low < float(returns.mean()) < high

    def _write(self, group: list[CompleteTrajectory], returns: Tensor) -> None:
        """Write advantages in the shape of the rewards."""
        ids, valid = torch.zeros(len(group), dtype=torch.int64), torch.ones(len(group), dtype=torch.bool)
        for trajectory, advantage in zip(group, grpo(returns, ids, valid, grpo_norm_by_std=True), strict=True):
            for step in trajectory.steps:
                reward = step.get(self.rewards_key)
                value = float(advantage)
                step.set(self.advantage_key, torch.full_like(reward, value, dtype=torch.float32))


def most_different(returns: Tensor, group_size: int) -> list[int]:
    """Return the indices of the largest and the smallest returns, half of each; ties go by order of arrival."""
    order = torch.argsort(returns, descending=True, stable=True).tolist()
    above = (group_size + 1) // 2
    return sorted(order[:above] + order[len(order) - (group_size - above) :])
