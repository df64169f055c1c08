"""Folders that are either complete or absent. manifest.json lists every file with size and SHA-256 and is written last.

    global_step_40/manifest.json      {"files": {"policy/rank_0.pt": {"bytes": 1024, "sha256": "..."}, ...}, ...}
    global_step_40/policy/rank_0.pt
    global_step_50/policy/rank_0.pt   an interrupted upload, which is ignored because it has no manifest

If a folder is uploaded again with other content, new files are written beside the old ones under other names, which are
the manifest's `key` entries. One of the two versions is therefore complete at any time.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from skyrl_train.atomic_files import FileDigest, atomic_write, atomic_write_text, digest_file
from skyrl_train.errors import StorageError
from skyrl_train.storage.remote_folder import RemoteFile, RemoteFolder, invalid_names

MANIFEST_FILE = "manifest.json"
FINISHED_FILE = ".finished"
"""Marker file of a local folder that is finished and has no manifest yet."""
SET_ASIDE_FILE = "manifest.set_aside.json"
"""Name of the manifest of a remote folder that is kept but no longer read."""
DELETING_SUFFIX = ".deleting"
"""Suffix of a local checkpoint that is about to be deleted."""
_SHA256 = re.compile("[0-9a-f]{64}")
_log = logging.getLogger(__name__)


class ManifestEntry(NamedTuple):
    """A file that a manifest lists."""

    digest: FileDigest
    key: str
    """Name of the remote file, relative to the folder."""


def parse_manifest(manifest: bytes | None) -> dict[str, ManifestEntry]:
    """Return the files that a manifest lists, by name.

    Args:
        manifest: Content of manifest.json; None if the file does not exist.

    Raises:
        ValueError: The content is None or no valid manifest, or a name is not one of a file inside the folder.
    """
    if manifest is None:
        raise ValueError("it is missing")
    try:
        raw_entries: Mapping[str, Any] = json.loads(manifest)["files"]
        entries = {
            name: ManifestEntry(FileDigest(int(entry["bytes"]), str(entry["sha256"])), str(entry.get("key", name)))
            for name, entry in raw_entries.items()
        }
    except (LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"no valid manifest ({type(error).__name__}: {error})") from error
    for name, entry in entries.items():
        if not _SHA256.fullmatch(entry.digest.sha256):
            raise ValueError(f"{name!r} has sha256 {entry.digest.sha256!r:.80}, which is not 64 hexadecimal digits")
    for names in (entries, {entry.key for entry in entries.values()}):
        if invalid := invalid_names(names):
            raise ValueError(f"{invalid[0]!r} is not the name of a file inside the folder")
    return entries


# -- local folders


def list_files(folder: Path) -> dict[str, Path]:
    """Return the paths of all files below a folder by relative name, sorted.

    The manifest and the marker of a finished folder are left out.
    """
    markers = (folder / MANIFEST_FILE, folder / FINISHED_FILE)
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path not in markers)
    return {path.relative_to(folder).as_posix(): path for path in paths}


def write_manifest(folder: Path, known_digests: Mapping[str, FileDigest] | None = None, **about: Any) -> None:
    """Flush the files of a local folder to disk, and write its manifest atomically.

    Args:
        folder: The folder.
        known_digests: Digests by name of files that are on disk already and need not be read again. None: all files are
            read.
        about: Further entries of the manifest.

    Raises:
        OSError: A file cannot be read, or the manifest cannot be written.
    """
    known = known_digests or {}
    digests = {name: known.get(name) or digest_file(path, fsync=True) for name, path in list_files(folder).items()}
    entries = {name: {"bytes": digest.size, "sha256": digest.sha256} for name, digest in digests.items()}
    atomic_write_text(folder / MANIFEST_FILE, json.dumps({**about, "files": entries}, indent=1))


def find_damage(folder: Path, *, verify_hashes: bool) -> str | None:
    """Compare a local folder with its manifest. Files that the manifest does not list are ignored.

    Args:
        folder: The folder.
        verify_hashes: True to compare the SHA-256 of each file and not only its size.

    Returns:
        A description of the first difference, or None. A symbolic link, or a manifest that is missing or cannot be
        read, is a difference.
    """
    try:
        entries = parse_manifest((folder / MANIFEST_FILE).read_bytes())
    except (OSError, ValueError) as error:
        return f"{MANIFEST_FILE} cannot be read ({type(error).__name__}: {error})"
    for name, (digest, _) in entries.items():
        file = folder / name
        try:
            if any(path.is_symlink() for path in (file, *file.parents[: name.count("/")])):
                return f"{name} is, or is under, a symbolic link"
            if not file.is_file():
                return f"{name} is missing"
            if (size := file.stat().st_size) != digest.size:
                return f"{name} has {size} bytes instead of {digest.size}"
            if verify_hashes and digest_file(file, fsync=False) != digest:
                return f"{name} has another SHA-256 than when it was saved"
        except OSError as error:
            return f"{name} cannot be read ({error})"
    return None


def set_aside_local(folder: Path) -> Path:
    """Rename a local checkpoint to <name>.set_aside_<n>, under which no run looks for it; return the new path."""
    return folder.rename(next(path for n in count() if not (path := Path(f"{folder}.set_aside_{n}")).exists()))


# -- remote folders


def upload_folder(
    store: RemoteFolder,
    name: str,
    local: Path,
    *,
    before_manifest: Callable[[bytes], None] = lambda manifest: None,
    before_write: Callable[[], None] = lambda: None,
    arrived: dict[str, FileDigest] | None = None,
) -> bool:
    """Upload a local folder that has a manifest. A complete remote version of it stays complete until the end.

    Files that the remote manifest lists with the same content are not sent again. Remote files that the new manifest
    does not list are deleted at the end.

    Args:
        store: Remote folder that contains `name`.
        name: Name of the remote folder.
        local: The local folder.
        before_manifest: Called with the content of the manifest before the manifest is written. None calls nothing.
        before_write: Called before each write or deletion. An error that it raises ends the upload. None calls nothing.
        arrived: Digests of files that earlier attempts of this upload have sent. Files of this attempt are added. None:
            there are no earlier attempts.

    Returns:
        True on success; False if `local` is damaged, which is logged, or was changed or deleted during the upload.

    Raises:
        StorageError: The storage rejects a request or does not respond.
    """
    try:
        manifest = (local / MANIFEST_FILE).read_bytes()
    except FileNotFoundError:
        return False
    if (problem := find_damage(local, verify_hashes=False)) is not None:
        if _has_manifest(local, manifest):
            _log.error("%s IS DAMAGED: %s. It is not uploaded.", local, problem)
        return False
    remote_files, remote_manifest = store.find(name), store.read(f"{name}/{MANIFEST_FILE}")
    # A remote manifest may lack its files if it arrived late, after they had been deleted.
    remote_entries = {
        file: entry for file, entry in _parse_or_empty(remote_manifest).items() if _is_stored(entry, name, remote_files)
    }
    used_keys = {entry.key for entry in remote_entries.values()}
    arrived = {} if arrived is None else arrived
    content, keys = json.loads(manifest), {MANIFEST_FILE}
    for file, (digest, _) in sorted(parse_manifest(manifest).items()):
        if file in remote_entries and remote_entries[file].digest == digest:
            key = remote_entries[file].key
        else:
            key = f"{file}.{digest.sha256[:16]}" if file in used_keys else file
            if arrived.get(f"{name}/{key}") != digest:
                before_write()
                try:
                    store.put(f"{name}/{key}", local / file)
                except (StorageError, FileNotFoundError):
                    if not _has_manifest(local, manifest):
                        return False
                    raise
                arrived[f"{name}/{key}"] = digest
        keys.add(key)
        content["files"][file].pop("key", None)  # A downloaded manifest has the keys of its own remote folder.
        if key != file:
            content["files"][file]["key"] = key
    new_manifest = json.dumps(content, indent=1).encode()
    before_manifest(new_manifest)
    before_write()
    if not _has_manifest(local, manifest):
        return False
    if new_manifest != remote_manifest:
        store.write(f"{name}/{MANIFEST_FILE}", new_manifest)
    if unlisted := [path for path in remote_files if path.removeprefix(f"{name}/") not in keys]:
        before_write()
        store.delete(unlisted)
    return True


def download_folder(store: RemoteFolder, name: str, local: Path, only: tuple[str, ...] | None = None) -> str | None:
    """Download and verify the files of a remote folder that a local folder lacks. The manifest is written last.

    Args:
        store: Remote folder that contains `name`.
        name: Name of the remote folder.
        local: The local folder. Files whose SHA-256 is right are kept.
        only: Prefixes of names. If given, only these files are downloaded, and no manifest is written.

    Returns:
        A description of what is wrong with the remote folder, or None. Nothing more is downloaded after a problem.

    Raises:
        StorageError: The storage rejects a request or does not respond.
    """
    manifest = store.read(f"{name}/{MANIFEST_FILE}")
    try:
        entries = parse_manifest(manifest)
    except ValueError as error:
        return f"{store.uri}/{name}/{MANIFEST_FILE} cannot be read: {error}"
    for file, entry in entries.items():
        target = local / file
        if only is not None and not file.startswith(only):
            continue
        if target.is_file() and digest_file(target, fsync=False) == entry.digest:
            continue
        if (problem := download_file(store, f"{name}/{entry.key}", entry.digest, target)) is not None:
            return problem
    if only is None:
        with atomic_write(local / MANIFEST_FILE) as handle:
            handle.write(manifest or b"")
    return None


def download_file(store: RemoteFolder, name: str, expected: FileDigest, target: Path) -> str | None:
    """Download and verify a file.

    Args:
        store: Remote folder of the file.
        name: Name of the file in it.
        expected: Size and SHA-256 of the file. An empty SHA-256 is not compared.
        target: Local path. Nothing is there if the file is missing or differs.

    Returns:
        A description of what is wrong with the remote file, or None.

    Raises:
        StorageError: The storage rejects a request or does not respond.
    """
    uri = f"{store.uri}/{name}"
    if not store.get(name, target):
        return f"{uri} is missing"
    actual = digest_file(target, fsync=True) if expected.sha256 else FileDigest(target.stat().st_size, "")
    if actual == expected:
        return None
    target.unlink()
    return (
        f"{uri} has another SHA-256 or size than when it was listed "
        f"({actual.size} bytes; {expected.size} bytes were listed)"
    )


def delete_folder(store: RemoteFolder, name: str) -> None:
    """Delete a remote folder. Its manifest goes first, so that no reader finds an incomplete folder.

    Raises:
        StorageError: The storage rejects a request or does not respond.
    """
    store.delete([f"{name}/{MANIFEST_FILE}"])
    store.delete(store.find(name))


def set_aside(store: RemoteFolder, name: str) -> None:
    """Rename the manifest of a remote folder, whose files are kept but no longer read. Does nothing without a manifest.

    Raises:
        StorageError: The storage rejects a request or does not respond.
    """
    if (manifest := store.read(f"{name}/{MANIFEST_FILE}")) is not None:
        store.write(f"{name}/{SET_ASIDE_FILE}", manifest)
        store.delete([f"{name}/{MANIFEST_FILE}"])


def has_same_content(folder: Path, manifest: bytes) -> bool:
    """True if the manifest of a local folder lists the same names and digests as a remote manifest.

    False if the local folder has no manifest or one of the two is invalid.

    Args:
        folder: The local folder.
        manifest: Content of the remote manifest.
    """
    try:
        local_entries = parse_manifest((folder / MANIFEST_FILE).read_bytes())
        remote_entries = parse_manifest(manifest)
    except (FileNotFoundError, ValueError):
        return False
    local_digests = {name: entry.digest for name, entry in local_entries.items()}
    return local_digests == {name: entry.digest for name, entry in remote_entries.items()}


def is_complete_remote(store: RemoteFolder, name: str, remote_files: Mapping[str, RemoteFile]) -> bool:
    """True if every file in the manifest of a remote folder exists with the listed size.

    Args:
        store: Remote folder that contains `name`.
        name: Name of the remote folder, whose manifest is read.
        remote_files: The files that `store.find()` has listed.

    Raises:
        StorageError: The storage rejects a request or does not respond.
    """
    entries = _parse_or_empty(store.read(f"{name}/{MANIFEST_FILE}"))
    return all(_is_stored(entry, name, remote_files) for entry in entries.values())


def _is_stored(entry: ManifestEntry, name: str, remote_files: Mapping[str, RemoteFile]) -> bool:
    file = remote_files.get(f"{name}/{entry.key}")
    return file is not None and file.size == entry.digest.size


def _parse_or_empty(manifest: bytes | None) -> dict[str, ManifestEntry]:
    try:
        return parse_manifest(manifest)
    except ValueError:
        return {}


def _has_manifest(local: Path, manifest: bytes) -> bool:
    """True if a folder still has this manifest. A run may write the folder again or delete it during the upload."""
    try:
        return (local / MANIFEST_FILE).read_bytes() == manifest
    except FileNotFoundError:
        return False
