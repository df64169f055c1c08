"""What a run keeps of its rollouts: all that a step trained on, token by token, or a sample of it, in files to read.

consumes: a step's groups and its batch with advantages · produces: rollouts/step_N.parquet, written by a thread beside
the update, or after it where the update tells the trainer's log-probs · waits for: nothing · the step waits for: the
file, before it ends
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from torch import Tensor

from skyrl_train import trace
from skyrl_train.aio import finish_despite_cancellation
from skyrl_train.config.redaction import contains_secret, find_secret_pieces, redact
from skyrl_train.data.batch import TrainBatch
from skyrl_train.data.messages import Message, ToolCallRecord
from skyrl_train.data.trajectory import OK, Trajectory, TrajectoryGroup
from skyrl_train.report.rollout_files import (
    COLUMNS,
    HIDDEN_TOKEN,
    RolloutReader,
    dump_json,
    pack_messages,
    step_file,
    vocabulary_file,
    write_rollouts,
    write_vocabulary,
)

SAMPLED_GROUPS = 8
"""Of a step, its first ones: the order of prompts is drawn by the seed, so they are a fair sample."""
CHUNK_TOKENS = 1_000_000
"""Of responses that become one table: what is held in memory meanwhile is some 40 bytes of each."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_TURN_FIELDS = tuple(field.name for field in COLUMNS.field("turns").type.value_type)
_log = logging.getLogger(__name__)


class RolloutWriter:
    """Writes the rollouts of each step. A failed write must not end the run: that step is left out, with one warning.

    Once the folder holds more than `most_bytes`, the files of the oldest steps are deleted.
    """

    def __init__(
        self,
        run: Path,
        *,
        max_groups: int | None = None,
        max_bytes: float | None = None,
        vocabulary: Callable[[], Sequence[str]] | None = None,
        on_delete: Callable[[Path], None] | None = None,
    ):
        """`groups`: how many of a step are kept; None keeps all, 0 none. `vocabulary`: the text of each token id.
        `deleted`: is told of files that were."""
        self._run = run
        self._max_groups = max_groups
        self._max_bytes = max_bytes
        self._vocabulary = vocabulary
        self._on_delete = on_delete
        self._failed = False

    def begin(self, step: int) -> None:
        """The run continues after `step`: files of later steps are of another attempt, and are deleted."""
        try:
            for later in (one for one in RolloutReader(self._run).steps() if one > step):
                self._delete(step_file(self._run, later))
        except OSError as error:
            _log.warning("trainer.keep_rollouts: files of steps after %d cannot be deleted (%s).", step, error)

    def num_sequences(self, groups: Sequence[TrajectoryGroup]) -> int:
        """How many of their sequences are kept: the first ones of their batch."""
        return sum(len(list(item.sequences())) for _, item in _numbered(groups[: self._max_groups]))

    @asynccontextmanager
    async def writing(
        self,
        step: int,
        groups: Sequence[TrajectoryGroup],
        batch: TrainBatch,
        get_old_logprobs: Callable[[], Tensor | None] = lambda: None,
    ) -> AsyncIterator[None]:
        """Inside, the rollouts that `step` trains on are being written; afterwards their file is there.

        `batch`: of `groups`, in their order, with advantages. If it has no old log-probs they are what `learnt` tells
        at the end, [T] of the batch, and the rollouts are written then.
        """
        if self._max_groups == 0:
            yield
            return
        partly = self._max_groups is not None and self._max_groups < len(groups)
        groups = list(groups[: self._max_groups])  # whoever calls lets go of theirs
        if partly:
            rows = range(self.num_sequences(groups))
            unread = dict.fromkeys(("routing", "values", "returns", "importance_weights", "selected"))
            batch = batch.with_tokens(**unread).select(rows)
        if batch.old_logprobs is None:
            told = None
            try:
                yield
                told = get_old_logprobs()
            finally:
                if told is not None:
                    batch = batch.with_tokens(old_logprobs=told[: len(batch.input_ids)])
                await finish_despite_cancellation(asyncio.to_thread(self._write, step, groups, batch))
            return
        written = asyncio.create_task(asyncio.to_thread(self._write, step, groups, batch))
        del groups, batch  # what the update does not read is the thread's alone
        try:
            yield
        finally:
            await finish_despite_cancellation(_ended(written))

    def _write(self, step: int, groups: Sequence[TrajectoryGroup], batch: TrainBatch) -> None:
        try:
            with trace.span("rollouts kept", track="checkpoints", overlaps=True):
                self._write_vocabulary()
                write_rollouts(
                    self._run, step, rollout_tables(step, groups, batch, RolloutReader(self._run).vocabulary)
                )
                self._delete_oldest(step)
        except Exception as error:  # of the disk, or what an environment put into its messages
            if not self._failed:
                what = redact(f"{type(error).__name__}: {error}")
                _log.warning(
                    "trainer.keep_rollouts: those of step %d are not kept (%s). Training goes on, and so does the "
                    "attempt to keep those of later steps, without more such warnings.",
                    step,
                    what,
                )
            self._failed = True

    def _write_vocabulary(self) -> None:
        """Once; without it, ids are shown."""
        if self._vocabulary is None or vocabulary_file(self._run).exists():
            return
        try:
            texts = self._vocabulary()
        except Exception as error:  # of a tokenizer
            self._vocabulary = None
            what = redact(f"{type(error).__name__}: {error}")
            _log.warning("trainer.keep_rollouts: the texts of token ids cannot be told (%s); ids are kept.", what)
            return
        write_vocabulary(self._run, texts)

    def _delete_oldest(self, step: int) -> None:
        """Delete files of the oldest steps until the folder is within its bound."""
        if self._max_bytes is None:
            return
        files = [step_file(self._run, one) for one in RolloutReader(self._run).steps()]
        newest, sizes = step_file(self._run, step), {file: _size(file) for file in files}
        room = self._max_bytes - sum(sizes.values()) - _size(vocabulary_file(self._run))
        others = [file for file in files if file != newest]
        if room + sum(sizes[file] for file in others) < 0:
            self._delete(newest)
            raise OSError(f"they take {sizes[newest]:,} bytes, for which trainer.keep_rollouts_gb has no room")
        for oldest in others:
            if room >= 0:
                return
            self._delete(oldest)
            room += sizes[oldest]

    def _delete(self, file: Path) -> None:
        file.unlink(missing_ok=True)
        if self._on_delete is not None:
            self._on_delete(file)


def _size(file: Path) -> int:
    """Bytes; 0 of one that is not there, perhaps because somebody has just deleted it."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


async def _ended(written: asyncio.Task[None]) -> None:
    await written


def rollout_tables(
    step: int,
    groups: Sequence[TrajectoryGroup],
    batch: TrainBatch,
    vocabulary: Callable[[], Mapping[int, str]] = dict,
) -> Iterator[pa.Table]:
    """Tables with the columns of report/rollout_files.py: the trajectories of `groups` in their order.

    `batch` has their sequences, from its first one on. Messages are packed, and texts hold no secrets. Ids of tokens
    that spell one are HIDDEN_TOKEN. `vocabulary` gives the text of each token id, and is called if a rollout holds a
    secret; all ids of that rollout are hidden where their texts do not show which ones spell it.
    """
    items = list(_numbered(groups))
    rows = [0, *accumulate(1 + len(item.restarts) for _, item in items)]
    tokens = [0, *accumulate(len(item.response_ids) for _, item in items)]
    first = 0
    for last in range(1, len(items) + 1):
        ends_group = last == len(items) or items[last][0] != items[last - 1][0]
        if last == len(items) or (ends_group and tokens[last] - tokens[first] >= CHUNK_TOKENS):
            yield _table(step, items[first:last], _ResponseTokens(batch, rows[first], rows[last]), vocabulary)
            first = last


def _numbered(groups: Sequence[TrajectoryGroup]) -> Iterator[tuple[int, Trajectory]]:
    return ((index, item) for index, group in enumerate(groups) for item in group.trajectories)


class _ResponseTokens:
    """The response tokens of some sequences of a batch, one after the other."""

    def __init__(self, batch: TrainBatch, first: int, last: int):
        self._batch = batch.select(range(first, last), copy=False)
        offsets = self._batch.offsets.tolist()
        prompts = self._batch.prompt_lengths.tolist()
        self._places = [
            slice(start + prompt, stop)
            for start, prompt, stop in zip(offsets, prompts, offsets[1:], strict=False)
        ]  # fmt: skip

    def of(self, name: str) -> NDArray[Any] | None:
        """[tokens] a token-level tensor of the batch, if there is one."""
        tensor = getattr(self._batch, name)
        if tensor is None:
            return None
        values = tensor.numpy()
        return np.concatenate([values[place] for place in self._places])


def _table(
    step: int,
    numbered: Sequence[tuple[int, Trajectory]],
    tokens: _ResponseTokens,
    vocabulary: Callable[[], Mapping[int, str]],
) -> pa.Table:
    items = [item for _, item in numbered]
    said = [[item.text, item.messages or item.prompt.messages] for item in items]
    unsafe = [place for place, one in enumerate(said) if contains_secret(one)]
    token_texts = vocabulary() if unsafe else {}
    hidden = {place: _spelling([*items[place].prompt_ids, *items[place].response_ids], token_texts) for place in unsafe}
    offsets = np.concatenate(([0], np.cumsum([len(item.response_ids) for item in items]))).astype(np.int32)
    columns: dict[str, Any] = {
        "step": np.full(len(items), step),
        "group": [index for index, _ in numbered],
        **_scalars(items),
        **_texts(items),
        "turns": _turns(items),
        "prompt_ids": _lists([_hide(item.prompt_ids, hidden.get(place)) for place, item in enumerate(items)]),
        "restarts": _restarts(items, token_texts, hidden),
        "loss_spans": _spans(tokens.of("loss_mask"), offsets),
        "scored_spans": _scored(items),
    }
    for name, source in _TOKEN_COLUMNS.items():
        values = tokens.of(source)
        if values is not None:
            if name == "response_ids" and hidden:
                values = values.copy()
                for place, mask in hidden.items():
                    values[offsets[place] : offsets[place + 1]][mask[len(items[place].prompt_ids) :]] = HIDDEN_TOKEN
            columns[name] = pa.ListArray.from_arrays(
                pa.array(offsets), pa.array(values.astype(_dtype(name), copy=False))
            )
    arrays = {
        name: values if isinstance(values, pa.Array) else pa.array(values, COLUMNS.field(name).type)
        for name, values in columns.items()
    }
    return pa.table(arrays)


_TOKEN_COLUMNS = {
    "response_ids": "input_ids",
    "rollout_logprobs": "rollout_logprobs",
    "old_logprobs": "old_logprobs",
    "ref_logprobs": "ref_logprobs",
    "advantages": "token_advantages",
    "token_rewards": "token_rewards",
}
"""Columns, and what they are called in a batch."""


def _dtype(name: str) -> Any:
    return COLUMNS.field(name).type.value_type.to_pandas_dtype()


def _scalars(items: Sequence[Trajectory]) -> dict[str, list[Any]]:
    return {
        "uid": [_clean(item.prompt.uid) for item in items],
        "sample": [item.sample for item in items],
        "data_source": [_clean(item.prompt.data_source) for item in items],
        "env_class": [_clean(item.prompt.env_class) for item in items],
        "reward": [float(item.reward) for item in items],
        "raw_reward": [None if item.raw_reward is None else float(item.raw_reward) for item in items],
        "status": [item.status for item in items],
        "error": [None if item.error is None else _clean(item.error) for item in items],
        "stop_reason": [_clean(item.stop_reason) for item in items],
        "temperature": [float(item.temperature) for item in items],
        "min_version": [item.min_version for item in items],
        "max_version": [item.max_version for item in items],
        "prompt_tokens": [len(item.prompt_ids) for item in items],
        "response_tokens": [len(item.response_ids) for item in items],
    }


def _texts(items: Sequence[Trajectory]) -> dict[str, list[str]]:
    """What people read, without the contents of credential variables, which a tool may have shown."""
    shown = redact(
        [(item.text, item.detail, item.messages or item.prompt.messages, item.env_metrics) for item in items]
    )
    texts = [_clean(text) for text, *_ in shown]
    extras: dict[int, str] = {}  # of a prompt, which its samples share
    for item in items:
        if id(item.prompt) not in extras:
            extras[id(item.prompt)] = dump_json(redact(item.prompt.env_extras))
    return {
        "text": texts,
        "detail": [_clean(detail) for _, detail, *_ in shown],
        "messages": list(_conversations([messages for *_, messages, _ in shown], texts)),
        "env_metrics": [dump_json(metrics) for *_, metrics in shown],
        "env_extras": [extras[id(item.prompt)] for item in items],
    }


def _conversations(conversations: Sequence[Sequence[Message]], texts: Sequence[str]) -> Iterator[str]:
    """As they are stored; an opening that is as in the conversation before is made into JSON once."""
    opening: Sequence[Message] = ()
    known: list[str] = []
    for messages, text in zip(conversations, texts, strict=True):
        answered = (n for n, one in enumerate(messages) if one.get("role") == "assistant")
        begins = messages[: next(answered, len(messages))]
        if begins != opening:
            opening, known = begins, [dump_json(message) for message in begins]
        yield pack_messages(messages, text, known)


def _clean(text: str) -> str:
    """Text that Parquet takes: half a surrogate pair is none."""
    return _SURROGATE.sub("\ufffd", str(text))


def _turns(items: Sequence[Trajectory]) -> pa.Array:
    turns = [turn for item in items for turn in item.turns]
    kind = COLUMNS.field("turns").type
    columns: dict[str, list[Any]] = {name: [getattr(turn, name) for turn in turns] for name in _TURN_FIELDS}
    columns["tool_calls"] = [
        dump_json([*map(_redact_tool_call, calls)]) if calls else None for calls in columns["tool_calls"]
    ]
    fields = [pa.array(values, kind.value_type.field(name).type) for name, values in columns.items()]
    return _structs([len(item.turns) for item in items], fields, kind)


def _redact_tool_call(call: ToolCallRecord) -> ToolCallRecord:
    """Without secrets, also those that JSON writes otherwise."""
    try:
        given = json.loads(call["arguments"])
        shown = redact(given)
        return redact(call if shown == given else call | {"arguments": json.dumps(shown, ensure_ascii=False)})
    except (ValueError, RecursionError):  # what can be read need not be shallow enough for what follows
        return redact(call)


def _spelling(ids: Sequence[int], token_texts: Mapping[int, str]) -> NDArray[np.bool_]:
    """[tokens] those that spell a secret; all of them if none does by itself, as where one has half a character."""
    mask = np.array(find_secret_pieces([token_texts.get(one, "") for one in ids]), bool)
    return mask if mask.any() else np.ones(len(ids), bool)


def _hide(ids: NDArray[np.int32], mask: NDArray[np.bool_] | None) -> NDArray[np.int32]:
    """Ids without those of `mask`, which may go on beyond them."""
    return ids if mask is None else np.where(mask[: len(ids)], HIDDEN_TOKEN, ids).astype(np.int32)


def _restarts(items: Sequence[Trajectory], token_texts: Mapping[int, str], hidden: Collection[int]) -> pa.Array:
    restarts = [(place in hidden, restart) for place, item in enumerate(items) for restart in item.restarts]
    starts = pa.array([one.start for _, one in restarts], pa.int32())
    prompts = [
        _hide(one.prompt_ids, _spelling([*one.prompt_ids], token_texts) if hides else None) for hides, one in restarts
    ]
    fields = [starts, _lists(prompts)]
    return _structs([len(item.restarts) for item in items], fields, COLUMNS.field("restarts").type)


def _spans(mask: NDArray[np.bool_] | None, offsets: NDArray[np.int32]) -> pa.Array:
    """The stretches of each rollout that are in the loss, which are the batch's: none of a failed one."""
    assert mask is not None
    edge = np.zeros(len(mask) + 1, bool)
    edge[offsets] = True
    before, after = np.append(False, mask[:-1]), np.append(mask[1:], False)
    starts = np.flatnonzero(mask & (~before | edge[:-1]))
    stops = np.flatnonzero(mask & (~after | edge[1:])) + 1
    counts = np.diff(np.searchsorted(starts, offsets))
    begin = np.repeat(offsets[:-1], counts)
    fields = [pa.array((one - begin).astype(np.int32)) for one in (starts, stops)]
    return _structs(counts.tolist(), fields, COLUMNS.field("loss_spans").type)


def _scored(items: Sequence[Trajectory]) -> pa.Array:
    """What was in the loss of each rollout before an off-policy correction."""
    spans = [item.loss_spans if item.status == OK else [] for item in items]
    fields = [pa.array([one[end] for of_one in spans for one in of_one], pa.int32()) for end in (0, 1)]
    return _structs([len(of_one) for of_one in spans], fields, COLUMNS.field("scored_spans").type)


def _structs(counts: Sequence[int], fields: Sequence[pa.Array], kind: pa.DataType) -> pa.Array:
    """Lists of so many structs of these fields."""
    structs = pa.StructArray.from_arrays(fields, fields=list(kind.value_type))
    return pa.ListArray.from_arrays(pa.array([0, *accumulate(counts)], pa.int32()), structs).cast(kind)


def _lists(values: Sequence[NDArray[np.int32]]) -> pa.Array:
    flat = np.concatenate(values) if values else np.zeros(0, np.int32)
    return pa.ListArray.from_arrays(
        pa.array([0, *accumulate(map(len, values))], pa.int32()), pa.array(flat, pa.int32())
    )
