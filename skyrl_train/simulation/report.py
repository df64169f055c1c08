"""A grid of simulated runs as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from skyrl_train.simulation.run import Outcome, Split

HEAD = ("engines : trainers", "staleness", "extra", "steps/h", "engines busy", "trainer busy", "mean age", "wasted")


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Lines of the table, the fastest split marked, and the sentence that names it."""
    best = max(outcomes, key=lambda one: one.steps_per_hour)
    rows = [HEAD, *(_row(one) for one in outcomes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    for row, outcome in zip(rows, [None, *outcomes], strict=True):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        yield "  ".join(cells) + ("  <" if outcome is best else "")
    yield ""
    yield f"Fastest: {shape(best.split)}, staleness {best.split.staleness}: {best.steps_per_hour:,.3g} steps an hour."


def shape(split: Split) -> str:
    """Engines and trainers of a split in words."""
    return f"{split.engines} colocated" if split.colocated else f"{split.engines} : {split.trainers}"


def _row(one: Outcome) -> tuple[str, ...]:
    return (
        shape(one.split),
        str(one.split.staleness),
        f"{one.split.over_provisioning:.0%}",
        f"{one.steps_per_hour:,.4g}",
        f"{one.engines_busy:.0%}",
        f"{one.trainer_busy:.0%}",
        f"{one.staleness:.2f}",
        f"{one.wasted:.0%}",
    )
