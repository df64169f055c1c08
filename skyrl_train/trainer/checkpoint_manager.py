"""The contents of a run's checkpoints and exports, how they are written, and how a run resumes from a checkpoint."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from skyrl_train import trace
from skyrl_train.aio import mark_exception_retrieved
from skyrl_train.atomic_files import FileDigest
from skyrl_train.errors import CheckpointError, CheckpointMismatch, DeadlineExceeded, SkyRLError
from skyrl_train.learner.base_model_record import BaseModelRecord, check_same_base_model
from skyrl_train.learner.learner import Learner, WorkerGroup
from skyrl_train.storage.mirror import Mirror
from skyrl_train.strategies.base import LearningRates
from skyrl_train.trainer.checkpoints import STATE_FILE, Checkpoint, CheckpointStore

MAX_FAILED_SAVES = 3
"""Number of consecutive failed saves that end the run, because all progress since the last checkpoint is at risk."""
RETRY_INTERVAL_S = 5.0
"""Seconds between attempts of a write that must succeed before the run continues."""
_POLL_INTERVAL_S = 0.2
"""Seconds between two polls of the ranks for their written files."""
SKIPPED_SUFFIX = "/skipped"
"""Suffix of the metrics with the share of a model's updates that were skipped because of a non-finite gradient."""
_log = logging.getLogger(__name__)


class StepAction(StrEnum):
    """An action that follows the update of a step, in the order of execution. Checkpoints contain these values."""

    REFERENCE = "reference"
    """Copy the policy to the reference."""
    PUBLISH = "publish"
    """Send the weights to the engines."""
    EVALUATE = "evaluate"
    LOG = "log"
    """Send the metrics to the trackers."""
    EXPORT = "export"


@dataclass(frozen=True)
class PendingActions:
    """Actions of the last step that a run did not complete before it ended; saved with the checkpoint of that step."""

    actions: tuple[str, ...]
    """Values of `StepAction`."""
    row: dict[str, float]
    """The metrics of the step so far, without those of the pending actions."""


class SkippedUpdates:
    """The start of the current series of steps with skipped updates. Weights since then may be damaged."""

    def __init__(self) -> None:
        self.since: int | None = None
        """The first step of the series; None if the last step skipped no update."""

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Update `since` with the metrics of `step`. Call it once per step, in ascending order."""
        skipped = any(share for name, share in metrics.items() if name.endswith(SKIPPED_SUFFIX))
        self.since = (step if self.since is None else self.since) if skipped else None

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint, {"since": ...}."""
        return {"since": self.since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `state_dict`. Raises KeyError, TypeError or ValueError if it is malformed."""
        self.since = None if state["since"] is None else int(state["since"])


class CheckpointManager:
    """Saves and restores everything that a step depends on: weights, optimizer, schedule, step and controllers.

    Controllers are the other stateful objects, with `state_dict()` and `load_state_dict()`: the position in the data,
    the KL coefficient. Sampling and the order of the data are functions of the seed and that position.
    """

    def __init__(
        self,
        checkpoints: CheckpointStore,
        learner: Learner,
        export_path: Path,
        *,
        resume_mode: str,
        resume_path: str | None,
        fingerprints: Mapping[str, str],
        controllers: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        reference_folder: Path | None = None,
        async_checkpoint: bool = False,
        deadline_s: float = 1800.0,
        export_mirror: Mirror | None = None,
    ):
        """Wrap a learner without reading or writing anything.

        Args:
            checkpoints: The checkpoints of this run.
            learner: The ranks to save and restore.
            export_path: The folder of exports.
            resume_mode: trainer.resume_mode.
            resume_path: trainer.resume_path.
            fingerprints: Fingerprints of the data, by name. `resume` rejects checkpoints with different ones.
            controllers: Objects with `state_dict()` and `load_state_dict()`, by name.
            chat_template: The chat template of the training, for exports; None for the tokenizer's own.
            reference_folder: A folder for copying the policy to the reference; None if the reference never changes.
            async_checkpoint: True if ranks write checkpoints from a copy in memory while training continues.
            deadline_s: Seconds that the ranks may take to write a checkpoint.
            export_mirror: The mirror of the export folder in remote storage.
        """
        self._checkpoints = checkpoints
        self._learner = learner
        self._export_path = export_path
        self._resume_mode = resume_mode
        self._resume_path = resume_path
        self._fingerprints = dict(fingerprints)
        self.skipped_updates = SkippedUpdates()
        self._controllers = {**(controllers or {}), "skipped_updates": self.skipped_updates}
        self._chat_template = chat_template
        self._reference_folder = None if learner.reference is None else reference_folder
        self.async_checkpoint = async_checkpoint
        self._deadline_s = deadline_s
        self._export_mirror = export_mirror
        self._bases: dict[str, BaseModelRecord] = {}
        """The models that policy and critic started from; filled by `_base_models`."""
        self._captured_state: dict[str, Any] = {}
        """The controllers' states at the end of the last complete step."""
        self._writing: asyncio.Task[None] | None = None
        self._consecutive_failures = 0
        self.saved_step = 0
        """The step of the last checkpoint that was written or loaded; 0 if there is none."""
        self.resumed_from: Path | None = None
        """The folder of the loaded checkpoint; None for a fresh run."""

    async def resume(self) -> tuple[int, PendingActions]:
        """Load the checkpoint that trainer.resume_mode selects into the ranks and the controllers.

        Returns:
            The step to continue from, 0 for a fresh run, and the actions that are pending for it.

        Raises:
            CheckpointMismatch: Data, base model or LoRA settings have changed since the checkpoint was written.
            CheckpointError: No checkpoint is intact, or the state of the selected one is malformed.
            ConfigError: trainer.resume_path is not a checkpoint.
        """
        checkpoint = await asyncio.to_thread(self._checkpoints.find_resumable, self._resume_mode, self._resume_path)
        if checkpoint is None:
            return 0, PendingActions((), {})
        saved = SavedState.of(checkpoint)
        for name, stored in saved.fingerprints.items():
            current = self._fingerprints.get(name)
            if current != stored:
                raise CheckpointMismatch(
                    f"{name} has changed since {checkpoint.path} was written (then {stored}, now {current}). "
                    "The run cannot be resumed with other data. Restore it, or start in another trainer.ckpt_path."
                )
        await self._check_base_models(checkpoint, saved)
        for role, group in self._learner.trained.items():
            _log_changed_rate(role, (await group.call_all("load", str(checkpoint.path / role)))[0])
        self._learner.set_version(checkpoint.step)
        self.saved_step, self.resumed_from = checkpoint.step, checkpoint.path
        if self._reference_folder is not None and (checkpoint.path / "reference").is_dir():
            await self._call_reference("reload", checkpoint.path / "reference")
        for name, controller in self._controllers.items():
            if name in saved.controllers:  # earlier versions do not have all controllers
                try:
                    controller.load_state_dict(saved.controllers[name])
                except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
                    problem = f"{type(error).__name__}: {error}"
                    raise _malformed_state_error(
                        checkpoint, f"controllers.{name}", saved.controllers[name], problem
                    ) from error
        self.capture_state()
        return checkpoint.step, saved.unfinished

    async def _base_models(self) -> dict[str, BaseModelRecord]:
        for role, group in self._learner.trained.items():
            if role not in self._bases:
                shares, adapters = zip(*await group.call_all("base_model_fingerprints"), strict=True)
                self._bases[role] = BaseModelRecord.of(shares, adapters[0])
        return self._bases

    async def _check_base_models(self, checkpoint: Checkpoint, saved: SavedState) -> None:
        """Raise CheckpointMismatch if a checkpoint was trained from another model, or with other adapters."""
        for role, current in (await self._base_models()).items():
            if role in saved.base_models:
                check_same_base_model(checkpoint.path, saved.base_models[role], current, f"trainer.{role}.model")
            else:
                _log.warning(
                    "%s was saved by an earlier version, which did not record the base model of its %s. Make sure that "
                    "trainer.%s.model.path and trainer.%s.model.lora have not changed since.",
                    *(checkpoint.path, role, role, role),
                )

    def capture_state(self) -> None:
        """Copy the controllers' states for the next `save`. Call it at the end of every step."""
        self._captured_state = {name: controller.state_dict() for name, controller in self._controllers.items()}

    async def save(self, step: int, unfinished: PendingActions | None = None) -> None:
        """Write a checkpoint atomically: it appears complete or not at all, even if this call is cancelled.

        Waits for the previous save and raises its error. If the disk is full or fails, the checkpoint is skipped with a
        warning. With `async_checkpoint` the call returns once the ranks have copied their weights; errors are then
        raised by the next `save` or `wait_until_written`.

        Args:
            step: The step of the checkpoint.
            unfinished: Actions to execute when the run is resumed; None if there are none.

        Raises:
            CheckpointError: MAX_FAILED_SAVES saves in a row could not be written, or a rank's file is missing.
            DeadlineExceeded: The ranks took longer than `deadline_s`.
        """
        await self.wait_until_written()
        copied = asyncio.Event()
        state = {
            "fingerprints": self._fingerprints,
            "chat_template": self._chat_template,
            "base_models": {role: asdict(base) for role, base in (await self._base_models()).items()},
            "controllers": self._captured_state,
            "unfinished": asdict(unfinished or PendingActions((), {})),
        }
        self._writing = asyncio.create_task(self._write(step, state, copied))
        if self.async_checkpoint:
            await copied.wait()
        else:
            await self.wait_until_written()

    async def wait_until_written(self) -> None:
        """Wait for the last save to end and raise its error."""
        if self._writing is not None:
            await asyncio.wait([self._writing])
            writing, self._writing = self._writing, None
            writing.result()

    async def abandon_pending_save(self) -> None:
        """Cancel the save in progress, if there is one, and log an error. Its checkpoint does not appear.

        Call this if a rank that writes the save no longer responds.
        """
        if self._writing is None or self._writing.done():
            return
        writing, self._writing = mark_exception_retrieved(self._writing), None
        writing.cancel()
        await asyncio.wait([writing])
        _log.error("The save in progress was abandoned because a rank of the trainer does not respond.")

    async def ensure_saved(self, step: int) -> None:
        """Wait for the last save, and save `step` again every RETRY_INTERVAL_S seconds until it is written.

        Raises CheckpointError if MAX_FAILED_SAVES saves in a row fail.
        """
        await self.wait_until_written()
        while self.saved_step != step:
            await asyncio.sleep(RETRY_INTERVAL_S)
            await self.save(step)
            await self.wait_until_written()

    def latest_before(self, before: int) -> Path | None:
        """Return the newest checkpoint of a step smaller than `before`; None if there is none."""
        return self._checkpoints.latest_before(before)

    async def export(self, step: int) -> Path:
        """Write the policy as a Hugging Face folder and return its path. Replaces an existing export of the step.

        If the disk is full or fails, the export is retried after RETRY_INTERVAL_S seconds. Raises CheckpointError after
        MAX_FAILED_SAVES failed attempts.
        """
        folder = self._export_path / f"global_step_{step}" / "policy"
        if self._export_mirror is not None:
            self._export_mirror.mark_unfinished(folder)
        with trace.span("export", track="checkpoints", overlaps=True):
            await self._export_with_retries(f"Export of step {step}", folder)
        if self._export_mirror is not None:
            self._export_mirror.enqueue(folder)
        return folder

    async def update_reference(self) -> None:
        """Copy the policy's weights to the reference model. Does nothing if the reference does not follow the policy.

        A failed copy is retried after RETRY_INTERVAL_S seconds.

        Raises:
            CheckpointError: MAX_FAILED_SAVES attempts to write the copy failed.
        """
        folder = self._reference_folder
        if folder is None:
            return
        shutil.rmtree(folder, ignore_errors=True)
        try:
            await self._export_with_retries("Copy of the policy for the reference", folder)
            await self._call_reference("reload", folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def _export_with_retries(self, description: str, folder: Path) -> None:
        # Files of an export by another run would be read as part of this one: an index of other weights, an adapter.
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        for attempt in range(1, MAX_FAILED_SAVES + 1):
            try:
                return await self._learner.policy.call_all("export", str(folder), self._chat_template)  # type: ignore[return-value]
            except OSError as error:
                if isinstance(error, SkyRLError):  # DeadlineExceeded is a TimeoutError, which is an OSError
                    raise
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
                failure = f"{description} COULD NOT BE WRITTEN ({type(error).__name__}: {error})."
                if attempt == MAX_FAILED_SAVES:
                    raise CheckpointError(
                        f"{failure} This is failure {attempt} in a row. Free disk space at {folder.parent} and resume."
                    ) from error
                _log.warning("%s The next attempt starts in %g s.", failure, RETRY_INTERVAL_S)
                await asyncio.sleep(RETRY_INTERVAL_S)

    async def _write(self, step: int, state: Mapping[str, Any], copied: asyncio.Event) -> None:
        """Write a checkpoint; sets `copied` once the ranks may change their weights again."""
        try:
            with trace.span("checkpoint", track="checkpoints"):
                files = await self._write_files(step, copied)
                await asyncio.to_thread(self._checkpoints.commit, step, state, files)
        except OSError as error:
            if isinstance(error, SkyRLError):  # DeadlineExceeded is a TimeoutError, which is an OSError
                raise
            ranks = [worker for group in self._learner.trained.values() for worker in group.workers]
            # Other ranks may still be writing into the folder that is about to be deleted.
            await asyncio.gather(*(rank.wait_for_discarded_save() for rank in ranks), return_exceptions=True)
            await asyncio.to_thread(self._checkpoints.discard, step)
            self._record_failure(step, error)
        except Exception:
            await asyncio.to_thread(self._checkpoints.discard, step)
            raise
        else:
            self._consecutive_failures, self.saved_step = 0, step
        finally:
            copied.set()

    async def _write_files(self, step: int, copied: asyncio.Event) -> dict[str, FileDigest]:
        """Have the ranks write their parts; returns the digests of the files by path inside the checkpoint."""
        folder = await asyncio.to_thread(self._checkpoints.begin, step)
        trained = self._learner.trained
        for role, group in trained.items():
            (folder / role).mkdir(parents=True, exist_ok=True)
            await group.call_all("save", str(folder / role), self.async_checkpoint)
        if self._reference_folder is not None:
            await self._call_reference("export", folder / "reference")
        copied.set()
        try:
            async with asyncio.timeout(self._deadline_s):
                files = {role: await _wait_for_files(group) for role, group in trained.items()}
        except TimeoutError as error:
            raise DeadlineExceeded(f"writing of checkpoint {folder}", self._deadline_s) from error
        return {f"{role}/{name}": digest for role, digests in files.items() for name, digest in digests.items()}

    def _record_failure(self, step: int, error: OSError) -> None:
        self._consecutive_failures += 1
        failure = f"Checkpoint of step {step} COULD NOT BE WRITTEN ({type(error).__name__}: {error})."
        if self._consecutive_failures >= MAX_FAILED_SAVES:
            raise CheckpointError(
                f"{failure} This is failure {self._consecutive_failures} in a row. "
                "Free disk space at trainer.ckpt_path and resume."
            ) from error
        _log.warning(
            "%s Training continues until the next save; the run ends after %d failures in a row.",
            failure,
            MAX_FAILED_SAVES,
        )

    async def _call_reference(self, method: str, folder: Path) -> None:
        """Export or reload the reference as a Hugging Face folder, which fits any number of ranks and any dtype."""
        assert self._learner.reference is not None
        await self._learner.reference.call_all(method, str(folder))


@dataclass(frozen=True, slots=True)
class SavedState:
    """The content of trainer_state.json. Earlier versions did not write the fields that have defaults."""

    fingerprints: dict[str, str]
    controllers: dict[str, dict[str, Any]]
    base_models: dict[str, BaseModelRecord] = field(default_factory=dict)
    chat_template: str | None = None
    """The chat template of the training; None for the tokenizer's own."""
    unfinished: PendingActions = PendingActions((), {})

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> SavedState:
        """Validate the state of a checkpoint and return it. Raises CheckpointError if a field is missing or wrong.

        Checksums only prove that the file is intact, not that a run wrote it.
        """
        try:
            return TypeAdapter(cls).validate_python(checkpoint.state)
        except ValidationError as error:
            problem = error.errors()[0]
            raise _malformed_state_error(
                checkpoint, ".".join(map(str, problem["loc"])), problem["input"], problem["msg"]
            ) from error


def _log_changed_rate(role: str, rates: LearningRates | None) -> None:
    if rates is not None and rates.in_checkpoint != rates.in_run:
        _log.warning(
            "The learning rate of the %s's next update is %g in this run's schedule and %g in the schedule of the run "
            "that saved the checkpoint. trainer.max_steps, trainer.epochs and trainer.%s.optimizer_config set the "
            "schedule.",
            *(role, rates.in_run, rates.in_checkpoint, role),
        )


def _malformed_state_error(checkpoint: Checkpoint, key: str, value: object, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint.path / STATE_FILE}: {key}={value!r:.200} is not a value that a run saves "
        f"({problem}). Resume from another checkpoint with trainer.resume_mode=from_path, or "
        "start over in another trainer.ckpt_path."
    )


async def _wait_for_files(group: WorkerGroup) -> dict[str, FileDigest]:
    """Wait until all ranks of a model have written their files, and return the digests by file name."""
    digests: dict[str, FileDigest] = {}
    for worker in group.workers:
        while (files := await worker.poll_save()) is None:
            await asyncio.sleep(_POLL_INTERVAL_S)
        digests |= files
    return digests
