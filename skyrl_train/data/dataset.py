"""Prompts to train and evaluate on, in SkyRL's row format: files of rows, their prompts, and the order of a run.

    {"prompt": [{"role": "user", "content": "..."}], "env_class": "gsm8k", "data_source": "openai/gsm8k",
     "reward_spec": {"method": "rule", "ground_truth": "72"}, ...}

Policy: a prompt of more than `max_prompt_length` tokens is left out and counted; any other unusable row stops the run
with an error that names file and row.
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
"""No tokenizer has longer tokens, so a prompt with more characters than this allows is too long without encoding it."""


@dataclass(frozen=True)
class PromptDataset:
    """The prompts that were kept, in file order."""

    prompts: tuple[Prompt, ...]
    too_long: int
    """Number of rows left out because their prompt has too many tokens."""

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the prompts that were kept, their extras and their order."""
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
    """Read `sources` (see `read_rows`) one after the other.

    Args:
        length: Number of tokens of a prompt for the model; see `experiment.data.build_prompts`.
        max_prompt_length: In tokens; longer prompts are left out.
        default_env_class: The env_class of rows that have none.
        sample_s: Read only as far as the first prompt that is kept, for at most so many seconds: then the dataset may
            be empty. None reads everything.

    A prompt's uid is its row number over all sources, from 0, counting rows that are left out. Raises DataError for an
    unusable row, a source without rows, or if no prompt is short enough.
    """
    kept: list[Prompt] = []
    number, shortest = 0, None
    begun = time.monotonic()
    for source in sources:
        before = number
        for where, row in read_rows(source):
            prompt = _prompt(where, str(number), row, default_env_class)
            number += 1
            tokens = _length(where, prompt, count_tokens, max_prompt_length)
            shortest = tokens if shortest is None else min(shortest, tokens)
            if tokens <= max_prompt_length:
                kept.append(prompt)
            if first_prompt_timeout_s is not None and (kept or time.monotonic() - begun > first_prompt_timeout_s):
                return PromptDataset(tuple(kept), number - len(kept))
        if number == before:
            raise DataError(f"{source}: has no rows.")
    if not kept:
        raise DataError(
            f"{', '.join(sources) or 'no data files'}: none of {number} prompts has at most {max_prompt_length} tokens"
            f"{f' (the shortest has about {shortest})' if shortest else ''}; raise trainer.max_prompt_length."
        )
    return PromptDataset(tuple(kept), number - len(kept))


def _prompt(where: str, uid: str, row: DatasetRow, default_env_class: str) -> Prompt:
    if row.get("prompt") is None:
        raise DataError(
            f"{where}: no 'prompt' among its columns {sorted(row)}; it must be a list of messages, "
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
        raise DataError(f"{where}: env_class is {env_class!r:.80}, not a name.")
    return Prompt(uid, messages, env_class, extras, str(row.get("data_source") or "unknown"), where)


def _check_answer(where: str, extras: dict[str, Any]) -> None:
    """A rule needs an answer to compare with: with null, all rewards would be 0."""
    if "reward_spec" not in extras:
        return
    spec = extras["reward_spec"]
    by_rule = isinstance(spec, dict) and spec.get("method", "rule") == "rule"
    if spec is None or (by_rule and spec.get("ground_truth") is None):
        raise DataError(f"{where}: reward_spec has no ground_truth; give every row an answer or remove the row.")


def parse_max_turns(where: str, extras: Mapping[str, Any]) -> int | None:
    """A row's own bound on turns; None if it has none. Raises DataError if it is not a whole number of at least 1."""
    own = extras.get("max_turns")
    if own is None or (isinstance(own, float) and math.isnan(own)):  # how tables say that a row has none
        return None
    whole = (isinstance(own, int) and not isinstance(own, bool)) or (isinstance(own, float) and own.is_integer())
    if not whole or own < 1:
        raise DataError(f"{where}: max_turns={own!r:.80} must be a whole number of at least 1, or null.")
    return int(own)


def _length(where: str, prompt: Prompt, count_tokens: Callable[[Prompt], int], limit: int) -> int:
    characters = sum(len(message["content"]) for message in prompt.messages)
    if characters > limit * MAX_CHARACTERS_PER_TOKEN:
        return characters // MAX_CHARACTERS_PER_TOKEN
    try:
        return count_tokens(prompt)
    except DataError as error:
        raise DataError(f"{where}: column 'prompt': {error}") from error


# -- rows of files -----------------------------------------------------------------------------------------------------

DatasetRow = dict[str, Any]
WHITESPACE = b"\xef\xbb\xbf \t\r\n"
"""White space, including the byte order mark."""
_BATCH_ROWS = 4096
"""Rows of a parquet file that become Python values at once: those who want the first need not wait for many."""
_CONVERSION_ERRORS = (ValueError, OverflowError, LookupError)
"""What text that is not UTF-8, a date beyond Python's and an unknown time zone raise."""


def read_rows(source: str) -> Iterator[tuple[str, DatasetRow]]:
    """(where, row) for every row of `source`; `where` names the file and the line or row, from 1, for error messages.

    A source is a .parquet, .json or .jsonl file, a folder that `datasets` can load, or a name on the hub; the latter
    two may end in ":split" ("train" otherwise). Files and folders may be at an address, see `storage.copies`. Raises
    DataError if it is missing or cannot be read, StorageError if the address cannot be.
    """
    if is_uri(source):
        name, split = parse_split(source)
        source = local_copy(name) + (f":{split}" if name != source else "")
    if is_dataset_file(source):
        path = Path(source).expanduser()
        if not path.is_file():
            raise DataError(f"{source}: no such file.")
        read = {".parquet": _parquet, ".json": _json, ".jsonl": _json_lines}[path.suffix.lower()]
        return read(path)
    name, split = parse_split(source)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _load_dataset(source, str(folder), split, None)
    return read_hub_dataset(name, split)


def read_hub_dataset(name: str, split: str, config: str | None = None) -> Iterator[tuple[str, DatasetRow]]:
    """(where, row) for every row of a split, or a part of one, of a dataset on the hub."""
    if not may_be_hub_name(name):
        raise DataError(
            f"{name}: not a {', '.join(DATASET_SUFFIXES)} file, not a folder, not a dataset's name on the hub."
        )
    return _load_dataset(name if split == "train" else f"{name}:{split}", name, split, config)


def _parquet(path: Path) -> Iterator[tuple[str, DatasetRow]]:
    """Read with pyarrow: `datasets` does too, but copies the file into the user's cache and imports torch."""
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(_BATCH_ROWS):
                for row in _python_rows(batch, path, number):
                    number += 1
                    yield f"{path}, row {number}", _drop_null_keys(row)
    except DataError:
        raise
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(f"{path}, after row {number}: {error}") from error


def _python_rows(batch: pa.RecordBatch, path: Path, before: int) -> list[DatasetRow]:
    """The rows of a batch that `before` others precede. Raises DataError naming a value that Python does not have."""
    try:
        return batch.to_pylist()
    except _CONVERSION_ERRORS:
        for column, values in zip(batch.schema.names, batch.columns, strict=True):
            for number, value in enumerate(values, before + 1):
                try:
                    value.as_py()
                except _CONVERSION_ERRORS as error:
                    raise DataError(
                        f"{path}, row {number}: column {column!r} holds a value of type {value.type} that Python does "
                        f"not have ({error}); store it as text."
                    ) from error
        raise


def _drop_null_keys(row: DatasetRow) -> DatasetRow:
    """Remove keys that are null from conversations and tools: a table's mappings have the union of all rows' keys."""
    changed = {column: _drop_nulls(row[column]) for column in ("prompt", "messages", "tools") if row.get(column)}
    return {**row, **changed} if changed else row


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _drop_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_drop_nulls(item) for item in value]
    return value


def to_hf_dataset(table: pa.Table) -> Any:
    """Return a table as a `datasets.Dataset`. No other module imports `datasets`."""
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


def _json_lines(path: Path) -> Iterator[tuple[str, DatasetRow]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{path}, line {number}"
            if line.strip(WHITESPACE):
                yield where, _check_row(where, _parse_json(where, line))


def _json(path: Path) -> Iterator[tuple[str, DatasetRow]]:
    """A list of rows, or JSON lines, which `datasets` also accepts in a file with this suffix."""
    with path.open("rb") as file:
        listed = file.read(4096).lstrip(WHITESPACE).startswith(b"[")
    if not listed:
        yield from _json_lines(path)
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
        raise DataError(f"{where}: not JSON: {error}.") from error


def _check_row(where: str, row: Any) -> DatasetRow:
    if not isinstance(row, dict):
        raise DataError(f"{where}: a row is an object of columns, got {type(row).__name__}.")
    return row


# -- the order of a run ------------------------------------------------------------------------------------------------


class PromptOrder:
    """The order in which a run goes through the rows of its dataset: every epoch is another permutation of them.

    Only the seed and the position in the run determine the row, so a resumed run needs no state of the order.

    Example:
        order = PromptOrder(size=100, seed=0)
        first_epoch = [order.row(index) for index in range(100)]
    """

    def __init__(self, size: int, seed: int):
        if size < 1:
            raise DataError("an order needs at least one row, got none.")
        self.size = size
        self.seed = seed
        self._permutation = lru_cache(maxsize=2)(self._permute)

    def row(self, index: int) -> int:
        """Return the row at `index`, which counts from the start of the run over all epochs."""
        epoch, position = divmod(index, self.size)
        return int(self._permutation(epoch)[position])

    def _permute(self, epoch: int) -> np.ndarray:
        return np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(self.size)
