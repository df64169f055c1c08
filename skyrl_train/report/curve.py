"""Draws the learning curve of a run as a PNG. No other module imports matplotlib."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from skyrl_train.errors import DataError
from skyrl_train.report.jsonl import METRICS_FILE, read_metrics

_REWARD, _LOSS = "reward/mean", "sft/loss"
_LABELS = {_REWARD: "training rollouts", _LOSS: "loss"}


def write_reward_curve(run_dir: Path, png: Path | None = None) -> Path:
    """Draw the training reward and every eval/<source>/avg_score over steps; return the PNG's path (reward_curve.png).

    Raises DataError if the run has no reward to show.
    """
    lines = read_metrics(Path(run_dir) / METRICS_FILE)
    figure = _curve(lines, _rewards(lines), "mean reward")
    if figure is None:
        raise DataError(f"{Path(run_dir) / METRICS_FILE} holds no reward/mean and no eval reward: nothing to draw.")
    target = png or Path(run_dir) / "reward_curve.png"
    FigureCanvasAgg(figure).print_png(str(target))
    return target


def write_learning_curve(lines: Sequence[Mapping[str, Any]], png: Path) -> bool:
    """Draw what lines of metrics.jsonl say of the reward, or else of a fine-tuning's loss; False if that is nothing."""
    figure = _curve(lines, _rewards(lines), "mean reward") or _curve(lines, [_LOSS], "nats a token")
    if figure is None:
        return False
    figure.set_size_inches(6, 3.4)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a source may be called anything
        FigureCanvasAgg(figure).print_png(str(png))
    return True


def _rewards(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """The metrics that are mean rewards."""
    evaluations = {name for line in lines for name in line if name.startswith("eval/") and name.endswith("/avg_score")}
    return [_REWARD, *sorted(evaluations)]


def _curve(lines: Sequence[Mapping[str, Any]], names: Sequence[str], unit: str) -> Figure | None:
    """Metrics by step; None if no line has any of them."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name in names:
        points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
        if points:
            label = _LABELS.get(name) or name.removesuffix("/avg_score").replace("$", r"\$")
            shown = "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in label)
            axes.plot(*zip(*points, strict=True), marker="" if name in _LABELS else "o", label=shown)
    if not axes.lines:
        return None
    axes.set(xlabel="step", ylabel=unit)
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    return figure
