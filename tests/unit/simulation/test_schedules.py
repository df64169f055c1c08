"""Random schedules in virtual time: engines die, come back, stall, join and leave, rollouts and syncs fail, samplers
drop groups and over-provisioning cuts them, evaluations run in between, runs are resumed.

Whatever happens, a step trains on no token beyond the bound, on prompts in their order, each once, an evaluation is of
one version, and the run ends.
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
    stalls_at: float | None
    """Virtual seconds after which an engine stops answering ..."""
    stalls_s: float
    """... and for how long."""
    rollouts_fail: float
    """Share of the episodes."""
    evaluates: int
    """How many steps apart; 0: never."""
    cuts: bool
    """Over-provisioning, in a synchronous schedule without a sampler."""
    killed_at: float | None
    """Virtual seconds after which the run is cancelled, and resumed from its last checkpoint."""
    seed: int
    wanted: tuple[tuple[float, int], ...] = ()
    """Virtual seconds, and the number of engines that is asked for then."""
    drain_s: float = 300.0

    @property
    def fewest(self) -> int:
        """Engines that take requests."""
        return min([self.engines, *(number for _, number in self.wanted)])


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
    cuts=st.booleans(),
    killed_at=st.none() | st.floats(0.0, 200.0),
    seed=st.integers(0, 2**16),
    wanted=st.lists(st.tuples(st.floats(0.0, 150.0), st.integers(1, 4)), max_size=4).map(tuple),
    drain_s=st.sampled_from([0.5, 5.0, 300.0]),
)


def configured(schedule: Schedule) -> tuple[Config, Timings, RunShape]:
    cfg = Config()
    cfg.trainer.seed = schedule.seed
    cfg.trainer.train_batch_size = BATCH
    cfg.trainer.timeouts.drain_s = schedule.drain_s
    cfg.trainer.fully_async.on_sync = schedule.on_sync
    cfg.trainer.fully_async.num_parallel_generation_workers = schedule.in_flight
    cfg.trainer.algorithm.dynamic_sampling.type = "filter" if schedule.filters else None
    # engines may die so often that hardly a rollout gets to its end: however many prompts that takes, the run goes on
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
    over = 0.5 if schedule.cuts and not schedule.staleness and not schedule.filters else 0.0
    return cfg, timings, RunShape(schedule.engines, schedule.staleness, over_provisioning=over)


@pytest.fixture(autouse=True, scope="module")
def deaths_are_not_said() -> Iterator[None]:
    """Engines die all the time here."""
    logger = logging.getLogger("skyrl_train.trainer.publisher")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


class Watched:
    """A simulated run and what its steps trained on."""

    def __init__(self, schedule: Schedule, saved: Any = None):
        cfg, timings, shape = configured(schedule)
        self.run: SimulatedRun = build_run(cfg, timings, shape, STEPS, saved)
        self.trained: dict[int, list[TrajectoryGroup]] = {}
        self.most_under_way = 0
        self.torn = False
        trainer, collector = self.run.trainer, self.run.collector
        # a checkpoint after every step
        trainer.cfg = replace(
            cfg.trainer, eval_interval=schedule.evaluates, eval_before_train=schedule.evaluates > 0, ckpt_interval=1
        )
        trainer.evaluator = Evaluator(self._evaluate, HELD_OUT, len(HELD_OUT), None, require_single_version=True)
        self._rollout, self._rng = collector.rollout, random.Random(schedule.seed)
        collector.rollout = self._may_fail(schedule.rollouts_fail)
        if schedule.stalls_at is not None:
            stall(self.run.engines[0], schedule.stalls_at, schedule.stalls_s)
        next_groups = collector.next_groups

        async def watched(step: int, metrics: Metrics) -> list[TrajectoryGroup]:
            groups = await next_groups(step, metrics)
            self.trained[step] = list(groups)  # the loop lets go of its own
            waiting = [task for task in collector._queue._pending if not task.done() or task.result().is_useful]
            self.most_under_way = max(self.most_under_way, len(waiting))
            return groups

        collector.next_groups = watched  # type: ignore[method-assign]
        self._fail_a_sync(schedule.failing_sync)
        self._whole_versions_alone()
        for at, number in schedule.wanted:
            asyncio.get_running_loop().call_later(at, self._want, number)
        self.wanted = schedule.engines

    def _want(self, number: int) -> None:
        self.wanted = number
        self.run.scaler.set_target(number)

    async def close(self) -> None:
        await self.run.scaler.stop()
        await self.run.collector.close()
        await self.run.client.close()

    async def _evaluate(self, prompt: Prompt, position: int) -> TrajectoryGroup:
        """With requests of its own names, beside those of rollouts that go on."""
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

    def _whole_versions_alone(self) -> None:
        """No weights leave the learner while an update makes the next ones."""
        learner, weight_sync = self.run.learner, self.run.weight_sync
        sync_one = weight_sync.sync_one

        async def sends(engine: SimulatedEngine, version: int) -> dict[str, float]:
            self.torn |= learner.updating
            sent = await sync_one(engine, version)
            self.torn |= learner.updating or version != learner.version
            return sent  # type: ignore[no-any-return]

        weight_sync.sync_one = sends

    def _fail_a_sync(self, number: int) -> None:
        sync_all, syncs = self.run.weight_sync.sync_all, 0

        async def failing(version: int) -> dict[str, float]:
            nonlocal syncs
            syncs += 1
            if syncs == number and len(self.run.client.engines) > 1:
                self.run.client.engines[0].die()
                raise WeightSyncError("an engine was lost")
            return await sync_all(version)  # type: ignore[no-any-return]

        self.run.weight_sync.sync_all = failing


def stall(engine: SimulatedEngine, at: float, seconds: float) -> None:
    """As with a process that is stopped: neither calls that come then nor answers to those under way get through."""
    loop = asyncio.get_running_loop()
    begins = loop.time() + at

    def late(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            await over()
            try:
                return await method(*args, **kwargs)
            finally:
                await over()

        return call

    async def over() -> None:
        if begins <= loop.time() < begins + seconds:
            await asyncio.sleep(begins + seconds - loop.time())

    for name in ("generate", "abort", "pause", "resume", "commit_weights", "health"):
        setattr(engine, name, late(getattr(engine, name)))


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
        await first.run.scaler.stop()
        await first.run.collector.close()
        again = Watched(schedule, saved)
        async with asyncio.timeout(ENDS_WITHIN_S):
            await again.run.trainer.fit()
        begins = 0 if saved is None else saved[0]
        trained = {step: groups for step, groups in trained.items() if step < begins} | again.trained
        attempts.append(again)
    else:
        fit.result()
    last = attempts[-1].run
    async with asyncio.timeout(ENDS_WITHIN_S):
        await last.scaler.wait_until_settled()
        while last.client.dead_engines and not schedule.failures_per_hour:
            await last.client.wait_for_restart()  # what died in the last sync comes back after the run's last step
    if not schedule.failures_per_hour:
        assert len(last.client.engine_names) == attempts[-1].wanted
        living = sum(not engine.dead for engine in last.engines)
        stalled = schedule.stalls_at is not None  # one that was given up is not killed here
        assert living - stalled <= len(last.client.engines) <= living, "one that left goes on"
    for one in attempts:
        await one.close()
    return attempts, trained


@settings(max_examples=500, deadline=None)
@given(SCHEDULES)
def test_the_bound_holds_prompts_are_used_once_in_order_and_the_run_ends(schedule: Schedule):
    attempts, trained = virtual_time.run(played(schedule))
    assert sorted(trained) == list(range(STEPS))
    positions = [int(group.prompt.uid) for step in range(STEPS) for group in trained[step]]
    assert positions == sorted(set(positions)), "prompts in order, and none twice"
    if not schedule.filters and not (schedule.cuts and not schedule.staleness):
        assert positions == list(range(STEPS * BATCH)), "and none is left out"
    for step, groups in trained.items():
        assert len(groups) == BATCH
        kinds = {item.error for group in groups for item in group.trajectories}
        if not schedule.failures_per_hour and (schedule.fewest > 1 or schedule.stalls_at is None):
            assert kinds <= {None, "ZeroDivisionError"}, "one engine's death, stall or leave costs no rollout"
        turns = [turn for group in groups for item in group.trajectories if item.status == OK for turn in item.turns]
        assert all(step - schedule.staleness <= turn.min_version <= turn.max_version <= step for turn in turns)
    assert not any(one.torn for one in attempts), "an engine was sent weights that an update was changing"
    over = BATCH if schedule.cuts and not schedule.staleness else 0
    assert max(one.most_under_way for one in attempts) <= (schedule.staleness + 1) * BATCH + over


def test_a_schedule_plays_alike_wherever_its_objects_lie_in_memory() -> None:
    """Requests that an engine's death ends continue in their order: as members of a set they would go by addresses."""
    schedule = Schedule(
        engines=1, staleness=2, on_sync="keep", in_flight=10, sigma=0.5, update_s=1.0, sync_s=0.5, turns=2, tool_s=2.0,
        failures_per_hour=120.0, start_s=0.0, filters=True, failing_sync=0, stalls_at=None, stalls_s=1000.0,
        rollouts_fail=0.3, evaluates=0, cuts=False, killed_at=None, seed=1445,
    )  # fmt: skip
    found, kept = [], []
    for size in range(1, 9):
        _, trained = virtual_time.run(played(schedule))
        found.append([[group.prompt.uid for group in trained[step]] for step in range(STEPS)])
        kept.append([object() for _ in range(1000 * size)])  # so that the next ones lie elsewhere
    assert all(one == found[0] for one in found), found
