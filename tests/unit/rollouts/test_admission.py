from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from skyrl_train.data.messages import Prompt
from skyrl_train.data.trajectory import FAILED, TrajectoryGroup, Turn
from skyrl_train.errors import RolloutsFailed, StaleRollout
from skyrl_train.metrics import Metrics
from skyrl_train.rollouts.collector import RolloutCollector, RolloutQueue
from skyrl_train.trainer.evaluation import check_version
from skyrl_train.trainer.rollout_metrics import add_rollout_metrics
from tests.support.trajectories import trajectory_from

STEPS, PER_STEP = 12, 4


def group_of(prompt: Prompt, version: int = 0, failed: int = 0, samples: int = 2) -> TrajectoryGroup:
    rows = []
    for sample in range(samples):
        row = trajectory_from(
            prompt, sample, [1], [2], [1], [-0.5], [Turn(0, 1, 1.0, "stop", version, version)], 1.0, "stop", 1.0
        )
        if sample < failed:
            row.status, row.error = FAILED, "timeout"
        rows.append(row)
    return TrajectoryGroup(prompt, rows)


def prompt(position: int) -> Prompt:
    return Prompt(str(position), [], "none", source="my rows.jsonl", source_row=position)


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_staleness_is_bounded_and_order_kept_under_random_delays(max_staleness: int, seed: int):
    rng = random.Random(seed)
    version = 0

    async def rollout(prompt: Prompt, position: int) -> TrajectoryGroup:
        started = version
        await asyncio.sleep(rng.choice([0, 0.001, 0.01 if rng.random() < 0.2 else 0.002]))
        return group_of(prompt, started)

    async def train() -> tuple[list[int], list[str]]:
        nonlocal version
        collector = RolloutCollector(
            rollout, prompt, lambda step: PER_STEP if step < STEPS else 0, max_staleness, max_failed_fraction=0.5
        )
        collector.start(0)
        ages, uids = [], []
        for step in range(STEPS):
            groups = await collector.next_groups(step, Metrics())
            ages += [step - group.trajectories[0].min_version for group in groups]
            uids += [group.prompt.uid for group in groups]
            await asyncio.sleep(0.001)
            version = step + 1
            collector.on_weights_published(version)
        assert collector.consumed == STEPS * PER_STEP
        return ages, uids

    ages, uids = asyncio.run(train())
    assert uids == [str(i) for i in range(STEPS * PER_STEP)]
    assert max(ages) <= max_staleness
    if max_staleness:
        assert max(ages) > 0, "rollouts never ran ahead, so the bound was not tested"


@pytest.mark.parametrize("num_parallel_generation_workers", [1, 3])
def test_number_of_running_rollouts_is_limited(num_parallel_generation_workers: int):
    rng, running, max_running, started = random.Random(0), 0, 0, []

    async def rollout(prompt: Prompt, position: int) -> TrajectoryGroup:
        nonlocal running, max_running
        running += 1
        max_running = max(max_running, running)
        started.append(position)
        await asyncio.sleep(rng.choice([0.001, 0.003]))
        running -= 1
        return group_of(prompt, max(0, position // PER_STEP - 2))

    async def train() -> list[str]:
        collector = RolloutCollector(
            rollout,
            prompt,
            lambda step: PER_STEP if step < STEPS else 0,
            2,
            0.5,
            num_parallel_generation_workers=num_parallel_generation_workers,
        )
        collector.start(0)
        uids = []
        for step in range(STEPS):
            uids += [group.prompt.uid for group in await collector.next_groups(step, Metrics())]
            await asyncio.sleep(0.002)
            collector.on_weights_published(step + 1)
        return uids

    assert asyncio.run(train()) == [str(i) for i in range(STEPS * PER_STEP)]
    assert started == list(range(STEPS * PER_STEP))
    assert max_running == num_parallel_generation_workers


@pytest.mark.defect("finished-rollouts-count-as-running")
def test_step_starts_next_rollout_after_finished_one():
    ended = asyncio.Event()

    async def rollout(prompt: Prompt, position: int) -> TrajectoryGroup:
        await asyncio.sleep(0)
        ended.set()  # a waiter runs before the callbacks of the rollout's task
        return group_of(prompt)

    async def run() -> list[str]:
        collector = RolloutCollector(rollout, prompt, lambda step: PER_STEP, 1, 0.5, num_parallel_generation_workers=1)
        collector.start(0)
        collector.admit()
        await ended.wait()
        groups = await collector.next_groups(0, Metrics())
        await collector.close()
        return [group.prompt.uid for group in groups]

    assert asyncio.run(run()) == ["0", "1", "2", "3"]


def test_rollout_canceled_before_start_is_not_counted():
    async def run() -> int:
        queue: RolloutQueue[TrajectoryGroup] = RolloutQueue()
        queue.add_permits(2)
        for _ in range(2):
            queue.submit(lambda: asyncio.sleep(60))  # type: ignore[arg-type,return-value]
        await queue.close()
        return queue.running

    assert asyncio.run(run()) == 0


def test_later_rollouts_start_when_weights_are_published():
    started: list[int] = []

    async def rollout(prompt: Prompt, position: int) -> TrajectoryGroup:
        started.append(position)
        return group_of(prompt)

    async def run() -> None:
        collector = RolloutCollector(rollout, prompt, lambda step: PER_STEP, 1, 0.5)
        collector.start(0)
        await collector.next_groups(0, Metrics())
        collector.on_weights_published(1)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await collector.close()

    asyncio.run(run())
    assert started == list(range(3 * PER_STEP))


@pytest.mark.parametrize("bound", [0, 1])
@pytest.mark.defect("zero-staleness-lacks-metrics")
def test_stale_token_raises(bound: int):
    """Also with `num_parallel_generation_workers` and a staleness bound of 0, where ages are in the metrics, too."""
    version = 4

    async def rollout(prompt: Prompt, position: int) -> TrajectoryGroup:
        return group_of(prompt, version=version)

    async def run() -> dict[str, float]:
        collector = RolloutCollector(
            rollout, prompt, lambda step: PER_STEP, bound, 0.5, num_parallel_generation_workers=PER_STEP
        )
        collector.start(4)
        metrics = Metrics()
        await collector.next_groups(4, metrics)
        await collector.close()
        return metrics.flush()

    assert {"async/staleness_max", "async/in_flight"} <= asyncio.run(run()).keys()
    version = 3 - bound
    with pytest.raises(
        StaleRollout, match=rf"step 5 .* version {version} sampled\. It is {bound + 1} steps old, but at most {bound}"
    ):
        asyncio.run(run())


@pytest.mark.defect("empty-turn-has-version-0")
def test_a_turn_without_tokens_has_no_age():
    async def rollout(prompt: Prompt, position: int) -> TrajectoryGroup:
        group = group_of(prompt, version=4)
        group.trajectories[0].turns.append(Turn(1, 1, 0.0, "stop", 0, 0))
        empty = group.trajectories[1]
        empty.turns, empty.loss_spans = [Turn(0, 0, 0.0, "length", 0, 0)], []
        return group

    async def run() -> dict[str, float]:
        collector = RolloutCollector(
            rollout, prompt, lambda step: PER_STEP, 0, 0.5, num_parallel_generation_workers=PER_STEP
        )
        collector.start(4)
        metrics = Metrics()
        groups = await collector.next_groups(4, metrics)
        check_version(groups, 4)
        add_rollout_metrics(groups, 4, metrics)
        await collector.close()
        return metrics.flush()

    metrics = asyncio.run(run())
    assert (metrics["async/staleness_max"], metrics["rollouts/max_staleness"]) == (0, 0)


def test_rollout_without_a_permit_is_rejected():
    queue: RolloutQueue[TrajectoryGroup] = RolloutQueue()
    with pytest.raises(AssertionError, match="staleness"):
        queue.submit(lambda: asyncio.sleep(0))  # type: ignore[arg-type,return-value]


def test_close_cancels_running_rollouts():
    canceled = []

    async def hang(prompt: Prompt, position: int) -> TrajectoryGroup:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            canceled.append(position)
            raise
        raise AssertionError

    async def run() -> None:
        collector = RolloutCollector(hang, prompt, lambda step: 3, 0, 0.5)
        collector.start(0)
        collector.admit()
        await asyncio.sleep(0)
        await collector.close()

    asyncio.run(run())
    assert canceled == [0, 1, 2]


def test_close_cancels_rollouts_started_during_close():
    ended: list[int] = []

    async def rollout(prompt: Prompt, position: int) -> TrajectoryGroup:
        try:
            await asyncio.sleep(0 if position == 0 else 60)
        finally:
            ended.append(position)
        return group_of(prompt)

    async def run() -> int:
        collector = RolloutCollector(
            rollout, prompt, lambda step: 3, 1, max_failed_fraction=0.5, num_parallel_generation_workers=1
        )
        collector.start(0)
        collector.admit()
        await asyncio.sleep(0)  # the rollout has started
        await asyncio.sleep(0)  # the rollout has ended, but its callbacks have not run
        await collector.close()
        return len(asyncio.all_tasks())

    assert asyncio.run(run()) == 1
    assert ended[0] == 0


def test_exception_in_a_rollout_is_raised():
    async def fail(prompt: Prompt, position: int) -> TrajectoryGroup:
        raise ValueError("a bug")

    async def run() -> None:
        collector = RolloutCollector(fail, prompt, lambda step: 1, 0, 0.5)
        collector.start(0)
        await collector.next_groups(0, Metrics())

    with pytest.raises(ValueError, match="a bug"):
        asyncio.run(run())


def collect(num_failed: list[int]) -> dict[str, float]:
    async def rollout(prompt: Prompt, position: int) -> TrajectoryGroup:
        return group_of(prompt, failed=num_failed[position])

    async def run() -> dict[str, float]:
        collector = RolloutCollector(rollout, prompt, lambda step: len(num_failed), 0, max_failed_fraction=0.5)
        collector.start(0)
        metrics = Metrics()
        await collector.next_groups(0, metrics)
        return metrics.flush()

    return asyncio.run(run())


@pytest.mark.fault("F11")
def test_failed_trajectories_are_counted_by_error_type():
    assert collect([1, 0, 2]) == {"rollouts/failed": 3, "rollouts/failed/timeout": 3}


@pytest.mark.fault("F11")
def test_each_failure_kind_is_logged_once(
    caplog: pytest.LogCaptureFixture,
):
    async def rollout(prompt: Prompt, position: int) -> TrajectoryGroup:
        group = group_of(prompt)
        detail = "division by zero (my_env.py:7 in step)\n\x1b[31m"
        group.trajectories[0].fail("ZeroDivisionError", detail) if position % 2 else None
        group.trajectories[0].fail("engine", "it was lost") if position == 2 else None
        for trajectory in group.trajectories if position > 2 * PER_STEP else ():
            trajectory.fail("ZeroDivisionError", detail)
        return group

    async def run() -> None:
        overrides = ["trainer.plugins=[my_env]"]
        collector = RolloutCollector(rollout, prompt, lambda step: PER_STEP, 0, 0.7, env_try_overrides=overrides)
        collector.start(0)
        for step in range(2):
            await collector.next_groups(step, Metrics())
            collector.on_weights_published(step + 1)
        await collector.next_groups(2, Metrics())

    description = (
        r"ZeroDivisionError: division by zero (my_env.py:7 in step)\n\x1b[31m (row {}, environment none). Try it: "
        "`skyrl-train env try none --data 'my rows.jsonl' --row {} 'trainer.plugins=[my_env]'`."
    )
    with pytest.raises(RolloutsFailed) as error_info:
        asyncio.run(run())
    assert str(error_info.value).endswith(f"or raise the fraction. {description.format(9, 9)}")
    assert [record.message for record in caplog.records] == [
        f"2 of 8 episodes of this step failed and are masked. {description.format(1, 1)}",
        "1 of 8 episodes of this step failed and are masked. engine: it was lost (row 2, environment none).",
    ]


@pytest.mark.fault("F16")
def test_mostly_failed_step_raises():
    with pytest.raises(RolloutsFailed, match=r"5 of 6 trajectories.*timeout x 5.*max_failed_fraction"):
        collect([2, 2, 1])


def test_resumed_collector_continues_at_the_next_prompt():
    positions = []

    async def rollout(prompt: Prompt, position: int) -> TrajectoryGroup:
        positions.append(position)
        return group_of(prompt)

    async def run() -> None:
        collector = RolloutCollector(rollout, prompt, lambda step: 2, 0, 0.5)
        collector.load_state_dict({"consumed": 6, "pass_rates": {}, "decided": []})
        collector.start(step=3)
        await collector.next_groups(3, Metrics())
        assert collector.state_dict()["consumed"] == 8

    asyncio.run(run())
    assert positions == [6, 7]


@pytest.mark.defect("forged-run-state")
@pytest.mark.parametrize(
    "change", [{"consumed": "six"}, {"consumed": -1}, {"pass_rates": {"0": "high"}}, {"decided": [["first", True]]}]
)
def test_malformed_state_is_rejected(change: dict[str, Any]):
    async def rollout(prompt: Prompt, position: int) -> TrajectoryGroup:
        return group_of(prompt)

    collector = RolloutCollector(rollout, prompt, lambda step: 2, 0, 0.5)
    with pytest.raises(ValueError, match=r"six|is negative|high|first"):
        collector.load_state_dict({"consumed": 6, "pass_rates": {}, "decided": []} | change)
