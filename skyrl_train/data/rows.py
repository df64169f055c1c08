"""Reads the rows of a dataset from parquet, JSON, JSON lines, a folder or the hub, each with its location."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from skyrl_train.config.sources import SUFFIXES, is_address, is_file_of_rows, may_be_on_hub, split_of
from skyrl_train.errors import DataError
from skyrl_train.storage.copies import local_copy

DatasetRow = dict[str, Any]
WHITESPACE = b"\xef\xbb\xbf \t\r\n"
"""White space, including the byte order mark."""
_BATCH_ROWS = 4096
"""Rows of a parquet file that become Python values at once: those who want the first need not wait for many."""
_NOT_PYTHON = (ValueError, OverflowError, LookupError)
"""What text that is not UTF-8, a date beyond Python's and an unknown time zone raise."""


def read_rows(source: str) -> Iterator[tuple[str, DatasetRow]]:
    """(where, row) for every row of `source`; `where` names the file and the line or row, from 1, for error messages.

    A source is a .parquet, .json or .jsonl file, a folder that `datasets` can load, or a name on the hub; the latter
    two may end in ":split" ("train" otherwise). Files and folders may be at an address, see `storage.copies`. Raises
    DataError if it is missing or cannot be read, StorageError if the address cannot be.
    """
    if is_address(source):
        name, split = split_of(source)
        source = local_copy(name) + (f":{split}" if name != source else "")
    if is_file_of_rows(source):
        path = Path(source).expanduser()
        if not path.is_file():
            raise DataError(f"{source}: no such file.")
        read = {".parquet": _parquet, ".json": _json, ".jsonl": _json_lines}[path.suffix.lower()]
        return read(path)
    name, split = split_of(source)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _load_dataset(source, str(folder), split, None)
    return read_hub(name, split)


def read_hub(name: str, split: str, config: str | None = None) -> Iterator[tuple[str, DatasetRow]]:
    """(where, row) for every row of a split, or a part of one, of a dataset on the hub."""
    if not may_be_on_hub(name):
        raise DataError(f"{name}: not a {', '.join(SUFFIXES)} file, not a folder, not a dataset's name on the hub.")
    return _load_dataset(name if split == "train" else f"{name}:{split}", name, split, config)


def _parquet(path: Path) -> Iterator[tuple[str, DatasetRow]]:
    """Read with pyarrow: `datasets` does too, but copies the file into the user's cache and imports torch."""
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(_BATCH_ROWS):
                for row in _python_rows(batch, path, number):
                    number += 1
                    yield f"{path}, row {number}", _without_absent(row)
    except DataError:
        raise
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(f"{path}, after row {number}: {error}") from error


def _python_rows(batch: pa.RecordBatch, path: Path, before: int) -> list[DatasetRow]:
    """The rows of a batch that `before` others precede. Raises DataError naming a value that Python does not have."""
    try:
        return batch.to_pylist()
    except _NOT_PYTHON:
        for column, values in zip(batch.schema.names, batch.columns, strict=True):
            for number, value in enumerate(values, before + 1):
                try:
                    value.as_py()
                except _NOT_PYTHON as error:
                    raise DataError(
                        f"{path}, row {number}: column {column!r} holds a value of type {value.type} that Python does "
                        f"not have ({error}); store it as text."
                    ) from error
        raise


def _without_absent(row: DatasetRow) -> DatasetRow:
    """Remove keys that are null from conversations and tools: a table's mappings have the union of all rows' keys."""
    changed = {column: _without_nulls(row[column]) for column in ("prompt", "messages", "tools") if row.get(column)}
    return {**row, **changed} if changed else row


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def as_dataset(table: pa.Table) -> Any:
    """A table as a `datasets.Dataset`."""
    from datasets import Dataset

    return Dataset(table)


def _load_dataset(source: str, name: str, split: str, config: str | None) -> Iterator[tuple[str, DatasetRow]]:
    from datasets import load_dataset  # takes a second to import; files do not need it

    try:
        dataset = load_dataset(name, config, split=split)
    except Exception as error:  # datasets, its filesystem layers and the hub's client raise many kinds
        raise DataError(f"{source}: could not be loaded as a dataset with split {split!r}: {error}") from error
    number = 0
    try:
        for number, row in enumerate(dataset, 1):
            yield f"{source}, row {number}", _without_absent(row)
    except Exception as error:  # rows are decoded here, images by their own libraries
        raise DataError(f"{source}, after row {number}: {type(error).__name__}: {error}") from error


def _json_lines(path: Path) -> Iterator[tuple[str, DatasetRow]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{path}, line {number}"
            if line.strip(WHITESPACE):
                yield where, _checked(where, _parsed(where, line))


def _json(path: Path) -> Iterator[tuple[str, DatasetRow]]:
    """A list of rows, or JSON lines, which `datasets` also accepts in a file with this suffix."""
    with path.open("rb") as file:
        listed = file.read(4096).lstrip(WHITESPACE).startswith(b"[")
    if not listed:
        yield from _json_lines(path)
        return
    for number, row in enumerate(_parsed(str(path), path.read_bytes()), 1):
        where = f"{path}, row {number}"
        yield where, _checked(where, row)


def _parsed(where: str, data: bytes) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: byte {error.start} is not UTF-8 ({error.reason}); convert the file.") from error
    except (ValueError, RecursionError) as error:  # also a number of more digits than Python converts
        raise DataError(f"{where}: not JSON: {error}.") from error


def _checked(where: str, row: Any) -> DatasetRow:
    if not isinstance(row, dict):
        raise DataError(f"{where}: a row is an object of columns, got {type(row).__name__}.")
    return row
