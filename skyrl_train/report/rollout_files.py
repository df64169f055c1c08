"""The rollouts that a run keeps: one Parquet file for each step, beside metrics.jsonl.

    rollouts/step_00000040.parquet   what step 40 trained on, one row a rollout (see COLUMNS)
    rollouts/vocabulary.parquet      what each token id reads as by itself

L below is the number of a rollout's response tokens, those between turns included.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from skyrl_train.durable import replacing, sync_folder
from skyrl_train.report.rollout_packing import DERIVED, packed, stored_columns, unpacked, write_options
from skyrl_train.report.safe_files import MAX_STEP, opened

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
    with _replacing(file) as handle:
        pq.write_table(table, handle, compression="zstd", store_schema=False)
    return file


class RolloutFiles:
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
            with opened(step_file(self._run, step)) as file, pq.ParquetFile(file) as parquet:
                return _checked(parquet.read(wanted.names)).select(wanted.names).cast(wanted)
        except FileNotFoundError:
            return wanted.empty_table()

    def vocabulary(self) -> dict[int, str]:
        """What each token id reads as by itself; empty if the run has not written it. Raises OSError."""
        try:
            with opened(vocabulary_file(self._run)) as file:
                found = _checked(pq.read_table(file, columns=["id", "text"])).drop_null()
                texts = found["text"].cast(pa.string()).to_pylist()
                return dict(zip(found["id"].cast(pa.int32()).to_pylist(), texts, strict=True))
        except FileNotFoundError:
            return {}

    def _of_step(self, step: int, wanted: pa.Schema, filter: pc.Expression | None) -> pa.Table | None:
        try:
            with opened(step_file(self._run, step)) as file, pq.ParquetFile(file) as parquet:
                stored = stored_columns(wanted.names, parquet.schema_arrow)
                if filter is None:  # a run may have thousands of files
                    return unpacked(_checked(parquet.read(stored)), wanted)
                file.seek(0)
                return unpacked(_checked(pq.read_table(file, columns=stored, filters=filter)), wanted)
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
    with _replacing(file) as handle, ExitStack() as stack:
        writer = None
        for table in tables:
            stored = packed(_complete(table))
            if writer is None:
                writer = stack.enter_context(pq.ParquetWriter(handle, stored.schema, **write_options(stored.schema)))
            writer.write_table(stored, row_group_size=max(1, len(stored)))


@contextmanager
def _replacing(file: Path) -> Iterator[BinaryIO]:
    """Open a file to write to, in a folder that is made if it is missing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as handle:
        yield handle
    sync_folder(file.parent.parent)  # which may have got the folder just now
