"""A folder that a run writes on this machine, and the same folder at an address, which a thread keeps up to date.

    folders with a manifest     checkpoints and exports: uploaded when they are finished, whole or not at all
    all other files             metrics, configuration, logs, dumps: uploaded again whenever they have changed

The run never waits for storage, except at its end. consumes: finished folders · produces: copies of them · waits for:
a folder, or RECORDS_EVERY_S · unblocked by: `offer`, `finish`
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

from skyrl_train.durable import Written, sync_folder, write_durably
from skyrl_train.errors import StorageError
from skyrl_train.storage.folder import Found, StoredFolder
from skyrl_train.storage.lease import LEASE_FILE, Lease
from skyrl_train.storage.manifests import (
    DELETING,
    FINISHED_FILE,
    MANIFEST_FILE,
    SET_ASIDE_FILE,
    discard,
    fetch,
    holds_the_same,
    is_complete,
    set_aside,
    set_aside_here,
    upload,
    write_manifest,
)

RECORDS_EVERY_S = 30.0
"""How often files that have changed are uploaded while no folder is."""
LONGEST_PAUSE_S = 60.0
"""Between two attempts."""
_LAST_FILE_S = 10.0
"""For the file that is on its way when nothing more shall be uploaded."""
SAID_ANEW_AFTER = 5
"""Attempts of one upload after which its failure is said again."""
LATEST_FILE = "latest_ckpt_global_step.txt"
LEFT_BEHIND_FILE = ".left_behind.json"
"""In the folder of this machine: step -> version of the manifest at the address, of checkpoints of another attempt."""
KNOWN_FILE = ".known.json"
"""In the folder of this machine: SHA-256 of the manifests at the address that came from here or that a start found."""
_STEP = re.compile("global_step_(0|[1-9][0-9]{0,17})")
_NOT_RECORDS = re.compile(r"global_step_\d+(\..*)?|.*\.partial|weight_sync|evaluation|mlflow|\..*")
"""Folders with manifests, with what is not finished, with what only processes of the run read, or with a database whose
paths are this machine's."""
_log = logging.getLogger(__name__)


class Mirror:
    """Keeps the files of `local` at an address. Any thread may call every method; `max_ckpts_to_keep`: see Checkpoints.

    Call `take_over` where the folder has checkpoints, then `start`, then `offer` for each finished folder; `finish`,
    and whatever happened `stop` and `give_up`. `run`: of the run that writes this folder, if it claims its own address:
    once that is lost nothing is uploaded here, either.
    """

    def __init__(self, local: Path, address: str, max_ckpts_to_keep: int = -1, run: Mirror | None = None):
        self.local = local
        self.store = StoredFolder(address)
        self._max_ckpts_to_keep = max_ckpts_to_keep
        self._lease: Lease = Lease(self.store, local) if run is None else run._lease
        self._turn = threading.Condition()
        self._pending: list[Path] = []
        """Folders to upload."""
        self._arrived: dict[str, Written] = {}
        """What attempts that failed have uploaded of the folder that is tried again."""
        self._there: dict[int, str] = {}
        """What `_stored` last found."""
        self._current: Path | None = None
        self._closing = self._given_up = False
        self._failure = ""
        self._seen: dict[str, tuple[int, int]] = {}
        """Size and time of change of the other files, when they were uploaded."""
        self._dropped: set[str] = set()
        """Those that were deleted here, and are to be deleted there."""
        self._done = threading.Event()
        self._worker = threading.Thread(target=self._work, name=f"upload to {address}", daemon=True)

    def take_over(self) -> None:
        """Claim the address, and bring what is only there: all files but checkpoints, if it is ahead of this folder.

        If another machine has saved checkpoints there since, the address counts: those that are only here are set
        aside. `local` must be locked. Raises RunDirectoryError if another machine uses the address, StorageError.
        """
        self._lease.take()
        read = ((step, self.store.read(f"global_step_{step}/{MANIFEST_FILE}")) for step in self._manifests())
        stored = {step: manifest for step, manifest in read if manifest is not None}
        known = self._known()
        passed = known is not None and any(_digest(one) not in known for one in stored.values())
        if passed:
            self._make_way(stored)
        ahead = passed or max(self.steps(), default=0) > max(self._finished_steps(), default=0)
        if ahead or not any(self._record_files()):
            for name in filter(self._is_record, self.store.find()):
                if self._given_up:
                    raise StorageError(f"{self.store.address}: nothing more is downloaded.")
                self.store.get(name, self.local / name)
        self._remember(*stored.values())
        self._clean()

    def start(self) -> None:
        """Upload from now on; first what an earlier attempt finished and did not upload."""
        there = self.store.find()
        self._there = stored = self._stored(there)
        newest = max((*stored, *self._finished_steps()), default=0)
        for folder in sorted(self._finished_folders(), key=lambda path: path.stat().st_mtime):
            step = self._step_of(folder)
            if step is None and self._is_another_machines(folder):
                _log.warning("Another machine has written %s since: the one that is here is not uploaded.",
                             f"{self.store.address}/{folder.relative_to(self.local).as_posix()}")  # fmt: skip
                self.withdraw(folder)
            elif step in (None, newest) or (step not in stored and not self._is_beyond(step, stored)):
                self._pending.append(folder)  # the newest again: what follows a manifest may not be done
            elif step in stored and not is_complete(self.store, folder.name, there) and not self.has_another(folder):
                _log.warning("%s/%s lacks files that were there: they are uploaded again.",
                             self.store.address, folder.name)  # fmt: skip
                self._pending.append(folder)
        exported = (name for name in there if re.fullmatch(rf"{_STEP.pattern}/.+/{MANIFEST_FILE}", name))
        manifests = map(self.store.read, exported)  # those of checkpoints are `take_over`'s
        self._remember(*(one for one in manifests if one is not None))
        self._worker.start()

    def steps(self) -> list[int]:
        """The steps of the checkpoints that are whole at the address, oldest first; without those left behind."""
        return [*self._stored()]

    def has_another(self, folder: Path) -> bool:
        """Whether a checkpoint is here and is not the one of its name at the address. Raises StorageError."""
        manifest = self.store.read(f"{folder.name}/{MANIFEST_FILE}") if folder.is_dir() else None
        return manifest is not None and not holds_the_same(folder, manifest)

    def leave_behind(self, step: int) -> None:
        """Whatever an earlier attempt has at the address of this step and of later ones counts no more.

        To be called before a checkpoint of this step is committed. Raises OSError.
        """
        with self._turn:
            left = self._left_behind()
            more = {one: version for one, version in self._there.items() if one >= step and left.get(one) != version}
            if more:
                write_durably(self.local / LEFT_BEHIND_FILE, json.dumps(left | more))

    def fetch(self, step: int, folder: Path) -> str | None:
        """Download what `folder` lacks of the checkpoint of a step; returns what is wrong with it at the address.

        Raises StorageError if storage refuses or does not answer.
        """
        problem = fetch(self.store, f"global_step_{step}", folder)
        sync_folder(folder)
        return problem

    def uploading(self, folder: Path) -> bool:
        """Whether a folder is being read now, and must not be deleted."""
        return self._current == folder

    def offer(self, folder: Path) -> None:
        """Upload a folder of `local` that is finished. Returns at once."""
        if not (folder / MANIFEST_FILE).exists():
            (folder / FINISHED_FILE).touch()
        with self._turn:
            self._pending = [one for one in self._pending if one != folder]
            self._pending.append(folder)
            self._turn.notify_all()

    def withdraw(self, folder: Path) -> None:
        """A folder is about to be written again: what is being uploaded of it is not finished."""
        for name in (MANIFEST_FILE, FINISHED_FILE):
            (folder / name).unlink(missing_ok=True)

    def drop(self, file: Path) -> None:
        """A file of `local`, of no folder with a manifest, is deleted, and shall be at the address. Returns at once."""
        with self._turn:
            self._dropped.add(file.relative_to(self.local).as_posix())

    def finish(self, deadline_s: float) -> None:
        """Wait until everything is uploaded. Raises StorageError that says what is missing after `deadline_s`."""
        with self._turn:
            self._closing = True
            self._turn.notify_all()
        in_time = self._done.wait(deadline_s)
        if taker := self._lease.lost_to:
            raise StorageError(
                f"{self.store.address} was taken by {taker}: nothing was uploaded since. What this run wrote is in "
                f"{self.local}."
            )
        if not in_time:
            with self._turn:
                missing = [path for path in (self._current, *self._pending) if path is not None]
            names = [path.relative_to(self.local).as_posix() for path in missing] or ["metrics and logs"]
            raise StorageError(
                f"{self.store.address} lacks {', '.join(names)}, which could not be uploaded in {deadline_s:g} s "
                f"(trainer.timeouts.upload_s): {self._failure or 'storage is too slow'} Nothing is lost: it is in "
                f"{self.local}, and the same command uploads it before anything else."
            )

    def stop(self) -> None:
        """Upload nothing more; a file that is on its way may still arrive, but no other, and no manifest.

        A `take_over` in another thread waits for nobody any more, and raises.
        """
        with self._turn:
            self._given_up = True
            self._turn.notify_all()
        self._lease.leave()
        if self._worker.is_alive():
            self._worker.join(_LAST_FILE_S)
        self._done.set()  # whoever waits for the end need not wait for a file that is on its way

    def give_up(self) -> None:
        """Leave the address to others."""
        if self._lease.taken:
            self._lease.give_up()

    def waits_for(self) -> str:
        """What is being uploaded."""
        folder = self._current
        return f"{folder.relative_to(self.local) if folder else 'metrics and logs'} to {self.store.address}"

    def _work(self) -> None:
        failed = 0
        while not self._given_up and not self._lease.lost_to:
            with self._turn:
                if failed:
                    self._turn.wait(min(LONGEST_PAUSE_S, 2.0 ** min(failed, 10) / 2))
                elif not self._pending and not self._closing:
                    self._turn.wait(RECORDS_EVERY_S)
                closing = self._closing
                folder = self._current = self._pending.pop(0) if self._pending else None
            try:
                self._upload(folder)
                failed, self._failure = 0, ""
            except Exception as error:  # of the network, of the disk: this thread goes on whatever it is
                if self._given_up or self._lease.lost_to:
                    break
                failed += 1
                self._note(folder, failed, error)
                continue
            finally:
                self._current = None
            if folder is None and closing and not self._pending:
                break
        self._done.set()

    def _note(self, folder: Path | None, failed: int, error: Exception) -> None:
        self._failure = f"{error}" if isinstance(error, StorageError) else f"{type(error).__name__}: {error}"
        if failed == 1:
            _log.warning("An upload failed and is tried again: %s", self._failure)
        elif failed % SAID_ANEW_AFTER == 0:
            _log.error("AN UPLOAD HAS FAILED %d TIMES. The run goes on. %s", failed, self._failure)
        if folder is not None:
            with self._turn:
                if folder not in self._pending:  # else it was offered anew
                    self._pending.insert(0, folder)

    def _make_way(self, stored: dict[int, bytes]) -> None:
        """Set aside what another machine has not gone on from: checkpoints that are not those at the address.

        That includes those that an interrupted save has put out of the way, which would be put back.
        """
        write_durably(self.local / LEFT_BEHIND_FILE, "{}")  # nor has it gone back as this machine has
        for folder in (*self._finished_folders(), *self.local.glob(f"global_step_*{DELETING}")):
            step = self._step_of(folder)
            if step is None:
                other = folder.suffix == DELETING
            else:
                other = not (holds_the_same(folder, stored.get(step, b"")) or self._is_beyond(step, stored))
            if other:
                _log.warning("Another machine has gone on with this run, and %s has no such %s: the one that is here "
                             "is now %s.", self.store.address, folder.name, set_aside_here(folder))  # fmt: skip

    def _is_beyond(self, step: int, stored: Collection[int]) -> bool:
        """Whether a checkpoint that is not at the address is one too many: the next save deletes it here as well."""
        return len(stored) >= self._max_ckpts_to_keep > 0 and step < min(stored)

    def _is_another_machines(self, folder: Path) -> bool:
        """Whether a folder of this name is at the address, and is not what this machine has uploaded."""
        name, known = folder.relative_to(self.local).as_posix(), self._known()
        manifest = None if known is None else self.store.read(f"{name}/{MANIFEST_FILE}")
        return known is not None and manifest is not None and _digest(manifest) not in known

    def _known(self) -> set[str] | None:
        """None for a folder of before there was such a file, a new one, or one whose file is damaged."""
        try:
            known = _read_side_file(self.local / KNOWN_FILE, list)
        except FileNotFoundError:
            return None
        return None if known is None else {one for one in known if isinstance(one, str)}

    def _remember(self, *manifests: bytes) -> None:
        known = self._known()
        if known is None or {_digest(one) for one in manifests} - known:
            known = (known or set()) | {_digest(one) for one in manifests}
            self.local.mkdir(parents=True, exist_ok=True)
            write_durably(self.local / KNOWN_FILE, json.dumps(sorted(known)))

    def _upload(self, folder: Path | None) -> None:
        if folder is None:
            self._put_records()
            return
        if (folder / FINISHED_FILE).exists() and not (folder / MANIFEST_FILE).exists():
            write_manifest(folder)

        def before_manifest(manifest: bytes) -> None:
            self._put_records()  # a checkpoint is worth nothing without the metrics of its steps
            self._remember(manifest)

        name = folder.relative_to(self.local).as_posix()
        whole = upload(
            self.store,
            name,
            folder,
            before_manifest=before_manifest,
            before_write=self._check,
            arrived=self._arrived,
        )
        self._arrived.clear()
        if whole and (step := self._step_of(folder)) is not None:
            self._check()
            self._after_checkpoint(step)

    def _check(self) -> None:
        """Raises StorageError if nothing more shall be uploaded."""
        if self._given_up or self._lease.is_lost():
            raise StorageError(f"{self.store.address}: nothing more is uploaded.")

    def _after_checkpoint(self, step: int) -> None:
        """Checkpoints that a run left behind by going back are set aside, and the oldest of too many are deleted."""
        left = self._left_behind()
        for other in (one for one, version in self._manifests().items() if one != step and left.get(one) == version):
            set_aside(self.store, f"global_step_{other}")
            _log.warning("%s/global_step_%d is from before this run went back to an earlier step: its manifest is "
                         "now %s.", self.store.address, other, SET_ASIDE_FILE)  # fmt: skip
        if left:
            with self._turn:
                more = {one: version for one, version in self._left_behind().items() if left.get(one) != version}
                write_durably(self.local / LEFT_BEHIND_FILE, json.dumps(more))
        self._there = self._stored()
        steps = [*self._there]
        self.store.write(LATEST_FILE, str(max(steps, default=step)).encode())
        for old in steps[: -self._max_ckpts_to_keep] if self._max_ckpts_to_keep > 0 else ():
            discard(self.store, f"global_step_{old}")

    def _manifests(self, there: Mapping[str, Found] | None = None) -> dict[int, str]:
        """Step -> version of the manifest of the checkpoints that are whole at the address, oldest first.

        `there`: what is at the address, if that was just found.
        """
        there = self.store.find() if there is None else there
        names = ((name.partition("/"), found) for name, found in there.items())
        steps = ((_STEP.fullmatch(folder), found) for (folder, _, file), found in names if file == MANIFEST_FILE)
        return dict(sorted((int(match[1]), found.version) for match, found in steps if match))

    def _stored(self, there: Mapping[str, Found] | None = None) -> dict[int, str]:
        """The same without those left behind."""
        left = self._left_behind()
        return {step: version for step, version in self._manifests(there).items() if left.get(step) != version}

    def _left_behind(self) -> dict[int, str]:
        try:
            left = _read_side_file(self.local / LEFT_BEHIND_FILE, dict) or {}
        except FileNotFoundError:
            return {}
        return {int(step): version for step, version in left.items() if _STEP.fullmatch(f"global_step_{step}")}

    def _clean(self) -> None:
        """Delete what interrupted uploads of checkpoints left at the address: nobody can read it."""
        names = self.store.find()
        folders = {folder for name in names if _STEP.fullmatch(folder := name.partition("/")[0])}
        for folder in folders:
            if not {f"{folder}/{MANIFEST_FILE}", f"{folder}/{SET_ASIDE_FILE}"} & names.keys():
                self.store.delete(name for name in names if name.startswith(f"{folder}/"))
        self.store.drop_unfinished()

    def _put_records(self) -> None:
        for path in self._record_files():
            name = path.relative_to(self.local).as_posix()
            try:
                state = path.stat()
                if self._seen.get(name) == (known := (state.st_size, state.st_mtime_ns)):
                    continue
                self._check()
                self.store.put(name, path)
                self._seen[name] = known
            except (FileNotFoundError, StorageError):
                if path.exists():  # else it was a temporary one
                    raise
        for name in [*self._dropped]:
            if not (self.local / name).exists():  # else it was written again meanwhile
                self._check()
                self.store.delete([name])
                self._seen.pop(name, None)
            with self._turn:
                self._dropped.discard(name)

    def _record_files(self) -> Iterator[Path]:
        for folder, folders, files in os.walk(self.local):
            folders[:] = [name for name in folders if not _NOT_RECORDS.fullmatch(name)]
            yield from (Path(folder, name) for name in sorted(files) if self._is_record(name))

    def _is_record(self, name: str) -> bool:
        *folders, file = name.split("/")
        if file in (LEASE_FILE, LATEST_FILE) or file.startswith("."):
            return False
        return not any(_NOT_RECORDS.fullmatch(folder) for folder in folders)

    def _finished_folders(self) -> list[Path]:
        names = (MANIFEST_FILE, FINISHED_FILE)
        folders = {mark.parent for name in names for mark in self.local.glob(f"global_step_*/**/{name}")}
        return [path for path in folders if _STEP.fullmatch(path.relative_to(self.local).parts[0])]

    def _finished_steps(self) -> list[int]:
        return [step for path in self._finished_folders() if (step := self._step_of(path)) is not None]

    def _step_of(self, folder: Path) -> int | None:
        """That of a checkpoint; None for another folder."""
        match = _STEP.fullmatch(folder.name)
        return int(match[1]) if match and folder.parent == self.local else None


_Json = TypeVar("_Json", list[Any], dict[str, Any])


def _read_side_file(file: Path, kind: type[_Json]) -> _Json | None:
    """Read JSON of this kind; None, with a warning, from a damaged file: it must not prevent a restart.

    Raises OSError if the file cannot be read, FileNotFoundError if there is none.
    """
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        content = None
    if isinstance(content, kind):
        return content
    damaged = file.replace(file.with_name(f"{file.name}.damaged"))
    _log.warning("%s is damaged: the run goes on without it. It is now %s.", file, damaged.name)
    return None


def _digest(manifest: bytes) -> str:
    return hashlib.sha256(manifest).hexdigest()
