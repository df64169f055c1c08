"""Supervised fine-tuning: a smaller loop with the same learner, checkpoints and trackers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from skyrl_train.data.sft import Demonstration, demonstration_batch
from skyrl_train.learner.learner import Learner
from skyrl_train.metrics import Metrics
from skyrl_train.report.trackers import Trackers
from skyrl_train.trainer.batch_dump import BatchDump
from skyrl_train.trainer.run_state import RunState
from skyrl_train.trainer.schedule import StepSchedule
from skyrl_train.trainer.trainer import Intervals


class SFTTrainer:
    """Minimises the negative log-likelihood of demonstrations.

    `index_at` maps a position in the run to the index of the demonstration trained on there.
    """

    def __init__(
        self,
        *,
        demonstrations: Sequence[Demonstration],
        index_at: Callable[[int], int],
        schedule: StepSchedule,
        intervals: Intervals,
        learner: Learner,
        state: RunState,
        trackers: Trackers,
        batch_dump: BatchDump | None = None,
    ):
        self.demonstrations = demonstrations
        self.index_at = index_at
        self.schedule = schedule
        self.intervals = intervals
        self.learner = learner
        self.state = state
        self.trackers = trackers
        self.batch_dump = batch_dump

    async def fit(self) -> Path:
        """Train up to the last step, resuming if there is a checkpoint; returns the exported Hugging Face folder."""
        step = await self.state.resume()
        total = self.schedule.total_steps
        self.trackers.begin(step, total)
        metrics = Metrics()
        while step < total:
            with metrics.timed("step"):
                start = self.schedule.prompts_before(step)
                positions = range(start, start + self.schedule.prompts_of_step(step))
                rows = [self.index_at(position) for position in positions]
                batch = demonstration_batch([self.demonstrations[row] for row in rows])
                batch = await self.learner.with_reference(batch)
                if self.batch_dump is not None:
                    await asyncio.to_thread(self.batch_dump.write, step + 1, batch, [str(row) for row in rows])
                for name, value in (await self.learner.update(batch)).items():
                    metrics.add(name, value)
            step += 1
            if self.schedule.ends_epoch(step):
                await self.state.update_reference()
            values = metrics.flush()
            values["throughput/tokens_per_s"] = len(batch.input_ids) / values["timing/step_s"]
            self.trackers.log(values, step)
            if self.intervals.due(self.intervals.checkpoint, step):
                await self.state.save(step)
        return await self.state.export(step)
