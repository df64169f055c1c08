"""The JSONL files that every run writes, whatever its trackers: one JSON object per line, valid even for NaN values."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skyrl_train.report.protocol import SampleRow

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"


class JsonlTracker:
    """metrics.jsonl: {"step": 3, "time": Unix time, "reward/mean": 0.5, ...}; samples.jsonl: a completion per line."""

    def __init__(self, run_dir: Path):
        self._metrics = Path(run_dir) / METRICS_FILE
        self._samples = Path(run_dir) / SAMPLES_FILE

    def begin(self, step: int, total_steps: int) -> None:
        self.truncate_after(step if step else -1)

    def truncate_after(self, step: int) -> None:
        """Drop the lines of later steps, and one that a crash cut off: they will be written again."""
        for file in (self._metrics, self._samples):
            if file.exists():
                kept = "".join(json.dumps(line) + "\n" for line in read_jsonl(file) if line["step"] <= step)
                temporary = file.with_name(f".{file.name}.new")
                temporary.write_text(kept)
                temporary.replace(file)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        values = {name: _number(value) for name, value in metrics.items()}
        _append(self._metrics, [{"step": step, "time": round(time.time(), 3), **values}])

    def samples(self, rows: Sequence[SampleRow], step: int) -> None:
        _append(
            self._samples,
            [
                {
                    "step": step,
                    "prompt": row.prompt,
                    "response": row.response,
                    "reward": _number(row.reward),
                    "stop_reason": row.stop_reason,
                }
                for row in rows
            ],
        )

    def close(self) -> None:
        """Does nothing: `log` has already written every line."""


def read_jsonl(file: Path) -> list[dict[str, Any]]:
    """The complete lines of a run's JSONL file; a crash can leave the last one cut off."""
    lines: list[dict[str, Any]] = []
    for text in Path(file).read_bytes().splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines


def _number(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    number = float(value)
    return number if math.isfinite(number) else None


def _append(file: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Append all lines in one write call, so that readers of the growing file, and a killed run, see complete lines.

    ASCII with escapes, so that NUL, control characters and lone surrogates in a model's output stay valid text.
    """
    data = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines).encode("ascii")
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)
