"""Files with the rollouts of each step: all tokens that a step trained on, or those of its first groups.

Input: a step's groups and its batch with advantages. Output: rollouts/step_N.parquet. A thread writes it during the
update, or after the update if only the update computes the trainer's log-probs. The step waits for the file.
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
from skyrl_train.data.batch import TrainBatch, collate
from skyrl_train.data.messages import Message, ToolCallRecord
from skyrl_train.data.trajectory import OK, Trajectory, TrajectoryGroup
from skyrl_train.report.rollout_files import (
    COLUMNS,
    HIDDEN_TOKEN,
    RolloutReader,
    dump_json,
    pack_messages,
    pack_session,
    step_file,
    vocabulary_file,
    write_rollouts,
    write_vocabulary,
)

SAMPLED_GROUPS = 8
"""Number of groups to keep of a step if not all are kept. The first ones are a fair sample, as prompts are shuffled."""
CHUNK_TOKENS = 1_000_000
"""Approximate number of response tokens per table, which take about 40 bytes each in memory while it is written."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_TURN_FIELDS = tuple(field.name for field in COLUMNS.field("turns").type.value_type)
_log = logging.getLogger(__name__)


class RolloutWriter:
    """Writes the rollouts of each step to a file. If a write fails, the step has no file, and the run continues.

    Only the first failure logs a warning.
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
        """Write to the folder `rollouts` of a run.

        Args:
            run: The folder of the run.
            max_groups: Number of groups of a step to keep; None keeps all, 0 none.
            max_bytes: Size of the folder above which the files of the oldest steps are deleted; None for no limit.
            vocabulary: Returns the text of each token id, which is written once; None writes no texts.
            on_delete: Called with the path of each file that was deleted, in the thread that deletes it.
        """
        self._run = run
        self._max_groups = max_groups
        self._max_bytes = max_bytes
        self._vocabulary = vocabulary
        self._on_delete = on_delete
        self._failed = False

    def begin(self, step: int) -> None:
        """Delete the files of steps after `step`, which an earlier attempt of the run wrote. Logs a warning on failure.

        Args:
            step: The step from which the run continues.
        """
        try:
            for later_step in RolloutReader(self._run).steps():
                if later_step > step:
                    self._delete(step_file(self._run, later_step))
        except OSError as error:
            _log.warning("trainer.keep_rollouts: files of steps after %d cannot be deleted (%s).", step, error)

    def num_sequences(self, groups: Sequence[TrajectoryGroup]) -> int:
        """Return the number of sequences of `groups` that are written: the first ones of their batch."""
        return sum(len(list(item.sequences())) for _, item in _numbered(groups[: self._max_groups]))

    @asynccontextmanager
    async def writing(
        self,
        step: int,
        groups: Sequence[TrajectoryGroup],
        batch: TrainBatch,
        get_old_logprobs: Callable[[], Tensor | None] = lambda: None,
    ) -> AsyncIterator[None]:
        """Write the rollouts of a step while the body runs, and wait for the file on exit.

        Also writes the file if the body raises. If the batch has no old log-probs, the file has none in that case.

        Args:
            step: The step that trains on the rollouts.
            groups: The groups of the step.
            batch: The batch of `groups` in the same order, with advantages.
            get_old_logprobs: Returns the old log-probs [T] of the batch, or None. It is called after the body if the
                batch has no old log-probs; the file is then written after the body.
        """
        if self._max_groups == 0:
            yield
            return
        is_sample = self._max_groups is not None and self._max_groups < len(groups)
        groups = list(groups[: self._max_groups])  # a copy: the caller clears its list during the update
        if is_sample:
            rows = range(self.num_sequences(groups))
            unused = dict.fromkeys(("routing", "values", "returns", "importance_weights", "selected"))
            batch = batch.with_tokens(**unused).select(rows)
        if batch.old_logprobs is None:
            old_logprobs = None
            try:
                yield
                old_logprobs = get_old_logprobs()
            finally:
                if old_logprobs is not None:
                    batch = batch.with_tokens(old_logprobs=old_logprobs[: len(batch.input_ids)])
                await finish_despite_cancellation(asyncio.to_thread(self._write, step, groups, batch))
            return
        writing = asyncio.create_task(asyncio.to_thread(self._write, step, groups, batch))
        del groups, batch  # the thread frees them as soon as it has written them
        try:
            yield
        finally:
            await finish_despite_cancellation(_wait_for(writing))

    async def write_untrained(self, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        """Write the rollouts of a step on which nothing is trained because too many of them failed.

        Args:
            step: The step that would have trained on the rollouts.
            groups: The groups of the step.
        """
        groups = groups[: self._max_groups]
        if groups:
            await finish_despite_cancellation(asyncio.to_thread(self._write, step, groups, None))
            if (file := step_file(self._run, step)).exists():
                _log.warning("The rollouts of step %d, on which nothing was trained, are in %s.", step, file)

    def _write(self, step: int, groups: Sequence[TrajectoryGroup], batch: TrainBatch | None) -> None:
        """Write a step's file. Without a batch, it has no values that training computes."""
        try:
            with trace.span("rollouts kept", track="checkpoints", overlaps=True):
                batch = collate(groups) if batch is None else batch
                self._write_vocabulary()
                write_rollouts(
                    self._run, step, rollout_tables(step, groups, batch, RolloutReader(self._run).vocabulary)
                )
                self._delete_oldest(step)
        except Exception as error:  # from the disk, or from values that an environment put into its messages
            if not self._failed:
                reason = redact(f"{type(error).__name__}: {error}")
                _log.warning(
                    "trainer.keep_rollouts: the rollouts of step %d were not written (%s). Training continues and "
                    "still tries to write later steps. Further failures are not logged.",
                    step,
                    reason,
                )
            self._failed = True

    def _write_vocabulary(self) -> None:
        if self._vocabulary is None or vocabulary_file(self._run).exists():
            return
        try:
            texts = self._vocabulary()
        except Exception as error:  # from a tokenizer
            self._vocabulary = None
            reason = redact(f"{type(error).__name__}: {error}")
            _log.warning(
                "trainer.keep_rollouts: the texts of token ids are unknown (%s), so files show only the ids.", reason
            )
            return
        write_vocabulary(self._run, texts)

    def _delete_oldest(self, step: int) -> None:
        """Delete files of the oldest steps until the folder is within its limit.

        Raises OSError, after deleting the new file, if the file of `step` alone exceeds it.
        """
        if self._max_bytes is None:
            return
        files = [step_file(self._run, written_step) for written_step in RolloutReader(self._run).steps()]
        newest, sizes = step_file(self._run, step), {file: _size(file) for file in files}
        free = self._max_bytes - sum(sizes.values()) - _size(vocabulary_file(self._run))
        others = [file for file in files if file != newest]
        if free + sum(sizes[file] for file in others) < 0:
            self._delete(newest)
            raise OSError(f"they take {sizes[newest]:,} bytes, more than trainer.keep_rollouts_gb allows")
        for oldest in others:
            if free >= 0:
                return
            self._delete(oldest)
            free += sizes[oldest]

    def _delete(self, file: Path) -> None:
        file.unlink(missing_ok=True)
        if self._on_delete is not None:
            self._on_delete(file)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


async def _wait_for(task: asyncio.Task[None]) -> None:
    await task


def rollout_tables(
    step: int,
    groups: Sequence[TrajectoryGroup],
    batch: TrainBatch,
    vocabulary: Callable[[], Mapping[int, str]] = dict,
) -> Iterator[pa.Table]:
    """Yield tables with the columns of report/rollout_files.py and one row per trajectory, in the order of the groups.

    Secrets are removed from texts and messages, and ids of tokens that spell a secret are replaced by HIDDEN_TOKEN. If
    the texts of a rollout's tokens do not show which tokens spell its secret, all of its ids are replaced.

    Args:
        step: The step that trains on the groups.
        groups: The groups to write.
        batch: A batch that begins with the sequences of `groups`, in the same order.
        vocabulary: Returns the text of each token id. It is only called if a rollout contains a secret.
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
    """The concatenated response tokens of some sequences of a batch."""

    def __init__(self, batch: TrainBatch, first: int, last: int):
        self._batch = batch.select(range(first, last), copy=False)
        offsets = self._batch.offsets.tolist()
        prompts = self._batch.prompt_lengths.tolist()
        self._responses = [
            slice(start + prompt, stop)
            for start, prompt, stop in zip(offsets, prompts, offsets[1:], strict=False)
        ]  # fmt: skip

    def of(self, name: str) -> NDArray[Any] | None:
        """Return the values [tokens] of a token-level tensor of the batch; None if the batch does not have it."""
        tensor = getattr(self._batch, name)
        if tensor is None:
            return None
        values = tensor.numpy()
        return np.concatenate([values[response] for response in self._responses])


def _table(
    step: int,
    numbered: Sequence[tuple[int, Trajectory]],
    tokens: _ResponseTokens,
    vocabulary: Callable[[], Mapping[int, str]],
) -> pa.Table:
    items = [item for _, item in numbered]
    texts = [[item.text, item.messages or item.prompt.messages, item.session] for item in items]
    unsafe = [row for row, text in enumerate(texts) if contains_secret(text)]
    token_texts = vocabulary() if unsafe else {}
    hidden = {row: _secret_mask([*items[row].prompt_ids, *items[row].response_ids], token_texts) for row in unsafe}
    offsets = np.concatenate(([0], np.cumsum([len(item.response_ids) for item in items]))).astype(np.int32)
    columns: dict[str, Any] = {
        "step": np.full(len(items), step),
        "group": [index for index, _ in numbered],
        **_scalars(items),
        **_texts(items),
        "turns": _turns(items),
        "prompt_ids": _lists([_hide(item.prompt_ids, hidden.get(row)) for row, item in enumerate(items)]),
        "restarts": _restarts(items, token_texts, hidden),
        "loss_spans": _loss_spans(tokens.of("loss_mask"), offsets),
        "scored_spans": _uncorrected_loss_spans(items),
    }
    for name, source in _TOKEN_COLUMNS.items():
        values = tokens.of(source)
        if values is not None:
            if name == "response_ids" and hidden:
                values = values.copy()
                for row, mask in hidden.items():
                    values[offsets[row] : offsets[row + 1]][mask[len(items[row].prompt_ids) :]] = HIDDEN_TOKEN
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
"""Column -> field of TrainBatch."""


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


def _texts(items: Sequence[Trajectory]) -> dict[str, list[Any]]:
    """Return the text columns, without the contents of credential variables, which a tool may have printed."""
    redacted = redact(
        [
            (item.text, item.detail, item.messages or item.prompt.messages, item.env_metrics, item.session)
            for item in items
        ]
    )
    texts = [_clean(text) for text, *_ in redacted]
    extras: dict[int, str] = {}  # by prompt, because its samples share them
    for item in items:
        if id(item.prompt) not in extras:
            extras[id(item.prompt)] = dump_json(redact(item.prompt.env_extras))
    return {
        "text": texts,
        "detail": [_clean(detail) for _, detail, *_ in redacted],
        "messages": list(_pack_conversations([messages for _, _, messages, _, _ in redacted], texts)),
        "env_metrics": [dump_json(metrics) for *_, metrics, _ in redacted],
        "session": [None if session is None else pack_session(session) for *_, session in redacted],
        "env_extras": [extras[id(item.prompt)] for item in items],
    }


def _pack_conversations(conversations: Sequence[Sequence[Message]], texts: Sequence[str]) -> Iterator[str]:
    """Pack conversations for the file. A prompt that equals the one before is converted to JSON only once."""
    last_prompt: Sequence[Message] = ()
    prompt_json: list[str] = []
    for messages, text in zip(conversations, texts, strict=True):
        answers = (index for index, message in enumerate(messages) if message.get("role") == "assistant")
        prompt = messages[: next(answers, len(messages))]
        if prompt != last_prompt:
            last_prompt, prompt_json = prompt, [dump_json(message) for message in prompt]
        yield pack_messages(messages, text, prompt_json)


def _clean(text: str) -> str:
    """Replace lone surrogates, which Parquet does not accept."""
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
    """Remove secrets from a call, including those that its JSON arguments write with escapes."""
    try:
        arguments = json.loads(call["arguments"])
        redacted = redact(arguments)
        return redact(call if redacted == arguments else call | {"arguments": json.dumps(redacted, ensure_ascii=False)})
    except (ValueError, RecursionError):  # JSON may be nested too deeply for redaction even if it can be parsed
        return redact(call)


def _secret_mask(ids: Sequence[int], token_texts: Mapping[int, str]) -> NDArray[np.bool_]:
    """Return a mask [tokens] of the tokens that spell a secret.

    It covers all tokens if no secret is found in their texts, for example because a token is part of a character.
    """
    mask = np.array(find_secret_pieces([token_texts.get(token_id, "") for token_id in ids]), bool)
    return mask if mask.any() else np.ones(len(ids), bool)


def _hide(ids: NDArray[np.int32], mask: NDArray[np.bool_] | None) -> NDArray[np.int32]:
    """Replace the ids that are True in `mask`, which may be longer than `ids`."""
    return ids if mask is None else np.where(mask[: len(ids)], HIDDEN_TOKEN, ids).astype(np.int32)


def _restarts(items: Sequence[Trajectory], token_texts: Mapping[int, str], hidden: Collection[int]) -> pa.Array:
    restarts = [(row in hidden, restart) for row, item in enumerate(items) for restart in item.restarts]
    starts = pa.array([restart.start for _, restart in restarts], pa.int32())
    prompts = [
        _hide(restart.prompt_ids, _secret_mask([*restart.prompt_ids], token_texts) if has_secret else None)
        for has_secret, restart in restarts
    ]
    fields = [starts, _lists(prompts)]
    return _structs([len(item.restarts) for item in items], fields, COLUMNS.field("restarts").type)


def _loss_spans(mask: NDArray[np.bool_] | None, offsets: NDArray[np.int32]) -> pa.Array:
    """Return the spans of each rollout that are in the loss mask of the batch; failed rollouts have none."""
    assert mask is not None
    edge = np.zeros(len(mask) + 1, bool)
    edge[offsets] = True
    before, after = np.append(False, mask[:-1]), np.append(mask[1:], False)
    starts = np.flatnonzero(mask & (~before | edge[:-1]))
    stops = np.flatnonzero(mask & (~after | edge[1:])) + 1
    counts = np.diff(np.searchsorted(starts, offsets))
    begin = np.repeat(offsets[:-1], counts)
    fields = [pa.array((bound - begin).astype(np.int32)) for bound in (starts, stops)]
    return _structs(counts.tolist(), fields, COLUMNS.field("loss_spans").type)


def _uncorrected_loss_spans(items: Sequence[Trajectory]) -> pa.Array:
    """Return the spans of each rollout that were in the loss before an off-policy correction."""
    spans = [item.loss_spans if item.status == OK else [] for item in items]
    fields = [pa.array([span[end] for item_spans in spans for span in item_spans], pa.int32()) for end in (0, 1)]
    return _structs([len(item_spans) for item_spans in spans], fields, COLUMNS.field("scored_spans").type)


def _structs(counts: Sequence[int], fields: Sequence[pa.Array], kind: pa.DataType) -> pa.Array:
    """Return a list array whose lists have `counts` structs each, with the values of `fields`."""
    structs = pa.StructArray.from_arrays(fields, fields=list(kind.value_type))
    return pa.ListArray.from_arrays(pa.array([0, *accumulate(counts)], pa.int32()), structs).cast(kind)


def _lists(values: Sequence[NDArray[np.int32]]) -> pa.Array:
    flat = np.concatenate(values) if values else np.zeros(0, np.int32)
    return pa.ListArray.from_arrays(
        pa.array([0, *accumulate(map(len, values))], pa.int32()), pa.array(flat, pa.int32())
    )
