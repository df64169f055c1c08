"""Local copies of data and models at an address, downloaded once, by the process that reads them first.

    <cache>/downloads/s3/bucket/models/qwen/3f0c.../config.json      a folder for each version of what is at an address

A version is the names, sizes and ETags of all files. So no copy mixes two versions, and processes that read the old one
are not disturbed when the address changes.
"""

from __future__ import annotations

import fcntl
import fnmatch
import functools
import hashlib
import json
import re
from collections.abc import Mapping

from skyrl_train.config.sources import is_address, local_path
from skyrl_train.durable import Written, open_lock
from skyrl_train.errors import StorageError
from skyrl_train.storage.folder import Found, StoredFolder
from skyrl_train.storage.manifests import MANIFEST_FILE, Listed, download, listed_in
from skyrl_train.storage.places import folder_of_copies

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack")
"""Files of a model that are only needed to load it."""


@functools.cache
def local_copy(path: str, *, weights: bool = True) -> str:
    """Return the path of a local copy of the file or folder at an address; return a path or a hub name unchanged.

    What the copy lacks is downloaded. A process asks once for each address, so all that it reads is of one version.
    Without `weights`, files of WEIGHTS are left out. Raises StorageError.
    """
    if not is_address(path) or path.startswith("file://"):
        return local_path(path)
    store, name, there = _look(path)
    if not there:
        raise StorageError(f"{path}: there is nothing at this address.")
    copy = folder_of_copies("downloads", path) / _version(there)
    copy.mkdir(parents=True, exist_ok=True)
    with open_lock(copy.parent / f".{copy.name}.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process of this machine may be fetching the same
        for file, one in (_listed(store, there) if not name else _unverified(there)).items():
            target = copy / file
            if not weights and any(fnmatch.fnmatch(file, pattern) for pattern in WEIGHTS):
                continue
            if target.is_file() and target.stat().st_size == one.content.size:
                continue
            if (problem := download(store, one.key, one.content, target)) is not None:
                raise StorageError(f"{problem}. The file is damaged, or its transfer was cut off.")
    if _look(path)[2] != there:
        raise StorageError(f"{path} was changed while it was fetched; start again.")
    return str(copy / name)


def _look(address: str) -> tuple[StoredFolder, str, dict[str, Found]]:
    """Return (folder, name of the file in it, what is there); the name is empty for the address of a folder."""
    store = StoredFolder(address)
    if (file := store.info()) is None:
        return store, "", store.find()
    parent, _, name = store.address.rpartition("/")
    return StoredFolder(parent), name, {name: file}


def _listed(store: StoredFolder, there: Mapping[str, Found]) -> dict[str, Listed]:
    """Return name -> file of a folder: what its manifest lists, if a run has written it, otherwise all of it."""
    if MANIFEST_FILE in there:
        try:
            if listed := listed_in(store.read(MANIFEST_FILE)):
                return listed
        except ValueError:
            pass  # another kind of file with this name
    elif re.search(r"/global_step_\d+(/|$)", store.address):
        raise StorageError(f"{store.address}: there is no {MANIFEST_FILE}, so its upload is not finished.")
    return _unverified(there)


def _unverified(there: Mapping[str, Found]) -> dict[str, Listed]:
    return {name: Listed(Written(found.size, ""), name) for name, found in there.items()}


def _version(there: Mapping[str, Found]) -> str:
    version = json.dumps(sorted((name, found.size, found.version) for name, found in there.items()))
    return hashlib.sha256(version.encode()).hexdigest()[:16]
