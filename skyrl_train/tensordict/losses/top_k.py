"""Which trajectories of a prompt are worth training on."""

from __future__ import annotations

from skyrl_train.tensordict.losses.grouping import Episode, GroupTransform
from skyrl_train.tensordict.ragged import Key


class TopKRewardSelector(GroupTransform):
    """Of `total_dialog_turns` trajectories of a prompt, the `topk_size` with the largest returns (sums of rewards).

    Earlier ones where returns tie, in order of arrival; whole trajectories. A group of equal returns says nothing, and
    is dropped.
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
        """ValueError unless 1 <= topk_size <= total_dialog_turns."""
        super().__init__(prompt_key, rewards_key, done_key, verbose, version_key, max_staleness, max_pending)
        if not 1 <= topk_size <= total_dialog_turns:
            raise ValueError(f"topk_size={topk_size} must be from 1 to total_dialog_turns={total_dialog_turns}.")
        self.total_dialog_turns, self.topk_size = total_dialog_turns, topk_size

    def finish(self, group: list[Episode]) -> list[Episode] | None:
        if len(group) < self.total_dialog_turns:
            return None
        returns = [sum(episode.rewards) for episode in group]
        if len(set(returns)) == 1:
            return []
        best = sorted(range(len(group)), key=lambda index: -returns[index])[: self.topk_size]
        return [group[index] for index in sorted(best)]
