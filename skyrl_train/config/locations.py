"""What paths of a configuration name: files, folders, names on the hub, and addresses of storage."""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeGuard
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from skyrl_train.config.schema import Config

HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
DATASET_SUFFIXES = (".parquet", ".json", ".jsonl")
UNSUPPORTED_SUFFIXES = frozenset({".csv", ".tsv", ".txt", ".xlsx", ".arrow", ".gz", ".zip", ".pkl"})
"""Endings of files that hold data and cannot be read: no dataset on the hub is called so."""

URI_SCHEMES = ("s3", "file")
"""Of addresses of storage."""
_MAX_NAME_BYTES = 255
"""Length of the longest file name that disks take."""
_ROLES = ("policy", "ref", "critic", "reward")


def is_uri(path: object) -> TypeGuard[str]:
    """Whether it is written like one of storage, good or bad; everything else is a path or a name on the hub."""
    return isinstance(path, str) and "://" in path


def list_uris(config: Config) -> Iterator[tuple[str, str]]:
    """(key, value) of all paths that are addresses."""
    trainer, data = config.trainer, config.data
    paths = [(f"trainer.{key}", getattr(trainer, key)) for key in ("ckpt_path", "export_path", "resume_path")]
    paths += [(f"trainer.{role}.model.path", getattr(trainer, role).model.path) for role in _ROLES]
    paths += [("generator.model_name", config.generator.model_name)]
    for key in ("train_data", "val_data"):
        sources = getattr(data, key)
        paths += [(f"data.{key}", source) for source in (sources if isinstance(sources, (list, tuple)) else ())]
    found = {path: key for key, path in reversed(paths) if is_uri(path)}  # what follows another key is that one's
    yield from ((key, path) for path, key in reversed(found.items()))


def strip_file_scheme(path: str) -> str:
    """The path of a `file://` address; everything else as it is."""
    return path.removeprefix("file://")


def find_uri_problem(uri: str) -> tuple[str, str] | None:
    """(what is allowed, what to do) for an address that cannot be used, without looking whether anything is there."""
    allowed = "an address like s3://bucket/folder or file:///folder"
    scheme, _, rest = uri.partition("://")
    if scheme not in URI_SCHEMES:
        return allowed, "Other addresses are not read or written."
    if "@" in rest.partition("/")[0] or "?" in rest:
        advice = "Credentials come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or from AWS's own configuration."
        return f"{allowed}, without credentials or a query", advice
    inside = rest.removesuffix("/")
    if inside.startswith("/") != (scheme == "file") or not is_relative_name(inside.removeprefix("/")):
        return allowed, "A bucket or an absolute path follows the two slashes; no part of it is empty, `.` or `..`."
    return None


def is_relative_name(name: str) -> bool:
    """True if a text names a file inside a folder, whoever chose it: storage, a manifest or another machine."""
    parts = name.split("/")
    return "\0" not in name and all(
        part not in ("", ".", "..") and len(part.encode(errors="surrogatepass")) <= _MAX_NAME_BYTES for part in parts
    )


def redact_uri(uri: str) -> str:
    """An address as it may be shown."""
    parts = urlsplit(uri)
    return f"{parts.scheme}://{'***@' if '@' in parts.netloc else ''}{parts.netloc.rpartition('@')[2]}{parts.path}" + (
        "?***" if parts.query else ""
    )


def get_display_name(source: str) -> str:
    """What of a path, an address or a hub name is said to strangers: the last part of what has a folder or a bucket."""
    plain = source.rstrip("/")
    if is_uri(plain) or os.path.isabs(plain) or plain.startswith(("~", ".")) or os.path.exists(plain):
        return plain.rpartition("/")[2]
    return plain


def is_dataset_file(source: str) -> bool:
    """Whether it names a file, which need not exist."""
    path = os.path.expanduser(source)
    return path.lower().endswith(DATASET_SUFFIXES) and not os.path.isdir(path)


def parse_split(source: str) -> tuple[str, str]:
    """(name, split) of a folder or a dataset on the hub: both may end in ":split"; "train" otherwise."""
    if not os.path.exists(os.path.expanduser(source)) and ":" in source.rpartition("://")[2]:
        name, _, split = source.rpartition(":")
        return name, split
    return source, "train"


def may_be_hub_name(name: str) -> bool:
    """Whether it is written like a name on the hub and no file or folder here has it."""
    return not os.path.exists(os.path.expanduser(name)) and HUB_NAME.fullmatch(name) is not None
