"""A folder at an address, by fsspec: the same few operations for a bucket and for a disk."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from skyrl_train.config.sources import is_relative_name
from skyrl_train.durable import open_new, replacing
from skyrl_train.errors import StorageError
from skyrl_train.storage.places import check_address, explained

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """A file that is there."""

    size: int
    """Bytes."""
    version: str
    """Another one whenever the content is another: the ETag of an object, the time of change of a file."""


class StoredFolder:
    """A folder at an address. Names are relative to it; a file appears there whole or not at all.

    Every method may be called by any thread, and raises StorageError if the storage refuses or does not answer, and for
    a name that is not one of a file inside the folder. Raises ConfigError for an address that cannot be used.
    """

    def __init__(self, address: str):
        check_address(address)
        self.address = address.rstrip("/")
        scheme, _, root = self.address.partition("://")
        with explained(self.address):
            import fsspec  # a second with s3fs, and only for those who have an address

            options = {"use_listings_cache": False} if scheme == "s3" else {"auto_mkdir": True}
            self._files: Any = fsspec.filesystem(scheme, **options)
        self._on_disk = scheme == "file"
        self._root = root
        self._skipped: set[str] = set()

    def find(self, below: str = "") -> dict[str, Found]:
        """Name -> file, of all files below a folder; nothing where there is none.

        Objects that could not be files of one folder are skipped, with a warning.
        """
        start = f"{self._root}/{below}" if below else self._root
        with explained(f"{self.address}: its files cannot be listed"):
            try:
                listed = self._files.find(start, detail=True)
            except FileNotFoundError:
                return {}
        prefix = f"{self._root}/"
        found = {
            path.removeprefix(prefix): Found(int(about["size"]), _version(about))
            for path, about in listed.items()
            if path.startswith(prefix) and about["type"] == "file" and not path.endswith("/")
        }
        folders = {str(parent) for name in found for parent in PurePosixPath(name).parents}
        found = {name: one for name, one in found.items() if one.size or name not in folders}  # some tools mark folders
        for name in unusable_names(found):
            del found[name]
            if name not in self._skipped:
                self._skipped.add(name)
                _log.warning("%s: the object %r is skipped: its name is not that of a file in a folder.",
                             self.address, name)  # fmt: skip
        return found

    def itself(self) -> Found | None:
        """What is at the address if that is a file."""
        with explained(f"{self.address}: cannot be looked at"):
            try:
                about = self._files.info(self._root)
            except FileNotFoundError:
                return None
        return Found(int(about["size"]), _version(about)) if about["type"] == "file" else None

    def has_bucket(self) -> bool:
        """False if its bucket does not exist. True on a disk, and where the storage does not say."""
        if self._on_disk:
            return True
        with explained(f"{self.address}: cannot be looked at"):
            try:
                self._files.call_s3("head_bucket", Bucket=self._root.partition("/")[0])
            except FileNotFoundError:
                return False
            except PermissionError:  # one may be allowed to write, and not to look at the bucket
                return True
        return True

    def read(self, name: str) -> bytes | None:
        """The content of a small file; None if there is none."""
        with explained(f"{self.address}/{name}: cannot be read"):
            try:
                return bytes(self._files.cat_file(self._path(name)))
            except FileNotFoundError:
                return None

    def write(self, name: str, content: bytes) -> None:
        """Write a small file."""
        with explained(f"{self.address}/{name}: cannot be written"):
            with self._writable(self._path(name)) as target:
                self._files.pipe_file(target, content)

    def version(self, name: str) -> str | None:
        """That of a file, see Found; None if there is none."""
        with explained(f"{self.address}/{name}: cannot be looked at"):
            try:
                return _version(self._files.info(self._path(name)))
            except FileNotFoundError:
                return None

    def write_if(self, name: str, content: bytes, seen: str | None) -> bool:
        """Write a small file if what is there is of this version, None for nothing; whether it was written.

        One of several writers that have seen the same is the one that writes. A bucket whose server does not know
        conditions is written without one, and on a disk only a file that is new has one writer for certain. After a
        write whose answer was lost this is False: read what is there.
        """
        with explained(f"{self.address}/{name}: cannot be written"):
            if not self._on_disk:
                written = self._put_object_if(self._path(name), content, seen)
                if written is not None:
                    return written
            elif seen is None:
                target = Path(self._path(name))
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    file = open_new(target)
                except FileExistsError:
                    return False
                try:
                    with file:
                        file.write(content)
                except BaseException:
                    target.unlink(missing_ok=True)
                    raise
                return True
            elif self.version(name) != seen:
                return False
        self.write(name, content)
        return True

    def _put_object_if(self, target: str, content: bytes, seen: str | None) -> bool | None:
        """Whether an object was written; None where the server does not know conditions."""
        bucket, _, key = target.partition("/")
        condition = {"IfNoneMatch": "*"} if seen is None else {"IfMatch": seen}
        try:
            self._files.call_s3("put_object", Bucket=bucket, Key=key, Body=content, **condition)
        except OSError as error:
            status = getattr(error.__cause__, "response", {}).get("ResponseMetadata", {}).get("HTTPStatusCode")
            if status == 501:  # not implemented
                return None
            if status in (409, 412) or (status == 404 and seen is not None):  # being written, another one, deleted
                return False
            raise
        return True

    def put(self, name: str, local: Path) -> None:
        """Upload a file. Raises FileNotFoundError if it is not there locally."""
        size = local.stat().st_size
        with explained(f"{self.address}/{name}: cannot be written"):
            with self._writable(self._path(name)) as target:
                self._files.put_file(str(local), target)
            there = int(self._files.info(self._path(name))["size"])
        if there < min(size, local.stat().st_size):  # a log may have grown meanwhile, or been shortened
            raise StorageError(f"{self.address}/{name}: {there} bytes of {size} arrived.")

    def get(self, name: str, local: Path) -> bool:
        """Download a file, which appears at `local` whole; False if it is not there. "" is the address itself."""
        with explained(f"{self.address}/{name}".rstrip("/") + ": cannot be read"):
            source = self._path(name) if name else self._root
            local.parent.mkdir(parents=True, exist_ok=True)
            try:
                # A name of its own: processes of several nodes may fetch the same file.
                with replacing(local, local.with_name(f".{uuid.uuid4().hex}.new"), sync=False) as temporary:
                    self._files.get_file(source, temporary.name)
            except FileNotFoundError:
                return False
        return True

    def delete(self, names: Iterable[str]) -> None:
        """Delete files, in this order; those that are not there are skipped."""
        for name in names:
            with explained(f"{self.address}/{name}: cannot be deleted"):
                try:
                    self._files.rm_file(self._path(name))
                except FileNotFoundError:
                    continue

    def drop_unfinished(self) -> None:
        """Forget parts of files whose upload was interrupted: a bucket keeps them for ever, and nobody sees them."""
        if self._on_disk:
            return
        bucket, _, key = self._root.partition("/")
        with explained(f"{self.address}: unfinished uploads cannot be listed"):
            answer = self._files.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{key}/" if key else "")
            for upload in answer.get("Uploads", ()):
                named = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                self._files.call_s3("abort_multipart_upload", **named)

    def _path(self, name: str) -> str:
        if not is_relative_name(name):
            raise StorageError(f"{self.address}: {name!r} is not the name of a file inside this folder.")
        return f"{self._root}/{name}"

    @contextmanager
    def _writable(self, target: str) -> Iterator[str]:
        """Give where to write: a bucket shows an object only once it is whole, a disk shows half a file."""
        if not self._on_disk:
            yield target
            return
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        with replacing(Path(target), sync=False) as temporary:
            yield temporary.name


def unusable_names(names: Collection[str]) -> list[str]:
    """Return the names that cannot be files of one folder: they leave it, or another file has the name of a parent."""
    known = frozenset(names)
    return [
        name
        for name in names
        if not is_relative_name(name) or any(str(parent) in known for parent in PurePosixPath(name).parents)
    ]


def _version(about: dict[str, Any]) -> str:
    return str(about.get("ETag") or about.get("mtime") or "").strip('"')
