"""The training loop: collect rollouts, compute log-probs and advantages, update the model, publish its weights.

`Trainer._step` is one step of reinforcement learning and `SFTTrainer._step` one step of supervised fine-tuning.
`TrainingLoop` repeats steps, logs each of them once, and saves the last complete step however the run ends.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_train import trace
from skyrl_train.aio import finish_despite_cancellation, gather_all
from skyrl_train.config.schema import TrainerConfig
from skyrl_train.data.batch import TRIM_MEMORY_TOKENS, SFTExample, TrainBatch, collate, collate_sft_examples
from skyrl_train.data.token_arrays import trim_memory
from skyrl_train.data.trajectory import TrajectoryGroup
from skyrl_train.errors import NonFiniteUpdate, NonFiniteWeights, RolloutsFailed
from skyrl_train.learner.learner import RESPONSE_TIMEOUT_S, Learner
from skyrl_train.log_rotation import archive_previous_attempt
from skyrl_train.metrics import Metrics
from skyrl_train.report.progress_log import report_progress, startup_phase
from skyrl_train.report.protocol import SampleRow
from skyrl_train.report.trackers import Trackers
from skyrl_train.rollouts.collector import RolloutCollector
from skyrl_train.trainer.batch_dump import BatchDump
from skyrl_train.trainer.checkpoint_manager import CheckpointManager, PendingActions, StepAction
from skyrl_train.trainer.engine_scaler import EngineScaler
from skyrl_train.trainer.evaluation import Evaluator
from skyrl_train.trainer.guards import Guards
from skyrl_train.trainer.offload_manager import OffloadManager
from skyrl_train.trainer.publisher import WeightPublisher
from skyrl_train.trainer.rollout_metrics import add_rollout_metrics, sample_rows, table_rows
from skyrl_train.trainer.rollout_writer import RolloutWriter

PROFILE_TABLE_FILE = "slowest.txt"
_log = logging.getLogger(__name__)
TrajectoryTransform = Callable[[Sequence[TrajectoryGroup], Metrics], None]
"""A function that changes rewards or loss masks of a step's groups in place, before they become a batch."""
BatchTransform = Callable[[TrainBatch, Metrics], TrainBatch]
"""A function that adds tensors for the update to a batch with log-probs: advantages, off-policy corrections."""


@dataclass(frozen=True)
class StepSchedule:
    """The division of epochs into steps of at most `train_batch_size` prompts.

    No step crosses the end of an epoch, so the last step of an epoch may be smaller. Example: 10 prompts, batches of 4
    and 2 epochs give steps of 4, 4, 2, 4, 4, 2 prompts.
    """

    num_prompts: int
    train_batch_size: int
    epochs: int
    max_steps: int | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps per epoch."""
        return -(-self.num_prompts // self.train_batch_size)

    @property
    def total_steps(self) -> int:
        """Number of steps of the run: those of all epochs, but at most `max_steps`."""
        steps = self.steps_per_epoch * self.epochs
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def num_prompts_in_step(self, step: int) -> int:
        """Return the number of prompts in the 0-based `step`; 0 for steps past the end of the run."""
        if step >= self.total_steps:
            return 0
        start = (step % self.steps_per_epoch) * self.train_batch_size
        return min(self.train_batch_size, self.num_prompts - start)

    def first_prompt_of_step(self, step: int) -> int:
        """Return the position in the run's order of prompts at which the 0-based `step` begins.

        Assumes that no prompt is skipped or dropped.
        """
        epoch, rest = divmod(step, self.steps_per_epoch)
        return epoch * self.num_prompts + rest * self.train_batch_size

    def ends_epoch(self, step: int) -> bool:
        """True if an epoch is complete after `step` finished steps."""
        return step % self.steps_per_epoch == 0

    def is_due(self, interval: int, step: int) -> bool:
        """True if an action that runs every `interval` steps runs after `step` finished steps.

        It also runs after the last step of the run. An interval of 0 or less disables it.
        """
        return interval > 0 and (step % interval == 0 or step == self.total_steps)


class TrainingLoop(ABC):
    """A loop that trains until the last step of the schedule, and saves the last complete step if it ends early.

    `step` is the number of finished steps, that is, of updates whose weights all ranks hold. Each step is logged once.
    If an exception or a signal ends the run, the last complete step is logged and saved, unless its weights are
    lost: an update was interrupted, they are not finite, or a rank that holds them died or hangs. Pending actions of
    that step are saved with it, and executed first when the run is resumed.
    """

    def __init__(
        self,
        *,
        schedule: StepSchedule,
        cfg: TrainerConfig,
        learner: Learner,
        checkpoint_manager: CheckpointManager,
        trackers: Trackers,
        guards: Guards | None = None,
        step_profiler: StepProfiler | None = None,
    ):
        """Create the loop; `fit` runs it.

        Args:
            schedule: The steps of the run.
            cfg: The section trainer. Its intervals determine when the run evaluates, saves and exports.
            learner: The ranks of all models.
            checkpoint_manager: Saves, resumes and exports.
            trackers: Receive the metrics and samples of each step.
            guards: Check the metrics of each step; None for no checks.
            step_profiler: Profiles some steps; None to profile none.
        """
        self.schedule = schedule
        self.cfg = cfg
        self.learner = learner
        self.checkpoint_manager = checkpoint_manager
        self.trackers = trackers
        self.guards = guards
        self.step_profiler = step_profiler
        self.metrics = Metrics()
        self.step = 0
        self.restarts = 0
        """Number of restarts of the ranks in this run. If not 0, each row has it and the number of ranks."""
        self._weights_are_complete = True
        """True if the ranks hold the weights of `step`; False during an update."""
        self._pending_actions: list[StepAction] = []
        """Actions that `step` still requires, in order of execution."""
        self._samples: Sequence[SampleRow] = ()
        self._table_rows: Sequence[SampleRow] = ()

    async def fit(self) -> None:
        """Resume from a checkpoint if there is one, and train until the last step of the schedule.

        Saves the last step if checkpoints are enabled. An exception is raised again after the last complete step has
        been logged and saved.

        Raises:
            GuardTriggered: A guard in trainer.guards.stop ended the run.
            SkyRLError: A rank, an engine, a rollout or a checkpoint failed.
        """
        self._weights_are_complete, self._pending_actions = True, []
        try:
            await self._start()
        except Exception as error:
            await self.learner.attach_stall_report(error)
            raise
        started_at = self.step
        try:
            while self.step < self.schedule.total_steps:
                await self._next_step(f"step {self.step + 1}")
            await self.checkpoint_manager.wait_until_written()
            if self.cfg.ckpt_interval > 0 and self.step > started_at:
                await self.checkpoint_manager.ensure_saved(self.step)
        except BaseException as error:
            await finish_despite_cancellation(self._save_on_exit(error, started_at))
            raise

    async def _next_step(self, name: str) -> None:
        profiled = self.step_profiler.profile_step(self.step + 1) if self.step_profiler else nullcontext()
        try:
            with report_progress(name, self._describe_progress), trace.span(name):
                async with profiled:
                    await self._step()
        except Exception as error:
            with suppress(Exception):  # some exception classes do not support notes
                total = self.schedule.total_steps
                place = f"{name} of {total}" if total < sys.maxsize else name
                error.add_note(f"The run ended in {place}.")
            raise

    @abstractmethod
    async def _start(self) -> None:
        """Resume from a checkpoint and prepare the first step."""

    @abstractmethod
    async def _step(self) -> None:
        """Take one step."""

    @abstractmethod
    def _derived_metrics(self, values: Mapping[str, float]) -> dict[str, float]:
        """Compute metrics from those of a step, such as throughput/tokens_per_s."""

    def _describe_progress(self) -> str:
        """Describe the current phase of the step. Another thread calls it."""
        if self.metrics.current_phase == "update" and (progress := self.learner.optimizer_progress) is not None:
            return "update, {} of {} optimizer steps".format(*progress)
        return self.metrics.current_phase or "checkpoints and records"

    async def _update(self, batch: TrainBatch) -> None:
        """Take all optimizer steps of a step and increment `step`. Cancellation takes effect only afterwards."""
        with self.metrics.timed("update"):
            await finish_despite_cancellation(self._take_updates(batch))

    async def _take_updates(self, batch: TrainBatch) -> None:
        self._weights_are_complete = False
        try:
            values = await self.learner.update(batch)
        except NonFiniteUpdate as error:
            raise NonFiniteUpdate(f"{error} {self._last_finite_checkpoint_hint()}") from error
        self.step += 1
        self.checkpoint_manager.skipped_updates.observe(self.step, values)
        self.checkpoint_manager.capture_state()
        self._weights_are_complete = True
        self._pending_actions = self._actions_due()
        self._add_metrics(values)
        if self.schedule.ends_epoch(self.step):
            self._pending_actions.insert(0, StepAction.REFERENCE)
            await self.checkpoint_manager.update_reference()
            self._complete_action(StepAction.REFERENCE)

    def _actions_due(self) -> list[StepAction]:
        """Return the actions that the step requires after its update, in order of execution."""
        exports = self.schedule.is_due(self.cfg.hf_save_interval, self.step)
        return [StepAction.LOG, *([StepAction.EXPORT] if exports else [])]

    def _last_finite_checkpoint_hint(self) -> str:
        """Name the newest checkpoint whose weights are known to be good, because an update of them was finite."""
        first_bad = (
            self.step + 1
            if self.checkpoint_manager.skipped_updates.since is None
            else self.checkpoint_manager.skipped_updates.since
        )
        checkpoint = self.checkpoint_manager.latest_before(first_bad - 1)
        if checkpoint is None:
            return "There is no earlier checkpoint with finite updates."
        return (
            f"The newest earlier checkpoint with finite updates is {checkpoint}. To resume from it, set "
            "trainer.resume_mode=from_path and trainer.resume_path."
        )

    def _log_step(self) -> None:
        """Send the step's metrics and samples to the trackers, and check them with the guards."""
        values = self.metrics.flush()
        values |= self._derived_metrics(values)
        if self.restarts:
            values |= {"trainer/restarts": float(self.restarts), "trainer/ranks": float(len(self.learner.policy))}
        self._record(values)
        if self.guards is not None:
            self.guards.check(values, self.step)
            self.checkpoint_manager.capture_state()  # the guards' counters have changed

    def _record(self, values: Mapping[str, float]) -> None:
        self.trackers.log(values, self.step)
        self.trackers.samples(self._samples, self.step)
        self.trackers.table(self._table_rows, self.step)
        self._complete_action(StepAction.LOG)

    async def _export_and_save(self) -> None:
        # The export comes first: if the run is killed before the save, the resumed run repeats the step and exports it.
        if StepAction.EXPORT in self._pending_actions:
            await finish_despite_cancellation(self.checkpoint_manager.export(self.step))
            self._complete_action(StepAction.EXPORT)
        if self.schedule.is_due(self.cfg.ckpt_interval, self.step):
            await self.checkpoint_manager.save(self.step)

    def _complete_action(self, action: StepAction) -> None:
        if action in self._pending_actions:
            self._pending_actions.remove(action)

    @abstractmethod
    async def _release_ranks(self) -> None:
        """Stop everything else that calls the ranks, before the last step is saved."""

    async def _save_on_exit(self, error: BaseException, started_at: int) -> None:
        """Log and save the last complete step of a run that ends early."""
        await self.learner.attach_stall_report(error)
        await self._release_ranks()
        # Ranks answer pings while they write a checkpoint in the background. If one hangs, the write never ends.
        if self.checkpoint_manager.async_checkpoint and not await self.learner.is_responsive(RESPONSE_TIMEOUT_S):
            await self.checkpoint_manager.abandon_pending_save()
        try:
            await self.checkpoint_manager.wait_until_written()
        except Exception as failure:
            _log.error("The last checkpoint could not be written: %s", failure)
        row: dict[str, float] = {}
        if StepAction.LOG in self._pending_actions:
            row = {name: float(value) for name, value in self.metrics.flush().items()}
            self._record(row)
        if self.step == started_at or (self.step == self.checkpoint_manager.saved_step and not self._pending_actions):
            return
        if not self._weights_are_complete or isinstance(error, NonFiniteWeights):
            return  # the weights of this step are lost
        # Also checked after a signal: with a hung rank a save would wait for its deadline, and a scheduler kills the
        # run long before that. No rank is merely busy, as forward passes, updates and exports have run to completion.
        if not await self.learner.is_responsive(RESPONSE_TIMEOUT_S):
            _log.error("Step %d is not saved because a rank of the trainer does not respond.", self.step)
            return
        try:
            await self.checkpoint_manager.save(self.step, PendingActions(tuple(self._pending_actions), row))
            await self.checkpoint_manager.wait_until_written()
        except Exception as failure:
            _log.error("Step %d, the last complete step, could not be saved: %s", self.step, failure)

    def _add_metrics(self, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.metrics.add(name, value)


class Trainer(TrainingLoop):
    """The loop of reinforcement learning. It only orders events; the package `experiment` builds its parts.

    `step` is the number of finished steps, and also the version of the weights that the engines serve.
    """

    def __init__(
        self,
        *,
        collector: RolloutCollector,
        batch_transforms: Sequence[BatchTransform],
        publisher: WeightPublisher,
        offload_manager: OffloadManager,
        evaluator: Evaluator | None,
        scaler: EngineScaler | None = None,
        batch_dump: BatchDump | None = None,
        rollout_writer: RolloutWriter | None = None,
        trajectory_transforms: Sequence[TrajectoryTransform] = (),
        **kwargs: Any,
    ):
        """Create the trainer; `fit` runs it.

        Args:
            collector: Provides the groups that a step trains on.
            batch_transforms: Applied to the batch of a step in order, after its log-probs and values are computed.
            publisher: Sends weights to the engines.
            offload_manager: Moves engines and learner onto or off shared accelerators.
            evaluator: Evaluates the policy; None for no evaluation.
            scaler: Adds and removes engines during the run; None if their number is fixed.
            batch_dump: Writes the batch of each step; None writes nothing.
            rollout_writer: Writes the rollouts of each step; None writes nothing.
            trajectory_transforms: Applied to the groups of a step in order, before they become a batch.
            **kwargs: Arguments of `TrainingLoop`.
        """
        super().__init__(**kwargs)
        self.collector = collector
        self.trajectory_transforms = trajectory_transforms
        self.batch_transforms = batch_transforms
        self.publisher = publisher
        self.scaler = scaler
        self.offload_manager = offload_manager
        self.evaluator = evaluator
        self.batch_dump = batch_dump
        self.rollout_writer = rollout_writer
        self.sample_ids: list[tuple[str, int]] = []
        """(uid of the prompt, index of the sample) of each sequence in the current batch, [B]."""

    async def _step(self) -> None:
        self.offload_manager.pop_transfer_s()  # discards the time of transfers before this step
        with self.metrics.timed("step"):
            async with self.offload_manager.generating():
                with self.metrics.timed("generate"):
                    groups = await self._next_groups()
                await asyncio.to_thread(add_rollout_metrics, groups, self.step, self.metrics)
            async with self.offload_manager.training():
                await self._train_on(groups)
                await self._publish()
            self.collector.on_weights_published(self.step)
        if transfer_s := self.offload_manager.pop_transfer_s():
            self.metrics.count("timing/offload_s", transfer_s)
        if StepAction.EVALUATE in self._pending_actions:
            await self._evaluate()
        self._log_step()
        await self._export_and_save()

    async def _next_groups(self) -> list[TrajectoryGroup]:
        try:
            return await self.collector.next_groups(self.step, self.metrics)
        except RolloutsFailed as failed:
            if self.rollout_writer is not None:
                await self.rollout_writer.write_untrained(self.step + 1, failed.groups)
            raise

    async def _train_on(self, groups: list[TrajectoryGroup]) -> None:
        """Train on `groups`: compute log-probs and values, add advantages, take the optimizer steps.

        Clears the list to free the conversations before the update.
        """
        for transform in self.trajectory_transforms:
            transform(groups, self.metrics)
        self.sample_ids = await asyncio.to_thread(_sample_ids, groups)
        batch = await asyncio.to_thread(collate, groups, token_rewards=self._reads_token_rewards(groups))
        with self.metrics.timed("score"):
            batch = await finish_despite_cancellation(self.learner.add_logprobs_and_values(batch))
        for batch_transform in self.batch_transforms:
            batch = await asyncio.to_thread(batch_transform, batch, self.metrics)
        if self.batch_dump is not None:
            uids = [uid for uid, _ in self.sample_ids]
            await asyncio.to_thread(self.batch_dump.write, self.step + 1, batch, uids)
        self._samples, self._table_rows = sample_rows(groups), table_rows(groups)
        writer = self.rollout_writer
        if writer is not None:
            self.learner.num_sequences_with_logprobs = writer.num_sequences(groups)
        learner = self.learner
        async with (
            writer.writing(self.step + 1, groups, batch, lambda: learner.update_logprobs) if writer else nullcontext()
        ):
            groups.clear()
            batch = batch.with_tokens(token_rewards=None)  # updates do not read them
            if len(batch.input_ids) > TRIM_MEMORY_TOKENS:
                await asyncio.to_thread(trim_memory)
            await self._update(batch)

    async def _export_and_save(self) -> None:
        if StepAction.EXPORT in self._pending_actions or self.schedule.is_due(self.cfg.ckpt_interval, self.step):
            await self.offload_manager.prepare_save()
        await super()._export_and_save()

    def _reads_token_rewards(self, groups: Sequence[TrajectoryGroup]) -> bool:
        """True if a batch transform, the batch dump or the rollout files need the rewards of single tokens.

        A transform without the attribute `needs_token_rewards` is assumed to need them. Rollout files need them unless
        they can be derived from the rewards of turns.
        """
        transforms_need = any(getattr(transform, "needs_token_rewards", True) for transform in self.batch_transforms)
        writer_needs = self.rollout_writer is not None and any(
            item.token_rewards is not None for group in groups for item in group.trajectories
        )
        return transforms_need or writer_needs or self.batch_dump is not None

    async def _publish(self) -> None:
        with self.metrics.timed("publish"):
            try:
                values = await self.publisher.publish(self.step)
            except NonFiniteWeights as error:
                raise NonFiniteWeights(f"{error} {self._last_finite_checkpoint_hint()}") from error
        self._add_metrics(values)
        self._complete_action(StepAction.PUBLISH)

    async def _release_ranks(self) -> None:
        if self.scaler is not None:
            await self.scaler.stop()
        await self.publisher.stop_restarts()

    async def close(self) -> None:
        """Cancel the rollouts in progress, and stop engines that are being started."""
        try:
            await self.collector.close()
        finally:
            if self.scaler is not None:
                await self.scaler.stop()

    async def _evaluate(self) -> None:
        evaluator = self.evaluator
        assert evaluator is not None
        with self.metrics.timed("evaluate"):
            async with self.offload_manager.generating():
                with report_progress("evaluation", lambda: "sampling, {} of {} prompts".format(*evaluator.progress)):
                    self._add_metrics(await evaluator.run(self.step))
        self._complete_action(StepAction.EVALUATE)

    async def _start(self) -> None:
        """Resume, publish the trainer's weights to the engines, and execute what the resumed step still requires."""
        with startup_phase("weights", "loading the checkpoint, if there is one, and sending weights to the engines"):
            async with self.offload_manager.training():
                self.step, unfinished = await self.checkpoint_manager.resume()
                if StepAction.REFERENCE in unfinished.actions:  # later, engines may hold the memory of the new model
                    await self.checkpoint_manager.update_reference()
                await self._publish()
        if self.scaler is not None:  # engines may be added once the others have weights
            self.scaler.start()
        self.trackers.begin(self.step, self.schedule.total_steps)
        if self.rollout_writer is not None:
            self.rollout_writer.begin(self.step)
        published = self.metrics.flush()
        if self.step == 0:
            if self.evaluator is not None and self.cfg.eval_before_train:
                await self._evaluate()
            self.trackers.log(published | self.metrics.flush(), self.step)
        elif unfinished.actions:
            await self._run_pending_actions(unfinished, published)
        self.collector.start(self.step)

    async def _run_pending_actions(self, unfinished: PendingActions, published: dict[str, float]) -> None:
        """Execute the pending actions of a run that ended early, and replace the last row of metrics by a complete one.

        Args:
            unfinished: The pending actions, from the checkpoint.
            published: The metrics of publishing the weights of the resumed step.
        """
        row = unfinished.row | (published if StepAction.PUBLISH in unfinished.actions else {})
        if StepAction.EVALUATE in unfinished.actions and self.evaluator is not None:
            await self._evaluate()
            row |= self.metrics.flush()
        if row:
            self.trackers.log(row, self.step)
        await self.offload_manager.prepare_save()
        if StepAction.EXPORT in unfinished.actions:
            await finish_despite_cancellation(self.checkpoint_manager.export(self.step))
        await self.checkpoint_manager.save(self.step)

    def _actions_due(self) -> list[StepAction]:
        evaluates = self.evaluator is not None and self.schedule.is_due(self.cfg.eval_interval, self.step)
        return [StepAction.PUBLISH, *([StepAction.EVALUATE] if evaluates else []), *super()._actions_due()]

    def _derived_metrics(self, values: Mapping[str, float]) -> dict[str, float]:
        derived = {"throughput/tokens_per_s": values.get("rollouts/tokens", 0.0) / values["timing/step_s"]}
        if "async/in_flight" in values:
            derived["async/trainer_idle"] = values["timing/generate_s"] / values["timing/step_s"]
        return derived

    def _describe_progress(self) -> str:
        done, needed = self.collector.progress
        groups = f", {done} of {needed} groups" if needed and self.metrics.current_phase == "generate" else ""
        return f"{super()._describe_progress()}{groups}"


def _sample_ids(groups: Sequence[TrajectoryGroup]) -> list[tuple[str, int]]:
    return [
        (group.prompt.uid, item.sample) for group in groups for item in group.trajectories for _ in item.sequences()
    ]


class SFTTrainer(TrainingLoop):
    """The loop of supervised fine-tuning: it minimizes the negative log-likelihood of demonstrations."""

    def __init__(
        self,
        *,
        sft_examples: Sequence[SFTExample],
        index_at: Callable[[int], int],
        batch_dump: BatchDump | None = None,
        **kwargs: Any,
    ):
        """Create the trainer; `fit_and_export` runs it.

        Args:
            sft_examples: The demonstrations.
            index_at: Maps a position in the run to the index of the demonstration that is trained on there.
            batch_dump: Writes the batch of each step; None writes nothing.
            **kwargs: Arguments of `TrainingLoop`.
        """
        super().__init__(**kwargs)
        self.sft_examples = sft_examples
        self.index_at = index_at
        self.batch_dump = batch_dump
        self._step_tokens = 0

    async def fit_and_export(self) -> Path:
        """Train until the last step, export the policy as a Hugging Face folder, and return its path.

        Cancellation during the export takes effect only after the folder is complete. Raises as `fit` and
        `CheckpointManager.export` do.
        """
        await self.fit()
        return await finish_despite_cancellation(self.checkpoint_manager.export(self.step))

    async def _release_ranks(self) -> None:
        pass  # nothing else calls them

    async def _start(self) -> None:
        with startup_phase("weights", "loading the checkpoint, if there is one"):
            self.step, unfinished = await self.checkpoint_manager.resume()
        if StepAction.REFERENCE in unfinished.actions:
            await self.checkpoint_manager.update_reference()
        if StepAction.EXPORT in unfinished.actions:
            await finish_despite_cancellation(self.checkpoint_manager.export(self.step))
        self.trackers.begin(self.step, self.schedule.total_steps)

    async def _step(self) -> None:
        with self.metrics.timed("step"):
            start = self.schedule.first_prompt_of_step(self.step)
            positions = range(start, start + self.schedule.num_prompts_in_step(self.step))
            rows = [self.index_at(position) for position in positions]
            batch = collate_sft_examples([self.sft_examples[row] for row in rows])
            batch = await finish_despite_cancellation(self.learner.add_reference_logprobs(batch))
            if self.batch_dump is not None:
                await asyncio.to_thread(self.batch_dump.write, self.step + 1, batch, [str(row) for row in rows])
            self._step_tokens = len(batch.input_ids)
            await self._update(batch)
        self._log_step()
        await self._export_and_save()

    def _derived_metrics(self, values: Mapping[str, float]) -> dict[str, float]:
        return {"throughput/tokens_per_s": self._step_tokens / values["timing/step_s"]}

    def _actions_due(self) -> list[StepAction]:
        return [StepAction.LOG]  # the model is exported when the run ends


# -- profiles ----------------------------------------------------------------------------------------------------------


class StepProfiler:
    """Profiles the processes of a run during some steps. If a profile fails, a warning is logged."""

    def __init__(self, steps: Collection[int], folder: Path, processes: Callable[[], Sequence[Any]]):
        """Create the profiler.

        Args:
            steps: The steps to profile, as metrics.jsonl counts them; 1 is the first.
            folder: The folder that receives one folder per profiled step.
            processes: Returns the current processes: objects with a `name` and the coroutines `start_profile()` and
                `stop_profile(file)`. The latter returns a table of the slowest operations as text.
        """
        self._steps = frozenset(steps)
        self._folder = folder
        self._processes = processes

    @asynccontextmanager
    async def profile_step(self, step: int) -> AsyncIterator[None]:
        """Profile the body, which takes `step`, if the step is selected. Writes no files if the body raises."""
        folder = self._folder / f"step_{step}"
        if step not in self._steps or not _make_profile_folder(folder):
            yield
            return
        processes = self._processes()
        await gather_all(_try_call(process, process.start_profile()) for process in processes)
        yield
        files = [folder.absolute() / f"{process.name.replace(' ', '_')}.json.gz" for process in processes]
        stops = [
            _try_call(process, process.stop_profile(str(file)))
            for process, file in zip(processes, files, strict=True)
        ]  # fmt: skip
        tables = await gather_all(stops)
        sections = [f"{process.name}\n{table}\n" for process, table in zip(processes, tables, strict=True) if table]
        try:
            (folder / PROFILE_TABLE_FILE).write_text("\n".join(sections))
        except OSError as error:
            _log.warning("%s cannot be written (%s).", folder / PROFILE_TABLE_FILE, error.strerror)


def _make_profile_folder(folder: Path) -> bool:
    """Create the folder for a profile and archive one of an earlier attempt. Return False if that fails."""
    try:
        archive_previous_attempt(folder)
    except OSError as error:
        _log.warning("%s cannot be written (%s), so this step is not profiled.", folder, error.strerror)
        return False
    return True


async def _try_call(process: Any, call: Awaitable[Any]) -> Any:
    """Return the result of a call; None if it fails, for example because the process died or the disk is full."""
    try:
        return await call
    except Exception as error:
        _log.warning("%s has no profile of this step (%s: %s).", process.name, type(error).__name__, error)
        return None
