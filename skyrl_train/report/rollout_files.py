"""The rollouts that a run keeps: one Parquet file for each step, beside metrics.jsonl.

    rollouts/step_00000040.parquet   what step 40 trained on, one row a rollout (see COLUMNS)
    rollouts/vocabulary.parquet      what each token id reads as by itself

L below is the number of a rollout's response tokens, those between turns included.

Inside a file a token takes few bytes and little time. Most columns are stored as they are read. Three are not:

- trained is not stored: it follows from loss_spans.
- old_logprobs and ref_logprobs are stored by their difference to rollout_logprobs, which they are close to: that of
  the bit patterns, as integers, with the sign in the lowest bit ("old_logprobs_from_rollout"). It is exact, and its
  upper bytes are zeros.
- messages refer to the text where they repeat it: {"messages": [...], "text": [[1, 0, 900]]} says that the content of
  message 1 is text[0:900].

Log-probs look random to any compressor but for sign and exponent, so their bytes are stored by place, all first ones
before all second ones (BYTE_STREAM_SPLIT). Ids repeat as words do, advantages are the same all along a response, and
prompts that a group shares are within zstd's reach: these are stored as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from skyrl_train.atomic_files import atomic_write, fsync_folder
from skyrl_train.data.json_values import json_default
from skyrl_train.report.untrusted_files import MAX_STEP, open_untrusted, replace_non_finite

FOLDER = "rollouts"
_STEP_FILE = re.compile(r"step_([0-9]{8,10})\.parquet")

HIDDEN_TOKEN = -1
"""Stored in the place of the ids of tokens that spell a secret."""
_SPAN = [("start", pa.int32()), ("stop", pa.int32())]
_TURN = [
    *_SPAN,
    ("reward", pa.float64()),
    ("stop_reason", pa.string()),
    ("min_version", pa.int32()),
    ("max_version", pa.int32()),
    ("mean_version", pa.float64()),
    ("running_s", pa.float64()),
    ("environment_s", pa.float64()),
    ("tool_calls", pa.string()),
    ("observation_tokens", pa.int32()),
]
_RESTART = [("start", pa.int32()), ("prompt_ids", pa.list_(pa.int32()))]
COLUMNS = pa.schema(
    [
        ("step", pa.int32()),
        ("uid", pa.string()),
        ("group", pa.int32()),
        ("sample", pa.int32()),
        ("data_source", pa.string()),
        ("env_class", pa.string()),
        ("reward", pa.float64()),
        ("raw_reward", pa.float64()),
        ("turns", pa.list_(pa.struct(_TURN))),
        ("status", pa.string()),
        ("error", pa.string()),
        ("detail", pa.string()),
        ("stop_reason", pa.string()),
        ("temperature", pa.float64()),
        ("min_version", pa.int32()),
        ("max_version", pa.int32()),
        ("env_metrics", pa.string()),
        ("messages", pa.string()),
        ("text", pa.string()),
        ("env_extras", pa.string()),
        ("prompt_tokens", pa.int32()),
        ("response_tokens", pa.int32()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),
        ("loss_spans", pa.list_(pa.struct(_SPAN))),
        ("trained", pa.list_(pa.bool_())),
        ("scored_spans", pa.list_(pa.struct(_SPAN))),
        ("restarts", pa.list_(pa.struct(_RESTART))),
        ("rollout_logprobs", pa.list_(pa.float32())),
        ("old_logprobs", pa.list_(pa.float32())),
        ("ref_logprobs", pa.list_(pa.float32())),
        ("advantages", pa.list_(pa.float32())),
        ("token_rewards", pa.list_(pa.float32())),
    ]
)
"""The columns that the reader gives, whatever the files are like inside."""


def step_file(run: Path, step: int) -> Path:
    """Where the rollouts of a step are."""
    return Path(run) / FOLDER / f"step_{step:08d}.parquet"


def vocabulary_file(run: Path) -> Path:
    """Where the texts of token ids are."""
    return Path(run) / FOLDER / "vocabulary.parquet"


def write_rollouts(run: Path, step: int, tables: pa.Table | Iterable[pa.Table]) -> Path:
    """Write the rollouts of a step into a run's folder; the file appears whole, and replaces one of the same step.

    `tables`: one, or one after the other; columns of COLUMNS, of which those that are lacking are null. Raises OSError,
    and ValueError for other columns.
    """
    file = step_file(run, step)
    _write(file, ([tables] if isinstance(tables, pa.Table) else tables))
    return file


def write_vocabulary(run: Path, texts: Sequence[str]) -> Path:
    """Write what each token id, the place in `texts`, reads as. Raises OSError."""
    file = vocabulary_file(run)
    table = pa.table({"id": pa.array(range(len(texts)), pa.int32()), "text": pa.array(texts, pa.string())})
    with _atomic_write(file) as handle:
        pq.write_table(table, handle, compression="zstd", store_schema=False)
    return file


class RolloutReader:
    """Reads the rollouts of a run, which may be under way, has ended, or was copied from elsewhere.

    Example: `RolloutFiles(Path("runs/a")).table(columns=["uid", "reward"], filter=pc.field("reward") > 0.5)`
    """

    def __init__(self, run: Path):
        self._run = Path(run)

    def steps(self) -> list[int]:
        """The steps of which there are rollouts, in order."""
        folder = self._run / FOLDER
        names = (_STEP_FILE.fullmatch(path.name) for path in (folder.iterdir() if folder.is_dir() else ()))
        return sorted(step for match in names if match and (step := int(match[1])) <= MAX_STEP)

    def table(
        self,
        steps: Iterable[int] | None = None,
        columns: Sequence[str] | None = None,
        filter: pc.Expression | None = None,
    ) -> pa.Table:
        """The rollouts of these steps, in their order; all that there are by default.

        A step whose rollouts are gone meanwhile (see trainer.keep_rollouts_gb) is left out.

        Args:
            columns: Names of COLUMNS; all by default. Few are read much faster.
            filter: On columns that have no lists: `pc.field("reward") > 0.5`.

        Raises:
            ValueError: for a column that there is not.
            OSError: for a file that cannot be read: it is truncated, has text that is not UTF-8, or is no file at all.
        """
        names = COLUMNS.names if columns is None else list(columns)
        if unknown := [name for name in names if name not in COLUMNS.names]:
            raise ValueError(f"columns={unknown}: the columns of rollouts are {', '.join(COLUMNS.names)}.")
        wanted = pa.schema([COLUMNS.field(name) for name in names])
        found = [self._of_step(step, wanted, filter) for step in (self.steps() if steps is None else steps)]
        return pa.concat_tables([table for table in found if table is not None] or [wanted.empty_table()])

    def conversations(self, step: int) -> pa.Table:
        """For a search: text, and messages as JSON without what of them is in the text, which it refers to by numbers.

        A step that is gone has no rows.
        """
        wanted = pa.schema([COLUMNS.field(name) for name in ("text", "messages")])
        try:
            with open_untrusted(step_file(self._run, step)) as file, pq.ParquetFile(file) as parquet:
                return _checked(parquet.read(wanted.names)).select(wanted.names).cast(wanted)
        except FileNotFoundError:
            return wanted.empty_table()

    def vocabulary(self) -> dict[int, str]:
        """What each token id reads as by itself; empty if the run has not written it. Raises OSError."""
        try:
            with open_untrusted(vocabulary_file(self._run)) as file:
                found = _checked(pq.read_table(file, columns=["id", "text"])).drop_null()
                texts = found["text"].cast(pa.string()).to_pylist()
                return dict(zip(found["id"].cast(pa.int32()).to_pylist(), texts, strict=True))
        except FileNotFoundError:
            return {}

    def _of_step(self, step: int, wanted: pa.Schema, filter: pc.Expression | None) -> pa.Table | None:
        try:
            with open_untrusted(step_file(self._run, step)) as file, pq.ParquetFile(file) as parquet:
                stored = stored_columns(wanted.names, parquet.schema_arrow)
                if filter is None:  # a run may have thousands of files
                    return unpack_columns(_checked(parquet.read(stored)), wanted)
                file.seek(0)
                return unpack_columns(_checked(pq.read_table(file, columns=stored, filters=filter)), wanted)
        except FileNotFoundError:
            return None


def _checked(table: pa.Table) -> pa.Table:
    """Return what was read. Raises ArrowInvalid for offsets out of range and for text that is not UTF-8."""
    table.validate(full=True)
    return table


def _complete(table: pa.Table) -> pa.Table:
    """With all columns that are stored, in their order."""
    if unknown := [name for name in table.column_names if name not in COLUMNS.names]:
        raise ValueError(f"{unknown} are no columns of rollouts, which are {', '.join(COLUMNS.names)}.")
    schema = pa.schema([field for field in COLUMNS if field.name != DERIVED])
    there = {*table.column_names}
    return pa.table(
        [table[one.name].cast(one.type) if one.name in there else pa.nulls(len(table), one.type) for one in schema],
        schema=schema,
    )


def _write(file: Path, tables: Iterable[pa.Table]) -> None:
    with _atomic_write(file) as handle, ExitStack() as stack:
        writer = None
        for table in tables:
            stored = pack_columns(_complete(table))
            if writer is None:
                writer = stack.enter_context(pq.ParquetWriter(handle, stored.schema, **write_options(stored.schema)))
            writer.write_table(stored, row_group_size=max(1, len(stored)))


@contextmanager
def _atomic_write(file: Path) -> Iterator[BinaryIO]:
    """Open a file to write to, in a folder that is made if it is missing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(file) as handle:
        yield handle
    fsync_folder(file.parent.parent)  # which may have got the folder just now


# -- the layout inside files -------------------------------------------------------------------------------------------


DERIVED = "trained"
DELTA_BASE = "rollout_logprobs"
"""What other log-probs are stored by their difference to."""
DELTA_COLUMNS = ("old_logprobs", "ref_logprobs")
_SUFFIX = "_from_rollout"
_SHORTEST_REFERENCE = 16
"""Characters of a message that are worth a reference to the text."""
_LEVELS = {"text": 9, "messages": 3, "env_extras": 3, "response_ids": 6}
"""Of zstd, where a higher one than 1 saves more than it costs."""
_REPEATED = ("uid", "data_source", "env_class", "status", "error", "stop_reason", "env_metrics", "env_extras", "detail")
_PAGE_BYTES = 8 << 20
"""Of a page, beyond which the compressor forgets: a group's prompts are in one."""
_DICTIONARY_BYTES = 64 << 20
_MAX_RESPONSE = 1 << 24
"""Tokens of a response; more is damage, and would take the memory of the reader."""


def stored_columns(names: Sequence[str], schema: pa.Schema) -> list[str]:
    """The columns of a file with this schema from which those named are made."""
    found: set[str] = set()
    for name in names:
        if name == DERIVED:
            found |= {"loss_spans", "response_tokens"}
        elif name == "messages":
            found |= {"messages", "text"}
        elif name + _SUFFIX in schema.names:
            found |= {name + _SUFFIX, DELTA_BASE}
        else:
            found.add(name)
    return sorted(found & {*schema.names})


def pack_columns(table: pa.Table) -> pa.Table:
    """The columns to store for these rollouts."""
    for name in DELTA_COLUMNS:
        if name not in table.column_names:
            continue
        ours, theirs = (_one(table[column]) for column in (name, DELTA_BASE))
        offsets = _offsets(ours)
        if ours.null_count == 0 and theirs.null_count == 0 and offsets.equals(_offsets(theirs)):
            values = _bits(ours) - _bits(theirs)
            folded = pa.array((values << 1) ^ (values >> 31))
            place = table.column_names.index(name)
            table = table.set_column(place, name + _SUFFIX, pa.ListArray.from_arrays(offsets, folded))
    return table


def unpack_columns(table: pa.Table, wanted: pa.Schema) -> pa.Table:
    """The wanted columns of what is stored; null where it is of a version that did not have them."""
    return pa.table([_column(table, field) for field in wanted], schema=wanted)


def write_options(schema: pa.Schema) -> dict[str, Any]:
    """How Parquet stores packed rollouts: arguments of its writer."""
    leaves = {field.name: f"{field.name}.list.element" for field in schema if pa.types.is_list(field.type)}
    split = [leaf for name, leaf in leaves.items() if name.removesuffix(_SUFFIX) in (DELTA_BASE, *DELTA_COLUMNS)]
    return {
        "compression": "zstd",
        "compression_level": {leaves.get(name, name): at for name, at in _LEVELS.items() if name in schema.names},
        "use_dictionary": [name for name in _REPEATED if name in schema.names],
        "column_encoding": dict.fromkeys(split, "BYTE_STREAM_SPLIT"),
        "data_page_size": _PAGE_BYTES,
        "dictionary_pagesize_limit": _DICTIONARY_BYTES,
        "write_statistics": False,
        "store_schema": False,
    }


def pack_messages(messages: Sequence[Any], text: str, known: Sequence[str] = ()) -> str:
    """A conversation as it is stored: JSON, in which contents that are in the text are references to it.

    `known`: the JSON of the first messages, where the caller has it already.
    """
    found = list(known)
    references: list[tuple[int, int, int]] = []
    after = 0
    for place in range(len(found), len(messages)):
        message = messages[place]
        content = message.get("content") if isinstance(message, Mapping) else None
        long = isinstance(content, str) and len(content) >= _SHORTEST_REFERENCE
        start = text.find(str(content), after) if long else -1
        if start < 0:
            found.append(dump_json(message))
            continue
        after = start + len(str(content))
        references.append((place, start, after))
        found.append(dump_json({**message, "content": ""}))
    inside = f"[{', '.join(found)}]"
    return f'{{"messages": {inside}, "text": {json.dumps(references)}}}' if references else inside


def dump_json(value: Any) -> str:
    """As JSON of valid Unicode: lone surrogates are escaped, and numbers that are none are null.

    What JSON does not know is text, as `str` has it.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_known)
        text.encode()
        return text
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False, default=_known)
    except ValueError:
        return dump_json(replace_non_finite(json.loads(json.dumps(value, default=_known))))


def _known(value: Any) -> Any:
    try:
        return json_default(value)
    except TypeError:
        return str(value)


def _column(table: pa.Table, field: pa.Field) -> pa.ChunkedArray | pa.Array:
    name = field.name
    if name == DERIVED:
        return _masks(table)
    if name == "messages":
        pairs = zip(table["messages"].to_pylist(), table["text"].to_pylist(), strict=True)
        return pa.array([_unpacked_messages(*pair) for pair in pairs], pa.string())
    if name + _SUFFIX in table.column_names:
        folded, theirs = (_one(table[column]) for column in (name + _SUFFIX, DELTA_BASE))
        kept = folded.flatten().to_numpy(zero_copy_only=False)
        values = (kept.view(np.uint32) >> 1).view(np.int32) ^ -(kept & 1)
        numbers = (values + _bits(theirs)).view(np.float32)
        return pa.ListArray.from_arrays(_offsets(folded), pa.array(numbers)).cast(field.type)
    if name not in table.column_names:
        return pa.nulls(len(table), field.type)
    return table[name].cast(field.type)


def _unpacked_messages(stored: str | None, text: str | None) -> str | None:
    if stored is None or not stored.startswith("{"):
        return stored
    held = json.loads(stored)
    for place, start, stop in held["text"]:
        held["messages"][place]["content"] = (text or "")[start:stop]
    return dump_json(held["messages"])


def _masks(table: pa.Table) -> pa.Array:
    """[rows][L] whether a token is in a span of the loss."""
    lengths = table["response_tokens"].to_numpy()
    if len(lengths) and not 0 <= lengths.min() <= lengths.max() <= _MAX_RESPONSE:
        raise ValueError(f"response_tokens is not from 0 to {_MAX_RESPONSE} everywhere")
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    spans = _one(table["loss_spans"])
    flat = spans.flatten()
    start, stop = (flat.field(name).to_numpy(zero_copy_only=False) for name in ("start", "stop"))
    begin = np.repeat(offsets[:-1], np.diff(_offsets(spans)))
    steps = np.zeros(int(offsets[-1]) + 1, np.int32)
    np.add.at(steps, begin + start, 1)
    np.add.at(steps, begin + stop, -1)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.cumsum(steps[:-1]) > 0))


def _one(column: pa.ChunkedArray) -> pa.ListArray:
    return column.combine_chunks()


def _offsets(lists: pa.ListArray) -> pa.Array:
    """From 0, whatever the lists are a part of."""
    return pa.array(np.asarray(lists.offsets) - lists.offsets[0].as_py(), pa.int32())


def _bits(lists: pa.ListArray) -> np.ndarray[Any, np.dtype[np.int32]]:
    return lists.flatten().to_numpy(zero_copy_only=False).view(np.int32)
