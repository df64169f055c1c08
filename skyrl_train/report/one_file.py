"""A report of runs in one HTML file: the page of `skyrl-train watch` with its data inside, for reading offline.

It has at most MOST_BYTES: curves of as many points as fit, and whole groups of rollouts from all over each run, chosen
for what they show.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from skyrl_train.errors import ConfigError
from skyrl_train.messages import visible
from skyrl_train.report.rollout_views import RolloutViews
from skyrl_train.report.run_files import RunFiles, open_runs, overview
from skyrl_train.report.safe_files import plain

MOST_BYTES = 5_000_000
_FOR_METRICS, _FOR_SHORT_METRICS = 0.4, 0.99
"""Of the bytes that the page leaves; the second for curves of fewer points than they should have."""
_MOST_POINTS, _LEAST_POINTS, _DIGITS = 2000, 50, 6
_STEPS, _MOST_ROLLOUTS = 24, 1000
_FOR_A_GROUP = 0.2
"""Of what is left: then there are at least some ten."""
_BYTES_A_TOKEN = 4
"""About what its text takes."""
_BYTES_A_SHOWN_TOKEN = 25
"""The least that its columns take."""
_CUT_CHARACTERS = 4000
_NO_CURVES: dict[str, Any] = {"steps": [], "times": [], "steps_per_point": 1, "columns": {}, "described": {}}
_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Report:
    """The file, and how much of the runs is in it."""

    html: str
    rollouts: int
    rollouts_of_all: int


def make_report(folders: Sequence[Path], page: Callable[[Any], str], most_bytes: int = MOST_BYTES) -> Report:
    """A report of the runs in these folders; `page`: what makes HTML of its data (page_files.page).

    What cannot be read of a run is left out with a warning, and costs nothing else of it, nor of other runs. Raises
    ConfigError for a folder that is no run's, and for curves that have more than `most_bytes` even with one point each.
    """
    runs = open_runs(folders)
    with ExitStack() as stack:
        views = [stack.enter_context(closing(RolloutViews(run.folder))) for run in runs]
        for run, view in zip(runs, views, strict=True):
            _guarded(run, "rollouts", view.index.refresh, None)
        return _make_report(runs, views, page, most_bytes)


def _make_report(
    runs: Sequence[RunFiles], views: Sequence[RolloutViews], page: Callable[[Any], str], most_bytes: int
) -> Report:
    left = most_bytes - len(page({}).encode())
    nothing: list[dict[str, Any]] = []
    diagnosis = {str(number): _guarded(run, "diagnosis", run.diagnosis, nothing) for number, run in enumerate(runs)}
    head = {"runs": overview(runs), "diagnosis": diagnosis}
    left -= _size(head)
    metrics = _metrics(runs, views, left)
    left -= _size(metrics)
    rollouts: dict[str, list[Any]] = {}
    for number, (run, view) in enumerate(zip(runs, views, strict=True)):
        sample = partial(_sample, view, run, left // (len(runs) - number))
        rollouts[str(number)], size = _guarded(run, "rollouts", sample, ([], 0))
        left -= size
    html = page(plain({**head, "metrics": metrics, "rollouts": rollouts}))
    if (size := len(html.encode())) > most_bytes:
        fewer = "name fewer runs, or look at them" if len(runs) > 1 else "look at it"
        raise ConfigError(
            f"RUN: the report would have {size:,} bytes, and may have {most_bytes:,}: {fewer} with skyrl-train watch."
        )
    return Report(html, sum(map(len, rollouts.values())), sum(len(view.index.table) for view in views))


def _metrics(runs: Sequence[RunFiles], views: Sequence[RolloutViews], most_bytes: int) -> dict[str, Any]:
    """Curves of as many points as leave room for rollouts; if they would be few, of as many as fit, at least one."""
    points = _MOST_POINTS
    while True:
        found = {}
        for number, (run, view) in enumerate(zip(runs, views, strict=True)):
            curves = partial(run.metrics, points, _DIGITS, view.index.quantiles)
            found[str(number)] = _guarded(run, "metrics", curves, _NO_CURVES)
        share = _FOR_METRICS if points > _LEAST_POINTS else _FOR_SHORT_METRICS
        if points == 1 or _size(found) <= most_bytes * share:
            return found
        points //= 2


def _guarded(run: RunFiles, what: str, make: Callable[[], T], otherwise: T) -> T:
    """Return what `make` returns, or `otherwise` with a warning if the run's files make it raise."""
    try:
        return make()
    except Exception as error:
        _log.warning("%s: %s are left out: %s", visible(str(run.folder)), what, visible(str(error)))
        return otherwise


# -- rollouts ----------------------------------------------------------------------------------------------------------


def _sample(views: RolloutViews, run: RunFiles, most_bytes: int) -> tuple[list[Any], int]:
    """Rollouts of at most so many bytes, and their size: all of a group, so that its samples can be compared."""
    chosen, estimate, count = [], 0, 0
    for group in _worth_seeing(views.index.table):
        if estimate > 2 * most_bytes or count >= _MOST_ROLLOUTS:
            break
        chosen.append(group)
        estimate += group["tokens_sum"] * _BYTES_A_TOKEN
        count += group["sample_count"]
    rows = {key: rows for step in {group["step"] for group in chosen} for key, rows in _rows_of(run, step, chosen)}
    found: list[Any] = []
    left = most_bytes
    for group in chosen:
        most = left * _FOR_A_GROUP if found else left
        of_group = rows.get((group["step"], group["group"]), [])
        nothing: tuple[list[Any], int] = [], 0
        form, size = _guarded(run, "a group of rollouts", partial(_fitting, views, of_group, most), nothing)
        found += form
        left -= size
    return found, most_bytes - left


def _fitting(views: RolloutViews, rows: Sequence[dict[str, Any]], most_bytes: float) -> tuple[list[Any], int]:
    """The largest form of a group that has at most so many bytes, and its size; nothing if there is none."""
    for form in _forms(views, rows, most_bytes):
        size = sum(_size(one) + 1 for one in form)
        if size <= most_bytes:
            return form, size
    return [], 0


def _worth_seeing(index: pa.Table) -> Iterator[dict[str, Any]]:
    """Groups, each once: of steps from all over the run the one whose rewards differ most, then the best, the worst...

    The first ones show most, wherever a reader stops.
    """
    if not len(index):
        return
    failed = pc.cast(pc.not_equal(index["status"], "ok"), pa.int32())
    groups = (
        index.append_column("failed", failed)
        .group_by(["step", "group"], use_threads=False)
        .aggregate(
            [
                ("reward", "stddev"),
                ("reward", "mean"),
                ("failed", "sum"),
                ("tokens", "max"),
                ("tokens", "sum"),
                ("sample", "count"),
                ("source", "first"),
            ]
        )
    )
    by_step: dict[int, list[dict[str, Any]]] = {}
    for group in groups.to_pylist():
        by_step.setdefault(group["step"], []).append(group)
    steps = [sorted(by_step)[at] for at in _spread(len(by_step))][:_STEPS]
    sources = sorted({group["source_first"] for group in groups.select(["source_first"]).to_pylist()} - {None})
    for worth in cycle([*_WORTH, *(_of_source(source) for source in sources)]):
        for step in steps:
            best = max(by_step[step], key=lambda group: (worth(group), -group["group"]), default=None)
            if best is not None and worth(best) > _NEVER:
                by_step[step].remove(best)
                yield best
        if not any(by_step[step] for step in steps):
            return


_NEVER = float("-inf")
_WORTH = (
    lambda group: group["reward_stddev"] or 0.0,
    lambda group: _NEVER if group["reward_mean"] is None else group["reward_mean"],
    lambda group: _NEVER if group["reward_mean"] is None else -group["reward_mean"],
    lambda group: group["failed_sum"] or _NEVER,
    lambda group: group["tokens_max"],
)
"""What makes a group worth seeing: the larger the better, -inf never."""


def _of_source(source: str) -> Any:
    return lambda group: 0.0 if group["source_first"] == source else _NEVER


def _spread(count: int) -> list[int]:
    """0 to count - 1: the last, the first, then always the middle of the widest gap, so that any few are spread out."""
    order = list(dict.fromkeys([count - 1, 0][:count]))
    gaps = [(0, count - 1)]
    while gaps:
        begin, end = gaps.pop(0)
        if end - begin > 1:
            order.append((begin + end) // 2)
            gaps += [(begin, order[-1]), (order[-1], end)]
    return order


def _rows_of(
    run: RunFiles, step: int, chosen: Sequence[dict[str, Any]]
) -> Iterator[tuple[tuple[int, int], list[dict[str, Any]]]]:
    """The rows of a step's chosen groups; none of a file that is damaged in what the index does not read."""
    groups = [group["group"] for group in chosen if group["step"] == step]
    try:
        rows = run.rollouts.table([step], filter=pc.field("group").isin(groups)).to_pylist()
    except OSError as error:
        _log.warning("Step %d is left out: %s", step, error)
        return
    for group in groups:
        yield (step, group), [row for row in rows if row["group"] == group]


def _forms(views: RolloutViews, rows: Sequence[dict[str, Any]], most_bytes: float) -> Iterator[list[Any]]:
    """A group, smaller each time: with all tokens, with those of its best sample, without any, with texts cut.

    Without those that are certainly larger than `most_bytes`.
    """
    if not rows:
        return
    best = max(range(len(rows)), key=lambda number: (rows[number]["status"] == "ok", rows[number]["reward"] or 0.0))
    for tokens_of in (range(len(rows)), [best], []):
        if sum(rows[number]["response_tokens"] for number in tokens_of) * _BYTES_A_SHOWN_TOKEN <= most_bytes:
            yield [_once(views.whole(row, tokens=number in tokens_of)) for number, row in enumerate(rows)]
    yield [_cut(_once(views.whole(row, tokens=False))) for row in rows]


def _once(rollout: dict[str, Any]) -> dict[str, Any]:
    """Without the response's text, which is in the messages."""
    return {name: value for name, value in rollout.items() if name != "text" or not rollout["messages"]}


def _cut(value: Any) -> Any:
    """The same with the middle of long texts left out."""
    if isinstance(value, dict):
        return {key: _cut(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_cut(one) for one in value]
    if isinstance(value, str) and len(value) > _CUT_CHARACTERS:
        half = _CUT_CHARACTERS // 2
        return f"{value[:half]}\n[... {len(value) - 2 * half:,} characters are not in this report ...]\n{value[-half:]}"
    return value


def _size(value: Any) -> int:
    """Bytes in the page: in ASCII, and "<" escaped."""
    text = json.dumps(plain(value), separators=(",", ":"))
    return len(text) + 5 * text.count("<")
