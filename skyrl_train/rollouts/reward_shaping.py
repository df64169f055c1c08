"""How training adjusts the environment's rewards: for responses that did not end by themselves, and for long ones.

Rewards are only ever lowered, and a response cut by length is never lowered by less than one that ended by itself. So
it is not worth more than a wrong answer, unless the environment itself rewards it so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from skyrl_train.config.schema import OverlongBufferConfig
from skyrl_train.data.trajectory import OK, Trajectory, TrajectoryGroup


@dataclass(frozen=True)
class RewardShaping:
    """Applies the enabled adjustments to a training group, in place; evaluation does not use it.

    Order: `zero_unfinished` sets what a response is worth, `punish_overlong` what its length costs, `mask_truncated`
    which responses are trained on.
    """

    zero_reward_on_non_stop: bool = False
    apply_overlong_filtering: bool = False
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)
    max_generate_length: int = 1
    """The maximum number of tokens of a turn."""

    def __call__(self, group: TrajectoryGroup) -> TrajectoryGroup:
        valid = [item for item in group.trajectories if item.status == OK]
        if self.zero_reward_on_non_stop:
            zero_unfinished(valid)
        if self.overlong_buffer.len:
            for item in valid:
                punish_overlong(item, self.max_generate_length, self.overlong_buffer)
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


def overlong_penalty(length: int, max_generate_length: int, overlong_buffer: OverlongBufferConfig) -> float:
    """Soft overlong punishment (DAPO, arXiv:2503.14476, eq. 13): the amount to subtract from the reward.

    0 up to max_generate_length - len, from there growing linearly to `penalty_factor` at max_generate_length, and
    `penalty_factor` beyond.
    """
    over = max(length - (max_generate_length - overlong_buffer.len), 0)
    return overlong_buffer.penalty_factor * min(over / overlong_buffer.len, 1.0)


def punish_overlong(item: Trajectory, max_generate_length: int, overlong_buffer: OverlongBufferConfig) -> None:
    """Subtract the penalty for the longest turn from that turn; `item.raw_reward` keeps the original reward.

    A turn that was cut pays the full penalty, even if something other than max_generate_length cut it.
    """
    item.raw_reward = item.reward
    lengths = [max_generate_length if turn.stop_reason == "length" else turn.stop - turn.start for turn in item.turns]
    if lengths:
        longest = lengths.index(max(lengths))
        penalty = overlong_penalty(lengths[longest], max_generate_length, overlong_buffer)
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
