"""The JSONL files that every run writes, whatever its trackers: one JSON object per line, valid even for NaN values."""

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
from skyrl_train.report.protocol import SampleRow
from skyrl_train.report.untrusted_files import MAX_LINES_BYTES, is_step, open_untrusted, read_bytes

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
_log = logging.getLogger(__name__)


class JsonlTracker:
    """metrics.jsonl: {"step": 3, "time": Unix time, "reward/mean": 0.5, ...}; samples.jsonl: a completion per line."""

    def __init__(self, run_dir: Path):
        self._metrics = _LineFile(Path(run_dir) / METRICS_FILE)
        self._samples = _LineFile(Path(run_dir) / SAMPLES_FILE)
        self._last_step = -1

    def begin(self, step: int, total_steps: int) -> None:
        self._last_step = step if step else -1
        for file in (self._metrics, self._samples):
            file.truncate_after(self._last_step)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Add a step's line; a second one replaces the first."""
        if step <= self._last_step:
            self._metrics.truncate_after(step - 1)
        self._last_step = step
        values = {name: _number(value) for name, value in metrics.items()}
        self._metrics.append([{"step": step, "time": round(time.time(), 3), **values}])

    def samples(self, rows: Sequence[SampleRow], step: int) -> None:
        self._samples.append([{"step": step, **asdict(row), "reward": _number(row.reward)} for row in rows])

    def close(self) -> None:
        for file in (self._metrics, self._samples):
            file.close()


class _LineFile:
    """A JSONL file. Lines that the disk does not take are kept in memory, and written before the next ones."""

    def __init__(self, path: Path):
        self._path = path
        self._waiting = b""

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append lines, all of them or none, so that readers of the growing file see complete ones.

        ASCII with escapes, so that NUL, control characters and lone surrogates in a model's output stay valid text.
        """
        behind = bool(self._waiting)
        self._waiting += "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines).encode("ascii")
        try:
            _append(self._path, self._waiting)
        except OSError as error:
            if not behind:
                _log.warning("%s cannot be written (%s); its lines wait in memory.", self._path, error)
            return
        self._waiting = b""
        if behind:
            _log.warning("%s can be written again; nothing of it is lost.", self._path)

    def truncate_after(self, step: int) -> None:
        """Drop the lines of later steps, and one that a crash cut off: they will be written again."""
        waiting = self._waiting.splitlines(keepends=True)
        self._waiting = b"".join(line for line in waiting if json.loads(line)["step"] <= step)
        if not self._path.exists():
            return
        kept = "".join(json.dumps(line) + "\n" for line in read_jsonl(self._path) if line["step"] <= step)
        try:
            with atomic_write(self._path, fsync=False) as handle:
                handle.write(kept.encode())
        except OSError as error:
            _log.warning("%s keeps lines of steps after %d, which will come twice (%s).", self._path, step, error)

    def close(self) -> None:
        if self._waiting:
            self.append([])
        if self._waiting:
            _log.error("%s lacks its last lines: the disk did not take them until the end.", self._path)


def read_jsonl(file: Path) -> list[dict[str, Any]]:
    """The complete lines of a run's own JSONL file; a crash can leave the last one cut off.

    A line that is no JSON object with a step is left out. Raises OSError.
    """
    return _parsed(Path(file).read_bytes())


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl: a step, and finite numbers by name; None for a value that is none.

    A file that is not there has no lines. Raises OSError for one that cannot be read.
    """
    try:
        return [_numbers(line) for line in _parsed(read_bytes(Path(file), MAX_LINES_BYTES))]
    except FileNotFoundError:
        return []


class MetricsFollower:
    """Reads a metrics.jsonl that a run may still be writing: every line once, as `read_metrics` does."""

    def __init__(self, file: Path):
        self._file = Path(file)
        self._read = 0
        """Bytes of whole lines that were read."""
        self._inode = 0

    def read_new_lines(self) -> tuple[bool, list[dict[str, Any]]]:
        """The lines since the last call; and whether the file is another one now, of which these are all there are.

        A run that is resumed replaces the file by one without the steps that it takes again. A file that is not there
        has no lines. Raises OSError for one that cannot be read.
        """
        try:
            with open_untrusted(self._file, MAX_LINES_BYTES) as handle:
                status = os.fstat(handle.fileno())
                replaced = status.st_ino != self._inode or status.st_size < self._read
                self._inode, self._read = status.st_ino, 0 if replaced else self._read
                handle.seek(self._read)
                whole, end, _ = handle.read().rpartition(b"\n")
        except FileNotFoundError:
            replaced, whole, end = self._read > 0, b"", b""
            self._inode = self._read = 0
        self._read += len(whole) + len(end)
        return replaced, [_numbers(line) for line in _parsed(whole)]


def _parsed(content: bytes) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for text in content.splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and is_step(line.get("step")):
            lines.append(line)
    return lines


def _numbers(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value if _is_number(value) else None for name, value in line.items()}


def _is_number(value: Any) -> bool:
    """True for a finite number that a float can hold."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def _number(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    number = float(value)
    return number if math.isfinite(number) else None


def _append(file: Path, data: bytes) -> None:
    """Append all of `data` or, if the disk is full, nothing. Raises OSError."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        try:
            done = 0
            while done < len(data):
                done += os.write(descriptor, data[done:])
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)
