"""Addresses (`s3://bucket/folder`, `file:///folder`), and where on this machine what is there has its copy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from skyrl_train.config.problems import one_line
from skyrl_train.config.sources import address_problem, is_address, without_credentials
from skyrl_train.errors import ConfigError, StorageError

CACHE = "SKYRL_CACHE"
"""The environment variable that names the folder of copies."""
_CREDENTIALS = (
    "Credentials come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or from AWS's own configuration; the address "
    "of a server that is not Amazon's from AWS_ENDPOINT_URL."
)


def cache_folder() -> Path:
    """Where this machine keeps copies of what is elsewhere: SKYRL_CACHE, or skyrl_train in the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(CACHE) or Path(home) / "skyrl_train").absolute()


def working_folder(path: str) -> Path:
    """The folder that a run writes to for `trainer.ckpt_path` or `trainer.export_path`.

    That of an address is in the cache, always the same one: a run that starts again finds what it has not uploaded yet.
    Raises ConfigError for an address that cannot be used.
    """
    if not is_address(path):
        return Path(path)
    return folder_of_copies("runs", path)


def folder_of_copies(kind: str, address: str) -> Path:
    """Return the folder in the cache that belongs to an address. Raises ConfigError as `check_address`."""
    check_address(address)
    scheme, _, rest = address.partition("://")
    return cache_folder().joinpath(kind, scheme, *rest.strip("/").split("/"))


def check_address(address: str) -> None:
    """Raise ConfigError for an address that cannot be used, before anything is made of its parts."""
    if (problem := address_problem(address)) is not None:
        allowed, advice = problem
        raise ConfigError(one_line(f"{without_credentials(address)}: must be {allowed}. {advice}"))


@contextmanager
def explained(what: str) -> Iterator[None]:
    """What a file system raises inside is raised as a StorageError that says what was tried; no credentials in it."""
    try:
        yield
    except StorageError:
        raise
    except Exception as error:  # file systems, their HTTP clients and event loops raise many kinds
        advice = _CREDENTIALS if what.startswith("s3://") else ""
        raise StorageError(one_line(f"{what}: {type(error).__name__}: {error}. {advice}")) from error
