"""Building blocks of dataset scripts, which convert another dataset to parquet files in SkyRL's row format.

    def convert(where, row, split, index): ...      # return a row in SkyRL's format, or None to leave the row out
    conversion_main(convert, doc=__doc__, hub="openai/gsm8k", hub_config="main")

The script then has the flags --input FOLDER|HUB, --output FOLDER and --limit N, and writes train.parquet and
validation.parquet. `convert` raises DataError for a row that it cannot convert.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from skyrl_train.atomic_files import atomic_write
from skyrl_train.data.dataset import DATASET_SUFFIXES, DatasetRow, read_hub_dataset, read_rows
from skyrl_train.errors import DataError
from skyrl_train.storage.hugging_face_hub import REQUEST_TIMEOUT_S, hub_responds
from skyrl_train.terminal import print_stdout

Convert = Callable[[str, DatasetRow, str, int], DatasetRow | None]
"""Function (where, row, split of the source, index of the row in it from 0) -> a row in SkyRL's format, or None to
leave the row out. `where` names the file and the row in error messages."""
PARQUET_ERRORS = (pa.ArrowException, OSError, UnicodeEncodeError, OverflowError)
"""Errors that pyarrow raises for values that parquet cannot store: half a surrogate pair, numbers of more than 64 bits,
columns of mixed types."""
SPLITS = {"train": "train", "test": "validation"}


def conversion_main(
    convert: Convert,
    *,
    doc: str | None,
    hub: str | Mapping[str, str],
    hub_config: str | Mapping[str, str] | None = None,
    splits: Mapping[str, str] = SPLITS,
) -> None:
    """Run a dataset script: parse `sys.argv`, convert all splits and write their parquet files.

    Args:
        convert: Function that converts one row.
        doc: The script's docstring, for --help.
        hub: Dataset on the hub, or a mapping from split to dataset if the splits are in several datasets.
        hub_config: The dataset's configuration, if it has several, or a mapping from split to configuration. None: the
            dataset has only one.
        splits: Split of the source -> name of the parquet file. A folder of local files has <split>.jsonl, .json or
            .parquet for each split.

    Raises:
        SystemExit: The data or the arguments are invalid. The message for data is one line that names file and row.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    files = f"{', '.join(f'{split}.jsonl' for split in splits)} (or .json, .parquet)"
    parser.add_argument("--input", help=f"folder with {files}, or name of a dataset on the hub; default: {hub}")
    output = ("--output", "--output_dir")  # the second is SkyRL's name
    parser.add_argument(*output, dest="output", required=True, type=Path, help="folder for the parquet files")
    parser.add_argument("--limit", type=int, help="maximum number of rows per split")
    arguments = parser.parse_args()
    try:
        for split, name in splits.items():
            config = hub_config.get(split) if isinstance(hub_config, Mapping) else hub_config
            source = arguments.input or (hub if isinstance(hub, str) else hub[split])
            source_split = source_rows(source, split, config)
            if not Path(source).expanduser().is_dir():
                source_split = _load_from_hub(source, source_split, files)
            rows, left_out = convert_rows(convert, source_split, split, arguments.limit)
            write_split(arguments.output, name, rows, left_out)
    except DataError as error:
        sys.exit(str(error))


def _load_from_hub(source: str, rows: Iterator[tuple[str, DatasetRow]], files: str) -> Iterator[tuple[str, DatasetRow]]:
    """Load a dataset by reading its first row, and return all rows.

    Args:
        source: Name of the dataset, or name:split.
        rows: The rows, which are not loaded before the first one is read.
        files: Files that a folder of --input needs, for the messages.

    Raises:
        DataError: The hub does not respond, or the dataset cannot be loaded. The message names --input.
    """
    from huggingface_hub import constants

    advice = f"Pass --input FOLDER with {files} to convert local files."
    if not constants.HF_HUB_OFFLINE and not hub_responds(source.partition(":")[0]):
        raise DataError(
            f"{source}: the Hugging Face hub does not respond within {REQUEST_TIMEOUT_S:g} s. {advice} "
            "HF_HUB_OFFLINE=1 uses a dataset in this machine's cache."
        )
    try:
        first = list(itertools.islice(rows, 1))
    except DataError as error:
        raise DataError(f"{str(error).rstrip('.')}. {advice}") from error
    return itertools.chain(first, rows)


def source_rows(source: str, split: str, hub_config: str | None = None) -> Iterator[tuple[str, DatasetRow]]:
    """Return an iterator over the rows of one split of a source.

    Args:
        source: Folder of local files, or a dataset on the hub as name[:split]. The split of a name may be a part of a
            split, owner/name:train[:1000], and replaces the argument `split`.
        split: Name of the split; in a folder, of the file <split>.jsonl, .json or .parquet.
        hub_config: Configuration of a dataset on the hub; None if the dataset has only one, or for a folder.

    Returns:
        Iterator over pairs (where, row): the location of the row for messages, such as "FILE, row 7", and its columns.

    Raises:
        DataError: The folder does not contain exactly one file of the split, or the name is not valid. The iterator
            raises DataError for rows that cannot be read.
    """
    folder = Path(source).expanduser()
    if not folder.is_dir():
        name, _, source_split = source.partition(":")
        return read_hub_dataset(name, source_split or split, hub_config)
    candidates = [folder / f"{split}{suffix}" for suffix in (".jsonl", ".json", ".parquet")]
    files = [file for file in candidates if file.is_file()]
    if len(files) != 1:
        raise DataError(
            f"{folder}: needs exactly one of {', '.join(f'{split}{suffix}' for suffix in DATASET_SUFFIXES)}, "
            f"has {', '.join(file.name for file in files) or 'none'}."
        )
    return read_rows(str(files[0]))


def convert_rows(
    convert: Convert, source: Iterable[tuple[str, DatasetRow]], split: str, limit: int | None = None
) -> tuple[list[DatasetRow], int]:
    """Convert the rows of a split.

    Args:
        convert: Function that converts one row, or returns None to leave it out.
        source: Pairs of the location of a row for messages, and the row.
        split: Name of the split, for `convert`.
        limit: Maximum number of converted rows; None converts all.

    Returns:
        The converted rows, and the number of rows that were read and left out.

    Raises:
        DataError: `convert` raised it, or parquet cannot store a converted row.
    """
    converted: list[DatasetRow] = []
    left_out = 0
    for index, (where, row) in enumerate(source):
        if limit is not None and len(converted) >= limit:
            break
        new = convert(where, row, split, index)
        if new is None:
            left_out += 1
            continue
        try:
            pa.array([new])
        except PARQUET_ERRORS as error:
            raise DataError(f"{where}: parquet cannot store the converted row ({error}); fix or remove it.") from error
        converted.append(new)
    return converted, left_out


def write_split(folder: Path, name: str, rows: list[DatasetRow], left_out: int = 0) -> Path:
    """Write rows as <folder>/<name>.parquet, and print the path and the number of rows.

    Args:
        folder: The folder, which is created if it does not exist.
        name: Name of the file without its ending.
        rows: The rows. Their columns are united.
        left_out: Number of rows that were left out, for the printed line.

    Returns:
        Path of the file.

    Raises:
        DataError: A column has values of different types, or the file cannot be written.
    """
    path = folder.expanduser() / f"{name}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    try:
        table = pa.table({column: pa.array([row.get(column) for row in rows]) for column in columns})
        with atomic_write(path, fsync=False) as handle:
            pq.write_table(table, handle)
    except PARQUET_ERRORS as error:
        raise DataError(f"{path}: {error}; every row needs the same types in the same columns.") from error
    print_stdout(f"{path}: {len(rows)} rows" + (f", {left_out} left out" if left_out else ""))
    return path


def text_column(where: str, row: DatasetRow, column: str) -> str:
    """Return the text in a column of a row.

    Args:
        where: Location of the row, such as "FILE, row 7", for the message.
        row: The row's columns.
        column: Name of the column.

    Raises:
        DataError: The column is missing, empty or not a text.
    """
    value = row.get(column)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}: needs text in the column {column!r}, got {value!r:.120}; columns: {sorted(row)}.")
    return value
