"""Addresses (`s3://bucket/folder`, `file:///folder`), and the folders of this machine that belong to them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from skyrl_train.config.locations import find_uri_problem, is_uri, redact_uri
from skyrl_train.config.problems import one_line
from skyrl_train.errors import ConfigError, StorageError

CREDENTIALS_ADVICE = (
    "Credentials come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or from AWS's own configuration; the address "
    "of a server that is not Amazon's from AWS_ENDPOINT_URL."
)


def cache_folder() -> Path:
    """Return the folder of local copies: $SKYRL_CACHE, by default skyrl_train in the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("SKYRL_CACHE") or Path(home) / "skyrl_train").absolute()


def resolve_local_folder(path: str) -> Path:
    """Return the folder that a run writes to for `trainer.ckpt_path` or `trainer.export_path`.

    For an address it is in the cache, always the same one: a run that starts again finds what it has not uploaded yet.
    Raises ConfigError for an address that cannot be used.
    """
    return cache_folder_for("runs", path) if is_uri(path) else Path(path)


def cache_folder_for(kind: str, uri: str) -> Path:
    """Return the folder in the cache that belongs to an address. Raises ConfigError as `check_address`."""
    check_uri(uri)
    scheme, _, rest = uri.partition("://")
    return cache_folder().joinpath(kind, scheme, *rest.strip("/").split("/"))


def check_uri(uri: str) -> None:
    """Raise ConfigError for an address that cannot be used, before anything is made of its parts."""
    if (problem := find_uri_problem(uri)) is not None:
        allowed, advice = problem
        raise ConfigError(one_line(f"{redact_uri(uri)}: must be {allowed}. {advice}"))


@contextmanager
def wrap_storage_errors(what: str) -> Iterator[None]:
    """Turn any error inside into a StorageError that says what was tried, without credentials."""
    try:
        yield
    except StorageError:
        raise
    except Exception as error:  # file systems, their HTTP clients and event loops raise many kinds
        advice = CREDENTIALS_ADVICE if what.startswith("s3://") else ""
        raise StorageError(one_line(f"{what}: {type(error).__name__}: {error}. {advice}")) from error
