from __future__ import annotations

import io
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from skyrl_train.report.console import ConsoleTracker, evaluation_line, step_line, visible
from skyrl_train.report.protocol import SampleRow, TrackerSetup

SETUP = TrackerSetup(Path("unused"), "project", "run [bold]")
HOSTILE = "\x1b[31mred\x1b]0;title\x07\x00[bold]x[/bold][/nothing]</think>\ud800\u202e\r\nnext"


def run(console: Console) -> None:
    tracker = ConsoleTracker(SETUP, console)
    tracker.begin(0, 2)
    tracker.log({"reward/mean": 0.5, "policy/kl": float("nan"), "eval/gsm8k/pass_at_4": 0.25}, 1)
    tracker.samples([SampleRow(HOSTILE, HOSTILE, 1.0, "stop")], 1)
    tracker.close()


@pytest.mark.fault("F24")
@given(st.text(st.characters(exclude_categories=())))
def test_what_is_shown_has_no_control_character(text: str):
    assert not [c for c in visible(text) if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]


@pytest.mark.fault("F24")
def test_hostile_completions_are_plain_text_in_plain_lines():
    out = io.StringIO()
    run(Console(file=out, markup=False, highlight=False, soft_wrap=True))
    text = out.getvalue()
    assert "\x1b" not in text
    assert "\x00" not in text
    assert "\\x1b[31mred" in text
    assert "[bold]x[/bold][/nothing]</think>\\ud800\\u202e\\r\\nnext" in text
    assert "run [bold]: step 0 of 2" in text


@pytest.mark.fault("F24")
def test_a_terminal_gets_our_colours_but_none_of_the_model():
    out = io.StringIO()
    run(Console(file=out, force_terminal=True, markup=False, highlight=False, width=400))
    text = out.getvalue()
    assert "\x1b[31m" not in text
    assert "\x1b]0;title" not in text
    assert "[bold]x[/bold][/nothing]" in text


def test_an_ascii_terminal_survives_any_letter():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    console = Console(file=stream, markup=False, highlight=False, soft_wrap=True)
    ConsoleTracker(SETUP, console).samples([SampleRow("é", "数", 1.0, "stop")], 1)
    assert b"\\u6570" in raw.getvalue()


def test_a_line_names_what_was_measured_and_nothing_else():
    line = step_line(
        {
            "reward/mean": 0.41234567,
            "throughput/tokens_per_s": 12345.6,
            "timing/step_s": 3.5,
            "timing/generate_s": 2,
            "rollouts/failed": 3.0,
        }
    )
    assert line == "reward 0.4123  12346 tokens/s  FAILED 3  3.5 s (generate 2)"
    assert step_line({}) == ""
    assert "FAILED" not in step_line({"rollouts/failed": 0.0})


def test_evaluations_are_grouped_by_source_also_when_its_name_has_slashes():
    metrics = {"eval/b/avg_score": 1.0, "eval/openai/gsm8k/avg_score": 0.5, "eval/b/pass_at_4": 0.0, "x": 1.0}
    assert evaluation_line(metrics) == "eval b: avg_score 1, pass_at_4 0; openai/gsm8k: avg_score 0.5"
    assert evaluation_line({"reward/mean": 1.0}) == ""
