"""What an entry of data.train_data or data.val_data names: a file of rows, a folder, or a dataset on the hub."""

from __future__ import annotations

import os.path
import re

HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
SUFFIXES = (".parquet", ".json", ".jsonl")
OTHER_FILES = frozenset({".csv", ".tsv", ".txt", ".xlsx", ".arrow", ".gz", ".zip", ".pkl"})
"""Endings of files that hold data and cannot be read: no dataset on the hub is called so."""


def is_file_of_rows(source: str) -> bool:
    """Whether it names a file, which need not exist."""
    path = os.path.expanduser(source)
    return path.lower().endswith(SUFFIXES) and not os.path.isdir(path)


def split_of(source: str) -> tuple[str, str]:
    """(name, split) of a folder or a dataset on the hub: both may end in ":split"; "train" otherwise."""
    if not os.path.exists(os.path.expanduser(source)) and ":" in source.rpartition("://")[2]:
        name, _, split = source.rpartition(":")
        return name, split
    return source, "train"


def may_be_on_hub(name: str) -> bool:
    """Whether it is written like a name on the hub and no file or folder here has it."""
    return not os.path.exists(os.path.expanduser(name)) and HUB_NAME.fullmatch(name) is not None
