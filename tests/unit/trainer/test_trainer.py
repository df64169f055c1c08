"""The loop with fakes: what happens in which order, whatever the parts are."""

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
from skyrl_train.trainer.rollout_writer import RolloutWriter
from skyrl_train.trainer.trainer import ColocatedOffloadManager, StepProfiler, StepSchedule
from tests.support.fake_trainer_parts import FakeTrainerParts, trainer_of


def test_a_run_is_publish_evaluate_then_rollouts_update_and_publish_of_every_step():
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


def test_a_resumed_run_publishes_its_step_and_goes_on_from_there():
    fakes = FakeTrainerParts(resumed_at=2)
    asyncio.run(trainer_of(fakes).fit())
    assert fakes.events[:3] == ["publish 2", "begin 2/3", "score"]
    assert set(fakes.logged) == {3}


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_staleness_is_a_number_not_another_loop(max_staleness: int):
    fakes = FakeTrainerParts()
    asyncio.run(trainer_of(fakes, max_staleness).fit())
    assert max(row["rollouts/max_staleness"] for step, row in fakes.logged.items() if step) <= max_staleness
    assert [event for event in fakes.events if event.startswith("publish")] == [f"publish {i}" for i in range(4)]


def test_without_evaluation_data_a_run_trains_all_the_same():
    fakes = FakeTrainerParts()
    asyncio.run(trainer_of(fakes, evaluator=None).fit())
    assert not any(event.startswith("evaluate") for event in fakes.events)


def test_the_batch_of_every_step_is_written_with_its_advantages_under_the_step_that_metrics_have(tmp_path: Path):
    fakes = FakeTrainerParts()
    asyncio.run(trainer_of(fakes, batch_dump=BatchDump(tmp_path)).fit())
    files = [tmp_path / f"global_step_{step}_training_input.safetensors" for step in (1, 2, 3)]
    assert sorted(tmp_path.iterdir()) == files
    for file, uids in zip(files, (("0", "0", "1", "1"), ("2", "2", "3", "3"), ("4", "4")), strict=True):
        batch, found = read_batch(file)
        assert len(found) == len(batch) == len(uids)
        assert batch.token_advantages is not None
        assert batch.rewards.mean() == 0.5
    first = {uid for file in files for uid in read_batch(file)[1]}
    assert first == {"0", "1", "2", "3", "4"}


@pytest.mark.parametrize("written", ["beside the update", "after it", "not"])
def test_conversations_are_let_go_of_before_the_update_and_still_written(tmp_path: Path, written: str):
    """If the update tells the trainer's log-probs, those that are kept are held until it has."""

    class Said(dict[str, Any]):
        """A message that can be watched."""

    class Watching(FakeTrainerParts):
        def __init__(self) -> None:
            super().__init__()
            self.said: list[weakref.ref[Said]] = []

        async def rollout(self, prompt: Prompt, position: int) -> TrajectoryGroup:
            group = await super().rollout(prompt, position)
            for item in group.trajectories:
                item.messages = [Said(role="assistant", content=f"answer {position}.{item.sample}")]
                self.said += [weakref.ref(cast(Said, one)) for one in item.messages]
            return group

        async def add_logprobs_and_values(self, batch: Any) -> Any:
            known = torch.zeros(len(batch.input_ids)) if written == "beside the update" else None
            return batch.with_tokens(old_logprobs=known)

        async def update(self, batch: Any) -> dict[str, float]:
            if written == "after it":
                self.update_logprobs = torch.full((len(batch.input_ids),), -0.5)
                return await super().update(batch)
            while written == "beside the update" and any(one() for one in self.said):
                await asyncio.sleep(0.001)  # a thread is writing
            assert not any(one() for one in self.said)
            return await super().update(batch)

        async def publish(self, version: int) -> dict[str, float]:
            while written == "after it" and any(one() for one in self.said):
                await asyncio.sleep(0.001)  # the thread that has written is about to let go
            assert not any(one() for one in self.said)
            return await super().publish(version)

    fakes = Watching()
    trainer = trainer_of(fakes, batch_dump=BatchDump(tmp_path))
    if written != "not":
        trainer.rollout_writer = RolloutWriter(tmp_path)

    async def run() -> None:
        async with asyncio.timeout(60):
            await trainer.fit()

    asyncio.run(run())
    assert fakes.events.count("update 4") == 2 and len(fakes.said) == 10
    if written != "not":
        told = RolloutReader(tmp_path).table().to_pylist()
        answers = [f"answer {position}.{sample}" for position in range(5) for sample in range(2)]
        assert [json.loads(row["messages"])[0]["content"] for row in told] == answers
        known = {"beside the update": 0.0, "after it": -0.5}[written]
        assert {value for row in told for value in row["old_logprobs"]} == {known}
    assert len(read_batch(tmp_path / "global_step_3_training_input.safetensors")[1]) == 2


def test_what_goes_through_all_rollouts_does_so_in_a_thread(monkeypatch: pytest.MonkeyPatch):
    seen: dict[str, bool] = {}

    def watch(name: str) -> None:
        compute = getattr(trainer_module, name)

        def watching(*args: Any, **options: Any) -> Any:
            seen[name] = threading.current_thread() is threading.main_thread()
            return compute(*args, **options)

        monkeypatch.setattr(trainer_module, name, watching)

    for name in ("add_rollout_metrics", "_sample_ids", "collate"):
        watch(name)
    asyncio.run(trainer_of(FakeTrainerParts()).fit())
    assert seen == dict.fromkeys(seen, False) and len(seen) == 3


@pytest.mark.parametrize("reads", [True, False])
def test_rewards_of_tokens_are_held_only_where_a_step_reads_them(reads: bool):
    class Step:
        needs_token_rewards = reads

        def __call__(self, batch: TrainBatch, metrics: Metrics) -> TrainBatch:
            assert (batch.token_rewards is not None) is reads
            return replace(batch, sequence_advantages=batch.rewards)

    trainer = trainer_of(FakeTrainerParts())
    trainer.batch_transforms = [Step()]
    asyncio.run(trainer.fit())


@pytest.mark.defect("engines-woken-beside-the-optimizer")
def test_engines_sleep_while_the_learner_works_and_take_weights_awake():
    fakes = FakeTrainerParts()
    trainer = trainer_of(fakes, residency=ColocatedOffloadManager(fakes, fakes))  # type: ignore[arg-type]
    asyncio.run(trainer.fit())
    text = " ".join(fakes.events)
    assert text.startswith(
        "onload keep wake weights publish 0 begin 0/3 offload wake all evaluate 0 sleep offload wake all sleep"
    )
    assert "sleep onload score update 4 keep wake weights publish 1 offload wake all sleep" in text


def test_a_step_says_how_long_moves_took_apart_from_those_of_its_sync_and_of_evaluations(
    monkeypatch: pytest.MonkeyPatch,
):
    """A clock that only moves tell: an offload is a second, a wake-up 10, a sleep 100, an onload 1,000."""

    class Timed(FakeTrainerParts):
        seconds = 0.0

        async def _take(self, name: str, seconds: float, *given: Any) -> Any:
            self.seconds += seconds
            return await getattr(super(), name)(*given)

        async def offload(self) -> Any:
            return await self._take("offload", 1)

        async def wake_up(self, *tags: Any) -> Any:
            return await self._take("wake_up", 10, *tags)

        async def sleep(self, *level: Any) -> Any:
            return await self._take("sleep", 100, *level)

        async def onload(self) -> Any:
            return await self._take("onload", 1000)

    fakes = Timed()
    monkeypatch.setattr("skyrl_train.trainer.trainer.now", lambda: fakes.seconds)
    asyncio.run(trainer_of(fakes, residency=ColocatedOffloadManager(fakes, fakes)).fit())  # type: ignore[arg-type]
    assert [fakes.logged[step]["timing/offload_s"] for step in (1, 2, 3)] == [1111, 1111, 1111]


def test_engines_give_up_their_weights_only_if_a_sync_brings_new_ones_before_they_generate():
    fakes = FakeTrainerParts()
    trainer = trainer_of(fakes, residency=ColocatedOffloadManager(fakes, fakes, sleep_level_before_sync=2))  # type: ignore[arg-type]
    asyncio.run(trainer.fit())
    text = " ".join(fakes.events)
    assert "evaluate 0 sleep offload wake all sleep 2 onload score" in text
    assert text.count("evaluate") == text.replace("sleep 2", "").count("sleep")


def test_engines_sleep_also_after_an_exception_in_a_rollout():
    fakes = FakeTrainerParts()

    async def run() -> None:
        async with ColocatedOffloadManager(fakes, fakes).generating():  # type: ignore[arg-type]
            raise ValueError("an episode")

    with pytest.raises(ValueError, match="an episode"):
        asyncio.run(run())
    assert fakes.events == ["offload", "wake all", "sleep"]


def test_a_sync_that_fails_stops_the_run_before_anything_is_sampled_from_old_weights():
    fakes = FakeTrainerParts()
    fakes.fail_at_version = 1
    with pytest.raises(WeightSyncError):
        asyncio.run(trainer_of(fakes).fit())
    assert fakes.events[-3:] == ["update 4", "release ranks", "save 1"]
    assert fakes.version == 0


def test_what_was_learnt_is_saved_when_nothing_more_can_be_learnt_from():
    fakes = FakeTrainerParts()
    trainer = trainer_of(fakes)
    collect = trainer.collector.next_groups

    async def dry(step: int, metrics: Metrics) -> Any:
        if step == 1:
            raise RolloutsFailed("no group has different rewards")
        return await collect(step, metrics)

    trainer.collector.next_groups = dry  # type: ignore[method-assign]
    with pytest.raises(RolloutsFailed):
        asyncio.run(trainer.fit())
    assert fakes.events[-1] == "save 1"


def test_the_last_step_of_an_epoch_is_smaller_and_none_crosses_it():
    schedule = StepSchedule(num_prompts=10, train_batch_size=4, epochs=2)
    assert schedule.total_steps == 6
    assert [schedule.num_prompts_in_step(step) for step in range(8)] == [4, 4, 2, 4, 4, 2, 0, 0]
    assert [schedule.first_prompt_of_step(step) for step in range(7)] == [0, 4, 8, 10, 14, 18, 20]


def test_max_steps_ends_a_run_early_and_never_makes_it_longer():
    assert StepSchedule(10, 4, 2, max_steps=5).total_steps == 5
    assert StepSchedule(10, 4, 2, max_steps=50).total_steps == 6
    assert StepSchedule(10, 4, 2, max_steps=5).num_prompts_in_step(5) == 0


def test_a_batch_larger_than_the_data_is_the_data():
    schedule = StepSchedule(num_prompts=3, train_batch_size=8, epochs=1)
    assert schedule.total_steps == 1
    assert schedule.num_prompts_in_step(0) == 3


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


def take_steps(profiles: StepProfiler, steps: range) -> None:
    async def run() -> None:
        for step in steps:
            async with profiles.profile_step(step):
                torch.ones(step, step) @ torch.ones(step, step)

    asyncio.run(run())


def test_steps_that_are_named_are_profiled_and_a_dead_process_costs_its_own_profile(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
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


def test_a_step_that_is_taken_again_leaves_its_earlier_profile_alone(tmp_path: Path):
    for _ in range(2):
        take_steps(StepProfiler([1], tmp_path, lambda: [Rank("engine 0")]), range(1, 2))
    files = {"engine_0.json.gz", "slowest.txt"}
    assert {path.name for path in (tmp_path / "step_1").iterdir()} == {*files, "attempt_1"}
    assert {path.name for path in (tmp_path / "step_1" / "attempt_1").iterdir()} == files


def test_a_step_that_fails_has_no_profile_and_raises_its_own_error(tmp_path: Path):
    async def run() -> None:
        async with StepProfiler([1], tmp_path, list).profile_step(1):
            raise ValueError("of the step")

    with pytest.raises(ValueError, match="of the step"):
        asyncio.run(run())
    assert list((tmp_path / "step_1").iterdir()) == []


def test_engines_may_join_from_the_first_sync_until_the_trainer_closes():
    class Scaler:
        def start(self) -> None:
            fakes.events.append("scaler begins")

        async def stop(self) -> None:
            fakes.events.append("scaler ends")

    fakes = FakeTrainerParts()
    trainer = trainer_of(fakes)
    trainer.scaler = cast(Any, Scaler())

    async def run() -> None:
        await trainer.fit()
        await trainer.close()

    asyncio.run(run())
    assert fakes.events[:2] == ["publish 0", "scaler begins"]
    assert fakes.events[-1] == "scaler ends"


def test_no_engine_joins_while_the_last_step_of_a_failed_run_is_saved():
    class Scaler:
        def start(self) -> None: ...

        async def stop(self) -> None:
            fakes.events.append("scaler ends")

    fakes = FakeTrainerParts()
    fakes.fail_at_version = 1
    trainer = trainer_of(fakes)
    trainer.scaler = cast(Any, Scaler())
    with pytest.raises(WeightSyncError):
        asyncio.run(trainer.fit())
    assert fakes.events[-3:] == ["scaler ends", "release ranks", "save 1"]
