"""Selection of the groups of a step: dynamic sampling, over-provisioning and curriculum."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from skyrl_train.config.schema import OverlongBufferConfig
from skyrl_train.data.dataset import PromptOrder
from skyrl_train.data.messages import Prompt
from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.data.trajectory import FAILED, TrajectoryGroup, Turn
from skyrl_train.errors import RolloutsFailed
from skyrl_train.metrics import Metrics
from skyrl_train.rollouts.collector import (
    Curriculum,
    DynamicSampling,
    GroupFilterSettings,
    RewardShaping,
    RolloutCollector,
    has_distinct_outcomes,
)
from skyrl_train.trainer.rollout_metrics import add_rollout_metrics
from tests.support.trajectories import trajectory_from

MIXED, RIGHT, WRONG = (0.0, 1.0), (1.0, 1.0), (0.0, 0.0)
Rewards = Callable[[int], Sequence[float | None]]
"""Maps a position to the rewards of its group; None for a failed episode."""


NEWEST = 99
"""A version that is never stale."""


def group_of(prompt: Prompt, rewards: Sequence[float | None], version: int = NEWEST) -> TrajectoryGroup:
    rows = []
    for sample, reward in enumerate(rewards):
        turn = Turn(0, 2, reward or 0.0, "stop", version, version)
        rows.append(trajectory_from(prompt, sample, [1], [2, 3], [1, 1], [-0.5] * 2, [turn], turn.reward, "stop", 1.0))
        if reward is None:
            rows[-1].status, rows[-1].error = FAILED, "timeout"
    return TrajectoryGroup(prompt, rows)


def prompt_at(position: int) -> Prompt:
    return Prompt(str(position), [], "none")


class CollectorRun:
    """Steps of one collector; `started` has the positions in the order in which rollouts started."""

    def __init__(
        self,
        rewards: Rewards,
        filters: GroupFilterSettings,
        size: int = 4,
        failed_fraction: float = 0.5,
        max_staleness: int = 0,
        **kwargs: Any,
    ):
        self.started: list[int] = []
        self.metrics: dict[str, float] = {}
        self.groups: list[TrajectoryGroup] = []
        self.num_skipped: list[int] = []
        self._rewards = rewards
        prompts = kwargs.pop("prompt_at", prompt_at)
        self.collector = RolloutCollector(
            self._rollout, prompts, lambda step: size, max_staleness, failed_fraction, filters
        )

    async def _rollout(self, prompt: Prompt, position: int) -> TrajectoryGroup:
        self.started.append(position)
        await asyncio.sleep(0.001 * random.random())
        return group_of(prompt, self._rewards(position))

    def steps(self, first: int, last: int) -> list[list[str]]:
        """Return the uids that each of the steps first..last-1 trains on."""

        async def go() -> list[list[str]]:
            self.collector.start(first)
            uids = []
            for step in range(first, last):
                metrics = Metrics()
                self.groups = await self.collector.next_groups(step, metrics)
                add_rollout_metrics(self.groups, step, metrics)
                self.metrics = metrics.flush()
                uids.append([group.prompt.uid for group in self.groups])
                self.num_skipped.append(int(self.metrics.get("sampling/curriculum_skipped", 0)))
                self.collector.on_weights_published(step + 1)
            return uids

        return asyncio.run(go())


FILTER = GroupFilterSettings(dynamic_sampling=DynamicSampling(max_sample_batches=3))


def every_third(position: int) -> Sequence[float]:
    return MIXED if position % 3 == 0 else (RIGHT, WRONG)[position % 2]


def test_group_is_useful_if_outcomes_differ():
    assert has_distinct_outcomes(group_of(prompt_at(0), MIXED))
    for rewards in (RIGHT, WRONG, (1.0,), (1.0, None), (None, None), ()):
        assert not has_distinct_outcomes(group_of(prompt_at(0), rewards))


def test_length_penalty_alone_is_not_useful():
    group = group_of(prompt_at(0), WRONG)
    group.trajectories[1].response_ids = to_token_array([2] * 9)
    group.trajectories[1].turns = [Turn(0, 9, 0.0, "stop", 0, 0)]
    RewardShaping(overlong_buffer=OverlongBufferConfig(len=5), max_generate_length=10)(group)
    assert [item.reward for item in group.trajectories] == [0.0, -0.8]
    assert not has_distinct_outcomes(group)


def test_filter_draws_until_the_batch_is_full():
    run = CollectorRun(every_third, FILTER)
    assert run.steps(0, 2) == [["0", "3", "6", "9"], ["12", "15", "18", "21"]]
    assert run.started == list(range(22)), "each step draws 4, 2, 2, 2 prompts, as many as are missing"
    assert run.metrics["sampling/drawn"] == 12
    assert run.metrics["sampling/dropped"] == 8
    assert run.metrics["reward/mean"] == 0.5
    assert run.metrics["rollouts/tokens"] == 12 * 2 * 2


def test_filter_raises_at_its_limit():
    run = CollectorRun(lambda position: MIXED if position == 1 else WRONG, FILTER)
    with pytest.raises(
        RolloutsFailed, match=r"found 1 groups .* among 13 prompts.*needs 4 of 4\..*max_sample_batches=3"
    ):
        run.steps(0, 1)
    assert len(run.started) == 4 + 3 * 3, "no rollout starts after 3 batches of 4 prompts"


def test_filter_without_a_limit_continues():
    run = CollectorRun(
        lambda position: MIXED if position % 20 == 19 else RIGHT,
        GroupFilterSettings(dynamic_sampling=DynamicSampling()),
    )
    assert run.steps(0, 1) == [["19", "39", "59", "79"]]


def test_failed_rollouts_stop_filter_before_its_limit():
    run = CollectorRun(lambda position: (None, None), GroupFilterSettings(dynamic_sampling=DynamicSampling()))
    with pytest.raises(RolloutsFailed, match=r"8 of 8 trajectories.*timeout x 8"):
        run.steps(0, 1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("max_staleness", [1, 3])
def test_filter_keeps_staleness_bound_and_order(max_staleness: int, seed: int):
    rng = random.Random(seed)
    version, running, max_running = 0, 0, 0

    async def rollout(prompt: Prompt, position: int) -> TrajectoryGroup:
        nonlocal running, max_running
        started = version
        running += 1
        max_running = max(max_running, running)
        await asyncio.sleep(rng.choice([0, 0.001, 0.006 if rng.random() < 0.2 else 0.002]))
        running -= 1
        return group_of(prompt, MIXED if rng.random() < 0.4 else WRONG, started)

    async def train() -> tuple[list[int], list[int]]:
        nonlocal version
        collector = RolloutCollector(
            rollout,
            prompt_at,
            lambda step: 4 if step < 8 else 0,
            max_staleness,
            0.5,
            GroupFilterSettings(dynamic_sampling=DynamicSampling()),
        )
        collector.start(0)
        ages, positions = [], []
        for step in range(8):
            groups = await collector.next_groups(step, Metrics())
            assert all(has_distinct_outcomes(group) for group in groups)
            ages += [step - group.trajectories[0].min_version for group in groups]
            positions += [int(group.prompt.uid) for group in groups]
            assert collector.state_dict()["consumed"] == positions[-1] + 1, (
                "a resumed run starts the rollouts ahead of the step again"
            )
            await asyncio.sleep(0.004)
            version = step + 1
            collector.on_weights_published(version)
        await collector.close()
        return ages, positions

    ages, positions = asyncio.run(train())
    assert positions == sorted(set(positions))
    assert len(positions) == 8 * 4
    assert 0 < max(ages) <= max_staleness
    assert max_running <= 4 * (max_staleness + 1)


def test_dropped_group_releases_its_permit_early():
    started: list[int] = []

    async def rollout(prompt: Prompt, position: int) -> TrajectoryGroup:
        started.append(position)
        if position != 1:
            await asyncio.sleep(3600)  # the oldest rollout is slow
        return group_of(prompt, WRONG)

    async def go() -> None:
        collector = RolloutCollector(
            rollout, prompt_at, lambda step: 2, 1, 0.5, GroupFilterSettings(dynamic_sampling=DynamicSampling())
        )
        collector.start(0)
        collector.admit()
        await asyncio.sleep(0.3)
        await collector.close()

    asyncio.run(go())
    assert started == [0, 1, 2, 3, 4]


def replace(ratio: float, max_sample_batches: int = 3) -> GroupFilterSettings:
    return GroupFilterSettings(
        dynamic_sampling=DynamicSampling(min_replace_ratio=ratio, max_sample_batches=max_sample_batches)
    )


@pytest.mark.defect("unbounded-sampling-ahead")
@pytest.mark.parametrize("size", [2, 4])
def test_early_replacements_respect_the_draw_limit(size: int):
    """No group is useful while the learner computes for a long time."""
    max_sample_batches = 3
    run = CollectorRun(
        lambda position: WRONG,
        GroupFilterSettings(dynamic_sampling=DynamicSampling(max_sample_batches=max_sample_batches)),
        size,
        max_staleness=1,
    )

    async def go() -> None:
        run.collector.start(0)
        run.collector.admit()
        for _ in range(200):
            await asyncio.sleep(0.002)
        assert len(run.started) == (max_sample_batches + 2) * size, (
            "groups that may be dropped, and the permits of two steps"
        )
        with pytest.raises(RolloutsFailed, match="max_sample_batches=3"):
            await run.collector.next_groups(0, Metrics())
        await run.collector.close()

    asyncio.run(go())


def test_replace_repeats_useful_groups():
    run = CollectorRun(lambda position: MIXED if position in (1, 3) else RIGHT, replace(0.4), size=5)
    assert run.steps(0, 1) == [["1", "1", "3", "3", "1"]]
    assert run.groups[0] is run.groups[1]
    assert run.metrics["sampling/drawn"] == 5
    assert (run.metrics["sampling/dropped"], run.metrics["sampling/repeated"]) == (3, 3)
    assert run.metrics["rollouts/tokens"] == 5 * 2 * 2, "a repeated group was sampled once"
    assert run.metrics["reward/mean"] == 0.5


def test_replace_draws_again_below_min_ratio():
    run = CollectorRun(lambda position: MIXED if position in (1, 5) else RIGHT, replace(0.5))
    assert run.steps(0, 1) == [["1", "1", "5", "5"]]
    assert run.started == list(range(7))


@pytest.mark.parametrize("ratio", [0.0, 0.3])
def test_replace_raises_at_its_limit(ratio: float):
    run = CollectorRun(lambda position: RIGHT, replace(ratio))
    with pytest.raises(RolloutsFailed, match=r"found 0 groups .* among 12 prompts"):
        run.steps(0, 1)


def test_zero_variance_filter_masks_groups():
    run = CollectorRun(every_third, GroupFilterSettings(zero_variance_filter=True))
    assert run.steps(0, 1) == [["0", "1", "2", "3"]]
    trained_on = [sum(item.loss_mask) for group in run.groups for item in group.trajectories]
    assert trained_on == [2, 2, 0, 0, 0, 0, 2, 2]
    assert run.metrics["sampling/masked"] == 2
    assert run.metrics["reward/mean"] == (0.5 + 1.0 + 0.0 + 0.5) / 4, "metrics cover the whole batch"


def test_penalties_do_not_change_outcomes():
    group = group_of(prompt_at(0), RIGHT)
    RewardShaping(overlong_buffer=OverlongBufferConfig(len=10), max_generate_length=10)(group)
    metrics = Metrics()
    add_rollout_metrics([group], 0, metrics)
    values = metrics.flush()
    assert values["reward/pass_at_2"] == 1.0
    assert values["reward/length_penalty"] == pytest.approx(0.2)
    assert values["reward/mean"] == pytest.approx(0.8)


# -- over-provisioning -------------------------------------------------------------------------------------------------


def test_over_provisioning_takes_the_fastest_groups():
    ended: dict[int, str] = {}
    delays = [0.03, 0.0, 0.02, 3600, 0.01, 3600]

    async def rollout(prompt: Prompt, position: int) -> TrajectoryGroup:
        try:
            await asyncio.sleep(delays[position])
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # the queue waits for the clean-up of a rollout
            ended[position] = "canceled"
            raise
        ended[position] = "finished"
        return group_of(prompt, MIXED)

    async def go() -> tuple[list[str], dict[str, float], int]:
        collector = RolloutCollector(
            rollout, prompt_at, lambda step: 4, 0, 0.5, GroupFilterSettings(over_provisioning=0.5)
        )
        collector.start(0)
        metrics = Metrics()
        groups = await collector.next_groups(0, metrics)
        assert collector.progress == (0, 0)
        return [group.prompt.uid for group in groups], metrics.flush(), collector.consumed

    uids, metrics, consumed = asyncio.run(go())
    assert uids == ["0", "1", "2", "4"]
    assert {position for position, outcome in ended.items() if outcome == "canceled"} == {3, 5}
    assert metrics["sampling/cancelled"] == 2
    assert consumed == 6


def test_fast_failed_group_is_not_preferred():
    async def rollout(prompt: Prompt, position: int) -> TrajectoryGroup:
        await asyncio.sleep(0.005 * position)
        return group_of(prompt, (None, None) if position in (0, 2) else MIXED)

    async def first(over_provisioning: float) -> list[str]:
        filters = GroupFilterSettings(over_provisioning=over_provisioning)
        collector = RolloutCollector(rollout, prompt_at, lambda step: 3, 0, 1.0, filters)
        collector.start(0)
        return [group.prompt.uid for group in await collector.next_groups(0, Metrics())]

    assert asyncio.run(first(2 / 3)) == ["1", "3", "4"]
    assert asyncio.run(first(1 / 3)) == ["0", "1", "3"], "with too few other groups a failed one is taken and masked"


def test_surplus_failures_are_counted():
    async def rollout(prompt: Prompt, position: int) -> TrajectoryGroup:
        await asyncio.sleep(0.005 * position)
        return group_of(prompt, (None, None) if position < 2 else MIXED)

    async def go(max_failed_fraction: float) -> dict[str, float]:
        collector = RolloutCollector(
            rollout, prompt_at, lambda step: 2, 0, max_failed_fraction, GroupFilterSettings(over_provisioning=1.0)
        )
        collector.start(0)
        metrics = Metrics()
        await collector.next_groups(0, metrics)
        return metrics.flush()

    assert asyncio.run(go(1.0))["rollouts/failed"] == 4
    with pytest.raises(RolloutsFailed, match="4 of 8 trajectories"):
        asyncio.run(go(0.4))


def test_over_provisioning_does_not_wait_for_useful_groups():
    async def rollout(prompt: Prompt, position: int) -> TrajectoryGroup:
        await asyncio.sleep(3600 if position == 3 else 0)
        return group_of(prompt, WRONG if position == 0 else MIXED)

    async def go() -> list[str]:
        filters = GroupFilterSettings(dynamic_sampling=DynamicSampling(), over_provisioning=0.5)
        collector = RolloutCollector(rollout, prompt_at, lambda step: 2, 0, 0.5, filters)
        collector.start(0)
        return [group.prompt.uid for group in await collector.next_groups(0, Metrics())]

    assert asyncio.run(asyncio.wait_for(go(), 60)) == ["1", "4"]


def test_over_provisioned_exception_is_raised():
    async def rollout(prompt: Prompt, position: int) -> TrajectoryGroup:
        if position:
            await asyncio.sleep(3600)
        raise ValueError("a bug")

    async def go() -> None:
        collector = RolloutCollector(
            rollout, prompt_at, lambda step: 2, 0, 1.0, GroupFilterSettings(over_provisioning=1.0)
        )
        collector.start(0)
        try:
            await collector.next_groups(0, Metrics())
        finally:
            await collector.close()

    with pytest.raises(ValueError, match="a bug"):
        asyncio.run(go())


def test_over_provisioning_and_filter_work_together():
    run = CollectorRun(every_third, GroupFilterSettings(dynamic_sampling=DynamicSampling(), over_provisioning=0.5))
    (uids,) = run.steps(0, 1)
    assert len(uids) == 4
    assert all(int(uid) % 3 == 0 for uid in uids)


# -- curriculum and resuming -------------------------------------------------------------------------------------------


def test_curriculum_skips_a_prompt_once():
    curriculum = Curriculum(0.1, 0.9)
    curriculum.observe(group_of(prompt_at(0), WRONG))
    curriculum.observe(group_of(prompt_at(1), MIXED))
    curriculum.observe(group_of(prompt_at(2), RIGHT))
    curriculum.observe(group_of(prompt_at(3), (None, None)))
    assert [curriculum.should_skip(str(uid)) for uid in range(5)] == [True, False, True, False, False]
    assert not any(curriculum.should_skip(str(uid)) for uid in range(5))


def test_curriculum_limits_are_inclusive():
    curriculum = Curriculum(0.5, 0.5)
    curriculum.observe(group_of(prompt_at(0), MIXED))
    assert not curriculum.should_skip("0")


def toy_run(filters: Callable[[], GroupFilterSettings], size: int = 3, rows: int = 7, **kwargs: Any) -> CollectorRun:
    """Return a run over a small dataset, with rewards that depend on the position and the row."""
    order = PromptOrder(rows, seed=5)

    def rewards(position: int) -> Sequence[float]:
        return (MIXED, WRONG, RIGHT)[random.Random(position * 31 + order.row(position)).randrange(3)]

    return CollectorRun(rewards, filters(), size, prompt_at=lambda position: prompt_at(order.row(position)), **kwargs)


@pytest.mark.parametrize(
    "filters",
    [
        GroupFilterSettings,
        lambda: GroupFilterSettings(dynamic_sampling=DynamicSampling()),
        lambda: replace(0.6, max_sample_batches=-1),
        lambda: GroupFilterSettings(curriculum=Curriculum(0.2, 0.8)),
        lambda: GroupFilterSettings(dynamic_sampling=DynamicSampling(), curriculum=Curriculum(0.2, 0.8)),
    ],
)
@pytest.mark.parametrize("stopped_after", [1, 4, 7])
def test_resumed_run_draws_the_same_prompts(filters: Callable[[], GroupFilterSettings], stopped_after: int):
    straight, killed, resumed = toy_run(filters), toy_run(filters), toy_run(filters)
    expected = straight.steps(0, 10)
    before = killed.steps(0, stopped_after)
    resumed.collector.load_state_dict(json.loads(json.dumps(killed.collector.state_dict())))
    assert before + resumed.steps(stopped_after, 10) == expected
    assert killed.started + resumed.started == straight.started
    assert len(straight.started) > 2 * 7, "the run has several epochs"


@pytest.mark.fault("F37")
@pytest.mark.defect("curriculum-decides-again-on-resume")
@pytest.mark.parametrize("max_staleness", [1, 2])
@pytest.mark.parametrize("stopped_after", range(1, 9))
def test_resumed_run_repeats_skip_decisions(stopped_after: int, max_staleness: int):
    straight, killed, resumed = (
        toy_run(lambda: GroupFilterSettings(curriculum=Curriculum(0.2, 0.8)), max_staleness=max_staleness)
        for _ in range(3)
    )
    expected = straight.steps(0, 12)
    before = killed.steps(0, stopped_after)
    resumed.collector.load_state_dict(json.loads(json.dumps(killed.collector.state_dict())))
    first = resumed.steps(stopped_after, stopped_after + max_staleness)  # admitted before the run stopped
    assert before + first == expected[: stopped_after + max_staleness]


def test_curriculum_halves_draws_of_extreme_prompts():
    order = PromptOrder(6, seed=1)
    run = CollectorRun(
        lambda position: MIXED if order.row(position) < 3 else RIGHT,
        GroupFilterSettings(curriculum=Curriculum(0.0, 0.9)),
        size=3,
        prompt_at=lambda position: prompt_at(order.row(position)),
    )
    drawn = [uid for step in run.steps(0, 12) for uid in step]
    mixed, right = (sum(drawn.count(str(uid)) for uid in uids) for uids in (range(3), range(3, 6)))
    assert (mixed, right) == (24, 12)


def test_unfinished_step_does_not_change_the_state():
    run = toy_run(
        lambda: GroupFilterSettings(
            dynamic_sampling=DynamicSampling(max_sample_batches=1), curriculum=Curriculum(0.2, 0.8)
        )
    )
    with pytest.raises(RolloutsFailed):
        run.steps(0, 1)
    assert len(run.started) == 3
    assert run.collector.state_dict() == {"consumed": 0, "pass_rates": {}, "decided": []}
