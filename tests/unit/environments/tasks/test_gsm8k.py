from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from skyrl_train.environments.tasks.gsm8k import GSM8KEnv, extract_flexible_answer, extract_strict_answer, score


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("#### 18", "18"),
        ("#### 18.", "18"),
        ("#### $18", "18"),
        ("#### \\$18", "18"),
        ("#### 18.00", "18"),
        ("#### 1,234", "1234"),
        ("#### $1,234.50.", "1234.5"),
        ("####18", "18"),
        ("#### 018", "18"),
        ("#### .5", "0.5"),
        ("#### -3", "-3"),
        ("#### -$3", "-3"),
        ("#### $-3", "-3"),
        ("#### -0", "0"),
        ("9 * 2 = 18\n#### **18**", "18"),
        ("#### **18**.", "18"),
        ("#### $\\boxed{18}$", "18"),
        ("#### \\(18\\)", "18"),
        ("#### $(18)$", "18"),
        ("#### Step 2: 41 + 1\n#### 18", "18"),
        ("#### Step 1: add\n#### 18", "18"),
        ("#### 18\n#### 18.0", "18"),
        ("#### 18", "18.0"),
        ("#### 18", "$18."),
        ("#### 70000", "70,000"),
    ],
)
def test_right_answers_are_accepted_in_all_spellings(answer: str, truth: str):
    assert score(answer, truth) == 1.0
    assert score(answer, truth, method="flexible") == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        "#### 17",
        "18",
        "The answer is 18.",
        "### 18",
        "##### 18",
        "#### eighteen",
        "#### x = 18",
        "#### 1818",
        "#### 181",
    ],
)
def test_wrong_or_unmarked_answer_is_rejected(answer: str):
    assert score(answer, "18") == 0.0


@pytest.mark.fault("F13")
@pytest.mark.parametrize("method", ["strict", "flexible"])
@pytest.mark.parametrize(
    "answer",
    [
        "#### 41 or 42",
        "#### \\boxed{41}\n#### 42",
        "#### `41`\n#### 42",
        "#### \\(41\\)\n#### 42",
        "#### x = 41\n#### 42",
        "#### _41_\n#### 42",
        "#### \u00a041\n#### 42",
        "#### (41)\n#### 42",
        "#### 42 or 41",
        "#### 41\n#### 42",
        "#### 42\n#### 41\n#### 42",
        "#### 41 #### 42",
        "#### 41,42",
        "#### 42, 41",
        "#### 41/42",
        "#### 42/1/2",
        "#### 42-1",
        "#### 42e1",
        "#### 42 ½",
        "#### 42²",
        "#### ".join(str(n) + "\n" for n in range(100)),
        "#### 142",
        "#### 4 2",
        "#### 4.2",
        "#### -42",
        "#### \u0664\u0662",
    ],
)
def test_guessing_is_never_right(method: str, answer: str):
    assert score(answer, "42", method) == 0.0


@pytest.mark.fault("F13")
@pytest.mark.parametrize(
    "answer",
    ["41 or 42", "41, 42", "41/42", "41 42", "41 (or 42)", "**41** or **42**", "41, maybe 42", "41or42", "$41 and $42"],
)
def test_alternatives_are_not_an_answer(answer: str):
    assert extract_flexible_answer(f"So it is {answer}.") is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("6 * 7 = 42", "42"),
        ("Of 50 apples she keeps 42.", "42"),
        ("It costs $1,042.50!", "1042.5"),
        ("42, I repeat: 42", "42"),
        ("no number . here", None),
        ("", None),
    ],
)
def test_flexible_answer_is_last_number(text: str, answer: str | None):
    assert extract_flexible_answer(text) == answer


@pytest.mark.fault("F14")
@pytest.mark.parametrize(
    "unit",
    [
        "9",
        "#### 5 ",
        "#### 5\n",
        "####",
        "1,",
        ",111",
        "####\t",
        "$",
        "-",
        "\\",
        ". ",
        "41 or ",
        "{",
        "9^{",
        "!",
        "½",
        "\n",
    ],
)
@pytest.mark.parametrize(("before", "after"), [("", ""), ("#### 1", "1"), ("41 ", " 42")])
def test_megabyte_of_text_takes_under_a_second(unit: str, before: str, after: str):
    text = before + unit * (2**20 // len(unit)) + after
    start = time.process_time()
    extract_strict_answer(text)
    extract_flexible_answer(text)
    assert time.process_time() - start < 10.0


@given(st.text(alphabet="#0123456789.,-$ or\n½٤", max_size=60) | st.text(max_size=60))
def test_any_text_is_scored(text: str):
    for method in ("strict", "flexible"):
        assert score(text, "42", method) in (0.0, 1.0)
        assert score(text + "\n#### 42\n#### 43", "42", method) == 0.0


@given(st.integers(-(10**12), 10**12), st.sampled_from(["{}", "{}.", "{}.00", "${}", "{:,}", "{:,}.0"]))
def test_every_integer_is_recognized(number: int, written: str):
    assert score(f"#### {written.format(number)}", str(number)) == 1.0
    assert score(f"#### {written.format(number + 1)}", str(number)) == 0.0


def test_format_score_rewards_one_clear_wrong_answer_only():
    assert score("#### 17", "18", format_score=0.1) == 0.1
    assert score("no idea", "18", format_score=0.1) == 0.0
    assert score("#### 17 or 18", "18", format_score=0.1) == 0.0


def env(**settings: Any) -> GSM8KEnv:
    return GSM8KEnv(settings, {"reward_spec": {"method": "rule", "ground_truth": "18"}})


def test_environment_has_one_turn_and_uses_settings():
    output = env().step("it is 18")
    assert (output.reward, output.done, output.observations) == (0.0, True, [])
    assert env(method="flexible").step("it is 18").reward == 1.0
    assert env(format_score=0.2).step("#### 3").reward == 0.2
    with pytest.raises(ValueError, match="method='loose' is not one of"):
        env(method="loose")


@pytest.mark.fault("F15")
@pytest.mark.parametrize("text", ["", " \n", "First, 9 * 2 = 1", "#### "])
def test_empty_or_truncated_answer_gets_0(text: str):
    assert env().step(text).reward == 0.0


@pytest.mark.parametrize("extras", [{}, {"reward_spec": None}, {"reward_spec": {"method": "rule"}}])
def test_row_without_answer_is_rejected(extras: dict[str, Any]):
    with pytest.raises(ValueError, match="reward_spec"):
        GSM8KEnv({}, extras)


def test_non_numeric_ground_truth_is_rejected():
    with pytest.raises(ValueError, match="'eighteen' is not a number"):
        score("#### 18", "eighteen")


def test_gsm8k_solutions_pass_the_strict_rule(gsm8k_jsonl: Path):
    for name in ("train", "test"):
        for line in (gsm8k_jsonl / f"{name}.jsonl").read_text().splitlines():
            answer = json.loads(line)["answer"]
            assert score(answer, answer.rpartition("#### ")[2]) == 1.0
