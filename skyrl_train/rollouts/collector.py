"""Turns the data set's prompts, in order, into groups of trajectories to train on.

`RolloutCollector` draws them, `RolloutQueue` bounds how old they may be. The rest decides which of them are worth
training on (`DynamicSampling`, `Curriculum`) and how their rewards are adjusted (`RewardShaping`).

Rewards are only ever lowered, and a response cut by length is never lowered by less than one that ended by itself. So
it is not worth more than a wrong answer, unless the environment itself rewards it so.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from typing import Any, Generic, TypeVar

from skyrl_train.config.schema import OverlongBufferConfig
from skyrl_train.data.messages import Prompt
from skyrl_train.data.trajectory import FAILED, MIN_PASS_REWARD, OK, Trajectory, TrajectoryGroup
from skyrl_train.errors import RolloutsFailed, StaleRollout
from skyrl_train.metrics import Metrics
from skyrl_train.rollouts.conversation import DEADLINE_KIND
from skyrl_train.terminal import escape_control_chars

_NOT_THE_ENVIRONMENT = frozenset(
    {DEADLINE_KIND, "engine", "prompt_too_long", "history_rewritten", "chat_template", None}
)
"""Ways of failing that trying the environment would not show."""
_log = logging.getLogger(__name__)
G = TypeVar("G")
Rollout = Callable[[Prompt, int], Awaitable[TrajectoryGroup]]
"""(prompt, position in the run's order of prompts) -> the prompt's group."""


@dataclass(frozen=True, slots=True)
class _CollectedGroup:
    position: int
    group: TrajectoryGroup
    useful: bool


class RolloutCollector:
    """Admits prompts in the run's order, as far ahead as `max_staleness_steps` allows; returns groups in that order.

    Without staleness all rollouts of a step begin at once, and so do the rollouts that replace dropped ones. So timing
    does not affect which prompts are drawn, nor which of them share a batch (except with `over_provisioning`).
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
    ):
        """`num_parallel_generation_workers`: maximum number of groups in flight; None for no other bound than slots."""
        self.rollout = rollout
        self._prompt_at = prompt_at
        self._num_prompts_in_step = num_prompts_in_step
        self._max_staleness_steps = max_staleness_steps
        self._max_failed_fraction = max_failed_fraction
        self._group_filters = group_filters or GroupFilterSettings()
        assert not (self._group_filters.over_provisioning and max_staleness_steps), (
            "cutting the slow ones is synchronous"
        )
        self._num_parallel_generation_workers = num_parallel_generation_workers
        self._queue: RolloutQueue[_CollectedGroup] = RolloutQueue()
        self._replaced_positions: set[int] = set()
        """Positions of groups that were dropped, and replaced at once, and that no step has drawn yet."""
        self._admitted = self._num_skipped = 0
        self._reported_failure_kinds: set[str] = set()
        """The ways of failing that an example was shown of."""
        self._pass_rates: dict[str, float] = {}
        self._saved_skip_decisions: list[tuple[int, bool]] = []
        """The curriculum's state and decisions at the end of the last step."""
        self._skip_decisions: dict[int, bool] = {}
        """Position -> whether the curriculum left it out, of those admitted since `consumed`: decided once, even if the
        run is resumed in between, as what is learnt of other prompts meanwhile would decide otherwise."""
        self.consumed = 0
        """Position in the run's order at which the step after the last finished one begins."""

    @property
    def progress(self) -> tuple[int, int]:
        """How many of the groups under way, and of those that wait to be drawn, are sampled; and how many there are."""
        return len(self._queue) - self._queue.running, len(self._queue)

    def start(self, step: int) -> None:
        """Begin at `step`, whose weights are live; prompts continue from position `consumed`."""
        self._admitted = self.consumed
        self._queue.add_permits(
            sum(self._num_prompts_in_step(step + ahead) for ahead in range(self._max_staleness_steps + 1))
        )

    def on_weights_published(self, step: int) -> None:
        """To be called when the weights of `step` are live: rollouts for step + max_staleness_steps may then begin.

        They do at once if they may run ahead; without staleness only when they are asked for.
        """
        self._queue.add_permits(self._num_prompts_in_step(step + self._max_staleness_steps))
        if self._max_staleness_steps:
            self.admit()

    def state_dict(self) -> dict[str, Any]:
        """State from which a resumed run draws the same prompts, as of the last finished step."""
        return {"consumed": self.consumed, "pass_rates": self._pass_rates, "decided": self._saved_skip_decisions}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.consumed = int(state["consumed"])
        if self.consumed < 0:
            raise ValueError(f"consumed={self.consumed}, which is before the first prompt")
        self._pass_rates = {uid: float(rate) for uid, rate in state["pass_rates"].items()}
        self._saved_skip_decisions = [(int(position), bool(left_out)) for position, left_out in state["decided"]]
        if self._group_filters.curriculum is not None:
            self._group_filters.curriculum.load_state_dict(self._pass_rates)
            self._skip_decisions = dict(self._saved_skip_decisions)

    async def next_groups(self, step: int, metrics: Metrics) -> list[TrajectoryGroup]:
        """The groups of `step`, in admission order.

        Raises RolloutsFailed if more than `max_failed_fraction` of the trajectories drawn failed, or if dynamic
        sampling found too few useful groups within its bound.
        """
        size, dynamic = self._num_prompts_in_step(step), self._group_filters.dynamic_sampling
        least = size if dynamic is None else dynamic.min_useful_groups(size)
        drawn: list[_CollectedGroup] = []
        surplus: list[_CollectedGroup] = []
        useful: list[_CollectedGroup] = []
        others: list[_CollectedGroup] = []
        while len(useful) < least:
            # The slots of dropped groups become free, unless that happened when they were dropped.
            self._queue.add_permits(sum(one.position not in self._replaced_positions for one in others))
            self._replaced_positions -= {one.position for one in others}
            self._check_bound(step, drawn, useful)
            latest, too_many = await self._draw(size - len(useful), metrics)
            drawn += latest
            surplus += too_many
            useful += [one for one in latest if one.useful]
            others = [one for one in latest if not one.useful]
            self._check_failures([*drawn, *surplus])
        groups = _replace_with_useful(useful, others)
        self._count_failures([*drawn, *surplus], metrics)
        self._add_sampling_metrics(drawn, groups, metrics)
        if self._max_staleness_steps or self._num_parallel_generation_workers is not None:
            self._check_staleness(step, groups)
            self._add_staleness_metrics(step, groups, metrics)
        if self._group_filters.zero_variance_filter:
            equal = [group for group in groups if not has_reward_variance(group)]
            for group in equal:
                mask_group(group)
            metrics.count("sampling/masked", len(equal))
        self._end_step(drawn, metrics)
        return groups

    def admit(self) -> None:
        """Begin a rollout in every free slot."""
        curriculum, most = self._group_filters.curriculum, self._num_parallel_generation_workers
        while self._queue.free_permits and (most is None or self._queue.running < most):
            position = self._admitted
            self._admitted += 1
            if curriculum is not None and self._should_skip(curriculum, position):
                self._num_skipped += 1
            else:
                self._queue.submit(partial(self._run_rollout, position)).add_done_callback(self._on_rollout_done)

    def _on_rollout_done(self, rollout: asyncio.Task[_CollectedGroup]) -> None:
        """Begin another one where their number is bounded; not if they are being cancelled, or the run ends."""
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
        await self._queue.close()

    async def _run_rollout(self, position: int) -> _CollectedGroup:
        group = self._group_filters.shaping(await self.rollout(self._prompt_at(position), position))
        one = _CollectedGroup(
            position, group, self._group_filters.dynamic_sampling is None or has_distinct_outcomes(group)
        )
        if not one.useful and self._should_replace_at_once():
            self._replaced_positions.add(position)
            self._queue.add_permits(1)
            self.admit()
        return one

    def _should_replace_at_once(self) -> bool:
        """Whether a dropped group is replaced at once; without staleness all dropped ones are replaced at a time, and
        so are those beyond what a step may draw: nobody knows yet whether it is all in vain."""
        dynamic, size = self._group_filters.dynamic_sampling, self._num_prompts_in_step(0)
        if not self._max_staleness_steps or dynamic is None or not dynamic.drops_all_useless_groups:
            return False
        return dynamic.max_sample_batches < 0 or len(self._replaced_positions) < dynamic.max_sample_batches * size

    async def _draw(self, count: int, metrics: Metrics) -> tuple[list[_CollectedGroup], list[_CollectedGroup]]:
        """The next `count` groups, in admission order, and the surplus groups that over-provisioning completed."""
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
                one = await self._queue.pop_oldest()
                assert one is not None, "a step asks for no more groups than it has slots"
                drawn.append(one)
        if self._group_filters.curriculum is not None:
            for one in drawn:
                self._group_filters.curriculum.observe(one.group)
        return drawn, surplus

    def _check_bound(self, step: int, drawn: list[_CollectedGroup], useful: list[_CollectedGroup]) -> None:
        """Raises RolloutsFailed if dynamic sampling may not draw any more groups."""
        dynamic, size = self._group_filters.dynamic_sampling, self._num_prompts_in_step(step)
        if dynamic is None or dynamic.max_sample_batches < 0:
            return
        if len(drawn) >= dynamic.max_sample_batches * size:
            raise RolloutsFailed(
                f"Step {step + 1} found {len(useful)} groups with different rewards among {len(drawn)} prompts, and "
                f"needs {dynamic.min_useful_groups(size)} of {size}: trainer.algorithm.dynamic_sampling.max_sample_batches="
                f"{dynamic.max_sample_batches} allows no more. Give it prompts that are neither too hard nor too easy, "
                f"raise generator.n_samples_per_prompt or the bound (-1 has none), or set {dynamic.disable_hint}."
            )

    def _check_failures(self, drawn: list[_CollectedGroup]) -> None:
        trajectories = [item for one in drawn for item in one.group.trajectories]
        errors = _errors(drawn)
        if trajectories and errors.total() > self._max_failed_fraction * len(trajectories):
            counts = ", ".join(f"{kind} x {number}" for kind, number in errors.most_common())
            first = _first_of(errors.most_common(1)[0][0], drawn)
            raise RolloutsFailed(
                f"{errors.total()} of {len(trajectories)} trajectories of this step failed ({counts}), more than "
                f"trainer.max_failed_fraction={self._max_failed_fraction:g} allows. Nothing was trained on them. "
                f"Mend the environment or engine named, or raise the fraction. {_describe_failure(first)}"
            )

    def _check_staleness(self, step: int, groups: list[TrajectoryGroup]) -> None:
        """What admission promises, of every token. Raises StaleRollout."""
        for item in (item for group in groups for item in group.trajectories if item.status == OK):
            if item.sampled_turns and step - item.min_version > self._max_staleness_steps:
                raise StaleRollout(
                    f"step {step + 1} was given a token of prompt {item.prompt.uid} that weights of version "
                    f"{item.min_version} sampled, {step - item.min_version} steps old: the bound is "
                    f"{self._max_staleness_steps}. This is a bug: please report it."
                )

    def _count_failures(self, seen: list[_CollectedGroup], metrics: Metrics) -> None:
        """Add rollouts/failed*, over all completed groups."""
        errors = _errors(seen)
        metrics.count("rollouts/failed", errors.total())
        total = sum(len(one.group.trajectories) for one in seen)
        for kind, number in errors.items():
            metrics.count(f"rollouts/failed/{kind}", number)
            if kind not in self._reported_failure_kinds and kind != DEADLINE_KIND:
                self._reported_failure_kinds.add(kind)
                failed = f"{number} of {total} episodes of this step failed and are masked"
                _log.warning("%s. %s", failed, _describe_failure(_first_of(kind, seen)))
        if errors[DEADLINE_KIND]:
            _log.warning(
                "%d of %d episodes were cut after trainer.timeouts.rollout_s and are masked: what is learnt lacks long "
                "answers. Raise it, or lower sampling_params.max_generate_length.",
                errors[DEADLINE_KIND],
                total,
            )

    def _add_sampling_metrics(
        self, drawn: list[_CollectedGroup], groups: list[TrajectoryGroup], metrics: Metrics
    ) -> None:
        """With dynamic sampling, add metrics of the groups drawn, dropped and repeated."""
        if self._group_filters.dynamic_sampling is None:
            return
        kept = {id(group) for group in groups}
        dropped = [one.group for one in drawn if id(one.group) not in kept]
        metrics.count("sampling/drawn", len(drawn))
        metrics.count("sampling/dropped", len(dropped))
        metrics.count("sampling/repeated", len(groups) - len(kept))
        for group in dropped:  # sampled all the same
            metrics.count("rollouts/trajectories", len(group.trajectories))
            metrics.count("rollouts/tokens", sum(item.sampled_tokens for item in group.trajectories))
        for one in drawn:
            for item in one.group.trajectories:
                if item.status == OK:
                    metrics.add("reward/mean_drawn", item.reward)

    def _add_staleness_metrics(self, step: int, groups: list[TrajectoryGroup], metrics: Metrics) -> None:
        """Add async/staleness_*, over tokens, and the rollouts that are under way (in_flight) or wait to be used."""
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
        """Note the position at which the next step begins."""
        self.consumed = drawn[-1].position + 1 if len(self._queue) else self._admitted
        if self._group_filters.curriculum is not None:
            self._pass_rates = self._group_filters.curriculum.state_dict()
            self._skip_decisions = {at: out for at, out in self._skip_decisions.items() if at >= self.consumed}
            self._saved_skip_decisions = sorted(self._skip_decisions.items())
            metrics.count("sampling/curriculum_skipped", self._num_skipped)
            self._num_skipped = 0


# -- rollouts under way ------------------------------------------------------------------------------------------------


class RolloutQueue(Generic[G]):
    """The rollouts in progress, in admission order, with a bound on their staleness.

    A rollout needs a granted slot. The slots of step j are granted when the weights of step j - max_staleness_steps are
    live, and groups are taken in admission order. So the rollouts that step j trains on were begun with weights at most
    `max_staleness_steps` versions old, by construction. If groups were taken in completion order, one slow group could
    age without bound. A dropped group gives its slot back: the groups behind it move up, and none of them gets older.

    consumes: granted slots · produces: groups · waits for: the oldest rollout · unblocked by: its deadline
    """

    def __init__(self) -> None:
        self._pending: deque[asyncio.Task[G]] = deque()
        self.free_permits = 0
        """The number of rollouts that may be admitted now."""
        self.running = 0
        """The number of admitted rollouts that have not ended."""

    def __len__(self) -> int:
        """The number of rollouts admitted and not yet taken."""
        return len(self._pending)

    def add_permits(self, count: int) -> None:
        """Allow `slots` more rollouts to begin: slots of a later step, or of groups that were dropped."""
        self.free_permits += count

    def submit(self, rollout: Callable[[], Awaitable[G]]) -> asyncio.Task[G]:
        """Begin a rollout in a free slot."""
        assert self.free_permits > 0, "a rollout without a granted slot would break the staleness bound"
        self.free_permits -= 1

        async def run() -> G:
            try:
                return await rollout()
            finally:  # not in a callback of the task: those run after others may have seen that it is done
                self.running -= 1

        self.running += 1
        task = asyncio.create_task(run())
        self._pending.append(task)
        return task

    async def pop_oldest(self) -> G | None:
        """Wait for the oldest rollout and return its group; None if no rollout is in progress."""
        if not self._pending:
            return None
        group = await self._pending[0]
        self._pending.popleft()
        return group

    async def pop_fastest(self, count: int, finished: Callable[[G], bool]) -> tuple[list[G], list[G]]:
        """Returns the first `count` groups to complete, in admission order, and the completed groups not among them.

        All other rollouts are cancelled and have ended on return. A group for which `finished` is false (it failed) is
        taken only if too few others are left. The caller needs the groups not taken to count their failures.
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
        while self._pending:  # one that ends meanwhile by itself may be followed by another
            tasks = list(self._pending)
            self._pending.clear()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self.running = 0  # those that were cancelled before their first line have not counted themselves


def _is_trainable(one: _CollectedGroup) -> bool:
    return any(item.status == OK for item in one.group.trajectories)


def _errors(drawn: list[_CollectedGroup]) -> Counter[str]:
    """Failed trajectories by kind."""
    items = [item for one in drawn for item in one.group.trajectories]
    return Counter(item.error or "unknown" for item in items if item.status == FAILED)


def _first_of(kind: str, drawn: list[_CollectedGroup]) -> Trajectory:
    """The first trajectory that failed in this way."""
    items = (item for one in drawn for item in one.group.trajectories)
    return next(item for item in items if item.status == FAILED and (item.error or "unknown") == kind)


def _describe_failure(item: Trajectory) -> str:
    """What went wrong in an episode, in which row, and how to see it again if its environment did."""
    prompt, what = item.prompt, f"{item.error}: {item.detail}" if item.detail else str(item.error)
    said = f"{escape_control_chars(what)} (row {prompt.uid}, environment {prompt.env_class})"
    if item.error in _NOT_THE_ENVIRONMENT:
        return f"{said}."
    return f"{said}. Try it: `skyrl-train env try {prompt.env_class} --data FILE --row {prompt.uid}`."


def _replace_with_useful(useful: list[_CollectedGroup], others: list[_CollectedGroup]) -> list[TrajectoryGroup]:
    """The groups in admission order, with useful groups repeated in turn in place of the others."""
    repeated = cycle(useful)
    places = sorted([*useful, *others], key=lambda one: one.position)
    return [(one if one.useful else next(repeated)).group for one in places]


# -- what is worth training on -----------------------------------------------------------------------------------------


def has_distinct_outcomes(group: TrajectoryGroup) -> bool:
    """Whether the outcomes of its samples differ (DAPO, arXiv:2503.14476, eq. 11).

    Penalties for length do not count: a group without a correct answer would only teach the model to be short.
    """
    outcomes = {item.outcome for item in group.trajectories if item.status == OK}
    return len(outcomes) > 1


def has_reward_variance(group: TrajectoryGroup) -> bool:
    """Whether the rewards used in training differ, penalties included."""
    return len({item.reward for item in group.trajectories if item.status == OK}) > 1


@dataclass(frozen=True)
class DynamicSampling:
    """`trainer.algorithm.dynamic_sampling`: draw groups until enough of a step's groups are useful.

    Type `filter` corresponds to a fraction of 1: all must be useful. Type `replace` needs fewer, and repeats useful
    groups in place of the others.
    """

    min_replace_ratio: float = 1.0
    max_sample_batches: int = -1
    """A step may draw at most this many times its size; -1 is no bound."""
    disable_hint: str = "trainer.algorithm.dynamic_sampling.type=null"
    """What turns it off, for an error."""

    def min_useful_groups(self, size: int) -> int:
        """How many of a step's `size` groups must be useful: at least one, as otherwise there is nothing to repeat."""
        return max(1, math.ceil(round(self.min_replace_ratio * size, 6))) if size else 0

    @property
    def drops_all_useless_groups(self) -> bool:
        """Whether a group that is not useful is dropped from every step, whatever the other groups are like."""
        return self.min_replace_ratio >= 1


class Curriculum:
    """`data.curriculum`: leaves out, once, a prompt that was too hard or too easy when it was last drawn.

    A resumed run needs only `state()` and `load_state()`.
    """

    def __init__(self, min_pass_rate: float, max_pass_rate: float):
        self._min = min_pass_rate
        self._max = max_pass_rate
        self._rates: dict[str, float] = {}
        """uid -> share of samples that passed when the prompt was last drawn; absent if it was left out since then."""

    def observe(self, group: TrajectoryGroup) -> None:
        """Record the pass rate of the group's valid samples; a group without valid samples changes nothing."""
        passed = [item.outcome >= MIN_PASS_REWARD for item in group.trajectories if item.status == OK]
        if passed:
            self._rates[group.prompt.uid] = sum(passed) / len(passed)

    def should_skip(self, uid: str) -> bool:
        """Whether the prompt is left out this time; if so, it is drawn again the next time."""
        if self._min <= self._rates.get(uid, self._min) <= self._max:
            return False
        del self._rates[uid]
        return True

    def state_dict(self) -> dict[str, float]:
        return dict(self._rates)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._rates = dict(state)


# -- rewards -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RewardShaping:
    """Applies the enabled adjustments to a training group, in place; evaluation does not use it.

    Order: `zero_unfinished` sets what a response is worth, `punish_overlong` what its length costs, `mask_truncated`
    which responses are trained on.
    """

    zero_reward_on_non_stop: bool = False
    apply_overlong_filtering: bool = False
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)
    max_generate_length: int = 1
    """The maximum number of tokens of a turn."""

    def __call__(self, group: TrajectoryGroup) -> TrajectoryGroup:
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
    """The settings that decide which rollouts a step trains on; all are off by default."""

    shaping: RewardShaping = field(default_factory=RewardShaping)
    dynamic_sampling: DynamicSampling | None = None
    zero_variance_filter: bool = False
    over_provisioning: float = 0.0
    """Extra rollouts begun, as a fraction of those that a step needs; requires max_staleness_steps 0."""
    curriculum: Curriculum | None = None


def apply_zero_reward_on_non_stop(valid: Sequence[Trajectory]) -> None:
    """Give responses that did not end by themselves a reward of 0, or less.

    It is less if the environment gave less, or if a response of the group that did end got less: if wrong answers get
    -1, a flat 0 would teach the model not to end.
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
    """Soft overlong punishment (DAPO, arXiv:2503.14476, eq. 13): the amount to subtract from the reward.

    0 up to max_generate_length - len, from there growing linearly to `penalty_factor` at max_generate_length, and
    `penalty_factor` beyond.
    """
    over = max(length - (max_generate_length - overlong_buffer.len), 0)
    return overlong_buffer.penalty_factor * min(over / overlong_buffer.len, 1.0)


def apply_overlong_penalty(item: Trajectory, max_generate_length: int, overlong_buffer: OverlongBufferConfig) -> None:
    """Subtract the penalty for the longest turn from that turn; `item.raw_reward` keeps the original reward.

    A turn that was cut pays the full penalty, even if something other than max_generate_length cut it.
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
    """Overlong filtering (DAPO, arXiv:2503.14476, section 3.4): no loss on responses that were cut by length.

    Their rewards remain in the statistics of their group, with which the other responses are compared.
    """
    for item in valid:
        if item.stop_reason == "length":
            item.loss_spans = []


def mask_group(group: TrajectoryGroup) -> None:
    """Take all responses of the group out of the loss; rewards and statuses stay as they are."""
    for item in group.trajectories:
        item.loss_spans = []
