"""Local copies of remote data and models, which the first process that reads them downloads.

    <cache>/downloads/s3/bucket/models/qwen/3f0c.../config.json      one folder for each version of the files at a URI

A version consists of the names, sizes and ETags of all files. Therefore no copy mixes two versions, and processes that
read an old version are not affected when the remote files change.
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
"""Patterns of model files that are only needed to load the weights."""


@functools.cache
def local_copy(path: str, *, weights: bool = True) -> str:
    """Return the path of a local copy of the file or folder at a URI, and download what the copy lacks.

    The result is cached per process, so that everything a process reads from a URI is of one version. This blocks while
    another process of this machine downloads the same version.

    Args:
        path: A URI. A local path or a hub name is returned unchanged, and a file:// URI as its path.
        weights: False to leave out the files of WEIGHT_FILE_PATTERNS.

    Raises:
        ConfigError: The URI cannot be used.
        StorageError: There is nothing at the URI, a file is damaged or incomplete, the files changed during the
            download, or the storage rejects a request or does not respond.
    """
    if not is_uri(path) or path.startswith("file://"):
        return strip_file_scheme(path)
    store, name, remote_files = _find_remote(path)
    if not remote_files:
        raise StorageError(f"{path}: there is no file or folder at this URI. Correct the URI.")
    copy = cache_folder_for("downloads", path) / _version(remote_files)
    copy.mkdir(parents=True, exist_ok=True)
    with open_lock(copy.parent / f".{copy.name}.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # Another process of this machine may be downloading the same files.
        for file, entry in (_listed(store, remote_files) if not name else _unverified(remote_files)).items():
            target = copy / file
            if not weights and any(fnmatch.fnmatch(file, pattern) for pattern in WEIGHT_FILE_PATTERNS):
                continue
            if target.is_file() and target.stat().st_size == entry.digest.size:
                continue
            if (problem := download_file(store, entry.key, entry.digest, target)) is not None:
                raise StorageError(f"{problem}. The file is damaged, or its transfer was interrupted. Start again.")
    if _find_remote(path)[2] != remote_files:
        raise StorageError(f"{path} was changed while it was downloaded. Start again.")
    return str(copy / name)


def _find_remote(uri: str) -> tuple[RemoteFolder, str, dict[str, RemoteFile]]:
    """Return the remote folder, the name of the file in it (empty for a folder's URI), and the files at the URI."""
    store = RemoteFolder(uri)
    if (file := store.info()) is None:
        return store, "", store.find()
    parent, _, name = store.uri.rpartition("/")
    return RemoteFolder(parent), name, {name: file}


def _listed(store: RemoteFolder, remote_files: Mapping[str, RemoteFile]) -> dict[str, ManifestEntry]:
    """Return the files that a folder's manifest lists, or all its files if it has no manifest of a run."""
    if MANIFEST_FILE in remote_files:
        try:
            if entries := parse_manifest(store.read(MANIFEST_FILE)):
                return entries
        except ValueError:
            pass  # It is another type of file with this name.
    elif re.search(r"/global_step_\d+(/|$)", store.uri):
        raise StorageError(
            f"{store.uri}: there is no {MANIFEST_FILE}, so its upload is not finished. Run the command that writes it "
            "again to complete the upload."
        )
    return _unverified(remote_files)


def _unverified(remote_files: Mapping[str, RemoteFile]) -> dict[str, ManifestEntry]:
    return {name: ManifestEntry(FileDigest(file.size, ""), name) for name, file in remote_files.items()}


def _version(remote_files: Mapping[str, RemoteFile]) -> str:
    version = json.dumps(sorted((name, file.size, file.version) for name, file in remote_files.items()))
    return hashlib.sha256(version.encode()).hexdigest()[:16]
