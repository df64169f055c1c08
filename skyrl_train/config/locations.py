"""Paths in a configuration: local files and folders, names on the Hugging Face hub, and URIs of remote storage."""

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
"""Endings of data files in formats that are not supported. Names of datasets on the hub do not end in them."""

URI_SCHEMES = ("s3", "file")
"""Supported schemes of storage URIs."""
_MAX_NAME_BYTES = 255
"""Maximum length of a file name on common file systems."""
_ROLES = ("policy", "ref", "critic", "reward")


def is_uri(path: object) -> TypeGuard[str]:
    """True for a text with "://", valid or not. Everything else is a local path or a name on the hub."""
    return isinstance(path, str) and "://" in path


def list_uris(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, value) for all paths of a configuration that are URIs.

    Each URI is yielded once: a key that follows another key is left out.
    """
    trainer, data = config.trainer, config.data
    paths = [(f"trainer.{key}", getattr(trainer, key)) for key in ("ckpt_path", "export_path", "resume_path")]
    paths += [(f"trainer.{role}.model.path", getattr(trainer, role).model.path) for role in _ROLES]
    paths += [("generator.model_name", config.generator.model_name)]
    for key in ("train_data", "val_data"):
        sources = getattr(data, key)
        paths += [(f"data.{key}", source) for source in (sources if isinstance(sources, (list, tuple)) else ())]
    keys = {path: key for key, path in reversed(paths) if is_uri(path)}  # the first key of equal paths remains
    yield from ((key, path) for path, key in reversed(keys.items()))


def strip_file_scheme(path: str) -> str:
    """Return the local path of a `file://` URI, or any other text unchanged."""
    return path.removeprefix("file://")


def find_uri_problem(uri: str) -> tuple[str, str] | None:
    """Check the form of a URI, without access to storage.

    Returns:
        What is allowed and what to do, as in `problems.Problem`, or None if the URI is valid.
    """
    allowed = "a URI like s3://bucket/folder or file:///folder"
    scheme, _, rest = uri.partition("://")
    if scheme not in URI_SCHEMES:
        return allowed, "Other schemes are not supported."
    if "@" in rest.partition("/")[0] or "?" in rest:
        advice = "Credentials come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or from AWS's own configuration."
        return f"{allowed}, without credentials or a query", advice
    path = rest.removesuffix("/")
    if path.startswith("/") != (scheme == "file") or not is_relative_name(path.removeprefix("/")):
        return allowed, (
            "The two slashes must be followed by a bucket (s3) or an absolute path (file), no part of which is empty, "
            "`.` or `..`."
        )
    return None


def is_relative_name(name: str) -> bool:
    """True if a name from an untrusted source (storage, a manifest) is safe as a path relative to a folder.

    Each part between slashes is at most 255 bytes long, and is not empty, `.` or `..`. The name has no NUL character.
    """
    parts = name.split("/")
    return "\0" not in name and all(
        part not in ("", ".", "..") and len(part.encode(errors="surrogatepass")) <= _MAX_NAME_BYTES for part in parts
    )


def redact_uri(uri: str) -> str:
    """Return a URI without user information and query, for messages."""
    parts = urlsplit(uri)
    return f"{parts.scheme}://{'***@' if '@' in parts.netloc else ''}{parts.netloc.rpartition('@')[2]}{parts.path}" + (
        "?***" if parts.query else ""
    )


def get_display_name(source: str) -> str:
    """Return the part of a path, URI or hub name that may be published.

    Returns:
        The last component of a local path or URI, which reveals no folders or buckets; a hub name unchanged.
    """
    stripped = source.rstrip("/")
    if is_uri(stripped) or os.path.isabs(stripped) or stripped.startswith(("~", ".")) or os.path.exists(stripped):
        return stripped.rpartition("/")[2]
    return stripped


def is_dataset_file(source: str) -> bool:
    """True if a source has the ending of a dataset file and is not a folder. The file need not exist."""
    path = os.path.expanduser(source)
    return path.lower().endswith(DATASET_SUFFIXES) and not os.path.isdir(path)


def parse_split(source: str) -> tuple[str, str]:
    """Return the name and the split of a source.

    Folders and datasets on the hub may end in ":split". The split of every other source is "train".
    """
    if not os.path.exists(os.path.expanduser(source)) and ":" in source.rpartition("://")[2]:
        name, _, split = source.rpartition(":")
        return name, split
    return source, "train"


def may_be_hub_name(name: str) -> bool:
    """True if a text has the form of a name on the hub and no local file or folder has this name."""
    return not os.path.exists(os.path.expanduser(name)) and HUB_NAME.fullmatch(name) is not None
