from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from skyrl_train.data.reasoning import MARKER_PATTERN
from skyrl_train.environments import registry
from skyrl_train.environments.tasks.aime import extract_answer


def step(text: str, truth: Any = "42", spec: str = "reward_spec") -> tuple[float, dict[str, Any]]:
    output = registry.make("aime", {}, {spec: {"ground_truth": truth}}).step(text)
    assert output.done
    return output.reward, output.metadata


@pytest.mark.parametrize(
    "text",
    [
        "Answer: 42",
        "**Answer:** $42$.",
        "So the\nANSWER : 042",
        r"It is \boxed{42}.",
        "Answer: \\boxed{42}\nAnswer: 42",
        r"41 or 43? No: \boxed{42}",
        "Answer: to be found\nAnswer: 42",
        "Answer: The final answer is $\\boxed{42}$.",
        "**Final Answer:** The answer is \\boxed{42}.",
        "Answer: $x = \\boxed{42}$",
        "__Answer:__ 42",
        "**Answer: 42**",
        "Answer: **42**.",
        "<think>Answer: 41</think>Answer: 42",
        "Answer: 41" + " so I try on" * 30 + "\nAnswer: 42",
    ],
)
def test_final_integer_is_the_answer(text: str):
    assert step(text) == (1.0, {"acc": 1.0, "no_answer": 0.0, "pred": "42"})


@pytest.mark.fault("F13")
@pytest.mark.parametrize(
    "text",
    [
        "Answer: 41 or 42",
        "Answer: \\boxed{42} or 41",
        "Answer: not 42",
        "Answer: \u00bd\nAnswer: 42",
        "Answer: 41\nAnswer: 42",
        "Answer: 42\nAnswer: 41\nAnswer: 42",
        r"\boxed{41}\boxed{42}",
        "Answer: 41\n\\boxed{42}",
        "Answer: 42.5",
        "Answer: 42²",
        "Answer: -42",
        "Answer: 142",
        "Answer: 4 2",
        "Answer: 42e1",
        "Answer: 84/2",
        "\n".join(f"Answer: {n}" for n in range(1000)),
        "42",
        "Answer: forty-two",
        "",
    ],
)
def test_wrong_answers_get_minus_one(text: str):
    reward, metadata = step(text)
    assert (reward, metadata["acc"]) == (-1.0, 0.0)


@pytest.mark.fault("F14")
@pytest.mark.parametrize("unit", ["9", "Answer: 9\n", "answer", "\\boxed{", "{", "10000000! "])
def test_only_end_of_long_text_is_parsed(unit: str):
    assert step(unit * (2**20 // len(unit)))[0] == -1.0
    assert extract_answer(unit * (2**20 // len(unit)) + "</think>\nAnswer: 42") == "42"


WITHOUT_MARKERS = st.text(max_size=400).filter(lambda text: not MARKER_PATTERN.search(text) and "<|" not in text)
"""Texts that open no block of reasoning, such as `<reasoning>`, which `</think>` would not close."""


@given(WITHOUT_MARKERS, st.integers(0, 999))
def test_integers_are_recognized_exactly(before: str, number: int):
    assert extract_answer(f"{before}</think>\nAnswer: {number}") == str(number)
    assert extract_answer(f"{before}</think>\nAnswer: {number} or {number + 1}") is None


@pytest.mark.parametrize("truth", ["1/2", r"\frac{1}{2}", r"$\dfrac{2}{4}$"])
def test_fractions_are_compared_by_value(truth: str):
    assert step(r"Answer: \frac{1}{2}", truth)[0] == 1.0
    for right in ("1/2.", "(1/2)", r"\tfrac12", r"$\frac{1}{2}$.", "**2/4**"):
        assert step(f"Answer: {right}", truth)[0] == 1.0
    assert step(r"Answer: \frac{-1}{2}", "-1/2")[0] == 1.0
    assert step("Answer: 0/2", truth) == (-1.0, {"acc": 0.0, "no_answer": 0.0, "pred": "0"})
    for wrong in (r"\frac{1}{3}", "0.5", "1/2 or 1/3", "1/0", "1", "-1/2"):
        assert step(f"Answer: {wrong}", truth)[0] == -1.0


def test_dapo_rows_are_accepted_and_others_rejected():
    assert step("Answer: 42", 42, "reward_model")[0] == 1.0
    with pytest.raises(ValueError, match=r"'three' is neither a number nor a fraction"):
        step("Answer: 3", "three")
    with pytest.raises(ValueError, match="reward_spec"):
        registry.make("aime", {}, {})
