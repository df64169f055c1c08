"""The folder of a run: a record of the run that owns it, and a lock that keeps other runs out.

<root>/run.json         project, name, model and fingerprints of the data
<root>/attempts.jsonl   start, hardware and end of each attempt at the run
<root>/.lock            held while a run uses the folder
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from skyrl_train.atomic_files import atomic_write, atomic_write_text, open_lock
from skyrl_train.config.hydra import CONFIG_FILE
from skyrl_train.config.redaction import redact
from skyrl_train.errors import CheckpointMismatch, RunFolderError
from skyrl_train.report.attempts import append_event
from skyrl_train.storage.mirror import Mirror
from skyrl_train.trainer.checkpoints import CheckpointStore

IDENTITY_FILE = "run.json"
LOCK_FILE = ".lock"
_MAX_ERROR_CHARS = 2000
_KEYS = {
    "project_name": "trainer.project_name",
    "run_name": "trainer.run_name",
    "model": "trainer.policy.model.path",
    "adapters": "trainer.policy.model.lora",
    "data_order": "the order of the data (trainer.seed, trainer.train_batch_size)",
}
"""Maps each entry of run.json to the configuration keys that determine it."""


class RunFolder:
    """The folder of a run: a context manager that locks it, checks that it belongs to the run and writes run.json.

    Entering raises RunFolderError if the folder cannot be written, is locked by another process, belongs to another
    run, or contains checkpoints while `allow_resume` is False.

    Example:
        with RunFolder(Path("runs/a"), {"run_name": "a"}, allow_resume=True) as run:
            (run.path / "config.yaml").write_text(...)
    """

    def __init__(self, path: Path, identity: Mapping[str, Any], allow_resume: bool, mirror: Mirror | None = None):
        """Describe the folder; it is read and written only when it is entered.

        Args:
            path: The folder.
            identity: JSON values that identify the run (project, run name, model path, fingerprints of the data). They
                are stored in run.json. The model's path may change once the folder has checkpoints, because loading a
                checkpoint compares the fingerprints of the weights.
            allow_resume: True if the run may continue from checkpoints in the folder.
            mirror: Mirror of the folder in remote storage. It is locked, downloaded and checked as well.
        """
        self.path = Path(path)
        self._identity: dict[str, Any] = json.loads(json.dumps(identity))
        self._allow_resume = allow_resume
        self._mirror = mirror
        self._lock: IO[str] | None = None
        self._original_files: dict[Path, bytes | None] = {}
        """Contents of run.json and config.yaml when the folder was entered; None for a missing file."""

    def __enter__(self) -> RunFolder:
        self._lock = _held_locks.pop(self.path, None) or _acquire_lock(self.path)
        try:
            if self._mirror is not None:
                self._mirror.acquire_and_pull()
            self._check()
            for file in (self.path / IDENTITY_FILE, self.path / CONFIG_FILE):
                self._original_files[file] = file.read_bytes() if file.exists() else None
            atomic_write_text(self.path / IDENTITY_FILE, json.dumps(self._identity, indent=1))
            append_event(self.path, "start", {"host": socket.gethostname()})
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        append_event(self.path, "end", {"error": _describe_error(error)})
        self._release()

    def record_hardware(self, device: str, slots: int, nodes: int, accelerators: Sequence[str]) -> None:
        """Record in attempts.jsonl what the current attempt runs on.

        Args:
            device: "gpu" or "cpu".
            slots: Number of accelerators, or of CPU slots, that the run has reserved.
            nodes: Number of nodes that they are on.
            accelerators: Names of the accelerators' types; empty for CPUs.
        """
        facts = {"device": device, "slots": slots, "nodes": nodes, "accelerators": [*accelerators]}
        append_event(self.path, "hardware", facts)

    @contextmanager
    def restored_on_mismatch(self) -> Iterator[None]:
        """Restore run.json and config.yaml if the body raises CheckpointMismatch.

        Otherwise they would describe the rejected run: the folder would then reject the right configuration, and
        exports would use the tokenizer of another model.
        """
        try:
            yield
        except CheckpointMismatch:
            for file, content in self._original_files.items():
                if content is None:
                    file.unlink(missing_ok=True)
                    continue
                with atomic_write(file) as handle:
                    handle.write(content)
            raise

    def _release(self) -> None:
        if self._mirror is not None:
            self._mirror.lease.release()
        assert self._lock is not None
        self._lock.close()  # releases the lock; the operating system also does this when the process dies

    def _check(self) -> None:
        steps = sorted({*CheckpointStore(self.path).steps(), *(self._mirror.remote_steps() if self._mirror else ())})
        saved = _saved_identity(self.path)
        if saved is None:
            if steps:
                raise RunFolderError(
                    f"trainer.ckpt_path={str(self.path)!r} holds checkpoints (steps {steps}) but no {IDENTITY_FILE} "
                    "that identifies their run. Choose another folder. To start from one of these checkpoints, also "
                    "set trainer.resume_mode=from_path and trainer.resume_path."
                )
            return
        _check_no_differences(
            self.path, saved, self._identity, {*saved, *self._identity} - ({"model"} if steps else set())
        )
        if steps and not self._allow_resume:
            raise RunFolderError(
                f"trainer.ckpt_path={str(self.path)!r} holds checkpoints of this run (steps {steps}), but "
                "trainer.resume_mode is none. Set trainer.resume_mode=latest to continue, or choose another folder."
            )


def _describe_error(error: BaseException | None) -> str | None:
    if error is None:
        return None
    if isinstance(error, asyncio.CancelledError):
        return "The run was interrupted: a signal stopped it, or the cluster was lost."
    return redact(f"{type(error).__name__}: {error}")[:_MAX_ERROR_CHARS]


def check_same_run(path: Path | str, known: Mapping[str, Any], stored: bytes | None = None) -> None:
    """Check before a run starts that its folder does not belong to another run.

    Does nothing if the folder has no run.json. The path of the model is not compared, see `RunFolder`.

    Args:
        path: The folder of the run, or its URI.
        known: The entries of the run's identity that are known so far.
        stored: Content of the folder's run.json if `path` is a URI; None reads it from the folder.

    Raises:
        RunFolderError: run.json cannot be read, or differs from `known` in one of its entries or in the adapters.
    """
    saved = _saved_identity(path, stored)
    if saved is not None:
        keys = {*known, *({"adapters"} & saved.keys())} - {"model"}
        _check_no_differences(path, saved, json.loads(json.dumps(known)), keys)


def _check_no_differences(
    path: Path | str, saved: Mapping[str, Any], current: Mapping[str, Any], keys: Set[str]
) -> None:
    differences = [
        _describe_difference(key, saved.get(key), current.get(key))
        for key in sorted(keys)
        if saved.get(key) != current.get(key)
    ]
    if differences:
        raise RunFolderError(
            f"trainer.ckpt_path={str(path)!r} holds another run: {'; '.join(differences)}. "
            "Restore the changed settings to resume that run, or choose another folder."
        )


def _describe_difference(key: str, before: Any, after: Any) -> str:
    if key == "train_data":
        return "data.train_data had other rows"
    if isinstance(before, dict) and isinstance(after, dict):  # adapters
        names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        return "; ".join(f"{_KEYS[key]}.{name} was {before.get(name)!r}, is {after.get(name)!r}" for name in names)
    return f"{_KEYS.get(key, key)} was {before!r}, is {after!r}"


def _saved_identity(path: Path | str, stored: bytes | None = None) -> dict[str, Any] | None:
    file = f"{path}/{IDENTITY_FILE}"
    try:
        identity = json.loads(Path(file).read_bytes() if stored is None else stored)
        if not isinstance(identity, dict):
            raise ValueError("not a JSON object")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise RunFolderError(
            f"{file} cannot be read ({error}). It records which run the folder belongs to: restore it, or choose "
            "another trainer.ckpt_path."
        ) from error
    return identity


_held_locks: dict[Path, IO[str]] = {}
"""Locks that this process holds between two attempts of a run."""


def hold_run_lock(path: Path) -> None:
    """Lock the folder of a run between two attempts of the run in this process.

    The next `RunFolder` of `path` takes the lock over when it is entered; `release_run_lock` releases it otherwise.
    Does nothing if the lock is already held.

    Raises:
        RunFolderError: The folder cannot be written, or another process uses it.
    """
    if path not in _held_locks:
        _held_locks[path] = _acquire_lock(path)


def release_run_lock(path: Path) -> None:
    """Release the lock of `hold_run_lock`, unless a `RunFolder` has taken it over or there is none."""
    if lock := _held_locks.pop(path, None):
        lock.close()


def _acquire_lock(path: Path) -> IO[str]:
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = open_lock(path / LOCK_FILE)
    except OSError as error:
        raise RunFolderError(
            f"trainer.ckpt_path={str(path)!r} cannot be written ({error.strerror}). Choose a writable folder."
        ) from error
    with ExitStack() as stack:
        stack.enter_context(lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            holder = lock.read().strip() or "another process"
            raise RunFolderError(
                f"trainer.ckpt_path={str(path)!r} is in use by {holder}; wait for it, end it, or choose another folder."
            ) from error
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        stack.pop_all()
    return lock
