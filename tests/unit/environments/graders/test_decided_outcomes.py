"""The table of docs/reference/graders.md: what each grader says to an answer where 42 is right."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_train.environments import registry
from skyrl_train.environments.graders.math_grader import get_grader, is_unambiguous
from skyrl_train.environments.graders.math_normalization import normalize_latex
from skyrl_train.environments.graders.numbers import parse_number
from tests.support.table_cases import check_each

PAGE = (Path(__file__).parents[4] / "docs" / "reference" / "graders.md").read_text()
RULED = {"gsm8k": "#### {}", "aime": "Answer: {}", "multiply": r"\boxed{{{}}}", "math": r"\boxed{{{}}}"}


def table() -> list[tuple[str, str, bool]]:
    """(environment, answer, right) for every cell."""
    lines = PAGE.partition("| an answer of 42 |")[2].partition("\n\n")[0].splitlines()
    assert [cell.strip(" `") for cell in lines[0].split("|")[:-1] if cell.strip()] == list(RULED)
    found = []
    for line in lines[2:]:
        answer, *verdicts = [cell.strip() for cell in line.strip("|").split(" | ")]
        for environment, verdict in zip(RULED, verdicts, strict=True):
            right = verdict.strip(" |").startswith("right")
            assert right or verdict.strip(" |") == "-", line
            found.append((environment, answer.strip("`"), right))
    return found


@pytest.fixture(scope="module", autouse=True)
def grader() -> Iterator[None]:
    get_grader(5.0).grade("42.0", "42")
    yield
    get_grader(5.0).close()


@pytest.mark.fault("F13")
def test_every_cell_of_the_table_holds():
    def grades(cell: tuple[str, str, bool]) -> None:
        environment, answer, right = cell
        made = registry.make(environment, {}, {"reward_spec": {"ground_truth": "42"}, "max_turns": 1})
        assert (made.step(RULED[environment].format(answer)).reward == 1.0) == right

    check_each(table(), grades)


@pytest.mark.fault("F14")
@pytest.mark.parametrize("unit", ["9", "(", "$", "*", ".", r"\(", ",111", "+", r"\boxed{", " ", "1/", "_"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_megabyte_takes_less_than_a_second(unit: str, wrapped: bool):
    text = unit * (2**20 // len(unit))
    field = f"({text})" if wrapped else text
    start = time.process_time()
    parse_number(field)
    is_unambiguous(normalize_latex(field), "42")
    assert time.process_time() - start < 1.0
    assert re.fullmatch("9+", text) or parse_number(field) is None
