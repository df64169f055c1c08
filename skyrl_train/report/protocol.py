"""The interface of trackers, their inputs, and helpers that several trackers share."""

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
    """A rollout for people to read. Its texts are untrusted."""

    prompt: str
    response: str
    reward: float
    stop_reason: str
    uid: str = ""
    """Unique id of the prompt. With step and sample it identifies the rollout among the saved ones."""
    status: str = "ok"
    turns: int = 1
    tokens: int = 0
    """Number of tokens of the response, including those between its turns."""
    version: int = 0
    """Newest version of the weights that sampled a part of the response."""
    sample: int = 0
    """Index of the rollout among the samples of its prompt."""

    def cells(self, escape: Callable[[str], str] = str) -> list[str | float]:
        """Return the values of the columns SAMPLE_COLUMNS, with `escape` applied to texts."""
        return [escape(value) if isinstance(value, str) else value for value in astuple(self)]


SAMPLE_COLUMNS = tuple(field.name for field in fields(SampleRow))
"""Names of the columns of a table of rollouts."""


@dataclass(frozen=True, slots=True)
class TrackerSetup:
    """Information about a run, from which a tracker is created."""

    run_dir: Path
    project_name: str
    run_name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    """The resolved configuration, without secrets."""


class Tracker(Protocol):
    """A destination of metrics and rollouts. The registry calls its class or factory with a TrackerSetup.

    Names are printable, values may be NaN, and texts may contain anything. If a method raises, the tracker gets no more
    calls, and training continues.

    Two methods are optional. `fail(error: BaseException)` is called before `close` if the run ends with an error; a run
    that was stopped ends with asyncio.CancelledError, KeyboardInterrupt or RunInterrupted. `table(rows:
    Sequence[SampleRow], step: int)` gets more rollouts of a step than `samples`, with long texts truncated.
    """

    def begin(self, step: int, total_steps: int) -> None:
        """Prepare for the steps after `step`, of `total_steps` steps in all (0: an evaluation). Called before `log`.

        At step 0 the run starts from the beginning. Otherwise it is resumed, and records of later steps become invalid.
        """

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics of a step. A resumed run may log a step again, which replaces the earlier record."""

    def samples(self, rows: Sequence[SampleRow], step: int) -> None:
        """Record a few complete rollouts of a step."""

    def close(self) -> None:
        """Write what is buffered and release resources. The run ends."""


def flatten_config(config: Mapping[str, Any], prefix: str = "") -> dict[str, bool | int | float | str]:
    """Return all values of a nested configuration by dotted key, such as `trainer.policy.optimizer_config.lr`.

    Args:
        config: The configuration.
        prefix: Text before every key.

    Returns:
        Booleans, numbers and texts as they are; lists as JSON; None as "null". Keys and texts have their control
        characters escaped. Empty mappings are left out.
    """
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
"""File in the run's folder with the ids of the run in tracker libraries."""


def load_run_id(run_dir: Path, tracker: str) -> str | None:
    """Return the id under which `tracker` knows the run in `run_dir`; None if no readable id was saved."""
    value = _load_run_ids(run_dir).get(tracker)
    return value if isinstance(value, str) else None


def save_run_id(run_dir: Path, tracker: str, run_id: str) -> None:
    """Save the id under which `tracker` knows the run, for later attempts. Raises OSError if it cannot be written."""
    atomic_write_text(run_dir / IDS_FILE, json.dumps(_load_run_ids(run_dir) | {tracker: run_id}, indent=1))


def _load_run_ids(run_dir: Path) -> dict[str, object]:
    try:
        ids = json.loads((run_dir / IDS_FILE).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return ids if isinstance(ids, dict) else {}
