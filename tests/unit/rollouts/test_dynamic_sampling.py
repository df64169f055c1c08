"""Which groups a step gets, with samplers between the rollouts and the trainer."""

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
"""Position -> the rewards of its group; None failed."""


NEWEST = 99
"""A version that no step finds too old."""


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


class Run:
    """Synchronous steps of one collector; `begun` has the positions in the order in which rollouts began."""

    def __init__(
        self,
        rewards: Rewards,
        samplers: GroupFilterSettings,
        size: int = 4,
        failed_fraction: float = 0.5,
        max_staleness: int = 0,
        **kwargs: Any,
    ):
        self.begun: list[int] = []
        self.metrics: dict[str, float] = {}
        self.groups: list[TrajectoryGroup] = []
        self.left_out: list[int] = []
        self._rewards = rewards
        prompts = kwargs.pop("prompt_at", prompt_at)
        self.collector = RolloutCollector(
            self._rollout, prompts, lambda step: size, max_staleness, failed_fraction, samplers
        )

    async def _rollout(self, prompt: Prompt, position: int) -> TrajectoryGroup:
        self.begun.append(position)
        await asyncio.sleep(0.001 * random.random())
        return group_of(prompt, self._rewards(position))

    def steps(self, first: int, last: int) -> list[list[str]]:
        """uids that the steps first..last-1 train on."""

        async def go() -> list[list[str]]:
            self.collector.start(first)
            uids = []
            for step in range(first, last):
                metrics = Metrics()
                self.groups = await self.collector.next_groups(step, metrics)
                add_rollout_metrics(self.groups, step, metrics)
                self.metrics = metrics.flush()
                uids.append([group.prompt.uid for group in self.groups])
                self.left_out.append(int(self.metrics.get("sampling/curriculum_skipped", 0)))
                self.collector.on_weights_published(step + 1)
            return uids

        return asyncio.run(go())


FILTER = GroupFilterSettings(dynamic_sampling=DynamicSampling(max_sample_batches=3))


def every_third(position: int) -> Sequence[float]:
    return MIXED if position % 3 == 0 else (RIGHT, WRONG)[position % 2]


def test_a_group_is_useful_when_its_valid_answers_differ():
    assert has_distinct_outcomes(group_of(prompt_at(0), MIXED))
    for rewards in (RIGHT, WRONG, (1.0,), (1.0, None), (None, None), ()):
        assert not has_distinct_outcomes(group_of(prompt_at(0), rewards))


def test_groups_that_differ_in_length_alone_are_not_useful_and_are_trained_on_without_filter():
    group = group_of(prompt_at(0), WRONG)
    group.trajectories[1].response_ids = to_token_array([2] * 9)
    group.trajectories[1].turns = [Turn(0, 9, 0.0, "stop", 0, 0)]
    RewardShaping(overlong_buffer=OverlongBufferConfig(len=5), max_generate_length=10)(group)
    assert [item.reward for item in group.trajectories] == [0.0, -0.8]
    assert not has_distinct_outcomes(group)


def test_filter_draws_until_the_batch_is_full_and_keeps_the_order():
    run = Run(every_third, FILTER)
    assert run.steps(0, 2) == [["0", "3", "6", "9"], ["12", "15", "18", "21"]]
    assert run.begun == list(range(22)), "4, 2, 2, 2 prompts: those missing and no more; then the same again"
    assert run.metrics["sampling/drawn"] == 12
    assert run.metrics["sampling/dropped"] == 8
    assert run.metrics["reward/mean"] == 0.5
    assert run.metrics["rollouts/tokens"] == 12 * 2 * 2


def test_filter_gives_up_at_its_bound_and_says_what_to_do():
    run = Run(lambda position: MIXED if position == 1 else WRONG, FILTER)
    with pytest.raises(
        RolloutsFailed, match=r"found 1 groups .* among 13 prompts.*needs 4 of 4: .*max_sample_batches=3"
    ):
        run.steps(0, 1)
    assert len(run.begun) == 4 + 3 * 3, "nothing more once 3 batches of 4 are drawn"


def test_without_a_bound_filter_goes_on():
    run = Run(
        lambda position: MIXED if position % 20 == 19 else RIGHT,
        GroupFilterSettings(dynamic_sampling=DynamicSampling()),
    )
    assert run.steps(0, 1) == [["19", "39", "59", "79"]]


def test_a_broken_environment_stops_a_filtered_run_before_the_bound():
    run = Run(lambda position: (None, None), GroupFilterSettings(dynamic_sampling=DynamicSampling()))
    with pytest.raises(RolloutsFailed, match=r"8 of 8 trajectories.*timeout x 8"):
        run.steps(0, 1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("max_staleness", [1, 3])
def test_filter_holds_the_staleness_bound_and_the_order_when_it_runs_ahead(max_staleness: int, seed: int):
    rng = random.Random(seed)
    live, under_way, most = 0, 0, 0

    async def rollout(prompt: Prompt, position: int) -> TrajectoryGroup:
        nonlocal under_way, most
        begun = live
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(rng.choice([0, 0.001, 0.006 if rng.random() < 0.2 else 0.002]))
        under_way -= 1
        return group_of(prompt, MIXED if rng.random() < 0.4 else WRONG, begun)

    async def train() -> tuple[list[int], list[int]]:
        nonlocal live
        collector = RolloutCollector(
            rollout,
            prompt_at,
            lambda step: 4 if step < 8 else 0,
            max_staleness,
            0.5,
            GroupFilterSettings(dynamic_sampling=DynamicSampling()),
        )
        collector.start(0)
        ages, places = [], []
        for step in range(8):
            groups = await collector.next_groups(step, Metrics())
            assert all(has_distinct_outcomes(group) for group in groups)
            ages += [step - group.trajectories[0].min_version for group in groups]
            places += [int(group.prompt.uid) for group in groups]
            assert collector.state_dict()["consumed"] == places[-1] + 1, (
                "what runs ahead is begun again by a resumed run"
            )
            await asyncio.sleep(0.004)
            live = step + 1
            collector.on_weights_published(live)
        await collector.close()
        return ages, places

    ages, places = asyncio.run(train())
    assert places == sorted(set(places))
    assert len(places) == 8 * 4
    assert 0 < max(ages) <= max_staleness
    assert most <= 4 * (max_staleness + 1)


def test_a_dropped_group_releases_its_slot_before_its_turn_comes():
    begun: list[int] = []

    async def rollout(prompt: Prompt, position: int) -> TrajectoryGroup:
        begun.append(position)
        if position != 1:
            await asyncio.sleep(3600)  # the oldest is slow
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
    assert begun == [0, 1, 2, 3, 4]


def replace(ratio: float, max_sample_batches: int = 3) -> GroupFilterSettings:
    return GroupFilterSettings(
        dynamic_sampling=DynamicSampling(min_replace_ratio=ratio, max_sample_batches=max_sample_batches)
    )


@pytest.mark.defect("groups-dropped-ahead-without-a-bound")
@pytest.mark.parametrize("size", [2, 4])
def test_groups_that_are_dropped_ahead_are_as_many_as_a_step_may_draw(size: int):
    """Nothing is useful while the learner computes, for as long as that takes."""
    most = 3
    run = Run(
        lambda position: WRONG,
        GroupFilterSettings(dynamic_sampling=DynamicSampling(max_sample_batches=most)),
        size,
        max_staleness=1,
    )

    async def go() -> None:
        run.collector.start(0)
        run.collector.admit()
        for _ in range(200):
            await asyncio.sleep(0.002)
        assert len(run.begun) == (most + 2) * size, "what may be dropped, and the slots of two steps"
        with pytest.raises(RolloutsFailed, match="max_sample_batches=3"):
            await run.collector.next_groups(0, Metrics())
        await run.collector.close()

    asyncio.run(go())


def test_replace_repeats_useful_groups_in_the_places_of_the_others():
    run = Run(lambda position: MIXED if position in (1, 3) else RIGHT, replace(0.4), size=5)
    assert run.steps(0, 1) == [["1", "1", "3", "3", "1"]]
    assert run.groups[0] is run.groups[1]
    assert run.metrics["sampling/drawn"] == 5
    assert (run.metrics["sampling/dropped"], run.metrics["sampling/repeated"]) == (3, 3)
    assert run.metrics["rollouts/tokens"] == 5 * 2 * 2, "a repeated group was sampled once"
    assert run.metrics["reward/mean"] == 0.5


def test_replace_draws_again_below_its_share_and_keeps_what_it_has():
    run = Run(lambda position: MIXED if position in (1, 5) else RIGHT, replace(0.5))
    assert run.steps(0, 1) == [["1", "1", "5", "5"]]
    assert run.begun == list(range(7))


@pytest.mark.parametrize("ratio", [0.0, 0.3])
def test_replace_gives_up_at_its_bound_too(ratio: float):
    run = Run(lambda position: RIGHT, replace(ratio))
    with pytest.raises(RolloutsFailed, match=r"found 0 groups .* among 12 prompts"):
        run.steps(0, 1)


def test_the_zero_variance_filter_masks_groups_and_leaves_them_in_the_batch():
    run = Run(every_third, GroupFilterSettings(zero_variance_filter=True))
    assert run.steps(0, 1) == [["0", "1", "2", "3"]]
    trained_on = [sum(item.loss_mask) for group in run.groups for item in group.trajectories]
    assert trained_on == [2, 2, 0, 0, 0, 0, 2, 2]
    assert run.metrics["sampling/masked"] == 2
    assert run.metrics["reward/mean"] == (0.5 + 1.0 + 0.0 + 0.5) / 4, "what is reported is the whole batch"


def test_penalties_do_not_make_a_right_answer_a_failed_one():
    group = group_of(prompt_at(0), RIGHT)
    RewardShaping(overlong_buffer=OverlongBufferConfig(len=10), max_generate_length=10)(group)
    metrics = Metrics()
    add_rollout_metrics([group], 0, metrics)
    found = metrics.flush()
    assert found["reward/pass_at_2"] == 1.0
    assert found["reward/length_penalty"] == pytest.approx(0.2)
    assert found["reward/mean"] == pytest.approx(0.8)


# -- over-provisioning -------------------------------------------------------------------------------------------------


def test_over_provisioning_takes_the_first_to_finish_in_admission_order_and_cancels_the_others():
    ended: dict[int, str] = {}
    delays = [0.03, 0.0, 0.02, 3600, 0.01, 3600]

    async def rollout(prompt: Prompt, position: int) -> TrajectoryGroup:
        try:
            await asyncio.sleep(delays[position])
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # what a generator does to clean up is waited for
            ended[position] = "cancelled"
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
    assert {position for position, how in ended.items() if how == "cancelled"} == {3, 5}
    assert metrics["sampling/cancelled"] == 2
    assert consumed == 6


def test_a_group_that_failed_fast_does_not_take_a_slow_one_s_place():
    async def rollout(prompt: Prompt, position: int) -> TrajectoryGroup:
        await asyncio.sleep(0.005 * position)
        return group_of(prompt, (None, None) if position in (0, 2) else MIXED)

    async def first(over_provisioning: float) -> list[str]:
        samplers = GroupFilterSettings(over_provisioning=over_provisioning)
        collector = RolloutCollector(rollout, prompt_at, lambda step: 3, 0, 1.0, samplers)
        collector.start(0)
        return [group.prompt.uid for group in await collector.next_groups(0, Metrics())]

    assert asyncio.run(first(2 / 3)) == ["1", "3", "4"]
    assert asyncio.run(first(1 / 3)) == ["0", "1", "3"], "too few are left: a failed one fills the place, masked"


def test_failures_that_over_provisioning_leaves_behind_are_counted_all_the_same():
    async def rollout(prompt: Prompt, position: int) -> TrajectoryGroup:
        await asyncio.sleep(0.005 * position)
        return group_of(prompt, (None, None) if position < 2 else MIXED)

    async def go(allowed: float) -> dict[str, float]:
        collector = RolloutCollector(
            rollout, prompt_at, lambda step: 2, 0, allowed, GroupFilterSettings(over_provisioning=1.0)
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
        samplers = GroupFilterSettings(dynamic_sampling=DynamicSampling(), over_provisioning=0.5)
        collector = RolloutCollector(rollout, prompt_at, lambda step: 2, 0, 0.5, samplers)
        collector.start(0)
        return [group.prompt.uid for group in await collector.next_groups(0, Metrics())]

    assert asyncio.run(asyncio.wait_for(go(), 60)) == ["1", "4"]


def test_an_exception_of_an_over_provisioned_rollout_reaches_the_trainer():
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
    run = Run(every_third, GroupFilterSettings(dynamic_sampling=DynamicSampling(), over_provisioning=0.5))
    (uids,) = run.steps(0, 1)
    assert len(uids) == 4
    assert all(int(uid) % 3 == 0 for uid in uids)


# -- curriculum and resuming -------------------------------------------------------------------------------------------


def test_a_curriculum_leaves_a_prompt_out_once_and_asks_again_the_time_after():
    curriculum = Curriculum(0.1, 0.9)
    curriculum.observe(group_of(prompt_at(0), WRONG))
    curriculum.observe(group_of(prompt_at(1), MIXED))
    curriculum.observe(group_of(prompt_at(2), RIGHT))
    curriculum.observe(group_of(prompt_at(3), (None, None)))
    assert [curriculum.should_skip(str(uid)) for uid in range(5)] == [True, False, True, False, False]
    assert not any(curriculum.should_skip(str(uid)) for uid in range(5))


def test_the_limits_of_a_curriculum_belong_to_its_range():
    curriculum = Curriculum(0.5, 0.5)
    curriculum.observe(group_of(prompt_at(0), MIXED))
    assert not curriculum.should_skip("0")


def toy(samplers: Callable[[], GroupFilterSettings], size: int = 3, rows: int = 7, **kwargs: Any) -> Run:
    """Rewards that depend on the place as well as on the row, over a dataset of a few rows."""
    order = PromptOrder(rows, seed=5)

    def rewards(position: int) -> Sequence[float]:
        return (MIXED, WRONG, RIGHT)[random.Random(position * 31 + order.row(position)).randrange(3)]

    return Run(rewards, samplers(), size, prompt_at=lambda position: prompt_at(order.row(position)), **kwargs)


@pytest.mark.parametrize(
    "samplers",
    [
        GroupFilterSettings,
        lambda: GroupFilterSettings(dynamic_sampling=DynamicSampling()),
        lambda: replace(0.6, max_sample_batches=-1),
        lambda: GroupFilterSettings(curriculum=Curriculum(0.2, 0.8)),
        lambda: GroupFilterSettings(dynamic_sampling=DynamicSampling(), curriculum=Curriculum(0.2, 0.8)),
    ],
)
@pytest.mark.parametrize("stopped_after", [1, 4, 7])
def test_a_resumed_run_gets_the_same_prompts_over_several_epochs(
    samplers: Callable[[], GroupFilterSettings], stopped_after: int
):
    straight, killed, resumed = toy(samplers), toy(samplers), toy(samplers)
    expected = straight.steps(0, 10)
    before = killed.steps(0, stopped_after)
    resumed.collector.load_state_dict(json.loads(json.dumps(killed.collector.state_dict())))
    assert before + resumed.steps(stopped_after, 10) == expected
    assert killed.begun + resumed.begun == straight.begun
    assert len(straight.begun) > 2 * 7, "several epochs"


@pytest.mark.fault("F37")
@pytest.mark.defect("curriculum-decided-twice")
@pytest.mark.parametrize("max_staleness", [1, 2])
@pytest.mark.parametrize("stopped_after", range(1, 9))
def test_a_resumed_run_leaves_out_what_was_left_out_ahead_of_the_step_it_stopped_at(
    stopped_after: int, max_staleness: int
):
    straight, killed, resumed = (
        toy(lambda: GroupFilterSettings(curriculum=Curriculum(0.2, 0.8)), max_staleness=max_staleness) for _ in range(3)
    )
    expected = straight.steps(0, 12)
    before = killed.steps(0, stopped_after)
    resumed.collector.load_state_dict(json.loads(json.dumps(killed.collector.state_dict())))
    first = resumed.steps(stopped_after, stopped_after + max_staleness)  # admitted before the run stopped
    assert before + first == expected[: stopped_after + max_staleness]


def test_a_curriculum_over_a_whole_run_draws_right_and_wrong_prompts_half_as_often():
    order = PromptOrder(6, seed=1)
    run = Run(
        lambda position: MIXED if order.row(position) < 3 else RIGHT,
        GroupFilterSettings(curriculum=Curriculum(0.0, 0.9)),
        size=3,
        prompt_at=lambda position: prompt_at(order.row(position)),
    )
    drawn = [uid for step in run.steps(0, 12) for uid in step]
    mixed, right = (sum(drawn.count(str(uid)) for uid in uids) for uids in (range(3), range(3, 6)))
    assert (mixed, right) == (24, 12)


def test_a_step_that_was_not_finished_leaves_no_trace_in_the_state():
    run = toy(
        lambda: GroupFilterSettings(
            dynamic_sampling=DynamicSampling(max_sample_batches=1), curriculum=Curriculum(0.2, 0.8)
        )
    )
    with pytest.raises(RolloutsFailed):
        run.steps(0, 1)
    assert len(run.begun) == 3
    assert run.collector.state_dict() == {"consumed": 0, "pass_rates": {}, "decided": []}
