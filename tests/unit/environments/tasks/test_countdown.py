from __future__ import annotations

import time
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, strategies as st

from skyrl_train.environments import registry
from skyrl_train.environments.tasks.countdown import evaluate_expression


def reward(text: str, target: Any = 24, numbers: Any = (3, 3, 8, 8), **settings: Any) -> float:
    truth = {"target": target, "numbers": list(numbers)}
    output = registry.make("countdown", settings, {"reward_spec": {"ground_truth": truth}}).step(text)
    assert output.done and output.metadata["acc"] == float(output.reward == 1.0)
    return output.reward


@pytest.mark.parametrize(
    "answer",
    [
        "8 / (3 - 8 / 3)",  # only exact in fractions
        "8/(3-8/3) = 24",
        "8 ÷ (3 − 8 ÷ 3)",
        "((8))/((3)-(8)/(3))",
    ],
)
def test_solution_gets_1(answer: str):
    assert reward(f"<think>8*3 <answer>no</answer></think> <answer> {answer} </answer>") == 1.0


@pytest.mark.parametrize(
    "answer", ["8 * 3", "8 * 3 * 8 / 8 + 3 - 3", "8 + 8 + 8", "3 / (8 - 8) + 3", "24", "9999999999 * 8"]
)
def test_other_expression_gets_format_score(answer: str):
    assert reward(f"<answer>{answer}</answer>") == 0.1
    assert reward(f"<answer>{answer}</answer>", format_score=0.0) == 0.0


@pytest.mark.fault("F13")
@pytest.mark.parametrize(
    "text",
    [
        "8/(3-8/3)",
        "<answer>8/(3-8/3)</answer> or <answer>8*3</answer>",
        "".join(f"<answer>8/(3-8/3)+{n}-{n}</answer>" for n in range(99)),
        "<answer>8/(3-8/3) or 8*3</answer>",
        "<answer>8/(3-8/3) = 25</answer>",
        "<answer>8/(3-8/3) = 24 = 24</answer>",
        "<answer>8/(3-8/3)",
        "",
    ],
)
def test_ambiguous_expression_gets_0(text: str):
    assert reward(text) == 0.0


@pytest.mark.fault("F14")
@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9",
        "9^9",
        "8//3",
        "8%3",
        "1<<99",
        "-3+8",
        "+3",
        "(" * 90 + "3" + ")" * 90 + "(",
        "(" * 10**6,
        "9" * 10**6,
        "3(8)",
        "3 8",
        "0x10",
        "1_0",
        "007",
        "__import__('os').system('true')",
        "max(3, 8)",
        "[3 for x in (1,)]",
        "3.0*8",
        "1e9",
        "3 and 8",
        "3\n+8",
        "\u0663",
    ],
)
def test_only_four_operations_are_accepted(expression: str):
    start = time.process_time()
    assert evaluate_expression(expression) is None
    assert time.process_time() - start < 2.0


@pytest.mark.fault("F14")
@pytest.mark.parametrize("unit", ["<answer>", "</answer>", "<answer>9</answer>", "<", "(", "</think>"])
def test_megabyte_of_text_is_parsed_quickly(unit: str):
    start = time.process_time()
    assert reward(unit * (2**20 // len(unit))) in (0.0, 0.1)
    assert time.process_time() - start < 5.0


@given(
    st.recursive(
        st.integers(0, 99).map(lambda n: (str(n), [n])),
        lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(
            lambda t: (f"({t[0][0]} {t[1]} {t[2][0]})", [*t[0][1], *t[2][1]])
        ),
        max_leaves=6,
    )
)
def test_values_match_python(case: tuple[str, list[int]]):
    expression, numbers = case
    result = evaluate_expression(expression)
    assert result is not None and result[1] == numbers
    try:
        expected = eval(expression, {}, {})
    except ZeroDivisionError:
        assert result[0] is None
        return
    assert result[0] is not None and float(result[0]) == pytest.approx(float(expected), rel=1e-9, abs=1e-6)
    assert isinstance(result[0], Fraction)


@pytest.mark.parametrize("truth", [None, "24", {"target": 24}, {"target": "x", "numbers": [1]}])
def test_row_without_target_and_numbers_is_rejected(truth: Any):
    with pytest.raises(ValueError, match=r"needs reward_spec|invalid literal"):
        registry.make("countdown", {}, {"reward_spec": {"ground_truth": truth}})
