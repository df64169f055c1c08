"""What training makes of the environment's rewards: answers that did not end by themselves, and long ones.

Everything here lowers rewards and raises none, and a response that was cut by length is never lowered by less than one
that was not: so it is not worth more than a wrong answer unless the environment itself says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from skyrl_train.data.trajectory import OK, Trajectory, TrajectoryGroup


@dataclass(frozen=True)
class RewardShaping:
    """Changes a training group in place, whatever is off left out; evaluation never comes here.

    Order: `zero_unfinished` decides what an answer is worth, `punish_overlong` what its length costs, `mask_truncated`
    what is trained on.
    """

    zero_reward_on_non_stop: bool = False
    apply_overlong_filtering: bool = False
    overlong_buffer_tokens: int = 0
    """0 is off."""
    overlong_penalty_factor: float = 1.0
    max_generate_tokens: int = 1
    """What a turn may have at most."""

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
    """A response of a group that did not end by itself gets 0, or less where less is due.

    Less is the environment's own verdict, or the worst reward of those of its group that did end: where wrong answers
    get -1, a flat 0 would teach the model not to end.
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
    """Soft overlong punishment (DAPO, arXiv:2503.14476, eq. 13), as what is subtracted from the reward.

    0 up to max_tokens - buffer_tokens, growing linearly from there to `factor` at max_tokens, and `factor` beyond.
    """
    return factor * min(max(length - (max_tokens - buffer_tokens), 0) / buffer_tokens, 1.0)


def punish_overlong(item: Trajectory, max_tokens: int, buffer_tokens: int, factor: float) -> None:
    """Subtract the penalty of its longest turn, there; `item.raw_reward` keeps what the reward was.

    A turn that was cut pays all of it, also where something else than max_tokens cut it short.
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

    Their rewards stay in the statistics of their group: the others are compared with them.
    """
    for item in valid:
        if item.stop_reason == "length":
            item.loss_mask = [0] * len(item.loss_mask)


def mask_group(group: TrajectoryGroup) -> None:
    """No loss on any response; rewards and statuses stay what they are."""
    for item in group.trajectories:
        item.loss_mask = [0] * len(item.loss_mask)
