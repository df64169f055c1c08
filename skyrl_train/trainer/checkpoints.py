"""The checkpoints in the folder of a run. A checkpoint is either complete or not visible.

    <root>/global_step_40/            committed: manifest.json lists every file with its size and SHA-256
    <root>/global_step_50.partial/    an interrupted save: reported, never loaded, never deleted by loading
    <root>/latest_ckpt_global_step.txt

Ranks write their files into the folder that `begin` returns; one process calls `begin` and `commit`. This module never
unpickles or executes file contents: it reads JSON and compares checksums.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from skyrl_train.atomic_files import FileDigest, atomic_write_text, fsync_folder
from skyrl_train.config.hydra import CONFIG_FILE
from skyrl_train.config.locations import is_uri
from skyrl_train.errors import CheckpointError, ConfigError
from skyrl_train.report.jsonl import METRICS_FILE
from skyrl_train.storage.manifests import (
    DELETING_SUFFIX,
    MANIFEST_FILE,
    download_folder,
    find_damage,
    list_files,
    set_aside_local,
    write_manifest,
)
from skyrl_train.storage.mirror import LATEST_FILE, Mirror
from skyrl_train.storage.remote_folder import RemoteFolder
from skyrl_train.storage.uris import cache_folder, check_uri, resolve_local_folder

STATE_FILE = "trainer_state.json"

_COMMITTED = re.compile(r"global_step_(\d+)")
_PARTIAL = re.compile(r"global_step_(\d+)\.partial")
_STORED_SUFFIX = ".stored"
"""Suffix of the local folder of a checkpoint downloaded from another run, if a different one of that step is here."""
_UNREADABLE = (OSError, ValueError, TypeError, OverflowError, RecursionError)
"""Errors of reading a file that is not a JSON object: binary, nested too deeply, a number with too many digits."""
_log = logging.getLogger(__name__)


class ResumeMode(StrEnum):
    """The values of trainer.resume_mode."""

    NONE = "none"
    LATEST = "latest"
    FROM_PATH = "from_path"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint whose files were verified."""

    path: Path
    step: int
    state: dict[str, Any]
    """The state that was passed to `commit`, read from trainer_state.json."""

    @property
    def run(self) -> Path:
        """The folder of the checkpoint's run, which usually has config.yaml and metrics.jsonl."""
        return self.path.parent


class CheckpointStore:
    """The checkpoints of one run: writes, lists, verifies and deletes them."""

    def __init__(self, root: Path, max_ckpts_to_keep: int = -1, mirror: Mirror | None = None):
        """Open the checkpoints in a folder, which need not exist.

        Args:
            root: The folder of the run.
            max_ckpts_to_keep: Number of the newest checkpoints that `commit` keeps; -1 keeps all.
            mirror: Mirror of `root` in remote storage. It may have checkpoints that are missing locally.

        Raises:
            ConfigError: `max_ckpts_to_keep` is neither -1 nor at least 1.
        """
        if max_ckpts_to_keep < 1 and max_ckpts_to_keep != -1:
            raise ConfigError(
                f"trainer.max_ckpts_to_keep={max_ckpts_to_keep} is not allowed. Use -1 to keep all checkpoints, or a "
                "number of at least 1."
            )
        self._root = Path(root)
        self._max_ckpts_to_keep = max_ckpts_to_keep
        self._mirror = mirror

    def steps(self) -> list[int]:
        """Return the steps of the committed local checkpoints, in ascending order."""
        return sorted(step for step, _ in _by_recorded_step(self._root, None))

    def latest_before(self, before: int) -> Path | None:
        """Return the newest committed local checkpoint of a step smaller than `before`; None if there is none."""
        return next((folder for step, folder in _by_recorded_step(self._root, None) if step < before), None)

    def begin(self, step: int) -> Path:
        """Create and return an empty folder for the files of `step`.

        Deletes an interrupted save of the same step and the remains of interrupted deletions. Raises OSError if that
        fails or the folder cannot be created.
        """
        folder = self._partial(step)
        for leftover in (folder, *self._root.glob(f"global_step_*{DELETING_SUFFIX}")):
            _delete(leftover)
        folder.mkdir(parents=True)
        return folder

    def discard(self, step: int) -> None:
        """Delete the folder of `begin` and ignore errors, so that a failed save does not occupy the disk."""
        shutil.rmtree(self._partial(step), ignore_errors=True)

    def commit(self, step: int, state: Mapping[str, Any], files: Mapping[str, FileDigest] | None = None) -> Path:
        """Turn the folder of `begin` into a durable, committed checkpoint and return its path.

        Also renames checkpoints of later steps, updates latest_ckpt_global_step.txt, deletes the oldest checkpoints
        above `max_ckpts_to_keep` and queues the upload to the mirror. If that fails after the checkpoint is committed,
        a warning is logged.

        Args:
            step: The step of the checkpoint.
            state: JSON values for trainer_state.json.
            files: Digests of files that are already durable, by path inside the folder. They are not read again. None:
                all files are read.

        Raises:
            OSError: The disk is full or fails. The existing checkpoints are unchanged.
            CheckpointError: One of `files` is missing. The existing checkpoints are unchanged.
        """
        folder, final = self._partial(step), self._final(step)
        atomic_write_text(folder / STATE_FILE, json.dumps({"global_step": step, **state}, indent=1))
        written = list_files(folder)
        if missing := sorted((files or {}).keys() - written.keys()):
            raise CheckpointError(
                f"{folder} does not contain {missing[0]}, which a rank has written there. Set trainer.ckpt_path to a "
                "folder on a disk that all nodes share (if trainer.ckpt_path is a URI, set SKYRL_CACHE instead)."
            )
        write_manifest(folder, files, global_step=step)
        for inner in {path.parent for path in written.values()}:
            fsync_folder(inner)
        self._set_aside_later(step)
        with _atomic_removal(final):
            folder.rename(final)
        try:
            fsync_folder(self._root)
            atomic_write_text(self._root / LATEST_FILE, str(step))
            self._prune()
        except OSError as error:  # the checkpoint is complete, and resuming does not need the file
            _log.warning(
                "%s was written, but %s was not updated or old checkpoints were not deleted (%s).",
                final,
                LATEST_FILE,
                error,
            )
        if self._mirror is not None:
            self._mirror.enqueue(final)
        return final

    def find_resumable(self, mode: str | None, path: str | Path | None = None) -> Checkpoint | None:
        """Find the checkpoint to resume from and verify its files.

        Downloads it from the mirror if it is missing or damaged locally. Logs an error for every damaged checkpoint
        that is skipped, and a warning for every interrupted save.

        Args:
            mode: A value of trainer.resume_mode: "latest" takes the newest intact checkpoint, "from_path" the one at
                `path` or else the newest intact one before it in the same folder. "none" and None take none.
            path: trainer.resume_path: a folder or URI that ends in global_step_<number>. Only read in mode "from_path".
                It must be set in that mode.

        Returns:
            The checkpoint; None if there is none to resume from.

        Raises:
            CheckpointError: There are checkpoints, but none of them is intact.
            ConfigError: `mode` is unknown, or `path` is not a checkpoint.
            StorageError: The mirror cannot be read.
        """
        if mode is None or mode == ResumeMode.NONE:
            return None
        if mode not in [*ResumeMode]:
            raise ConfigError(
                f"trainer.resume_mode={mode!r} is not a known mode. Choose one of: {', '.join(ResumeMode)}."
            )
        root, newest, mirror = self._root, None, self._mirror
        if mode == ResumeMode.FROM_PATH:
            root, newest, mirror = self._resolve_resume_path(path)
        for interrupted in sorted(_steps(root, _PARTIAL)):
            _log.warning(
                "Checkpoint %s is incomplete because its save was interrupted. It is not loaded.",
                root / f"global_step_{interrupted}.partial",
            )
        if root == self._root:
            self._recover_interrupted_replace()
        stored = [] if mirror is None else mirror.remote_steps()
        candidates = _candidates(root, stored, newest)
        for step, folder in candidates:
            if (
                mirror is not None
                and mirror is not self._mirror
                and step in stored
                and mirror.differs_from_remote(folder)
            ):
                folder = folder.with_name(f"{folder.name}{_STORED_SUFFIX}")
            problem = find_checkpoint_damage(folder)
            if problem is not None and mirror is not None and step in stored:
                problem = _download(mirror, step, folder)
            if problem is None:
                if folder.name.removesuffix(_STORED_SUFFIX) != f"global_step_{step}":
                    _log.warning(
                        "Checkpoint %s is from step %d according to its manifest, which overrides its name.",
                        folder,
                        step,
                    )
                return Checkpoint(folder, step, _read(folder / STATE_FILE))
            _log.error("CHECKPOINT %s IS DAMAGED: %s. Falling back to the one before it.", folder, problem)
        if candidates:
            raise CheckpointError(
                f"None of the checkpoints of steps {sorted(step for step, _ in candidates)} in {root} is intact (the "
                "errors above describe the damage). Restore one of them, or start over with trainer.resume_mode=none "
                "and another trainer.ckpt_path."
            )
        return None

    def _resolve_resume_path(self, path: str | Path | None) -> tuple[Path, int, Mirror | None]:
        """Return (folder with checkpoints, step, mirror of the folder or None) for trainer.resume_path."""
        if not is_uri(str(path)):
            root, step = _parse_path(path)
            return root, step, self._mirror if root == self._root.resolve() else None
        uri, _, name = str(path).rstrip("/").rpartition("/")
        is_own = self._mirror is not None and self._mirror.store.uri == uri
        mirror = self._mirror if is_own else Mirror(resolve_local_folder(uri), uri)
        assert mirror is not None
        match = _COMMITTED.fullmatch(name)
        if match is None or not (int(match[1]) in mirror.remote_steps() or (mirror.local / name).is_dir()):
            raise _no_checkpoint(path, mirror.local / name)
        return mirror.local, int(match[1]), mirror

    def _recover_interrupted_replace(self) -> None:
        """Restore checkpoints that were renamed for a replacement that never finished.

        Saving a step again first renames the existing checkpoint. If the process is killed before the new one takes
        its place, the renamed checkpoint is the only copy.
        """
        for moved in self._root.glob(f"global_step_*{DELETING_SUFFIX}"):
            original = moved.with_name(moved.name.removesuffix(DELETING_SUFFIX))
            if not original.exists() and find_checkpoint_damage(moved) is None:
                moved.rename(original)

    def _partial(self, step: int) -> Path:
        return self._root / f"global_step_{step}.partial"

    def _final(self, step: int) -> Path:
        return self._root / f"global_step_{step}"

    def _set_aside_later(self, step: int) -> None:
        """Rename later checkpoints, so that a run that was resumed from an older step never resumes from them."""
        if self._mirror is not None:
            self._mirror.leave_behind(step)
        for later, old in _by_recorded_step(self._root, None):
            if later > step:
                _log.warning("This run was resumed from a step before checkpoint %s, which was renamed to %s.",
                             old, set_aside_local(old))  # fmt: skip

    def _prune(self) -> None:
        count = self._max_ckpts_to_keep
        for _, folder in _by_recorded_step(self._root, None)[count:] if count > 0 else ():
            if self._mirror is not None and self._mirror.is_uploading(folder):
                continue  # the next save deletes it
            with _atomic_removal(folder):
                pass


@contextmanager
def _atomic_removal(folder: Path) -> Iterator[None]:
    """Rename a folder before the body runs and delete it afterwards.

    An interruption never leaves a folder with a committed name and only some of its files.
    """
    renamed = folder.with_name(f"{folder.name}{DELETING_SUFFIX}")
    _delete(renamed, ignore_errors=True)
    if folder.exists():
        folder.rename(renamed)
    yield
    _delete(renamed, ignore_errors=True)


def _delete(path: Path, *, ignore_errors: bool = False) -> None:
    """Delete a folder, file or link. Raises OSError unless `ignore_errors` is True."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors)
        return
    with suppress(OSError) if ignore_errors else nullcontext():
        path.unlink(missing_ok=True)


def find_checkpoint_damage(folder: Path) -> str | None:
    """Describe the problem with a committed checkpoint.

    Returns None if every listed file has its size and SHA-256 and trainer_state.json is listed and readable.
    """
    return find_damage(folder, verify_hashes=True) or _state_problem(folder)


def _state_problem(folder: Path) -> str | None:
    """Describe the problem with the state of a checkpoint whose files are verified; None if there is none."""
    try:
        if STATE_FILE not in _read(folder / MANIFEST_FILE)["files"]:
            return f"{MANIFEST_FILE} does not list {STATE_FILE}"
        _read(folder / STATE_FILE)
    except _UNREADABLE as error:
        return f"{STATE_FILE} cannot be read ({type(error).__name__}: {error})"
    return None


def _read(file: Path) -> dict[str, Any]:
    """Read a JSON object. Raises one of _UNREADABLE if the file does not contain one."""
    content = json.loads(file.read_text())
    if not isinstance(content, dict):
        raise TypeError(f"a JSON object is expected, not {type(content).__name__}")
    return content


def _by_recorded_step(root: Path, newest: int | None) -> list[tuple[int, Path]]:
    """Return (step, folder) of the committed checkpoints, latest step first.

    If `newest` is given, the list begins at the folder with that number in its name.
    """
    named = {name: root / f"global_step_{name}" for name in _steps(root, _COMMITTED)}
    recorded = sorted(((_recorded_step(folder, name), name) for name, folder in named.items()), reverse=True)
    names = [name for _, name in recorded]
    return [(step, named[name]) for step, name in recorded[names.index(newest) if newest is not None else 0 :]]


def _recorded_step(folder: Path, named: int) -> int:
    """Return the step in a checkpoint's manifest, or the step `named` by its folder if that cannot be read."""
    try:
        step = _read(folder / MANIFEST_FILE)["global_step"]
    except (*_UNREADABLE, KeyError):
        return named
    return step if isinstance(step, int) and not isinstance(step, bool) and step >= 0 else named


def _parse_path(path: str | Path | None) -> tuple[Path, int]:
    folder = Path(path).resolve() if path else None
    match = _COMMITTED.fullmatch(folder.name) if folder else None
    if folder is None or match is None or not folder.is_dir():
        raise _no_checkpoint(path, folder)
    return folder.parent, int(match.group(1))


def _no_checkpoint(path: str | Path | None, folder: Path | None) -> ConfigError:
    aside = [] if folder is None else sorted(folder.parent.glob(f"{folder.name}.set_aside_*"))
    hint = f" {aside[-1]} was set aside: rename it to {aside[-1].stem} to resume from it." if aside else ""
    return ConfigError(
        f"trainer.resume_path={str(path)!r} is not a checkpoint. "
        f"Set it to the folder <ckpt_path>/global_step_<number> of a finished save.{hint}"
    )


def _candidates(root: Path, stored: list[int], newest: int | None) -> list[tuple[int, Path]]:
    """Return (step, folder) of all checkpoints up to the one named `newest`, latest first.

    The folders of `stored` steps, which are in remote storage, need not exist.
    """
    start = newest if newest is not None and (root / f"global_step_{newest}").is_dir() else None
    local = _by_recorded_step(root, start)
    if start is None and newest is not None:  # it is only in remote storage, and later ones may be local
        local = [(step, folder) for step, folder in local if step <= newest]
    names = {folder.name for _, folder in local}
    missing = [
        (step, root / f"global_step_{step}")
        for step in stored
        if f"global_step_{step}" not in names and (newest is None or step <= newest)
    ]
    return sorted((*local, *missing), key=lambda candidate: candidate[0], reverse=True)


def _download(mirror: Mirror, step: int, folder: Path) -> str | None:
    """Download a checkpoint that is missing or damaged locally; return the problem with it, or None."""
    _log.warning("Downloading checkpoint %s from %s.", folder.name, mirror.store.uri)
    if folder.is_dir():
        return download_folder(mirror.store, f"global_step_{step}", folder) or find_checkpoint_damage(folder)
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        if (problem := download_folder(mirror.store, f"global_step_{step}", partial)) is not None:
            return problem
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # it exists only if the download failed
    fsync_folder(folder.parent)
    return _state_problem(folder)


def _steps(root: Path, pattern: re.Pattern[str]) -> Iterator[int]:
    for folder in root.iterdir() if root.is_dir() else ():
        match = pattern.fullmatch(folder.name)
        if match and folder.is_dir():
            yield int(match.group(1))


# -- a single checkpoint -----------------------------------------------------------------------------------------------


@contextmanager
def open_run_checkpoint(location: str, model_folders: tuple[str, ...]) -> Iterator[Checkpoint]:
    """Open and verify the checkpoint at RUN/global_step_N; a context manager.

    Args:
        location: The folder or URI of the checkpoint.
        model_folders: Names of the checkpoint's model folders, such as "policy". Only these are downloaded from a URI;
            the copy is deleted on exit. Ignored for a local folder.

    Raises:
        ConfigError: `location` is not a checkpoint.
        CheckpointError: The checkpoint is damaged.
        StorageError: Remote storage cannot be read.
    """
    if is_uri(location):
        check_uri(location)
        cache_folder().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_folder(), prefix="checkpoint-") as copy:
            yield _open_remote(location.rstrip("/"), model_folders, Path(copy))
        return
    folder = Path(location).absolute()
    if not (folder / MANIFEST_FILE).is_file():
        raise _not_a_checkpoint(location, CheckpointStore(folder).steps())
    if (damage := find_checkpoint_damage(folder)) is not None:
        raise CheckpointError(f"{folder} is damaged: {damage}. Choose another checkpoint.")
    yield _open_local(folder)


def _open_remote(uri: str, model_folders: tuple[str, ...], copy: Path) -> Checkpoint:
    run, _, name = uri.rpartition("/")
    store = RemoteFolder(run)
    if store.read(f"{name}/{MANIFEST_FILE}") is None:
        complete = {file.removesuffix(f"/{MANIFEST_FILE}") for file in RemoteFolder(uri).find()}
        raise _not_a_checkpoint(
            uri, sorted(int(match[1]) for folder in complete if (match := _COMMITTED.fullmatch(folder)))
        )
    prefixes = (STATE_FILE, *(f"{folder}/" for folder in model_folders))
    if (problem := download_folder(store, name, copy / name, only=prefixes)) is not None:
        raise CheckpointError(f"{problem}. Choose another checkpoint.")
    for file in (CONFIG_FILE, METRICS_FILE):
        store.get(file, copy / file)
    return _open_local(copy / name)


def _open_local(folder: Path) -> Checkpoint:
    """Return a checkpoint with the step that its state records, which may differ from its folder's name."""
    try:
        state = _read(folder / STATE_FILE)
        return Checkpoint(folder, int(state["global_step"]), state)
    except (*_UNREADABLE, KeyError) as error:
        raise CheckpointError(
            f"{folder / STATE_FILE} has no valid global_step ({error!r}). Choose another checkpoint."
        ) from error


def _not_a_checkpoint(location: str, steps: list[int]) -> ConfigError:
    names = ", ".join(f"global_step_{step}" for step in steps)
    return ConfigError(
        f"{location!r} is not a checkpoint. Give RUN/global_step_N of a finished save. "
        + (f"This folder contains {names}." if names else "This folder contains no checkpoints.")
    )
