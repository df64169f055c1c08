"""The learning curve of a run as a PNG. No other module imports matplotlib."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from skyrl_train.errors import DataError
from skyrl_train.report.jsonl import METRICS_FILE, read_metrics

_REWARD, _LOSS = "reward/mean", "sft/loss"
_LABELS = {_REWARD: "training rollouts", _LOSS: "loss"}


class Curve(NamedTuple):
    """The values of one metric of a run."""

    label: str
    points: Sequence[tuple[int, float]]
    """Pairs of step and value, in the order of steps."""
    has_markers: bool = False
    """True if every point gets a marker, for metrics that few steps have."""


def write_reward_curve(run_dir: Path, png: Path | None = None) -> Path:
    """Draw the training reward and every `eval/<source>/avg_score` over steps, and return the path of the PNG.

    Args:
        run_dir: Folder of the run.
        png: File to write; `reward_curve.png` in the run's folder by default.

    Raises:
        DataError: If metrics.jsonl is missing or has no reward.
        OSError: If metrics.jsonl cannot be read or the PNG cannot be written.
    """
    lines = read_metrics(Path(run_dir) / METRICS_FILE)
    figure = _curve(lines, _rewards(lines), "mean reward")
    if figure is None:
        raise DataError(
            f"{Path(run_dir) / METRICS_FILE} has neither reward/mean nor eval/<source>/avg_score: there is no curve to "
            "draw. Wait for the run's first step."
        )
    target = png or Path(run_dir) / "reward_curve.png"
    FigureCanvasAgg(figure).print_png(str(target))
    return target


def write_learning_curve(lines: Sequence[Mapping[str, Any]], png: Path) -> bool:
    """Draw the rewards or, if there are none, the SFT loss of lines of metrics.jsonl into a PNG.

    Return False, and write nothing, if the lines have neither. Raises OSError if the PNG cannot be written.
    """
    figure = _curve(lines, _rewards(lines), "mean reward") or _curve(lines, [_LOSS], "nats per token")
    if figure is None:
        return False
    figure.set_size_inches(6, 3.4)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a data source may have any name
        FigureCanvasAgg(figure).print_png(str(png))
    return True


def _rewards(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    evaluations = {name for line in lines for name in line if name.startswith("eval/") and name.endswith("/avg_score")}
    return [_REWARD, *sorted(evaluations)]


def metric_points(lines: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    """Return (step, value) for every line of metrics.jsonl that has the metric."""
    return [(line["step"], line[name]) for line in lines if line.get(name) is not None]


def plot_curves(curves: Sequence[Curve], unit: str) -> Figure:
    """Return a plot of curves over steps, on a white background, with a legend."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for curve in curves:
        label = curve.label.replace("$", r"\$")
        printable = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in label)
        axes.plot(*zip(*curve.points, strict=True), marker="o" if curve.has_markers else "", label=printable)
    axes.set(xlabel="step", ylabel=unit)
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    return figure


def _curve(lines: Sequence[Mapping[str, Any]], names: Sequence[str], unit: str) -> Figure | None:
    """Return a plot of metrics over steps; None if no line has any of them."""
    labels = {name: _LABELS.get(name) or name.removesuffix("/avg_score") for name in names}
    curves = [Curve(labels[name], metric_points(lines, name), name not in _LABELS) for name in names]
    drawn = [curve for curve in curves if curve.points]
    return plot_curves(drawn, unit) if drawn else None
