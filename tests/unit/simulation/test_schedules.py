"""Random schedules in virtual time: engines die and come back, syncs fail, samplers drop groups, runs are resumed.

Whatever happens, a step trains on no token beyond the bound, on prompts in their order, each once, and the run ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from skyrl_train.config.schema import Config
from skyrl_train.data.trajectory import OK, TrajectoryGroup
from skyrl_train.errors import WeightSyncError
from skyrl_train.metrics import Metrics
from skyrl_train.simulation import virtual_time
from skyrl_train.simulation.run import SimulatedRun, Split, build_run
from skyrl_train.simulation.timings import EngineTimings, LearnerTimings, Lengths, Timings

STEPS, BATCH, SAMPLES = 5, 3, 2
ENDS_WITHIN_S = 400_000.0
"""Virtual seconds: the longest schedule needs a tenth of them."""


@dataclass(frozen=True)
class Schedule:
    engines: int
    staleness: int
    on_sync: str
    in_flight: int
    sigma: float
    update_s: float
    sync_s: float
    turns: int
    tool_s: float
    failures_per_hour: float
    start_s: float
    filters: bool
    failing_sync: int
    """The number of the sync that fails once; 0 for none."""
    killed_at: float | None
    """Virtual seconds after which the run is cancelled, and resumed from its last checkpoint."""
    seed: int


SCHEDULES = st.builds(
    Schedule,
    engines=st.integers(1, 3),
    staleness=st.integers(0, 3),
    on_sync=st.sampled_from(["keep", "recompute", "abort"]),
    in_flight=st.integers(1, 12),
    sigma=st.sampled_from([0.0, 0.5, 1.5]),
    update_s=st.sampled_from([0.01, 1.0, 30.0]),
    sync_s=st.sampled_from([0.0, 0.5, 20.0]),
    turns=st.integers(1, 3),
    tool_s=st.sampled_from([0.0, 2.0]),
    failures_per_hour=st.sampled_from([0.0, 0.0, 20.0, 120.0]),
    start_s=st.sampled_from([0.0, 10.0]),
    filters=st.booleans(),
    failing_sync=st.integers(0, STEPS),
    killed_at=st.none() | st.floats(0.0, 200.0),
    seed=st.integers(0, 2**16),
)


def configured(schedule: Schedule) -> tuple[Config, Timings, Split]:
    cfg = Config()
    cfg.trainer.seed = schedule.seed
    cfg.trainer.train_batch_size = BATCH
    cfg.trainer.fully_async.on_sync = schedule.on_sync
    cfg.trainer.fully_async.num_parallel_generation_workers = schedule.in_flight
    cfg.trainer.algorithm.dynamic_sampling.type = "filter" if schedule.filters else None
    cfg.generator.n_samples_per_prompt = SAMPLES
    cfg.generator.sampling_params.max_generate_length = 400
    timings = Timings(
        engine=EngineTimings(
            decode_s=0.1,
            decode_per_sequence_s=0.01,
            max_num_seqs=4,
            start_s=schedule.start_s,
            failures_per_hour=schedule.failures_per_hour,
        ),
        learner=LearnerTimings(0.0, 0.0, schedule.update_s),
        sync_s=schedule.sync_s,
        response=Lengths(60.0, schedule.sigma),
        turns=schedule.turns,
        tool_s=schedule.tool_s,
    )
    return cfg, timings, Split(schedule.engines, 1, schedule.staleness)


@pytest.fixture(autouse=True, scope="module")
def deaths_are_not_said() -> Iterator[None]:
    """Engines die all the time here."""
    logger = logging.getLogger("skyrl_train.engines.supervisor")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


class Watched:
    """A simulated run and what its steps trained on."""

    def __init__(self, schedule: Schedule, saved: Any = None):
        cfg, timings, split = configured(schedule)
        self.run: SimulatedRun = build_run(cfg, timings, split, STEPS, saved)
        self.trained: dict[int, list[TrajectoryGroup]] = {}
        self.most_under_way = 0
        trainer, collector = self.run.trainer, self.run.collector
        trainer.intervals = type(trainer.intervals)(0, 1, 0, False, STEPS)  # a checkpoint after every step
        next_groups = collector.next_groups

        async def watched(step: int, metrics: Metrics) -> list[TrajectoryGroup]:
            groups = await next_groups(step, metrics)
            self.trained[step] = groups
            waiting = [task for task in collector._queue._pending if not task.done() or task.result().useful]
            self.most_under_way = max(self.most_under_way, len(waiting))
            return groups

        collector.next_groups = watched  # type: ignore[method-assign]
        self._fail_a_sync(schedule.failing_sync)

    def _fail_a_sync(self, number: int) -> None:
        publish, syncs = self.run.publisher.publish, 0

        async def failing(version: int) -> dict[str, float]:
            nonlocal syncs
            syncs += 1
            if syncs == number and len(self.run.client.engines) > 1:
                self.run.client.engines[0].die()
                raise WeightSyncError("an engine was lost")
            return await publish(version)  # type: ignore[no-any-return]

        self.run.publisher.publish = failing


async def played(schedule: Schedule) -> tuple[list[Watched], dict[int, list[TrajectoryGroup]]]:
    """The attempts, and what each step trained on in the history that the last one continues."""
    first = Watched(schedule)
    fit = asyncio.ensure_future(first.run.trainer.fit())
    await asyncio.wait([fit], timeout=ENDS_WITHIN_S if schedule.killed_at is None else schedule.killed_at)
    attempts, trained = [first], first.trained
    if not fit.done():
        assert schedule.killed_at is not None, "the run does not end"
        saved = first.run.state.saved
        fit.cancel()
        await asyncio.gather(fit, return_exceptions=True)
        await first.run.collector.close()
        again = Watched(schedule, saved)
        async with asyncio.timeout(ENDS_WITHIN_S):
            await again.run.trainer.fit()
        begins = 0 if saved is None else saved[0]
        trained = {step: groups for step, groups in trained.items() if step < begins} | again.trained
        attempts.append(again)
    else:
        fit.result()
    for one in attempts:
        await one.run.collector.close()
        await one.run.client.close()
    return attempts, trained


@settings(max_examples=500, deadline=None)
@given(SCHEDULES)
def test_the_bound_holds_prompts_are_used_once_in_order_and_the_run_ends(schedule: Schedule):
    attempts, trained = virtual_time.run(played(schedule))
    assert sorted(trained) == list(range(STEPS))
    positions = [int(group.prompt.uid) for step in range(STEPS) for group in trained[step]]
    assert positions == sorted(set(positions)), "prompts in order, and none twice"
    if not schedule.filters:
        assert positions == list(range(STEPS * BATCH)), "and none is left out"
    for step, groups in trained.items():
        assert len(groups) == BATCH
        turns = [turn for group in groups for item in group.trajectories if item.status == OK for turn in item.turns]
        assert all(step - schedule.staleness <= turn.min_version <= turn.max_version <= step for turn in turns)
    assert max(one.most_under_way for one in attempts) <= (schedule.staleness + 1) * BATCH
