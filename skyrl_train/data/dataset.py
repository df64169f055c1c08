"""Datasets of prompts in SkyRL's row format: reading files, building prompts, and the order of prompts in a run.

    {"prompt": [{"role": "user", "content": "..."}], "env_class": "gsm8k", "data_source": "openai/gsm8k",
     "reward_spec": {"method": "rule", "ground_truth": "72"}, ...}

A prompt of more than `max_prompt_length` tokens is left out and counted. Any other invalid row stops the run with an
error that names the file and the row.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from skyrl_train.config.locations import DATASET_SUFFIXES, is_dataset_file, is_uri, may_be_hub_name, parse_split
from skyrl_train.data.messages import Prompt, check_json, parse_messages
from skyrl_train.errors import DataError
from skyrl_train.storage.download_cache import local_copy

MAX_CHARACTERS_PER_TOKEN = 256
"""Upper bound of the length of a token. A prompt with more characters per allowed token is too long and is not
encoded."""


@dataclass(frozen=True)
class PromptDataset:
    """The prompts of a dataset that are short enough, in file order."""

    prompts: tuple[Prompt, ...]
    too_long: int
    """Number of rows that were left out because their prompts have too many tokens."""

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the prompts, their extras and their order, as 32 hexadecimal digits."""
        digest = hashlib.sha256()
        for prompt in self.prompts:
            row = [prompt.uid, prompt.messages, prompt.env_class, prompt.env_extras, prompt.data_source]
            digest.update(json.dumps(row, sort_keys=True, default=repr).encode() + b"\n")
        return digest.hexdigest()[:32]


def load_prompts(
    sources: Sequence[str],
    count_tokens: Callable[[Prompt], int],
    max_prompt_length: int,
    default_env_class: str,
    *,
    first_prompt_timeout_s: float | None = None,
) -> PromptDataset:
    """Read the prompts of sources (see `read_rows`), source by source, in the order of their rows.

    The uid of a prompt is its row number over all sources, from 0, including rows that are left out.

    Args:
        sources: Files, folders or names on the hub.
        count_tokens: Function that returns the number of tokens of a prompt; see `experiment.data.build_prompts`.
        max_prompt_length: Maximum number of tokens; longer prompts are left out.
        default_env_class: The env_class of rows that have none.
        first_prompt_timeout_s: Stop after the first prompt that is short enough, or after this number of seconds. The
            dataset may then be empty. None reads all sources.

    Raises:
        DataError: A row is invalid, a source has no rows, or no prompt is short enough.
    """
    prompts: list[Prompt] = []
    number, shortest = 0, None
    begun = time.monotonic()
    for source in sources:
        before = number
        for where, row in read_rows(source):
            prompt = _parse_prompt(where, str(number), row, default_env_class, (source, number - before))
            number += 1
            tokens = _count_prompt_tokens(where, prompt, count_tokens, max_prompt_length)
            shortest = tokens if shortest is None else min(shortest, tokens)
            if tokens <= max_prompt_length:
                prompts.append(prompt)
            if first_prompt_timeout_s is not None and (prompts or time.monotonic() - begun > first_prompt_timeout_s):
                return PromptDataset(tuple(prompts), number - len(prompts))
        if number == before:
            raise DataError(f"{source}: has no rows. Give a file with at least one row.")
    if not prompts:
        raise DataError(
            f"{', '.join(sources) or 'no data files'}: none of {number} prompts has at most {max_prompt_length} tokens"
            f"{f' (the shortest has about {shortest})' if shortest else ''}; raise trainer.max_prompt_length."
        )
    return PromptDataset(tuple(prompts), number - len(prompts))


def _parse_prompt(where: str, uid: str, row: DatasetRow, default_env_class: str, origin: tuple[str, int]) -> Prompt:
    if row.get("prompt") is None:
        raise DataError(
            f"{where}: has no column 'prompt', only {sorted(row)}. It must be a list of messages, "
            '[{"role": "user", "content": "..."}].'
        )
    messages = parse_messages(where, "prompt", row["prompt"])
    extras = {key: value for key, value in row.items() if key not in ("prompt", "env_class")}
    for column, value in extras.items():
        check_json(where, column, value)
    _check_answer(where, extras)
    parse_max_turns(where, extras)
    env_class = row.get("env_class") or default_env_class
    if not isinstance(env_class, str):
        raise DataError(f"{where}: env_class is {env_class!r:.80}; it must be the name of an environment.")
    return Prompt(uid, messages, env_class, extras, str(row.get("data_source") or "unknown"), where, *origin)


def _check_answer(where: str, extras: dict[str, Any]) -> None:
    """Raise DataError if a rule has no answer to compare with, since all rewards would be 0."""
    if "reward_spec" not in extras:
        return
    spec = extras["reward_spec"]
    is_rule = isinstance(spec, dict) and spec.get("method", "rule") == "rule"
    if spec is None or (is_rule and spec.get("ground_truth") is None):
        raise DataError(f"{where}: reward_spec has no ground_truth. Add the answer, or remove the row.")


def parse_max_turns(where: str, extras: Mapping[str, Any]) -> int | None:
    """Return a row's own maximum number of turns, or None if the row has none.

    Args:
        where: File and row, for errors.
        extras: The row's columns.

    Raises:
        DataError: The column `max_turns` is not an integer of at least 1.
    """
    value = extras.get("max_turns")
    if value is None or (isinstance(value, float) and math.isnan(value)):  # NaN is a missing value of a table
        return None
    is_integer = (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, float) and value.is_integer()
    )
    if not is_integer or value < 1:
        raise DataError(f"{where}: max_turns={value!r:.80} must be an integer of at least 1, or null.")
    return int(value)


def _count_prompt_tokens(where: str, prompt: Prompt, count_tokens: Callable[[Prompt], int], limit: int) -> int:
    """Return the number of tokens of a prompt, or a lower bound above `limit` if the prompt is much too long."""
    characters = sum(len(message["content"]) for message in prompt.messages)
    if characters > limit * MAX_CHARACTERS_PER_TOKEN:
        return characters // MAX_CHARACTERS_PER_TOKEN
    try:
        return count_tokens(prompt)
    except DataError as error:
        raise DataError(f"{where}: column 'prompt': {error}") from error


# -- Reading rows ------------------------------------------------------------------------------------------------------

DatasetRow = dict[str, Any]
WHITESPACE = b"\xef\xbb\xbf \t\r\n"
"""White space, including the byte order mark."""
_BATCH_ROWS = 4096
"""Number of rows of a parquet file that are converted to Python values at once. It bounds the wait for the first."""
_CONVERSION_ERRORS = (ValueError, OverflowError, LookupError)
"""Errors raised by text that is not UTF-8, a date beyond Python's range, and an unknown time zone."""


def read_rows(source: str) -> Iterator[tuple[str, DatasetRow]]:
    """Return an iterator over the rows of a source.

    Args:
        source: A .parquet, .json or .jsonl file, a folder that `datasets` can load, or the name of a dataset on the
            hub. A folder or name may end in ":split"; the default is "train". Files and folders may be URIs, which are
            downloaded first (see `storage.download_cache`).

    Returns:
        Iterator over pairs (where, row): the file and the row or line, from 1, for messages, and the row's columns.

    Raises:
        DataError: The source does not exist. The iterator raises it for a row that cannot be read.
        StorageError: The URI cannot be downloaded.
    """
    if is_uri(source):
        name, split = parse_split(source)
        source = local_copy(name) + (f":{split}" if name != source else "")
    if is_dataset_file(source):
        path = Path(source).expanduser()
        if not path.is_file():
            raise DataError(f"{source}: no such file. Correct the path.")
        read = {".parquet": _read_parquet, ".json": _read_json, ".jsonl": _read_json_lines}[path.suffix.lower()]
        return read(path)
    name, split = parse_split(source)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _load_dataset(source, str(folder), split, None)
    return read_hub_dataset(name, split)


def read_hub_dataset(name: str, split: str, config: str | None = None) -> Iterator[tuple[str, DatasetRow]]:
    """Return an iterator over the rows of a dataset on the Hugging Face hub, which downloads it when the first row is
    read.

    Args:
        name: Name of the dataset.
        split: Name of a split, or a part of one such as train[:1000].
        config: Configuration of the dataset; None if it has only one.

    Returns:
        Iterator over pairs (where, row): the location of the row for messages, such as "NAME, row 7", and its columns.

    Raises:
        DataError: The name does not have the form of a name on the hub. The iterator raises it if the dataset cannot be
            loaded or a row cannot be read.
    """
    if not (may_be_hub_name(name) or Path(name).is_dir()):
        raise DataError(
            f"{name}: there is no such folder, and this is neither a {', '.join(DATASET_SUFFIXES)} file nor the name "
            "of a dataset on the hub. Correct the path or name."
        )
    return _load_dataset(name if split == "train" else f"{name}:{split}", name, split, config)


def _read_parquet(path: Path) -> Iterator[tuple[str, DatasetRow]]:
    """Read a parquet file with pyarrow. `datasets` would copy it to the user's cache and import torch."""
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(_BATCH_ROWS):
                for row in _to_python_rows(batch, path, number):
                    number += 1
                    yield f"{path}, row {number}", _drop_null_keys(row)
    except DataError:
        raise
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(f"{path}, after row {number}: {error}") from error


def _to_python_rows(batch: pa.RecordBatch, path: Path, before: int) -> list[DatasetRow]:
    """Convert the rows of a batch, which `before` rows precede. Raises DataError that names a value without a type."""
    try:
        return batch.to_pylist()
    except _CONVERSION_ERRORS:
        for column, values in zip(batch.schema.names, batch.columns, strict=True):
            for number, value in enumerate(values, before + 1):
                try:
                    value.as_py()
                except _CONVERSION_ERRORS as error:
                    raise DataError(
                        f"{path}, row {number}: column {column!r} has a value of type {value.type} that cannot be "
                        f"converted to a Python value ({error}). Store it as text."
                    ) from error
        raise


def _drop_null_keys(row: DatasetRow) -> DatasetRow:
    """Remove null keys from conversations and tools, since a mapping of a table has the keys of all rows."""
    changed = {column: _drop_nulls(row[column]) for column in ("prompt", "messages", "tools") if row.get(column)}
    return {**row, **changed} if changed else row


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _drop_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_drop_nulls(item) for item in value]
    return value


def to_hf_dataset(table: pa.Table) -> Any:
    """Return a table as a `datasets.Dataset`. This imports `datasets`, which only this module does."""
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
            yield f"{source}, row {number}", _drop_null_keys(row)
    except Exception as error:  # rows are decoded here, images by their own libraries
        raise DataError(f"{source}, after row {number}: {type(error).__name__}: {error}") from error


def _read_json_lines(path: Path) -> Iterator[tuple[str, DatasetRow]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{path}, line {number}"
            if line.strip(WHITESPACE):
                yield where, _check_row(where, _parse_json(where, line))


def _read_json(path: Path) -> Iterator[tuple[str, DatasetRow]]:
    """Read a .json file: a list of rows, or JSON lines, which `datasets` also accepts."""
    with path.open("rb") as file:
        is_list = file.read(4096).lstrip(WHITESPACE).startswith(b"[")
    if not is_list:
        yield from _read_json_lines(path)
        return
    for number, row in enumerate(_parse_json(str(path), path.read_bytes()), 1):
        where = f"{path}, row {number}"
        yield where, _check_row(where, row)


def _parse_json(where: str, data: bytes) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: byte {error.start} is not UTF-8 ({error.reason}); convert the file.") from error
    except (ValueError, RecursionError) as error:  # also a number of more digits than Python converts
        raise DataError(f"{where}: not JSON: {error}. Correct the line.") from error


def _check_row(where: str, row: Any) -> DatasetRow:
    if not isinstance(row, dict):
        raise DataError(f"{where}: a row must be an object of columns, got {type(row).__name__}.")
    return row


# -- The order of prompts ----------------------------------------------------------------------------------------------


class PromptOrder:
    """The order of a dataset's rows in a run: every epoch is a different permutation of the rows.

    The row at a position depends on the seed and the position alone, so a resumed run needs no saved state.

    Args:
        size: Number of rows.
        seed: Seed of the permutations.

    Raises:
        DataError: There are no rows.

    Example:
        order = PromptOrder(size=100, seed=0)
        first_epoch = [order.row(index) for index in range(100)]
    """

    def __init__(self, size: int, seed: int):
        if size < 1:
            raise DataError(f"The order of prompts needs at least one row, got {size}.")
        self.size = size
        self.seed = seed
        self._permutation = lru_cache(maxsize=2)(self._permute)

    def row(self, index: int) -> int:
        """Return the index of the row at a position, which counts from the start of the run over all epochs."""
        epoch, position = divmod(index, self.size)
        return int(self._permutation(epoch)[position])

    def _permute(self, epoch: int) -> np.ndarray:
        return np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(self.size)
