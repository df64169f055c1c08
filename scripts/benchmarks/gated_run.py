"""`python gated_run.py key=value ...`: the training entrypoint, with a gate before every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from measure import Gate

from skyrl_train.entrypoints.main_base import BasePPOExp, run_experiment
from skyrl_train.report.protocol import SampleRow
from skyrl_train.report.trackers import Trackers


class GateTracker:
    """Stands still between steps. A step lasts from one call of `log` to the next: whatever a run does is in it."""

    def __init__(self) -> None:
        self._gate = Gate()

    def begin(self, step: int, total_steps: int) -> None:
        self._gate.wait()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._gate.wait(metrics)

    def samples(self, rows: Sequence[SampleRow], step: int) -> None:
        pass

    def close(self) -> None:
        pass


class GatedRun(BasePPOExp):
    """Its trackers first, so that what they do with a step's numbers is counted to the step."""

    def get_tracker(self, directory: Path) -> Any:
        return Trackers({"run": super().get_tracker(directory), "gate": GateTracker()})


if __name__ == "__main__":
    run_experiment(GatedRun)
