"""The remote copy of a run's local folder. A thread keeps it up to date.

    folders with a manifest     checkpoints and exports: uploaded when they are finished, complete or not at all
    records                     all other files (metrics, logs, dumps): uploaded whenever they have changed

The run waits for storage only at its end. The thread waits for a finished folder, at most RECORD_INTERVAL_S. `enqueue`
and `finish` wake it.
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
"""Interval of uploads of changed records while no folder is uploaded."""
MAX_RETRY_DELAY_S = 60.0
"""Maximum time between two attempts of an upload."""
STOP_TIMEOUT_S = 10.0
"""Limit for the file that is being sent when `stop` is called."""
ERROR_LOG_INTERVAL = 5
"""Number of failed attempts of one upload between two errors in the log."""
LATEST_FILE = "latest_ckpt_global_step.txt"
LEFT_BEHIND_FILE = ".left_behind.json"
"""Local file with the versions of the remote manifests of obsolete checkpoints, by step. Checkpoints become obsolete
when the run goes back to an earlier step."""
KNOWN_MANIFESTS_FILE = ".known.json"
"""Local file with the SHA-256 of the remote manifests that this machine has written, or found when it started."""
_STEP = re.compile("global_step_(0|[1-9][0-9]{0,17})")
_NOT_RECORDS = re.compile(r"global_step_\d+(\..*)?|.*\.partial|weight_sync|evaluation|mlflow|\..*", re.DOTALL)
"""Names of files and folders that are not records: hidden ones, folders with manifests, unfinished files, files that
only the run's processes read, and MLflow's database, which contains paths of this machine."""
_log = logging.getLogger(__name__)


class Mirror:
    """An uploader that keeps a copy of a local folder at a URI. Any thread may call any method.

    Call `acquire_and_pull` if the folder has checkpoints, then `start`, then `enqueue` for each finished folder, then
    `finish`. Call `stop` and `lease.release` even after an error.
    """

    def __init__(self, local: Path, uri: str, max_ckpts_to_keep: int = -1, lease_owner: Mirror | None = None):
        """Create an uploader. Nothing is read or written yet.

        Args:
            local: The local folder.
            uri: URI of its copy.
            max_ckpts_to_keep: Number of checkpoints to keep at the URI; -1 for all.
            lease_owner: The run's main mirror, if it has another URI. This mirror then shares its lease: it stops
                uploading when another machine takes that URI.

        Raises:
            ConfigError: The URI cannot be used.
        """
        self.local = local
        self.store = RemoteFolder(uri)
        self.lease: Lease = Lease(self.store, local) if lease_owner is None else lease_owner.lease
        self._max_ckpts_to_keep = max_ckpts_to_keep
        self._condition = threading.Condition()
        self._pending: list[Path] = []
        """Folders that wait for their upload."""
        self._uploaded: dict[str, FileDigest] = {}
        """Files of the current folder that failed attempts have sent."""
        self._remote_checkpoints: dict[int, str] = {}
        """The result of `_checkpoints` when remote files were last listed."""
        self._current: Path | None = None
        self._is_closing = self._is_stopped = False
        self._failure = ""
        self._uploaded_state: dict[str, tuple[int, int]] = {}
        """Size and modification time of each record when it was uploaded."""
        self._records_to_delete: set[str] = set()
        """Records that were deleted locally and must be deleted remotely."""
        self._done = threading.Event()
        self._worker = threading.Thread(target=self._work, name=f"upload to {uri}", daemon=True)

    # -- starting

    def acquire_and_pull(self) -> None:
        """Acquire the lease of the URI, and download its records if its checkpoints are ahead of this folder's.

        If another machine has saved checkpoints there in the meantime, the remote copy takes precedence: local
        checkpoints that are not in it are renamed, with a warning. Remains of interrupted uploads are deleted. The
        caller must hold the lock of the local folder.

        Raises:
            RunFolderError: Another process uses the URI.
            StorageError: The storage rejects a request or does not respond, or `stop` is called during the downloads.
        """
        self.lease.acquire()
        remote_files = self.store.find()
        manifests = {step: self.store.read(f"global_step_{step}/{MANIFEST_FILE}") for step in _manifests(remote_files)}
        stored = {step: manifest for step, manifest in manifests.items() if manifest is not None}
        known = self._known_manifests()
        has_diverged = known is not None and any(_digest(manifest) not in known for manifest in stored.values())
        if has_diverged:
            self._set_aside_diverged(stored)
        newest_local = max(filter(None, self._finished().values()), default=0)
        is_ahead = has_diverged or max(self._checkpoints(remote_files), default=0) > newest_local
        if is_ahead or not any(self._record_files()):
            for name in filter(_is_record, remote_files):
                if self._is_stopped:
                    raise StorageError(f"{self.store.uri}: nothing more is downloaded, because the run has ended.")
                if self._can_be_local_file(name):
                    self.store.get(name, self.local / name)
        self._add_known(*stored.values())
        remote_files = self.store.find()  # A late manifest may have arrived during the downloads.
        for folder in {folder for name in remote_files if _STEP.fullmatch(folder := name.partition("/")[0])}:
            if not {f"{folder}/{MANIFEST_FILE}", f"{folder}/{SET_ASIDE_FILE}"} & remote_files.keys():
                # An interrupted upload left these files, which cannot be used.
                self.store.delete(name for name in remote_files if name.startswith(f"{folder}/"))
        self.store.abort_uploads()

    def start(self) -> None:
        """Start the uploading thread. It first uploads finished folders that an earlier attempt did not upload.

        Raises:
            StorageError: The storage rejects a request or does not respond.
        """
        remote_files = self.store.find()
        self._remote_checkpoints = stored = self._checkpoints(remote_files)
        finished = self._finished()
        newest = max((*stored, *filter(None, finished.values())), default=0)
        for folder, step in sorted(finished.items(), key=lambda item: item[0].stat().st_mtime):
            if step is None and self._is_from_another_machine(folder):
                _log.warning("Another machine has written %s in the meantime. The local version is not uploaded.",
                             f"{self.store.uri}/{self._name(folder)}")  # fmt: skip
                self.mark_unfinished(folder)
            elif step in (None, newest) or (step not in stored and not self._is_surplus(step, stored)):
                # The newest checkpoint is uploaded again, because the work after its manifest may be incomplete.
                self._pending.append(folder)
            elif (
                step in stored
                and not is_complete_remote(self.store, folder.name, remote_files)
                and not self.differs_from_remote(folder)
            ):
                _log.warning("%s/%s lacks files that its manifest lists. They are uploaded again.",
                             self.store.uri, folder.name)  # fmt: skip
                self._pending.append(folder)
        exported = (name for name in remote_files if re.fullmatch(rf"{_STEP.pattern}/.+/{MANIFEST_FILE}", name))
        manifests = map(self.store.read, exported)  # `acquire_and_pull` has added those of checkpoints.
        self._add_known(*(manifest for manifest in manifests if manifest is not None))
        self._worker.start()

    def _set_aside_diverged(self, stored: Mapping[int, bytes]) -> None:
        """Rename local checkpoints that differ from the remote ones, because another machine has continued the run.

        This includes checkpoints that an interrupted save has renamed, because they would be restored later.
        """
        atomic_write_text(self.local / LEFT_BEHIND_FILE, "{}")  # Only this machine went back, not the other one.
        diverged = [
            folder
            for folder, step in self._finished().items()
            if step is not None
            and not has_same_content(folder, stored.get(step, b""))
            and not self._is_surplus(step, stored)
        ]
        for folder in (*diverged, *self.local.glob(f"global_step_*{DELETING_SUFFIX}")):
            _log.warning("Another machine has continued this run, and %s does not have this version of %s. The local "
                         "folder is now %s.", self.store.uri, folder.name, set_aside_local(folder))  # fmt: skip

    # -- checkpoints

    def remote_steps(self) -> list[int]:
        """Return the steps of the complete remote checkpoints, oldest first, without obsolete ones (`leave_behind`).

        Raises:
            StorageError: The storage rejects a request or does not respond.
        """
        return [*self._checkpoints(self.store.find())]

    def differs_from_remote(self, folder: Path) -> bool:
        """True if a local checkpoint exists, a remote one of its name exists, and their contents differ.

        Raises:
            StorageError: The storage rejects a request or does not respond.
        """
        manifest = self.store.read(f"{folder.name}/{MANIFEST_FILE}") if folder.is_dir() else None
        return manifest is not None and not has_same_content(folder, manifest)

    def leave_behind(self, step: int) -> None:
        """Mark the remote checkpoints of this step and later ones as obsolete.

        Call this if the run has gone back to a step before `step`, and before a checkpoint of this step is committed.
        The obsolete checkpoints are set aside after the next upload of a checkpoint.

        Raises:
            OSError: The local file with the marks cannot be written.
        """
        with self._condition:
            obsolete = self._left_behind()
            added = {
                remote_step: version
                for remote_step, version in self._remote_checkpoints.items()
                if remote_step >= step and obsolete.get(remote_step) != version
            }
            if added:
                atomic_write_text(self.local / LEFT_BEHIND_FILE, json.dumps(obsolete | added))

    def _checkpoints(self, remote_files: Mapping[str, RemoteFile]) -> dict[int, str]:
        """Return the result of `_manifests` without obsolete checkpoints."""
        obsolete = self._left_behind()
        return {step: version for step, version in _manifests(remote_files).items() if obsolete.get(step) != version}

    def _after_checkpoint(self, step: int) -> None:
        """Set aside obsolete remote checkpoints, and delete the oldest ones beyond max_ckpts_to_keep."""
        obsolete, remote = self._left_behind(), _manifests(self.store.find())
        for other in [other for other, version in remote.items() if other != step and obsolete.get(other) == version]:
            set_aside(self.store, f"global_step_{other}")
            del remote[other]
            _log.warning("%s/global_step_%d is from before this run went back to an earlier step. Its manifest is "
                         "now %s.", self.store.uri, other, SET_ASIDE_FILE)  # fmt: skip
        with self._condition:
            # `leave_behind` may have added checkpoints in the meantime.
            added = {other: version for other, version in self._left_behind().items() if obsolete.get(other) != version}
            if obsolete:
                atomic_write_text(self.local / LEFT_BEHIND_FILE, json.dumps(added))
            self._remote_checkpoints = remote = {
                other: version for other, version in remote.items() if added.get(other) != version
            }
        self.store.write(LATEST_FILE, str(max(remote, default=step)).encode())
        for old in [*remote][: -self._max_ckpts_to_keep] if self._max_ckpts_to_keep > 0 else ():
            delete_folder(self.store, f"global_step_{old}")

    def _is_surplus(self, step: int, stored: Collection[int]) -> bool:
        """True for a checkpoint that exists only locally and exceeds max_ckpts_to_keep. The next save deletes it."""
        return len(stored) >= self._max_ckpts_to_keep > 0 and step < min(stored)

    def _is_from_another_machine(self, folder: Path) -> bool:
        """True if a remote folder of this name exists that this machine has not uploaded."""
        known, manifest = self._known_manifests(), self.store.read(f"{self._name(folder)}/{MANIFEST_FILE}")
        return known is not None and manifest is not None and _digest(manifest) not in known

    def _known_manifests(self) -> set[str] | None:
        """Return the content of KNOWN_MANIFESTS_FILE; None if it is missing or damaged."""
        known = _read_side_file(self.local / KNOWN_MANIFESTS_FILE, list)
        return None if known is None else {digest for digest in known if isinstance(digest, str)}

    def _add_known(self, *manifests: bytes) -> None:
        known = self._known_manifests()
        all_known = (known or set()) | {_digest(manifest) for manifest in manifests}
        if all_known != known:
            self.local.mkdir(parents=True, exist_ok=True)
            atomic_write_text(self.local / KNOWN_MANIFESTS_FILE, json.dumps(sorted(all_known)))

    def _left_behind(self) -> dict[int, str]:
        obsolete = _read_side_file(self.local / LEFT_BEHIND_FILE, dict) or {}
        return {int(step): version for step, version in obsolete.items() if _STEP.fullmatch(f"global_step_{step}")}

    def _finished(self) -> dict[Path, int | None]:
        """Return the steps of finished local folders; the step of an export is None."""
        names = (MANIFEST_FILE, FINISHED_FILE)
        folders = {marker.parent for name in names for marker in self.local.glob(f"global_step_*/**/{name}")}
        return {path: self._step_of(path) for path in folders if _STEP.fullmatch(self._name(path).partition("/")[0])}

    def _step_of(self, folder: Path) -> int | None:
        """Return the step of a checkpoint; None for another folder."""
        match = _STEP.fullmatch(folder.name)
        return int(match[1]) if match and folder.parent == self.local else None

    def _name(self, path: Path) -> str:
        return path.relative_to(self.local).as_posix()

    # -- called by the run

    def enqueue(self, folder: Path) -> None:
        """Add a finished folder to the queue of uploads, and return immediately.

        Without a manifest, the folder is marked as finished, and the uploading thread writes its manifest.

        Args:
            folder: A checkpoint or an export below `local`.
        """
        if not (folder / MANIFEST_FILE).exists():
            (folder / FINISHED_FILE).touch()
        with self._condition:
            self._pending = [*(pending for pending in self._pending if pending != folder), folder]
            self._condition.notify_all()

    def mark_unfinished(self, folder: Path) -> None:
        """Mark a local folder as unfinished before it is written again. A running upload of it is abandoned."""
        for name in (MANIFEST_FILE, FINISHED_FILE):
            (folder / name).unlink(missing_ok=True)

    def delete_record(self, file: Path) -> None:
        """Schedule the remote deletion of a record that was deleted locally, and return immediately."""
        with self._condition:
            self._records_to_delete.add(self._name(file))

    def is_uploading(self, folder: Path) -> bool:
        """True if the thread is reading a folder, which must not be deleted now."""
        return self._current == folder

    def describe_upload(self) -> str:
        """Return a description of the current upload, for a message: what is sent, and to which URI."""
        folder = self._current
        return f"{self._name(folder) if folder else 'metrics and logs'} to {self.store.uri}"

    def finish(self, deadline_s: float) -> None:
        """Wait until everything is uploaded.

        Args:
            deadline_s: Maximum time to wait, in seconds.

        Raises:
            StorageError: Something is not uploaded after `deadline_s`, or another machine has taken the URI.
        """
        with self._condition:
            self._is_closing = True
            self._condition.notify_all()
        is_done = self._done.wait(deadline_s)
        if taker := self.lease.lost_to:
            raise StorageError(
                f"{self.store.uri} was taken by {taker}. Nothing was uploaded since. The files of this run are in "
                f"{self.local}. End one of the two processes."
            )
        if not is_done:
            with self._condition:
                missing = [self._name(path) for path in (self._current, *self._pending) if path is not None]
            raise StorageError(
                f"{self.store.uri} lacks {', '.join(missing or ['metrics and logs'])}, which could not be uploaded "
                f"in {deadline_s:g} s (trainer.timeouts.upload_s): {self._failure or 'Storage is too slow.'} No data "
                f"is lost: it is in {self.local}, and the same command uploads it first when it runs again."
            )

    def stop(self) -> None:
        """Stop uploading, and wait up to STOP_TIMEOUT_S for the thread.

        The file that is being sent may still arrive, but no other file and no manifest. An `acquire_and_pull` in
        another thread stops waiting and raises.
        """
        with self._condition:
            self._is_stopped = True
            self._condition.notify_all()
        self.lease.stop()
        if self._worker.is_alive():
            self._worker.join(STOP_TIMEOUT_S)
        self._done.set()  # `finish` need not wait for the file that is being sent.

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
            except Exception as error:  # The thread continues after any error of the network or the disk.
                if not self._is_stopped and not self.lease.lost_to:
                    failed += 1
                    self._record_failure(folder, failed, error)
            finally:
                self._current = None
        self._done.set()

    def _record_failure(self, folder: Path | None, failed: int, error: Exception) -> None:
        self._failure = f"{error}" if isinstance(error, StorageError) else f"{type(error).__name__}: {error}"
        if failed == 1:
            _log.warning("An upload failed and will be retried: %s", self._failure)
        elif failed % ERROR_LOG_INTERVAL == 0:
            _log.error("AN UPLOAD HAS FAILED %d TIMES. The run continues. %s", failed, self._failure)
        with self._condition:
            if folder is not None and folder not in self._pending:  # It may have been queued again.
                self._pending.insert(0, folder)

    def _upload(self, folder: Path) -> None:
        if (folder / FINISHED_FILE).exists() and not (folder / MANIFEST_FILE).exists():
            write_manifest(folder)

        def before_manifest(manifest: bytes) -> None:
            self._put_records()  # A checkpoint must not be visible without the metrics of its steps.
            self._add_known(manifest)

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
        """Raise StorageError if the mirror is stopped or has lost its lease."""
        if self._is_stopped or self.lease.check_lost():
            reason = f"it was taken over by {self.lease.lost_to}" if self.lease.lost_to else "the run has ended"
            raise StorageError(f"{self.store.uri}: nothing more is uploaded, because {reason}.")

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
                if path.exists():  # Otherwise it was a temporary file.
                    raise
        for name in [*self._records_to_delete]:
            if not (self.local / name).exists():  # Otherwise it has been written again.
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
        """True if a record can be stored locally: no local folder has its name, and no file that of its folder."""
        path = self.local / name
        folders = (self.local / folder for folder in Path(name).parents)
        if not path.is_dir() and not any(folder.exists() and not folder.is_dir() for folder in folders):
            return True
        _log.warning("%s: the object %r is skipped: there is a folder in place of the local file, or a file in place "
                     "of its folder.", self.store.uri, name)  # fmt: skip
        return False


def _is_record(name: str) -> bool:
    parts = name.split("/")
    return parts[-1] != LATEST_FILE and not any(_NOT_RECORDS.fullmatch(part) for part in parts)


def _manifests(remote_files: Mapping[str, RemoteFile]) -> dict[int, str]:
    """Return the manifest versions of all complete checkpoints by step, oldest first."""
    parts = ((name.partition("/"), file) for name, file in remote_files.items())
    steps = ((_STEP.fullmatch(folder), file) for (folder, _, name), file in parts if name == MANIFEST_FILE)
    return dict(sorted((int(match[1]), file.version) for match, file in steps if match))


_Json = TypeVar("_Json", list[Any], dict[str, Any])


def _read_side_file(file: Path, kind: type[_Json]) -> _Json | None:
    """Return the content of a JSON file, or None if it is missing or damaged.

    A damaged file is renamed with a warning, because a run can start without it.

    Args:
        file: The file.
        kind: The type of its content.

    Raises:
        OSError: The file cannot be read.
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
    _log.warning("%s is damaged. It is now %s, and the run continues without it.", file, damaged.name)
    return None


def _digest(manifest: bytes) -> str:
    return hashlib.sha256(manifest).hexdigest()
