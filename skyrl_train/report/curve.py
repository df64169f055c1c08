"""Draws PNGs: a run's reward curve, and a grid of simulated runs. No other module imports matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from skyrl_train.errors import DataError
from skyrl_train.report.jsonl import METRICS_FILE, read_jsonl


class SplitOutcome(Protocol):
    """A simulated run (simulation/run.py)."""

    @property
    def split(self) -> Any: ...

    @property
    def steps_per_hour(self) -> float: ...


def write_reward_curve(run_dir: Path, png: Path | None = None) -> Path:
    """Draw the training reward and every eval/<source>/avg_score over steps; return the PNG's path (reward_curve.png).

    Raises DataError if the run has no reward to show.
    """
    lines = read_jsonl(Path(run_dir) / METRICS_FILE)
    names = [
        "reward/mean",
        *sorted({n for line in lines for n in line if n.startswith("eval/") and n.endswith("/avg_score")}),
    ]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name in names:
        points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
        if points:
            label = "training rollouts" if name == "reward/mean" else name.removesuffix("/avg_score")
            axes.plot(
                *zip(*points, strict=True), marker="" if name == "reward/mean" else "o", label=label.replace("$", r"\$")
            )
    if not axes.lines:
        raise DataError(f"{Path(run_dir) / METRICS_FILE} holds no reward/mean and no eval reward: nothing to draw.")
    axes.set(xlabel="step", ylabel="mean reward")
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    target = png or Path(run_dir) / "reward_curve.png"
    FigureCanvasAgg(figure).print_png(str(target))
    return target


def write_splits(outcomes: Sequence[SplitOutcome], png: Path) -> Path:
    """Draw the steps an hour of simulated runs by their number of engines, a line for each staleness; returns `png`."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    apart = [one for one in outcomes if not one.split.colocated and not one.split.over_provisioning]
    for ahead in sorted({one.split.staleness for one in apart}):
        points = sorted((one.split.engines, one.steps_per_hour) for one in apart if one.split.staleness == ahead)
        axes.plot(*zip(*points, strict=True), marker="o", label=f"staleness {ahead}")
    for one in outcomes:
        if one.split.colocated and not one.split.over_provisioning:
            axes.axhline(one.steps_per_hour, linestyle="--", color="gray", label="colocated")
    axes.set(xlabel="engines, of all slots", ylabel="steps an hour", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    FigureCanvasAgg(figure).print_png(str(png))
    return png
