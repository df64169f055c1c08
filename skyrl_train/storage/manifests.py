"""Folders that are whole or not there at all: manifest.json lists every file with size and SHA-256, and comes last.

    global_step_40/manifest.json      {"files": {"policy/rank_0.pt": {"bytes": 1024, "sha256": "..."}, ...}, ...}
    global_step_40/policy/rank_0.pt
    global_step_50/policy/rank_0.pt   an upload that was interrupted: no manifest, so nobody reads it

A folder that is uploaded once more, with other content, gets new files beside the old ones (`key` in the manifest says
where), so that at any moment one of the two is whole.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from skyrl_train.durable import Written, describe, replacing, write_durably
from skyrl_train.errors import StorageError
from skyrl_train.storage.folder import Found, StoredFolder, unusable_names

MANIFEST_FILE = "manifest.json"
FINISHED_FILE = ".finished"
"""In a folder of this machine that is finished and has no manifest yet."""
SET_ASIDE_FILE = "manifest.set_aside.json"
"""What the manifest of a folder is called that is kept, but that nobody reads any more."""
DELETING = ".deleting"
"""How the name of a checkpoint of this machine ends that is out of the way, to be deleted."""
_SHA256 = re.compile("[0-9a-f]{64}")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Listed:
    """A file of a manifest."""

    held: Written
    key: str
    """Its name in storage, inside the folder."""


def listed_in(manifest: bytes) -> dict[str, Listed]:
    """Name -> file of a manifest. Raises ValueError for what is none, and for a name that leaves the folder."""
    try:
        entries: Mapping[str, Any] = json.loads(manifest)["files"]
        found = {
            name: Listed(Written(int(entry["bytes"]), str(entry["sha256"])), str(entry.get("key", name)))
            for name, entry in entries.items()
        }
    except (LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"no manifest ({type(error).__name__}: {error})") from error
    for name, one in found.items():
        if not _SHA256.fullmatch(one.held.sha256):
            raise ValueError(f"{name!r} has sha256 {one.held.sha256!r:.80}, which is not 64 hexadecimal digits")
    for names in (found, {one.key for one in found.values()}):
        if unusable := unusable_names(names):
            raise ValueError(f"{unusable[0]!r} is not the name of a file inside the folder")
    return found


def write_manifest(folder: Path) -> None:
    """List what is in a folder that has no manifest yet. Raises OSError."""
    held = {path.relative_to(folder).as_posix(): describe(path, sync=False) for path in _files(folder)}
    entries = {name: {"bytes": one.size, "sha256": one.sha256} for name, one in sorted(held.items())}
    write_durably(folder / MANIFEST_FILE, json.dumps({"files": entries}, indent=1))


def upload(
    store: StoredFolder,
    name: str,
    local: Path,
    before_manifest: Callable[[bytes], None] = lambda manifest: None,
    before_write: Callable[[], None] = lambda: None,
    arrived: dict[str, Written] | None = None,
) -> bool:
    """Upload the folder `local`, which has a manifest, as `name`; False if it changed or went away, or is damaged.

    Files that are there already, by the manifest there, are not sent again. What the new manifest does not list is
    deleted afterwards. `before_write` is called before each file and the manifest: what it raises ends the upload.
    `before_manifest` is called with what the manifest there will be. `arrived`: name -> what earlier attempts at this
    upload have sent; added to. Raises StorageError; what was whole before then still is.
    """
    try:
        manifest = (local / MANIFEST_FILE).read_bytes()
    except FileNotFoundError:
        return False
    if (problem := _damage(local, manifest)) is not None:
        if _is_still(local, manifest):
            _log.error("%s IS DAMAGED: %s. It is not uploaded.", local, problem)
        return False
    wanted, there, before = listed_in(manifest), store.find(name), store.read(f"{name}/{MANIFEST_FILE}")
    # A manifest may be there without its files: one that came late, when they had been deleted.
    old = {file: one for file, one in _known(before).items() if _is_there(one, name, there)}
    arrived = {} if arrived is None else arrived
    taken = {one.key for one in old.values()}
    keys: dict[str, str] = {}
    for file, one in sorted(wanted.items()):
        if file in old and old[file].held == one.held:
            keys[file] = old[file].key
            continue
        key = keys[file] = f"{file}.{one.held.sha256[:16]}" if file in taken else file
        if arrived.get(f"{name}/{key}") == one.held:
            continue
        before_write()
        try:
            store.put(f"{name}/{key}", local / file)
        except (StorageError, FileNotFoundError):
            if not _is_still(local, manifest):
                return False
            raise
        arrived[f"{name}/{key}"] = one.held
    content = json.loads(manifest)
    for file, key in keys.items():
        content["files"][file] |= {"key": key} if key != file else {}
    stored = json.dumps(content, indent=1).encode()
    before_manifest(stored)
    before_write()
    if not _is_still(local, manifest):
        return False
    if stored != before:
        store.write(f"{name}/{MANIFEST_FILE}", stored)
    kept = {MANIFEST_FILE, *keys.values()}
    if unlisted := [path for path in there if path.removeprefix(f"{name}/") not in kept]:
        before_write()
        store.delete(unlisted)
    return True


def fetch(store: StoredFolder, name: str, local: Path) -> str | None:
    """Download what `local` lacks of the folder `name`, and check all of it; returns what is wrong with it there.

    The manifest is written last here, too. Raises StorageError if storage refuses or does not answer.
    """
    manifest = store.read(f"{name}/{MANIFEST_FILE}")
    wanted = _listed(manifest, f"{store.address}/{name}")
    if isinstance(wanted, str) or manifest is None:
        return str(wanted)
    if (problem := _fetch_files(store, name, wanted, local)) is not None:
        return problem
    with replacing(local / MANIFEST_FILE) as handle:
        handle.write(manifest)
    return None


def fetch_part(store: StoredFolder, name: str, below: tuple[str, ...], local: Path) -> str | None:
    """Download those files of the folder `name` whose names begin with one of `below`, and check them.

    Returns what is wrong with it there. Raises StorageError if storage refuses or does not answer.
    """
    wanted = _listed(store.read(f"{name}/{MANIFEST_FILE}"), f"{store.address}/{name}")
    if isinstance(wanted, str):
        return wanted
    return _fetch_files(store, name, {file: one for file, one in wanted.items() if file.startswith(below)}, local)


def _listed(manifest: bytes | None, where: str) -> dict[str, Listed] | str:
    """What a manifest lists, or what is wrong with it."""
    if manifest is None:
        return f"{where} has no {MANIFEST_FILE}"
    try:
        return listed_in(manifest)
    except ValueError as error:
        return f"{where}/{MANIFEST_FILE} cannot be read: {error}"


def _fetch_files(store: StoredFolder, name: str, wanted: Mapping[str, Listed], local: Path) -> str | None:
    for file, one in wanted.items():
        target = local / file
        if target.is_file() and describe(target, sync=False) == one.held:
            continue
        where = f"{store.address}/{name}/{one.key}"
        if not store.get(f"{name}/{one.key}", target):
            return f"{where} is missing"
        if (got := describe(target, sync=True)) != one.held:
            target.unlink()
            return f"{where} has another SHA-256 than when it was saved ({got.size} bytes, {one.held.size} then)"
    return None


def discard(store: StoredFolder, name: str) -> None:
    """Delete a folder: its manifest first, so that it is never half there."""
    store.delete([f"{name}/{MANIFEST_FILE}"])
    store.delete(store.find(name))


def set_aside(store: StoredFolder, name: str) -> None:
    """Keep a folder's files, but not as one that is read."""
    manifest = store.read(f"{name}/{MANIFEST_FILE}")
    if manifest is not None:
        store.write(f"{name}/{SET_ASIDE_FILE}", manifest)
        store.delete([f"{name}/{MANIFEST_FILE}"])


def set_aside_here(folder: Path) -> Path:
    """Rename a checkpoint of this machine to a name under which nobody looks for one; the new one."""
    aside = next(path for n in count() if not (path := Path(f"{folder}.set_aside_{n}")).exists())
    return folder.rename(aside)


def holds_the_same(folder: Path, manifest: bytes) -> bool:
    """Whether a folder of this machine is by its manifest the one that has this manifest in storage."""
    try:
        here, there = listed_in((folder / MANIFEST_FILE).read_bytes()), listed_in(manifest)
    except (FileNotFoundError, ValueError):
        return False
    return {name: one.held for name, one in here.items()} == {name: one.held for name, one in there.items()}


def is_complete(store: StoredFolder, name: str, there: Mapping[str, Found]) -> bool:
    """True if all that the manifest of a folder lists is in storage, where `there` was found."""
    return all(_is_there(one, name, there) for one in _known(store.read(f"{name}/{MANIFEST_FILE}")).values())


def _is_there(one: Listed, name: str, there: Mapping[str, Found]) -> bool:
    found = there.get(f"{name}/{one.key}")
    return found is not None and found.size == one.held.size


def _known(manifest: bytes | None) -> dict[str, Listed]:
    """What a manifest in storage lists; nothing if there is none, or none that can be read."""
    try:
        return listed_in(manifest) if manifest is not None else {}
    except ValueError:
        return {}


def _damage(local: Path, manifest: bytes) -> str | None:
    """What is wrong with a folder at first sight: whoever loads it checks all of its bytes."""
    try:
        listed = listed_in(manifest)
    except ValueError as error:
        return f"{MANIFEST_FILE} cannot be read ({error})"
    for name, one in listed.items():
        file = local / name
        if not file.is_file() or file.stat().st_size != one.held.size:
            return f"{name} is not the {one.held.size} bytes that {MANIFEST_FILE} says"
    return None


def _is_still(local: Path, manifest: bytes) -> bool:
    """Whether a folder is the one whose upload was begun: a run may write it again, or delete it."""
    try:
        return (local / MANIFEST_FILE).read_bytes() == manifest
    except FileNotFoundError:
        return False


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name not in (MANIFEST_FILE, FINISHED_FILE)]
