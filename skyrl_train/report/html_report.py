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
from skyrl_train.report.rollout_views import RolloutViews
from skyrl_train.report.run_reader import RunReader, open_runs, overview
from skyrl_train.report.untrusted_files import to_json_value
from skyrl_train.terminal import escape_control_chars

MAX_REPORT_BYTES = 5_000_000
_METRICS_FRACTION, _SHORT_METRICS_FRACTION = 0.4, 0.99
"""Of the bytes that the page leaves; the second for curves of fewer points than they should have."""
_MAX_POINTS, _MIN_POINTS, _DIGITS = 2000, 50, 6
_STEPS, _MAX_ROLLOUTS = 24, 1000
_MAX_GROUP_FRACTION = 0.2
"""Of what is left: then there are at least some ten."""
_BYTES_PER_TOKEN = 4
"""About what its text takes."""
_BYTES_PER_SHOWN_TOKEN = 25
"""The least that its columns take."""
_MAX_TEXT_CHARS = 4000
_NO_CURVES: dict[str, Any] = {"steps": [], "times": [], "steps_per_point": 1, "columns": {}, "described": {}}
_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class HtmlReport:
    """The file, and how much of the runs is in it."""

    html: str
    rollouts: int
    total_rollouts: int


def make_report(
    folders: Sequence[Path], render_page: Callable[[Any], str], max_bytes: int = MAX_REPORT_BYTES
) -> HtmlReport:
    """A report of the runs in these folders; `page`: what makes HTML of its data (page_files.page).

    What cannot be read of a run is left out with a warning, and costs nothing else of it, nor of other runs. Raises
    ConfigError for a folder that is no run's, and for curves that have more than `most_bytes` even with one point each.
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
        fewer = "name fewer runs, or look at them" if len(runs) > 1 else "look at it"
        raise ConfigError(
            f"RUN: the report would have {size:,} bytes, and may have {max_bytes:,}: {fewer} with skyrl-train watch."
        )
    return HtmlReport(html, sum(map(len, rollouts.values())), sum(len(view.index.table) for view in views))


def _metrics(runs: Sequence[RunReader], views: Sequence[RolloutViews], max_bytes: int) -> dict[str, Any]:
    """Curves of as many points as leave room for rollouts; if they would be few, of as many as fit, at least one."""
    points = _MAX_POINTS
    while True:
        found = {}
        for number, (run, view) in enumerate(zip(runs, views, strict=True)):
            curves = partial(run.metrics, points, _DIGITS, view.index.quantiles)
            found[str(number)] = _or_default(run, "metrics", curves, _NO_CURVES)
        share = _METRICS_FRACTION if points > _MIN_POINTS else _SHORT_METRICS_FRACTION
        if points == 1 or _size(found) <= max_bytes * share:
            return found
        points //= 2


def _or_default(run: RunReader, what: str, make: Callable[[], T], default: T) -> T:
    """Return what `make` returns, or `otherwise` with a warning if the run's files make it raise."""
    try:
        return make()
    except Exception as error:
        _log.warning(
            "%s: %s are left out: %s", escape_control_chars(str(run.folder)), what, escape_control_chars(str(error))
        )
        return default


# -- rollouts ----------------------------------------------------------------------------------------------------------


def _sample(views: RolloutViews, run: RunReader, max_bytes: int) -> tuple[list[Any], int]:
    """Rollouts of at most so many bytes, and their size: all of a group, so that its samples can be compared."""
    chosen, estimate, count = [], 0, 0
    for group in _interesting_groups(views.index.table):
        if estimate > 2 * max_bytes or count >= _MAX_ROLLOUTS:
            break
        chosen.append(group)
        estimate += group["tokens_sum"] * _BYTES_PER_TOKEN
        count += group["sample_count"]
    rows = {key: rows for step in {group["step"] for group in chosen} for key, rows in _rows_of(run, step, chosen)}
    found: list[Any] = []
    left = max_bytes
    for group in chosen:
        most = left * _MAX_GROUP_FRACTION if found else left
        of_group = rows.get((group["step"], group["group"]), [])
        nothing: tuple[list[Any], int] = [], 0
        form, size = _or_default(run, "a group of rollouts", partial(_fitting, views, of_group, most), nothing)
        found += form
        left -= size
    return found, max_bytes - left


def _fitting(views: RolloutViews, rows: Sequence[dict[str, Any]], max_bytes: float) -> tuple[list[Any], int]:
    """The largest form of a group that has at most so many bytes, and its size; nothing if there is none."""
    for form in _forms(views, rows, max_bytes):
        size = sum(_size(one) + 1 for one in form)
        if size <= max_bytes:
            return form, size
    return [], 0


def _interesting_groups(index: pa.Table) -> Iterator[dict[str, Any]]:
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
    for worth in cycle([*_INTEREST_SCORES, *(_of_source(source) for source in sources)]):
        for step in steps:
            best = max(by_step[step], key=lambda group: (worth(group), -group["group"]), default=None)
            if best is not None and worth(best) > _NEVER:
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
    run: RunReader, step: int, chosen: Sequence[dict[str, Any]]
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


def _forms(views: RolloutViews, rows: Sequence[dict[str, Any]], max_bytes: float) -> Iterator[list[Any]]:
    """A group, smaller each time: with all tokens, with those of its best sample, without any, with texts cut.

    Without those that are certainly larger than `most_bytes`.
    """
    if not rows:
        return
    best = max(range(len(rows)), key=lambda number: (rows[number]["status"] == "ok", rows[number]["reward"] or 0.0))
    for tokens_of in (range(len(rows)), [best], []):
        if sum(rows[number]["response_tokens"] for number in tokens_of) * _BYTES_PER_SHOWN_TOKEN <= max_bytes:
            yield [_once(views.rollout_details(row, tokens=number in tokens_of)) for number, row in enumerate(rows)]
    yield [_truncate_texts(_once(views.rollout_details(row, tokens=False))) for row in rows]


def _once(rollout: dict[str, Any]) -> dict[str, Any]:
    """Without the response's text, which is in the messages."""
    return {name: value for name, value in rollout.items() if name != "text" or not rollout["messages"]}


def _truncate_texts(value: Any) -> Any:
    """The same with the middle of long texts left out."""
    if isinstance(value, dict):
        return {key: _truncate_texts(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_truncate_texts(one) for one in value]
    if isinstance(value, str) and len(value) > _MAX_TEXT_CHARS:
        half = _MAX_TEXT_CHARS // 2
        return f"{value[:half]}\n[... {len(value) - 2 * half:,} characters are not in this report ...]\n{value[-half:]}"
    return value


def _size(value: Any) -> int:
    """Bytes in the page: in ASCII, and "<" escaped."""
    text = json.dumps(to_json_value(value), separators=(",", ":"))
    return len(text) + 5 * text.count("<")
