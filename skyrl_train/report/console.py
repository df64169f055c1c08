"""The console output of a run: a line a step, a few completions, and a progress bar on a terminal.

No other module imports rich. Completions are a model's output: control characters are shown, never obeyed, and nothing
is interpreted as markup.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from skyrl_train.report.jsonl import METRICS_FILE, read_metrics
from skyrl_train.report.protocol import SampleRow, TrackerSetup
from skyrl_train.terminal import escape_control_chars

_log = logging.getLogger(__name__)
SHOWN_CHARACTERS = 240
"""Number of characters shown of a prompt's end and of a completion's start."""
MIN_LINE_INTERVAL_S = 1.0
"""Between two lines of steps, but for the first ones, the last one, and those with an evaluation."""
MIN_LINES, MAX_LINE_INTERVAL_S = 20, 20.0
"""A line is for at least a LINES-th of the steps, unless that takes longer than this; it says what time remains."""
FIRST_STEPS = 3
RECENT_STEPS = 20
"""From how many steps the remaining time is estimated."""
_CHECKPOINT = re.compile(r"global_step_(\d+)")
_ALERT_LABELS = {"rollouts/failed": "FAILED {}", "policy/skipped": "SKIPPED {}", "critic/skipped": "critic SKIPPED {}"}
"""Shown only where they are not 0."""
_PHASES = ("generate", "score", "update", "publish", "move", "evaluate")


class ConsoleTracker:
    """Writes to standard output: plain lines without colours or a bar, unless it is a terminal."""

    def __init__(self, setup: TrackerSetup, console: Console | None = None):
        self._console = console or Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._name = escape_control_chars(setup.run_name)
        self._folder = setup.run_dir.absolute()
        trainer = setup.config.get("trainer", {})
        self._resume_mode = trainer.get("resume_mode", "latest")
        self._saves_none = trainer.get("ckpt_interval", 1) <= 0
        self.console_samples = trainer.get("console_samples", 1)
        self.console_samples_interval = trainer.get("console_samples_interval", 10)
        self._step: int | None = None
        self._begun = self._total = 0
        self._last_line_time, self._last_line_step = -math.inf, 0
        self._steps_at: deque[tuple[int, float]] = deque(maxlen=RECENT_STEPS + 1)
        """The latest steps, and when each of them was done."""
        self._progress: Progress | None = None

    def begin(self, step: int, total_steps: int) -> None:
        self._step, self._begun, self._total = step, step, total_steps
        self._steps_at.append((step, time.monotonic()))
        where = f"{'resumed at ' if step else ''}step {step} of {total_steps}" if total_steps else "evaluation"
        self._print(f"{self._name}: {where}, in {escape_control_chars(str(self._folder))}", "bold")
        if self._console.is_terminal:
            columns = (
                TextColumn(self._name, markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._progress.add_task("steps", total=total_steps, completed=step)
            self._progress.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._step = step
        if self._steps_at and self._steps_at[-1][0] == step:
            self._steps_at.clear()  # what came since is no step: an evaluation before the first one
        self._steps_at.append((step, time.monotonic()))
        head = f"step {step:>{len(str(self._total))}}/{self._total}"
        evaluated = evaluation_line(metrics)
        if (line := step_line(metrics)) and self._is_due(step, bool(evaluated)):
            self._last_line_time, self._last_line_step = time.monotonic(), step
            self._print(f"{head}   {'   '.join(filter(None, (line, self._remaining())))}")
        if evaluated:
            self._print(f"{head}   {evaluated}", "green")
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=step)

    def samples(self, rows: Sequence[SampleRow], step: int) -> None:
        if step != self._begun + 1 and step % self.console_samples_interval:
            return
        for row in rows[: self.console_samples]:
            self._print(
                f"  prompt   {truncate_text(escape_control_chars(row.prompt), SHOWN_CHARACTERS, from_end=True)}", "dim"
            )
            self._print(f"  answer   {truncate_text(escape_control_chars(row.response), SHOWN_CHARACTERS)}", "dim")
            self._print(
                f"           reward {format_number(row.reward)}, stopped by {escape_control_chars(row.stop_reason)}",
                "dim",
            )

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        for line in self._last_lines():
            self._print(line, "bold")

    def _is_due(self, step: int, evaluated: bool) -> bool:
        """Whether a step gets a line: hundreds of short ones would hide what matters."""
        first, last = step <= self._begun + FIRST_STEPS, step == self._total
        silent_s, enough = (
            time.monotonic() - self._last_line_time,
            (step - self._last_line_step) * MIN_LINES >= self._total,
        )
        return first or last or evaluated or silent_s >= (MIN_LINE_INTERVAL_S if enough else MAX_LINE_INTERVAL_S)

    def _remaining(self) -> str:
        """The time that the remaining steps will take, if they take as long as the latest ones."""
        (first, begun), (step, now) = self._steps_at[0], self._steps_at[-1]
        left = self._total - step
        return f"eta {format_duration((now - begun) / (step - first) * left)}" if left > 0 and step > first else ""

    def _last_lines(self) -> Iterator[str]:
        """Run folder, steps, best and last evaluation and how to continue; nothing for a run that never began."""
        if self._step is None:
            return
        folder = escape_control_chars(str(self._folder))
        rows = read_metrics(self._folder / METRICS_FILE)
        if not self._total:
            yield f"{self._name}: evaluated, in {folder}"
            return
        yield f"{self._name}: {self._step} of {self._total} steps, in {folder}"
        if best := best_evaluation(rows):
            source, value, step = best
            yield f"{self._name}: best evaluation: {escape_control_chars(source)} avg_score {format_number(value)} at step {step}"
        if split := time_split(rows):
            yield f"{self._name}: {split}"
        yield f"{self._name}: {self._resume_hint()}"

    def _resume_hint(self) -> str:
        names = [path.name for path in self._folder.glob("global_step_*")]
        saved = [int(found[1]) for name in names if (found := _CHECKPOINT.fullmatch(name))]
        if not saved:
            return f"no checkpoint to resume from{': trainer.ckpt_interval is off' if self._saves_none else ''}"
        changes = ["a larger trainer.epochs or trainer.max_steps"] if max(saved) >= self._total else []
        changes += [] if self._resume_mode == "latest" else ["trainer.resume_mode=latest"]
        changed = f" with {' and '.join(changes)}" if changes else ""
        return f"resume from step {max(saved)}: the same command{changed}"

    def _print(self, line: str, style: str = "") -> None:
        _log.info("%s", line)
        encoding = self._console.encoding or "utf-8"
        self._console.print(Text(line.encode(encoding, "backslashreplace").decode(encoding), style))


def step_line(metrics: Mapping[str, float]) -> str:
    """Reward, lengths, KL, speed and timing of a step, as far as they were measured; numbers below each other."""
    parts = [
        _part(metrics, "reward/mean", "reward {}"),
        _part(metrics, "reward/std", "± {}"),
        _part(metrics, "response/mean_tokens", "length {}"),
        _share(metrics, "response/truncated_fraction", "cut {}"),
        _part(metrics, "policy/kl", "kl {}"),
        _part(metrics, "policy/entropy", "entropy {}"),
        _part(metrics, "policy/loss", "loss {}"),
        _part(metrics, "sft/loss", "loss {}"),
        _part(metrics, "policy/grad_norm", "grad {}"),
        _part(metrics, "throughput/tokens_per_s", "{} tok/s"),
    ]
    parts += [words.format(format_number(metrics[name])) for name, words in _ALERT_LABELS.items() if metrics.get(name)]
    if "timing/step_s" in metrics:
        taken = {phase: metrics[f"timing/{phase}_s"] for phase in _PHASES if f"timing/{phase}_s" in metrics}
        split = ", ".join(f"{phase} {format_number(seconds)}" for phase, seconds in taken.items())
        parts.append(f"{format_number(metrics['timing/step_s']):>6} s" + (f" ({split})" if split else ""))
    return "  ".join(filter(None, parts))


def best_evaluation(rows: Sequence[Mapping[str, Any]]) -> tuple[str, float, int] | None:
    """(data source, its highest mean score, step) over the lines of a run; if there are several, over all sources."""
    found = [
        (name, value, row["step"])
        for row in rows
        for name, value in row.items()
        if name.startswith("eval/") and name.endswith("/avg_score") and value is not None
    ]
    overall = [item for item in found if item[0] == "eval/all/avg_score"] or found
    if not overall:
        return None
    name, value, step = max(overall, key=lambda item: item[1])
    return name.removeprefix("eval/").removesuffix("/avg_score"), value, step


def time_split(rows: Sequence[Mapping[str, Any]]) -> str:
    """How long the steps of a run took, what of that went where, and its tokens per second; "" if there is none."""
    rows = [row for row in rows if row.get("timing/step_s")]  # the first weights are published before there is a step
    if not rows:
        return ""
    total = _total(rows, "timing/step_s")
    shares = {phase: _total(rows, f"timing/{phase}_s") / total for phase in _PHASES if phase != "evaluate"}
    split = ", ".join(f"{phase} {share:.0%}" for phase, share in shares.items() if share >= 0.005)
    tokens = _total(rows, "rollouts/tokens")
    speed = f"; {format_number(tokens / total)} sampled tokens/s" if tokens else ""
    return f"{format_duration(total)} in steps{f': {split}' if split else ''}{speed}"


def _total(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(row[name] for row in rows if row.get(name) is not None)


def evaluation_line(metrics: Mapping[str, float]) -> str:
    """eval/<source>/<metric>, grouped by source."""
    found = sorted(name.removeprefix("eval/").rpartition("/") for name in metrics if name.startswith("eval/"))
    sources = []
    for source, names in groupby(found, key=lambda parts: parts[0]):
        values = [
            f"{what} {format_number(metrics['/'.join(filter(None, ('eval', src, what)))])}" for src, _, what in names
        ]
        sources.append(f"{escape_control_chars(source)}: {', '.join(values)}")
    return "eval " + "; ".join(sources) if sources else ""


def rollout_line(row: SampleRow, seconds: float) -> str:
    """A rollout in one line, and how long it took."""
    prompt, answer = (
        truncate_text(escape_control_chars(row.prompt), 60, from_end=True),
        truncate_text(escape_control_chars(row.response), 120),
    )
    return f"{seconds:6.1f} s   {prompt} -> {answer} (reward {format_number(row.reward)}, stopped by {escape_control_chars(row.stop_reason)})"


def format_number(value: float) -> str:
    """Three significant digits; whole numbers and thousands without a fraction."""
    if not math.isfinite(value) or value == 0:
        return f"{value:.3g}"
    if abs(value) >= 1000 or value == int(value):
        return f"{value:,.0f}"
    if abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def format_duration(seconds: float) -> str:
    """As people say it: 42 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    whole = round(seconds)
    for unit, name, below, small in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit:
            rest = whole % unit // below
            return f"{whole // unit} {name}" + (f" {rest} {small}" if rest else "")
    return f"{whole} s"


def truncate_text(text: str, characters: int, *, from_end: bool = False) -> str:
    """The start or the end of a text, with an ellipsis where it was cut: at a space if one is near."""
    if len(text) <= characters:
        return text
    if from_end:
        kept = text[-characters:]
        return "…" + (kept[kept.index(" ") + 1 :] if " " in kept[:30] else kept)
    kept = text[:characters]
    return (kept[: kept.rindex(" ")] if " " in kept[-30:] else kept) + "…"


def _part(metrics: Mapping[str, float], name: str, words: str) -> str:
    return words.format(f"{format_number(metrics[name]):>6}") if name in metrics else ""


def _share(metrics: Mapping[str, float], name: str, words: str) -> str:
    return words.format(f"{metrics[name]:>5.0%}") if name in metrics else ""
