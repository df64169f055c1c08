"""A run's claim on an address: two machines must not write one run. A claim that is not renewed ends."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from skyrl_train.durable import write_durably
from skyrl_train.errors import RunDirectoryError, StorageError
from skyrl_train.storage.folder import StoredFolder

LEASE_FILE = ".lock"
FOLDER_FILE = ".folder"
"""In the folder of this machine: what tells it from all others, also from one at the same path on a machine of the same
name."""
RENEWED_EVERY_S = 10.0
ENDS_AFTER_S = 45.0
"""A claim that was not renewed for this time is a dead run's: seen by whoever waits, so no clocks are compared."""
_LOOKS_EVERY_S = 3.0
_log = logging.getLogger(__name__)


class Lease:
    """The claim of the process that works in the folder `local`, which it has locked: an earlier one of it is dead."""

    def __init__(self, store: StoredFolder, local: Path):
        self._store = store
        self._mine = {
            "holder": f"process {os.getpid()} on {socket.gethostname()}",
            "id": uuid.uuid4().hex,
        }
        self._local = local
        self._count = 0
        self.taken = False
        self.lost_to = ""
        """Who has taken the address since, because this process was silent for too long."""
        self._left = threading.Event()
        self._renewing = threading.Thread(target=self._renew, name="lease", daemon=True)

    def take(self) -> None:
        """Claim the address, and renew the claim from now on.

        Raises RunDirectoryError if another process holds it: after ENDS_AFTER_S of that process's silence it does not.
        So it does once `leave` was called meanwhile, by another thread.
        """
        self._mine["folder"] = f"{socket.gethostname()}:{_told_apart(self._local)}"
        (version, seen), since = self._found(), time.monotonic()
        if seen is not None and seen.get("folder") != self._mine["folder"]:
            _log.warning(
                "%s was in use by %s: looking whether it still is.",
                self._store.address,
                seen.get("holder", "another process"),
            )
            now: dict[str, Any] | None = seen
            while now is not None and time.monotonic() - since < ENDS_AFTER_S:
                if now != seen or self._left.wait(_LOOKS_EVERY_S):
                    raise self._taken(now)
                version, now = self._found()
        self._write(version)
        if not self._is_mine(now := self._found()[1]):  # also where the answer to a write that succeeded was lost
            raise self._taken(now or {})
        self.taken = True
        self._renewing.start()

    def leave(self) -> None:
        """Wait no longer, and renew no more."""
        self._left.set()

    def give_up(self) -> None:
        """End a claim that was taken, as far as storage can be reached."""
        self.leave()
        self._renewing.join()
        try:
            if not self.is_lost():
                self._store.delete([LEASE_FILE])
        except StorageError as error:
            _log.warning("%s", error)

    def is_lost(self) -> bool:
        """Whether somebody else has taken the address since, by what is there: a process that slept knows of nothing.

        Raises StorageError if that cannot be seen.
        """
        if self.taken and not self.lost_to and not self._is_mine(now := self._found()[1]):
            # Nobody deletes a claim but its holder: without one, whoever took the address has ended since.
            self.lost_to = str(now.get("holder")) if now else "another process, which has ended since"
            _log.error("%s was taken by %s: nothing more is uploaded.", self._store.address, self.lost_to)
        return bool(self.lost_to)

    def _renew(self) -> None:
        while not self._left.wait(RENEWED_EVERY_S):
            try:
                version = self._store.version(LEASE_FILE)
                if self.is_lost():
                    return
                self._write(version)
            except StorageError as error:
                _log.debug("The claim was not renewed: %s", error)

    def _write(self, seen: str | None) -> None:
        """Claim, if what is there is of the version `seen`; whose the address is then, is seen by reading it."""
        self._count += 1
        self._store.write_if(LEASE_FILE, json.dumps({**self._mine, "renewed": self._count}).encode(), seen)

    def _is_mine(self, held: dict[str, Any] | None) -> bool:
        return held is not None and held.get("id") == self._mine["id"]

    def _found(self) -> tuple[str | None, dict[str, Any] | None]:
        """(version, claim) of what is there; a version that is older than the claim makes a write fail."""
        version, content = self._store.version(LEASE_FILE), self._store.read(LEASE_FILE)
        if content is None:
            return None, None
        try:
            held = json.loads(content)
        except ValueError:
            held = {}
        return version, held if isinstance(held, dict) else {}

    def _taken(self, holder: dict[str, Any]) -> RunDirectoryError:
        return RunDirectoryError(
            f"trainer.ckpt_path={self._store.address!r} is in use by {holder.get('holder', 'another process')}; "
            "wait for it, end it, or choose another address."
        )


def _told_apart(folder: Path) -> str:
    """A name that no other folder has. `folder` is locked: nobody else names it now."""
    file = folder / FOLDER_FILE
    if not file.exists():
        write_durably(file, uuid.uuid4().hex)
    return file.read_text()
