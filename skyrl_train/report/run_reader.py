"""Reads the state of a run from the files in its folder: an active run, a finished one, or a copy from elsewhere.

Nothing here writes to the folder. Nothing takes its lock either, because a run that starts at that moment would fail.
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
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from skyrl_train.errors import ConfigError
from skyrl_train.report.attempts import Attempt, read_attempts
from skyrl_train.report.diagnosis import (
    DIAGNOSIS_FILE,
    NO_DIFFERENCE,
    RULES,
    STEP_TIME_METRIC,
    Finding,
    async_rules,
    diagnose,
    gradient_rule,
)
from skyrl_train.report.jsonl import METRICS_FILE, MetricsFollower, read_metrics
from skyrl_train.report.metric_catalog import metric_of
from skyrl_train.report.rollout_files import RolloutReader
from skyrl_train.report.untrusted_files import MAX_YAML_BYTES, is_step, parse_yaml_mapping, read_bytes, read_json_object
from skyrl_train.terminal import escape_control_chars

_CONFIG_FILE, _IDENTITY_FILE, _LOCK_FILE = "config.yaml", "run.json", ".lock"
_FOLDERS = ("trainer.ckpt_path", "trainer.export_path")
"""Keys that differ between any two runs."""
_FRESH_S = 180.0
"""A run whose process is unknown counts as running if its metrics are newer than this, or than three of its steps."""
_MAX_LOCK_BYTES = 4096
_MAX_NAME_CHARS = 1000
_MAX_MARKERS = 500
_CHECKPOINT = re.compile("global_step_(0|[1-9][0-9]{0,9})")
_SHOWN_SETTINGS = (
    "trainer.algorithm.advantage_estimator",
    "trainer.algorithm.policy_loss_type",
    "trainer.algorithm.use_kl_loss",
    "trainer.algorithm.kl_loss_coef",
    "trainer.policy.optimizer_config.lr",
    "trainer.policy.model.lora.rank",
    "trainer.train_batch_size",
    "trainer.fully_async.enabled",
    "trainer.fully_async.max_staleness_steps",
    "trainer.strategy",
    "generator.n_samples_per_prompt",
    "generator.backend",
    "environment.env_class",
)
"""Configuration keys that the page's overview shows."""
_log = logging.getLogger(__name__)


class RunStatus(StrEnum):
    """The state of a run, with the values that the viewer reads."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    UNKNOWN = "unknown"


class FindingLevel(StrEnum):
    """The state of a diagnosis finding, with the values that the viewer reads."""

    ACTIVE = "warning"
    RESOLVED = "past"


class RunReader:
    """A reader of a run's folder. It reads each line of metrics.jsonl once. Not thread-safe."""

    def __init__(self, folder: Path):
        """Open the folder of a run.

        Raises:
            ConfigError: If the folder has neither metrics.jsonl nor config.yaml.
        """
        self.folder = Path(folder).absolute()
        if not any((self.folder / name).is_file() for name in (METRICS_FILE, _CONFIG_FILE)):
            raise ConfigError(
                f"{str(folder)!r} is not the folder of a run: it has neither {METRICS_FILE} nor {_CONFIG_FILE}. Give "
                "the trainer.ckpt_path of a run, or a copy of it."
            )
        self.rollouts = RolloutReader(self.folder)
        self._lines = MetricsFollower(self.folder / METRICS_FILE)
        self._series = MetricSeries()
        self._config: tuple[bytes, dict[str, Any]] = b"", {}

    @property
    def config(self) -> dict[str, Any]:
        """The configuration that the run saved; {} if it is missing or cannot be read."""
        try:
            content = read_bytes(self.folder / _CONFIG_FILE, MAX_YAML_BYTES)
            if content != self._config[0]:
                self._config = content, {}  # an invalid file is parsed once
                config = parse_yaml_mapping(content)
                config.pop("defaults", None)
                self._config = content, config
        except (OSError, ValueError):
            return {}
        return self._config[1]

    def series(self) -> MetricSeries:
        """Read new lines of metrics.jsonl and return the metrics of all steps. Raises OSError if it cannot be read."""
        replaced, lines = self._lines.read_new_lines()
        if replaced:
            self._series = MetricSeries()
        for line in lines:
            self._series.add(line)
        return self._series

    def metrics(
        self, max_points: int, digits: int | None = None, extra_columns: Mapping[str, Mapping[int, float]] | None = None
    ) -> dict[str, Any]:
        """Return downsampled metrics.

        Args:
            max_points: Maximum number of points.
            digits: Number of significant digits to keep; None for all.
            extra_columns: Additional metrics -> step -> value; None for no additional ones.

        Returns:
            `steps`, `times`, `steps_per_point` and `columns` as in `MetricSeries.downsample`, and `described`: metric
            -> help text.

        Raises:
            OSError: metrics.jsonl cannot be read.
        """
        downsampled = self.series().downsample(max_points, digits, extra_columns)
        return {**downsampled, "described": {name: metric_help(name) for name in downsampled["columns"]}}

    def summary(self) -> dict[str, Any]:
        """Return name, folder, project, step, total_steps, state (a RunStatus), has_rollouts and details of the run.

        `details` has what the page shows at the top of a run, see `_details`.

        Raises OSError if metrics.jsonl cannot be read.
        """
        identity, trainer = read_json_object(self.folder / _IDENTITY_FILE), _mapping(self.config.get("trainer"))
        series, total = self.series(), self.total_steps()
        state = self._status(series.last_step, total)
        return {
            "name": _short_text(identity.get("run_name") or trainer.get("run_name") or self.folder.name),
            "folder": str(self.folder),
            "project": _short_text(identity.get("project_name") or trainer.get("project_name") or ""),
            "step": series.last_step,
            "total_steps": total,
            "state": state,
            "has_rollouts": bool(self.rollouts.steps()),
            "details": self._details(identity, series, state),
        }

    def _details(self, identity: Mapping[str, Any], series: MetricSeries, state: RunStatus) -> dict[str, Any]:
        """Return what a run trains, on what, how long, and how well.

        Returns:
            `kind`: "sft", "evaluation" or "rl"; `model`, `train_data` and `eval_data`: names or paths; `settings`:
            configuration key -> value as text, of the keys that the run has; `started` (Unix time) and `seconds` of
            all attempts, None if unknown; `attempts`: their number, 0 if unknown; `failure`: what ended a failed run;
            `hardware`: see `Attempt`; `best`: `source`, `score`, `step` and the `first` score of the best evaluation,
            or None; `checkpoints` and `resumes`: steps.
        """
        data = _mapping(self.config.get("data"))
        attempts = read_attempts(self.folder)
        flat = dict(_leaves({name: self.config.get(name) for name in ("trainer", "generator", "environment")}))
        model = identity.get("model") or flat.get("trainer.policy.model.path") or ""
        return {
            "kind": self._kind(series),
            "model": _short_text(model),
            "train_data": _short_texts(data.get("train_data")),
            "eval_data": _short_texts(data.get("val_data")),
            "settings": {key: _short_text(flat[key]) for key in _SHOWN_SETTINGS if key in flat},
            "started": attempts[0].start if attempts else series.first_time,
            "seconds": _seconds(attempts, series),
            "attempts": len(attempts),
            "failure": _failure(attempts) if state == RunStatus.FAILED else "",
            "hardware": next((attempt.hardware for attempt in reversed(attempts) if attempt.hardware), {}),
            "best": series.best_evaluation(),
            "checkpoints": self._checkpoints(),
            "resumes": _resumes(attempts, series),
        }

    def _kind(self, series: MetricSeries) -> str:
        """Return what the run does, which its configuration does not say: the command that started it decides."""
        if series.has("sft/loss"):
            return "sft"
        return "evaluation" if self.folder.name == "evaluation" and not series.has(STEP_TIME_METRIC) else "rl"

    def _checkpoints(self) -> list[int]:
        """Return the steps of the latest checkpoints in the folder."""
        with suppress(OSError):
            names = [entry.name for entry in os.scandir(self.folder) if entry.is_dir(follow_symlinks=False)]
            return sorted(int(match[1]) for name in names if (match := _CHECKPOINT.fullmatch(name)))[-_MAX_MARKERS:]
        return []

    def total_steps(self) -> int | None:
        """Return the number of steps that the run will have; None if neither diagnosis nor configuration has it."""
        for source in (read_json_object(self.folder / DIAGNOSIS_FILE), _mapping(self.config.get("trainer"))):
            for name in ("total_steps", "max_steps"):
                if is_step(total := source.get(name)) and total > 0:
                    return total
        return None

    def diagnosis(self) -> list[dict[str, Any]]:
        """Return the findings of the run's diagnosis, active ones first, each group with the latest first.

        If the run has no diagnosis.json, diagnose its metrics now.

        Returns:
            Findings with `step` and `until` (first and last step; None if active), `level` (a FindingLevel), `title`
            and `text`.

        Raises:
            OSError: If metrics.jsonl is needed and cannot be read.
        """
        saved = read_json_object(self.folder / DIAGNOSIS_FILE).get("findings")
        if not isinstance(saved, list):
            saved = [vars(finding) for finding in self._findings()]
        findings = [_describe(item) for item in saved if isinstance(item, dict) and is_step(item.get("since"))]
        return sorted(findings, key=lambda finding: (finding["level"] != FindingLevel.ACTIVE, -finding["step"]))

    def _findings(self) -> list[Finding]:
        trainer = _mapping(self.config.get("trainer"))
        rules = [*RULES, gradient_rule(True)]
        if _mapping(trainer.get("algorithm")).get("advantage_estimator") in ("grpo", "rloo"):
            rules.append(NO_DIFFERENCE)
        fully_async = _mapping(trainer.get("fully_async"))
        if fully_async.get("enabled"):
            bound = fully_async.get("max_staleness_steps")
            rules += async_rules(bound if is_step(bound) else 1)
        return diagnose(read_metrics(self.folder / METRICS_FILE), rules, self.total_steps() or 0)

    def _status(self, step: int, total: int | None) -> RunStatus:
        is_alive = self._is_process_alive()
        if is_alive is None and (attempts := read_attempts(self.folder)):
            is_alive = None if attempts[-1].end is None else False
        if is_alive is None:
            is_alive = step != total and self._metrics_age_s() < max(_FRESH_S, 3 * self._series.max_step_s)
        if is_alive:
            return RunStatus.RUNNING
        if total is None:
            return RunStatus.UNKNOWN
        return RunStatus.FINISHED if step >= total else RunStatus.FAILED

    def _is_process_alive(self) -> bool | None:
        """Return whether the process that locked the folder still holds the lock; None if that is not known."""
        with suppress(OSError, ValueError, OverflowError):
            content = read_bytes(self.folder / _LOCK_FILE, _MAX_LOCK_BYTES).decode()
            _, pid, _, host = content.split()  # process 123 on host
            return _has_open(int(pid), self.folder / _LOCK_FILE) if host == socket.gethostname() else None
        return None

    def _metrics_age_s(self) -> float:
        with suppress(OSError):
            return time.time() - (self.folder / METRICS_FILE).stat().st_mtime
        return float("inf")


def open_runs(folders: Sequence[Path]) -> list[RunReader]:
    """Open the folders of several runs, and return the readers in the order of the folders.

    Raises:
        ConfigError: If there is no folder, a folder is not a run's, or two of them are the same.
    """
    if not folders:
        raise ConfigError("RUN: name the folder of at least one run, its trainer.ckpt_path.")
    runs = [RunReader(folder) for folder in folders]
    paths = [run.folder.resolve() for run in runs]
    if repeated := [str(path) for path in paths if paths.count(path) > 1]:
        raise ConfigError(f"RUN: {repeated[0]!r} is given twice. Name each run once.")
    return runs


def overview(runs: Sequence[RunReader]) -> dict[str, Any]:
    """Return the summaries of runs with unique ids and names, and the configuration keys in which they differ.

    A run that cannot be read is UNKNOWN and at step 0, with a warning in the log.

    Returns:
        `runs`: summaries with an `id`; `differing`: the result of `differing_keys`.
    """
    summaries = [_summary(run) for run in runs]
    names = [summary["name"] for summary in summaries]
    folders = [summary["folder"] for summary in summaries]
    for summary in summaries:
        if names.count(summary["name"]) > 1:
            summary["name"] = f"{summary['name']} ({_unique_path_suffix(summary['folder'], folders)})"
    return {
        "runs": [{"id": str(number), **summary} for number, summary in enumerate(summaries)],
        "differing": differing_keys([run.config for run in runs]),
    }


def _summary(run: RunReader) -> dict[str, Any]:
    """Return the summary of a run, or an empty one with a warning if its files cannot be read."""
    try:
        return run.summary()
    except Exception as error:
        folder, reason = escape_control_chars(str(run.folder)), escape_control_chars(str(error))
        _log.warning("%s: the run cannot be read and is shown without data: %s", folder, reason)
        nothing: dict[str, Any] = {"project": "", "step": 0, "total_steps": None, "state": RunStatus.UNKNOWN}
        nothing |= {"has_rollouts": False, "details": None}
        return {"name": run.folder.name, "folder": str(run.folder), **nothing}


def differing_keys(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the configuration keys whose values are not the same in all configurations, except folders.

    Args:
        configs: Nested configurations.

    Returns:
        Mappings with the dotted `key` and its `values`, one text per configuration; "" if it lacks the key.
    """
    flat_configs = [dict(_leaves(config)) for config in configs]
    keys = sorted({key for flat in flat_configs for key in flat} - {*_FOLDERS})
    rows = [{"key": key, "values": [flat.get(key, "") for flat in flat_configs]} for key in keys]
    return [row for row in rows if len({*row["values"]}) > 1]


def metric_help(name: str) -> str:
    """Return the meaning, unit and healthy values of a metric; "" if a user's own code added it."""
    metric = metric_of(name)
    if metric is None:
        percent = name.removeprefix("reward/p")
        if percent.isdecimal():
            return f"{percent} % of the step's saved rollouts have at most this reward"
        return ""
    return f"{metric.description} ({metric.unit})" + (f"; healthy: {metric.healthy}" if metric.healthy else "")


def _resumes(attempts: Sequence[Attempt], series: MetricSeries) -> list[int]:
    """Return the steps after which the run was resumed and made further steps."""
    steps = {series.step_before(attempt.start) for attempt in attempts[1:]}
    return sorted(step for step in steps if step and step < series.last_step)[-_MAX_MARKERS:]


def _seconds(attempts: Sequence[Attempt], series: MetricSeries) -> float | None:
    """Return the time in all attempts; None if it is not known. An attempt without an end ends at its last step."""
    if not attempts:
        return series.last_time - series.first_time if series.first_time is not None else None
    starts = [attempt.start for attempt in attempts[1:]]
    ends = [attempt.end for attempt in attempts]
    total = 0.0
    for attempt, end, following in zip(attempts, ends, [*starts, float("inf")], strict=True):
        total += max(0.0, (series.last_time_before(following) if end is None else end) - attempt.start)
    return round(total, 1)


def _failure(attempts: Sequence[Attempt]) -> str:
    """Return what ended the last attempt of a failed run; "" if it is not known."""
    if not attempts:
        return ""
    if attempts[-1].end is None:
        return "The process ended without reporting an error: it was killed, or its machine failed."
    return attempts[-1].error


def _short_texts(values: Any) -> list[str]:
    values = values if isinstance(values, list) else [values]
    return [_short_text(value) for value in values[:20] if isinstance(value, str)]


def _short_text(value: Any) -> str:
    return str(value)[:_MAX_NAME_CHARS]


def _mapping(value: Any) -> Mapping[str, Any]:
    """Return a mapping of a configuration; {} for any other value that an invalid one may have."""
    return value if isinstance(value, Mapping) else {}


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and (value or not key):
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}" if key else str(name))
    else:
        yield key, value if isinstance(value, str) else json.dumps(value, default=str)


def _unique_path_suffix(folder: str, others: Sequence[str]) -> str:
    """Return the shortest end of a path that no other path has. `others` includes the path itself."""
    parts = Path(folder).parts
    for count in range(1, len(parts)):
        tail = parts[-count:]
        if sum(Path(other).parts[-count:] == tail for other in others) == 1:
            return os.path.join(*tail)
    return folder


def _describe(finding: Mapping[str, Any]) -> dict[str, Any]:
    until = finding.get("until") if is_step(finding.get("until")) else None
    text = f"{finding.get('evidence', '')}. {finding.get('advice', '')}".strip()
    return {
        "step": finding["since"],
        "until": until,
        "level": FindingLevel.ACTIVE if until is None else FindingLevel.RESOLVED,
        "title": str(finding.get("rule", "")).replace("_", " "),
        "text": text if until is None else f"{text} It held until step {until}.",
    }


def _has_open(pid: int, file: Path) -> bool | None:
    """Return whether a process has a file open; None if it belongs to another user."""
    try:
        paths = [Path(open_file.path) for open_file in psutil.Process(pid).open_files()]
        return any(path.samefile(file) for path in paths if path.exists())
    except psutil.AccessDenied:
        return None
    except (psutil.Error, OSError):
        return False


# -- numbers over steps ------------------------------------------------------------------------------------------------

MAX_METRICS = 10_000
"""Maximum number of metrics of a run. Further metrics are left out."""
MAX_VALUES = 100_000_000
"""Maximum number of steps times metrics. Further steps are left out: every step takes memory in every column."""
_MAX_VALUE = 1e100
"""Numbers with a larger magnitude are not shown: the range of an axis with the largest floats is not finite."""
_MAX_TIME = 1e11
"""Maximum Unix time in seconds that is shown."""
_NOT_METRICS = frozenset({"step", "time"})
_SCORE = re.compile("eval/(.+)/avg_score", re.DOTALL)


class MetricSeries:
    """The metrics of a run as columns over steps, 8 bytes per value. Values that cannot be shown are NaN."""

    def __init__(self) -> None:
        self._steps, self._times = array("q"), array("d")
        self._columns: dict[str, array[float]] = {}

    @property
    def last_step(self) -> int:
        """The latest step; 0 if there is none."""
        return self._steps[-1] if self._steps else 0

    def has(self, name: str) -> bool:
        """True if any line has the metric."""
        return name in self._columns

    @property
    def first_time(self) -> float | None:
        """Time of the first line with a time; None if there is none."""
        return next((time for time in self._times if np.isfinite(time)), None)

    @property
    def last_time(self) -> float:
        """Time of the last line with a time; 0 if there is none."""
        return self.last_time_before(float("inf"))

    def last_time_before(self, when: float) -> float:
        """Return the time of the last line before a time; 0 if there is none."""
        return next((time for time in reversed(self._times) if time < when), 0.0)

    def step_before(self, when: float) -> int | None:
        """Return the step of the last line before a time; None if there is none."""
        rows = zip(reversed(self._steps), reversed(self._times), strict=True)
        return next((step for step, time in rows if time < when), None)

    def best_evaluation(self) -> dict[str, Any] | None:
        """Return the evaluation with the highest mean score, see `details` of a summary; None if there is none.

        If the run has the mean over all data sources, "all", only this mean counts.
        """
        columns = {match[1]: column for name, column in self._columns.items() if (match := _SCORE.fullmatch(name))}
        if "all" in columns:
            columns = {"all": columns["all"]}
        found = [
            {"source": source, "score": scores[best], "step": self._steps[best], "first": scores[first]}
            for source, column in columns.items()
            if np.isfinite(scores := np.array(column)).any()
            for best, first in [(int(np.nanargmax(scores)), int(np.isfinite(scores).argmax()))]
        ]
        best = max(found, key=lambda evaluation: evaluation["score"], default=None)
        return best and {name: float(item) if name in ("score", "first") else item for name, item in best.items()}

    @property
    def max_step_s(self) -> float:
        """The longest time in seconds between two of the last six lines; 0 if it is not known."""
        latest = [time for time in self._times[-6:] if np.isfinite(time)]
        return max([after - before for before, after in pairwise(latest)], default=0.0)

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line of metrics.jsonl. It replaces the lines of the same step and of later ones."""
        while self._steps and self._steps[-1] >= line["step"]:
            self._steps.pop()
            for column in (self._times, *self._columns.values()):
                column.pop()
        size = len(self._steps)
        if size * len(self._columns) >= MAX_VALUES:
            return
        self._steps.append(line["step"])
        self._times.append(_number(line.get("time"), _MAX_TIME))
        new_names = [name for name in line if name not in _NOT_METRICS and name not in self._columns]
        for name in new_names[: MAX_METRICS - len(self._columns)]:
            self._columns[name] = array("d", [np.nan]) * size
        for name, column in self._columns.items():
            column.append(_number(line.get(name)))

    def downsample(
        self, max_points: int, digits: int | None = None, extra_columns: Mapping[str, Mapping[int, float]] | None = None
    ) -> dict[str, Any]:
        """Return curves in which each point stands for the same number of consecutive steps.

        The value of a point is the mean over its steps or, if the metric's name contains the word "max", the maximum.
        A point is placed at its last step.

        Args:
            max_points: Maximum number of points.
            digits: Number of significant digits to keep; None for all.
            extra_columns: Additional metrics -> step -> value. A metric of the run itself takes precedence. None: no
                additional ones.

        Returns:
            `steps` and `times` (Unix seconds) of the points, `steps_per_point`, and `columns`: metric -> values, with
            None for values that cannot be shown.
        """
        columns = {name: np.array(column) for name, column in self._columns.items()}
        for name, values in (extra_columns or {}).items():
            columns.setdefault(name, np.array([_number(values.get(step)) for step in self._steps], float))
        size = len(self._steps)
        width = max(1, -(-size // max(1, max_points)))
        first = np.arange(0, size, width)
        last = np.minimum(first + width, size) - 1
        names = sorted(columns, key=lambda name: tuple(name.split("/")))
        return {
            "steps": [self._steps[index] for index in last],
            "times": [self._times[index] for index in last],
            "steps_per_point": width,
            "columns": {name: _rounded(_pooled(name, columns[name], first), digits) for name in names},
        }


def _pooled(name: str, values: NDArray[np.float64], first: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return one value per point. `first` has the index of each point's first value."""
    if len(first) == len(values):
        return values
    is_finite = np.isfinite(values)
    if "max" in re.split(r"[^a-z0-9]+", name.rpartition("/")[2].replace("_", " ")):  # a whole word: not eval/minimax
        maxima: NDArray[np.float64] = np.maximum.reduceat(np.where(is_finite, values, -np.inf), first)
        return maxima
    count = np.add.reduceat(is_finite.astype(float), first)
    total = np.add.reduceat(np.where(is_finite, values, 0.0), first)
    return np.divide(total, count, out=np.full(len(first), np.nan), where=count > 0)


def _rounded(values: NDArray[np.float64], digits: int | None) -> list[float | None]:
    finite = [value if np.isfinite(value) else None for value in values.tolist()]
    return finite if digits is None else [value and float(f"{value:.{digits}g}") for value in finite]


def _number(value: Any, max_magnitude: float = _MAX_VALUE) -> float:
    """Return a value as a float; NaN if it is not a number or larger than the maximum magnitude."""
    return float(value) if isinstance(value, int | float) and abs(value) <= max_magnitude else float("nan")
