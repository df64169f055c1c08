"""Where numbers and completions go: what a tracker is, and what it is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One completion for people to read: untrusted text."""

    prompt: str
    response: str
    reward: float
    stop_reason: str


@dataclass(frozen=True, slots=True)
class TrackerSetup:
    """What a tracker may need to know of the run."""

    run_dir: Path
    project_name: str
    run_name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    """The resolved configuration, without secrets."""


class Tracker(Protocol):
    """Constructed with a TrackerSetup. Values may be NaN; texts may hold anything."""

    def begin(self, step: int, total_steps: int) -> None:
        """The run goes on from `step` (0: from the start); what was recorded of later steps is void."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def samples(self, rows: Sequence[SampleRow], step: int) -> None: ...

    def close(self) -> None: ...
