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

from skyrl_train.errors import RunDirectoryError, StorageError
from skyrl_train.storage.folder import StoredFolder

LEASE_FILE = ".lock"
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
            "folder": f"{socket.gethostname()}:{local}",
            "id": uuid.uuid4().hex,
        }
        self._count = 0
        self.taken = False
        self.lost_to = ""
        """Who has taken the address since, because this process was silent for too long."""
        self._left = threading.Event()
        self._renewing = threading.Thread(target=self._renew, name="lease", daemon=True)

    def take(self) -> None:
        """Claim the address, and renew the claim from now on.

        Raises RunDirectoryError if another process holds it: after ENDS_AFTER_S of that process's silence it does not.
        """
        seen, since = self._held(), time.monotonic()
        if seen is not None and seen.get("folder") != self._mine["folder"]:
            _log.warning("%s was in use by %s: looking whether it still is.", self._store.address, seen.get("holder"))
            while (now := self._held()) is not None and time.monotonic() - since < ENDS_AFTER_S:
                if now != seen:
                    raise self._taken(now)
                time.sleep(_LOOKS_EVERY_S)
        self._write()
        if (now := self._held()) is None or now.get("id") != self._mine["id"]:
            raise self._taken(now or {})
        self.taken = True
        self._renewing.start()

    def give_up(self) -> None:
        """End a claim that was taken, as far as storage can be reached."""
        self._left.set()
        self._renewing.join()
        if self.lost_to:
            return
        try:
            self._store.delete([LEASE_FILE])
        except StorageError as error:
            _log.warning("%s", error)

    def _renew(self) -> None:
        while not self._left.wait(RENEWED_EVERY_S):
            try:
                if (now := self._held()) is not None and now.get("id") != self._mine["id"]:
                    self.lost_to = str(now.get("holder"))
                    return
                self._write()
            except StorageError as error:
                _log.debug("The claim was not renewed: %s", error)

    def _write(self) -> None:
        self._count += 1
        self._store.write(LEASE_FILE, json.dumps({**self._mine, "renewed": self._count}).encode())

    def _held(self) -> dict[str, Any] | None:
        content = self._store.read(LEASE_FILE)
        try:
            held = json.loads(content) if content is not None else None
        except ValueError:
            held = None
        return held if isinstance(held, dict) else None

    def _taken(self, holder: dict[str, Any]) -> RunDirectoryError:
        return RunDirectoryError(
            f"trainer.ckpt_path={self._store.address!r} is in use by {holder.get('holder', 'another process')}; "
            "wait for it, end it, or choose another address."
        )
