"""Random schedules in virtual time. Engines die, restart, stall, join and leave. Rollouts and syncs fail, group filters
drop groups, over-provisioning drops slow groups, evaluations run in between, and runs are resumed.

In every schedule, no step trains on tokens beyond the staleness bound, prompts are used once and in order, an
evaluation uses one weight version, and the run ends.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from skyrl_train.config.schema import Config
from skyrl_train.data.messages import Prompt
from skyrl_train.data.trajectory import OK, TrajectoryGroup
from skyrl_train.errors import WeightSyncError
from skyrl_train.metrics import Metrics
from skyrl_train.rollouts.collector import Rollout
from skyrl_train.trainer.evaluation import Evaluator
from tests.support.simulation import virtual_time
from tests.support.simulation.engine import SimulatedEngine
from tests.support.simulation.run import RunShape, SimulatedRun, build_run
from tests.support.simulation.timings import EngineTimings, LearnerTimings, ResponseLengths, Timings

STEPS, BATCH, SAMPLES = 5, 3, 2
HELD_OUT = [Prompt(f"held out {row}", [], "simulated") for row in range(2)]
ENDS_WITHIN_S = 400_000.0
"""Limit in virtual seconds. The longest schedule needs a tenth of it."""


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
    """Number of the sync that fails once; 0 for none."""
    stalls_at: float | None
    """Virtual time at which an engine stops responding; None for never."""
    stalls_s: float
    """Virtual seconds for which it does not respond."""
    rollouts_fail: float
    """Share of the episodes that fail."""
    evaluates: int
    """Steps between two evaluations; 0 for none."""
    over_provisions: bool
    """True for over-provisioning, which requires a synchronous schedule without group filters."""
    killed_at: float | None
    """Virtual time at which the run is cancelled and resumed from its last checkpoint; None for never."""
    seed: int
    engine_targets: tuple[tuple[float, int], ...] = ()
    """(virtual time, number of engines that is requested then)."""
    drain_s: float = 300.0

    @property
    def min_engines(self) -> int:
        """The smallest number of engines that is requested."""
        return min([self.engines, *(number for _, number in self.engine_targets)])


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
    stalls_at=st.none() | st.floats(0.0, 100.0),
    stalls_s=st.sampled_from([1.0, 40.0, 1000.0]),
    rollouts_fail=st.sampled_from([0.0, 0.0, 0.3]),
    evaluates=st.integers(0, 2),
    over_provisions=st.booleans(),
    killed_at=st.none() | st.floats(0.0, 200.0),
    seed=st.integers(0, 2**16),
    engine_targets=st.lists(st.tuples(st.floats(0.0, 150.0), st.integers(1, 4)), max_size=4).map(tuple),
    drain_s=st.sampled_from([0.5, 5.0, 300.0]),
)


def make_config(schedule: Schedule) -> tuple[Config, Timings, RunShape]:
    cfg = Config()
    cfg.trainer.seed = schedule.seed
    cfg.trainer.train_batch_size = BATCH
    cfg.trainer.timeouts.drain_s = schedule.drain_s
    cfg.trainer.fully_async.on_sync = schedule.on_sync
    cfg.trainer.fully_async.num_parallel_generation_workers = schedule.in_flight
    cfg.trainer.algorithm.dynamic_sampling.type = "filter" if schedule.filters else None
    # Engines may die so often that few rollouts finish. The run continues with any number of additional prompts.
    cfg.trainer.algorithm.dynamic_sampling.max_sample_batches = -1
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
        response=ResponseLengths(60.0, schedule.sigma),
        turns=schedule.turns,
        tool_s=schedule.tool_s,
    )
    over_provisions = schedule.over_provisions and not schedule.staleness and not schedule.filters
    shape = RunShape(schedule.engines, schedule.staleness, over_provisioning=0.5 if over_provisions else 0.0)
    return cfg, timings, shape


@pytest.fixture(autouse=True, scope="module")
def mute_engine_warnings() -> Iterator[None]:
    """Silence the warnings about dead engines, of which these tests cause many."""
    logger = logging.getLogger("skyrl_train.trainer.publisher")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


class RecordedRun:
    """A simulated run, the groups that its steps trained on, and the limits that it reached."""

    def __init__(self, schedule: Schedule, saved: Any = None):
        cfg, timings, shape = make_config(schedule)
        self.run: SimulatedRun = build_run(cfg, timings, shape, STEPS, saved)
        self.trained: dict[int, list[TrajectoryGroup]] = {}
        self.max_pending = 0
        self.sent_changing_weights = False
        trainer, collector = self.run.trainer, self.run.collector
        # The run saves a checkpoint after every step.
        trainer.cfg = replace(
            cfg.trainer, eval_interval=schedule.evaluates, eval_before_train=schedule.evaluates > 0, ckpt_interval=1
        )
        trainer.evaluator = Evaluator(self._evaluate, HELD_OUT, len(HELD_OUT), None, require_single_version=True)
        self._rollout, self._rng = collector.rollout, random.Random(schedule.seed)
        collector.rollout = self._may_fail(schedule.rollouts_fail)
        if schedule.stalls_at is not None:
            stall(self.run.engines[0], schedule.stalls_at, schedule.stalls_s)
        next_groups = collector.next_groups

        async def record_groups(step: int, metrics: Metrics) -> list[TrajectoryGroup]:
            groups = await next_groups(step, metrics)
            self.trained[step] = list(groups)  # a copy, because the loop clears its own list
            pending = [task for task in collector._queue._pending if not task.done() or task.result().is_useful]
            self.max_pending = max(self.max_pending, len(pending))
            return groups

        collector.next_groups = record_groups  # type: ignore[method-assign]
        self._fail_a_sync(schedule.failing_sync)
        self._watch_sent_weights()
        for time_s, number in schedule.engine_targets:
            asyncio.get_running_loop().call_later(time_s, self._set_target, number)
        self.target = schedule.engines

    def _set_target(self, number: int) -> None:
        self.target = number
        self.run.scaler.set_target(number)

    async def close(self) -> None:
        await self.run.scaler.stop()
        await self.run.collector.close()
        await self.run.client.close()

    async def _evaluate(self, prompt: Prompt, position: int) -> TrajectoryGroup:
        # The offset gives requests of an evaluation other ids than those of concurrent rollouts.
        return await self._rollout(prompt, position + 10**6)

    def _may_fail(self, share: float) -> Rollout:
        rollout = self._rollout

        async def failing(prompt: Prompt, position: int) -> TrajectoryGroup:
            group = await rollout(prompt, position)
            for item in group.trajectories:
                if self._rng.random() < share:
                    item.fail("ZeroDivisionError", "division by zero")
            return group

        return failing

    def _watch_sent_weights(self) -> None:
        """Record if the learner sends weights while an update changes them."""
        learner, weight_sync = self.run.learner, self.run.weight_sync
        sync_one = weight_sync.sync_one

        async def send(engine: SimulatedEngine, version: int) -> dict[str, float]:
            self.sent_changing_weights |= learner.updating
            metrics = await sync_one(engine, version)
            self.sent_changing_weights |= learner.updating or version != learner.version
            return metrics  # type: ignore[no-any-return]

        weight_sync.sync_one = send

    def _fail_a_sync(self, number: int) -> None:
        sync_all, syncs = self.run.weight_sync.sync_all, 0

        async def failing(version: int) -> dict[str, float]:
            nonlocal syncs
            syncs += 1
            if syncs == number and len(self.run.client.engines) > 1:
                engines: list[Any] = self.run.client.engines
                engines[0].die()
                raise WeightSyncError("an engine was lost")
            return await sync_all(version)  # type: ignore[no-any-return]

        self.run.weight_sync.sync_all = failing


def stall(engine: SimulatedEngine, delay_s: float, duration_s: float) -> None:
    """Make an engine behave like a stopped process: it delays new calls and the responses of running ones."""
    loop = asyncio.get_running_loop()
    start_s = loop.time() + delay_s

    def delayed(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            await wait_for_end()
            try:
                return await method(*args, **kwargs)
            finally:
                await wait_for_end()

        return call

    async def wait_for_end() -> None:
        if start_s <= loop.time() < start_s + duration_s:
            await asyncio.sleep(start_s + duration_s - loop.time())

    for name in ("generate", "abort", "pause", "resume", "commit_weights", "health"):
        setattr(engine, name, delayed(getattr(engine, name)))


async def play(schedule: Schedule) -> tuple[list[RecordedRun], dict[int, list[TrajectoryGroup]]]:
    """Return the attempts of a run, and the groups of each step in the history that the last attempt continues."""
    first = RecordedRun(schedule)
    fit = asyncio.ensure_future(first.run.trainer.fit())
    await asyncio.wait([fit], timeout=ENDS_WITHIN_S if schedule.killed_at is None else schedule.killed_at)
    attempts, trained = [first], first.trained
    if not fit.done():
        assert schedule.killed_at is not None, "the run does not end"
        saved = first.run.state.saved
        fit.cancel()
        await asyncio.gather(fit, return_exceptions=True)
        await first.run.scaler.stop()
        await first.run.collector.close()
        resumed = RecordedRun(schedule, saved)
        async with asyncio.timeout(ENDS_WITHIN_S):
            await resumed.run.trainer.fit()
        first_step = 0 if saved is None else saved[0]
        trained = {step: groups for step, groups in trained.items() if step < first_step} | resumed.trained
        attempts.append(resumed)
    else:
        fit.result()
    last = attempts[-1].run
    async with asyncio.timeout(ENDS_WITHIN_S):
        await last.scaler.wait_until_settled()
        while last.client.dead_engines and not schedule.failures_per_hour:
            await last.client.wait_for_restart()  # An engine that died in the last sync restarts after the last step.
    if not schedule.failures_per_hour:
        assert len(last.client.engine_names) == attempts[-1].target
        num_alive = sum(not engine.dead for engine in last.engines)
        stalled = schedule.stalls_at is not None  # The simulation does not kill an engine that was declared dead.
        assert num_alive - stalled <= len(last.client.engines) <= num_alive, "a removed engine still runs"
    for attempt in attempts:
        await attempt.close()
    return attempts, trained


@settings(max_examples=250, deadline=None)
@given(SCHEDULES)
def test_schedules_respect_staleness_and_prompt_order(schedule: Schedule):
    attempts, trained = virtual_time.run(play(schedule))
    assert sorted(trained) == list(range(STEPS))
    positions = [int(group.prompt.uid) for step in range(STEPS) for group in trained[step]]
    assert positions == sorted(set(positions)), "prompts are used in order and once"
    if not schedule.filters and not (schedule.over_provisions and not schedule.staleness):
        assert positions == list(range(STEPS * BATCH)), "no prompt is left out"
    for step, groups in trained.items():
        assert len(groups) == BATCH
        errors = {item.error for group in groups for item in group.trajectories}
        if not schedule.failures_per_hour and (schedule.min_engines > 1 or schedule.stalls_at is None):
            assert errors <= {None, "ZeroDivisionError"}, "an engine that dies, stalls or leaves fails no rollout"
        turns = [turn for group in groups for item in group.trajectories if item.status == OK for turn in item.turns]
        assert all(step - schedule.staleness <= turn.min_version <= turn.max_version <= step for turn in turns)
    assert not any(attempt.sent_changing_weights for attempt in attempts), "an update changed weights during a sync"
    extra = BATCH if schedule.over_provisions and not schedule.staleness else 0
    assert max(attempt.max_pending for attempt in attempts) <= (schedule.staleness + 1) * BATCH + extra


def test_schedule_is_independent_of_memory_addresses() -> None:
    """Requests of a dead engine continue in their order. The order of a set would depend on memory addresses."""
    schedule = Schedule(
        engines=1, staleness=2, on_sync="keep", in_flight=10, sigma=0.5, update_s=1.0, sync_s=0.5, turns=2, tool_s=2.0,
        failures_per_hour=120.0, start_s=0.0, filters=True, failing_sync=0, stalls_at=None, stalls_s=1000.0,
        rollouts_fail=0.3, evaluates=0, over_provisions=False, killed_at=None, seed=1445,
    )  # fmt: skip
    histories, ballast = [], []
    for size in range(1, 9):
        _, trained = virtual_time.run(play(schedule))
        histories.append([[group.prompt.uid for group in trained[step]] for step in range(STEPS)])
        ballast.append([object() for _ in range(1000 * size)])  # This moves the next run's objects.
    assert all(history == histories[0] for history in histories), histories
