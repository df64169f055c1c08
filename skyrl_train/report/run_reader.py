"""What is known of a run from the files of its folder: of one under way, one that ended, and a copy from elsewhere.

Nothing here writes, and nothing takes the lock of a run's folder, even for a moment: a run that starts then would not.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from skyrl_train.errors import ConfigError
from skyrl_train.report.diagnosis import DIAGNOSIS_FILE, NO_DIFFERENCE, RULES, async_rules, diagnose, gradient_rule
from skyrl_train.report.jsonl import METRICS_FILE, MetricsFollower, read_metrics
from skyrl_train.report.metric_catalog import metric_of
from skyrl_train.report.rollout_files import RolloutReader
from skyrl_train.report.untrusted_files import MAX_YAML_BYTES, is_step, parse_yaml_mapping, read_bytes, read_json_object
from skyrl_train.terminal import escape_control_chars

RUNNING, FINISHED, FAILED, UNKNOWN = "running", "finished", "failed", "unknown"
ACTIVE, RESOLVED = "warning", "past"
"""The levels of findings."""
_CONFIG_FILE, _IDENTITY_FILE, _LOCK_FILE = "config.yaml", "run.json", ".lock"
_FOLDERS = ("trainer.ckpt_path", "trainer.export_path")
"""They differ between any two runs."""
_FRESH_S = 180.0
"""A run whose process cannot be asked goes on as long as its metrics are no older, or than three of its steps take."""
_MAX_LOCK_BYTES = 4096
_MAX_TEXT = 1000
"""Characters of a name."""
_log = logging.getLogger(__name__)


class RunReader:
    """Reads a run's folder, each line of its metrics once.

    Not for several threads at a time. Raises ConfigError for a folder that is no run's.
    """

    def __init__(self, folder: Path):
        self.folder = Path(folder).absolute()
        if not any((self.folder / name).is_file() for name in (METRICS_FILE, _CONFIG_FILE)):
            raise ConfigError(
                f"{str(folder)!r} is no run's folder: it has neither {METRICS_FILE} nor {_CONFIG_FILE}. Give a "
                "trainer.ckpt_path, or a copy of it."
            )
        self.rollouts = RolloutReader(self.folder)
        self._lines = MetricsFollower(self.folder / METRICS_FILE)
        self._series = MetricSeries()
        self._config: tuple[bytes, dict[str, Any]] = b"", {}

    @property
    def config(self) -> dict[str, Any]:
        """The configuration that the run saved; empty if it is not there."""
        try:
            content = read_bytes(self.folder / _CONFIG_FILE, MAX_YAML_BYTES)
            if content != self._config[0]:
                self._config = content, {}  # what cannot be read is not read again
                found = parse_yaml_mapping(content)
                found.pop("defaults", None)
                self._config = content, found
        except (OSError, ValueError):
            return {}
        return self._config[1]

    def series(self) -> MetricSeries:
        """The numbers of all steps so far. Raises OSError if they cannot be read."""
        replaced, lines = self._lines.read_new_lines()
        if replaced:
            self._series = MetricSeries()
        for line in lines:
            self._series.add(line)
        return self._series

    def metrics(
        self, max_points: int, digits: int | None = None, extra_columns: Mapping[str, Mapping[int, float]] | None = None
    ) -> dict[str, Any]:
        """Steps, times, columns by name, and what each means; see MetricSeries.thinned."""
        thinned = self.series().downsample(max_points, digits, extra_columns)
        return {**thinned, "described": {name: metric_help(name) for name in thinned["columns"]}}

    def summary(self) -> dict[str, Any]:
        """Name, project, folder, how far the run is, and how it is."""
        identity, trainer = read_json_object(self.folder / _IDENTITY_FILE), _mapping(self.config.get("trainer"))
        series, total = self.series(), self.total_steps()
        return {
            "name": _text(identity.get("run_name") or trainer.get("run_name") or self.folder.name),
            "folder": str(self.folder),
            "project": _text(identity.get("project_name") or trainer.get("project_name") or ""),
            "step": series.last_step,
            "total_steps": total,
            "state": self._state(series.last_step, total),
            "has_rollouts": bool(self.rollouts.steps()),
        }

    def total_steps(self) -> int | None:
        """That the run is to have; None if it does not say."""
        for known in (read_json_object(self.folder / DIAGNOSIS_FILE), _mapping(self.config.get("trainer"))):
            for name in ("total_steps", "max_steps"):
                if is_step(total := known.get(name)) and total > 0:
                    return total
        return None

    def diagnosis(self) -> list[dict[str, Any]]:
        """What the run's diagnosis found, the latest first; that of a run which has written none is made now."""
        kept = read_json_object(self.folder / DIAGNOSIS_FILE).get("findings")
        if not isinstance(kept, list):
            kept = [vars(finding) for finding in self._findings()]
        found = [_shown(one) for one in kept if isinstance(one, dict) and is_step(one.get("since"))]
        return sorted(found, key=lambda one: (one["level"] != ACTIVE, -one["step"]))

    def _findings(self) -> list[Any]:
        trainer = _mapping(self.config.get("trainer"))
        rules = [*RULES, gradient_rule(True)]
        if _mapping(trainer.get("algorithm")).get("advantage_estimator") in ("grpo", "rloo"):
            rules.append(NO_DIFFERENCE)
        ahead = _mapping(trainer.get("fully_async"))
        if ahead.get("enabled"):
            bound = ahead.get("max_staleness_steps")
            rules += async_rules(bound if is_step(bound) else 1)
        return diagnose(read_metrics(self.folder / METRICS_FILE), rules, self.total_steps() or 0)

    def _state(self, step: int, total: int | None) -> str:
        alive = self._is_process_alive()
        if alive is None:
            alive = step != total and self._age_s() < max(_FRESH_S, 3 * self._series.max_step_s)
        if alive:
            return RUNNING
        if total is None:
            return UNKNOWN
        return FINISHED if step >= total else FAILED

    def _is_process_alive(self) -> bool | None:
        """Whether the process that has locked the folder still does; None if it cannot be asked."""
        with suppress(OSError, ValueError, OverflowError):
            content = read_bytes(self.folder / _LOCK_FILE, _MAX_LOCK_BYTES).decode()
            _, pid, _, host = content.split()  # process 123 on host
            return _has_open(int(pid), self.folder / _LOCK_FILE) if host == socket.gethostname() else None
        return None

    def _age_s(self) -> float:
        """Of the newest metrics."""
        with suppress(OSError):
            return time.time() - (self.folder / METRICS_FILE).stat().st_mtime
        return float("inf")


def open_runs(folders: Sequence[Path]) -> list[RunReader]:
    """Raises ConfigError for a folder that is no run's, for none, and for one that is given twice."""
    if not folders:
        raise ConfigError("RUN: name the folder of at least one run, its trainer.ckpt_path.")
    runs = [RunReader(folder) for folder in folders]
    places = [run.folder.resolve() for run in runs]
    if twice := [str(place) for place in places if places.count(place) > 1]:
        raise ConfigError(f"RUN: {twice[0]!r} is given twice. Name each run once.")
    return runs


def overview(runs: Sequence[RunReader]) -> dict[str, Any]:
    """The runs, each with an id and a name that no other has, and the keys in which their configurations differ."""
    summaries = [_summary(run) for run in runs]
    names = [one["name"] for one in summaries]
    for one in summaries:
        if names.count(one["name"]) > 1:
            one["name"] = (
                f"{one['name']} ({_unique_path_suffix(one['folder'], [other['folder'] for other in summaries])})"
            )
    return {
        "runs": [{"id": str(number), **one} for number, one in enumerate(summaries)],
        "differing": differing_keys([run.config for run in runs]),
    }


def _summary(run: RunReader) -> dict[str, Any]:
    """A run whose files cannot be read, at least now, hides no others."""
    try:
        return run.summary()
    except Exception as error:
        _log.warning(
            "%s cannot be summarised: %s", escape_control_chars(str(run.folder)), escape_control_chars(str(error))
        )
        nothing = {"project": "", "step": 0, "total_steps": None, "state": UNKNOWN, "has_rollouts": False}
        return {"name": run.folder.name, "folder": str(run.folder), **nothing}


def differing_keys(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The keys whose values are not the same in all configurations, and their values as text; "" where it has none."""
    flat = [dict(_leaves(config)) for config in configs]
    keys = sorted({key for one in flat for key in one} - {*_FOLDERS})
    rows = [{"key": key, "values": [one.get(key, "") for one in flat]} for key in keys]
    return [row for row in rows if len({*row["values"]}) > 1]


def metric_help(name: str) -> str:
    """What a metric is, its unit, and what a healthy run shows; "" of one that a user's own code has added."""
    metric = metric_of(name)
    if metric is None:
        percent = name.removeprefix("reward/p")
        return f"{percent} % of the step's rollouts that are kept had no higher reward" if percent.isdecimal() else ""
    return f"{metric.description} ({metric.unit})" + (f"; good: {metric.healthy}" if metric.healthy else "")


def _text(value: Any) -> str:
    return str(value)[:_MAX_TEXT]


def _mapping(value: Any) -> Mapping[str, Any]:
    """What a configuration has in a place where a mapping belongs; empty for anything else."""
    return value if isinstance(value, Mapping) else {}


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and (value or not key):
        for name, one in value.items():
            yield from _leaves(one, f"{key}.{name}" if key else str(name))
    else:
        yield key, value if isinstance(value, str) else json.dumps(value, default=str)


def _unique_path_suffix(folder: str, others: Sequence[str]) -> str:
    """The last names of a path by which it differs from all others."""
    parts = Path(folder).parts
    for count in range(1, len(parts)):
        tail = parts[-count:]
        if sum(Path(other).parts[-count:] == tail for other in others) == 1:
            return os.path.join(*tail)
    return folder


def _shown(finding: Mapping[str, Any]) -> dict[str, Any]:
    until = finding.get("until") if is_step(finding.get("until")) else None
    text = f"{finding.get('evidence', '')}. {finding.get('advice', '')}".strip()
    return {
        "step": finding["since"],
        "until": until,
        "level": ACTIVE if until is None else RESOLVED,
        "title": str(finding.get("rule", "")).replace("_", " "),
        "text": text if until is None else f"{text} It held until step {until}.",
    }


def _has_open(pid: int, file: Path) -> bool | None:
    """None if it is another user's process."""
    try:
        return any(Path(one.path).samefile(file) for one in psutil.Process(pid).open_files() if Path(one.path).exists())
    except psutil.AccessDenied:
        return None
    except (psutil.Error, OSError):
        return False


# -- numbers over steps ------------------------------------------------------------------------------------------------

MAX_METRICS = 10_000
"""Columns of a run; later names are left out."""
MAX_VALUES = 100_000_000
"""Steps times columns; later steps are left out: each takes a place in every column, whatever its line has."""
_MAX_VALUE = 1e100
"""Larger numbers are shown as none: the range of a chart with both signs of the largest floats is not finite."""
_MAX_TIME = 1e11
"""Unix seconds."""
_NO_METRICS = frozenset({"step", "time"})


class MetricSeries:
    """One column of 8 bytes a step for every metric; NaN where a step has none, or one that cannot be shown."""

    def __init__(self) -> None:
        self._steps, self._times = array("q"), array("d")
        self._columns: dict[str, array[float]] = {}

    @property
    def last_step(self) -> int:
        """0 before the first."""
        return self._steps[-1] if self._steps else 0

    @property
    def max_step_s(self) -> float:
        """The longest that one of the last steps took, by the times of the rows; 0 if there is no such step."""
        latest = [time for time in self._times[-6:] if np.isfinite(time)]
        return max([after - before for before, after in pairwise(latest)], default=0.0)

    def add(self, line: Mapping[str, Any]) -> None:
        """Take in a line of metrics.jsonl. A step that is taken again replaces what there was from it on."""
        while self._steps and self._steps[-1] >= line["step"]:
            self._steps.pop()
            for column in (self._times, *self._columns.values()):
                column.pop()
        size = len(self._steps)
        if size * len(self._columns) >= MAX_VALUES:
            return
        self._steps.append(line["step"])
        self._times.append(_number(line.get("time"), _MAX_TIME))
        news = [name for name in line if name not in _NO_METRICS and name not in self._columns]
        for name in news[: MAX_METRICS - len(self._columns)]:
            self._columns[name] = array("d", [np.nan]) * size
        for name, column in self._columns.items():
            column.append(_number(line.get(name)))

    def downsample(
        self, max_points: int, digits: int | None = None, extra_columns: Mapping[str, Mapping[int, float]] | None = None
    ) -> dict[str, Any]:
        """At most `most` points, each of `steps_per_point` steps in a row: their mean, for maxima the greatest.

        A point stands at the last of its steps. `digits`: significant ones that are kept of numbers. `more`: columns
        beside the run's own, by step.
        """
        columns = {name: np.array(column) for name, column in self._columns.items()}
        for name, values in (extra_columns or {}).items():
            columns.setdefault(name, np.array([_number(values.get(step)) for step in self._steps], float))
        size = len(self._steps)
        width = max(1, -(-size // max(1, max_points)))
        first = np.arange(0, size, width)
        last = np.minimum(first + width, size) - 1
        names = sorted(columns, key=_place)
        return {
            "steps": [self._steps[at] for at in last],
            "times": [self._times[at] for at in last],
            "steps_per_point": width,
            "columns": {name: _values(_pooled(name, columns[name], first), digits) for name in names},
        }


def _pooled(name: str, values: NDArray[np.float64], first: NDArray[np.int64]) -> NDArray[np.float64]:
    if len(first) == len(values):
        return values
    there = np.isfinite(values)
    if "max" in re.split(r"[^a-z0-9]+", name.rpartition("/")[2].replace("_", " ")):  # eval/minimax/... is none
        greatest: NDArray[np.float64] = np.maximum.reduceat(np.where(there, values, -np.inf), first)
        return greatest
    count = np.add.reduceat(there.astype(float), first)
    total = np.add.reduceat(np.where(there, values, 0.0), first)
    return np.divide(total, count, out=np.full(len(first), np.nan), where=count > 0)


def _values(values: NDArray[np.float64], digits: int | None) -> list[float | None]:
    found = [value if np.isfinite(value) else None for value in values.tolist()]
    return found if digits is None else [value and float(f"{value:.{digits}g}") for value in found]


def _place(name: str) -> tuple[str, ...]:
    return tuple(name.split("/"))


def _number(value: Any, most: float = _MAX_VALUE) -> float:
    """The number, or NaN for what is none of at most this size."""
    return float(value) if isinstance(value, int | float) and abs(value) <= most else float("nan")
