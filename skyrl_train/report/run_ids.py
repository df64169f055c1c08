"""trackers.json in a run's folder: the ids under which trackers know the run, which a resumed run continues there."""

from __future__ import annotations

import json
from pathlib import Path

from skyrl_train.durable import write_durably

FILE = "trackers.json"


def kept_id(run_dir: Path, tracker: str) -> str | None:
    """The id that an earlier start of this run kept; None if there is none, or none that can be read."""
    value = _read(run_dir).get(tracker)
    return value if isinstance(value, str) else None


def keep_id(run_dir: Path, tracker: str, run_id: str) -> None:
    """Raises OSError."""
    write_durably(run_dir / FILE, json.dumps(_read(run_dir) | {tracker: run_id}, indent=1))


def _read(run_dir: Path) -> dict[str, object]:
    try:
        ids = json.loads((run_dir / FILE).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return ids if isinstance(ids, dict) else {}
