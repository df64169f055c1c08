from __future__ import annotations

import re

import pytest

from skyrl_train.environments.tasks.arithmetic import ArithmeticEnv, apply_operation, assign_split, generate
from skyrl_train.errors import ConfigError


def words(text: str) -> list[str]:
    """Split text as a tokenizer of words and digits does."""
    return re.findall(r"[0-9]|[A-Za-z]+|####|[^\s\w]|\n", text)


@pytest.mark.parametrize("operations", [1, 2, 3, 4, 5])
def test_solutions_are_right_and_have_requested_steps(operations: int):
    for row in generate(200, operations, max_value=9, seed=1, split="train"):
        info = row["extra_info"]
        environment = ArithmeticEnv({}, row)
        assert environment.step(info["answer"]).reward == 1.0
        assert environment.step(info["direct"]).reward == 1.0
        *steps, last = info["answer"].splitlines()
        assert len(steps) == operations == info["operations"]
        assert last == info["direct"] == f"#### {row['reward_spec']['ground_truth']}"
        assert len(re.findall(r"\d+", info["question"])) == operations + 1
        assert row["prompt"] == [{"role": "user", "content": info["question"]}]


def test_solutions_match_numbers_of_question():
    for row in generate(200, operations=3, max_value=20, seed=3, split="train"):
        start, *steps = re.findall(r"[+*-]?\d+", row["extra_info"]["expression"])
        assert re.findall(r"\d+", row["extra_info"]["question"]) == [start, *(step[1:] for step in steps)]
        total = int(start)
        for step, line in zip(steps, row["extra_info"]["answer"].splitlines(), strict=False):
            after = apply_operation(step[0], total, int(step[1:]))
            assert line == f"{total} {step[0]} {step[1:]} = {after}"
            assert 0 <= after <= 209
            total = after


def test_splits_share_no_expression():
    seen: dict[str, set[str]] = {"train": set(), "validation": set()}
    for split in seen:
        for seed in range(3):
            for operations, max_value in ((1, 20), (2, 9), (2, 20), (3, 9)):
                rows = generate(100, operations, max_value, seed, split)
                assert all(row["extra_info"]["split"] == split for row in rows)
                seen[split] |= {row["extra_info"]["expression"] for row in rows}
    assert not seen["train"] & seen["validation"]
    assert {assign_split(expression) for expression in seen["validation"]} == {"validation"}


def test_split_of_expression_is_stable():
    sample = [f"{a}+{b}-1" for a in range(1, 10) for b in range(1, 10)]
    assert [expression for expression in sample if assign_split(expression) == "validation"] == [
        "1+9-1",
        "2+5-1",
        "3+2-1",
        "3+8-1",
        "4+6-1",
        "4+8-1",
        "6+8-1",
        "7+7-1",
        "9+5-1",
    ]


def test_same_arguments_give_same_problems():
    assert generate(50, 2, 9, 0, "train") == generate(50, 2, 9, 0, "train")
    assert generate(50, 2, 9, 0, "train") != generate(50, 2, 9, 1, "train")
    assert generate(50, 2, 9, 0, "train") == generate(80, 2, 9, 0, "train")[:50]


def test_problems_are_all_different():
    rows = generate(3000, 2, 9, 0, "train")
    assert len({row["prompt"][0]["content"] for row in rows}) == 3000


def test_prompts_are_short_and_the_vocabulary_small():
    vocabulary: set[str] = set()
    for operations in range(1, 6):
        for row in generate(500, operations, 9, 0, "train"):
            question, answer = words(row["extra_info"]["question"]), words(row["extra_info"]["answer"])
            assert len(question) < 45
            vocabulary.update(question, answer)
    assert len(vocabulary) < 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 0, 9, 0, "train"), "operations=0 must be from 1 to 5"),
        ((10, 6, 9, 0, "train"), "operations=6"),
        ((10, 2, 1, 0, "train"), "max_value=1"),
        ((10, 2, 9, 0, "test"), "split='test' is not 'train' or 'validation'"),
        ((10_000, 1, 2, 0, "train"), "different train problems of count=10000"),
    ],
)
def test_impossible_arguments_are_rejected(arguments: tuple[int, int, int, int, str], message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        generate(*arguments)
