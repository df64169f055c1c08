from __future__ import annotations

from typing import Any

import pytest

from skyrl_train.environments import registry
from skyrl_train.environments.tasks.multiply import MultiplyEnv, generate
from skyrl_train.errors import ConfigError


def env(truth: Any = "1,234", max_turns: int = 3, **settings: Any) -> MultiplyEnv:
    return registry.make("multiply", settings, {"reward_spec": {"ground_truth": truth}, "max_turns": max_turns})


@pytest.mark.parametrize(
    "answer", [r"\boxed{1234}", r"\boxed{1,234}", r"$\boxed{ 1234.0 }$", r"<think>\boxed{1}</think>\boxed{1234}"]
)
def test_right_number_gets_1_and_ends_episode(answer: str):
    output = env().step(answer)
    assert (output.reward, output.done, output.observations) == (1.0, True, [])
    assert output.metadata == {"turns": 1, "acc": 1.0, "parsed_answer": "1234"}


def test_only_last_turn_is_rewarded():
    environment = env()
    wrong, missing, last = (environment.step(text) for text in (r"\boxed{12}", "1234", r"\boxed{13}"))
    assert (wrong.reward, wrong.done) == (0.0, False)
    assert wrong.observations == [{"role": "user", "content": "Your answer '12' is incorrect. Please try again."}]
    assert r"format \boxed{your_answer}" in missing.observations[0]["content"]
    assert (last.reward, last.done, last.observations) == (0.5, True, [])
    assert env(max_turns=1, format_score=0.1).step(r"\boxed{13}").reward == 0.1


@pytest.mark.fault("F13")
@pytest.mark.parametrize(
    "text", [r"\boxed{1233} \boxed{1234}", r"\boxed{1233, 1234}", r"\boxed{1233 or 1234}", "1234", ""]
)
def test_several_guesses_get_0(text: str):
    assert env(max_turns=1).step(text).reward == 0.0


@pytest.mark.fault("F14")
def test_feedback_to_long_answer_is_short():
    output = env().step(r"\boxed{" + "9" * 2**20 + "}")
    assert len(output.observations[0]["content"]) < 200
    assert len(output.metadata["parsed_answer"]) == 40


def test_generated_problems_are_distinct_and_reproducible():
    train, validation = (generate(200, 2, seed=0, split=split) for split in ("train", "validation"))
    assert train[:50] == generate(50, 2, seed=0, split="train")
    questions = [{row["prompt"][1]["content"] for row in rows} for rows in (train, validation)]
    assert len(questions[0]) == len(questions[1]) == 200
    assert not questions[0] & questions[1]
    for row in train:
        a, b = row["prompt"][1]["content"].split(" * ")
        assert len(a) == len(b) == 2
        environment = MultiplyEnv({}, row)
        assert environment.step(rf"\boxed{{{int(a) * int(b)}}}").reward == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((9, 0, 0, "train"), "digits=0"), ((9, 2, 0, "test"), "split='test'"), ((99, 1, 0, "validation"), "found only")],
)
def test_impossible_arguments_are_rejected(arguments: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        generate(*arguments)


def test_non_numeric_ground_truth_is_rejected():
    with pytest.raises(ValueError, match="'many' is not a number"):
        env("many")
