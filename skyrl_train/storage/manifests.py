"""Folders that are complete or absent: manifest.json lists every file with size and SHA-256, and is written last.

    global_step_40/manifest.json      {"files": {"policy/rank_0.pt": {"bytes": 1024, "sha256": "..."}, ...}, ...}
    global_step_40/policy/rank_0.pt
    global_step_50/policy/rank_0.pt   an interrupted upload: without a manifest nobody reads it

A folder that is uploaded again with other content gets new files beside the old ones. `key` in the manifest is the name
of such a file, so one of the two versions is complete at any moment.
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
"""Marks a local folder that is finished and has no manifest yet."""
SET_ASIDE_FILE = "manifest.set_aside.json"
"""Name of the manifest of a folder that is kept at an address but no longer read."""
DELETING_SUFFIX = ".deleting"
"""Suffix of a local checkpoint that is about to be deleted."""
_SHA256 = re.compile("[0-9a-f]{64}")
_log = logging.getLogger(__name__)


class ManifestEntry(NamedTuple):
    """A file of a manifest."""

    digest: FileDigest
    key: str
    """Name in storage, inside the folder."""


def parse_manifest(manifest: bytes | None) -> dict[str, ManifestEntry]:
    """Return name -> file of a manifest. Raises ValueError for None, no manifest, or a name that leaves the folder."""
    if manifest is None:
        raise ValueError("it is missing")
    try:
        entries: Mapping[str, Any] = json.loads(manifest)["files"]
        found = {
            name: ManifestEntry(FileDigest(int(entry["bytes"]), str(entry["sha256"])), str(entry.get("key", name)))
            for name, entry in entries.items()
        }
    except (LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"no manifest ({type(error).__name__}: {error})") from error
    for name, one in found.items():
        if not _SHA256.fullmatch(one.digest.sha256):
            raise ValueError(f"{name!r} has sha256 {one.digest.sha256!r:.80}, which is not 64 hexadecimal digits")
    for names in (found, {one.key for one in found.values()}):
        if unusable := invalid_names(names):
            raise ValueError(f"{unusable[0]!r} is not the name of a file inside the folder")
    return found


# -- folders of this machine


def list_files(folder: Path) -> dict[str, Path]:
    """Return name -> path of the files that a manifest of the folder lists, in order."""
    marks = (folder / MANIFEST_FILE, folder / FINISHED_FILE)
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path not in marks)
    return {path.relative_to(folder).as_posix(): path for path in paths}


def write_manifest(folder: Path, known_digests: Mapping[str, FileDigest] | None = None, **about: Any) -> None:
    """Make the files of a folder durable and list them. Raises OSError.

    Args:
        folder: A folder of this machine.
        written: Content of files, by name, that are durable already and need not be read again.
        about: Further entries of the manifest.
    """
    known = known_digests or {}
    found = {name: known.get(name) or digest_file(path, fsync=True) for name, path in list_files(folder).items()}
    entries = {name: {"bytes": one.size, "sha256": one.sha256} for name, one in found.items()}
    atomic_write_text(folder / MANIFEST_FILE, json.dumps({**about, "files": entries}, indent=1))


def find_damage(folder: Path, *, verify_hashes: bool) -> str | None:
    """Return how a folder of this machine differs from its manifest; None if it does not.

    `read`: compare the SHA-256 of each file, not only its size. Symbolic links are not followed.
    """
    try:
        listed = parse_manifest((folder / MANIFEST_FILE).read_bytes())
    except (OSError, ValueError) as error:
        return f"{MANIFEST_FILE} cannot be read ({type(error).__name__}: {error})"
    for name, (content, _) in listed.items():
        file = folder / name
        try:
            if any(path.is_symlink() for path in (file, *file.parents[: name.count("/")])):
                return f"{name} is, or is under, a symbolic link"
            if not file.is_file():
                return f"{name} is missing"
            if (size := file.stat().st_size) != content.size:
                return f"{name} has {size} bytes instead of {content.size}"
            if verify_hashes and digest_file(file, fsync=False) != content:
                return f"{name} has another SHA-256 than when it was saved"
        except OSError as error:
            return f"{name} cannot be read ({error})"
    return None


def set_aside_local(folder: Path) -> Path:
    """Rename a checkpoint of this machine to a name under which nobody looks for one; return the new path."""
    return folder.rename(next(path for n in count() if not (path := Path(f"{folder}.set_aside_{n}")).exists()))


# -- folders at an address


def upload_folder(
    store: RemoteFolder,
    name: str,
    local: Path,
    *,
    before_manifest: Callable[[bytes], None] = lambda manifest: None,
    before_write: Callable[[], None] = lambda: None,
    arrived: dict[str, FileDigest] | None = None,
) -> bool:
    """Upload the folder `local`, which has a manifest, as `name`; what was complete there stays so until the end.

    Files that are already there by the manifest there are not sent again. What the new manifest does not list is
    deleted at the end.

    Args:
        store: Folder in which `name` is.
        name: Name of the folder at the address.
        local: Folder of this machine.
        before_manifest: Called with the content of the manifest before that is written.
        before_write: Called before each write or deletion; an error that it raises ends the upload.
        arrived: Files that earlier attempts at this upload have sent; those of this attempt are added.

    Returns:
        False if `local` is damaged, or was changed or deleted meanwhile.

    Raises:
        StorageError: The storage refuses or does not answer.
    """
    try:
        manifest = (local / MANIFEST_FILE).read_bytes()
    except FileNotFoundError:
        return False
    if (problem := find_damage(local, verify_hashes=False)) is not None:
        if _has_manifest(local, manifest):
            _log.error("%s IS DAMAGED: %s. It is not uploaded.", local, problem)
        return False
    there, before = store.find(name), store.read(f"{name}/{MANIFEST_FILE}")
    # A manifest may be there without its files: one that arrived late, after they had been deleted.
    old = {file: one for file, one in _known(before).items() if _is_there(one, name, there)}
    taken = {one.key for one in old.values()}
    arrived = {} if arrived is None else arrived
    content, keys = json.loads(manifest), {MANIFEST_FILE}
    for file, (wanted, _) in sorted(parse_manifest(manifest).items()):
        if file in old and old[file].digest == wanted:
            key = old[file].key
        else:
            key = f"{file}.{wanted.sha256[:16]}" if file in taken else file
            if arrived.get(f"{name}/{key}") != wanted:
                before_write()
                try:
                    store.put(f"{name}/{key}", local / file)
                except (StorageError, FileNotFoundError):
                    if not _has_manifest(local, manifest):
                        return False
                    raise
                arrived[f"{name}/{key}"] = wanted
        keys.add(key)
        content["files"][file].pop("key", None)  # of where it was downloaded from
        if key != file:
            content["files"][file]["key"] = key
    stored = json.dumps(content, indent=1).encode()
    before_manifest(stored)
    before_write()
    if not _has_manifest(local, manifest):
        return False
    if stored != before:
        store.write(f"{name}/{MANIFEST_FILE}", stored)
    if unlisted := [path for path in there if path.removeprefix(f"{name}/") not in keys]:
        before_write()
        store.delete(unlisted)
    return True


def download_folder(store: RemoteFolder, name: str, local: Path, only: tuple[str, ...] | None = None) -> str | None:
    """Download and verify what `local` lacks of the folder `name`; return what is wrong with it at the address.

    The manifest is written last. `only`: download files whose names begin with one of these, and no manifest. Raises
    StorageError if the storage refuses or does not answer.
    """
    manifest = store.read(f"{name}/{MANIFEST_FILE}")
    try:
        listed = parse_manifest(manifest)
    except ValueError as error:
        return f"{store.uri}/{name}/{MANIFEST_FILE} cannot be read: {error}"
    for file, one in listed.items():
        target = local / file
        if only is not None and not file.startswith(only):
            continue
        if target.is_file() and digest_file(target, fsync=False) == one.digest:
            continue
        if (problem := download_file(store, f"{name}/{one.key}", one.digest, target)) is not None:
            return problem
    if only is None:
        with atomic_write(local / MANIFEST_FILE) as handle:
            handle.write(manifest or b"")
    return None


def download_file(store: RemoteFolder, name: str, expected: FileDigest, target: Path) -> str | None:
    """Download and verify a file; return what is wrong with it at the address. An empty SHA-256 is not compared."""
    where = f"{store.uri}/{name}"
    if not store.get(name, target):
        return f"{where} is missing"
    found = digest_file(target, fsync=True) if expected.sha256 else FileDigest(target.stat().st_size, "")
    if found == expected:
        return None
    target.unlink()
    return f"{where} has another SHA-256 or size than when it was listed ({found.size} bytes, {expected.size} then)"


def delete_folder(store: RemoteFolder, name: str) -> None:
    """Delete a folder, its manifest first: it is never half there."""
    store.delete([f"{name}/{MANIFEST_FILE}"])
    store.delete(store.find(name))


def set_aside(store: RemoteFolder, name: str) -> None:
    """Rename the manifest of a folder, whose files are kept but no longer read."""
    if (manifest := store.read(f"{name}/{MANIFEST_FILE}")) is not None:
        store.write(f"{name}/{SET_ASIDE_FILE}", manifest)
        store.delete([f"{name}/{MANIFEST_FILE}"])


def has_same_content(folder: Path, manifest: bytes) -> bool:
    """Return True if the manifest of a local folder lists the same content as this one of the address."""
    try:
        here, there = parse_manifest((folder / MANIFEST_FILE).read_bytes()), parse_manifest(manifest)
    except (FileNotFoundError, ValueError):
        return False
    return {name: one.digest for name, one in here.items()} == {name: one.digest for name, one in there.items()}


def is_complete_remote(store: RemoteFolder, name: str, remote_files: Mapping[str, RemoteFile]) -> bool:
    """Return True if all that the manifest of a folder lists is in storage, where `there` was found."""
    return all(_is_there(one, name, remote_files) for one in _known(store.read(f"{name}/{MANIFEST_FILE}")).values())


def _is_there(one: ManifestEntry, name: str, remote_files: Mapping[str, RemoteFile]) -> bool:
    found = remote_files.get(f"{name}/{one.key}")
    return found is not None and found.size == one.digest.size


def _known(manifest: bytes | None) -> dict[str, ManifestEntry]:
    """Return what a manifest in storage lists; nothing if there is none, or none that can be read."""
    try:
        return parse_manifest(manifest)
    except ValueError:
        return {}


def _has_manifest(local: Path, manifest: bytes) -> bool:
    """Return True if a folder is still the one whose upload was begun: a run may write it again, or delete it."""
    try:
        return (local / MANIFEST_FILE).read_bytes() == manifest
    except FileNotFoundError:
        return False
