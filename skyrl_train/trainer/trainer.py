"""The training loop: collect rollouts, score them, compute advantages, update the model, publish its weights.

`Trainer._step` is one step of reinforcement learning and `SFTTrainer._step` one of fine-tuning. `TrainingLoop` repeats
steps, records each of them once, and saves the last complete one whatever ends the run.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_train import trace
from skyrl_train.aio import finish_despite_cancellation, gather_all
from skyrl_train.clock import now
from skyrl_train.config.schema import TrainerConfig
from skyrl_train.data.batch import TRIM_MEMORY_TOKENS, SFTExample, TrainBatch, collate, collate_sft_examples
from skyrl_train.data.token_arrays import trim_memory
from skyrl_train.data.trajectory import TrajectoryGroup
from skyrl_train.errors import NonFiniteUpdate, NonFiniteWeights, SkyRLError
from skyrl_train.learner.learner import RESPONSE_TIMEOUT_S, Learner
from skyrl_train.log_rotation import archive_previous_attempt
from skyrl_train.metrics import Metrics
from skyrl_train.report.progress_log import report_progress, startup_phase
from skyrl_train.report.protocol import SampleRow
from skyrl_train.report.trackers import Trackers
from skyrl_train.rollouts.collector import RolloutCollector
from skyrl_train.trainer.batch_dump import BatchDump
from skyrl_train.trainer.checkpoint_manager import CheckpointManager, PendingActions
from skyrl_train.trainer.engine_scaler import EngineScaler
from skyrl_train.trainer.evaluation import Evaluator
from skyrl_train.trainer.guards import Guards
from skyrl_train.trainer.publisher import WeightPublisher
from skyrl_train.trainer.rollout_metrics import add_rollout_metrics, sample_rows, table_rows
from skyrl_train.trainer.rollout_writer import RolloutWriter

_SLEEP_ON_EXIT_TIMEOUT_S = 30.0
"""Time for engines to fall asleep when a run ends early."""
PROFILE_TABLE_FILE = "slowest.txt"
_log = logging.getLogger(__name__)
TrajectoryTransform = Callable[[Sequence[TrajectoryGroup], Metrics], None]
"""Changes rewards or loss masks of a step's groups in place, before they become a batch."""
BatchTransform = Callable[[TrainBatch, Metrics], TrainBatch]
"""Adds to a scored batch what the update needs: advantages, off-policy corrections."""


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

    def num_prompts_in_step(self, step: int) -> int:
        """Number of prompts in the 0-based `step`; 0 for steps past the end of the run."""
        if step >= self.total_steps:
            return 0
        start = (step % self.steps_per_epoch) * self.train_batch_size
        return min(self.train_batch_size, self.num_prompts - start)

    def first_prompt_of_step(self, step: int) -> int:
        """Position in the run's order of prompts at which `step` begins, if no prompt is skipped or dropped."""
        epoch, rest = divmod(step, self.steps_per_epoch)
        return epoch * self.num_prompts + rest * self.train_batch_size

    def ends_epoch(self, step: int) -> bool:
        """Whether an epoch is complete after `step` finished steps."""
        return step % self.steps_per_epoch == 0

    def is_due(self, interval: int, step: int) -> bool:
        """True if an action that runs every `interval` steps runs after `step` finished steps.

        It also runs after the last step of the run. An interval of 0 or less disables it.
        """
        return interval > 0 and (step % interval == 0 or step == self.total_steps)


class TrainingLoop(ABC):
    """Takes steps until there are no more, and leaves in good order.

    `step` is the number of finished steps: of updates whose weights all ranks hold. A step is logged exactly once.
    Whatever ends the run, the last whole step is recorded and saved, unless its weights are lost: an update ended in
    its middle, they are not finite, or a rank that holds them died or hangs. What was still to be done about that step
    is saved with it, and done first when the run is resumed.
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
        """`cfg`: its intervals decide when the run is evaluated, saved and exported. `profiles`: of some steps."""
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
        """How often the ranks were started again in this run; then each row says so, and how many ranks there are."""
        self._weights_are_complete = True
        """Whether the ranks hold the weights of `step`; False during an update."""
        self._pending_actions: list[str] = []
        """What is still to be done about `step`: "reference", "publish", "evaluate", "log", "export", in this order."""
        self._samples: Sequence[SampleRow] = ()
        self._table_rows: Sequence[SampleRow] = ()

    async def fit(self) -> None:
        """Train up to the last step, from the checkpoint to resume or else from the start."""
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
            with suppress(Exception):  # a class of exceptions may take none
                total = self.schedule.total_steps
                error.add_note(f"It ended in {name} of {total}." if total < sys.maxsize else f"It ended in {name}.")
            raise

    @abstractmethod
    async def _start(self) -> None:
        """Resume."""

    @abstractmethod
    async def _step(self) -> None:
        """Take one step."""

    @abstractmethod
    def _derived_metrics(self, values: Mapping[str, float]) -> dict[str, float]:
        """More numbers that follow from those of a step, such as throughput/tokens_per_s."""

    def _describe_progress(self) -> str:
        """What the step is at: asked by another thread."""
        if self.metrics.current_phase == "update" and (progress := self.learner.optimizer_progress) is not None:
            return "update, {} of {} optimizer steps".format(*progress)
        return self.metrics.current_phase or "checkpoints and records"

    async def _update(self, batch: TrainBatch) -> None:
        """Take a step's optimizer steps, after which it counts; to its end, even if the run is asked to stop."""
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
            self._pending_actions.insert(0, "reference")
            await self.checkpoint_manager.update_reference()
            self._complete_action("reference")

    def _actions_due(self) -> list[str]:
        """What is to be done about a step that was just learnt."""
        exports = self.schedule.is_due(self.cfg.hf_save_interval, self.step)
        return ["log", *(["export"] if exports else [])]

    def _last_finite_checkpoint_hint(self) -> str:
        """Names the newest checkpoint whose weights are known to be good: an update of theirs was finite."""
        first_bad = (
            self.step + 1
            if self.checkpoint_manager.skipped_updates.since is None
            else self.checkpoint_manager.skipped_updates.since
        )
        found = self.checkpoint_manager.latest_before(first_bad - 1)
        if found is None:
            return "There is no checkpoint from before that."
        return f"The newest checkpoint from before that is {found}: resume from it with trainer.resume_mode=from_path."

    def _log_step(self) -> None:
        """Give the step's numbers and completions to the trackers."""
        values = self.metrics.flush()
        values |= self._derived_metrics(values)
        if self.restarts:
            values |= {"trainer/restarts": float(self.restarts), "trainer/ranks": float(len(self.learner.policy))}
        self._record(values)
        if self.guards is not None:
            self.guards.check(values, self.step)
            self.checkpoint_manager.capture_state()  # guards, too, count this step

    def _record(self, values: Mapping[str, float]) -> None:
        self.trackers.log(values, self.step)
        self.trackers.samples(self._samples, self.step)
        self.trackers.table(self._table_rows, self.step)
        self._complete_action("log")

    async def _export_and_save(self) -> None:
        """Export first: a run killed in between does it again, while one that saved its last step has nothing to do."""
        if "export" in self._pending_actions:
            await finish_despite_cancellation(self.checkpoint_manager.export(self.step))
            self._complete_action("export")
        if self.schedule.is_due(self.cfg.ckpt_interval, self.step):
            await self.checkpoint_manager.save(self.step)

    def _complete_action(self, action: str) -> None:
        if action in self._pending_actions:
            self._pending_actions.remove(action)

    @abstractmethod
    async def _release_ranks(self) -> None:
        """End what else takes part in calls of the ranks, before the last step is saved."""

    async def _save_on_exit(self, error: BaseException, started_at: int) -> None:
        """Record and save the last whole step of a run that ends early."""
        await self.learner.attach_stall_report(error)
        await self._release_ranks()
        # A rank that writes in the background takes other calls: one that is stopped would hold up the writing.
        if self.checkpoint_manager.async_checkpoint and not await self.learner.is_responsive(RESPONSE_TIMEOUT_S):
            await self.checkpoint_manager.abandon_pending_save()
        try:
            await self.checkpoint_manager.wait_until_written()
        except Exception as failure:
            _log.error("The last checkpoint could not be written: %s", failure)
        row: dict[str, float] = {}
        if "log" in self._pending_actions:
            row = {name: float(value) for name, value in self.metrics.flush().items()}
            self._record(row)
        if self.step == started_at or (self.step == self.checkpoint_manager.saved_step and not self._pending_actions):
            return
        if not self._weights_are_complete or isinstance(error, NonFiniteWeights):
            return  # nobody has the weights of this step
        # Asked also of a run that is told to end: with a rank that is stopped a save would pass its deadline, and a
        # scheduler kills long before that. None is merely busy: scores, updates and exports are taken to their end.
        if not await self.learner.is_responsive(RESPONSE_TIMEOUT_S):
            _log.error("Step %d is not saved: a rank of the trainer does not answer.", self.step)
            return
        try:
            await self.checkpoint_manager.save(self.step, PendingActions(tuple(self._pending_actions), row))
            await self.checkpoint_manager.wait_until_written()
        except Exception as failure:
            _log.error("Step %d, the last whole one, could not be saved: %s", self.step, failure)

    def _add_metrics(self, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.metrics.add(name, value)


class Trainer(TrainingLoop):
    """Decides the order of events and nothing else: all of its parts are built by `experiment` and passed in.

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
        **parts: Any,
    ):
        """`parts`: those of every TrainingLoop."""
        super().__init__(**parts)
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
        """Of the batch under way, by its group_ids."""

    async def _step(self) -> None:
        self.offload_manager.pop_transfer_s()  # those of an evaluation, or of the start, are not this step's
        with self.metrics.timed("step"):
            async with self.offload_manager.generating(before_sync=True):
                with self.metrics.timed("generate"):
                    groups = await self.collector.next_groups(self.step, self.metrics)
                await asyncio.to_thread(add_rollout_metrics, groups, self.step, self.metrics)
            async with self.offload_manager.training():
                await self._train_on(groups)
                await self._publish()
            self.collector.on_weights_published(self.step)
        if moved := self.offload_manager.pop_transfer_s():
            self.metrics.count("timing/offload_s", moved)
        if "evaluate" in self._pending_actions:
            await self._evaluate()
        self._log_step()
        await self._export_and_save()

    async def _train_on(self, groups: list[TrajectoryGroup]) -> None:
        """Train on `groups`: score what the loss needs, add advantages, take the optimizer steps.

        The list is empty afterwards: conversations are let go of before the update, unless they are being written.
        """
        for change in self.trajectory_transforms:
            change(groups, self.metrics)
        self.sample_ids = await asyncio.to_thread(_sample_ids, groups)
        batch = await asyncio.to_thread(collate, groups, token_rewards=self._reads_token_rewards(groups))
        with self.metrics.timed("score"):
            batch = await finish_despite_cancellation(self.learner.add_logprobs_and_values(batch))
        for add in self.batch_transforms:
            batch = await asyncio.to_thread(add, batch, self.metrics)
        if self.batch_dump is not None:
            uids = [uid for uid, _ in self.sample_ids]
            await asyncio.to_thread(self.batch_dump.write, self.step + 1, batch, uids)
        self._samples, self._table_rows = sample_rows(groups), table_rows(groups)
        kept = self.rollout_writer
        if kept is not None:
            self.learner.num_sequences_with_logprobs = kept.num_sequences(groups)
        learner = self.learner
        async with (
            kept.writing(self.step + 1, groups, batch, lambda: learner.update_logprobs) if kept else nullcontext()
        ):
            groups.clear()
            batch = batch.with_tokens(token_rewards=None)  # no update reads them
            if len(batch.input_ids) > TRIM_MEMORY_TOKENS:
                await asyncio.to_thread(trim_memory)
            await self._update(batch)

    def _reads_token_rewards(self, groups: Sequence[TrajectoryGroup]) -> bool:
        """Of a step that does not say it is assumed. Rollouts are kept with them unless they follow from turns."""
        steps = any(getattr(step, "needs_token_rewards", True) for step in self.batch_transforms)
        told = self.rollout_writer is not None and any(
            item.token_rewards is not None for group in groups for item in group.trajectories
        )
        return steps or told or self.batch_dump is not None

    async def _publish(self) -> None:
        with self.metrics.timed("publish"):
            async with self.offload_manager.syncing():
                try:
                    values = await self.publisher.publish(self.step)
                except NonFiniteWeights as error:
                    raise NonFiniteWeights(f"{error} {self._last_finite_checkpoint_hint()}") from error
        self._add_metrics(values)
        self._complete_action("publish")

    async def _release_ranks(self) -> None:
        if self.scaler is not None:
            await self.scaler.stop()
        await self.publisher.stop_restarts()

    async def close(self) -> None:
        """End the rollouts that are under way, and the engines that are starting."""
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
        self._complete_action("evaluate")

    async def _start(self) -> None:
        """Resume, publish the trainer's weights to the engines, and evaluate them if configured."""
        with startup_phase("weights", "the checkpoint, if there is one, and weights on their way to the engines"):
            async with self.offload_manager.training():
                self.step, unfinished = await self.checkpoint_manager.resume()
                await self._publish()
        if self.scaler is not None:  # engines may join once the others have weights
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
        """Do what a run that ended early left undone of its last step; its row is replaced by the complete one."""
        if "reference" in unfinished.actions:
            await self.checkpoint_manager.update_reference()
        row = unfinished.row | (published if "publish" in unfinished.actions else {})
        if "evaluate" in unfinished.actions and self.evaluator is not None:
            await self._evaluate()
            row |= self.metrics.flush()
        if row:
            self.trackers.log(row, self.step)
        if "export" in unfinished.actions:
            await finish_despite_cancellation(self.checkpoint_manager.export(self.step))
        await self.checkpoint_manager.save(self.step)

    def _actions_due(self) -> list[str]:
        evaluates = self.evaluator is not None and self.schedule.is_due(self.cfg.eval_interval, self.step)
        return ["publish", *(["evaluate"] if evaluates else []), *super()._actions_due()]

    def _derived_metrics(self, values: Mapping[str, float]) -> dict[str, float]:
        derived = {"throughput/tokens_per_s": values.get("rollouts/tokens", 0.0) / values["timing/step_s"]}
        if "async/in_flight" in values:
            derived["async/trainer_idle"] = values["timing/generate_s"] / values["timing/step_s"]
        return derived

    def _describe_progress(self) -> str:
        done, wanted = self.collector.progress
        groups = f", {done} of {wanted} groups" if wanted and self.metrics.current_phase == "generate" else ""
        return f"{super()._describe_progress()}{groups}"


def _sample_ids(groups: Sequence[TrajectoryGroup]) -> list[tuple[str, int]]:
    return [
        (group.prompt.uid, item.sample) for group in groups for item in group.trajectories for _ in item.sequences()
    ]


class SFTTrainer(TrainingLoop):
    """Minimises the negative log-likelihood of demonstrations.

    `index_at` maps a position in the run to the index of the demonstration trained on there.
    """

    def __init__(
        self,
        *,
        sft_examples: Sequence[SFTExample],
        index_at: Callable[[int], int],
        batch_dump: BatchDump | None = None,
        **parts: Any,
    ):
        """`parts`: those of every TrainingLoop."""
        super().__init__(**parts)
        self.sft_examples = sft_examples
        self.index_at = index_at
        self.batch_dump = batch_dump
        self._step_tokens = 0

    async def fit_and_export(self) -> Path:
        """Train up to the last step; returns the exported Hugging Face folder, which is whole even if told to end."""
        await self.fit()
        return await finish_despite_cancellation(self.checkpoint_manager.export(self.step))

    async def _release_ranks(self) -> None:
        """Nothing else calls them."""

    async def _start(self) -> None:
        with startup_phase("weights", "the checkpoint, if there is one"):
            self.step, unfinished = await self.checkpoint_manager.resume()
        if "reference" in unfinished.actions:
            await self.checkpoint_manager.update_reference()
        if "export" in unfinished.actions:
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

    def _actions_due(self) -> list[str]:
        return ["log"]  # the model is exported when the run ends


# -- who holds the accelerator -----------------------------------------------------------------------------------------


class OffloadManager:
    """The phases of a step, as context managers: an exception leaves the right owner of the accelerator.

    Entering a phase moves engines and learner onto or off the accelerator as it needs. Here they have dedicated GPUs,
    and nothing moves.
    """

    @asynccontextmanager
    async def generating(self, before_sync: bool = False) -> AsyncIterator[None]:
        """While inside, the engines accept requests. `before_sync`: they get new weights before they do so again."""
        yield

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """While inside, the learner may compute."""
        yield

    @asynccontextmanager
    async def syncing(self) -> AsyncIterator[None]:
        """While inside, the engines can receive weights; to be entered within `training`."""
        yield

    def pop_transfer_s(self) -> float:
        """Seconds that moving has taken since the last call, apart from what `syncing` moves: that is a sync's time."""
        return 0.0


class ColocatedOffloadManager(OffloadManager):
    """Engines and learner take turns on the same GPUs; at first the learner holds them and the engines are asleep."""

    def __init__(self, engines: Any, learner: Learner, sleep_level_before_sync: int = 1):
        """`level_before_sync`: how deeply engines sleep until a sync; at 2 they give up weights that it replaces."""
        self._engines = engines
        self._learner = learner
        self._sleep_level_before_sync = sleep_level_before_sync
        self._transfer_s = 0.0

    @asynccontextmanager
    async def generating(self, before_sync: bool = False) -> AsyncIterator[None]:
        with self._timed_transfer():
            await self._learner.offload()
        try:
            with self._timed_transfer():
                await self._engines.wake_up()
            yield
        except BaseException:
            # The run ends: an engine that hangs must not keep it from saving, which needs no accelerator.
            with suppress(SkyRLError, TimeoutError):
                async with asyncio.timeout(_SLEEP_ON_EXIT_TIMEOUT_S):
                    await self._engines.sleep()
            raise
        with self._timed_transfer():
            await self._engines.sleep(self._sleep_level_before_sync if before_sync else 1)

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        with self._timed_transfer():
            await self._learner.onload()
        yield

    @asynccontextmanager
    async def syncing(self) -> AsyncIterator[None]:
        await self._learner.onload_weights_only()  # first: the engines' weights take the room that the rest had
        await self._engines.wake_up(["weights"])
        yield

    def pop_transfer_s(self) -> float:
        taken, self._transfer_s = self._transfer_s, 0.0
        return taken

    @contextmanager
    def _timed_transfer(self) -> Iterator[None]:
        start = now()
        try:
            yield
        finally:
            self._transfer_s += now() - start


# -- profiles ----------------------------------------------------------------------------------------------------------


class StepProfiler:
    """Has processes profile themselves during some steps.

    `processes`: those of a moment; objects with a `name` and the coroutines `start_profile()` and `stop_profile(file)`,
    which returns a table. What goes wrong with a profile is a warning: the run goes on without it.
    """

    def __init__(self, steps: Collection[int], folder: Path, processes: Callable[[], Sequence[Any]]):
        """`steps`: as metrics.jsonl counts them, 1 is the first; `folder` gets a folder for each."""
        self._steps = frozenset(steps)
        self._folder = folder
        self._processes = processes

    @asynccontextmanager
    async def profile_step(self, step: int) -> AsyncIterator[None]:
        """Inside, `step` is taken; it is profiled if it is one of those. If it raises, there is no profile of it."""
        folder = self._folder / f"step_{step}"
        if step not in self._steps or not _make_profile_folder(folder):
            yield
            return
        processes = self._processes()
        await gather_all(_profile_of(one, one.start_profile()) for one in processes)
        yield
        files = [folder.absolute() / f"{one.name.replace(' ', '_')}.json.gz" for one in processes]
        stops = [_profile_of(one, one.stop_profile(str(file))) for one, file in zip(processes, files, strict=True)]
        tables = await gather_all(stops)
        sections = [f"{one.name}\n{table}\n" for one, table in zip(processes, tables, strict=True) if table]
        try:
            (folder / PROFILE_TABLE_FILE).write_text("\n".join(sections))
        except OSError as error:
            _log.warning("%s cannot be written (%s).", folder / PROFILE_TABLE_FILE, error.strerror)


def _make_profile_folder(folder: Path) -> bool:
    """Whether there is a folder for a profile; one of an earlier attempt at the step is set apart."""
    try:
        archive_previous_attempt(folder)
    except OSError as error:
        _log.warning("%s cannot be written (%s): there is no profile of this step.", folder, error.strerror)
        return False
    return True


async def _profile_of(process: Any, call: Awaitable[Any]) -> Any:
    """The result of a call; None if it fails, as where the process died or the disk is full."""
    try:
        return await call
    except Exception as error:
        _log.warning("%s has no profile of this step (%s: %s).", process.name, type(error).__name__, error)
        return None
