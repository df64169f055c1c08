"""Collection of the groups of trajectories that each step trains on.

`RolloutCollector` starts rollouts of the data set's prompts in order, and `RolloutQueue` bounds their staleness.
`DynamicSampling` and `Curriculum` select groups that are useful for training, and `RewardShaping` adjusts rewards.

Adjustments only lower rewards, and lower the reward of a truncated response at least as much as that of a finished one.
A truncated response therefore never becomes better than a wrong answer, unless the environment rewards it more.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from typing import Any, Generic, TypeVar

from skyrl_train.config.schema import OverlongBufferConfig
from skyrl_train.data.messages import Prompt
from skyrl_train.data.trajectory import MIN_PASS_REWARD, OK, Trajectory, TrajectoryGroup
from skyrl_train.errors import RolloutsFailed, StaleRollout
from skyrl_train.metrics import Metrics
from skyrl_train.rollouts.conversation import FailureKind
from skyrl_train.rollouts.failures import count_failures, describe_first_failure

_log = logging.getLogger(__name__)
G = TypeVar("G")
Rollout = Callable[[Prompt, int], Awaitable[TrajectoryGroup]]
"""A coroutine that generates the group of a prompt, given its position in the run's order of prompts."""


@dataclass(frozen=True, slots=True)
class _CollectedGroup:
    position: int
    group: TrajectoryGroup
    is_useful: bool


class RolloutCollector:
    """Starts rollouts in the run's order of prompts, and returns their groups in the same order.

    Rollouts run ahead of training by at most `max_staleness_steps` steps. Without staleness all rollouts of a step
    start together, and so do the rollouts that replace dropped groups. Timing then affects neither which prompts are
    drawn nor which of them share a batch, except with `over_provisioning`.
    """

    def __init__(
        self,
        rollout: Rollout,
        prompt_at: Callable[[int], Prompt],
        num_prompts_in_step: Callable[[int], int],
        max_staleness_steps: int,
        max_failed_fraction: float,
        group_filters: GroupFilterSettings | None = None,
        num_parallel_generation_workers: int | None = None,
        env_try_overrides: Sequence[str] = (),
    ):
        """Create the collector; call `load_state_dict` to resume, and then `start`.

        Args:
            rollout: Generates and scores the group of a prompt.
            prompt_at: Returns the prompt at a position in the run's order.
            num_prompts_in_step: Returns the number of prompts of a 0-based step.
            max_staleness_steps: Number of steps that rollouts may run ahead of training.
            max_failed_fraction: Largest accepted fraction of failed trajectories per step.
            group_filters: The settings that select groups and shape rewards; None for the defaults.
            num_parallel_generation_workers: Maximum number of groups in flight; None if only the staleness limits it.
            env_try_overrides: Arguments that the commands in messages need besides environment and row.
        """
        self.rollout = rollout
        self._prompt_at = prompt_at
        self._num_prompts_in_step = num_prompts_in_step
        self._max_staleness_steps = max_staleness_steps
        self._max_failed_fraction = max_failed_fraction
        self._group_filters = group_filters or GroupFilterSettings()
        assert not (self._group_filters.over_provisioning and max_staleness_steps), (
            "over-provisioning requires max_staleness_steps=0"
        )
        self._num_parallel_generation_workers = num_parallel_generation_workers
        self._env_try_overrides = env_try_overrides
        self._queue: RolloutQueue[_CollectedGroup] = RolloutQueue()
        self._replaced_positions: set[int] = set()
        """Positions of dropped groups whose replacement has started, and that no step has drawn yet."""
        self._admitted = self._num_skipped = 0
        self._reported_failure_kinds: set[str] = set()
        """Failure kinds of which an example was logged."""
        self._pass_rates: dict[str, float] = {}
        self._saved_skip_decisions: list[tuple[int, bool]] = []
        """The curriculum's state and decisions at the end of the last step."""
        self._skip_decisions: dict[int, bool] = {}
        """Position -> True if the curriculum skipped it, for positions from `consumed` on. A decision is made once and
        saved, because after resuming the pass rates of other prompts could lead to a different one."""
        self.consumed = 0
        """Position in the run's order of prompts at which the next step begins."""

    @property
    def progress(self) -> tuple[int, int]:
        """(finished, total) number of groups that are in flight or wait to be drawn."""
        return len(self._queue) - self._queue.running, len(self._queue)

    def start(self, step: int) -> None:
        """Allow the rollouts of the first steps, from position `consumed` on.

        Args:
            step: The number of finished steps, whose weights the engines serve.
        """
        self._admitted = self.consumed
        self._queue.add_permits(
            sum(self._num_prompts_in_step(step + ahead) for ahead in range(self._max_staleness_steps + 1))
        )

    def on_weights_published(self, step: int) -> None:
        """Allow the rollouts of step + max_staleness_steps. Call it when the engines serve the weights of `step`.

        With staleness the rollouts start immediately, otherwise when `next_groups` needs them.
        """
        self._queue.add_permits(self._num_prompts_in_step(step + self._max_staleness_steps))
        if self._max_staleness_steps:
            self.admit()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as of the last finished step, from which a resumed run draws the same prompts.

        Its keys are "consumed" (position in the order of prompts), "pass_rates" (by uid) and "decided" (skip
        decisions).
        """
        return {"consumed": self.consumed, "pass_rates": self._pass_rates, "decided": self._saved_skip_decisions}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state of `state_dict`. Call it before `start`.

        Raises:
            KeyError: An entry is missing.
            TypeError: An entry has a wrong type.
            ValueError: The position is negative, or a number cannot be parsed.
        """
        self.consumed = int(state["consumed"])
        if self.consumed < 0:
            raise ValueError(f"consumed={self.consumed} is negative, but positions start at 0")
        self._pass_rates = {uid: float(rate) for uid, rate in state["pass_rates"].items()}
        self._saved_skip_decisions = [(int(position), bool(skipped)) for position, skipped in state["decided"]]
        if self._group_filters.curriculum is not None:
            self._group_filters.curriculum.load_state_dict(self._pass_rates)
            self._skip_decisions = dict(self._saved_skip_decisions)

    async def next_groups(self, step: int, metrics: Metrics) -> list[TrajectoryGroup]:
        """Wait for the groups of a step, starting rollouts as needed.

        Args:
            step: The 0-based step, which is also the version of the weights.
            metrics: Receives metrics about failures, dynamic sampling, curriculum and staleness.

        Returns:
            The groups in the run's order of prompts. With dynamic sampling a group may appear more than once.

        Raises:
            RolloutsFailed: More than `max_failed_fraction` of the trajectories failed, or dynamic sampling found too
                few useful groups within its limit.
            StaleRollout: A token is older than `max_staleness_steps`, which is a bug.
        """
        size, dynamic = self._num_prompts_in_step(step), self._group_filters.dynamic_sampling
        min_useful = size if dynamic is None else dynamic.min_useful_groups(size)
        drawn: list[_CollectedGroup] = []
        surplus: list[_CollectedGroup] = []
        useful: list[_CollectedGroup] = []
        useless: list[_CollectedGroup] = []
        while len(useful) < min_useful:
            # Release the permits of useless groups, unless that happened when their replacement started.
            self._queue.add_permits(sum(item.position not in self._replaced_positions for item in useless))
            self._replaced_positions -= {item.position for item in useless}
            self._check_draw_limit(step, drawn, useful)
            latest, latest_surplus = await self._draw(size - len(useful), metrics)
            drawn += latest
            surplus += latest_surplus
            useful += [item for item in latest if item.is_useful]
            useless = [item for item in latest if not item.is_useful]
            self._check_failures([*drawn, *surplus])
        groups = _replace_with_useful(useful, useless)
        self._count_failures([*drawn, *surplus], metrics)
        self._add_sampling_metrics(drawn, groups, metrics)
        if self._max_staleness_steps or self._num_parallel_generation_workers is not None:
            self._check_staleness(step, groups)
            self._add_staleness_metrics(step, groups, metrics)
        if self._group_filters.zero_variance_filter:
            zero_variance = [group for group in groups if not has_reward_variance(group)]
            for group in zero_variance:
                mask_group(group)
            metrics.count("sampling/masked", len(zero_variance))
        self._end_step(drawn, metrics)
        return groups

    def admit(self) -> None:
        """Start rollouts of the next prompts, as far as permits and `num_parallel_generation_workers` allow."""
        curriculum, max_running = self._group_filters.curriculum, self._num_parallel_generation_workers
        while self._queue.free_permits and (max_running is None or self._queue.running < max_running):
            position = self._admitted
            self._admitted += 1
            if curriculum is not None and self._should_skip(curriculum, position):
                self._num_skipped += 1
            else:
                self._queue.submit(partial(self._run_rollout, position)).add_done_callback(self._on_rollout_done)

    def _on_rollout_done(self, rollout: asyncio.Task[_CollectedGroup]) -> None:
        """Start the next rollout if their number is limited, except after a cancellation or an error."""
        if (
            self._num_parallel_generation_workers is not None
            and not rollout.cancelled()
            and rollout.exception() is None
        ):
            self.admit()

    def _should_skip(self, curriculum: Curriculum, position: int) -> bool:
        if position not in self._skip_decisions:
            self._skip_decisions[position] = curriculum.should_skip(self._prompt_at(position).uid)
        return self._skip_decisions[position]

    async def close(self) -> None:
        """Cancel all rollouts in progress and wait until they have ended."""
        await self._queue.close()

    async def _run_rollout(self, position: int) -> _CollectedGroup:
        group = self._group_filters.shaping(await self.rollout(self._prompt_at(position), position))
        collected = _CollectedGroup(
            position, group, self._group_filters.dynamic_sampling is None or has_distinct_outcomes(group)
        )
        if not collected.is_useful and self._should_replace_immediately():
            self._replaced_positions.add(position)
            self._queue.add_permits(1)
            self.admit()
        return collected

    def _should_replace_immediately(self) -> bool:
        """True if a useless group is replaced as soon as it is finished.

        Otherwise `next_groups` replaces all useless groups of a draw together. That is the case without staleness, and
        when more groups wait for replacement than a step may draw, because the step may still fail.
        """
        dynamic, size = self._group_filters.dynamic_sampling, self._num_prompts_in_step(0)
        if not self._max_staleness_steps or dynamic is None or not dynamic.drops_all_useless_groups:
            return False
        return dynamic.max_sample_batches < 0 or len(self._replaced_positions) < dynamic.max_sample_batches * size

    async def _draw(self, count: int, metrics: Metrics) -> tuple[list[_CollectedGroup], list[_CollectedGroup]]:
        """Return the next `count` groups in admission order, and the surplus groups that over-provisioning finished."""
        surplus: list[_CollectedGroup] = []
        extra = math.ceil(round(count * self._group_filters.over_provisioning, 6))
        self._queue.add_permits(extra)
        self.admit()
        if extra:
            drawn, surplus = await self._queue.pop_fastest(count, _is_trainable)
            metrics.count("sampling/cancelled", extra)
        else:
            drawn = []
            while len(drawn) < count:
                self.admit()
                oldest = await self._queue.pop_oldest()
                assert oldest is not None, "a step needs no more groups than it has permits"
                drawn.append(oldest)
        if self._group_filters.curriculum is not None:
            for item in drawn:
                self._group_filters.curriculum.observe(item.group)
        return drawn, surplus

    def _check_draw_limit(self, step: int, drawn: list[_CollectedGroup], useful: list[_CollectedGroup]) -> None:
        """Raise RolloutsFailed if dynamic sampling must not draw more groups for the step."""
        dynamic, size = self._group_filters.dynamic_sampling, self._num_prompts_in_step(step)
        if dynamic is None or dynamic.max_sample_batches < 0:
            return
        if len(drawn) >= dynamic.max_sample_batches * size:
            raise RolloutsFailed(
                f"Step {step + 1} found {len(useful)} groups with different rewards among {len(drawn)} prompts, but "
                f"needs {dynamic.min_useful_groups(size)} of {size}. No more prompts may be drawn because of "
                f"trainer.algorithm.dynamic_sampling.max_sample_batches={dynamic.max_sample_batches}. Use prompts that "
                "are neither too hard nor too easy, raise generator.n_samples_per_prompt or max_sample_batches (-1 for "
                f"no limit), or set {dynamic.disable_hint}.",
                [collected.group for collected in drawn],
            )

    def _check_failures(self, drawn: list[_CollectedGroup]) -> None:
        trajectories = _items(drawn)
        failures = count_failures(trajectories)
        if trajectories and failures.total() > self._max_failed_fraction * len(trajectories):
            counts = ", ".join(f"{kind} x {number}" for kind, number in failures.most_common())
            first = describe_first_failure(failures.most_common(1)[0][0], trajectories, self._env_try_overrides)
            raise RolloutsFailed(
                f"{failures.total()} of {len(trajectories)} trajectories of this step failed ({counts}), more than "
                f"trainer.max_failed_fraction={self._max_failed_fraction:g} allows. Nothing was trained on them. "
                f"Fix the environment or engine named below, or raise the fraction. {first}",
                [collected.group for collected in drawn],
            )

    def _check_staleness(self, step: int, groups: list[TrajectoryGroup]) -> None:
        """Raise StaleRollout if a token is older than the order of admission guarantees."""
        for item in (item for group in groups for item in group.trajectories if item.status == OK):
            if item.sampled_turns and step - item.min_version > self._max_staleness_steps:
                raise StaleRollout(
                    f"step {step + 1} received a token of prompt {item.prompt.uid} that weights of version "
                    f"{item.min_version} sampled. It is {step - item.min_version} steps old, but at most "
                    f"{self._max_staleness_steps} are allowed. This is a bug: please report it."
                )

    def _count_failures(self, finished: list[_CollectedGroup], metrics: Metrics) -> None:
        """Add the metrics rollouts/failed*, and log an example of each failure kind once."""
        trajectories = _items(finished)
        failures, total = count_failures(trajectories), len(trajectories)
        metrics.count("rollouts/failed", failures.total())
        for kind, number in failures.items():
            metrics.count(f"rollouts/failed/{kind}", number)
            if kind not in self._reported_failure_kinds and kind != FailureKind.DEADLINE:
                self._reported_failure_kinds.add(kind)
                failed = f"{number} of {total} episodes of this step failed and are masked"
                example = describe_first_failure(kind, trajectories, self._env_try_overrides)
                _log.warning("%s. %s", failed, example)
        if failures[FailureKind.DEADLINE]:
            _log.warning(
                "%d of %d episodes exceeded trainer.timeouts.rollout_s and are masked, so the model is not trained on "
                "long answers. Raise it, or lower generator.sampling_params.max_generate_length.",
                failures[FailureKind.DEADLINE],
                total,
            )

    def _add_sampling_metrics(
        self, drawn: list[_CollectedGroup], groups: list[TrajectoryGroup], metrics: Metrics
    ) -> None:
        """Add metrics of the drawn, dropped and repeated groups if dynamic sampling is on."""
        if self._group_filters.dynamic_sampling is None:
            return
        used = {id(group) for group in groups}
        dropped = [item.group for item in drawn if id(item.group) not in used]
        metrics.count("sampling/drawn", len(drawn))
        metrics.count("sampling/dropped", len(dropped))
        metrics.count("sampling/repeated", len(groups) - len(used))
        for group in dropped:  # the step does not train on them, but their tokens were sampled
            metrics.count("rollouts/trajectories", len(group.trajectories))
            metrics.count("rollouts/tokens", sum(item.sampled_tokens for item in group.trajectories))
        for collected in drawn:
            for item in collected.group.trajectories:
                if item.status == OK:
                    metrics.add("reward/mean_drawn", item.reward)

    def _add_staleness_metrics(self, step: int, groups: list[TrajectoryGroup], metrics: Metrics) -> None:
        """Add async/staleness_* over tokens, and the number of rollouts in flight and of finished ones in the queue."""
        items = [item for group in groups for item in group.trajectories if item.status == OK]
        turns = [turn for item in items for turn in item.sampled_turns]
        if turns:
            metrics.add("async/staleness_min", step - max(turn.max_version for turn in turns))
            metrics.update_max("async/staleness_max", step - min(turn.min_version for turn in turns))
        for turn in turns:
            metrics.add("async/staleness_mean", step - turn.mean_version, turn.stop - turn.start)
        metrics.count("async/in_flight", self._queue.running)
        metrics.count("async/queue", len(self._queue) - self._queue.running)

    def _end_step(self, drawn: list[_CollectedGroup], metrics: Metrics) -> None:
        """Update the state that a checkpoint of this step saves."""
        self.consumed = drawn[-1].position + 1 if len(self._queue) else self._admitted
        if self._group_filters.curriculum is not None:
            self._pass_rates = self._group_filters.curriculum.state_dict()
            self._skip_decisions = {
                position: skipped for position, skipped in self._skip_decisions.items() if position >= self.consumed
            }
            self._saved_skip_decisions = sorted(self._skip_decisions.items())
            metrics.count("sampling/curriculum_skipped", self._num_skipped)
            self._num_skipped = 0


# -- rollouts in progress ----------------------------------------------------------------------------------------------


class RolloutQueue(Generic[G]):
    """The rollouts in progress, in admission order, with a bound on their staleness.

    Each rollout needs a permit. The permits of step j are added when the engines serve the weights of step
    j - max_staleness_steps, and groups are taken in admission order. So the rollouts that step j trains on started with
    weights that are at most `max_staleness_steps` versions old. If groups were taken in completion order, a slow group
    could become arbitrarily old. A dropped group returns its permit; the groups behind it move up, and none gets older.
    """

    def __init__(self) -> None:
        self._pending: deque[asyncio.Task[G]] = deque()
        self.free_permits = 0
        """Number of rollouts that may be started now."""
        self.running = 0
        """Number of started rollouts that have not ended."""

    def __len__(self) -> int:
        """Number of rollouts that were started and not taken yet."""
        return len(self._pending)

    def add_permits(self, count: int) -> None:
        """Allow `count` more rollouts: those of a later step, or replacements of dropped groups."""
        self.free_permits += count

    def submit(self, rollout: Callable[[], Awaitable[G]]) -> asyncio.Task[G]:
        """Start a rollout as a task, using one permit, and return the task. Call this only if a permit is free."""
        assert self.free_permits > 0, "a rollout without a permit would exceed the staleness bound"
        self.free_permits -= 1

        async def run() -> G:
            try:
                return await rollout()
            finally:  # a callback of the task would run too late: others may already have seen that it is done
                self.running -= 1

        self.running += 1
        task = asyncio.create_task(run())
        self._pending.append(task)
        return task

    async def pop_oldest(self) -> G | None:
        """Wait for the oldest rollout and return its group; None if the queue is empty. Raises the rollout's error."""
        if not self._pending:
            return None
        group = await self._pending[0]
        self._pending.popleft()
        return group

    async def pop_fastest(self, count: int, finished: Callable[[G], bool]) -> tuple[list[G], list[G]]:
        """Wait until `count` rollouts have finished, and cancel the others.

        On return all rollouts have ended and the queue is empty.

        Args:
            count: Number of groups to take.
            finished: True for a group that counts. Other groups, which failed, are taken only if too few count.

        Returns:
            The groups that were taken, in admission order, and the other groups that were complete.

        Raises:
            Exception: The error of a rollout.
        """
        waiting = set(self._pending)
        done: list[asyncio.Task[G]] = []
        while waiting and sum(finished(task.result()) for task in done) < count:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            done = [task for task in self._pending if task.done()]
            waiting = set(self._pending) - set(done)
        chosen = set(sorted(done, key=lambda task: not finished(task.result()))[:count])
        taken = [task.result() for task in self._pending if task in chosen]
        others = [task.result() for task in done if task not in chosen]
        await self.close()
        return taken, others

    async def close(self) -> None:
        """Cancel all rollouts in progress and wait until they have ended."""
        while self._pending:  # a rollout that ends during the wait may start another one
            tasks = list(self._pending)
            self._pending.clear()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self.running = 0  # tasks that were canceled before they ran did not decrement it


def _is_trainable(collected: _CollectedGroup) -> bool:
    return any(item.status == OK for item in collected.group.trajectories)


def _items(groups: Iterable[_CollectedGroup]) -> list[Trajectory]:
    return [item for collected in groups for item in collected.group.trajectories]


def _replace_with_useful(useful: list[_CollectedGroup], useless: list[_CollectedGroup]) -> list[TrajectoryGroup]:
    """Return the groups in admission order, with useful groups repeated in turn in place of useless ones."""
    replacements = cycle(useful)
    ordered = sorted([*useful, *useless], key=lambda item: item.position)
    return [(item if item.is_useful else next(replacements)).group for item in ordered]


# -- selection of groups -----------------------------------------------------------------------------------------------


def has_distinct_outcomes(group: TrajectoryGroup) -> bool:
    """True if the outcomes of the successful samples differ (DAPO, arXiv:2503.14476, eq. 11).

    Outcomes exclude length penalties: a group without a correct answer would only teach the model to be short.
    """
    outcomes = {item.outcome for item in group.trajectories if item.status == OK}
    return len(outcomes) > 1


def has_reward_variance(group: TrajectoryGroup) -> bool:
    """True if the rewards of the successful samples differ, including penalties."""
    return len({item.reward for item in group.trajectories if item.status == OK}) > 1


@dataclass(frozen=True)
class DynamicSampling:
    """The settings of trainer.algorithm.dynamic_sampling: a step draws groups until enough of them are useful.

    A group is useful if its samples have distinct outcomes. Type `filter` has `min_replace_ratio` 1: all groups of a
    step must be useful. Type `replace` needs fewer, and repeats useful groups in place of the others.
    """

    min_replace_ratio: float = 1.0
    """Fraction of a step's groups that must be useful."""
    max_sample_batches: int = -1
    """A step may draw at most this many times its number of prompts; -1 for no limit."""
    disable_hint: str = "trainer.algorithm.dynamic_sampling.type=null"
    """The setting that disables dynamic sampling, for an error message."""

    def min_useful_groups(self, size: int) -> int:
        """Return the number of useful groups that a step of `size` groups needs: the ratio rounded up, but at least 1.

        An empty step needs 0.
        """
        return max(1, math.ceil(round(self.min_replace_ratio * size, 6))) if size else 0

    @property
    def drops_all_useless_groups(self) -> bool:
        """True if every useless group is dropped, independently of the other groups of the step."""
        return self.min_replace_ratio >= 1


class Curriculum:
    """The curriculum of data.curriculum, which skips a prompt once if it was too hard or too easy the last time."""

    def __init__(self, min_pass_rate: float, max_pass_rate: float):
        """Create a curriculum without observations, which skips nothing.

        Args:
            min_pass_rate: Prompts with a lower pass rate are skipped once.
            max_pass_rate: Prompts with a higher pass rate are skipped once.
        """
        self._min = min_pass_rate
        self._max = max_pass_rate
        self._rates: dict[str, float] = {}
        """uid -> pass rate when the prompt was last drawn; absent if the prompt was skipped since then."""

    def observe(self, group: TrajectoryGroup) -> None:
        """Record the pass rate of the group's successful samples, if there are any."""
        passed = [item.outcome >= MIN_PASS_REWARD for item in group.trajectories if item.status == OK]
        if passed:
            self._rates[group.prompt.uid] = sum(passed) / len(passed)

    def should_skip(self, uid: str) -> bool:
        """True if the prompt's recorded pass rate is out of bounds.

        Then forget the rate, so that the prompt is skipped only once.

        A prompt without a recorded rate is not skipped.
        """
        if self._min <= self._rates.get(uid, self._min) <= self._max:
            return False
        del self._rates[uid]
        return True

    def state_dict(self) -> dict[str, float]:
        """Return the recorded pass rates by uid."""
        return dict(self._rates)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Replace the recorded pass rates by those of `state_dict`."""
        self._rates = dict(state)


# -- rewards -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RewardShaping:
    """The adjustments of rewards and loss masks that are applied to training groups, but not in evaluation.

    They are applied in this order: `apply_zero_reward_on_non_stop`, `apply_overlong_penalty`,
    `apply_overlong_filtering_mask`.
    """

    zero_reward_on_non_stop: bool = False
    """True to apply `apply_zero_reward_on_non_stop`."""
    apply_overlong_filtering: bool = False
    """True to apply `apply_overlong_filtering_mask`."""
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)
    """Settings of `apply_overlong_penalty`, which is off if `overlong_buffer.len` is 0."""
    max_generate_length: int = 1
    """Maximum number of tokens of a turn."""

    def __call__(self, group: TrajectoryGroup) -> TrajectoryGroup:
        """Apply the enabled adjustments to a group in place, and return it."""
        valid = [item for item in group.trajectories if item.status == OK]
        if self.zero_reward_on_non_stop:
            apply_zero_reward_on_non_stop(valid)
        if self.overlong_buffer.len:
            for item in valid:
                apply_overlong_penalty(item, self.max_generate_length, self.overlong_buffer)
        if self.apply_overlong_filtering:
            apply_overlong_filtering_mask(valid)
        return group


@dataclass(frozen=True)
class GroupFilterSettings:
    """The settings that select the rollouts that a step trains on; all are off by default."""

    shaping: RewardShaping = field(default_factory=RewardShaping)
    dynamic_sampling: DynamicSampling | None = None
    zero_variance_filter: bool = False
    """True to exclude groups with equal rewards from the loss."""
    over_provisioning: float = 0.0
    """Number of extra rollouts as a fraction of those that a step needs. Requires max_staleness_steps=0."""
    curriculum: Curriculum | None = None


def apply_zero_reward_on_non_stop(valid: Sequence[Trajectory]) -> None:
    """Lower the reward of responses whose stop reason is not "stop" to 0 or less, in place.

    The reward becomes the minimum of 0, the response's own reward and the rewards of the group's finished responses. If
    wrong answers get -1, a reward of 0 would teach the model not to finish. The last turn receives the difference.

    Args:
        valid: The successful trajectories of a group.
    """
    worst = min((item.reward for item in valid if item.stop_reason == "stop"), default=0.0)
    for item in valid:
        if item.stop_reason != "stop":
            reward = min(item.reward, 0.0, worst)
            if item.turns:
                last = item.turns[-1]
                item.turns[-1] = replace(last, reward=last.reward + (reward - item.reward))
            item.reward = reward


def overlong_penalty(length: int, max_generate_length: int, overlong_buffer: OverlongBufferConfig) -> float:
    """Return the penalty of soft overlong punishment (DAPO, arXiv:2503.14476, eq. 13).

    Args:
        length: Number of tokens of the response.
        max_generate_length: The maximum number of tokens.
        overlong_buffer: The settings `len`, which is above 0, and `penalty_factor`.

    Returns:
        The amount to subtract from the reward: 0 up to a length of max_generate_length - len, then linearly increasing
        to `penalty_factor` at max_generate_length, and `penalty_factor` beyond.
    """
    over = max(length - (max_generate_length - overlong_buffer.len), 0)
    return overlong_buffer.penalty_factor * min(over / overlong_buffer.len, 1.0)


def apply_overlong_penalty(item: Trajectory, max_generate_length: int, overlong_buffer: OverlongBufferConfig) -> None:
    """Subtract the overlong penalty of the longest turn from the reward of that turn and of the trajectory, in place.

    A turn that was truncated for any reason gets the full penalty. Stores the original reward in `raw_reward`.

    Args:
        item: The trajectory.
        max_generate_length: The maximum number of tokens of a turn.
        overlong_buffer: The settings of the penalty.
    """
    item.raw_reward = item.reward
    lengths = [max_generate_length if turn.stop_reason == "length" else turn.stop - turn.start for turn in item.turns]
    if lengths:
        longest = lengths.index(max(lengths))
        penalty = overlong_penalty(lengths[longest], max_generate_length, overlong_buffer)
        turn = item.turns[longest]
        item.turns[longest] = replace(turn, reward=turn.reward - penalty)
        item.reward -= penalty


def apply_overlong_filtering_mask(valid: Sequence[Trajectory]) -> None:
    """Exclude truncated responses from the loss (overlong filtering; DAPO, arXiv:2503.14476, section 3.4), in place.

    Their rewards still count in the statistics of their group, so they affect the advantages of the other responses.

    Args:
        valid: The successful trajectories of a group.
    """
    for item in valid:
        if item.stop_reason == "length":
            item.loss_spans = []


def mask_group(group: TrajectoryGroup) -> None:
    """Exclude all responses of the group from the loss, in place. Rewards and statuses do not change."""
    for item in group.trajectories:
        item.loss_spans = []
