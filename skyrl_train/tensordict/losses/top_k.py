"""The transform that selects the trajectories of a prompt with the largest returns."""

from __future__ import annotations

from collections.abc import Sequence

from tensordict import TensorDictBase
from torchrl.data.llm.topk import TopKRewardSelector as TorchRLTopKRewardSelector

from skyrl_train.tensordict.losses.grouping import GroupTransform, Rows
from skyrl_train.tensordict.ragged import Key


class TopKRewardSelector(GroupTransform, TorchRLTopKRewardSelector):  # type: ignore[misc]
    """A buffer transform that selects the `topk_size` trajectories of a prompt with the largest returns.

    A return is the sum of rewards. Trajectories stay complete, the best first; if returns tie, earlier ones are kept. A
    group of equal returns contains no information and is dropped. TorchRL only keeps returns above the median.
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
        super().__init__(total_dialog_turns, topk_size, prompt_key, rewards_key, done_key, verbose)
        if topk_size < 1:
            raise ValueError(f"topk_size={topk_size} must be from 1 to total_dialog_turns={total_dialog_turns}.")
        self.version_key, self.max_staleness, self.max_pending = version_key, max_staleness, max_pending
        self.group_size = total_dialog_turns
        self._stats = {}
        self.reset_stats()

    def finish(self, group: Sequence[TensorDictBase]) -> list[Rows] | None:
        if len(group) < self.total_dialog_turns:
            return None
        returns = [sum(self.rewards_of(trajectory)) for trajectory in group]
        if len(set(returns)) == 1:
            return []
        best = sorted(range(len(group)), key=lambda index: -returns[index])[: self.topk_size]
        return [list(group[index].unbind(0)) for index in best]
