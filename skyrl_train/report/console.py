"""The console output of a run: one line per step, a few completions, and a progress bar on a terminal.

No other module imports rich. Completions are untrusted: control characters are escaped, and nothing is interpreted as
markup.
"""

from __future__ import annotations

import logging
import math
import re
import shlex
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
"""Minimum time between two lines; the first steps, the last step and evaluations always get one."""
MIN_LINES, MAX_LINE_INTERVAL_S = 20, 20.0
"""A line covers at least one MIN_LINES-th of the run's steps, unless those take longer than MAX_LINE_INTERVAL_S."""
FIRST_STEPS = 3
"""Number of steps at the start that always get a line."""
RECENT_STEPS = 20
"""Number of latest steps from which the remaining time is estimated."""
_CHECKPOINT = re.compile(r"global_step_(\d+)")
_ALERT_LABELS = {"rollouts/failed": "FAILED {}", "policy/skipped": "SKIPPED {}", "critic/skipped": "critic SKIPPED {}"}
"""Metrics that are shown only if they are not 0."""
_COLUMNS: tuple[tuple[str, str, int | None, int], ...] = (
    ("reward/mean", "reward {}", 3, 6),
    ("reward/std", "± {}", 3, 5),
    ("response/mean_tokens", "length {}", 1, 6),
    ("response/truncated_fraction", "truncated {}", None, 4),
    ("policy/kl", "kl {}", 4, 6),
    ("policy/entropy", "entropy {}", 3, 5),
    ("policy/loss", "loss {}", 4, 7),
    ("sft/loss", "loss {}", 4, 7),
    ("policy/grad_norm", "grad {}", 3, 6),
    ("throughput/tokens_per_s", "{} tok/s", 0, 7),
)
"""Metrics of a step's line: name, label, decimals (None for a percentage) and width of the number."""
_MIN_PHASE_S = 0.005
"""Shorter phases are left out of a step's line."""
_STDERR = "_stderr"
"""Suffix of the name of a metric's standard error."""
_PHASES = ("generate", "score", "update", "publish", "offload", "evaluate")


class ConsoleTracker:
    """A tracker that prints to standard output: colors and a progress bar on a terminal, else plain lines."""

    def __init__(self, setup: TrackerSetup, console: Console | None = None):
        """Create a tracker that prints to `console`, or to standard output if it is None."""
        self._console = console or Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._name = escape_control_chars(setup.run_name)
        self._folder = setup.run_dir.absolute()
        trainer = setup.config.get("trainer", {})
        self._resume_mode = trainer.get("resume_mode", "latest")
        self._saves_none = trainer.get("ckpt_interval", 1) <= 0
        algorithm = trainer.get("algorithm", {})
        self._reads_rewards = (
            algorithm.get("advantage_estimator") != "distillation"
            and algorithm.get("policy_loss_type") != "cross_entropy"
        )
        self.console_samples = trainer.get("console_samples", 1)
        self.console_samples_interval = trainer.get("console_samples_interval", 10)
        self._step: int | None = None
        self._first_step = self._total_steps = 0
        self._last_line_time, self._last_line_step = -math.inf, 0
        self._step_times: deque[tuple[int, float]] = deque(maxlen=RECENT_STEPS + 1)
        """The latest steps and the times at which they ended, from `time.monotonic`."""
        self._progress: Progress | None = None

    def begin(self, step: int, total_steps: int) -> None:
        """Print the first line with the run's folder, and start the progress bar if the output is a terminal."""
        self._step, self._first_step, self._total_steps = step, step, total_steps
        self._step_times.append((step, time.monotonic()))
        position = f"{'resumed at ' if step else ''}step {step} of {total_steps}" if total_steps else "evaluation"
        self._print(f"{self._name}: {position}, in {escape_control_chars(str(self._folder))}", "bold")
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
        """Print the line of a step if it is due, and a line with its evaluations if it has any."""
        self._step = step
        if self._step_times and self._step_times[-1][0] == step:
            self._step_times.clear()  # the time since then was an evaluation before the first step
        self._step_times.append((step, time.monotonic()))
        head = f"step {step:>{len(str(self._total_steps))}}/{self._total_steps}"
        evaluation = evaluation_line(metrics)
        if (line := step_line(metrics)) and self._is_due(step, bool(evaluation)):
            self._last_line_time, self._last_line_step = time.monotonic(), step
            self._print(f"{head}   {'   '.join(filter(None, (line, self._remaining_time())))}")
        if evaluation:
            self._print(f"{head}   {evaluation}", "green")
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=step)

    def samples(self, rows: Sequence[SampleRow], step: int) -> None:
        """Print trainer.console_samples rollouts, after the first step and every console_samples_interval steps."""
        if step != self._first_step + 1 and step % self.console_samples_interval:
            return
        for row in rows[: self.console_samples]:
            prompt = truncate_text(escape_control_chars(row.prompt), SHOWN_CHARACTERS, from_end=True)
            response = truncate_text(escape_control_chars(row.response), SHOWN_CHARACTERS)
            outcome = f"reward {format_number(row.reward)}, stopped by {escape_control_chars(row.stop_reason)}"
            for line in (f"  prompt   {prompt}", f"  answer   {response}", f"           {outcome}"):
                self._print(line, "dim")

    def close(self) -> None:
        """Remove the progress bar, and print a summary of the run and how to resume it."""
        if self._progress is not None:
            self._progress.stop()
        for line in self._last_lines():
            self._print(line, "bold")

    def _is_due(self, step: int, has_evaluation: bool) -> bool:
        """True if a step gets a line. Hundreds of short steps share a few lines."""
        is_first, is_last = step <= self._first_step + FIRST_STEPS, step == self._total_steps
        since_last_s = time.monotonic() - self._last_line_time
        has_enough_steps = (step - self._last_line_step) * MIN_LINES >= self._total_steps
        interval_s = MIN_LINE_INTERVAL_S if has_enough_steps else MAX_LINE_INTERVAL_S
        return is_first or is_last or has_evaluation or since_last_s >= interval_s

    def _remaining_time(self) -> str:
        """Return the time that the remaining steps take at the pace of the latest ones; "" if it is not known."""
        (first, begun), (step, now) = self._step_times[0], self._step_times[-1]
        left = self._total_steps - step
        return f"eta {format_duration((now - begun) / (step - first) * left)}" if left > 0 and step > first else ""

    def _last_lines(self) -> Iterator[str]:
        """Yield run folder, steps, best evaluation, time split and how to resume; nothing if the run never began."""
        if self._step is None:
            return
        folder = escape_control_chars(str(self._folder))
        rows = read_metrics(self._folder / METRICS_FILE)
        if not self._total_steps:
            yield f"{self._name}: evaluated, in {folder}"
            return
        yield f"{self._name}: {self._step} of {self._total_steps} steps, in {folder}"
        if best := best_evaluation(rows):
            source, value, step = best
            score = f"{escape_control_chars(source)} avg_score {format_number(value)}"
            yield f"{self._name}: best evaluation: {score} at step {step}"
        if self._reads_rewards and never_rewarded(rows):
            watch = escape_control_chars(shlex.join(["skyrl-train", "watch", folder]))
            yield (
                f"{self._name}: nothing was learned, because the reward was 0 in every step. Read the rollouts with "
                f"`{watch}`; docs/guides/reward_stays_zero.md lists the usual causes."
            )
        if split := time_split(rows):
            yield f"{self._name}: {split}"
        yield f"{self._name}: {self._resume_hint()}"

    def _resume_hint(self) -> str:
        names = [path.name for path in self._folder.glob("global_step_*")]
        saved = [int(match[1]) for name in names if (match := _CHECKPOINT.fullmatch(name))]
        if not saved:
            return f"no checkpoint to resume from{': trainer.ckpt_interval is off' if self._saves_none else ''}"
        changes = ["a larger trainer.epochs or trainer.max_steps"] if max(saved) >= self._total_steps else []
        changes += [] if self._resume_mode == "latest" else ["trainer.resume_mode=latest"]
        suffix = f" with {' and '.join(changes)}" if changes else ""
        return f"resume from step {max(saved)}: the same command{suffix}"

    def _print(self, line: str, style: str = "") -> None:
        _log.info("%s", line)
        encoding = self._console.encoding or "utf-8"
        self._console.print(Text(line.encode(encoding, "backslashreplace").decode(encoding), style))


def step_line(metrics: Mapping[str, float]) -> str:
    """Return the line of a step: reward, lengths, KL, losses, speed and timing, as far as the metrics are present.

    Numbers have a fixed width and number of decimals, so that those of consecutive lines are aligned. Return "" if
    there is nothing to show.
    """
    parts = []
    for name, label, decimals, width in _COLUMNS:
        if name in metrics:
            value = metrics[name]
            percentage = f"{value:.0%}".rjust(width)
            parts.append(label.format(percentage if decimals is None else format_fixed(value, decimals, width)))
    parts += [label.format(format_number(metrics[name])) for name, label in _ALERT_LABELS.items() if metrics.get(name)]
    if "timing/step_s" in metrics:
        seconds_by_phase = {phase: metrics[f"timing/{phase}_s"] for phase in _PHASES if f"timing/{phase}_s" in metrics}
        shown = {phase: seconds for phase, seconds in seconds_by_phase.items() if seconds >= _MIN_PHASE_S}
        split = ", ".join(f"{phase} {format_fixed(seconds, 2)}" for phase, seconds in shown.items())
        parts.append(f"{format_fixed(metrics['timing/step_s'], 2, 7)} s" + (f" ({split})" if split else ""))
    return "  ".join(filter(None, parts))


def never_rewarded(rows: Sequence[Mapping[str, Any]]) -> bool:
    """True if there are training steps with rewards, and all of these rewards were 0.

    Args:
        rows: Lines of metrics.jsonl.
    """
    rewards = [row[name] for row in rows for name in ("reward/mean", "reward/std") if name in row]
    return bool(rewards) and not any(rewards)


def best_evaluation(rows: Sequence[Mapping[str, Any]]) -> tuple[str, float, int] | None:
    """Return (data source, score, step) of the evaluation with the highest mean score; None if there is none.

    Args:
        rows: Lines of metrics.jsonl. If any has the mean over all data sources, "all", only this mean counts.
    """
    scores = [
        (name, value, row["step"])
        for row in rows
        for name, value in row.items()
        if name.startswith("eval/") and name.endswith("/avg_score") and value is not None
    ]
    candidates = [score for score in scores if score[0] == "eval/all/avg_score"] or scores
    if not candidates:
        return None
    name, value, step = max(candidates, key=lambda score: score[1])
    return name.removeprefix("eval/").removesuffix("/avg_score"), value, step


def time_split(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the total time of a run's steps, each phase's share and the sampled tokens per second; "" without steps.

    Args:
        rows: Lines of metrics.jsonl.
    """
    rows = [row for row in rows if row.get("timing/step_s")]  # weights are first published before any step
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
    """Return the line of an evaluation: all `eval/<source>/<metric>`, grouped by source; "" if there are none.

    A standard error follows its metric: "avg_score 0.500 ±0.02".
    """
    names = sorted(name.removeprefix("eval/").rpartition("/") for name in metrics if name.startswith("eval/"))
    sources = []
    for source, group in groupby(names, key=lambda parts: parts[0]):
        keys = {metric: "/".join(filter(None, ("eval", source, metric))) for _, _, metric in group}
        errors = {
            key: f" ±{format_number(metrics[key + _STDERR])}" for key in keys.values() if key + _STDERR in metrics
        }
        values = ", ".join(
            f"{metric} {format_number(metrics[key])}{errors.get(key, '')}"
            for metric, key in keys.items()
            if not metric.endswith(_STDERR)
        )
        sources.append(f"{escape_control_chars(source)}: {values}")
    return "eval " + "; ".join(sources) if sources else ""


def rollout_line(row: SampleRow, seconds: float) -> str:
    """Return a rollout and the seconds that it took as one printable line, with long texts truncated."""
    prompt = truncate_text(escape_control_chars(row.prompt), 60, from_end=True)
    response = truncate_text(escape_control_chars(row.response), 120)
    outcome = f"reward {format_number(row.reward)}, stopped by {escape_control_chars(row.stop_reason)}"
    return f"{seconds:6.1f} s   {prompt} -> {response} ({outcome})"


def format_number(value: float) -> str:
    """Return a number with three significant digits; integers and values from 1000 on have no fraction."""
    if not math.isfinite(value) or value == 0:
        return f"{value:.3g}"
    if abs(value) >= 1000 or value == int(value):
        return f"{value:,.0f}"
    if abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def format_fixed(value: float, decimals: int, width: int = 0) -> str:
    """Return a number with a fixed number of decimals, right-aligned in `width` characters.

    A number that would be rounded to 0 is shown as 1e-05, and values from 10,000 on have no decimals.
    """
    if value and abs(value) < 0.5 * 10.0**-decimals:
        return f"{value:.0e}".rjust(width)
    return f"{value:,.{decimals if abs(value) < 10_000 else 0}f}".rjust(width)


def format_duration(seconds: float) -> str:
    """Return a duration in its two largest units: 42 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    total = round(seconds)
    for unit, name, small_unit, small_name in (
        (86_400, "d", 3_600, "h"),
        (3_600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if total >= unit:
            rest = total % unit // small_unit
            return f"{total // unit} {name}" + (f" {rest} {small_name}" if rest else "")
    return f"{total} s"


def truncate_text(text: str, max_chars: int, *, from_end: bool = False) -> str:
    """Return the first or, with `from_end`, the last `max_chars` characters of a text, and an ellipsis if it is longer.

    The text is truncated at a space if there is one within 30 characters.
    """
    if len(text) <= max_chars:
        return text
    if from_end:
        part = text[-max_chars:]
        return "…" + (part[part.index(" ") + 1 :] if " " in part[:30] else part)
    part = text[:max_chars]
    return (part[: part.rindex(" ")] if " " in part[-30:] else part) + "…"
