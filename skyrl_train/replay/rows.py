"""Kept rollouts as the run had them: the trajectories of a step, and the batch that it trained on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from skyrl_train.data.batch import TrainBatch, collate
from skyrl_train.data.trajectory import Message, Prompt, Restart, Trajectory, TrajectoryGroup, Turn
from skyrl_train.report.rollout_files import RolloutFiles

_OF_THE_BATCH = ("old_logprobs", "ref_logprobs", "advantages", "token_rewards")
_LISTS = ("prompt_ids", "response_ids", "rollout_logprobs", *_OF_THE_BATCH)
_PLAIN = (
    *("step", "uid", "group", "sample", "data_source", "env_class", "reward", "raw_reward", "turns", "status"),
    *("error", "detail", "stop_reason", "temperature", "env_metrics", "messages", "text", "env_extras"),
    *("scored_spans", "loss_spans", "restarts"),
)


@dataclass(frozen=True)
class KeptRollout:
    """A trajectory, and what the step's batch had of its response tokens: arrays [L] float32, or None."""

    group: int
    trajectory: Trajectory
    tokens: dict[str, NDArray[np.float32] | None]
    """By column: old_logprobs, ref_logprobs, advantages, token_rewards."""


@dataclass(frozen=True)
class KeptStep:
    """The rollouts that were kept of one step, in the order of its batch."""

    step: int
    rollouts: list[KeptRollout]
    knows_scored: bool
    """Whether the files say what was in the loss before corrections; those of before there were `scored_spans` have
    only what these left."""

    @property
    def groups(self) -> list[TrajectoryGroup]:
        """The step's groups, or what was kept of them, in order."""
        members: dict[int, list[Trajectory]] = {}
        for one in self.rollouts:
            members.setdefault(one.group, []).append(one.trajectory)
        return [TrajectoryGroup(items[0].prompt, items) for items in members.values()]

    def batch(self) -> TrainBatch:
        """The batch that the step trained on, as it was before advantages and corrections.

        Without what is not kept: the critic's values, and the experts that tokens went to.
        """
        batch = collate(self.groups)
        given = _laid_out(self.rollouts, batch, "token_rewards", batch.token_rewards)
        scored = {name: _laid_out(self.rollouts, batch, name) for name in ("old_logprobs", "ref_logprobs")}
        return batch.with_tokens(**scored, token_rewards=given)

    def advantages(self, batch: TrainBatch) -> Tensor | None:
        """[T] the advantages that the run computed; `batch`: what `batch()` returned. None if it kept none."""
        return _laid_out(self.rollouts, batch, "advantages")

    def rescored_batch(self, groups: Sequence[TrajectoryGroup], old: TrainBatch) -> tuple[TrainBatch, int]:
        """The batch that these groups make, which are the step's with other rewards; `old`: what `batch()` returned.

        Also how many of its tokens have no log-probs of the trainer, because the run did not train on them: theirs are
        the engine's, as if both models agreed.
        """
        batch = collate(groups)
        unknown = batch.loss_mask & ~old.loss_mask
        scored = {}
        known = batch.rollout_logprobs
        for name in ("old_logprobs", "ref_logprobs"):
            values = getattr(old, name)
            if values is not None and known is not None:
                values = torch.where(unknown, known, values)
            scored[name] = values
        return batch.with_tokens(**scored), int(unknown.sum()) if old.old_logprobs is not None else 0


def read_step(files: RolloutFiles, step: int) -> KeptStep:
    """The rollouts of a step. Raises OSError or pa.ArrowInvalid for a file that cannot be read."""
    table = files.table(steps=[step], columns=[*_PLAIN, *_LISTS])
    lists = {name: list(_arrays(table[name])) for name in _LISTS}
    rows = table.select(_PLAIN).to_pylist()
    prompts: dict[int, Prompt] = {}
    found = []
    for index, row in enumerate(rows):
        arrays = {name: values[index] for name, values in lists.items()}
        trajectory = _trajectory(row, arrays, prompts)
        found.append(KeptRollout(row["group"], trajectory, {name: arrays[name] for name in _OF_THE_BATCH}))
    knows_scored = all(row["scored_spans"] is not None for row in rows)
    return KeptStep(step, found, knows_scored)


def answers_of(trajectory: Trajectory) -> list[int]:
    """Which of its messages are the model's turns; fewer than there are turns if they cannot be told."""
    said = [index for index, message in enumerate(trajectory.messages) if message.get("role") == "assistant"]
    return said[max(len(said) - len(trajectory.turns), 0) :] if trajectory.turns else []


def opening_of(trajectory: Trajectory) -> list[Message]:
    """The messages that its episode began with."""
    answers = answers_of(trajectory)
    return trajectory.messages[: answers[0]] if answers else trajectory.messages


def _turn(kept: dict[str, Any]) -> Turn:
    calls, read = tuple(json.loads(kept["tool_calls"] or "[]")), kept["observation_tokens"] or 0
    return Turn(**{**kept, "tool_calls": calls, "observation_tokens": read})


def _trajectory(row: dict[str, Any], arrays: dict[str, Any], prompts: dict[int, Prompt]) -> Trajectory:
    messages = json.loads(row["messages"] or "[]")
    spans = row["loss_spans"] if row["scored_spans"] is None else row["scored_spans"]
    made = Trajectory(
        prompt=Prompt(row["uid"], [], row["env_class"]),
        sample=row["sample"],
        prompt_ids=_present(arrays["prompt_ids"]),
        response_ids=_present(arrays["response_ids"]),
        loss_spans=[(span["start"], span["stop"]) for span in spans or ()],
        logprobs=_present(arrays["rollout_logprobs"]),
        turns=[_turn(turn) for turn in row["turns"] or ()],
        reward=row["reward"],
        stop_reason=row["stop_reason"],
        temperature=row["temperature"],
        env_metrics=json.loads(row["env_metrics"] or "{}"),
        status=row["status"],
        error=row["error"],
        text=row["text"] or "",
        messages=messages,
        raw_reward=row["raw_reward"],
        detail=row["detail"] or "",
        restarts=[Restart(one["start"], np.asarray(one["prompt_ids"], np.int32)) for one in row["restarts"] or ()],
    )
    if row["group"] not in prompts:
        extras = json.loads(row["env_extras"] or "{}")
        prompts[row["group"]] = Prompt(row["uid"], opening_of(made), row["env_class"], extras, row["data_source"])
    made.prompt = prompts[row["group"]]
    return made


def _present(array: NDArray[Any] | None) -> NDArray[Any]:
    return np.zeros(0, np.float32) if array is None else array


def _arrays(column: pa.ChunkedArray) -> Iterator[NDArray[Any] | None]:
    """[rows] of a column of lists; None for null."""
    for chunk in column.chunks:
        values, offsets = chunk.values.to_numpy(zero_copy_only=False), chunk.offsets.to_numpy().tolist()
        for valid, start, stop in zip(chunk.is_valid().to_pylist(), offsets, offsets[1:], strict=False):
            yield values[start:stop] if valid else None


def _laid_out(
    rollouts: Sequence[KeptRollout], batch: TrainBatch, column: str, otherwise: Tensor | None = None
) -> Tensor | None:
    """[T] a column of response tokens at its places in the batch, 0 on prompts.

    A row without it has `otherwise`; if that is None, the batch has none.
    """
    if otherwise is None and any(one.tokens[column] is None and len(one.trajectory.response_ids) for one in rollouts):
        return None
    result = torch.zeros(len(batch.input_ids)) if otherwise is None else otherwise.clone()
    ends = batch.offsets[1:].tolist()
    row = 0
    for one in rollouts:
        values = one.tokens[column]
        for _, start, stop in one.trajectory.sequences():
            if values is not None:
                result[ends[row] - (stop - start) : ends[row]] = torch.tensor(values[start:stop])
            row += 1
    return result
