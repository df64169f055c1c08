"""Reader and writer of a run's saved rollouts: one Parquet file per step, in the run's folder.

    rollouts/step_00000040.parquet   the rollouts that step 40 trained on, one row each (see COLUMNS)
    rollouts/vocabulary.parquet      the text of each token id

L below is the number of response tokens of a rollout, including those between turns.

The files are compact and fast to read. Most columns are stored as they are read. Three kinds are not:

- `trained` is not stored. It follows from `loss_spans`.
- `old_logprobs` and `ref_logprobs` are close to `rollout_logprobs`, so the difference is stored: that of the bit
  patterns as integers, with the sign in the lowest bit ("old_logprobs_from_rollout"). It is exact, and its upper bytes
  are zeros.
- `messages` refer to the text where they repeat it: {"messages": [...], "text": [[1, 0, 900]]} means that the content
  of message 1 is text[0:900].

Only sign and exponent of log-probs are compressible. So their bytes are grouped by position, all first bytes before all
second ones (BYTE_STREAM_SPLIT). Other columns compress well as they are: token ids repeat like words, advantages are
constant within a response, and a group's shared prompt lies within zstd's window.
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
"""Token id that replaces the ids of tokens that spell a secret."""
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
        ("session", pa.string()),
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
"""Columns that the reader returns, independent of how files store them."""


def step_file(run: Path, step: int) -> Path:
    """Return the path of the file with the rollouts of a step."""
    return Path(run) / FOLDER / f"step_{step:08d}.parquet"


def vocabulary_file(run: Path) -> Path:
    """Return the path of the file with the texts of token ids."""
    return Path(run) / FOLDER / "vocabulary.parquet"


def write_rollouts(run: Path, step: int, tables: pa.Table | Iterable[pa.Table]) -> Path:
    """Write the rollouts of a step into a run's folder, and return the file.

    The file is written atomically and replaces one of the same step.

    Args:
        run: Folder of the run.
        step: Step that trained on the rollouts.
        tables: One table, or several to write one after the other. Columns are those of COLUMNS; missing ones become
            null.

    Raises:
        ValueError: If a table has other columns.
        OSError: If the file cannot be written.
    """
    file = step_file(run, step)
    _write(file, ([tables] if isinstance(tables, pa.Table) else tables))
    return file


def write_vocabulary(run: Path, texts: Sequence[str]) -> Path:
    """Write the text of each token id, which is the index in `texts`, and return the file. Raises OSError."""
    file = vocabulary_file(run)
    table = pa.table({"id": pa.array(range(len(texts)), pa.int32()), "text": pa.array(texts, pa.string())})
    with _atomic_write(file) as handle:
        pq.write_table(table, handle, compression="zstd", store_schema=False)
    return file


class RolloutReader:
    """A reader of a run's saved rollouts. The run may still be active or finished, and its files may be untrusted.

    Example: `RolloutReader(Path("runs/a")).table(columns=["uid", "reward"], filter=pc.field("reward") > 0.5)`
    """

    def __init__(self, run: Path):
        """Read from the folder of a run, which need not have rollouts yet."""
        self._run = Path(run)

    def steps(self) -> list[int]:
        """Return the steps that have saved rollouts at the moment, in ascending order."""
        folder = self._run / FOLDER
        names = (_STEP_FILE.fullmatch(path.name) for path in (folder.iterdir() if folder.is_dir() else ()))
        return sorted(step for match in names if match and (step := int(match[1])) <= MAX_STEP)

    def table(
        self,
        steps: Iterable[int] | None = None,
        columns: Sequence[str] | None = None,
        filter: pc.Expression | None = None,
    ) -> pa.Table:
        """Return the rollouts of some steps, one row each, in the order of the steps and of their files.

        Args:
            steps: Steps to read; all that have rollouts by default. A step without a file is skipped, for example one
                whose file was deleted to stay within trainer.keep_rollouts_gb.
            columns: Names of COLUMNS; all by default. A few columns are read much faster.
            filter: Condition on rows. It may use columns without lists, as in `pc.field("reward") > 0.5`.

        Returns:
            A table with the columns in the requested order. A column that the files do not have is null.

        Raises:
            ValueError: If a column is not one of COLUMNS.
            OSError: If a file cannot be read: it is truncated or damaged, has text that is not UTF-8, or is not a
                regular file.
        """
        names = COLUMNS.names if columns is None else list(columns)
        if unknown := [name for name in names if name not in COLUMNS.names]:
            raise ValueError(f"columns={unknown}: not columns of rollouts. Choose from {', '.join(COLUMNS.names)}.")
        schema = pa.schema([COLUMNS.field(name) for name in names])
        tables = [self._step_table(step, schema, filter) for step in (self.steps() if steps is None else steps)]
        return pa.concat_tables([table for table in tables if table is not None] or [schema.empty_table()])

    def conversations(self, step: int) -> pa.Table:
        """Return the columns `text` and `messages` of a step as they are stored, for searching.

        `messages` is JSON without the parts that it shares with `text`. A step without a file has no rows. Raises
        OSError if the file cannot be read.
        """
        schema = pa.schema([COLUMNS.field(name) for name in ("text", "messages")])
        try:
            with open_untrusted(step_file(self._run, step)) as file, pq.ParquetFile(file) as parquet:
                return _validated(parquet.read(schema.names)).select(schema.names).cast(schema)
        except FileNotFoundError:
            return schema.empty_table()

    def vocabulary(self) -> dict[int, str]:
        """Return the text of each token id; {} if the run has not written the file. Raises OSError."""
        try:
            with open_untrusted(vocabulary_file(self._run)) as file:
                table = _validated(pq.read_table(file, columns=["id", "text"])).drop_null()
                texts = table["text"].cast(pa.string()).to_pylist()
                return dict(zip(table["id"].cast(pa.int32()).to_pylist(), texts, strict=True))
        except FileNotFoundError:
            return {}

    def _step_table(self, step: int, schema: pa.Schema, filter: pc.Expression | None) -> pa.Table | None:
        try:
            with open_untrusted(step_file(self._run, step)) as file, pq.ParquetFile(file) as parquet:
                stored = stored_columns(schema.names, parquet.schema_arrow)
                if filter is None:  # the fast path: a run may have thousands of files
                    return unpack_columns(_validated(parquet.read(stored)), schema)
                file.seek(0)
                return unpack_columns(_validated(pq.read_table(file, columns=stored, filters=filter)), schema)
        except FileNotFoundError:
            return None


def _validated(table: pa.Table) -> pa.Table:
    """Return the table. Raises ArrowInvalid for offsets out of range and for text that is not UTF-8."""
    table.validate(full=True)
    return table


def _with_all_columns(table: pa.Table) -> pa.Table:
    """Return the table with all stored columns in their order. Raises ValueError for an unknown column."""
    if unknown := [name for name in table.column_names if name not in COLUMNS.names]:
        raise ValueError(f"{unknown} are not columns of rollouts. Choose from {', '.join(COLUMNS.names)}.")
    schema = pa.schema([field for field in COLUMNS if field.name != DERIVED])
    present = {*table.column_names}
    columns = [
        table[field.name].cast(field.type) if field.name in present else pa.nulls(len(table), field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def _write(file: Path, tables: Iterable[pa.Table]) -> None:
    with _atomic_write(file) as handle, ExitStack() as stack:
        writer = None
        for table in tables:
            stored = pack_columns(_with_all_columns(table))
            if writer is None:
                writer = stack.enter_context(pq.ParquetWriter(handle, stored.schema, **write_options(stored.schema)))
            writer.write_table(stored, row_group_size=max(1, len(stored)))


@contextmanager
def _atomic_write(file: Path) -> Iterator[BinaryIO]:
    """Open a file for atomic writing. Create its folder if it does not exist."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(file) as handle:
        yield handle
    fsync_folder(file.parent.parent)  # file.parent may be new


# -- the layout inside files -------------------------------------------------------------------------------------------


DERIVED = "trained"
"""Column that is computed when it is read."""
DELTA_BASE = "rollout_logprobs"
"""Column to which the differences of DELTA_COLUMNS are stored."""
DELTA_COLUMNS = ("old_logprobs", "ref_logprobs")
_SUFFIX = "_from_rollout"
_MIN_REFERENCE_CHARS = 16
"""Minimum length of a message that is stored as a reference to the text."""
MAX_SESSION_CHARS = 4_000_000
"""Approximate maximum length of the record of a session."""
_MIN_SHORTENED_CHARS = 100
_COMPRESSION_LEVELS = {"text": 9, "messages": 3, "env_extras": 3, "session": 3, "response_ids": 6}
"""Columns -> zstd levels above 1, where they save more than they cost."""
_DICTIONARY_COLUMNS = (
    "uid",
    "data_source",
    "env_class",
    "status",
    "error",
    "stop_reason",
    "env_metrics",
    "env_extras",
    "detail",
)
_PAGE_BYTES = 8 << 20
"""Size of a page, the unit of compression: large enough for all prompts of a group."""
_DICTIONARY_BYTES = 64 << 20
_MAX_RESPONSE = 1 << 24
"""Maximum number of response tokens. A damaged file with a larger number would exhaust the reader's memory."""


def stored_columns(names: Sequence[str], schema: pa.Schema) -> list[str]:
    """Return the stored columns that `unpack_columns` needs.

    Args:
        names: Columns to return to the user, names of COLUMNS.
        schema: Schema of the file. Columns that it does not have are skipped.
    """
    needed: set[str] = set()
    for name in names:
        if name == DERIVED:
            needed |= {"loss_spans", "response_tokens"}
        elif name == "messages":
            needed |= {"messages", "text"}
        elif name + _SUFFIX in schema.names:
            needed |= {name + _SUFFIX, DELTA_BASE}
        else:
            needed.add(name)
    return sorted(needed & {*schema.names})


def pack_columns(table: pa.Table) -> pa.Table:
    """Return a table of rollouts with the columns that files store.

    `old_logprobs` and `ref_logprobs` are replaced by their differences to `rollout_logprobs`, as integers that
    `unpack_columns` can convert back exactly. A column stays as it is if a rollout lacks one of the two lists or their
    lengths differ. Other columns do not change.
    """
    for name in DELTA_COLUMNS:
        if name not in table.column_names:
            continue
        column, base = (_combine_chunks(table[column]) for column in (name, DELTA_BASE))
        offsets = _offsets(column)
        if column.null_count == 0 and base.null_count == 0 and offsets.equals(_offsets(base)):
            delta = _bits(column) - _bits(base)
            zigzag = pa.array((delta << 1) ^ (delta >> 31))
            index = table.column_names.index(name)
            table = table.set_column(index, name + _SUFFIX, pa.ListArray.from_arrays(offsets, zigzag))
    return table


def unpack_columns(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the columns of `schema` from a table of stored columns. This is the inverse of `pack_columns`.

    Args:
        table: Table with the columns that `stored_columns` names.
        schema: Columns to return, a part of COLUMNS. Columns that a file of an earlier version does not have are null.

    Raises:
        ValueError: Stored columns do not fit together. Other exceptions are possible for a damaged file.
    """
    return pa.table([_column(table, field) for field in schema], schema=schema)


def write_options(schema: pa.Schema) -> dict[str, Any]:
    """Return the keyword arguments with which `pyarrow.parquet.ParquetWriter` writes packed rollouts."""
    leaves = {field.name: f"{field.name}.list.element" for field in schema if pa.types.is_list(field.type)}
    split = [leaf for name, leaf in leaves.items() if name.removesuffix(_SUFFIX) in (DELTA_BASE, *DELTA_COLUMNS)]
    levels = {leaves.get(name, name): level for name, level in _COMPRESSION_LEVELS.items() if name in schema.names}
    return {
        "compression": "zstd",
        "compression_level": levels,
        "use_dictionary": [name for name in _DICTIONARY_COLUMNS if name in schema.names],
        "column_encoding": dict.fromkeys(split, "BYTE_STREAM_SPLIT"),
        "data_page_size": _PAGE_BYTES,
        "dictionary_pagesize_limit": _DICTIONARY_BYTES,
        "write_statistics": False,
        "store_schema": False,
    }


def pack_messages(messages: Sequence[Any], text: str, known: Sequence[str] = ()) -> str:
    """Return a conversation in its stored form: JSON in which contents that occur in the text are references to it.

    Args:
        messages: The conversation's messages.
        text: Text of the rollout's response.
        known: JSON of the first messages, if the caller has it already. They get no references.
    """
    items = list(known)
    references: list[tuple[int, int, int]] = []
    end = 0
    for index in range(len(items), len(messages)):
        message = messages[index]
        content = message.get("content") if isinstance(message, Mapping) else None
        is_long = isinstance(content, str) and len(content) >= _MIN_REFERENCE_CHARS
        start = text.find(str(content), end) if is_long else -1
        if start < 0:
            items.append(dump_json(message))
            continue
        end = start + len(str(content))
        references.append((index, start, end))
        items.append(dump_json({**message, "content": ""}))
    array = f"[{', '.join(items)}]"
    return f'{{"messages": {array}, "text": {json.dumps(references)}}}' if references else array


def pack_session(session: Mapping[str, Any]) -> str:
    """Return the record of a session as JSON of about MAX_SESSION_CHARS at most.

    Sessions that rewrite a long history in every call can have a multiple of this. Their texts are shortened, as little
    as possible. If that is not enough, their messages are left out, too.
    """
    text = dump_json(session)
    max_chars = MAX_SESSION_CHARS // 100
    while len(text) > MAX_SESSION_CHARS and max_chars >= _MIN_SHORTENED_CHARS:
        text = dump_json(shorten_texts(session, max_chars))
        max_chars //= 4
    if len(text) > MAX_SESSION_CHARS:
        calls = [{**call, "messages": _omitted(len(call["messages"]))} for call in session["calls"]]
        text = dump_json(shorten_texts({**session, "calls": calls}, _MIN_SHORTENED_CHARS))
    return text


def _omitted(num_messages: int) -> list[dict[str, Any]]:
    return [{"role": "omitted", "content": f"[... {num_messages:,} messages are left out ...]"}] if num_messages else []


def shorten_texts(value: Any, max_chars: int) -> Any:
    """Return a plain value in which the middle of every text longer than `max_chars` is left out."""
    if isinstance(value, Mapping):
        return {key: shorten_texts(item, max_chars) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [shorten_texts(item, max_chars) for item in value]
    if isinstance(value, str) and len(value) > max_chars:
        half = max_chars // 2
        return f"{value[:half]}\n[... {len(value) - 2 * half:,} characters are left out ...]\n{value[-half:]}"
    return value


def dump_json(value: Any) -> str:
    """Return a value as JSON of valid Unicode.

    Lone surrogates are escaped, and numbers that are not finite become null. Values of other types become text.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_to_json_type)
        text.encode()
        return text
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False, default=_to_json_type)
    except ValueError:
        return dump_json(replace_non_finite(json.loads(json.dumps(value, default=_to_json_type))))


def _to_json_type(value: Any) -> Any:
    try:
        return json_default(value)
    except TypeError:
        return str(value)


def _column(table: pa.Table, field: pa.Field) -> pa.ChunkedArray | pa.Array:
    name = field.name
    if name == DERIVED:
        return _trained_masks(table)
    if name == "messages":
        pairs = zip(table["messages"].to_pylist(), table["text"].to_pylist(), strict=True)
        return pa.array([_unpacked_messages(*pair) for pair in pairs], pa.string())
    if name + _SUFFIX in table.column_names:
        column, base = (_combine_chunks(table[stored]) for stored in (name + _SUFFIX, DELTA_BASE))
        zigzag = column.flatten().to_numpy(zero_copy_only=False)
        delta = (zigzag.view(np.uint32) >> 1).view(np.int32) ^ -(zigzag & 1)
        values = (delta + _bits(base)).view(np.float32)
        return pa.ListArray.from_arrays(_offsets(column), pa.array(values)).cast(field.type)
    if name not in table.column_names:
        return pa.nulls(len(table), field.type)
    return table[name].cast(field.type)


def _unpacked_messages(stored: str | None, text: str | None) -> str | None:
    if stored is None or not stored.startswith("{"):
        return stored
    packed = json.loads(stored)
    for index, start, stop in packed["text"]:
        packed["messages"][index]["content"] = (text or "")[start:stop]
    return dump_json(packed["messages"])


def _trained_masks(table: pa.Table) -> pa.Array:
    """Return booleans [rows][L]: True if a token is in a span of the loss. Raises ValueError for damaged columns."""
    lengths = table["response_tokens"].to_numpy()
    if len(lengths) and not 0 <= lengths.min() <= lengths.max() <= _MAX_RESPONSE:
        raise ValueError(f"response_tokens has values outside 0 to {_MAX_RESPONSE}")
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    spans = _combine_chunks(table["loss_spans"])
    flat = spans.flatten()
    start, stop = (flat.field(name).to_numpy(zero_copy_only=False) for name in ("start", "stop"))
    begin = np.repeat(offsets[:-1], np.diff(_offsets(spans)))
    steps = np.zeros(int(offsets[-1]) + 1, np.int32)
    np.add.at(steps, begin + start, 1)
    np.add.at(steps, begin + stop, -1)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.cumsum(steps[:-1]) > 0))


def _combine_chunks(column: pa.ChunkedArray) -> pa.ListArray:
    return column.combine_chunks()


def _offsets(lists: pa.ListArray) -> pa.Array:
    """Return the offsets of lists, starting from 0 even if the lists are a slice."""
    return pa.array(np.asarray(lists.offsets) - lists.offsets[0].as_py(), pa.int32())


def _bits(lists: pa.ListArray) -> np.ndarray[Any, np.dtype[np.int32]]:
    return lists.flatten().to_numpy(zero_copy_only=False).view(np.int32)
