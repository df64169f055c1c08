"""Data and models at an address, as files of this machine: fetched once, by the process that reads them first.

    <cache>/downloads/s3/bucket/models/qwen/3f0c.../config.json      a folder for each version of what is at an address

A version is the names, sizes and ETags of all files. So a copy is never mixed from two of them, and processes that read
the old one are not disturbed when the address changes.
"""

from __future__ import annotations

import fcntl
import fnmatch
import functools
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from skyrl_train.config.sources import is_address, local_path
from skyrl_train.durable import describe, open_lock
from skyrl_train.errors import StorageError
from skyrl_train.storage.folder import Found, StoredFolder
from skyrl_train.storage.manifests import MANIFEST_FILE, listed_in
from skyrl_train.storage.places import folder_of_copies

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack")
"""What only a process that loads a model needs of it."""


@functools.cache
def local_copy(path: str, *, weights: bool = True) -> str:
    """The path of a copy of what is at an address, a file or a folder; a path or a name on the hub as it is.

    What is missing of the copy is downloaded. A process asks once for each address, so that all it reads is of one
    version. `weights`: without, files of WEIGHTS are left out. Raises StorageError.
    """
    if not is_address(path) or path.startswith("file://"):
        return local_path(path)
    store = StoredFolder(path)
    single = store.itself()
    there = {"": single} if single else store.find()
    if not there:
        raise StorageError(f"{path}: there is nothing at this address.")
    copy = _folder_of(store.address, there)
    copy.mkdir(parents=True, exist_ok=True)
    name = store.address.rpartition("/")[2]
    files = {name: _File("", there[""].size)} if single else _files_of(store, there)
    with open_lock(copy.parent / f".{copy.name}.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process of this machine may be fetching the same
        for file, one in files.items():
            if (weights or not _is_weight(file)) and not _is_here(copy / file, one):
                _fetch(store, one, copy / file)
    if (now := store.itself()) != single or (not single and store.find() != there):
        raise StorageError(f"{path} was changed while it was fetched ({now or 'a folder'}); start again.")
    return str(copy / name if single else copy)


@dataclass(frozen=True, slots=True)
class _File:
    key: str
    """Its name at the address; "" for the address itself."""
    size: int
    sha256: str | None = None
    """None where nobody has written it down."""


def _files_of(store: StoredFolder, there: Mapping[str, Found]) -> dict[str, _File]:
    """Name -> file of a folder: what its manifest lists, if a run has put it there, and else all of it."""
    if MANIFEST_FILE in there:
        try:
            listed = listed_in(store.read(MANIFEST_FILE) or b"")
        except ValueError:
            listed = {}  # a file of somebody else's that is called so
        if listed:
            return {name: _File(one.key, one.held.size, one.held.sha256) for name, one in listed.items()}
    elif re.search(r"/global_step_\d+(/|$)", store.address):
        raise StorageError(f"{store.address}: there is no {MANIFEST_FILE}, so its upload is not finished.")
    return {name: _File(name, found.size) for name, found in there.items()}


def _fetch(store: StoredFolder, one: _File, target: Path) -> None:
    """Download a file. Raises StorageError if it is not what was listed."""
    arrived = store.get(one.key, target) and _is_here(target, one)
    if not arrived or one.sha256 not in (None, describe(target, sync=False).sha256):
        target.unlink(missing_ok=True)
        raise StorageError(f"{store.address}/{one.key}: what arrived is not the {one.size} bytes that were listed.")


def _is_weight(file: str) -> bool:
    return any(fnmatch.fnmatch(file, pattern) for pattern in WEIGHTS)


def _is_here(target: Path, one: _File) -> bool:
    return target.is_file() and target.stat().st_size == one.size


def _folder_of(address: str, there: Mapping[str, Found]) -> Path:
    version = json.dumps(sorted((name, found.size, found.version) for name, found in there.items()))
    digest = hashlib.sha256(version.encode()).hexdigest()[:16]
    return folder_of_copies("downloads", address) / digest
