"""A remote folder at a URI: the same operations for a bucket and a disk, implemented with fsspec."""

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
    """Size and version of a remote file."""

    size: int
    """Size in bytes."""
    version: str
    """A value that changes with the content: the ETag of an object, or the modification time of a file."""

    @classmethod
    def from_info(cls, info: Mapping[str, Any]) -> RemoteFile:
        """Create it from fsspec's description of a file."""
        return cls(int(info["size"]), str(info.get("ETag") or info.get("mtime") or "").strip('"'))


class RemoteFolder:
    """A remote folder. File names are relative to it, and a file appears there complete or not at all.

    All methods are thread-safe and block. They raise StorageError if the storage rejects a request or does not respond,
    and for a name that is not one of a file inside the folder.
    """

    def __init__(self, uri: str):
        """Create a client of the folder at `uri`. The folder need not exist.

        Raises:
            ConfigError: The URI cannot be used; see `check_uri`.
            StorageError: The file system's client cannot be created.
        """
        check_uri(uri)
        self.uri = uri.rstrip("/")
        scheme, _, self._root = self.uri.partition("://")
        with wrap_storage_errors(self.uri):
            import fsspec  # This takes a second with s3fs.

            options = {"use_listings_cache": False} if scheme == "s3" else {"auto_mkdir": True}
            self._files: Any = fsspec.filesystem(scheme, **options)
        self._on_disk = scheme == "file"
        self._skipped: set[str] = set()

    def find(self, subfolder: str = "") -> dict[str, RemoteFile]:
        """Return all files below a folder by name, relative to this folder; empty if the folder does not exist.

        Objects whose names could not be files on a disk are skipped, each with one warning.

        Args:
            subfolder: Name of a subfolder; empty for the folder itself.

        Raises:
            StorageError: The storage rejects the request or does not respond.
        """
        with wrap_storage_errors(f"{self.uri}: its files cannot be listed"):
            try:
                infos = self._files.find(f"{self._root}/{subfolder}" if subfolder else self._root, detail=True)
            except FileNotFoundError:
                return {}
        prefix = f"{self._root}/"
        files = {
            path.removeprefix(prefix): RemoteFile.from_info(info)
            for path, info in infos.items()
            if path.startswith(prefix) and info["type"] == "file" and not path.endswith("/")
        }
        folders = {str(parent) for name in files for parent in PurePosixPath(name).parents}
        # Some tools create empty objects as markers of folders.
        files = {name: file for name, file in files.items() if file.size or name not in folders}
        for name in invalid_names(files):
            del files[name]
            if name not in self._skipped:
                self._skipped.add(name)
                _log.warning("%s: the object %r is skipped: its name cannot be that of a file in a folder.",
                             self.uri, name)  # fmt: skip
        return files

    def info(self, name: str | None = None) -> RemoteFile | None:
        """Return the size and version of a file; None if there is no such file.

        Args:
            name: Name of the file; None for a file at this folder's own URI.
        """
        with self._access(name, "its properties cannot be read") as path:
            try:
                info = self._files.info(path)
            except FileNotFoundError:
                return None
        return RemoteFile.from_info(info) if info["type"] == "file" else None

    def version(self, name: str) -> str | None:
        """Return the version of a file; None if it does not exist."""
        file = self.info(name)
        return None if file is None else file.version

    def has_bucket(self) -> bool:
        """False if the bucket does not exist. True on a disk, and if the storage forbids the question.

        Raises:
            StorageError: The storage does not respond.
        """
        if not self._on_disk:
            with wrap_storage_errors(f"{self.uri}: its bucket cannot be checked"):
                try:
                    with suppress(
                        PermissionError
                    ):  # A user may be allowed to write objects but not to read the bucket.
                        self._files.call_s3("head_bucket", Bucket=self._root.partition("/")[0])
                except FileNotFoundError:
                    return False
        return True

    def read(self, name: str) -> bytes | None:
        """Return the content of a file, which is held in memory; None if the file does not exist."""
        with self._access(name, "cannot be read") as path:
            try:
                return bytes(self._files.cat_file(path))
            except FileNotFoundError:
                return None

    def write(self, name: str, content: bytes) -> None:
        """Write a file, or replace it, with a content that is held in memory."""
        with self._access(name, "cannot be written") as path, self._complete(path) as target:
            self._files.pipe_file(target, content)

    def write_if_version(self, name: str, content: bytes, version: str | None) -> bool:
        """Write a file if it still has the given version.

        If several writers name the same version, one of them writes. This is not guaranteed on servers without
        conditional writes, nor on disks unless `version` is None.

        Args:
            name: Name of the file.
            content: The new content.
            version: The version to replace; None if the file must not exist.

        Returns:
            True if the file was written. False may also mean that the response to a successful write was lost, so read
            the file to find out.
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
                # Another client writes the file now, has changed it, or has deleted it.
                if status in (409, 412) or (status == 404 and version is not None):
                    return False
                if status != 501:  # 501 Not Implemented: the server does not support conditional writes.
                    raise
        self.write(name, content)
        return True

    def put(self, name: str, local: Path) -> None:
        """Upload a local file, or replace the remote one.

        Args:
            name: Name of the remote file.
            local: The local file. It may grow during the upload.

        Raises:
            FileNotFoundError: The local file does not exist.
            StorageError: The upload fails, or fewer bytes arrived than the file has.
        """
        size = local.stat().st_size
        with self._access(name, "cannot be written") as path:
            with self._complete(path) as target:
                self._files.put_file(str(local), target)
            arrived = int(self._files.info(path)["size"])
        if arrived < min(size, local.stat().st_size):  # A log may have grown or been truncated during the upload.
            raise StorageError(f"{self.uri}/{name}: {arrived} bytes of {size} arrived. Start again.")

    def get(self, name: str, local: Path) -> bool:
        """Download a file, which appears at `local` complete or not at all.

        Missing parent folders of `local` are created.

        Returns:
            False if the remote file does not exist.

        Raises:
            StorageError: The storage rejects the request or does not respond.
        """
        with self._access(name, "cannot be read") as path:
            local.parent.mkdir(parents=True, exist_ok=True)
            try:
                # The temporary name is unique, because processes of several nodes may download the same file.
                with atomic_write(local, local.with_name(f".{uuid.uuid4().hex}.new"), fsync=False) as temporary:
                    self._files.get_file(path, temporary.name)
            except FileNotFoundError:
                return False
        return True

    def delete(self, names: Iterable[str]) -> None:
        """Delete files in this order. Files that do not exist are skipped."""
        for name in names:
            with self._access(name, "cannot be deleted") as path, suppress(FileNotFoundError):
                self._files.rm_file(path)

    def abort_uploads(self) -> None:
        """Delete the parts of interrupted multipart uploads, which a bucket keeps forever and no listing shows.

        Does nothing on a disk.

        Raises:
            StorageError: The storage rejects the request or does not respond.
        """
        if self._on_disk:
            return
        bucket, _, key = self._root.partition("/")
        with wrap_storage_errors(f"{self.uri}: unfinished uploads cannot be listed or deleted"):
            response = self._files.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{key}/" if key else "")
            for upload in response.get("Uploads", ()):
                arguments = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                self._files.call_s3("abort_multipart_upload", **arguments)

    @contextmanager
    def _access(self, name: str | None, problem: str) -> Iterator[str]:
        """Yield fsspec's path of a file, or of the folder's own URI, and name the URI in errors of the block."""
        with wrap_storage_errors(f"{self.uri if name is None else f'{self.uri}/{name}'}: {problem}"):
            yield self._root if name is None else self._path(name)

    def _path(self, name: str) -> str:
        if not is_relative_name(name):
            raise StorageError(f"{self.uri}: {name!r} is not the name of a file inside this folder. Rename the file.")
        return f"{self._root}/{name}"

    def _create(self, target: Path, content: bytes) -> bool:
        """Create a file on a disk; return False if it exists."""
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            # fsspec checks for the file before it creates it, so two processes could both create a lock file.
            file = open_exclusive(target)
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
        """Yield the path to write to. A bucket shows only complete objects, but a disk needs a temporary file."""
        if not self._on_disk:
            yield target
            return
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(Path(target), fsync=False) as temporary:
            yield temporary.name


def invalid_names(names: Collection[str]) -> list[str]:
    """Return the names that cannot be files of one folder together.

    A name is invalid if it leaves the folder, or if one of its parent folders is itself in `names`.
    """
    all_names = frozenset(names)
    return [
        name
        for name in names
        if not is_relative_name(name) or any(str(parent) in all_names for parent in PurePosixPath(name).parents)
    ]
