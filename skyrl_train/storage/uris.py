"""URIs of remote storage (`s3://bucket/folder`, `file:///folder`), and the local folders that belong to them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from skyrl_train.config.locations import find_uri_problem, is_uri, redact_uri
from skyrl_train.config.problems import one_line
from skyrl_train.errors import ConfigError, StorageError

CREDENTIALS_ADVICE = (
    "Credentials come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or from AWS's own configuration. For a server "
    "that is not Amazon's, set AWS_ENDPOINT_URL."
)


def cache_folder() -> Path:
    """Return the absolute path of the cache folder: $SKYRL_CACHE, by default skyrl_train in the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("SKYRL_CACHE") or Path(home) / "skyrl_train").absolute()


def resolve_local_folder(path: str) -> Path:
    """Return the folder that a run writes to for `trainer.ckpt_path` or `trainer.export_path`.

    A URI always maps to the same folder in the cache, so that a restarted run finds files that it has not uploaded yet.
    A path is returned unchanged.

    Raises:
        ConfigError: `path` is a URI that cannot be used; see `check_uri`.
    """
    return cache_folder_for("runs", path) if is_uri(path) else Path(path)


def cache_folder_for(kind: str, uri: str) -> Path:
    """Return the folder in the cache that belongs to a URI. The folder is not created.

    Args:
        kind: Name of a subfolder of the cache, such as "runs".
        uri: The URI.

    Raises:
        ConfigError: The URI cannot be used; see `check_uri`.
    """
    check_uri(uri)
    scheme, _, rest = uri.partition("://")
    return cache_folder().joinpath(kind, scheme, *rest.strip("/").split("/"))


def check_uri(uri: str) -> None:
    """Check that a URI has a supported form. Storage is not accessed.

    Raises:
        ConfigError: The URI cannot be used. The message says what is allowed, without credentials.
    """
    if (problem := find_uri_problem(uri)) is not None:
        allowed, advice = problem
        raise ConfigError(one_line(f"{redact_uri(uri)}: must be {allowed}. {advice}"))


@contextmanager
def wrap_storage_errors(operation: str) -> Iterator[None]:
    """Convert any exception inside the block to a StorageError on one line.

    Args:
        operation: Start of the message, usually a URI and what failed. For s3:// advice about credentials is appended.

    Raises:
        StorageError: The block raised an exception.
    """
    try:
        yield
    except StorageError:
        raise
    except Exception as error:  # File systems, their HTTP clients and event loops raise many types.
        advice = CREDENTIALS_ADVICE if operation.startswith("s3://") else ""
        raise StorageError(one_line(f"{operation}: {type(error).__name__}: {error}. {advice}")) from error
