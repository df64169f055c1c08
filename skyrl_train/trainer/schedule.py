"""The number of prompts in each step and of steps in a run, computed from sizes alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepSchedule:
    """Steps of at most `train_batch_size` prompts. None crosses the end of an epoch, whose last one may be smaller.

    Example: 10 prompts, batches of 4, 2 epochs: steps of 4, 4, 2, 4, 4, 2 prompts.
    """

    num_prompts: int
    train_batch_size: int
    epochs: int
    max_steps: int | None = None

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_prompts // self.train_batch_size)

    @property
    def total_steps(self) -> int:
        steps = self.steps_per_epoch * self.epochs
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def prompts_of_step(self, step: int) -> int:
        """Number of prompts in the 0-based `step`; 0 for steps past the end of the run."""
        if step >= self.total_steps:
            return 0
        start = (step % self.steps_per_epoch) * self.train_batch_size
        return min(self.train_batch_size, self.num_prompts - start)

    def prompts_before(self, step: int) -> int:
        """Position in the run's order of prompts at which `step` begins, if no prompt is skipped or dropped."""
        epoch, rest = divmod(step, self.steps_per_epoch)
        return epoch * self.num_prompts + rest * self.train_batch_size

    def ends_epoch(self, step: int) -> bool:
        """Whether an epoch is complete after `step` finished steps."""
        return step % self.steps_per_epoch == 0
