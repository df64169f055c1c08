"""A report of runs as one HTML file: the page of `skyrl-train watch` with its data embedded, for reading offline.

The file has at most MAX_REPORT_BYTES. Curves have as many points as fit. Rollouts are complete groups from all parts of
each run, chosen for what they show.
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
from skyrl_train.report.rollout_files import shorten_texts
from skyrl_train.report.rollout_views import RolloutViews
from skyrl_train.report.run_reader import RunReader, open_runs, overview
from skyrl_train.report.untrusted_files import to_json_value
from skyrl_train.terminal import escape_control_chars

MAX_REPORT_BYTES = 5_000_000
_METRICS_FRACTION, _SHORT_METRICS_FRACTION = 0.4, 0.99
"""Maximum fraction of the available bytes for curves, and the same if they have at most _MIN_POINTS points."""
_MAX_POINTS, _MIN_POINTS, _DIGITS = 2000, 50, 6
_STEPS, _MAX_ROLLOUTS = 24, 1000
_MAX_GROUP_FRACTION = 0.2
"""Maximum fraction of the remaining bytes for a group, so that there is room for ten or more groups."""
_BYTES_PER_TOKEN = 4
"""Approximate size of a token's text."""
_BYTES_PER_SHOWN_TOKEN = 25
"""Minimum size of a token in the token view."""
_MAX_TEXT_CHARS = 4000
_NO_CURVES: dict[str, Any] = {"steps": [], "times": [], "steps_per_point": 1, "columns": {}, "described": {}}
_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class HtmlReport:
    """A report, with the number of rollouts in it and in its runs."""

    html: str
    rollouts: int
    total_rollouts: int


def make_report(
    folders: Sequence[Path], render_page: Callable[[Any], str], max_bytes: int = MAX_REPORT_BYTES
) -> HtmlReport:
    """Make a report of runs. A part of a run that cannot be read is left out with a warning.

    Args:
        folders: Folders of the runs.
        render_page: Function that returns the HTML page for the report's data, such as `viewer_page.render_page`.
        max_bytes: Maximum size of the page.

    Raises:
        ConfigError: If there is no folder, a folder is not a run's or is named twice, or the page has more than
            `max_bytes` even with one point per curve and no rollouts.
    """
    runs = open_runs(folders)
    with ExitStack() as stack:
        views = [stack.enter_context(closing(RolloutViews(run.folder))) for run in runs]
        for run, view in zip(runs, views, strict=True):
            _or_default(run, "rollouts", view.index.refresh, None)
        return _make_report(runs, views, render_page, max_bytes)


def _make_report(
    runs: Sequence[RunReader], views: Sequence[RolloutViews], render_page: Callable[[Any], str], max_bytes: int
) -> HtmlReport:
    left = max_bytes - len(render_page({}).encode())
    nothing: list[dict[str, Any]] = []
    diagnosis = {str(number): _or_default(run, "diagnosis", run.diagnosis, nothing) for number, run in enumerate(runs)}
    head = {"runs": overview(runs), "diagnosis": diagnosis}
    left -= _size(head)
    metrics = _metrics(runs, views, left)
    left -= _size(metrics)
    rollouts: dict[str, list[Any]] = {}
    for number, (run, view) in enumerate(zip(runs, views, strict=True)):
        sample = partial(_sample, view, run, left // (len(runs) - number))
        rollouts[str(number)], size = _or_default(run, "rollouts", sample, ([], 0))
        left -= size
    html = render_page(to_json_value({**head, "metrics": metrics, "rollouts": rollouts}))
    if (size := len(html.encode())) > max_bytes:
        alternative = "Name fewer runs, or open them" if len(runs) > 1 else "Open the run"
        raise ConfigError(
            f"RUN: the report would have {size:,} bytes; at most {max_bytes:,} are allowed. {alternative} with "
            "skyrl-train watch."
        )
    return HtmlReport(html, sum(map(len, rollouts.values())), sum(len(view.index.table) for view in views))


def _metrics(runs: Sequence[RunReader], views: Sequence[RolloutViews], max_bytes: int) -> dict[str, Any]:
    """Return the curves of all runs by id, with as many points as leave room for rollouts.

    Curves of at most _MIN_POINTS points may take nearly all bytes. They have at least one point, even if it is too big.
    """
    points = _MAX_POINTS
    while True:
        curves_by_run = {}
        for number, (run, view) in enumerate(zip(runs, views, strict=True)):
            curves = partial(run.metrics, points, _DIGITS, view.index.quantiles)
            curves_by_run[str(number)] = _or_default(run, "metrics", curves, _NO_CURVES)
        fraction = _METRICS_FRACTION if points > _MIN_POINTS else _SHORT_METRICS_FRACTION
        if points == 1 or _size(curves_by_run) <= max_bytes * fraction:
            return curves_by_run
        points //= 2


def _or_default(run: RunReader, part: str, make: Callable[[], T], default: T) -> T:
    """Return what `make` returns. If it raises, log that this part of the run is left out, and return `default`."""
    try:
        return make()
    except Exception as error:
        folder, reason = escape_control_chars(str(run.folder)), escape_control_chars(str(error))
        _log.warning("%s: %s cannot be read and are left out of the report: %s", folder, part, reason)
        return default


# -- rollouts ----------------------------------------------------------------------------------------------------------


def _sample(views: RolloutViews, run: RunReader, max_bytes: int) -> tuple[list[Any], int]:
    """Return (rollouts, their size) with at most `max_bytes`: complete groups, so that samples can be compared."""
    chosen, estimate, count = [], 0, 0
    for group in _interesting_groups(views.index.table):
        if estimate > 2 * max_bytes or count >= _MAX_ROLLOUTS:
            break
        chosen.append(group)
        estimate += group["tokens_sum"] * _BYTES_PER_TOKEN
        count += group["sample_count"]
    rows = {key: rows for step in {group["step"] for group in chosen} for key, rows in _rows_of(run, step, chosen)}
    rollouts: list[Any] = []
    left = max_bytes
    for group in chosen:
        group_bytes = left * _MAX_GROUP_FRACTION if rollouts else left
        group_rows = rows.get((group["step"], group["group"]), [])
        nothing: tuple[list[Any], int] = [], 0
        fit = partial(_largest_fitting, views, group_rows, group_bytes)
        version, size = _or_default(run, "rollouts of a group", fit, nothing)
        rollouts += version
        left -= size
    return rollouts, max_bytes - left


def _largest_fitting(views: RolloutViews, rows: Sequence[dict[str, Any]], max_bytes: float) -> tuple[list[Any], int]:
    """Return (rollouts, size) of the largest version of a group with at most `max_bytes`; ([], 0) if none fits."""
    for version in _versions(views, rows, max_bytes):
        size = sum(_size(rollout) + 1 for rollout in version)
        if size <= max_bytes:
            return version, size
    return [], 0


def _interesting_groups(index: pa.Table) -> Iterator[dict[str, Any]]:
    """Yield groups, each once, such that any prefix of the result shows as much as possible.

    For steps from all parts of the run, yield the group whose rewards vary most, then the best, the worst, and so on.
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
    for score in cycle([*_INTEREST_SCORES, *(_source_score(source) for source in sources)]):
        for step in steps:
            best = max(by_step[step], key=lambda group: (score(group), -group["group"]), default=None)
            if best is not None and score(best) > _NEVER:
                by_step[step].remove(best)
                yield best
        if not any(by_step[step] for step in steps):
            return


_NEVER = float("-inf")
_INTEREST_SCORES = (
    lambda group: group["reward_stddev"] or 0.0,
    lambda group: _NEVER if group["reward_mean"] is None else group["reward_mean"],
    lambda group: _NEVER if group["reward_mean"] is None else -group["reward_mean"],
    lambda group: group["failed_sum"] or _NEVER,
    lambda group: group["tokens_max"],
)
"""Functions that score how interesting a group is. A group with the score -inf is not chosen."""


def _source_score(source: str) -> Any:
    return lambda group: 0.0 if group["source_first"] == source else _NEVER


def _spread(count: int) -> list[int]:
    """Return a permutation of range(count) whose prefixes are spread out: last, first, then the middles of gaps."""
    order = list(dict.fromkeys([count - 1, 0][:count]))
    gaps = [(0, count - 1)]
    while gaps:
        begin, end = gaps.pop(0)
        if end - begin > 1:
            order.append((begin + end) // 2)
            gaps += [(begin, order[-1]), (order[-1], end)]
    return order


def _rows_of(
    run: RunReader, step: int, chosen: Sequence[dict[str, Any]]
) -> Iterator[tuple[tuple[int, int], list[dict[str, Any]]]]:
    """Yield ((step, group), rows) of a step's chosen groups; nothing, with a warning, if the file is damaged."""
    groups = [group["group"] for group in chosen if group["step"] == step]
    try:
        rows = run.rollouts.table([step], filter=pc.field("group").isin(groups)).to_pylist()
    except OSError as error:
        _log.warning("The rollouts of step %d cannot be read and are left out of the report: %s", step, error)
        return
    for group in groups:
        yield (step, group), [row for row in rows if row["group"] == group]


def _versions(views: RolloutViews, rows: Sequence[dict[str, Any]], max_bytes: float) -> Iterator[list[Any]]:
    """Yield smaller and smaller versions of a group, except those that are certainly larger than `max_bytes`.

    The first has the tokens of all samples, the next those of the best sample, the next none, and in the last one long
    texts are shortened, too.
    """
    if not rows:
        return
    best = max(range(len(rows)), key=lambda number: (rows[number]["status"] == "ok", rows[number]["reward"] or 0.0))
    for tokens_of in (range(len(rows)), [best], []):
        if sum(rows[number]["response_tokens"] for number in tokens_of) * _BYTES_PER_SHOWN_TOKEN <= max_bytes:
            yield [
                _without_duplicate_text(views.rollout_details(row, tokens=number in tokens_of))
                for number, row in enumerate(rows)
            ]
    yield [
        shorten_texts(_without_duplicate_text(views.rollout_details(row, tokens=False)), _MAX_TEXT_CHARS)
        for row in rows
    ]


def _without_duplicate_text(rollout: dict[str, Any]) -> dict[str, Any]:
    """Return a rollout without the response's text if its messages contain that text."""
    return {name: value for name, value in rollout.items() if name != "text" or not rollout["messages"]}


def _size(value: Any) -> int:
    """Return the size of a value in bytes as the page embeds it: ASCII, with "<" escaped."""
    text = json.dumps(to_json_value(value), separators=(",", ":"))
    return len(text) + 5 * text.count("<")
