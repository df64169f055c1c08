"""Which steps are profiled, and what is left of a profile if a process dies or the step is taken again."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path

import pytest
import torch

from skyrl_train.errors import WorkerDied
from skyrl_train.report.profiling import Profiler
from skyrl_train.trainer.trainer import StepProfiles


class Rank:
    """A process that computes: here in this one."""

    def __init__(self, name: str, dies: bool = False):
        self.name = name
        self.dies = dies
        self._profiler = Profiler("cpu")

    async def start_profile(self) -> None:
        if not self.dies:
            self._profiler.start()

    async def stop_profile(self, file: str) -> str:
        if self.dies:
            raise WorkerDied(f"{self.name} died during stop_profile")
        self._profiler.stop()
        return self._profiler.write(file)


def take_steps(profiles: StepProfiles, steps: range) -> None:
    async def run() -> None:
        for step in steps:
            async with profiles.of(step):
                torch.ones(step, step) @ torch.ones(step, step)

    asyncio.run(run())


def test_steps_that_are_named_are_profiled_and_a_dead_process_costs_its_own_profile(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    ranks = [Rank("learner 0"), Rank("learner 1", dies=True)]
    take_steps(StepProfiles([2], tmp_path, lambda: ranks), range(1, 4))
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]
    assert {path.name for path in (tmp_path / "step_2").iterdir()} == {"learner_0.json.gz", "slowest.txt"}
    events = json.loads(gzip.decompress((tmp_path / "step_2" / "learner_0.json.gz").read_bytes()))["traceEvents"]
    assert len([event for event in events if event.get("name") == "aten::mm"]) == 1
    table = (tmp_path / "step_2" / "slowest.txt").read_text()
    assert table.startswith("learner 0\n") and "aten::mm" in table and "learner 1" not in table
    assert [record.getMessage() for record in caplog.records] == [
        "learner 1 has no profile of this step (WorkerDied: learner 1 died during stop_profile)."
    ]


def test_a_step_that_is_taken_again_leaves_its_earlier_profile_alone(tmp_path: Path):
    for _ in range(2):
        take_steps(StepProfiles([1], tmp_path, lambda: [Rank("engine 0")]), range(1, 2))
    files = {"engine_0.json.gz", "slowest.txt"}
    assert {path.name for path in (tmp_path / "step_1").iterdir()} == {*files, "attempt_1"}
    assert {path.name for path in (tmp_path / "step_1" / "attempt_1").iterdir()} == files


def test_a_step_that_fails_has_no_profile_and_raises_its_own_error(tmp_path: Path):
    async def run() -> None:
        async with StepProfiles([1], tmp_path, list).of(1):
            raise ValueError("of the step")

    with pytest.raises(ValueError, match="of the step"):
        asyncio.run(run())
    assert list((tmp_path / "step_1").iterdir()) == []
