"""The transform that selects the trajectories of a prompt with the largest returns."""

from __future__ import annotations

from skyrl_train.tensordict.losses.grouping import CompleteTrajectory, GroupTransform
from skyrl_train.tensordict.ragged import Key


class TopKRewardSelector(GroupTransform):
    """A buffer transform that selects the `topk_size` trajectories of a prompt with the largest returns.

    It selects among `total_dialog_turns` trajectories; a return is the sum of rewards. Trajectories
    stay complete and in order of arrival; if returns tie, earlier ones are kept. A group of equal returns
    contains no information and is dropped.
    """

    def __init__(
        self,
        total_dialog_turns: int,
        topk_size: int,
        prompt_key: Key = ("text", "prompt"),
        rewards_key: Key = ("next", "reward"),
        done_key: Key = ("next", "done"),
        verbose: bool = True,
        *,
        version_key: Key = "policy_version",
        max_staleness: int = 1,
        max_pending: int = 65536,
    ):
        """Configure the groups; other arguments are MCAdvantage's.

        Args:
            total_dialog_turns: Number of trajectories of a prompt to wait for.
            topk_size: Number of trajectories to select.

        Raises:
            ValueError: Unless 1 <= topk_size <= total_dialog_turns.
        """
        super().__init__(prompt_key, rewards_key, done_key, verbose, version_key, max_staleness, max_pending)
        if not 1 <= topk_size <= total_dialog_turns:
            raise ValueError(f"topk_size={topk_size} must be from 1 to total_dialog_turns={total_dialog_turns}.")
        self.total_dialog_turns, self.topk_size = total_dialog_turns, topk_size

    def finish(self, group: list[CompleteTrajectory]) -> list[CompleteTrajectory] | None:
        if len(group) < self.total_dialog_turns:
            return None
        returns = [sum(trajectory.rewards) for trajectory in group]
        if len(set(returns)) == 1:
            return []
        best = sorted(range(len(group)), key=lambda index: -returns[index])[: self.topk_size]
        return [group[index] for index in sorted(best)]
