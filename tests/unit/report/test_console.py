from __future__ import annotations

import io
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from rich.console import Console

from skyrl_train.messages import visible
from skyrl_train.report.console import ConsoleTracker, best_evaluation, evaluation_line, step_line
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


def lines_of(folder: Path, total: int, steps: int = 2, **trainer: Any) -> list[str]:
    """What a run says that began at step 0 and logged `steps` steps."""
    out = io.StringIO()
    setup = TrackerSetup(folder, "project", "mine", {"trainer": trainer})
    tracker = ConsoleTracker(setup, Console(file=out, markup=False, highlight=False, soft_wrap=True))
    tracker.begin(0, total)
    for step in range(1, steps + 1):
        tracker.log({"reward/mean": 0.5}, step)
    tracker.close()
    return out.getvalue().splitlines()


def test_the_last_lines_name_folder_steps_best_evaluation_and_how_to_go_on(tmp_path: Path):
    scores = [(0, 0.25), (1, 0.75), (2, 0.5)]
    rows = [{"step": step, "eval/openai/gsm8k/avg_score": score, "reward/mean": 1.0} for step, score in scores]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "global_step_1").mkdir()
    (tmp_path / "global_step_2.partial").mkdir()
    assert lines_of(tmp_path, total=3)[0] == f"mine: step 0 of 3, in {tmp_path}"
    assert lines_of(tmp_path, total=3)[-3:] == [
        f"mine: 2 of 3 steps, in {tmp_path}",
        "mine: best evaluation: openai/gsm8k avg_score 0.75 at step 1",
        "mine: resume from step 1: the same command",
    ]
    (tmp_path / "global_step_2").mkdir()
    assert lines_of(tmp_path, total=2)[-1] == (
        "mine: resume from step 2: the same command with a larger trainer.epochs or trainer.max_steps"
    )
    assert lines_of(tmp_path, total=3, resume_mode="none")[-1].endswith("command with trainer.resume_mode=latest")


def test_without_evaluation_and_checkpoint_the_last_lines_say_so(tmp_path: Path):
    assert lines_of(tmp_path, total=2)[-2:] == [
        f"mine: 2 of 2 steps, in {tmp_path}",
        "mine: no checkpoint to resume from",
    ]
    assert lines_of(tmp_path, total=2, ckpt_interval=-1)[-1].endswith("resume from: trainer.ckpt_interval is off")
    assert lines_of(tmp_path, total=0, steps=0) == [
        f"mine: evaluation, in {tmp_path}",
        f"mine: evaluated, in {tmp_path}",
    ]


def test_a_run_that_never_began_has_no_last_lines(tmp_path: Path):
    out = io.StringIO()
    ConsoleTracker(TrackerSetup(tmp_path, "project", "mine"), Console(file=out)).close()
    assert out.getvalue() == ""


def test_with_several_sources_the_best_evaluation_is_over_all_of_them():
    rows = [
        {"step": 1, "eval/a/avg_score": 1.0, "eval/b/avg_score": 0.0, "eval/all/avg_score": 0.5},
        {"step": 2, "eval/a/avg_score": 0.9, "eval/b/avg_score": 0.5, "eval/all/avg_score": 0.7, "eval/all/x": 9.0},
    ]
    assert best_evaluation(rows) == ("all", 0.7, 2)
    assert best_evaluation([{"step": 1, "eval/a/avg_score": None, "reward/mean": 1.0}]) is None


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
