"""The training loop: collect rollouts, score them, compute advantages, update the model, publish its weights."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from skyrl_train.data.batch import TrainBatch, collate
from skyrl_train.data.trajectory import TrajectoryGroup
from skyrl_train.errors import EnginesLost, RewardModelLost, RolloutsFailed
from skyrl_train.learner.learner import Learner
from skyrl_train.metrics import Metrics
from skyrl_train.report.trackers import Trackers
from skyrl_train.rollouts.collector import RolloutCollector
from skyrl_train.trainer.batch_dump import BatchDump
from skyrl_train.trainer.evaluation import Evaluator
from skyrl_train.trainer.residency import Residency
from skyrl_train.trainer.rollout_metrics import add_rollout_metrics, sample_rows
from skyrl_train.trainer.run_state import RunState
from skyrl_train.trainer.schedule import StepSchedule

BatchStep = Callable[[TrainBatch, Metrics], TrainBatch]
"""Adds to a scored batch what the update needs: advantages, off-policy corrections."""
Publish = Callable[[int], Awaitable[dict[str, float]]]
"""Sends the learner's weights to the engines as the given version, and proves that they arrived."""


@dataclass(frozen=True)
class Intervals:
    """How many steps apart each action is; 0 or less disables it. Enabled actions also run after the last step."""

    evaluate: int
    checkpoint: int
    export: int
    evaluate_before: bool
    total_steps: int

    def due(self, interval: int, step: int) -> bool:
        """Whether an action with this interval runs after `step` finished steps."""
        return interval > 0 and (step % interval == 0 or step == self.total_steps)


class Trainer:
    """Decides the order of events and nothing else: all of its parts are built by `assembly` and passed in.

    `step` is the number of finished steps, and also the version of the weights that the engines serve.
    """

    def __init__(
        self,
        *,
        schedule: StepSchedule,
        intervals: Intervals,
        collector: RolloutCollector,
        learner: Learner,
        batch_steps: Sequence[BatchStep],
        publish: Publish,
        residency: Residency,
        evaluator: Evaluator | None,
        state: RunState,
        trackers: Trackers,
        batch_dump: BatchDump | None = None,
    ):
        self.schedule = schedule
        self.intervals = intervals
        self.collector = collector
        self.learner = learner
        self.batch_steps = batch_steps
        self.publish = publish
        self.residency = residency
        self.evaluator = evaluator
        self.state = state
        self.trackers = trackers
        self.batch_dump = batch_dump
        self.metrics = Metrics()
        self.step = 0

    async def fit(self) -> None:
        """Train up to the last step, from the checkpoint to resume or else from the start.

        On EnginesLost, RewardModelLost or RolloutsFailed it saves the finished steps before it raises.
        """
        await self._start()
        started_at = self.step
        try:
            while self.step < self.schedule.total_steps:
                await self._step()
        except (EnginesLost, RewardModelLost, RolloutsFailed):
            # No engine, no reward model, or nothing to train on is left; the learner is intact, so keep its work.
            if self.step > started_at:
                await self.state.save(self.step)
            raise

    async def _step(self) -> None:
        with self.metrics.timed("step"):
            async with self.residency.generating():
                groups = await self._collect()
            async with self.residency.training():
                await self._learn(groups)
                self.step += 1
                if self.schedule.ends_epoch(self.step):
                    await self.state.update_reference()
                await self._publish()
            self.collector.weights_live(self.step)
        await self._after_step(groups)

    async def _start(self) -> None:
        """Resume, publish the trainer's weights to the engines, and evaluate them if configured."""
        async with self.residency.training():
            self.step = await self.state.resume()
            await self._publish()
        self.trackers.begin(self.step, self.schedule.total_steps)
        self.metrics.flush()
        if self.evaluator is not None and self.step == 0 and self.intervals.evaluate_before:
            await self._evaluate(self.evaluator)
            self.trackers.log(self.metrics.flush(), self.step)
        self.collector.start(self.step)

    async def _collect(self) -> list[TrajectoryGroup]:
        with self.metrics.timed("generate"):
            groups = await self.collector.next_groups(self.step, self.metrics)
        add_rollout_metrics(groups, self.step, self.metrics)
        return groups

    async def _learn(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Train on `groups`: score what the loss needs, add advantages, take the optimizer steps."""
        batch = collate(groups)
        with self.metrics.timed("score"):
            batch = await self.learner.score(batch)
        for add in self.batch_steps:
            batch = add(batch, self.metrics)
        if self.batch_dump is not None:
            uids = [group.prompt.uid for group in groups for item in group.trajectories for _ in item.sequences()]
            await asyncio.to_thread(self.batch_dump.write, self.step + 1, batch, uids)
        with self.metrics.timed("update"):
            self._add(await self.learner.update(batch))

    async def _publish(self) -> None:
        with self.metrics.timed("publish"):
            async with self.residency.syncing():
                values = await self.publish(self.step)
        self._add(values)

    async def _evaluate(self, evaluator: Evaluator) -> None:
        with self.metrics.timed("evaluate"):
            async with self.residency.generating():
                self._add(await evaluator.run(self.step))

    async def _after_step(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Evaluate, report, export and save, each if it is due."""
        due = self.intervals.due
        if self.evaluator is not None and due(self.intervals.evaluate, self.step):
            await self._evaluate(self.evaluator)
        values = self.metrics.flush()
        values["throughput/tokens_per_s"] = values.get("rollouts/tokens", 0.0) / values["timing/step_s"]
        self.trackers.log(values, self.step)
        self.trackers.samples(sample_rows(groups), self.step)
        # Export first: a run killed in between does it again, while one that saved its last step has nothing to do.
        if due(self.intervals.export, self.step):
            await self.state.export(self.step)
        if due(self.intervals.checkpoint, self.step):
            await self.state.save(self.step)

    def _add(self, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.metrics.add(name, value)
