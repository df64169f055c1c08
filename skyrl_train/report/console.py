"""The console output of a run: one line per step, a few completions, and a progress bar on a terminal.

No other module imports rich. Completions are a model's output: control characters are shown, never obeyed, and nothing
is interpreted as markup.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from skyrl_train.messages import visible
from skyrl_train.report.jsonl import METRICS_FILE, read_jsonl
from skyrl_train.report.protocol import SampleRow, TrackerSetup

SHOWN_CHARACTERS = 240
"""Number of characters shown of a prompt's end and of a completion's start."""
_CHECKPOINT = re.compile(r"global_step_(\d+)")
_PHASES = ("generate", "score", "update", "publish", "evaluate")


class ConsoleTracker:
    """Writes to standard output: plain lines without colours or a bar, unless it is a terminal."""

    def __init__(self, setup: TrackerSetup, console: Console | None = None):
        self._console = console or Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._name = visible(setup.run_name)
        self._folder = setup.run_dir.absolute()
        trainer = setup.config.get("trainer", {})
        self._resume_mode = trainer.get("resume_mode", "latest")
        self._saves_none = trainer.get("ckpt_interval", 1) <= 0
        self._step: int | None = None
        self._total = 0
        self._progress: Progress | None = None

    def begin(self, step: int, total_steps: int) -> None:
        self._step, self._total = step, total_steps
        where = f"{'resumed at ' if step else ''}step {step} of {total_steps}" if total_steps else "evaluation"
        self._print(f"{self._name}: {where}, in {visible(str(self._folder))}", "bold")
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
        head = f"step {step}/{self._total}"
        for line, style in ((step_line(metrics), ""), (evaluation_line(metrics), "green")):
            if line:
                self._print(f"{head}  {line}", style)
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=step)

    def samples(self, rows: Sequence[SampleRow], step: int) -> None:
        for row in rows:
            self._print(f"  prompt   {visible(row.prompt[-SHOWN_CHARACTERS:])}", "dim")
            cut = "..." if len(row.response) > SHOWN_CHARACTERS else ""
            self._print(f"  answer   {visible(row.response[:SHOWN_CHARACTERS])}{cut}", "dim")
            self._print(f"           reward {_short(row.reward)}, stopped by {visible(row.stop_reason)}", "dim")

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        for line in self._last_lines():
            self._print(line, "bold")

    def _last_lines(self) -> Iterator[str]:
        """Run folder, steps, best evaluation and how to continue; nothing for a run that never began."""
        if self._step is None:
            return
        folder = visible(str(self._folder))
        rows = read_jsonl(self._folder / METRICS_FILE) if (self._folder / METRICS_FILE).exists() else []
        if not self._total:
            yield f"{self._name}: evaluated, in {folder}"
            return
        yield f"{self._name}: {self._step} of {self._total} steps, in {folder}"
        if best := best_evaluation(rows):
            source, value, step = best
            yield f"{self._name}: best evaluation: {visible(source)} avg_score {_short(value)} at step {step}"
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

    def _print(self, line: str, style: str) -> None:
        encoding = self._console.encoding or "utf-8"
        self._console.print(Text(line.encode(encoding, "backslashreplace").decode(encoding), style))


def step_line(metrics: Mapping[str, float]) -> str:
    """Reward, lengths, KL, speed and timing of a step, as far as they were measured."""
    parts = [
        _part(metrics, "reward/mean", "reward {}"),
        _part(metrics, "reward/std", "std {}"),
        _part(metrics, "response/mean_tokens", "tokens {}"),
        _part(metrics, "response/truncated_fraction", "cut {}"),
        _part(metrics, "policy/kl", "kl {}"),
        _part(metrics, "policy/entropy", "entropy {}"),
        _part(metrics, "policy/loss", "loss {}"),
        _part(metrics, "sft/loss", "loss {}"),
        _part(metrics, "policy/grad_norm", "grad {}"),
        _part(metrics, "throughput/tokens_per_s", "{} tokens/s"),
    ]
    if metrics.get("rollouts/failed"):
        parts.append(_part(metrics, "rollouts/failed", "FAILED {}"))
    if "timing/step_s" in metrics:
        phases = [_part(metrics, f"timing/{phase}_s", phase + " {}") for phase in _PHASES]
        split = ", ".join(filter(None, phases))
        parts.append(f"{_short(metrics['timing/step_s'])} s" + (f" ({split})" if split else ""))
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


def evaluation_line(metrics: Mapping[str, float]) -> str:
    """eval/<source>/<metric>, grouped by source."""
    found = sorted(name.removeprefix("eval/").rpartition("/") for name in metrics if name.startswith("eval/"))
    sources = []
    for source, names in groupby(found, key=lambda parts: parts[0]):
        values = [f"{what} {_short(metrics['/'.join(filter(None, ('eval', src, what)))])}" for src, _, what in names]
        sources.append(f"{visible(source)}: {', '.join(values)}")
    return "eval " + "; ".join(sources) if sources else ""


def _part(metrics: Mapping[str, float], name: str, words: str) -> str:
    return words.format(_short(metrics[name])) if name in metrics else ""


def _short(value: float) -> str:
    """Four significant digits; counts are not rounded."""
    return f"{value:.0f}" if math.isfinite(value) and abs(value) >= 1000 else f"{value:.4g}"
