from __future__ import annotations

import time

import pytest
from hypothesis import given, strategies as st

from skyrl_train.environments.graders.boxed import extract_boxed_answer, iter_boxed
from skyrl_train.environments.graders.numbers import parse_number


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"So \boxed{42}.", "42"),
        (r"\boxed {42} and again $\boxed{ 42 }$", "42"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{7}}", r"\boxed{7}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\\{ \boxed{5}", "5"),
        (r"<think>\boxed{41}? no</think>\boxed{42}", "42"),
        (r"\fbox{3}", "3"),
        (r"\\boxed{3}", "3"),
        (r"\boxed{}", None),
        (r"\boxed{42", None),
        (r"\boxed{41} \boxed{42", "41"),
        (r"\boxed42", None),
        ("42", None),
        ("", None),
    ],
)
def test_answer_is_content_of_box(text: str, answer: str | None):
    assert extract_boxed_answer(text) == answer


@pytest.mark.fault("F13")
@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{41} or \boxed{42}",
        r"\boxed{42} \boxed{41} \boxed{42}",
        "".join(rf"\boxed{{{n}}}" for n in range(1000)),
        r"</think>\boxed{41}\boxed{42}",
        r"\boxed{\boxed{42}",
    ],
)
def test_different_boxes_are_not_an_answer(text: str):
    assert extract_boxed_answer(text) is None


@pytest.mark.fault("F14")
@pytest.mark.parametrize(
    "unit", ["{", "}", r"\boxed{", r"\boxed{1}", "\\", r"\{", "9", "</think>", r"\boxed" + " " * 99]
)
def test_boxes_are_found_in_linear_time(unit: str):
    start = time.process_time()
    for text in (unit * (2**20 // len(unit)), r"\boxed{" + unit * (2**20 // len(unit))):
        extract_boxed_answer(text)
        assert sum(map(len, iter_boxed(text))) <= len(text)
    assert time.process_time() - start < 10.0


@given(st.text(alphabet=r"\{}boxed4 ", max_size=60), st.integers(0, 99))
def test_text_before_box_never_changes_answer(text: str, value: int):
    assert extract_boxed_answer(rf"{text}</think>\boxed{{{value}}}") == str(value)
    assert extract_boxed_answer(rf"{text}\boxed{{{value}}}\boxed{{{value + 1}}}") is None


@pytest.mark.parametrize(
    ("text", "canonical"),
    [("1,234.50", "1234.5"), ("$7.", "7"), ("-0", "0"), ("4 2", None), ("x", None), ("1e3", None)],
)
def test_numbers_have_one_form(text: str, canonical: str | None):
    assert parse_number(text) == canonical
