"""The order of events in the training loop, tested with fake parts."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from skyrl_train.data.batch import TrainBatch
from skyrl_train.data.messages import Prompt
from skyrl_train.data.trajectory import TrajectoryGroup
from skyrl_train.errors import RolloutsFailed, WeightSyncError, WorkerDied
from skyrl_train.metrics import Metrics
from skyrl_train.report.profiling import Profiler
from skyrl_train.report.rollout_files import RolloutReader
from skyrl_train.trainer import trainer as trainer_module
from skyrl_train.trainer.batch_dump import BatchDump, read_batch
from skyrl_train.trainer.offload_manager import ColocatedOffloadManager
from skyrl_train.trainer.rollout_writer import RolloutWriter
from skyrl_train.trainer.trainer import StepProfiler, StepSchedule
from tests.support.fake_trainer_parts import FakeTrainerParts, trainer_of


def test_order_of_events_in_a_run():
    fakes = FakeTrainerParts()
    trainer = trainer_of(fakes)
    asyncio.run(trainer.fit())
    assert fakes.events == [
        *["publish 0", "begin 0/3", "evaluate 0"],
        *["score", "update 4", "publish 1"],
        *["score", "update 4", "publish 2", "evaluate 2", "save 2"],
        *["score", "update 2", "publish 3", "evaluate 3", "save 3"],
    ]
    assert set(fakes.logged) == {0, 1, 2, 3}
    assert fakes.logged[3]["eval/x/avg_score"] == 0.5
    assert fakes.logged[1]["reward/mean"] == 0.5
    assert fakes.logged[1]["rollouts/max_staleness"] == 0


def test_resumed_run_publishes_its_step_first():
    fakes = FakeTrainerParts(resumed_at=2)
    asyncio.run(trainer_of(fakes).fit())
    assert fakes.events[:3] == ["publish 2", "begin 2/3", "score"]
    assert set(fakes.logged) == {3}


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_staleness_is_bounded_by_the_setting(max_staleness: int):
    fakes = FakeTrainerParts()
    asyncio.run(trainer_of(fakes, max_staleness).fit())
    assert max(row["rollouts/max_staleness"] for step, row in fakes.logged.items() if step) <= max_staleness
    assert [event for event in fakes.events if event.startswith("publish")] == [f"publish {i}" for i in range(4)]


def test_run_without_evaluation_data():
    fakes = FakeTrainerParts()
    asyncio.run(trainer_of(fakes, evaluator=None).fit())
    assert not any(event.startswith("evaluate") for event in fakes.events)


def test_batch_dump_has_advantages_and_step_number(tmp_path: Path):
    fakes = FakeTrainerParts()
    asyncio.run(trainer_of(fakes, batch_dump=BatchDump(tmp_path)).fit())
    files = [tmp_path / f"global_step_{step}_training_input.safetensors" for step in (1, 2, 3)]
    assert sorted(tmp_path.iterdir()) == files
    for file, uids in zip(files, (("0", "0", "1", "1"), ("2", "2", "3", "3"), ("4", "4")), strict=True):
        batch, dumped_uids = read_batch(file)
        assert len(dumped_uids) == len(batch) == len(uids)
        assert batch.token_advantages is not None
        assert batch.rewards.mean() == 0.5
    dumped = {uid for file in files for uid in read_batch(file)[1]}
    assert dumped == {"0", "1", "2", "3", "4"}


@pytest.mark.parametrize("written", ["during the update", "after it", "not"])
def test_conversations_are_freed_before_the_update(tmp_path: Path, written: str):
    """If only the update computes the log-probs, conversations that are written are freed after it."""

    class WatchedMessage(dict[str, Any]):
        """A message that supports weak references."""

    class WatchingParts(FakeTrainerParts):
        def __init__(self) -> None:
            super().__init__()
            self.messages: list[weakref.ref[WatchedMessage]] = []

        async def rollout(self, prompt: Prompt, position: int) -> TrajectoryGroup:
            group = await super().rollout(prompt, position)
            for item in group.trajectories:
                item.messages = [WatchedMessage(role="assistant", content=f"answer {position}.{item.sample}")]
                self.messages += [weakref.ref(cast(WatchedMessage, message)) for message in item.messages]
            return group

        async def add_logprobs_and_values(self, batch: Any) -> Any:
            old_logprobs = torch.zeros(len(batch.input_ids)) if written == "during the update" else None
            return batch.with_tokens(old_logprobs=old_logprobs)

        async def update(self, batch: Any) -> dict[str, float]:
            if written == "after it":
                self.update_logprobs = torch.full((len(batch.input_ids),), -0.5)
                return await super().update(batch)
            while written == "during the update" and any(message() for message in self.messages):
                await asyncio.sleep(0.001)  # a thread is writing
            assert not any(message() for message in self.messages)
            return await super().update(batch)

        async def publish(self, version: int) -> dict[str, float]:
            while written == "after it" and any(message() for message in self.messages):
                await asyncio.sleep(0.001)  # the thread that has written is about to free them
            assert not any(message() for message in self.messages)
            return await super().publish(version)

    fakes = WatchingParts()
    trainer = trainer_of(fakes, batch_dump=BatchDump(tmp_path))
    if written != "not":
        trainer.rollout_writer = RolloutWriter(tmp_path)

    async def run() -> None:
        async with asyncio.timeout(60):
            await trainer.fit()

    asyncio.run(run())
    assert fakes.events.count("update 4") == 2 and len(fakes.messages) == 10
    if written != "not":
        rows = RolloutReader(tmp_path).table().to_pylist()
        answers = [f"answer {position}.{sample}" for position in range(5) for sample in range(2)]
        assert [json.loads(row["messages"])[0]["content"] for row in rows] == answers
        expected = {"during the update": 0.0, "after it": -0.5}[written]
        assert {value for row in rows for value in row["old_logprobs"]} == {expected}
    assert len(read_batch(tmp_path / "global_step_3_training_input.safetensors")[1]) == 2


def test_work_on_all_rollouts_runs_in_threads(monkeypatch: pytest.MonkeyPatch):
    on_main_thread: dict[str, bool] = {}

    def watch(name: str) -> None:
        compute = getattr(trainer_module, name)

        def record(*args: Any, **options: Any) -> Any:
            on_main_thread[name] = threading.current_thread() is threading.main_thread()
            return compute(*args, **options)

        monkeypatch.setattr(trainer_module, name, record)

    for name in ("add_rollout_metrics", "_sample_ids", "collate"):
        watch(name)
    asyncio.run(trainer_of(FakeTrainerParts()).fit())
    assert on_main_thread == dict.fromkeys(on_main_thread, False) and len(on_main_thread) == 3


@pytest.mark.parametrize("reads", [True, False])
def test_token_rewards_exist_only_if_needed(reads: bool):
    class Step:
        needs_token_rewards = reads

        def __call__(self, batch: TrainBatch, metrics: Metrics) -> TrainBatch:
            assert (batch.token_rewards is not None) is reads
            return replace(batch, sequence_advantages=batch.rewards)

    trainer = trainer_of(FakeTrainerParts())
    trainer.batch_transforms = [Step()]
    asyncio.run(trainer.fit())


def test_move_time_excludes_sync_and_evaluation(
    monkeypatch: pytest.MonkeyPatch,
):
    """Only transfers advance the clock: 1 s for an offload, 10 for a wake-up, 100 for a sleep, 1,000 for an onload.

    The evaluation before the first step has moved the learner and the engines already. The second step's is followed by
    a save, for which the engines free their caches.
    """

    class Timed(FakeTrainerParts):
        seconds = 0.0

        async def _advance(self, name: str, seconds: float, *args: Any) -> Any:
            self.seconds += seconds
            return await getattr(super(), name)(*args)

        async def offload(self) -> Any:
            return await self._advance("offload", 1)

        async def wake_up(self, *tags: Any) -> Any:
            return await self._advance("wake_up", 10, *tags)

        async def sleep(self, *level: Any) -> Any:
            return await self._advance("sleep", 100, *level)

        async def onload(self) -> Any:
            return await self._advance("onload", 1000)

    fakes = Timed()
    monkeypatch.setattr("skyrl_train.trainer.offload_manager.now", lambda: fakes.seconds)
    asyncio.run(trainer_of(fakes, residency=ColocatedOffloadManager(fakes, fakes)).fit())  # type: ignore[arg-type]
    assert [fakes.logged[step]["timing/offload_s"] for step in (1, 2, 3)] == [1100, 1111, 1110]


def test_failed_sync_stops_before_sampling_stale_weights():
    fakes = FakeTrainerParts()
    fakes.fail_at_version = 1
    with pytest.raises(WeightSyncError):
        asyncio.run(trainer_of(fakes).fit())
    assert fakes.events[-3:] == ["update 4", "release ranks", "save 1"]
    assert fakes.version == 0


def test_failed_rollouts_save_the_trained_steps():
    fakes = FakeTrainerParts()
    trainer = trainer_of(fakes)
    collect = trainer.collector.next_groups

    async def fail_at_step_1(step: int, metrics: Metrics) -> Any:
        if step == 1:
            raise RolloutsFailed("no group has different rewards")
        return await collect(step, metrics)

    trainer.collector.next_groups = fail_at_step_1  # type: ignore[method-assign]
    with pytest.raises(RolloutsFailed):
        asyncio.run(trainer.fit())
    assert fakes.events[-1] == "save 1"


@pytest.mark.parametrize("max_groups", [None, 1])
def test_rollouts_of_a_failed_step_are_saved(tmp_path: Path, max_groups: int | None, caplog: pytest.LogCaptureFixture):
    class FailingParts(FakeTrainerParts):
        async def rollout(self, prompt: Prompt, position: int) -> TrajectoryGroup:
            group = await super().rollout(prompt, position)
            for item in group.trajectories if position > 1 else ():
                item.fail("tool", f"no tool for {position}.{item.sample}")
            return group

    trainer = trainer_of(FailingParts())
    trainer.rollout_writer = RolloutWriter(tmp_path, max_groups=max_groups)
    with pytest.raises(RolloutsFailed, match="4 of 4 trajectories"):
        asyncio.run(trainer.fit())
    rows = RolloutReader(tmp_path).table([2]).to_pylist()
    details = [f"no tool for {position}.{sample}" for position in (2, 3) for sample in (0, 1)]
    assert [row["detail"] for row in rows] == details[: 2 * (max_groups or 2)]
    assert "The rollouts of step 2, on which nothing was trained" in caplog.text


def test_steps_do_not_cross_epochs():
    schedule = StepSchedule(num_prompts=10, train_batch_size=4, epochs=2)
    assert schedule.total_steps == 6
    assert [schedule.num_prompts_in_step(step) for step in range(8)] == [4, 4, 2, 4, 4, 2, 0, 0]
    assert [schedule.first_prompt_of_step(step) for step in range(7)] == [0, 4, 8, 10, 14, 18, 20]


def test_max_steps_only_shortens_a_run():
    assert StepSchedule(10, 4, 2, max_steps=5).total_steps == 5
    assert StepSchedule(10, 4, 2, max_steps=50).total_steps == 6
    assert StepSchedule(10, 4, 2, max_steps=5).num_prompts_in_step(5) == 0


def test_batch_larger_than_the_data():
    schedule = StepSchedule(num_prompts=3, train_batch_size=8, epochs=1)
    assert schedule.total_steps == 1
    assert schedule.num_prompts_in_step(0) == 3


class Rank:
    """A rank with the profiling interface, in this process."""

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


def take_steps(profiler: StepProfiler, steps: range) -> None:
    async def run() -> None:
        for step in steps:
            async with profiler.profile_step(step):
                torch.ones(step, step) @ torch.ones(step, step)

    asyncio.run(run())


def test_selected_steps_are_profiled_despite_dead_process(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    ranks = [Rank("learner 0"), Rank("learner 1", dies=True)]
    take_steps(StepProfiler([2], tmp_path, lambda: ranks), range(1, 4))
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]
    assert {path.name for path in (tmp_path / "step_2").iterdir()} == {"learner_0.json.gz", "slowest.txt"}
    events = json.loads(gzip.decompress((tmp_path / "step_2" / "learner_0.json.gz").read_bytes()))["traceEvents"]
    assert len([event for event in events if event.get("name") == "aten::mm"]) == 1
    table = (tmp_path / "step_2" / "slowest.txt").read_text()
    assert table.startswith("learner 0\n") and "aten::mm" in table and "learner 1" not in table
    assert [record.getMessage() for record in caplog.records] == [
        "learner 1 has no profile of this step (WorkerDied: learner 1 died during stop_profile)."
    ]


def test_repeated_step_archives_earlier_profile(tmp_path: Path):
    for _ in range(2):
        take_steps(StepProfiler([1], tmp_path, lambda: [Rank("engine 0")]), range(1, 2))
    files = {"engine_0.json.gz", "slowest.txt"}
    assert {path.name for path in (tmp_path / "step_1").iterdir()} == {*files, "attempt_1"}
    assert {path.name for path in (tmp_path / "step_1" / "attempt_1").iterdir()} == files


def test_failed_step_is_not_profiled(tmp_path: Path):
    async def run() -> None:
        async with StepProfiler([1], tmp_path, list).profile_step(1):
            raise ValueError("of the step")

    with pytest.raises(ValueError, match="of the step"):
        asyncio.run(run())
    assert list((tmp_path / "step_1").iterdir()) == []


def test_scaler_runs_from_first_sync_to_close():
    class Scaler:
        def start(self) -> None:
            fakes.events.append("scaler starts")

        async def stop(self) -> None:
            fakes.events.append("scaler stops")

    fakes = FakeTrainerParts()
    trainer = trainer_of(fakes)
    trainer.scaler = cast(Any, Scaler())

    async def run() -> None:
        await trainer.fit()
        await trainer.close()

    asyncio.run(run())
    assert fakes.events[:2] == ["publish 0", "scaler starts"]
    assert fakes.events[-1] == "scaler stops"


def test_scaler_stops_before_the_final_save():
    class Scaler:
        def start(self) -> None: ...

        async def stop(self) -> None:
            fakes.events.append("scaler stops")

    fakes = FakeTrainerParts()
    fakes.fail_at_version = 1
    trainer = trainer_of(fakes)
    trainer.scaler = cast(Any, Scaler())
    with pytest.raises(WeightSyncError):
        asyncio.run(trainer.fit())
    assert fakes.events[-3:] == ["scaler stops", "release ranks", "save 1"]
