"""Supervised fine-tuning: a smaller loop with the same learner, checkpoints and trackers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from skyrl_train.data.sft import Demonstration, demonstration_batch
from skyrl_train.tasks import to_its_end
from skyrl_train.trainer.batch_dump import BatchDump
from skyrl_train.trainer.loop import TrainingLoop


class SFTTrainer(TrainingLoop):
    """Minimises the negative log-likelihood of demonstrations.

    `index_at` maps a position in the run to the index of the demonstration trained on there.
    """

    def __init__(
        self,
        *,
        demonstrations: Sequence[Demonstration],
        index_at: Callable[[int], int],
        batch_dump: BatchDump | None = None,
        **parts: Any,
    ):
        """`parts`: those of every TrainingLoop."""
        super().__init__(**parts)
        self.demonstrations = demonstrations
        self.index_at = index_at
        self.batch_dump = batch_dump
        self._step_tokens = 0

    async def fit_and_export(self) -> Path:
        """Train up to the last step; returns the exported Hugging Face folder, which is whole even if told to end."""
        await self.fit()
        return await to_its_end(self.state.export(self.step))

    async def _start(self) -> None:
        with self.phases.phase("weights", "the checkpoint, if there is one"):
            self.step, unfinished = await self.state.resume()
        if "reference" in unfinished.actions:
            await self.state.update_reference()
        if "export" in unfinished.actions:
            await to_its_end(self.state.export(self.step))
        self.trackers.begin(self.step, self.schedule.total_steps)

    async def _step(self) -> None:
        with self.metrics.timed("step"):
            start = self.schedule.prompts_before(self.step)
            positions = range(start, start + self.schedule.prompts_of_step(self.step))
            rows = [self.index_at(position) for position in positions]
            batch = demonstration_batch([self.demonstrations[row] for row in rows])
            batch = await to_its_end(self.learner.with_reference(batch))
            if self.batch_dump is not None:
                await asyncio.to_thread(self.batch_dump.write, self.step + 1, batch, [str(row) for row in rows])
            self._step_tokens = len(batch.input_ids)
            await self._update(batch)
        self._log_step()
        await self._export_and_save()

    def _num_tokens(self, values: Mapping[str, float]) -> float:
        return float(self._step_tokens)

    def _due(self) -> list[str]:
        return ["log"]  # the model is exported when the run ends
