"""The run as a person watches it: a line a step, a few completions, a progress bar where there is a terminal.

The only importer of rich. Completions are a model's output: control characters are shown, never obeyed, and nothing is
read as markup.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from skyrl_train.report.protocol import SampleRow, TrackerSetup

SHOWN_CHARACTERS = 240
"""Of a prompt's end and of a completion's start."""
_PHASES = ("generate", "score", "update", "publish", "evaluate")


class ConsoleTracker:
    """Writes to standard output; plain lines, without colours or a bar, when that is not a terminal."""

    def __init__(self, setup: TrackerSetup, console: Console | None = None):
        self._console = console or Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._name = visible(setup.run_name)
        self._total = 0
        self._progress: Progress | None = None

    def begin(self, step: int, total_steps: int) -> None:
        self._total = total_steps
        self._print(f"{self._name}: step {step} of {total_steps}{', resumed' if step else ''}", "bold")
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

    def _print(self, line: str, style: str) -> None:
        encoding = self._console.encoding or "utf-8"
        self._console.print(Text(line.encode(encoding, "backslashreplace").decode(encoding), style))


def visible(text: str) -> str:
    """One printable line: terminal escapes, NUL, line ends and direction marks are spelled out (`\\x1b`, `\\n`)."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def step_line(metrics: Mapping[str, float]) -> str:
    """Reward, lengths, KL, speed and where the time went: those of them that were measured."""
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


def evaluation_line(metrics: Mapping[str, float]) -> str:
    """eval/<source>/<what> grouped by source."""
    found = sorted(name.removeprefix("eval/").rpartition("/") for name in metrics if name.startswith("eval/"))
    sources = []
    for source, names in groupby(found, key=lambda parts: parts[0]):
        values = [f"{what} {_short(metrics['/'.join(filter(None, ('eval', src, what)))])}" for src, _, what in names]
        sources.append(f"{visible(source)}: {', '.join(values)}")
    return "eval " + "; ".join(sources) if sources else ""


def _part(metrics: Mapping[str, float], name: str, words: str) -> str:
    return words.format(_short(metrics[name])) if name in metrics else ""


def _short(value: float) -> str:
    """Four significant digits; counts as they are."""
    return f"{value:.0f}" if math.isfinite(value) and abs(value) >= 1000 else f"{value:.4g}"
