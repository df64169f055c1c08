"""The math grader's verdicts on hand-written pairs, with its errors by category."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_train.environments.graders.math_grader import MathGrader
from tests.unit.environments.graders.math_pairs import PAIRS

DEADLINE_S = 30.0
"""Deadline of one comparison on a busy machine."""
MAX_ERRORS = 0.02


@pytest.fixture(scope="module")
def grader() -> Iterator[MathGrader]:
    with MathGrader(DEADLINE_S) as grader:
        grader.grade("42.0", "42")
        yield grader


def test_at_most_two_percent_of_verdicts_are_wrong(grader: MathGrader):
    errors = {
        category: [pair for pair in pairs if grader.grade(pair[1], pair[0])[0] != pair[2]]
        for category, pairs in PAIRS.items()
    }
    for category, wrong in errors.items():
        print(f"{category}: {len(wrong)} of {len(PAIRS[category])} wrong {wrong}")
    assert sum(map(len, errors.values())) <= MAX_ERRORS * sum(map(len, PAIRS.values()))


def test_verdicts_of_the_documentation_hold(grader: MathGrader):
    page = (Path(__file__).parents[4] / "docs" / "reference" / "graders.md").read_text()
    lines = page.partition("| truth | right | wrong |")[2].partition("\n\n")[0].splitlines()[2:]
    for line in lines:
        truth, right, wrong = (re.findall("`([^`]+)`", cell) for cell in line.strip("|").split(" | "))
        assert [answer for answer in right if not grader.grade(answer, truth[0])[0]] == []
        assert [answer for answer in wrong if grader.grade(answer, truth[0])[0]] == []
    assert len(lines) > 10


def test_truth_of_every_pair_can_be_read(grader: MathGrader):
    truths = {truth for truth, _, _ in itertools.chain.from_iterable(PAIRS.values())}
    assert {truth: why for truth in truths if (why := grader.ground_truth_problem(truth))} == {}


def test_pairs_are_many_and_half_of_them_unequal():
    assert sum(map(len, PAIRS.values())) >= 300
    for category, pairs in PAIRS.items():
        assert len(pairs) >= 15, category
        assert len({pair[:2] for pair in pairs}) == len(pairs), category
    unequal = [pair for pair in itertools.chain.from_iterable(PAIRS.values()) if not pair[2]]
    assert len(unequal) >= sum(map(len, PAIRS.values())) / 2
