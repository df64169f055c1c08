"""What a text of data.train_data or data.val_data names: a file of rows, a folder, or a dataset on the hub."""

from __future__ import annotations

import re
from pathlib import Path

HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
SUFFIXES = (".parquet", ".json", ".jsonl")


def is_file_of_rows(source: str) -> bool:
    """Whether it names a file, be it there or not."""
    path = Path(source).expanduser()
    return path.suffix.lower() in SUFFIXES and not path.is_dir()


def split_of(source: str) -> tuple[str, str]:
    """(name, split) of a folder or a dataset on the hub: both may end in ":split"; "train" otherwise."""
    if not Path(source).expanduser().exists() and ":" in source:
        name, _, split = source.rpartition(":")
        return name, split
    return source, "train"


def may_be_on_hub(name: str) -> bool:
    """Whether it is written like a name on the hub and no file or folder here has it."""
    return not Path(name).expanduser().exists() and HUB_NAME.fullmatch(name) is not None
