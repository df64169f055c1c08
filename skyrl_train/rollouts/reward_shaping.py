"""How training adjusts the environment's rewards: for responses that did not end by themselves, and for long ones.

Rewards are only ever lowered, and a response cut by length is never lowered by less than one that ended by itself. So
it is not worth more than a wrong answer, unless the environment itself rewards it so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from skyrl_train.data.trajectory import OK, Trajectory, TrajectoryGroup


@dataclass(frozen=True)
class RewardShaping:
    """Applies the enabled adjustments to a training group, in place; evaluation does not use it.

    Order: `zero_unfinished` sets what a response is worth, `punish_overlong` what its length costs, `mask_truncated`
    which responses are trained on.
    """

    zero_reward_on_non_stop: bool = False
    apply_overlong_filtering: bool = False
    overlong_buffer_tokens: int = 0
    """0 disables the penalty."""
    overlong_penalty_factor: float = 1.0
    max_generate_tokens: int = 1
    """The maximum number of tokens of a turn."""

    def __call__(self, group: TrajectoryGroup) -> TrajectoryGroup:
        valid = [item for item in group.trajectories if item.status == OK]
        if self.zero_reward_on_non_stop:
            zero_unfinished(valid)
        if self.overlong_buffer_tokens:
            for item in valid:
                punish_overlong(
                    item, self.max_generate_tokens, self.overlong_buffer_tokens, self.overlong_penalty_factor
                )
        if self.apply_overlong_filtering:
            mask_truncated(valid)
        return group


def zero_unfinished(valid: Sequence[Trajectory]) -> None:
    """Give responses that did not end by themselves a reward of 0, or less.

    It is less if the environment gave less, or if a response of the group that did end got less: if wrong answers get
    -1, a flat 0 would teach the model not to end.
    """
    worst = min((item.reward for item in valid if item.stop_reason == "stop"), default=0.0)
    for item in valid:
        if item.stop_reason != "stop":
            reward = min(item.reward, 0.0, worst)
            if item.turns:
                last = item.turns[-1]
                item.turns[-1] = replace(last, reward=last.reward + (reward - item.reward))
            item.reward = reward


def overlong_penalty(length: int, max_tokens: int, buffer_tokens: int, factor: float) -> float:
    """Soft overlong punishment (DAPO, arXiv:2503.14476, eq. 13): the amount to subtract from the reward.

    0 up to max_tokens - buffer_tokens, from there growing linearly to `factor` at max_tokens, and `factor` beyond.
    """
    return factor * min(max(length - (max_tokens - buffer_tokens), 0) / buffer_tokens, 1.0)


def punish_overlong(item: Trajectory, max_tokens: int, buffer_tokens: int, factor: float) -> None:
    """Subtract the penalty for the longest turn from that turn; `item.raw_reward` keeps the original reward.

    A turn that was cut pays the full penalty, even if something other than max_tokens cut it.
    """
    item.raw_reward = item.reward
    lengths = [max_tokens if turn.stop_reason == "length" else turn.stop - turn.start for turn in item.turns]
    if lengths:
        longest = lengths.index(max(lengths))
        penalty = overlong_penalty(lengths[longest], max_tokens, buffer_tokens, factor)
        turn = item.turns[longest]
        item.turns[longest] = replace(turn, reward=turn.reward - penalty)
        item.reward -= penalty


def mask_truncated(valid: Sequence[Trajectory]) -> None:
    """Overlong filtering (DAPO, arXiv:2503.14476, section 3.4): no loss on responses that were cut by length.

    Their rewards remain in the statistics of their group, with which the other responses are compared.
    """
    for item in valid:
        if item.stop_reason == "length":
            item.loss_spans = []


def mask_group(group: TrajectoryGroup) -> None:
    """Take all responses of the group out of the loss; rewards and statuses stay as they are."""
    for item in group.trajectories:
        item.loss_spans = []
