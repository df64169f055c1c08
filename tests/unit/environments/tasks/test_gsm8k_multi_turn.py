from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from skyrl_train.environments import registry
from skyrl_train.environments.tasks.gsm8k_multi_turn import GSM8KMultiTurnEnv, resolve_max_turns


def env(**extras: Any) -> GSM8KMultiTurnEnv:
    return registry.make("gsm8k_multi_turn", {}, {"reward_spec": {"ground_truth": "18"}} | extras)


def test_wrong_answers_get_feedback_and_partial_reward():
    environment = env(max_turns=3)
    wrong, missing, right = (environment.step(text) for text in ("#### 17", "I think 18", "#### 18"))
    assert wrong.reward == pytest.approx(0.2 / 3)
    assert wrong.observations[0]["role"] == "user"
    assert wrong.observations[0]["content"].startswith("17 is not right.")
    assert missing.reward == 0.0
    assert 'no single number after "####"' in missing.observations[0]["content"]
    assert missing.observations[0]["content"].endswith("This is your last try.")
    assert (right.reward, right.done, right.observations) == (pytest.approx(1 - 0.2 / 3), True, [])
    assert right.metadata == {"turns": 3, "acc": 1.0}


def test_last_turn_ends_episode():
    environment = env(max_turns=2)
    assert not environment.step("#### 1").done
    last = environment.step("#### 2")
    assert (last.reward, last.done, last.observations) == (pytest.approx(0.1), True, [])


@pytest.mark.fault("F13")
@pytest.mark.parametrize("text", ["#### 17 or 18", "#### 17\n#### 18", "#### 181", "18", ""])
def test_several_guesses_get_0(text: str):
    output = env().step(text)
    assert output.reward == (0.04 if text == "#### 181" else 0.0)
    assert not output.done


@pytest.mark.fault("F14")
def test_feedback_to_long_answer_is_short():
    assert len(env().step("#### " + "9" * 2**20).observations[0]["content"]) < 200


@given(st.lists(st.sampled_from(["#### 17", "#### 18", "no idea", "#### 1\n#### 18"]), min_size=1, max_size=8))
def test_rewards_of_turns_sum_to_at_most_one(texts: list[str]):
    environment, total, done = env(max_turns=5), 0.0, False
    for text in texts:
        output = environment.step(text)
        total, done = total + output.reward, output.done
        if done:
            break
    solved = environment.turns <= len(texts) and texts[environment.turns - 1] == "#### 18"
    assert total == pytest.approx(1.0) if solved else total <= 0.2 + 1e-9
    assert done == (solved or environment.turns == 5)


@pytest.mark.parametrize(
    ("extras", "turns"),
    [({}, 5), ({"max_turns": 3}, 3), ({"max_turns": 8, "extra_info": {"max_turns": 2}}, 2), ({"extra_info": None}, 5)],
)
def test_smallest_turn_limit_applies(extras: dict[str, Any], turns: int):
    assert resolve_max_turns(extras) == turns


def test_zero_turns_are_rejected():
    with pytest.raises(ValueError, match="max_turns=0"):
        env(max_turns=0)
