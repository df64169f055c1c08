"""The interface of trackers, to which metrics and completions go, and what they are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One completion for people to read. Its text is untrusted."""

    prompt: str
    response: str
    reward: float
    stop_reason: str


@dataclass(frozen=True, slots=True)
class TrackerSetup:
    """Information about the run that a tracker may need."""

    run_dir: Path
    project_name: str
    run_name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    """The resolved configuration, without secrets."""


class Tracker(Protocol):
    """Constructed with a TrackerSetup. Names are printable, values may be NaN, texts may contain anything."""

    def begin(self, step: int, total_steps: int) -> None:
        """The run continues after `step` (0: from the start); any records of later steps are void."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def samples(self, rows: Sequence[SampleRow], step: int) -> None: ...

    def close(self) -> None: ...
