from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from skyrl_train.config.schema import OverlongBufferConfig
from skyrl_train.data.batch import collate
from skyrl_train.data.messages import Prompt
from skyrl_train.data.trajectory import FAILED, OK, Trajectory, TrajectoryGroup, Turn
from skyrl_train.rollouts.collector import RewardShaping, mask_group, overlong_penalty
from tests.support.trajectories import trajectory_from

LIMIT = 20
PROMPT = Prompt("0", [], "none")


def response(reward: float, length: int = 5, stop_reason: str = "stop", before: tuple[Turn, ...] = ()) -> Trajectory:
    start = before[-1].stop if before else 0
    turns = [*before, Turn(start, start + length, reward, stop_reason, 0, 0)]
    total = start + length
    return trajectory_from(
        PROMPT,
        *(0, [1], [2] * total, [1] * total, [-0.5] * total, turns),
        reward=sum(turn.reward for turn in turns),
        stop_reason=stop_reason,
        temperature=1.0,
    )


def shaped(*items: Trajectory, **settings: object) -> list[float]:
    shaping = RewardShaping(max_generate_length=LIMIT, **settings)  # type: ignore[arg-type]
    return [item.reward for item in shaping(TrajectoryGroup(PROMPT, list(items))).trajectories]


def test_shaping_is_off_by_default():
    truncated = response(1.0, LIMIT, "length")
    assert shaped(truncated, response(-1.0)) == [1.0, -1.0]
    assert truncated.loss_mask.tolist() == [1] * LIMIT
    assert truncated.raw_reward is None


@pytest.mark.parametrize(
    ("length", "expected"), [(1, 0.0), (15, 0.0), (16, 0.1), (18, 0.3), (19, 0.4), (20, 0.5), (25, 0.5)]
)
def test_penalty_is_equation_13_of_dapo(length: int, expected: float):
    assert overlong_penalty(length, 20, OverlongBufferConfig(5, 0.5)) == pytest.approx(expected, abs=1e-15)


def test_penalty_lowers_turn_reward_and_keeps_raw_reward():
    item = response(1.0, length=18)
    assert shaped(item, overlong_buffer=OverlongBufferConfig(len=5)) == [1.0 - 3 / 5]
    assert (item.raw_reward, item.outcome, item.turns[0].reward) == (1.0, 1.0, 1.0 - 3 / 5)


def test_longest_turn_gets_the_penalty():
    first = Turn(0, 18, 0.25, "stop", 0, 0)
    item = response(1.0, length=16, before=(first,))
    assert shaped(item, overlong_buffer=OverlongBufferConfig(len=5)) == [1.25 - 3 / 5]
    assert [turn.reward for turn in item.turns] == [0.25 - 3 / 5, 1.0]


def test_truncated_response_gets_the_full_penalty():
    assert shaped(response(0.0, length=3, stop_reason="length"), overlong_buffer=OverlongBufferConfig(len=5)) == [-1.0]


def test_unfinished_response_gets_no_reward():
    item = response(0.75, LIMIT, "length", before=(Turn(0, 2, 0.5, "stop", 0, 0),))
    assert shaped(item, zero_reward_on_non_stop=True) == [0.0]
    assert sum(turn.reward for turn in item.turns) == 0.0


def test_unfinished_reward_is_at_most_the_worst():
    wrong, right = response(-1.0, LIMIT, "length"), response(1.0, LIMIT, "length")
    assert shaped(wrong, zero_reward_on_non_stop=True) == [-1.0]
    assert shaped(right, response(-1.0), response(1.0), zero_reward_on_non_stop=True) == [-1.0, -1.0, 1.0]


rewards = st.floats(-3, 3)
finished = st.builds(response, rewards, st.integers(1, LIMIT))
truncated = st.builds(response, rewards, st.integers(1, LIMIT), st.just("length"))


@given(
    st.lists(finished, min_size=1),
    st.lists(truncated, min_size=1),
    st.integers(0, LIMIT),
    st.floats(0, 2),
    st.booleans(),
)
def test_truncated_answer_never_beats_a_wrong_one(
    finished: list[Trajectory], truncated: list[Trajectory], buffer: int, factor: float, zero: bool
):
    before = [item.reward for item in [*finished, *truncated]]
    settings = {"overlong_buffer": OverlongBufferConfig(buffer, factor), "zero_reward_on_non_stop": zero}
    after = shaped(*finished, *truncated, **settings)
    assert all(new <= old for new, old in zip(after, before, strict=True)), "no reward is raised"
    for old_truncated, new_truncated in list(zip(before, after, strict=True))[len(finished) :]:
        for old, new in list(zip(before, after, strict=True))[: len(finished)]:
            if zero or old_truncated <= old:
                assert new_truncated <= new


def test_overlong_filtering_masks_by_stop_reason():
    right, limit, truncated = response(1.0), response(1.0, LIMIT), response(0.0, 4, "length")
    assert shaped(right, limit, truncated, apply_overlong_filtering=True) == [1.0, 1.0, 0.0]
    batch = collate([TrajectoryGroup(PROMPT, [right, limit, truncated])])
    assert batch.sum_per_sequence(batch.loss_mask.long()).tolist() == [5, LIMIT, 0]
    assert batch.status.tolist() == [True, True, True], "its reward counts in the group's mean"


def test_failed_episodes_are_not_shaped():
    failed = response(0.0, LIMIT, "length")
    failed.status = FAILED
    ended_badly = response(-1.0)
    settings = {
        "zero_reward_on_non_stop": True,
        "overlong_buffer": OverlongBufferConfig(5),
        "apply_overlong_filtering": True,
    }
    assert shaped(failed, ended_badly, **settings) == [0.0, -1.0]
    assert failed.raw_reward is None


def test_token_rewards_sum_to_the_shaped_reward():
    items = [response(0.5, LIMIT, "length", before=(Turn(0, 17, 0.5, "stop", 0, 0),)), response(-0.25, 19)]
    shaped(*items, zero_reward_on_non_stop=True, overlong_buffer=OverlongBufferConfig(len=7))
    batch = collate([TrajectoryGroup(PROMPT, items)])
    assert batch.token_rewards is not None
    assert batch.sum_per_sequence(batch.token_rewards).tolist() == pytest.approx(batch.rewards.tolist())
    assert items[0].reward == -1.25
    assert items[1].reward == pytest.approx(-0.25 - 6 / 7)


def test_masked_group_keeps_rewards_and_statuses():
    group = TrajectoryGroup(PROMPT, [response(1.0), response(1.0)])
    mask_group(group)
    assert [(item.status, item.reward, sum(item.loss_mask)) for item in group.trajectories] == [(OK, 1.0, 0)] * 2
