"""Reads and writes the JSONL files of a run, metrics.jsonl and samples.jsonl: one JSON object per line."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from skyrl_train.atomic_files import atomic_write
from skyrl_train.report.metric_catalog import replace_deprecated_names
from skyrl_train.report.protocol import SampleRow
from skyrl_train.report.untrusted_files import MAX_LINES_BYTES, is_step, open_untrusted, read_bytes

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
_log = logging.getLogger(__name__)


class JsonlTracker:
    """The tracker that every run has. It appends to metrics.jsonl and samples.jsonl in the run's folder.

    A line of metrics.jsonl is `{"step": 3, "time": <Unix time>, "reward/mean": 0.5, ...}`, where NaN and infinity are
    null. A line of samples.jsonl is one rollout. Write errors do not raise: lines wait in memory for the next write.
    """

    def __init__(self, run_dir: Path):
        """Write to `run_dir`, which must exist by the first write."""
        self._metrics = _LineFile(Path(run_dir) / METRICS_FILE)
        self._samples = _LineFile(Path(run_dir) / SAMPLES_FILE)
        self._last_step = -1

    def begin(self, step: int, total_steps: int) -> None:
        """Remove the lines of steps after `step`; all lines if it is 0."""
        self._last_step = step if step else -1
        for file in (self._metrics, self._samples):
            file.truncate_after(self._last_step)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Append the line of a step. It replaces the lines of this step and of later ones."""
        if step <= self._last_step:
            self._metrics.truncate_after(step - 1)
        self._last_step = step
        values = {name: _finite_or_none(value) for name, value in metrics.items()}
        self._metrics.append([{"step": step, "time": round(time.time(), 3), **values}])

    def samples(self, rows: Sequence[SampleRow], step: int) -> None:
        """Append rollouts to samples.jsonl."""
        self._samples.append([{"step": step, **asdict(row), "reward": _finite_or_none(row.reward)} for row in rows])

    def close(self) -> None:
        """Write the lines that wait in memory. Log an error if that is not possible."""
        for file in (self._metrics, self._samples):
            file.close()


class _LineFile:
    """A JSONL file. Lines that cannot be written, as on a full disk, stay in memory until the next write."""

    def __init__(self, path: Path):
        self._path = path
        self._waiting = b""

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append all lines or none, so that readers of the growing file never see a partial line.

        Lines are ASCII with escapes: NUL, control characters and lone surrogates in a model's output stay valid text.
        """
        has_backlog = bool(self._waiting)
        self._waiting += "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines).encode("ascii")
        try:
            _append(self._path, self._waiting)
        except OSError as error:
            if not has_backlog:
                _log.warning("%s cannot be written (%s); its lines wait in memory.", self._path, error)
            return
        self._waiting = b""
        if has_backlog:
            _log.warning("%s can be written again; no line is lost.", self._path)

    def truncate_after(self, step: int) -> None:
        """Remove the lines of steps after `step`, which will be written again, and a line that a crash left partial."""
        waiting = self._waiting.splitlines(keepends=True)
        self._waiting = b"".join(line for line in waiting if json.loads(line)["step"] <= step)
        if not self._path.exists():
            return
        kept = "".join(json.dumps(line) + "\n" for line in read_jsonl(self._path) if line["step"] <= step)
        try:
            with atomic_write(self._path, fsync=False) as handle:
                handle.write(kept.encode())
        except OSError as error:
            _log.warning(
                "%s cannot be rewritten (%s): lines of steps after %d will appear twice.", self._path, error, step
            )

    def close(self) -> None:
        if self._waiting:
            self.append([])
        if self._waiting:
            _log.error("%s lacks its last lines: they could not be written before the run ended.", self._path)


def read_jsonl(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a trusted JSONL file as they are written, first to last.

    Lines that are not a JSON object with an integer "step" are skipped, such as a last line that a crash left partial.
    Raises OSError if the file is missing or cannot be read.
    """
    return _parse_lines(Path(file).read_bytes())


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl, first to last, as mappings from names to finite numbers.

    A value that is not a finite number becomes None. Metrics that were renamed have their current names. Lines that
    are not a JSON object with an integer "step" are skipped. Return an empty list if there is no file.

    Raises:
        OSError: If the file cannot be read, is not a regular file, or is larger than MAX_LINES_BYTES.
    """
    try:
        return [_metric_row(line) for line in _parse_lines(read_bytes(Path(file), MAX_LINES_BYTES))]
    except FileNotFoundError:
        return []


class MetricsFollower:
    """A reader of a metrics.jsonl that a run may still be writing. It returns every line once."""

    def __init__(self, file: Path):
        """Follow `file`, which need not exist yet."""
        self._file = Path(file)
        self._bytes_read = 0
        """Number of bytes of complete lines that were read."""
        self._inode = 0

    def read_new_lines(self) -> tuple[bool, list[dict[str, Any]]]:
        """Return (True if the file was replaced, lines), with lines as `read_metrics` returns them.

        The lines are those since the last call or, if the file was replaced, all lines of the new file. A resumed run
        replaces the file by one without the steps that it repeats. A missing file has no lines.

        Raises:
            OSError: If the file cannot be read, is not a regular file, or is larger than MAX_LINES_BYTES.
        """
        try:
            with open_untrusted(self._file, MAX_LINES_BYTES) as handle:
                status = os.fstat(handle.fileno())
                replaced = status.st_ino != self._inode or status.st_size < self._bytes_read
                self._inode, self._bytes_read = status.st_ino, 0 if replaced else self._bytes_read
                handle.seek(self._bytes_read)
                complete, end, _ = handle.read().rpartition(b"\n")
        except FileNotFoundError:
            replaced, complete, end = self._bytes_read > 0, b"", b""
            self._inode = self._bytes_read = 0
        self._bytes_read += len(complete) + len(end)
        return replaced, [_metric_row(line) for line in _parse_lines(complete)]


def _parse_lines(content: bytes) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for text in content.splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and is_step(line.get("step")):
            lines.append(line)
    return lines


def _metric_row(line: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: value if _is_finite_number(value) else None for name, value in line.items()}
    return replace_deprecated_names(values)


def _is_finite_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def _finite_or_none(value: float) -> float | None:
    number = float(value)  # JSON has neither NaN nor infinity
    return number if math.isfinite(number) else None


def _append(file: Path, data: bytes) -> None:
    """Append all of `data`. If that fails, remove what was appended and raise OSError."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        try:
            written = 0
            while written < len(data):
                written += os.write(descriptor, data[written:])
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)
