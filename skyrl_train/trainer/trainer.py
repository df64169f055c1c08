"""The training loop: collect rollouts, score them, compute advantages, update the model, publish its weights."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from skyrl_train.data.arrays import give_back
from skyrl_train.data.batch import MANY, TrainBatch, collate
from skyrl_train.data.trajectory import TrajectoryGroup
from skyrl_train.errors import NonFiniteWeights
from skyrl_train.metrics import Metrics
from skyrl_train.rollouts.collector import RolloutCollector
from skyrl_train.tasks import to_its_end
from skyrl_train.trainer.batch_dump import BatchDump
from skyrl_train.trainer.evaluation import Evaluator
from skyrl_train.trainer.kept_rollouts import KeptRollouts
from skyrl_train.trainer.loop import TrainingLoop
from skyrl_train.trainer.residency import Residency
from skyrl_train.trainer.rollout_metrics import add_rollout_metrics, sample_rows, table_rows
from skyrl_train.trainer.run_state import Unfinished

GroupStep = Callable[[Sequence[TrajectoryGroup], Metrics], None]
"""Changes rewards or loss masks of a step's groups in place, before they become a batch."""
BatchStep = Callable[[TrainBatch, Metrics], TrainBatch]
"""Adds to a scored batch what the update needs: advantages, off-policy corrections."""
Publish = Callable[[int], Awaitable[dict[str, float]]]
"""Sends the learner's weights to the engines as the given version, and proves that they arrived."""


class Trainer(TrainingLoop):
    """Decides the order of events and nothing else: all of its parts are built by `experiment` and passed in.

    `step` is the number of finished steps, and also the version of the weights that the engines serve.
    """

    def __init__(
        self,
        *,
        collector: RolloutCollector,
        batch_steps: Sequence[BatchStep],
        publish: Publish,
        residency: Residency,
        evaluator: Evaluator | None,
        batch_dump: BatchDump | None = None,
        kept_rollouts: KeptRollouts | None = None,
        group_steps: Sequence[GroupStep] = (),
        **parts: Any,
    ):
        """`parts`: those of every TrainingLoop."""
        super().__init__(**parts)
        self.collector = collector
        self.group_steps = group_steps
        self.batch_steps = batch_steps
        self.publish = publish
        self.residency = residency
        self.evaluator = evaluator
        self.batch_dump = batch_dump
        self.kept_rollouts = kept_rollouts
        self.samples_of_rows: list[tuple[str, int]] = []
        """Of the batch under way, by its group_ids."""

    async def _step(self) -> None:
        self.residency.moves_s()  # those of an evaluation, or of the start, are not this step's
        with self.metrics.timed("step"):
            async with self.residency.generating(before_sync=True):
                groups = await self._collect()
            async with self.residency.training():
                await self._learn(groups)
                await self._publish()
            self.collector.weights_live(self.step)
        if moved := self.residency.moves_s():
            self.metrics.count("timing/move_s", moved)
        if "evaluate" in self._to_do:
            await self._evaluate()
        self._log_step()
        await self._export_and_save()

    async def _start(self) -> None:
        """Resume, publish the trainer's weights to the engines, and evaluate them if configured."""
        with self.phases.phase("weights", "the checkpoint, if there is one, and weights on their way to the engines"):
            async with self.residency.training():
                self.step, unfinished = await self.state.resume()
                await self._publish()
        self.trackers.begin(self.step, self.schedule.total_steps)
        if self.kept_rollouts is not None:
            self.kept_rollouts.begin(self.step)
        published = self.metrics.flush()
        if self.step == 0:
            if self.evaluator is not None and self.intervals.eval_before_train:
                await self._evaluate()
            self.trackers.log(published | self.metrics.flush(), self.step)
        elif unfinished.actions:
            await self._complete(unfinished, published)
        self.collector.start(self.step)

    async def _complete(self, unfinished: Unfinished, published: dict[str, float]) -> None:
        """Do what a run that ended early left undone of its last step; its row is replaced by the complete one."""
        if "reference" in unfinished.actions:
            await self.state.update_reference()
        row = unfinished.row | (published if "publish" in unfinished.actions else {})
        if "evaluate" in unfinished.actions and self.evaluator is not None:
            await self._evaluate()
            row |= self.metrics.flush()
        if row:
            self.trackers.log(row, self.step)
        if "export" in unfinished.actions:
            await to_its_end(self.state.export(self.step))
        await self.state.save(self.step)

    async def _collect(self) -> list[TrajectoryGroup]:
        with self.metrics.timed("generate"):
            groups = await self.collector.next_groups(self.step, self.metrics)
        await asyncio.to_thread(add_rollout_metrics, groups, self.step, self.metrics)
        return groups

    async def _learn(self, groups: list[TrajectoryGroup]) -> None:
        """Train on `groups`: score what the loss needs, add advantages, take the optimizer steps.

        The list is empty afterwards: conversations are let go of before the update, unless they are being written.
        """
        for change in self.group_steps:
            change(groups, self.metrics)
        self.samples_of_rows = await asyncio.to_thread(_samples_of_rows, groups)
        batch = await asyncio.to_thread(collate, groups, token_rewards=self._reads_token_rewards(groups))
        with self.metrics.timed("score"):
            batch = await to_its_end(self.learner.score(batch))
        for add in self.batch_steps:
            batch = await asyncio.to_thread(add, batch, self.metrics)
        if self.batch_dump is not None:
            uids = [uid for uid, _ in self.samples_of_rows]
            await asyncio.to_thread(self.batch_dump.write, self.step + 1, batch, uids)
        self._samples, self._table = sample_rows(groups), table_rows(groups)
        kept = self.kept_rollouts
        if kept is not None:
            self.learner.tells_logprobs_of = kept.num_sequences(groups)
        learner = self.learner
        async with kept.writing(self.step + 1, groups, batch, lambda: learner.logprobs) if kept else nullcontext():
            groups.clear()
            batch = batch.with_tokens(token_rewards=None)  # no update reads them
            if len(batch.input_ids) > MANY:
                await asyncio.to_thread(give_back)
            await self._update(batch)

    def _reads_token_rewards(self, groups: Sequence[TrajectoryGroup]) -> bool:
        """Of a step that does not say it is assumed. Rollouts are kept with them unless they follow from turns."""
        steps = any(getattr(step, "reads_token_rewards", True) for step in self.batch_steps)
        told = self.kept_rollouts is not None and any(
            item.token_rewards is not None for group in groups for item in group.trajectories
        )
        return steps or told or self.batch_dump is not None

    def _due(self) -> list[str]:
        evaluates = self.evaluator is not None and self.intervals.due(self.intervals.eval_interval, self.step)
        return ["publish", *(["evaluate"] if evaluates else []), *super()._due()]

    def _num_tokens(self, values: Mapping[str, float]) -> float:
        return values.get("rollouts/tokens", 0.0)

    def _derived(self, values: Mapping[str, float]) -> dict[str, float]:
        if "async/in_flight" not in values:
            return {}
        return {"async/trainer_idle": values["timing/generate_s"] / values["timing/step_s"]}

    def _doing(self) -> str:
        done, wanted = self.collector.progress
        groups = f", {done} of {wanted} groups" if wanted and self.metrics.under_way == "generate" else ""
        return f"{super()._doing()}{groups}"

    async def _publish(self) -> None:
        with self.metrics.timed("publish"):
            async with self.residency.syncing():
                try:
                    values = await self.publish(self.step)
                except NonFiniteWeights as error:
                    raise NonFiniteWeights(f"{error} {self._last_good()}") from error
        self._add(values)
        self._done("publish")

    async def _evaluate(self) -> None:
        evaluator = self.evaluator
        assert evaluator is not None
        with self.metrics.timed("evaluate"):
            async with self.residency.generating():
                with self.phases.waiting(
                    "evaluation", lambda: "sampling, {} of {} prompts".format(*evaluator.progress)
                ):
                    self._add(await evaluator.run(self.step))
        self._done("evaluate")


def _samples_of_rows(groups: Sequence[TrajectoryGroup]) -> list[tuple[str, int]]:
    return [
        (group.prompt.uid, item.sample) for group in groups for item in group.trajectories for _ in item.sequences()
    ]
