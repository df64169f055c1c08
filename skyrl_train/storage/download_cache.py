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

from skyrl_train.atomic_files import FileDigest, open_lock
from skyrl_train.config.locations import is_uri, strip_file_scheme
from skyrl_train.errors import StorageError
from skyrl_train.storage.manifests import MANIFEST_FILE, ManifestEntry, download_file, parse_manifest
from skyrl_train.storage.remote_folder import RemoteFile, RemoteFolder
from skyrl_train.storage.uris import cache_folder_for

WEIGHT_FILE_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack")
"""Files of a model that are only needed to load it."""


@functools.cache
def local_copy(path: str, *, weights: bool = True) -> str:
    """Return the path of a local copy of the file or folder at an address; return a path or a hub name unchanged.

    What the copy lacks is downloaded. A process asks once for each address, so all that it reads is of one version.
    Without `weights`, files of WEIGHTS are left out. Raises StorageError.
    """
    if not is_uri(path) or path.startswith("file://"):
        return strip_file_scheme(path)
    store, name, there = _find_remote(path)
    if not there:
        raise StorageError(f"{path}: there is nothing at this address.")
    copy = cache_folder_for("downloads", path) / _version(there)
    copy.mkdir(parents=True, exist_ok=True)
    with open_lock(copy.parent / f".{copy.name}.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process of this machine may be fetching the same
        for file, one in (_listed(store, there) if not name else _unverified(there)).items():
            target = copy / file
            if not weights and any(fnmatch.fnmatch(file, pattern) for pattern in WEIGHT_FILE_PATTERNS):
                continue
            if target.is_file() and target.stat().st_size == one.digest.size:
                continue
            if (problem := download_file(store, one.key, one.digest, target)) is not None:
                raise StorageError(f"{problem}. The file is damaged, or its transfer was cut off.")
    if _find_remote(path)[2] != there:
        raise StorageError(f"{path} was changed while it was fetched; start again.")
    return str(copy / name)


def _find_remote(uri: str) -> tuple[RemoteFolder, str, dict[str, RemoteFile]]:
    """Return (folder, name of the file in it, what is there); the name is empty for the address of a folder."""
    store = RemoteFolder(uri)
    if (file := store.info()) is None:
        return store, "", store.find()
    parent, _, name = store.uri.rpartition("/")
    return RemoteFolder(parent), name, {name: file}


def _listed(store: RemoteFolder, remote_files: Mapping[str, RemoteFile]) -> dict[str, ManifestEntry]:
    """Return name -> file of a folder: what its manifest lists, if a run has written it, otherwise all of it."""
    if MANIFEST_FILE in remote_files:
        try:
            if listed := parse_manifest(store.read(MANIFEST_FILE)):
                return listed
        except ValueError:
            pass  # another kind of file with this name
    elif re.search(r"/global_step_\d+(/|$)", store.uri):
        raise StorageError(f"{store.uri}: there is no {MANIFEST_FILE}, so its upload is not finished.")
    return _unverified(remote_files)


def _unverified(remote_files: Mapping[str, RemoteFile]) -> dict[str, ManifestEntry]:
    return {name: ManifestEntry(FileDigest(found.size, ""), name) for name, found in remote_files.items()}


def _version(remote_files: Mapping[str, RemoteFile]) -> str:
    version = json.dumps(sorted((name, found.size, found.version) for name, found in remote_files.items()))
    return hashlib.sha256(version.encode()).hexdigest()[:16]
