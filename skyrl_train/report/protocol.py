"""The interface of trackers, what they are given, and what those of libraries share: flat keys, ids of runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from skyrl_train.atomic_files import atomic_write_text
from skyrl_train.terminal import escape_control_chars


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One rollout for people to read. Its texts are untrusted."""

    prompt: str
    response: str
    reward: float
    stop_reason: str
    uid: str = ""
    """Of the prompt: with the step, what finds it among the rollouts that are kept."""
    status: str = "ok"
    turns: int = 1
    tokens: int = 0
    """Of the response, those between its turns included."""
    version: int = 0
    """The newest weights that sampled any of it."""
    sample: int = 0
    """Which of its prompt's samples it is."""

    def cells(self, shown: Callable[[str], str] = str) -> list[str | float]:
        """What stands in the columns SAMPLE_COLUMNS; `shown` makes texts harmless."""
        return [shown(value) if isinstance(value, str) else value for value in astuple(self)]


SAMPLE_COLUMNS = tuple(field.name for field in fields(SampleRow))


@dataclass(frozen=True, slots=True)
class TrackerSetup:
    """Information about the run that a tracker may need."""

    run_dir: Path
    project_name: str
    run_name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    """The resolved configuration, without secrets."""


class Tracker(Protocol):
    """Constructed with a TrackerSetup. Names are printable, values may be NaN, texts may contain anything.

    One that shows how runs end also has `fail(error: BaseException)`, which is called before `close` if the run ends
    with an error; a run that was stopped ends with asyncio.CancelledError, KeyboardInterrupt or Stopped. One that shows
    tables of rollouts also has `table(rows: Sequence[SampleRow], step: int)`: more than `samples`, cut to a bound.
    """

    def begin(self, step: int, total_steps: int) -> None:
        """The run continues after `step` (0: from the start); any records of later steps are void."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def samples(self, rows: Sequence[SampleRow], step: int) -> None:
        """A few completions of a step, whole."""

    def close(self) -> None: ...


def flatten_config(config: Mapping[str, Any], prefix: str = "") -> dict[str, bool | int | float | str]:
    """`trainer.policy.optimizer_config.lr` -> 1e-6: every value that is no mapping. Lists are JSON, None is "null"."""
    flat: dict[str, bool | int | float | str] = {}
    for key, value in config.items():
        name = prefix + escape_control_chars(str(key))
        if isinstance(value, Mapping):
            flat |= flatten_config(value, f"{name}.")
        elif isinstance(value, (bool, int, float)):
            flat[name] = value
        else:
            flat[name] = escape_control_chars(value if isinstance(value, str) else json.dumps(value, default=str))
    return flat


IDS_FILE = "trackers.json"


def load_run_id(run_dir: Path, tracker: str) -> str | None:
    """The id that an earlier start of this run kept; None if there is none, or none that can be read."""
    value = _load_run_ids(run_dir).get(tracker)
    return value if isinstance(value, str) else None


def save_run_id(run_dir: Path, tracker: str, run_id: str) -> None:
    """Raises OSError."""
    atomic_write_text(run_dir / IDS_FILE, json.dumps(_load_run_ids(run_dir) | {tracker: run_id}, indent=1))


def _load_run_ids(run_dir: Path) -> dict[str, object]:
    try:
        ids = json.loads((run_dir / IDS_FILE).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return ids if isinstance(ids, dict) else {}
