"""The folder of a run: which run it belongs to, and the lock that keeps other runs out.

<root>/run.json     project, name, model and fingerprints of the data
<root>/.lock        held while a run uses the folder
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from skyrl_train.atomic_files import atomic_write, atomic_write_text, open_lock
from skyrl_train.config.hydra import CONFIG_FILE
from skyrl_train.errors import CheckpointMismatch, RunFolderError
from skyrl_train.storage.mirror import Mirror
from skyrl_train.trainer.checkpoints import CheckpointStore

IDENTITY_FILE = "run.json"
LOCK_FILE = ".lock"
_KEYS = {
    "project_name": "trainer.project_name",
    "run_name": "trainer.run_name",
    "model": "trainer.policy.model.path",
    "adapters": "trainer.policy.model.lora",
    "data_order": "the order of the data (trainer.seed, trainer.train_batch_size)",
}
"""Entry of run.json -> the keys that decide it."""


class RunFolder:
    """The folder of a run, locked from enter to exit.

    Entering raises RunDirectoryError if the folder cannot be written, is locked by another process, belongs to another
    run, or contains checkpoints that may not be continued.

    Example:
        with RunDirectory(Path("runs/a"), {"run_name": "a"}, resuming=True) as run:
            (run.path / "config.yaml").write_text(...)
    """

    def __init__(self, path: Path, identity: Mapping[str, Any], allow_resume: bool, mirror: Mirror | None = None):
        """Nothing is read or written before the folder is entered.

        Args:
            path: The folder.
            identity: What makes two runs the same one (project, run name, model path, fingerprints of the data) as
                plain JSON values, stored in run.json. The model's path may change once there are checkpoints: loading
                one compares the fingerprints of the weights.
            resuming: True if checkpoints in the folder may be continued.
            mirror: Mirror of the folder at an address, for which all of this holds as well.
        """
        self.path = Path(path)
        self._identity: dict[str, Any] = json.loads(json.dumps(identity))
        self._allow_resume = allow_resume
        self._mirror = mirror
        self._lock: IO[str] | None = None
        self._original_files: dict[Path, bytes | None] = {}
        """The files that say which run the folder belongs to, as they were found; None for a missing one."""

    def __enter__(self) -> RunFolder:
        self._lock = _locks.pop(self.path, None) or _locked(self.path)
        try:
            if self._mirror is not None:
                self._mirror.acquire_and_pull()
            self._check()
            for file in (self.path / IDENTITY_FILE, self.path / CONFIG_FILE):
                self._original_files[file] = file.read_bytes() if file.exists() else None
            atomic_write_text(self.path / IDENTITY_FILE, json.dumps(self._identity, indent=1))
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    @contextmanager
    def restored_on_mismatch(self) -> Iterator[None]:
        """Restore run.json and config.yaml if a checkpoint of another run is refused inside.

        Otherwise they would describe the refused run: the right configuration would be refused next, and exports would
        take another model's tokenizer.
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
        self._lock.close()  # releases the lock; the system does the same when the process dies

    def _check(self) -> None:
        steps = sorted({*CheckpointStore(self.path).steps(), *(self._mirror.remote_steps() if self._mirror else ())})
        kept = _saved_identity(self.path)
        if kept is None:
            if steps:
                raise RunFolderError(
                    f"trainer.ckpt_path={str(self.path)!r} holds checkpoints (steps {steps}) but no {IDENTITY_FILE} "
                    "that says whose; choose another folder, and trainer.resume_mode=from_path to start from one."
                )
            return
        _check_no_differences(
            self.path, kept, self._identity, {*kept, *self._identity} - ({"model"} if steps else set())
        )
        if steps and not self._allow_resume:
            raise RunFolderError(
                f"trainer.ckpt_path={str(self.path)!r} holds checkpoints of this run (steps {steps}) and "
                "trainer.resume_mode is none: set trainer.resume_mode=latest to continue, or choose another folder."
            )


def check_same_run(path: Path | str, known: Mapping[str, Any], stored: bytes | None = None) -> None:
    """Raise RunDirectoryError for a folder of a run that differs in what is `known` before anything is started.

    The model's path is not compared here, see RunDirectory. `stored`: its run.json, if `path` is an address.
    """
    kept = _saved_identity(path, stored)
    if kept is not None:
        keys = {*known, *({"adapters"} & kept.keys())} - {"model"}
        _check_no_differences(path, kept, json.loads(json.dumps(known)), keys)


def _check_no_differences(path: Path | str, kept: Mapping[str, Any], now: Mapping[str, Any], keys: Set[str]) -> None:
    different = [_difference(key, kept.get(key), now.get(key)) for key in sorted(keys) if kept.get(key) != now.get(key)]
    if different:
        raise RunFolderError(
            f"trainer.ckpt_path={str(path)!r} holds another run: {'; '.join(different)}. "
            "Give back what changed to resume that run, or choose another folder."
        )


def _difference(key: str, before: Any, after: Any) -> str:
    if key == "train_data":
        return "data.train_data had other rows"
    if isinstance(before, dict) and isinstance(after, dict):  # adapters
        names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        return "; ".join(f"{_KEYS[key]}.{name} was {before.get(name)!r}, is {after.get(name)!r}" for name in names)
    return f"{_KEYS.get(key, key)} was {before!r}, is {after!r}"


def _saved_identity(path: Path | str, stored: bytes | None = None) -> dict[str, Any] | None:
    """Return what run.json says of a folder's run; None if there is none. `stored`: its content at an address."""
    file = f"{path}/{IDENTITY_FILE}"
    try:
        kept = json.loads(Path(file).read_bytes() if stored is None else stored)
        if not isinstance(kept, dict):
            raise ValueError("not a JSON object")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise RunFolderError(f"{file} cannot be read ({error}); it says which run the folder belongs to.") from error
    return kept


_locks: dict[Path, IO[str]] = {}
"""Locks of folders of which this process is between two attempts of a run."""


def hold_run_lock(path: Path) -> None:
    """Lock the folder of a run that starts over, for the next RunDirectory of it in this process, or until `unlock`.

    Raises RunDirectoryError as RunDirectory.
    """
    if path not in _locks:
        _locks[path] = _locked(path)


def release_run_lock(path: Path) -> None:
    """What `keep_locked` has locked and nobody has entered since."""
    if lock := _locks.pop(path, None):
        lock.close()


def _locked(path: Path) -> IO[str]:
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = open_lock(path / LOCK_FILE)
    except OSError as error:
        raise RunFolderError(
            f"trainer.ckpt_path={str(path)!r} cannot be written ({error.strerror}); choose a folder you may write to."
        ) from error
    with ExitStack() as opened:
        opened.enter_context(lock)
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
        opened.pop_all()
    return lock
