"""The attempts of a run: when each process that trained it began and ended, on what hardware, and why it failed.

A line of attempts.jsonl is an event: `{"event": "start", "time": <Unix time>, "host": ...}`,
`{"event": "hardware", ...}` once the run's slots are reserved, and `{"event": "end", "time": ..., "error": <text, or
null>}`. A process that is killed writes no end.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyrl_train.report.untrusted_files import read_bytes

ATTEMPTS_FILE = "attempts.jsonl"
_MAX_BYTES, _MAX_ATTEMPTS, _MAX_TEXT_CHARS, _MAX_TIME = 1 << 20, 1000, 2000, 1e11
_log = logging.getLogger(__name__)


@dataclass
class Attempt:
    """An attempt at a run. Times are Unix seconds."""

    start: float
    end: float | None = None
    """None if the attempt has not ended, or its process was killed."""
    error: str = ""
    """Error that ended the attempt; empty if it succeeded or no end was recorded."""
    hardware: dict[str, Any] = field(default_factory=dict)
    """`device`, `slots`, `nodes` and `accelerators` as `RunFolder.record_hardware` got them; empty if unknown."""


def append_event(folder: Path, event: str, facts: Mapping[str, Any]) -> None:
    """Append an event of the current attempt. Log a warning if that is not possible: a run does not need the file."""
    line = json.dumps({"event": event, "time": round(time.time(), 3), **facts})
    try:
        with (folder / ATTEMPTS_FILE).open("a", encoding="ascii") as file:
            file.write(line + "\n")
    except OSError as error:
        _log.warning("%s cannot be written (%s).", folder / ATTEMPTS_FILE, error)


def read_attempts(folder: Path) -> list[Attempt]:
    """Return the attempts of a run, first to last; [] if they were not recorded or cannot be read.

    Lines and values that are not valid are skipped.
    """
    try:
        lines = read_bytes(folder / ATTEMPTS_FILE, _MAX_BYTES).splitlines()
    except OSError:
        return []
    attempts: list[Attempt] = []
    for line in lines:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        when = event.get("time") if isinstance(event, dict) else None
        if isinstance(when, bool) or not isinstance(when, int | float) or not 0 <= when <= _MAX_TIME:
            continue
        if event.get("event") == "start":
            attempts.append(Attempt(float(when)))
        elif attempts and event.get("event") == "hardware":
            attempts[-1].hardware = _hardware(event)
        elif attempts and event.get("event") == "end":
            attempts[-1].end, attempts[-1].error = float(when), _text(event.get("error"))
    return attempts[-_MAX_ATTEMPTS:]


def _hardware(event: Mapping[str, Any]) -> dict[str, Any]:
    counts = {name: value for name in ("slots", "nodes") if type(value := event.get(name)) is int and 0 < value < 10**6}
    names = event.get("accelerators")
    accelerators = [_text(name)[:100] for name in names[:10]] if isinstance(names, list) else []
    return {"device": _text(event.get("device"))[:100], **counts, "accelerators": accelerators}


def _text(value: Any) -> str:
    return value[:_MAX_TEXT_CHARS] if isinstance(value, str) else ""
