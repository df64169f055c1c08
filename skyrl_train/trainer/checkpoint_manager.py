"""A run's checkpoints and exports: what they contain, when they are written, and how a run resumes from one."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
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
"""After this many consecutive checkpoints that could not be written the run stops: all it learns may be lost."""
RETRY_INTERVAL_S = 5.0
"""Time after which what could not be written, and must be before the run goes on, is tried again."""
_POLL_INTERVAL_S = 0.2
"""How often the ranks are asked whether they have written their files."""
SKIPPED_SUFFIX = "/skipped"
"""How the metrics end that say which share of a model's updates was skipped, as the gradient was not finite."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PendingActions:
    """What was still to be done about the last step when it was saved, because the run had to end."""

    actions: tuple[str, ...]
    """Of "reference", "publish", "evaluate", "export"."""
    row: dict[str, float]
    """The step's metrics so far, to be completed by what is done."""


class SkippedUpdates:
    """Remembers the first of the latest consecutive steps with skipped updates: weights from then on may be damaged."""

    def __init__(self) -> None:
        self.since: int | None = None

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take in the metrics of a step's updates."""
        skipped = any(share for name, share in metrics.items() if name.endswith(SKIPPED_SUFFIX))
        self.since = (step if self.since is None else self.since) if skipped else None

    def state_dict(self) -> dict[str, Any]:
        return {"since": self.since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.since = None if state["since"] is None else int(state["since"])


class CheckpointManager:
    """Saves and restores everything a step depends on: weights, optimizer, schedule, step, controllers.

    Controllers are all other objects with `state()` and `load_state()`: the position in the data, the KL coefficient.
    Sampling and the order of the data need no state: both are functions of the seed and of that position.
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
        """Wrap a learner; nothing is read or written yet.

        Args:
            checkpoints: The checkpoints of this run.
            learner: The ranks that are saved and restored.
            export_path: The folder of exports.
            resume_mode: trainer.resume_mode.
            resume_path: trainer.resume_path.
            fingerprints: Fingerprints of the data; a checkpoint with others is refused.
            controllers: Objects with `state()` and `load_state()`, by name.
            chat_template: The chat template of the training, for exports; None for the tokenizer's own.
            reference_folder: Used to copy the policy to the reference; None for a reference that never changes.
            async_checkpoint: The ranks write checkpoints from a copy in memory while the run goes on.
            deadline_s: Seconds within which a rank must have written what it has copied.
            exports: The mirror of the folder of exports.
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
        """The models that policy and critic started from, once `_base_models` has asked the ranks."""
        self._captured_state: dict[str, Any] = {}
        """The controllers' states at the end of the last whole step."""
        self._writing: asyncio.Task[None] | None = None
        self._consecutive_failures = 0
        self.saved_step = 0
        """The step of the last checkpoint that was written or resumed from."""
        self.resumed_from: Path | None = None
        """The folder of the checkpoint that was resumed from."""

    async def resume(self) -> tuple[int, PendingActions]:
        """Load the checkpoint that the configuration asks for: the step to continue from, and what it left undone.

        The step is 0 for a fresh run.

        Raises:
            CheckpointMismatch: Data, base model or LoRA settings have changed since the checkpoint was written.
            CheckpointError: The checkpoint's state is not what `save` writes.
        """
        found = await asyncio.to_thread(self._checkpoints.find_resumable, self._resume_mode, self._resume_path)
        if found is None:
            return 0, PendingActions((), {})
        saved = SavedState.of(found)
        for name, stored in saved.fingerprints.items():
            current = self._fingerprints.get(name)
            if current != stored:
                raise CheckpointMismatch(
                    f"{name} has changed since {found.path} was written (then {stored}, now {current}): "
                    "the run cannot go on where it stopped. Restore the data, or start in another trainer.ckpt_path."
                )
        await self._check_base_models(found, saved)
        for role, group in self._learner.trained.items():
            _log_changed_rate(role, (await group.call_all("load", str(found.path / role)))[0])
        self._learner.set_version(found.step)
        self.saved_step, self.resumed_from = found.step, found.path
        if self._reference_folder is not None and (found.path / "reference").is_dir():
            await self._call_reference("reload", found.path / "reference")
        for name, controller in self._controllers.items():
            if name in saved.controllers:  # else it is of a version that did not have it
                try:
                    controller.load_state_dict(saved.controllers[name])
                except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
                    problem = f"{type(error).__name__}: {error}"
                    raise _malformed_state_error(
                        found, f"controllers.{name}", saved.controllers[name], problem
                    ) from error
        self.capture_state()
        return found.step, saved.unfinished

    async def _base_models(self) -> dict[str, BaseModelRecord]:
        """Return the models that policy and critic started from."""
        for role, group in self._learner.trained.items():
            if role not in self._bases:
                shares, adapters = zip(*await group.call_all("base_model_fingerprints"), strict=True)
                self._bases[role] = BaseModelRecord.of(shares, adapters[0])
        return self._bases

    async def _check_base_models(self, found: Checkpoint, saved: SavedState) -> None:
        """Raise CheckpointMismatch if a checkpoint was trained from another model, or with other adapters."""
        for role, now in (await self._base_models()).items():
            if role in saved.base_models:
                check_same_base_model(found.path, saved.base_models[role], now, f"trainer.{role}.model")
            else:
                _log.warning(
                    "%s does not record which model its %s was trained from: an earlier version has saved it. Make "
                    "sure that trainer.%s.model.path and trainer.%s.model.lora have not changed since.",
                    *(found.path, role, role, role),
                )

    def capture_state(self) -> None:
        """Note the controllers' states: to be called at the end of every step, before the next one changes them."""
        self._captured_state = {name: controller.state_dict() for name, controller in self._controllers.items()}

    async def save(self, step: int, unfinished: PendingActions | None = None) -> None:
        """Write a checkpoint atomically: it appears complete or not at all, even if this call is cancelled.

        A disk that is full or fails costs this checkpoint only: a warning, and the next save tries again. Raises
        CheckpointError when that has happened MAX_FAILED_SAVES times in a row. In the background it returns once the
        weights are copied, and what is raised later is raised by the next call or by `written`.
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
        """Wait until the last save has ended, and raise what it raised."""
        if self._writing is not None:
            await asyncio.wait([self._writing])
            writing, self._writing = self._writing, None
            writing.result()

    async def abandon_pending_save(self) -> None:
        """Do not wait for the save that is under way any longer: a rank that writes it is gone."""
        if self._writing is None or self._writing.done():
            return
        writing, self._writing = mark_exception_retrieved(self._writing), None
        writing.cancel()
        await asyncio.wait([writing])
        _log.error("The checkpoint that was being written is given up: a rank of the trainer does not answer.")

    async def ensure_saved(self, step: int) -> None:
        """Wait for the last save, and try again if it failed, up to MAX_FAILED_SAVES in a row (CheckpointError)."""
        await self.wait_until_written()
        while self.saved_step != step:
            await asyncio.sleep(RETRY_INTERVAL_S)
            await self.save(step)
            await self.wait_until_written()

    def latest_before(self, before: int) -> Path | None:
        """The newest checkpoint of a step before this one."""
        return self._checkpoints.latest_before(before)

    async def export(self, step: int) -> Path:
        """Write the policy as a Hugging Face folder; returns its path. Raises CheckpointError, see `_to_disk`."""
        folder = self._export_path / f"global_step_{step}" / "policy"
        if self._export_mirror is not None:
            self._export_mirror.mark_unfinished(folder)
        with trace.span("export", track="checkpoints", overlaps=True):
            await self._export_with_retries(f"Export of step {step}", folder)
        if self._export_mirror is not None:
            self._export_mirror.enqueue(folder)
        return folder

    async def update_reference(self) -> None:
        """Copy the policy's weights to the reference, if the reference follows the policy."""
        folder = self._reference_folder
        if folder is None:
            return
        shutil.rmtree(folder, ignore_errors=True)
        try:
            await self._export_with_retries("The reference's new weights", folder)
            await self._call_reference("reload", folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def _export_with_retries(self, what: str, folder: Path) -> None:
        """Export the policy to `folder`, in place of what is there.

        A disk that is full or fails leaves nothing there, and is tried again after RETRY_S. Raises CheckpointError when
        that has happened MAX_FAILED_SAVES times in a row.
        """
        # Files of an export by another run would be read as part of this one: an index of other weights, an adapter.
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        for attempt in range(1, MAX_FAILED_SAVES + 1):
            try:
                return await self._learner.policy.call_all("export", str(folder), self._chat_template)  # type: ignore[return-value]
            except OSError as error:
                if isinstance(error, SkyRLError):  # a deadline is a TimeoutError, which is an OSError
                    raise
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
                tried = f"{what} COULD NOT BE WRITTEN ({type(error).__name__}: {error})."
                if attempt == MAX_FAILED_SAVES:
                    raise CheckpointError(
                        f"{tried} This is failure {attempt} in a row: make room at {folder.parent} and resume."
                    ) from error
                _log.warning("%s It is tried again in %g s.", tried, RETRY_INTERVAL_S)
                await asyncio.sleep(RETRY_INTERVAL_S)

    async def _write(self, step: int, state: Mapping[str, Any], copied: asyncio.Event) -> None:
        """Write a checkpoint; `copied` is set once the ranks may change their weights again."""
        try:
            with trace.span("checkpoint", track="checkpoints"):
                files = await self._write_files(step, copied)
                await asyncio.to_thread(self._checkpoints.commit, step, state, files)
        except OSError as error:
            if isinstance(error, SkyRLError):  # a deadline is a TimeoutError, which is an OSError
                raise
            ranks = [worker for group in self._learner.trained.values() for worker in group.workers]
            # Others may still write what this one could not.
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
        """Have the ranks write their parts; returns what they wrote, by path inside the checkpoint."""
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
                files = {role: await _files_of(group) for role, group in trained.items()}
        except TimeoutError as error:
            raise DeadlineExceeded(f"writing of checkpoint {folder}", self._deadline_s) from error
        return {f"{role}/{name}": held for role, of_role in files.items() for name, held in of_role.items()}

    def _record_failure(self, step: int, error: OSError) -> None:
        self._consecutive_failures += 1
        tried = f"Checkpoint of step {step} COULD NOT BE WRITTEN ({type(error).__name__}: {error})."
        if self._consecutive_failures >= MAX_FAILED_SAVES:
            raise CheckpointError(
                f"{tried} This is failure {self._consecutive_failures} in a row: make room at trainer.ckpt_path and resume."
            ) from error
        _log.warning(
            "%s Training goes on, and the next save tries again; after %d failures in a row the run ends.",
            tried,
            MAX_FAILED_SAVES,
        )

    async def _call_reference(self, method: str, folder: Path) -> None:
        """Export or reload the reference as a Hugging Face folder: its ranks and dtype may not be the policy's."""
        assert self._learner.reference is not None
        await self._learner.reference.call_all(method, str(folder))


@dataclass(frozen=True, slots=True)
class SavedState:
    """What `save` writes to trainer_state.json. Earlier versions did not write what has a default here."""

    fingerprints: dict[str, str]
    controllers: dict[str, dict[str, Any]]
    base_models: dict[str, BaseModelRecord] = field(default_factory=dict)
    chat_template: str | None = None
    """None for the tokenizer's own."""
    unfinished: PendingActions = PendingActions((), {})

    @classmethod
    def of(cls, found: Checkpoint) -> SavedState:
        """Read a checkpoint's. Raises CheckpointError: checksums say that it is whole, not who wrote it."""
        try:
            return TypeAdapter(cls).validate_python(found.state)
        except ValidationError as error:
            problem = error.errors()[0]
            raise _malformed_state_error(
                found, ".".join(map(str, problem["loc"])), problem["input"], problem["msg"]
            ) from error


def _log_changed_rate(role: str, rates: LearningRates | None) -> None:
    """Log what a changed schedule does, before the first step is taken with it."""
    if rates is not None and rates.in_checkpoint != rates.in_run:
        _log.warning(
            "The learning rate of the %s's next update is %g by this run's schedule. It would have been %g by the "
            "schedule of the run that saved the checkpoint. trainer.max_steps, trainer.epochs and "
            "trainer.%s.optimizer_config decide it.",
            *(role, rates.in_run, rates.in_checkpoint, role),
        )


def _malformed_state_error(found: Checkpoint, key: str, value: object, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{found.path / STATE_FILE}: {key} is {value!r:.200}, which is not what a run saves there "
        f"({problem}). Resume from another checkpoint with trainer.resume_mode=from_path, or "
        "start over in another trainer.ckpt_path."
    )


async def _files_of(group: WorkerGroup) -> dict[str, FileDigest]:
    """What all ranks of a model have written, once they have."""
    found: dict[str, FileDigest] = {}
    for worker in group.workers:
        while (files := await worker.poll_save()) is None:
            await asyncio.sleep(_POLL_INTERVAL_S)
        found |= files
    return found
