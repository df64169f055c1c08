"""The checkpoints in the folder of a run, which are complete or absent.

    <root>/global_step_40/            committed: every file is listed with size and SHA-256 in manifest.json
    <root>/global_step_50.partial/    a save that was interrupted; reported, never loaded, never deleted by loading
    <root>/latest_ckpt_global_step.txt

Ranks write their files into the folder that `begin` returns; one process calls `begin` and `commit`. Nothing here
unpickles or executes file contents: JSON and checksums only.
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
RESUME_MODES = ("none", "latest", "from_path")

_COMMITTED = re.compile(r"global_step_(\d+)")
_PARTIAL = re.compile(r"global_step_(\d+)\.partial")
_STORED_SUFFIX = ".stored"
"""What another run's checkpoint is called here if one of that step is here and is another one than at the address."""
_UNREADABLE = (OSError, ValueError, TypeError, OverflowError, RecursionError)
"""Raised by what is no JSON object: binary, too deep, a number of too many digits, an infinite size."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint whose files were verified."""

    path: Path
    step: int
    state: dict[str, Any]
    """The state passed to `commit`, read from trainer_state.json."""

    @property
    def run(self) -> Path:
        """The folder of its run, with config.yaml and metrics.jsonl if the run has left them."""
        return self.path.parent


class CheckpointStore:
    """The checkpoints of one run. Only the `max_ckpts_to_keep` newest are kept; -1 keeps all.

    `mirror`: of `root` at an address, where there may be checkpoints that are not here.
    """

    def __init__(self, root: Path, max_ckpts_to_keep: int = -1, mirror: Mirror | None = None):
        if max_ckpts_to_keep < 1 and max_ckpts_to_keep != -1:
            raise ConfigError(
                f"trainer.max_ckpts_to_keep={max_ckpts_to_keep} is not allowed: -1 keeps all, 1 or more keeps so many."
            )
        self._root = Path(root)
        self._max_ckpts_to_keep = max_ckpts_to_keep
        self._mirror = mirror

    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, oldest first."""
        return sorted(step for step, _ in _by_recorded_step(self._root, None))

    def latest_before(self, before: int) -> Path | None:
        """The newest committed checkpoint of a step before this one."""
        return next((folder for step, folder in _by_recorded_step(self._root, None) if step < before), None)

    def begin(self, step: int) -> Path:
        """Create an empty folder for the files of `step`; an interrupted save of the same step is deleted.

        So is what is left of checkpoints whose deletion was interrupted. Raises OSError.
        """
        folder = self._partial(step)
        for doomed in (folder, *self._root.glob(f"global_step_*{DELETING_SUFFIX}")):
            _delete(doomed)
        folder.mkdir(parents=True)
        return folder

    def discard(self, step: int) -> None:
        """Delete the folder of `begin`, as far as that is possible: a failed save must not fill the disk as well."""
        shutil.rmtree(self._partial(step), ignore_errors=True)

    def commit(self, step: int, state: Mapping[str, Any], files: Mapping[str, FileDigest] | None = None) -> Path:
        """Make the folder of `begin` durable and visible, point `latest` at it, and delete the oldest of too many.

        `files` (path inside the folder -> what it holds) are durable already and are not read again. Raises OSError if
        the disk is full or fails, CheckpointError if one of `files` is not there; the existing checkpoints then stay as
        they are.
        """
        folder, final = self._partial(step), self._final(step)
        atomic_write_text(folder / STATE_FILE, json.dumps({"global_step": step, **state}, indent=1))
        written = list_files(folder)
        if missing := sorted((files or {}).keys() - written.keys()):
            raise CheckpointError(
                f"{folder} does not contain {missing[0]}, which a rank has written there: trainer.ckpt_path must be on "
                "a disk that all nodes share (SKYRL_CACHE, if it is an address)."
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
        except OSError as error:  # the checkpoint is there all the same, and is found without that file
            _log.warning("%s is written, but not what follows it (%s).", final, error)
        if self._mirror is not None:
            self._mirror.enqueue(final)
        return final

    def find_resumable(self, mode: str | None, path: str | Path | None = None) -> Checkpoint | None:
        """The checkpoint to resume from, verified; None if there is nothing to resume.

        Mode "latest" takes the newest that verifies and logs an error for every damaged one that it skips; "from_path"
        takes the given one, or the newest intact one before it in the same folder. Raises CheckpointError if there are
        checkpoints but none is intact, ConfigError for an unknown mode or a missing path.
        """
        if mode is None or mode == "none":
            return None
        if mode not in RESUME_MODES:
            raise ConfigError(f"trainer.resume_mode={mode!r} is not one of {', '.join(RESUME_MODES)}.")
        root, newest, mirror = self._root, None, self._mirror
        if mode == "from_path":
            root, newest, mirror = self._resolve_resume_path(path)
        for torn in sorted(_steps(root, _PARTIAL)):
            _log.warning(
                "Checkpoint %s is torn: its save was interrupted. It is not loaded.",
                root / f"global_step_{torn}.partial",
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
                problem = _fetched(mirror, step, folder)
            if problem is None:
                if folder.name.removesuffix(_STORED_SUFFIX) != f"global_step_{step}":
                    _log.warning("Checkpoint %s is of step %d: its manifest decides, not its name.", folder, step)
                return Checkpoint(folder, step, _read(folder / STATE_FILE))
            _log.error("CHECKPOINT %s IS DAMAGED: %s. Falling back to the one before it.", folder, problem)
        if candidates:
            raise CheckpointError(
                f"None of the checkpoints of steps {sorted(step for step, _ in candidates)} in {root} is whole (what "
                "is wrong is named above). Restore one of them, or start over with trainer.resume_mode=none and "
                "another trainer.ckpt_path."
            )
        return None

    def _resolve_resume_path(self, path: str | Path | None) -> tuple[Path, int, Mirror | None]:
        """(folder with checkpoints, step, its mirror if there is one) of trainer.resume_path."""
        if not is_uri(str(path)):
            root, step = _parse_path(path)
            return root, step, self._mirror if root == self._root.resolve() else None
        address, _, name = str(path).rstrip("/").rpartition("/")
        mine = self._mirror is not None and self._mirror.store.uri == address
        mirror = self._mirror if mine else Mirror(resolve_local_folder(address), address)
        assert mirror is not None
        match = _COMMITTED.fullmatch(name)
        if match is None or not (int(match[1]) in mirror.remote_steps() or (mirror.local / name).is_dir()):
            raise _no_checkpoint(path, mirror.local / name)
        return mirror.local, int(match[1]), mirror

    def _recover_interrupted_replace(self) -> None:
        """A checkpoint is out of the way for a moment while its step is saved again: a kill may come just then."""
        for moved in self._root.glob(f"global_step_*{DELETING_SUFFIX}"):
            original = moved.with_name(moved.name.removesuffix(DELETING_SUFFIX))
            if not original.exists() and find_checkpoint_damage(moved) is None:
                moved.rename(original)

    def _partial(self, step: int) -> Path:
        return self._root / f"global_step_{step}.partial"

    def _final(self, step: int) -> Path:
        return self._root / f"global_step_{step}"

    def _set_aside_later(self, step: int) -> None:
        """Rename later checkpoints: a run resumed from an older step must never resume from them by mistake."""
        if self._mirror is not None:
            self._mirror.leave_behind(step)
        for later, old in _by_recorded_step(self._root, None):
            if later > step:
                _log.warning("Checkpoint %s is from before this run went back to an earlier step; it is now %s.",
                             old, set_aside_local(old))  # fmt: skip

    def _prune(self) -> None:
        kept = self._max_ckpts_to_keep
        for _, folder in _by_recorded_step(self._root, None)[kept:] if kept > 0 else ():
            if self._mirror is not None and self._mirror.is_uploading(folder):
                continue  # the next save deletes it
            with _atomic_removal(folder):
                pass


@contextmanager
def _atomic_removal(folder: Path) -> Iterator[None]:
    """Rename first, delete afterwards: an interruption never leaves a committed name with half of its files."""
    doomed = folder.with_name(f"{folder.name}{DELETING_SUFFIX}")
    _delete(doomed, ignore_errors=True)
    if folder.exists():
        folder.rename(doomed)
    yield
    _delete(doomed, ignore_errors=True)


def _delete(path: Path, *, ignore_errors: bool = False) -> None:
    """Delete a folder, or whatever else has its name. Raises OSError unless errors are ignored."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors)
        return
    with suppress(OSError) if ignore_errors else nullcontext():
        path.unlink(missing_ok=True)


def find_checkpoint_damage(folder: Path) -> str | None:
    """Describe the problem with a committed checkpoint; None if every file is present with its size and SHA-256."""
    return find_damage(folder, verify_hashes=True) or _state_problem(folder)


def _state_problem(folder: Path) -> str | None:
    """Describe the problem with the state of a checkpoint whose files are verified."""
    try:
        if STATE_FILE not in _read(folder / MANIFEST_FILE)["files"]:
            return f"{MANIFEST_FILE} does not list {STATE_FILE}"
        _read(folder / STATE_FILE)
    except _UNREADABLE as error:
        return f"{STATE_FILE} cannot be read ({type(error).__name__}: {error})"
    return None


def _read(file: Path) -> dict[str, Any]:
    """A JSON object. Raises one of _UNREADABLE."""
    content = json.loads(file.read_text())
    if not isinstance(content, dict):
        raise TypeError(f"a JSON object is expected, not {type(content).__name__}")
    return content


def _by_recorded_step(root: Path, newest: int | None) -> list[tuple[int, Path]]:
    """(step, folder) of the committed checkpoints, latest step first; starting at the one named so, if it is given."""
    named = {name: root / f"global_step_{name}" for name in _steps(root, _COMMITTED)}
    recorded = sorted(((_recorded_step(folder, name), name) for name, folder in named.items()), reverse=True)
    names = [name for _, name in recorded]
    return [(step, named[name]) for step, name in recorded[names.index(newest) if newest is not None else 0 :]]


def _recorded_step(folder: Path, named: int) -> int:
    """The step that a checkpoint's manifest says, whatever its folder is called; its name's if that cannot be read."""
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
    hint = f" {aside[-1]} was set aside: rename it to {aside[-1].stem} to go on from it." if aside else ""
    return ConfigError(
        f"trainer.resume_path={str(path)!r} is not a checkpoint: "
        f"give the folder <ckpt_path>/global_step_<number> of a finished save.{hint}"
    )


def _candidates(root: Path, stored: list[int], newest: int | None) -> list[tuple[int, Path]]:
    """(step, folder) of all checkpoints up to the one named `newest`, latest first; `stored` need not be here."""
    given = newest if newest is not None and (root / f"global_step_{newest}").is_dir() else None
    here = _by_recorded_step(root, given)
    if given is None and newest is not None:  # it is only at the address, and later ones may be here
        here = [one for one in here if one[0] <= newest]
    names = {folder.name for _, folder in here}
    wanted = [step for step in stored if f"global_step_{step}" not in names and (newest is None or step <= newest)]
    absent = [(step, root / f"global_step_{step}") for step in wanted]
    return sorted((*here, *absent), key=lambda one: one[0], reverse=True)


def _fetched(mirror: Mirror, step: int, folder: Path) -> str | None:
    """Download a checkpoint that is damaged here or not here at all; what is wrong with it then."""
    _log.warning("Checkpoint %s comes from %s.", folder.name, mirror.store.uri)
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
        shutil.rmtree(partial, ignore_errors=True)  # what a failed download left
    fsync_folder(folder.parent)
    return _state_problem(folder)


def _steps(root: Path, pattern: re.Pattern[str]) -> Iterator[int]:
    for folder in root.iterdir() if root.is_dir() else ():
        match = pattern.fullmatch(folder.name)
        if match and folder.is_dir():
            yield int(match.group(1))


# -- a checkpoint that somebody names ----------------------------------------------------------------------------------


@contextmanager
def open_run_checkpoint(location: str, model_folders: tuple[str, ...]) -> Iterator[Checkpoint]:
    """The checkpoint RUN/global_step_N of a folder or an address, verified by SHA-256.

    Of one at an address only `parts`, the folders of its models, are downloaded, and deleted on exit. Raises
    ConfigError for a place that is no checkpoint, CheckpointError for a damaged one, StorageError.
    """
    if is_uri(location):
        check_uri(location)
        cache_folder().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_folder(), prefix="checkpoint-") as copy:
            yield _downloaded(location.rstrip("/"), model_folders, Path(copy))
        return
    folder = Path(location).absolute()
    if not (folder / MANIFEST_FILE).is_file():
        raise _not_a_checkpoint(location, CheckpointStore(folder).steps())
    if (damage := find_checkpoint_damage(folder)) is not None:
        raise CheckpointError(f"{folder} is damaged: {damage}. Name another checkpoint.")
    yield _opened(folder)


def _downloaded(address: str, model_folders: tuple[str, ...], copy: Path) -> Checkpoint:
    run, _, name = address.rpartition("/")
    store = RemoteFolder(run)
    if store.read(f"{name}/{MANIFEST_FILE}") is None:
        whole = {file.removesuffix(f"/{MANIFEST_FILE}") for file in RemoteFolder(address).find()}
        raise _not_a_checkpoint(
            address, sorted(int(match[1]) for file in whole if (match := _COMMITTED.fullmatch(file)))
        )
    below = (STATE_FILE, *(f"{part}/" for part in model_folders))
    if (problem := download_folder(store, name, copy / name, only=below)) is not None:
        raise CheckpointError(f"{problem}. Name another checkpoint.")
    for file in (CONFIG_FILE, METRICS_FILE):
        store.get(file, copy / file)
    return _opened(copy / name)


def _opened(folder: Path) -> Checkpoint:
    """Return a checkpoint with the step that its state says, whatever its folder is called."""
    try:
        state = _read(folder / STATE_FILE)
        return Checkpoint(folder, int(state["global_step"]), state)
    except (*_UNREADABLE, KeyError) as error:
        raise CheckpointError(f"{folder / STATE_FILE} does not say which step it is of ({error!r}).") from error


def _not_a_checkpoint(place: str, steps: list[int]) -> ConfigError:
    there = ", ".join(f"global_step_{step}" for step in steps)
    return ConfigError(
        f"{place!r} is no checkpoint: give RUN/global_step_N of a finished save. "
        + (f"There are {there}." if there else "There is none in it either.")
    )
