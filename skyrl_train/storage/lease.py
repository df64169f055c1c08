"""The lease of a run on a URI: a lock file with conditional writes, so that two machines never write one run."""

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
"""File with the unique id of a local folder, which differs even between machines with equal host names and paths."""
RENEW_INTERVAL_S = 10.0
EXPIRY_S = 45.0
"""Time without a renewal after which a lease is expired. The waiting process measures it, so no clocks are compared."""
POLL_INTERVAL_S = 3.0
"""Time between two checks of a lease that may be expired."""
_ATTEMPTS = 5
"""Number of attempts to acquire a lease whose lock file is deleted during the attempt."""
_ID = re.compile("[0-9a-f]{32}")
_log = logging.getLogger(__name__)


class Lease:
    """The lease of this process on a remote folder.

    The process must hold the lock of the local folder, so earlier leases from that folder are dead. A process that ends
    marks its lock file as ended and leaves it there. A lock file that is missing was therefore deleted by someone else,
    and is written again.
    """

    def __init__(self, store: RemoteFolder, local: Path):
        """Create a lease that is not acquired yet.

        Args:
            store: The remote folder.
            local: The local folder of the run, whose id is part of the lease.
        """
        self.lost_to = ""
        """The process that has taken the lease and how that was possible; empty while the lease is not lost."""
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
        """Acquire the lease, and start a thread that renews it.

        If another process has the lease, this waits until that lease is renewed or has expired, at most about EXPIRY_S.

        Raises:
            RunFolderError: Another process renews the lease, another thread calls `stop` during the wait, or the lock
                file is deleted repeatedly.
            StorageError: The storage rejects a request or does not respond.
        """
        self._record["folder"] = f"{socket.gethostname()}:{_folder_id(self._local)}"
        for _ in range(_ATTEMPTS):
            version, has_waited = self._wait_until_free()
            self._write(version)
            if has_waited:  # Without conditional writes, other processes that waited write now, too.
                self._stopped.wait(POLL_INTERVAL_S)
            record = self._read()
            if self._is_own(record):  # This also covers a successful write whose response was lost.
                self._is_acquired, self._last_seen_s = True, time.monotonic()
                self._renewal.start()
                return
            if record is not None:
                raise self._in_use(record)
            self._warn_of_deletion()
        raise RunFolderError(
            f"trainer.ckpt_path={self._store.uri!r}: its {LOCK_FILE} was deleted {_ATTEMPTS} times while this run "
            "acquired it. Find out what deletes it, or choose another URI."
        )

    def stop(self) -> None:
        """Stop renewing, and end the wait of `acquire` in another thread."""
        self._stopped.set()

    def release(self) -> None:
        """Stop renewing and mark the lock file as ended. Does nothing if the lease was never acquired.

        If the storage rejects this or does not respond, only a warning is logged.
        """
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
        """Read the lock file, and return True if another process has taken the lease.

        The process may have slept past the expiry, so a caller must check before each write. A deleted lock file is
        written again. A lease that was never acquired is not lost.

        Raises:
            StorageError: The storage rejects a request or does not respond, or the lock file is deleted whenever it is
                written.
        """
        with self._lock:
            if not self._is_acquired or self.lost_to:
                return bool(self.lost_to)
            record = self._read()
            if record is None:
                self._warn_of_deletion()
                self._write(None)
                if (record := self._read()) is None:
                    raise StorageError(
                        f"{self._store.uri}/{LOCK_FILE} is deleted whenever it is written. Find out what deletes it."
                    )
            if self._is_own(record):
                self._last_seen_s = time.monotonic()
                return False
            was_silent = time.monotonic() - self._last_seen_s >= EXPIRY_S
            reason = "as this process was silent for too long" if was_silent else f"after {LOCK_FILE} was deleted"
            self.lost_to = f"{_holder(record)}{', which has ended since,' if record.get('ended') else ','} {reason}"
            _log.error("%s was taken by %s: nothing more is uploaded.", self._store.uri, self.lost_to)
            return True

    def _wait_until_free(self) -> tuple[str | None, bool]:
        """Wait until the lock file may be replaced.

        Returns:
            The version of the lock file, None if there is none; and True if this had to wait.

        Raises:
            RunFolderError: Another process renews its lease, or `stop` was called.
        """
        first, start_s = None, time.monotonic()
        while True:
            version = self._store.version(LOCK_FILE)  # Read it before the record, so that a later change fails a write.
            record = self._read()
            if record is None or record.get("ended") or record.get("folder") == self._record["folder"]:
                return None if record is None else version, first is not None
            if first is None:
                first = record
                _log.warning("%s was in use by %s. Checking if it still is, for up to %g s.",
                             self._store.uri, _holder(record), EXPIRY_S)  # fmt: skip
            elif (
                record != first
            ):  # This also matters after expiry: another process may have replaced the expired lease.
                raise self._in_use(record)
            elif time.monotonic() - start_s >= EXPIRY_S:
                return version, True
            if self._stopped.wait(POLL_INTERVAL_S):
                raise self._in_use(record)

    def _renew(self) -> None:
        while not self._stopped.wait(RENEW_INTERVAL_S):
            try:
                version = self._store.version(LOCK_FILE)
                if self.check_lost():
                    return
                self._write(version)
            except StorageError as error:
                _log.debug("The lease was not renewed: %s", error)

    def _write(self, version: str | None, **fields: Any) -> None:
        """Write the lock file if it has this version. Only reading it back shows which process has the lease."""
        self._record["renewed"] += 1
        self._store.write_if_version(LOCK_FILE, json.dumps({**self._record, **fields}).encode(), version)

    def _read(self) -> dict[str, Any] | None:
        """Return the content of the lock file; None if it is missing, empty if it is damaged."""
        if (content := self._store.read(LOCK_FILE)) is None:
            return None
        try:
            record = json.loads(content)
        except (ValueError, RecursionError):
            return {}
        return record if isinstance(record, dict) else {}

    def _is_own(self, record: dict[str, Any] | None) -> bool:
        return record is not None and record.get("id") == self._record["id"]

    def _warn_of_deletion(self) -> None:
        _log.warning("%s/%s was deleted. It is written again.", self._store.uri, LOCK_FILE)

    def _in_use(self, record: dict[str, Any]) -> RunFolderError:
        return RunFolderError(
            f"trainer.ckpt_path={self._store.uri!r} is in use by {_holder(record)}; "
            "wait for it, end it, or choose another URI."
        )


def _holder(record: dict[str, Any]) -> str:
    """Return the name of the process in a lock file, which is untrusted: escaped, and at most 200 characters."""
    return escape_control_chars(str(record.get("holder", "another process")))[:200]


def _folder_id(folder: Path) -> str:
    """Return the unique id of a local folder, which is created if needed. The caller holds the folder's lock."""
    file = folder / FOLDER_FILE
    folder_id = file.read_bytes().decode(errors="replace") if file.exists() else ""
    if not _ID.fullmatch(folder_id):  # missing or damaged
        folder_id = uuid.uuid4().hex
        atomic_write_text(file, folder_id)
    return folder_id
