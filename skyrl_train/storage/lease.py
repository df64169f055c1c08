"""A run's claim on an address, one conditional lock file: two machines must not write one run."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from skyrl_train.atomic_files import atomic_write_text
from skyrl_train.errors import RunFolderError, StorageError
from skyrl_train.storage.remote_folder import RemoteFolder
from skyrl_train.terminal import escape_control_chars

LOCK_FILE = ".lock"
FOLDER_FILE = ".folder"
"""Identifies a folder of this machine, also among folders at the same path on machines with the same name."""
RENEW_INTERVAL_S = 10.0
EXPIRY_S = 45.0
"""A claim that was not renewed for this long is a dead run's. Whoever waits measures it, so no clocks are compared."""
POLL_INTERVAL_S = 3.0
"""Time between two looks at a claim that may be dead."""
_ATTEMPTS = 5
"""Attempts to claim an address whose claim is deleted at that moment."""
_ID = re.compile("[0-9a-f]{32}")
_log = logging.getLogger(__name__)


class Lease:
    """The claim of the process that works in the folder `local`, which it has locked: earlier claims of it are dead.

    A process that ends leaves its claim there, marked as ended. So a claim that is missing was deleted by somebody else
    and is written again.
    """

    def __init__(self, store: RemoteFolder, local: Path):
        self.lost_to = ""
        """Who has taken the address since, and why that was possible."""
        self._store = store
        self._local = local
        self._record: dict[str, Any] = {
            "holder": f"process {os.getpid()} on {socket.gethostname()}",
            "id": uuid.uuid4().hex,
            "renewed": 0,
        }
        self._is_acquired = False
        self._last_seen_s = 0.0
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._renewal = threading.Thread(target=self._renew, name="lease", daemon=True)

    def acquire(self) -> None:
        """Claim the address and keep the claim renewed.

        Raises RunDirectoryError if another process holds it, which is known after EXPIRES_AFTER_S without a renewal; if
        another thread calls `stop` meanwhile; and if the claim is deleted again and again.
        """
        self._record["folder"] = f"{socket.gethostname()}:{_folder_id(self._local)}"
        for _ in range(_ATTEMPTS):
            version, has_waited = self._wait_until_free()
            self._write(version)
            if has_waited:  # where writes have no conditions, others that waited write now, too
                self._stopped.wait(POLL_INTERVAL_S)
            found = self._read()
            if self._is_own(found):  # also if the answer to a successful write was lost
                self._is_acquired, self._last_seen_s = True, time.monotonic()
                self._renewal.start()
                return
            if found is not None:
                raise self._in_use(found)
            self._warn_of_deletion()
        raise RunFolderError(
            f"trainer.ckpt_path={self._store.uri!r}: its {LOCK_FILE} was deleted {_ATTEMPTS} times while it was "
            "claimed. Find out what deletes it, or choose another address."
        )

    def stop(self) -> None:
        """End the renewals, and the waiting of a `take` in another thread."""
        self._stopped.set()

    def release(self) -> None:
        """Mark a claim that was taken as ended, as far as storage can be reached."""
        self.stop()
        if not self._is_acquired:
            return
        self._renewal.join()
        try:
            version = self._store.version(LOCK_FILE)
            if self._is_own(self._read()):
                self._write(version, ended=True)
        except StorageError as error:
            _log.warning("%s", error)

    def check_lost(self) -> bool:
        """Return True if somebody else has taken the address since. A process that slept must look at the claim.

        A claim that was deleted is written again. Raises StorageError if neither is possible.
        """
        with self._lock:
            if not self._is_acquired or self.lost_to:
                return bool(self.lost_to)
            found = self._read()
            if found is None:
                self._warn_of_deletion()
                self._write(None)
                if (found := self._read()) is None:
                    raise StorageError(f"{self._store.uri}/{LOCK_FILE} is deleted whenever it is written.")
            if self._is_own(found):
                self._last_seen_s = time.monotonic()
                return False
            was_silent = time.monotonic() - self._last_seen_s >= EXPIRY_S
            reason = "as this process was silent for too long" if was_silent else f"after {LOCK_FILE} was deleted"
            self.lost_to = f"{_holder(found)}{', which has ended since,' if found.get('ended') else ','} {reason}"
            _log.error("%s was taken by %s: nothing more is uploaded.", self._store.uri, self.lost_to)
            return True

    def _wait_until_free(self) -> tuple[str | None, bool]:
        """Return the version of the lock file that may be replaced, None for no file; and True if that took a wait.

        Raises RunDirectoryError.
        """
        first, since = None, time.monotonic()
        while True:
            version = self._store.version(LOCK_FILE)  # before the claim: an older version makes the write fail
            found = self._read()
            if found is None or found.get("ended") or found.get("folder") == self._record["folder"]:
                return None if found is None else version, first is not None
            if first is None:
                first = found
                _log.warning("%s was in use by %s: looking whether it still is.", self._store.uri, _holder(found))
            elif found != first:  # also at the last look: somebody else may have replaced the claim of a dead process
                raise self._in_use(found)
            elif time.monotonic() - since >= EXPIRY_S:
                return version, True
            if self._stopped.wait(POLL_INTERVAL_S):
                raise self._in_use(found)

    def _renew(self) -> None:
        while not self._stopped.wait(RENEW_INTERVAL_S):
            try:
                version = self._store.version(LOCK_FILE)
                if self.check_lost():
                    return
                self._write(version)
            except StorageError as error:
                _log.debug("The claim was not renewed: %s", error)

    def _write(self, version: str | None, **more: Any) -> None:
        """Claim the address if this version is there; only reading it back tells whose the address is then."""
        self._record["renewed"] += 1
        self._store.write_if_version(LOCK_FILE, json.dumps({**self._record, **more}).encode(), version)

    def _read(self) -> dict[str, Any] | None:
        """Return the claim that is there; an empty one for a damaged one."""
        if (content := self._store.read(LOCK_FILE)) is None:
            return None
        try:
            claim = json.loads(content)
        except (ValueError, RecursionError):
            return {}
        return claim if isinstance(claim, dict) else {}

    def _is_own(self, record: dict[str, Any] | None) -> bool:
        return record is not None and record.get("id") == self._record["id"]

    def _warn_of_deletion(self) -> None:
        _log.warning("%s/%s was deleted: it is written again.", self._store.uri, LOCK_FILE)

    def _in_use(self, record: dict[str, Any]) -> RunFolderError:
        return RunFolderError(
            f"trainer.ckpt_path={self._store.uri!r} is in use by {_holder(record)}; "
            "wait for it, end it, or choose another address."
        )


def _holder(record: dict[str, Any]) -> str:
    """Return who made a claim, which somebody else wrote: on one line, and not long."""
    return escape_control_chars(str(record.get("holder", "another process")))[:200]


def _folder_id(folder: Path) -> str:
    """Return an id that no other folder has. `folder` is locked: nobody else writes the id now."""
    file = folder / FOLDER_FILE
    name = file.read_bytes().decode(errors="replace") if file.exists() else ""
    if not _ID.fullmatch(name):  # missing or damaged
        name = uuid.uuid4().hex
        atomic_write_text(file, name)
    return name
