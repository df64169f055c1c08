"""A run's claim on an address: two machines must not write one run. A claim that is not renewed ends."""

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

from skyrl_train.durable import write_durably
from skyrl_train.errors import RunDirectoryError, StorageError
from skyrl_train.messages import visible
from skyrl_train.storage.folder import StoredFolder

LEASE_FILE = ".lock"
FOLDER_FILE = ".folder"
"""In the folder of this machine: what tells it from all others, also from one at the same path on a machine of the same
name."""
RENEWED_EVERY_S = 10.0
ENDS_AFTER_S = 45.0
"""A claim that was not renewed for this time is a dead run's: seen by whoever waits, so no clocks are compared."""
_LOOKS_EVERY_S = 3.0
_CLAIMS = 5
"""How often an address is claimed whose claim was deleted in that moment."""
_NAME = re.compile("[0-9a-f]{32}")
_log = logging.getLogger(__name__)


class Lease:
    """The claim of the process that works in the folder `local`, which it has locked: an earlier one of it is dead.

    A process that ends leaves its claim there, marked as ended. So a claim that is missing was deleted by somebody who
    does not write there, and is made again.
    """

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
        """Who has taken the address since, and why that was possible."""
        self._seen_s = 0.0
        """Time of the clock at which the claim was last seen."""
        self._left = threading.Event()
        self._looking = threading.Lock()
        self._renewing = threading.Thread(target=self._renew, name="lease", daemon=True)

    def take(self) -> None:
        """Claim the address, and renew the claim from now on.

        Raises RunDirectoryError if another process holds it: after ENDS_AFTER_S of that process's silence it does not.
        So it does once `leave` was called meanwhile, by another thread, and if the claim is deleted again and again.
        """
        self._mine["folder"] = f"{socket.gethostname()}:{_told_apart(self._local)}"
        for _ in range(_CLAIMS):
            version, has_waited = self._free_version()
            self._write(version)
            if has_waited:  # where writes have no conditions, others that waited for its end write now, too
                self._left.wait(_LOOKS_EVERY_S)
            found = self._found()[1]
            if self._is_mine(found):  # also where the answer to a write that succeeded was lost
                self.taken, self._seen_s = True, time.monotonic()
                self._renewing.start()
                return
            if found is not None:
                raise self._in_use(found)
            _log.warning("%s/%s was deleted: it is written again.", self._store.address, LEASE_FILE)
        raise RunDirectoryError(
            f"trainer.ckpt_path={self._store.address!r}: its {LEASE_FILE} was deleted {_CLAIMS} times while it was "
            "claimed. Find out what deletes it, or choose another address."
        )

    def _free_version(self) -> tuple[str | None, bool]:
        """Return the version of a claim that may be replaced, and whether its end was waited for.

        The version is None if there is no claim. Raises RunDirectoryError.
        """
        (version, seen), since = self._found(), time.monotonic()
        if seen is None or seen.get("ended") or seen.get("folder") == self._mine["folder"]:
            return version, False
        _log.warning("%s was in use by %s: looking whether it still is.", self._store.address, _holder(seen))
        while time.monotonic() - since < ENDS_AFTER_S:
            if self._left.wait(_LOOKS_EVERY_S):
                raise self._in_use(seen)
            version, now = self._found()
            if now is None or now.get("ended"):
                return version, True
            if now != seen:  # compared after every look: another process may have replaced the claim of a dead one
                raise self._in_use(now)
        return version, True

    def leave(self) -> None:
        """Wait no longer, and renew no more."""
        self._left.set()

    def give_up(self) -> None:
        """End a claim that was taken, as far as storage can be reached."""
        self.leave()
        self._renewing.join()
        try:
            version, found = self._found()
            if self._is_mine(found):
                self._write(version, ended=True)
        except StorageError as error:
            _log.warning("%s", error)

    def is_lost(self) -> bool:
        """Whether somebody else has taken the address since, by what is there: a process that slept knows of nothing.

        A claim that was deleted is made again. Raises StorageError if none of that is possible.
        """
        with self._looking:
            if not self.taken or self.lost_to:
                return bool(self.lost_to)
            now = self._found()[1]
            if now is None:
                _log.warning("%s/%s was deleted: it is written again.", self._store.address, LEASE_FILE)
                self._write(None)
                if (now := self._found()[1]) is None:
                    raise StorageError(f"{self._store.address}/{LEASE_FILE} is deleted whenever it is written.")
            if self._is_mine(now):
                self._seen_s = time.monotonic()
            else:
                was_silent = time.monotonic() - self._seen_s >= ENDS_AFTER_S
                why = "as this process was silent for too long" if was_silent else f"after {LEASE_FILE} was deleted"
                self.lost_to = f"{_holder(now)}{', which has ended since,' if now.get('ended') else ','} {why}"
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

    def _write(self, seen: str | None, ended: bool = False) -> None:
        """Claim, if what is there is of the version `seen`; whose the address is then, is seen by reading it."""
        self._count += 1
        claim = {**self._mine, "renewed": self._count, **({"ended": True} if ended else {})}
        self._store.write_if(LEASE_FILE, json.dumps(claim).encode(), seen)

    def _is_mine(self, held: dict[str, Any] | None) -> bool:
        return held is not None and held.get("id") == self._mine["id"]

    def _found(self) -> tuple[str | None, dict[str, Any] | None]:
        """(version, claim) of what is there; a version that is older than the claim makes a write fail."""
        version, content = self._store.version(LEASE_FILE), self._store.read(LEASE_FILE)
        if content is None:
            return None, None
        try:
            held = json.loads(content)
        except (ValueError, RecursionError):
            held = {}
        return version, held if isinstance(held, dict) else {}

    def _in_use(self, claim: dict[str, Any]) -> RunDirectoryError:
        return RunDirectoryError(
            f"trainer.ckpt_path={self._store.address!r} is in use by {_holder(claim)}; "
            "wait for it, end it, or choose another address."
        )


def _holder(claim: dict[str, Any]) -> str:
    """Who made a claim, as somebody else wrote it: on one line, and not long."""
    return visible(str(claim.get("holder", "another process")))[:200]


def _told_apart(folder: Path) -> str:
    """A name that no other folder has. `folder` is locked: nobody else names it now."""
    file = folder / FOLDER_FILE
    name = file.read_bytes().decode(errors="replace") if file.exists() else ""
    if not _NAME.fullmatch(name):  # there is none yet, or it is damaged
        name = uuid.uuid4().hex
        write_durably(file, name)
    return name
