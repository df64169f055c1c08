"""Dataset scripts: convert another dataset to train.parquet and validation.parquet in SkyRL's row format.

    def convert(where, row, split, index): ...      # one of SkyRL's rows, or None to leave it out; DataError names it
    conversion_main(convert, doc=__doc__, hub="openai/gsm8k", hub_config="main")

gives a script its --input FOLDER|HUB, --output FOLDER and --limit N.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from skyrl_train.atomic_files import atomic_write
from skyrl_train.data.dataset import DATASET_SUFFIXES, DatasetRow, read_hub_dataset, read_rows
from skyrl_train.errors import DataError
from skyrl_train.terminal import print_stdout

Convert = Callable[[str, DatasetRow, str, int], DatasetRow | None]
"""(where, row, split of the source, its index there from 0) -> a row in SkyRL's format, or None to leave it out."""
PARQUET_ERRORS = (pa.ArrowException, OSError, UnicodeEncodeError, OverflowError)
"""What parquet does not hold, as pyarrow says it: half a surrogate pair, numbers of more than 64 bits, mixed types."""
SPLITS = {"train": "train", "test": "validation"}


def conversion_main(
    convert: Convert,
    *,
    doc: str | None,
    hub: str | Mapping[str, str],
    hub_config: str | Mapping[str, str] | None = None,
    splits: Mapping[str, str] = SPLITS,
) -> None:
    """The `main` of a dataset script. An error in the data ends it with one line that names file and row.

    Args:
        doc: The script's docstring, for --help.
        hub: Dataset on the hub, or a mapping from split to dataset if the splits are in several datasets.
        hub_config: The dataset's configuration, if it has several, or a mapping from split to configuration.
        splits: Split of the source -> name of the parquet file. A folder of local files has <split>.jsonl, .json or
            .parquet for each split.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    local = ", ".join(f"{split}.jsonl" for split in splits)
    parser.add_argument("--input", help=f"folder with {local} (or .json, .parquet), or a hub name; default: {hub}")
    parser.add_argument("--output", required=True, type=Path, help="folder for the parquet files")
    parser.add_argument("--limit", type=int, help="rows of each split at most")
    arguments = parser.parse_args()
    try:
        for split, name in splits.items():
            config = hub_config.get(split) if isinstance(hub_config, Mapping) else hub_config
            source = source_rows(arguments.input or (hub if isinstance(hub, str) else hub[split]), split, config)
            kept, left_out = convert_rows(convert, source, split, arguments.limit)
            write_split(arguments.output, name, kept, left_out)
    except DataError as error:
        sys.exit(str(error))


def source_rows(source: str, split: str, hub_config: str | None = None) -> Iterator[tuple[str, DatasetRow]]:
    """(where, row) for every row of one split. `source` is a folder of local files, or a hub dataset as name[:split].

    On the hub, the split may be a part of one: owner/name:train[:1000].
    """
    folder = Path(source).expanduser()
    if not folder.is_dir():
        name, _, named = source.partition(":")
        return read_hub_dataset(name, named or split, hub_config)
    files = [folder / f"{split}{suffix}" for suffix in (".jsonl", ".json", ".parquet")]
    found = [file for file in files if file.is_file()]
    if len(found) != 1:
        raise DataError(
            f"{folder}: needs exactly one of {', '.join(f'{split}{suffix}' for suffix in DATASET_SUFFIXES)}, "
            f"has {', '.join(file.name for file in found) or 'none'}."
        )
    return read_rows(str(found[0]))


def convert_rows(
    convert: Convert, source: Iterable[tuple[str, DatasetRow]], split: str, limit: int | None = None
) -> tuple[list[DatasetRow], int]:
    """Return the rows that were kept, at most `limit`, and how many were left out among those that were read.

    Raises DataError naming a row that parquet cannot hold.
    """
    kept: list[DatasetRow] = []
    left_out = 0
    for index, (where, row) in enumerate(source):
        if limit is not None and len(kept) >= limit:
            break
        new = convert(where, row, split, index)
        if new is None:
            left_out += 1
            continue
        try:
            pa.array([new])
        except PARQUET_ERRORS as error:
            raise DataError(f"{where}: parquet cannot hold what it becomes ({error}); mend or remove it.") from error
        kept.append(new)
    return kept, left_out


def write_split(folder: Path, name: str, rows: list[DatasetRow], left_out: int = 0) -> Path:
    """Write `rows` as <folder>/<name>.parquet and print the result. Raises DataError if a column mixes types."""
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
    """The value of a column that must be non-empty text. Raises DataError otherwise."""
    value = row.get(column)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}: needs text in the column {column!r}, got {value!r:.120}; columns: {sorted(row)}.")
    return value
