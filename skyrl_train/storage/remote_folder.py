"""A folder at an address: the same operations for a bucket and a disk, on top of fsspec."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from skyrl_train.atomic_files import atomic_write, open_exclusive
from skyrl_train.config.locations import is_relative_name
from skyrl_train.errors import StorageError
from skyrl_train.storage.uris import check_uri, wrap_storage_errors

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file at an address."""

    size: int
    """Bytes."""
    version: str
    """Changes with the content: the ETag of an object, the modification time of a file."""

    @classmethod
    def from_info(cls, info: Mapping[str, Any]) -> RemoteFile:
        return cls(int(info["size"]), str(info.get("ETag") or info.get("mtime") or "").strip('"'))


class RemoteFolder:
    """A folder at an address. Names are relative to it; a file appears there complete or not at all.

    All methods are thread-safe. They raise StorageError if the storage refuses or does not answer, and for a name that
    is not one of a file inside the folder. The constructor raises ConfigError for an address that cannot be used.
    """

    def __init__(self, uri: str):
        check_uri(uri)
        self.uri = uri.rstrip("/")
        scheme, _, self._root = self.uri.partition("://")
        with wrap_storage_errors(self.uri):
            import fsspec  # takes a second with s3fs

            options = {"use_listings_cache": False} if scheme == "s3" else {"auto_mkdir": True}
            self._files: Any = fsspec.filesystem(scheme, **options)
        self._on_disk = scheme == "file"
        self._skipped: set[str] = set()

    def find(self, subfolder: str = "") -> dict[str, RemoteFile]:
        """Return name -> file for all files below a folder; empty if it does not exist.

        Objects that could not be files of one folder are skipped, with a warning.
        """
        with wrap_storage_errors(f"{self.uri}: its files cannot be listed"):
            try:
                listed = self._files.find(f"{self._root}/{subfolder}" if subfolder else self._root, detail=True)
            except FileNotFoundError:
                return {}
        prefix = f"{self._root}/"
        found = {
            path.removeprefix(prefix): RemoteFile.from_info(info)
            for path, info in listed.items()
            if path.startswith(prefix) and info["type"] == "file" and not path.endswith("/")
        }
        folders = {str(parent) for name in found for parent in PurePosixPath(name).parents}
        found = {name: one for name, one in found.items() if one.size or name not in folders}  # some tools mark folders
        for name in invalid_names(found):
            del found[name]
            if name not in self._skipped:
                self._skipped.add(name)
                _log.warning("%s: the object %r is skipped: its name is not that of a file in a folder.",
                             self.uri, name)  # fmt: skip
        return found

    def info(self, name: str | None = None) -> RemoteFile | None:
        """Return what is known of a file, by default of one at the address itself; None if there is no such file."""
        with self._access(name, "cannot be looked at") as path:
            try:
                info = self._files.info(path)
            except FileNotFoundError:
                return None
        return RemoteFile.from_info(info) if info["type"] == "file" else None

    def version(self, name: str) -> str | None:
        """Return the version of a file; None if it does not exist."""
        found = self.info(name)
        return None if found is None else found.version

    def has_bucket(self) -> bool:
        """Return False if the bucket does not exist. True on a disk, and where the storage does not say."""
        if not self._on_disk:
            with wrap_storage_errors(f"{self.uri}: cannot be looked at"):
                try:
                    with suppress(PermissionError):  # one may be allowed to write, and not to look at the bucket
                        self._files.call_s3("head_bucket", Bucket=self._root.partition("/")[0])
                except FileNotFoundError:
                    return False
        return True

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; None if it does not exist."""
        with self._access(name, "cannot be read") as path:
            try:
                return bytes(self._files.cat_file(path))
            except FileNotFoundError:
                return None

    def write(self, name: str, content: bytes) -> None:
        """Write a small file."""
        with self._access(name, "cannot be written") as path, self._complete(path) as target:
            self._files.pipe_file(target, content)

    def write_if_version(self, name: str, content: bytes, version: str | None) -> bool:
        """Write a small file if this version of it is there, None for no file; return True if it was written.

        Of several writers that name the same version one writes. There are two exceptions: servers without conditional
        writes, and disks unless the version is None. If the answer to a successful write was lost, this returns False:
        read what is there.
        """
        with self._access(name, "cannot be written") as path:
            try:
                if not self._on_disk:
                    condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}
                    self._files.pipe_file(path, content, **condition)
                    return True
                if version is None:
                    return self._create(Path(path), content)
                if self.version(name) != version:
                    return False
            except OSError as error:
                status = getattr(error.__cause__, "response", {}).get("ResponseMetadata", {}).get("HTTPStatusCode")
                if status in (409, 412) or (status == 404 and version is not None):  # being written, changed, deleted
                    return False
                if status != 501:  # not implemented: the server does not know conditions
                    raise
        self.write(name, content)
        return True

    def put(self, name: str, local: Path) -> None:
        """Upload a file. Raises FileNotFoundError if it does not exist locally."""
        size = local.stat().st_size
        with self._access(name, "cannot be written") as path:
            with self._complete(path) as target:
                self._files.put_file(str(local), target)
            arrived = int(self._files.info(path)["size"])
        if arrived < min(size, local.stat().st_size):  # a log may have grown meanwhile, or been shortened
            raise StorageError(f"{self.uri}/{name}: {arrived} bytes of {size} arrived.")

    def get(self, name: str, local: Path) -> bool:
        """Download a file, which appears at `local` complete or not at all; return False if it does not exist."""
        with self._access(name, "cannot be read") as path:
            local.parent.mkdir(parents=True, exist_ok=True)
            try:
                # A name of its own: processes of several nodes may fetch the same file.
                with atomic_write(local, local.with_name(f".{uuid.uuid4().hex}.new"), fsync=False) as temporary:
                    self._files.get_file(path, temporary.name)
            except FileNotFoundError:
                return False
        return True

    def delete(self, names: Iterable[str]) -> None:
        """Delete files in this order; those that do not exist are skipped."""
        for name in names:
            with self._access(name, "cannot be deleted") as path, suppress(FileNotFoundError):
                self._files.rm_file(path)

    def abort_uploads(self) -> None:
        """Delete the parts of interrupted multipart uploads: a bucket keeps them forever, and no listing shows them."""
        if self._on_disk:
            return
        bucket, _, key = self._root.partition("/")
        with wrap_storage_errors(f"{self.uri}: unfinished uploads cannot be listed"):
            answer = self._files.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{key}/" if key else "")
            for upload in answer.get("Uploads", ()):
                named = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                self._files.call_s3("abort_multipart_upload", **named)

    @contextmanager
    def _access(self, name: str | None, problem: str) -> Iterator[str]:
        """Give the path of a file, or of the address itself, and say which one it was in errors."""
        with wrap_storage_errors(f"{self.uri if name is None else f'{self.uri}/{name}'}: {problem}"):
            yield self._root if name is None else self._path(name)

    def _path(self, name: str) -> str:
        if not is_relative_name(name):
            raise StorageError(f"{self.uri}: {name!r} is not the name of a file inside this folder.")
        return f"{self._root}/{name}"

    def _create(self, target: Path, content: bytes) -> bool:
        """Write a file of a disk; False if it exists."""
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = open_exclusive(target)  # fsspec looks first and creates then: two processes could take one lock
        except FileExistsError:
            return False
        try:
            with file:
                file.write(content)
        except BaseException:
            target.unlink(missing_ok=True)
            raise
        return True

    @contextmanager
    def _complete(self, target: str) -> Iterator[str]:
        """Give the path to write to: a bucket shows only complete objects, a disk needs a temporary file."""
        if not self._on_disk:
            yield target
            return
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(Path(target), fsync=False) as temporary:
            yield temporary.name


def invalid_names(names: Collection[str]) -> list[str]:
    """Return the names that cannot be files of one folder: they leave it, or another file has the name of a parent."""
    known = frozenset(names)
    return [
        name
        for name in names
        if not is_relative_name(name) or any(str(parent) in known for parent in PurePosixPath(name).parents)
    ]
