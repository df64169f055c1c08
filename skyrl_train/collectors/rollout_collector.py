"""From a dataset's order to groups ready for training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

from skyrl_train.collectors.rollout_queue import RolloutQueue
from skyrl_train.data.trajectory import FAILED, Prompt, TrajectoryGroup
from skyrl_train.errors import RolloutsFailed
from skyrl_train.metrics import Metrics

Rollout = Callable[[Prompt, int], Awaitable[TrajectoryGroup]]
"""(prompt, position in the run's order of prompts) -> its group."""


class RolloutCollector:
    """Admits prompts in the run's order, as far ahead as `max_staleness` allows, and hands out groups in that order."""

    def __init__(
        self,
        rollout: Rollout,
        prompt_at: Callable[[int], Prompt],
        prompts_of_step: Callable[[int], int],
        max_staleness: int,
        max_failed_fraction: float,
    ):
        self._rollout = rollout
        self._prompt_at = prompt_at
        self._prompts_of_step = prompts_of_step
        self._max_staleness = max_staleness
        self._max_failed_fraction = max_failed_fraction
        self._queue: RolloutQueue[TrajectoryGroup] = RolloutQueue()
        self._admitted = 0
        self.consumed = 0
        """Prompts whose groups were taken: where a resumed run continues."""

    def start(self, step: int, consumed: int) -> None:
        """The weights of `step` are live and `consumed` prompts were used by the steps before it."""
        self._admitted = self.consumed = consumed
        self._queue.grant(sum(self._prompts_of_step(step + ahead) for ahead in range(self._max_staleness + 1)))

    def weights_live(self, step: int) -> None:
        """The weights of `step` are live: rollouts for step + max_staleness may begin."""
        self._queue.grant(self._prompts_of_step(step + self._max_staleness))

    async def next_groups(self, step: int, metrics: Metrics) -> list[TrajectoryGroup]:
        """The groups of `step`, in admission order.

        Raises RolloutsFailed when more than `max_failed_fraction` of their trajectories failed.
        """
        kept: list[TrajectoryGroup] = []
        while len(kept) < self._prompts_of_step(step):
            self.admit()
            group = await self._queue.take()
            assert group is not None, "a step asks for no more groups than it has slots"
            self.consumed += 1
            kept.append(group)
        self._count_failures(kept, metrics)
        return kept

    def admit(self) -> None:
        """Begin as many rollouts as there are granted slots."""
        while self._queue.free_slots:
            position = self._admitted
            self._admitted += 1
            self._queue.submit(partial(self._begin, position))

    async def close(self) -> None:
        await self._queue.close()

    async def _begin(self, position: int) -> TrajectoryGroup:
        return await self._rollout(self._prompt_at(position), position)

    def _count_failures(self, groups: list[TrajectoryGroup], metrics: Metrics) -> None:
        trajectories = [item for group in groups for item in group.trajectories]
        errors = Counter(item.error or "unknown" for item in trajectories if item.status == FAILED)
        failed = errors.total()
        metrics.count("rollouts/failed", failed)
        for kind, number in errors.items():
            metrics.count(f"rollouts/failed/{kind}", number)
        if trajectories and failed > self._max_failed_fraction * len(trajectories):
            counts = ", ".join(f"{kind} x {number}" for kind, number in errors.most_common())
            raise RolloutsFailed(
                f"{failed} of {len(trajectories)} trajectories of this step failed ({counts}), more than "
                f"trainer.max_failed_fraction={self._max_failed_fraction:g} allows. Nothing was trained on them. "
                "Mend the environment or engine named, or raise the fraction."
            )
