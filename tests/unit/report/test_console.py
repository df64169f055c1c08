from __future__ import annotations

import io
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from skyrl_train.report import console as module
from skyrl_train.report.console import (
    ConsoleTracker,
    best_evaluation,
    evaluation_line,
    format_duration,
    format_number,
    rollout_line,
    step_line,
    time_split,
    truncate_text,
)
from skyrl_train.report.protocol import SampleRow, TrackerSetup

SETUP = TrackerSetup(Path("unused"), "project", "run [bold]")
HOSTILE = "\x1b[31mred\x1b]0;title\x07\x00[bold]x[/bold][/nothing]</think>\ud800\u202e\r\nnext"


def run(console: Console) -> None:
    tracker = ConsoleTracker(SETUP, console)
    tracker.begin(0, 2)
    tracker.log({"reward/mean": 0.5, "policy/kl": float("nan"), "eval/gsm8k/pass_at_4": 0.25}, 1)
    tracker.samples([SampleRow(HOSTILE, HOSTILE, 1.0, "stop")], 1)
    tracker.close()


def test_rollout_is_one_printable_line():
    line = rollout_line(SampleRow("a word " * 40 + "= ?", HOSTILE + " word" * 60, 0.5, "length"), 12.34)
    assert line.startswith("  12.3 s   …") and " = ? -> \\x1b[31mred" in line
    assert line.endswith("… (reward 0.500, stopped by length)") and line.isprintable() and len(line) < 260


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
def test_terminal_gets_no_colors_of_the_model():
    out = io.StringIO()
    run(Console(file=out, force_terminal=True, markup=False, highlight=False, width=400))
    text = out.getvalue()
    assert "\x1b[31m" not in text
    assert "\x1b]0;title" not in text
    assert "[bold]x[/bold][/nothing]" in text


def lines_of(folder: Path, total: int, steps: int = 2, **trainer: Any) -> list[str]:
    """Return the console lines of a run from step 0 that logs `steps` steps."""
    out = io.StringIO()
    setup = TrackerSetup(folder, "project", "mine", {"trainer": trainer})
    tracker = ConsoleTracker(setup, Console(file=out, markup=False, highlight=False, soft_wrap=True))
    tracker.begin(0, total)
    for step in range(1, steps + 1):
        tracker.log({"reward/mean": 0.5}, step)
    tracker.close()
    return out.getvalue().splitlines()


def test_summary_names_steps_best_evaluation_and_resume(tmp_path: Path):
    scores = [(0, 0.25), (1, 0.75), (2, 0.5)]
    rows = [{"step": step, "eval/openai/gsm8k/avg_score": score, "reward/mean": 1.0} for step, score in scores]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "global_step_1").mkdir()
    (tmp_path / "global_step_2.partial").mkdir()
    assert lines_of(tmp_path, total=3)[0] == f"mine: step 0 of 3, in {tmp_path}"
    assert lines_of(tmp_path, total=3)[-3:] == [
        f"mine: 2 of 3 steps, in {tmp_path}",
        "mine: best evaluation: openai/gsm8k avg_score 0.750 at step 1",
        "mine: resume from step 1: the same command",
    ]
    (tmp_path / "global_step_2").mkdir()
    assert lines_of(tmp_path, total=2)[-1] == (
        "mine: resume from step 2: the same command with a larger trainer.epochs or trainer.max_steps"
    )
    assert lines_of(tmp_path, total=3, resume_mode="none")[-1].endswith("command with trainer.resume_mode=latest")


def test_summary_without_evaluation_and_checkpoint(tmp_path: Path):
    assert lines_of(tmp_path, total=2)[-2:] == [
        f"mine: 2 of 2 steps, in {tmp_path}",
        "mine: no checkpoint to resume from",
    ]
    assert lines_of(tmp_path, total=2, ckpt_interval=-1)[-1].endswith("resume from: trainer.ckpt_interval is off")
    assert lines_of(tmp_path, total=0, steps=0) == [
        f"mine: evaluation, in {tmp_path}",
        f"mine: evaluated, in {tmp_path}",
    ]


def test_unrewarded_run_says_that_nothing_was_learned(tmp_path: Path):
    folder = tmp_path / "my run"
    folder.mkdir()

    def lines(rewards: list[float], **trainer: Any) -> list[str]:
        rows = [{"step": step, "reward/mean": reward, "reward/std": 0.0} for step, reward in enumerate(rewards, 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return [line for line in lines_of(folder, total=2, **trainer) if "nothing was learned" in line]

    (line,) = lines([0.0, 0.0])
    assert f"`skyrl-train watch '{folder}'`" in line
    assert lines([0.0, 0.125]) == lines([]) == lines([0.0], algorithm={"advantage_estimator": "distillation"}) == []


def test_unstarted_run_prints_no_summary(tmp_path: Path):
    out = io.StringIO()
    ConsoleTracker(TrackerSetup(tmp_path, "project", "mine"), Console(file=out)).close()
    assert out.getvalue() == ""


def test_best_evaluation_uses_mean_over_all_sources():
    rows = [
        {"step": 1, "eval/a/avg_score": 1.0, "eval/b/avg_score": 0.0, "eval/all/avg_score": 0.5},
        {"step": 2, "eval/a/avg_score": 0.9, "eval/b/avg_score": 0.5, "eval/all/avg_score": 0.7, "eval/all/x": 9.0},
    ]
    assert best_evaluation(rows) == ("all", 0.7, 2)
    assert best_evaluation([{"step": 1, "eval/a/avg_score": None, "reward/mean": 1.0}]) is None


def test_ascii_terminal_accepts_any_character():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    console = Console(file=stream, markup=False, highlight=False, soft_wrap=True)
    ConsoleTracker(SETUP, console).samples([SampleRow("é", "数", 1.0, "stop")], 1)
    assert b"\\u6570" in raw.getvalue()


def test_step_line_shows_present_metrics_only():
    line = step_line(
        {
            "reward/mean": 0.41234567,
            "throughput/tokens_per_s": 12345.6,
            "timing/step_s": 3.5,
            "timing/generate_s": 2,
            "timing/score_s": 0.004,
            "rollouts/failed": 3.0,
        }
    )
    assert line == "reward  0.412   12,346 tok/s  FAILED 3     3.50 s (generate 2.00)"
    assert step_line({}) == ""
    assert "FAILED" not in step_line({"rollouts/failed": 0.0})


def test_numbers_of_consecutive_lines_are_aligned():
    values = [
        {"reward/mean": 0.0, "policy/kl": 1.2e-9, "policy/loss": -0.00123, "response/truncated_fraction": 1.0},
        {"reward/mean": -2.5, "policy/kl": 0.25, "policy/loss": 12.0, "response/truncated_fraction": 0.004},
        {"reward/mean": float("nan"), "policy/kl": 0.0, "policy/loss": 0.5, "response/truncated_fraction": 0.0},
    ]
    first, second, third = (step_line(row) for row in values)
    assert len(first) == len(second) == len(third)
    assert first == "reward  0.000  truncated 100%  kl  1e-09  loss -0.0012"
    assert second == "reward -2.500  truncated   0%  kl 0.2500  loss 12.0000"


@pytest.mark.defect("skipped-updates-not-reported")
def test_skipped_updates_are_shown_if_nonzero():
    assert step_line({"policy/skipped": 0.8, "critic/skipped": 0.25}) == "SKIPPED 0.800  critic SKIPPED 0.250"
    assert step_line({"policy/skipped": 0.0, "critic/skipped": 0.0}) == ""


def test_evaluations_are_grouped_by_source_with_slashes():
    metrics = {"eval/b/avg_score": 1.0, "eval/openai/gsm8k/avg_score": 0.5, "eval/b/pass_at_4": 0.0, "x": 1.0}
    assert evaluation_line(metrics) == "eval b: avg_score 1, pass_at_4 0; openai/gsm8k: avg_score 0.500"
    with_errors = {"eval/x/avg_score": 0.5, "eval/x/avg_score_stderr": 0.0213}
    assert evaluation_line(with_errors) == "eval x: avg_score 0.500 ±0.0213"
    assert evaluation_line({"reward/mean": 1.0}) == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.82031, "0.820"),
        (23.47, "23.5"),
        (128.4, "128"),
        (4884.3, "4,884"),
        (3.0, "3"),
        (0.012345, "0.0123"),
        (-0.5, "-0.500"),
        (3.2e-7, "3.2e-07"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_numbers_have_three_digits(value: float, text: str):
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (42, "42 s"),
        (60, "1 min"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
        (86_400, "1 d"),
        (270_000, "3 d 3 h"),
    ],
)
def test_durations_have_two_units(seconds: float, text: str):
    assert format_duration(seconds) == text


def test_texts_are_truncated_at_a_word():
    assert truncate_text("one two", 7) == "one two"
    assert truncate_text("one two three", 9) == "one two…"
    assert truncate_text("one two three", 9, from_end=True) == "…three"
    assert truncate_text("x" * 50, 40) == "x" * 40 + "…"


def test_step_lines_are_aligned_and_have_eta(monkeypatch: pytest.MonkeyPatch):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(clock)))
    out = io.StringIO()
    tracker = ConsoleTracker(SETUP, Console(file=out, markup=False, highlight=False, soft_wrap=True))
    tracker.begin(0, 10)
    for step, reward in enumerate((0.5, 0.0, 0.8125), 1):
        metrics = {"reward/mean": reward, "response/truncated_fraction": reward / 8, "timing/step_s": 1.25}
        tracker.log(metrics, step)
    first, second, third = out.getvalue().splitlines()[1:]
    assert first.startswith("step  1/10   reward  0.500  truncated   6%     1.25 s   eta ")
    assert [line.index("truncated") for line in (first, second, third)] == [first.index("truncated")] * 3
    assert first.endswith("eta 1 min 30 s")


def test_eta_ignores_evaluation_before_first_step(monkeypatch: pytest.MonkeyPatch):
    now = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    out = io.StringIO()
    tracker = ConsoleTracker(SETUP, Console(file=out, markup=False, highlight=False, soft_wrap=True))
    tracker.begin(0, 10)
    now = 500.0
    tracker.log({"eval/x/avg_score": 0.5}, 0)
    now = 510.0
    tracker.log({"reward/mean": 0.5}, 1)
    assert out.getvalue().splitlines()[-1].endswith("eta 1 min 30 s")


def test_many_short_steps_get_few_lines(monkeypatch: pytest.MonkeyPatch):
    clock = iter(step / 100 for step in range(10_000))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    out = io.StringIO()
    tracker = ConsoleTracker(SETUP, Console(file=out, markup=False, highlight=False, soft_wrap=True))
    tracker.begin(0, 500)
    for step in range(1, 501):
        evaluation = {"eval/x/avg_score": 1.0} if step == 250 else {}
        tracker.log({"sft/loss": 1.0, **evaluation}, step)
    lines = out.getvalue().splitlines()
    assert len(lines) < 40
    shown = [int(line.split("/")[0].removeprefix("step")) for line in lines[1:] if "loss" in line]
    assert shown[:3] == [1, 2, 3] and shown[-1] == 500 and 250 in shown
    assert sum("eval" in line for line in lines) == 1


@pytest.mark.parametrize("step_s", [0.2, 0.6, 3.0])
def test_line_frequency_adapts_to_step_time(step_s: float, monkeypatch: pytest.MonkeyPatch):
    now, line_times = 0.0, [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    out = io.StringIO()
    tracker = ConsoleTracker(SETUP, Console(file=out, markup=False, highlight=False, soft_wrap=True))
    tracker.begin(0, 500)
    for step in range(1, 501):
        now, before = now + step_s, out.tell()
        tracker.log({"sft/loss": 1.0}, step)
        if out.tell() > before:
            line_times.append(now)
    assert len(line_times) <= max(module.MIN_LINES, now / module.MAX_LINE_INTERVAL_S) + 2 * module.FIRST_STEPS
    assert max(after - before for before, after in pairwise(line_times)) <= module.MAX_LINE_INTERVAL_S + step_s


def test_completions_follow_console_samples_settings():
    def shown(step: int, **trainer: Any) -> int:
        out = io.StringIO()
        setup = TrackerSetup(Path("unused"), "project", "mine", {"trainer": trainer})
        tracker = ConsoleTracker(setup, Console(file=out, markup=False, highlight=False, soft_wrap=True))
        tracker.begin(4, 100)
        out.truncate(0)
        tracker.samples([SampleRow("p", "a", 1.0, "stop")] * 4, step)
        return out.getvalue().count("prompt")

    assert [shown(step) for step in (5, 6, 10, 15, 20)] == [1, 0, 1, 0, 1]
    assert [shown(step, console_samples=3, console_samples_interval=2) for step in (5, 6, 7)] == [3, 3, 0]
    assert shown(5, console_samples=0) == 0


def test_time_split_of_run():
    row = {"timing/step_s": 10.0, "timing/generate_s": 4.0, "timing/update_s": 5.5, "timing/score_s": 0.01}
    rows: list[dict[str, Any]] = [
        {**row, "rollouts/tokens": 5000.0},
        {**row, "rollouts/tokens": None},
        {"eval/x/avg_score": 1.0, "timing/publish_s": 30.0},  # published before the first step
    ]
    assert time_split(rows) == "20 s in steps: generate 40%, update 55%; 250 sampled tokens/s"
    assert time_split([{"reward/mean": 1.0}]) == ""
