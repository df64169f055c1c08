"""A folder that a run writes on this machine, and its copy at an address, which a thread keeps up to date.

    folders with a manifest     checkpoints and exports: uploaded when they are finished, complete or not at all
    records                     all other files (metrics, logs, dumps): uploaded whenever they have changed

The run waits for storage only at its end. consumes: finished folders · produces: copies of them · waits for: a folder,
or RECORDS_EVERY_S · unblocked by: `offer`, `finish`
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from skyrl_train.atomic_files import FileDigest, atomic_write_text
from skyrl_train.errors import StorageError
from skyrl_train.storage.lease import Lease
from skyrl_train.storage.manifests import (
    DELETING_SUFFIX,
    FINISHED_FILE,
    MANIFEST_FILE,
    SET_ASIDE_FILE,
    delete_folder,
    has_same_content,
    is_complete_remote,
    set_aside,
    set_aside_local,
    upload_folder,
    write_manifest,
)
from skyrl_train.storage.remote_folder import RemoteFile, RemoteFolder

RECORD_INTERVAL_S = 30.0
"""Interval of uploads of records that have changed, while no folder is uploaded."""
MAX_RETRY_DELAY_S = 60.0
"""Longest time between two attempts."""
STOP_TIMEOUT_S = 10.0
"""Time for the file that is being sent when nothing more shall be uploaded."""
ERROR_LOG_INTERVAL = 5
"""Failed attempts of one upload between two errors in the log."""
LATEST_FILE = "latest_ckpt_global_step.txt"
LEFT_BEHIND_FILE = ".left_behind.json"
"""Local file: step -> version of the manifest at the address, of checkpoints that this run has gone back behind."""
KNOWN_MANIFESTS_FILE = ".known.json"
"""Local file: SHA-256 of the manifests at the address that this machine has written or found at a start."""
_STEP = re.compile("global_step_(0|[1-9][0-9]{0,17})")
_NOT_RECORDS = re.compile(r"global_step_\d+(\..*)?|.*\.partial|weight_sync|evaluation|mlflow|\..*", re.DOTALL)
"""Names of folders and files that are no records: hidden ones, folders with manifests, what is not finished, what only
processes of the run read, and a database whose paths are this machine's."""
_log = logging.getLogger(__name__)


class Mirror:
    """Keeps the files of `local` at an address. Every method may be called by any thread.

    Call `take_over` if the folder has checkpoints, then `start`, then `offer` for each finished folder, then `finish`;
    in any case `stop` and `lease.release`.
    """

    def __init__(self, local: Path, uri: str, max_ckpts_to_keep: int = -1, lease_owner: Mirror | None = None):
        """Connect to the address; nothing is read or written yet.

        Args:
            local: Folder of this machine.
            address: Where its copy is kept.
            max_ckpts_to_keep: Number of checkpoints at the address; -1 for all.
            run: Mirror of the run that writes `local`, if that has another address: nothing is uploaded here either
                once that address is lost to another machine.
        """
        self.local = local
        self.store = RemoteFolder(uri)
        self.lease: Lease = Lease(self.store, local) if lease_owner is None else lease_owner.lease
        self._max_ckpts_to_keep = max_ckpts_to_keep
        self._condition = threading.Condition()
        self._pending: list[Path] = []
        """Folders to upload."""
        self._uploaded: dict[str, FileDigest] = {}
        """Files that failed attempts have sent of the folder that is tried again."""
        self._remote_checkpoints: dict[int, str] = {}
        """Checkpoints at the address when they were last listed, as `_checkpoints`."""
        self._current: Path | None = None
        self._is_closing = self._is_stopped = False
        self._failure = ""
        self._uploaded_state: dict[str, tuple[int, int]] = {}
        """Size and modification time of records when they were uploaded."""
        self._records_to_delete: set[str] = set()
        """Records that were deleted here and are to be deleted there."""
        self._done = threading.Event()
        self._worker = threading.Thread(target=self._work, name=f"upload to {uri}", daemon=True)

    # -- starting

    def acquire_and_pull(self) -> None:
        """Claim the address, and download its records if it is ahead of this folder.

        If another machine has saved checkpoints there since, the address counts: those that are only here are set
        aside. `local` must be locked. Raises RunDirectoryError if another machine uses the address, StorageError.
        """
        self.lease.acquire()
        there = self.store.find()
        manifests = {step: self.store.read(f"global_step_{step}/{MANIFEST_FILE}") for step in _manifests(there)}
        stored = {step: manifest for step, manifest in manifests.items() if manifest is not None}
        known = self._known()
        is_passed = known is not None and any(_digest(one) not in known for one in stored.values())
        if is_passed:
            self._set_aside_diverged(stored)
        here = max(filter(None, self._finished().values()), default=0)
        is_ahead = is_passed or max(self._checkpoints(there), default=0) > here
        if is_ahead or not any(self._record_files()):
            for name in filter(_is_record, there):
                if self._is_stopped:
                    raise StorageError(f"{self.store.uri}: nothing more is downloaded.")
                if self._can_be_local_file(name):
                    self.store.get(name, self.local / name)
        self._remember(*stored.values())
        there = self.store.find()  # again: a manifest that was on its way may have arrived during the downloads
        for folder in {folder for name in there if _STEP.fullmatch(folder := name.partition("/")[0])}:
            if not {f"{folder}/{MANIFEST_FILE}", f"{folder}/{SET_ASIDE_FILE}"} & there.keys():
                # What an interrupted upload left: nobody can read it.
                self.store.delete(name for name in there if name.startswith(f"{folder}/"))
        self.store.abort_uploads()

    def start(self) -> None:
        """Upload from now on; first what an earlier attempt finished and did not upload."""
        there = self.store.find()
        self._remote_checkpoints = stored = self._checkpoints(there)
        finished = self._finished()
        newest = max((*stored, *filter(None, finished.values())), default=0)
        for folder, step in sorted(finished.items(), key=lambda item: item[0].stat().st_mtime):
            if step is None and self._is_from_another_machine(folder):
                _log.warning("Another machine has written %s since: the one that is here is not uploaded.",
                             f"{self.store.uri}/{self._name(folder)}")  # fmt: skip
                self.mark_unfinished(folder)
            elif step in (None, newest) or (step not in stored and not self._is_surplus(step, stored)):
                self._pending.append(folder)  # the newest again: what follows a manifest may not be done
            elif (
                step in stored
                and not is_complete_remote(self.store, folder.name, there)
                and not self.differs_from_remote(folder)
            ):
                _log.warning("%s/%s lacks files that were there: they are uploaded again.",
                             self.store.uri, folder.name)  # fmt: skip
                self._pending.append(folder)
        exported = (name for name in there if re.fullmatch(rf"{_STEP.pattern}/.+/{MANIFEST_FILE}", name))
        manifests = map(self.store.read, exported)  # those of checkpoints are known since `take_over`
        self._remember(*(one for one in manifests if one is not None))
        self._worker.start()

    def _set_aside_diverged(self, stored: Mapping[int, bytes]) -> None:
        """Set aside what the other machine has not gone on from: checkpoints that are not those at the address.

        That includes those that an interrupted save has put out of the way, which would be put back.
        """
        atomic_write_text(self.local / LEFT_BEHIND_FILE, "{}")  # the other machine has not gone back as this one has
        passed = [
            folder
            for folder, step in self._finished().items()
            if step is not None
            and not has_same_content(folder, stored.get(step, b""))
            and not self._is_surplus(step, stored)
        ]
        for folder in (*passed, *self.local.glob(f"global_step_*{DELETING_SUFFIX}")):
            _log.warning("Another machine has gone on with this run, and %s has no such %s: the one that is here is "
                         "now %s.", self.store.uri, folder.name, set_aside_local(folder))  # fmt: skip

    # -- checkpoints

    def remote_steps(self) -> list[int]:
        """Return the steps of the complete checkpoints at the address, oldest first, without those left behind."""
        return [*self._checkpoints(self.store.find())]

    def differs_from_remote(self, folder: Path) -> bool:
        """Return True if a checkpoint is here and is not the one of its name at the address. Raises StorageError."""
        manifest = self.store.read(f"{folder.name}/{MANIFEST_FILE}") if folder.is_dir() else None
        return manifest is not None and not has_same_content(folder, manifest)

    def leave_behind(self, step: int) -> None:
        """Ignore what an earlier attempt has at the address of this step and of later ones.

        Call it before a checkpoint of this step is committed. Raises OSError.
        """
        with self._condition:
            left = self._left_behind()
            more = {
                one: version
                for one, version in self._remote_checkpoints.items()
                if one >= step and left.get(one) != version
            }
            if more:
                atomic_write_text(self.local / LEFT_BEHIND_FILE, json.dumps(left | more))

    def _checkpoints(self, remote_files: Mapping[str, RemoteFile]) -> dict[int, str]:
        """Return what `_manifests` does, without the checkpoints left behind."""
        left = self._left_behind()
        return {step: version for step, version in _manifests(remote_files).items() if left.get(step) != version}

    def _after_checkpoint(self, step: int) -> None:
        """Set aside checkpoints that the run has left behind by going back, and delete the oldest of too many."""
        left, there = self._left_behind(), _manifests(self.store.find())
        for other in [one for one, version in there.items() if one != step and left.get(one) == version]:
            set_aside(self.store, f"global_step_{other}")
            del there[other]
            _log.warning("%s/global_step_%d is from before this run went back to an earlier step: its manifest is "
                         "now %s.", self.store.uri, other, SET_ASIDE_FILE)  # fmt: skip
        with self._condition:
            # more may have been left behind meanwhile
            more = {one: version for one, version in self._left_behind().items() if left.get(one) != version}
            if left:
                atomic_write_text(self.local / LEFT_BEHIND_FILE, json.dumps(more))
            self._remote_checkpoints = there = {
                one: version for one, version in there.items() if more.get(one) != version
            }
        self.store.write(LATEST_FILE, str(max(there, default=step)).encode())
        for old in [*there][: -self._max_ckpts_to_keep] if self._max_ckpts_to_keep > 0 else ():
            delete_folder(self.store, f"global_step_{old}")

    def _is_surplus(self, step: int, stored: Collection[int]) -> bool:
        """Return True for a checkpoint only here that is one too many: the next save deletes it here as well."""
        return len(stored) >= self._max_ckpts_to_keep > 0 and step < min(stored)

    def _is_from_another_machine(self, folder: Path) -> bool:
        """Return True if a folder of this name is at the address and this machine has not uploaded it."""
        known, manifest = self._known(), self.store.read(f"{self._name(folder)}/{MANIFEST_FILE}")
        return known is not None and manifest is not None and _digest(manifest) not in known

    def _known(self) -> set[str] | None:
        """Return the content of KNOWN_FILE; None if it is missing or damaged."""
        known = _read_side_file(self.local / KNOWN_MANIFESTS_FILE, list)
        return None if known is None else {one for one in known if isinstance(one, str)}

    def _remember(self, *manifests: bytes) -> None:
        known = self._known()
        all_known = (known or set()) | {_digest(one) for one in manifests}
        if all_known != known:
            self.local.mkdir(parents=True, exist_ok=True)
            atomic_write_text(self.local / KNOWN_MANIFESTS_FILE, json.dumps(sorted(all_known)))

    def _left_behind(self) -> dict[int, str]:
        left = _read_side_file(self.local / LEFT_BEHIND_FILE, dict) or {}
        return {int(step): version for step, version in left.items() if _STEP.fullmatch(f"global_step_{step}")}

    def _finished(self) -> dict[Path, int | None]:
        """Return finished folder -> step, which is None for an export."""
        names = (MANIFEST_FILE, FINISHED_FILE)
        folders = {mark.parent for name in names for mark in self.local.glob(f"global_step_*/**/{name}")}
        return {path: self._step_of(path) for path in folders if _STEP.fullmatch(self._name(path).partition("/")[0])}

    def _step_of(self, folder: Path) -> int | None:
        """Return the step of a checkpoint; None for another folder."""
        match = _STEP.fullmatch(folder.name)
        return int(match[1]) if match and folder.parent == self.local else None

    def _name(self, path: Path) -> str:
        return path.relative_to(self.local).as_posix()

    # -- what the run calls

    def enqueue(self, folder: Path) -> None:
        """Upload a folder of `local` that is finished. Returns at once."""
        if not (folder / MANIFEST_FILE).exists():
            (folder / FINISHED_FILE).touch()
        with self._condition:
            self._pending = [*(one for one in self._pending if one != folder), folder]
            self._condition.notify_all()

    def mark_unfinished(self, folder: Path) -> None:
        """Mark a folder as unfinished, as it is about to be written again; an upload of it that is under way ends."""
        for name in (MANIFEST_FILE, FINISHED_FILE):
            (folder / name).unlink(missing_ok=True)

    def delete_record(self, file: Path) -> None:
        """Delete a record at the address that was deleted here. Returns at once."""
        with self._condition:
            self._records_to_delete.add(self._name(file))

    def is_uploading(self, folder: Path) -> bool:
        """Return True if a folder is being read now and must not be deleted."""
        return self._current == folder

    def describe_upload(self) -> str:
        """Describe what is being uploaded."""
        folder = self._current
        return f"{self._name(folder) if folder else 'metrics and logs'} to {self.store.uri}"

    def finish(self, deadline_s: float) -> None:
        """Wait until everything is uploaded. Raises StorageError that says what is missing after `deadline_s`."""
        with self._condition:
            self._is_closing = True
            self._condition.notify_all()
        is_done = self._done.wait(deadline_s)
        if taker := self.lease.lost_to:
            raise StorageError(
                f"{self.store.uri} was taken by {taker}: nothing was uploaded since. What this run wrote is in "
                f"{self.local}."
            )
        if not is_done:
            with self._condition:
                missing = [self._name(path) for path in (self._current, *self._pending) if path is not None]
            raise StorageError(
                f"{self.store.uri} lacks {', '.join(missing or ['metrics and logs'])}, which could not be uploaded "
                f"in {deadline_s:g} s (trainer.timeouts.upload_s): {self._failure or 'storage is too slow'} Nothing is "
                f"lost: it is in {self.local}, and the same command uploads it before anything else."
            )

    def stop(self) -> None:
        """Upload nothing more. A file that is being sent may still arrive, but no other, and no manifest.

        A `take_over` in another thread stops waiting, and raises.
        """
        with self._condition:
            self._is_stopped = True
            self._condition.notify_all()
        self.lease.stop()
        if self._worker.is_alive():
            self._worker.join(STOP_TIMEOUT_S)
        self._done.set()  # whoever waits for the end need not wait for a file that is being sent

    # -- the thread

    def _work(self) -> None:
        failed = 0
        while not self._is_stopped and not self.lease.lost_to:
            with self._condition:
                if failed:
                    self._condition.wait(min(MAX_RETRY_DELAY_S, 2.0 ** min(failed, 10) / 2))
                elif not self._pending and not self._is_closing:
                    self._condition.wait(RECORD_INTERVAL_S)
                is_closing = self._is_closing
                folder = self._current = self._pending.pop(0) if self._pending else None
            try:
                self._put_records() if folder is None else self._upload(folder)
                failed, self._failure = 0, ""
                if folder is None and is_closing and not self._pending:
                    break
            except Exception as error:  # of the network, of the disk: this thread goes on whatever it is
                if not self._is_stopped and not self.lease.lost_to:
                    failed += 1
                    self._record_failure(folder, failed, error)
            finally:
                self._current = None
        self._done.set()

    def _record_failure(self, folder: Path | None, failed: int, error: Exception) -> None:
        self._failure = f"{error}" if isinstance(error, StorageError) else f"{type(error).__name__}: {error}"
        if failed == 1:
            _log.warning("An upload failed and is tried again: %s", self._failure)
        elif failed % ERROR_LOG_INTERVAL == 0:
            _log.error("AN UPLOAD HAS FAILED %d TIMES. The run goes on. %s", failed, self._failure)
        with self._condition:
            if folder is not None and folder not in self._pending:  # else it was offered anew
                self._pending.insert(0, folder)

    def _upload(self, folder: Path) -> None:
        if (folder / FINISHED_FILE).exists() and not (folder / MANIFEST_FILE).exists():
            write_manifest(folder)

        def before_manifest(manifest: bytes) -> None:
            self._put_records()  # a checkpoint is worth nothing without the metrics of its steps
            self._remember(manifest)

        is_uploaded = upload_folder(
            self.store,
            self._name(folder),
            folder,
            before_manifest=before_manifest,
            before_write=self._raise_if_stopped,
            arrived=self._uploaded,
        )
        self._uploaded.clear()
        if is_uploaded and (step := self._step_of(folder)) is not None:
            self._raise_if_stopped()
            self._after_checkpoint(step)

    def _raise_if_stopped(self) -> None:
        """Raise StorageError if nothing more shall be uploaded."""
        if self._is_stopped or self.lease.check_lost():
            raise StorageError(f"{self.store.uri}: nothing more is uploaded.")

    # -- records

    def _put_records(self) -> None:
        for path in self._record_files():
            name = self._name(path)
            try:
                state = path.stat()
                if self._uploaded_state.get(name) == (sent := (state.st_size, state.st_mtime_ns)):
                    continue
                self._raise_if_stopped()
                self.store.put(name, path)
                self._uploaded_state[name] = sent
            except (FileNotFoundError, StorageError):
                if path.exists():  # else it was a temporary one
                    raise
        for name in [*self._records_to_delete]:
            if not (self.local / name).exists():  # else it was written again meanwhile
                self._raise_if_stopped()
                self.store.delete([name])
                self._uploaded_state.pop(name, None)
            with self._condition:
                self._records_to_delete.discard(name)

    def _record_files(self) -> Iterator[Path]:
        for folder, folders, files in os.walk(self.local):
            folders[:] = [name for name in folders if not _NOT_RECORDS.fullmatch(name)]
            yield from (Path(folder, name) for name in sorted(files) if _is_record(name))

    def _can_be_local_file(self, name: str) -> bool:
        """Return True if a record can be here: no folder has its name, and no file that of its folder."""
        path = self.local / name
        folders = (self.local / folder for folder in Path(name).parents)
        if not path.is_dir() and not any(folder.exists() and not folder.is_dir() for folder in folders):
            return True
        _log.warning("%s: the object %r is skipped: there is a folder in place of the file here, or a file in place of "
                     "a folder.", self.store.uri, name)  # fmt: skip
        return False


def _is_record(name: str) -> bool:
    parts = name.split("/")
    return parts[-1] != LATEST_FILE and not any(_NOT_RECORDS.fullmatch(part) for part in parts)


def _manifests(remote_files: Mapping[str, RemoteFile]) -> dict[int, str]:
    """Return step -> version of the manifest of all complete checkpoints among these files, oldest first."""
    names = ((name.partition("/"), found) for name, found in remote_files.items())
    steps = ((_STEP.fullmatch(folder), found) for (folder, _, file), found in names if file == MANIFEST_FILE)
    return dict(sorted((int(match[1]), found.version) for match, found in steps if match))


_Json = TypeVar("_Json", list[Any], dict[str, Any])


def _read_side_file(file: Path, kind: type[_Json]) -> _Json | None:
    """Return the JSON of this kind; None if the file is missing, or, with a warning, damaged: a run starts without it.

    Raises OSError if the file cannot be read.
    """
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        content = None
    if isinstance(content, kind):
        return content
    damaged = file.replace(file.with_name(f"{file.name}.damaged"))
    _log.warning("%s is damaged: the run goes on without it. It is now %s.", file, damaged.name)
    return None


def _digest(manifest: bytes) -> str:
    return hashlib.sha256(manifest).hexdigest()
