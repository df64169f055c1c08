"""Groups of a step, one of every kind, with the batch built from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from skyrl_train.data.batch import TrainBatch, collate
from skyrl_train.data.messages import Prompt
from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.data.trajectory import Restart, TrajectoryGroup, Turn
from tests.support.trajectories import trajectory_from

OF_TOKENS = {
    "response_ids": "input_ids",
    "trained": "loss_mask",
    "rollout_logprobs": "rollout_logprobs",
    "old_logprobs": "old_logprobs",
    "ref_logprobs": "ref_logprobs",
    "advantages": "advantages",
    "token_rewards": "token_rewards",
}
"""Maps columns to the tensors of a batch that they show."""
CALLED = {"name": "add", "arguments": '{"a": 2, "b": 3}', "error": "timeout"}
OPENING = {"role": "user", "content": "How many are two and three? Answer in one word."}
ODD = {"role": "user", "content": "Write what is no text."}


def groups_of_all_kinds(more: int = 0) -> list[TrajectoryGroup]:
    """Return episodes: one turn, two turns with tool output, three sequences, a failed one, and one without a token."""
    return [_first(), _second(), *(_plain(index) for index in range(more))]


def scored_batch(groups: list[TrajectoryGroup], with_reference: bool = True) -> TrainBatch:
    """Return their batch with all tensors of a step. All numbers differ between tokens, and one is not finite."""
    batch = collate(groups)
    random = torch.Generator().manual_seed(3)
    shape = batch.input_ids.shape
    old = batch.rollout_logprobs + 0.01 * torch.randn(shape, generator=random)  # type: ignore[operator]
    advantages = torch.where(batch.loss_mask, torch.randn(shape, generator=random), 0.0)
    advantages[-1] = float("nan")
    reference = torch.randn(shape, generator=random) if with_reference else None
    return batch.with_tokens(old_logprobs=old, ref_logprobs=reference, advantages=advantages)


def sampled_tokens(row: dict[str, Any]) -> int:
    """Return the number of sampled tokens of a row of rollouts."""
    return sum(turn["stop"] - turn["start"] - (turn["observation_tokens"] or 0) for turn in row["turns"])


def _first() -> TrajectoryGroup:
    prompt = Prompt("7", [OPENING], "toy", {"answer": "five", "weight": float("nan")}, "made/up")
    said = "Two and three are five, so the answer is five."
    one = trajectory_from(
        prompt, 0, [5, 6], [7, 8, 2], [1, 1, 1], [-0.1, -0.2, -0.3], [Turn(0, 3, 1.0, "stop", 3, 4, 3.5, 0.25)], 1.0,
        "stop", 0.7, text=said, messages=[OPENING, {"role": "assistant", "content": said}], raw_reward=1.5,
        env_metrics={"exact": 1.0},
    )  # fmt: skip
    tool = {"role": "tool", "content": "the sum of two and three: 5", "tool_call_id": "a"}
    calls = [{"id": "a", "function": {"name": "add", "arguments": "{}"}}]
    asks = {"role": "assistant", "content": "I shall ask the calculator.", "tool_calls": calls}
    answers = {"role": "assistant", "content": "It says that it is five."}
    two = trajectory_from(
        prompt, 1, [5, 6], [9, 9, 1, 1, 4], [1, 1, 0, 0, 1], [-1.0, -2.0, 0.0, 0.0, -3.0],
        [Turn(0, 2, 0.25, "stop", 3, 3, environment_s=0.5, tool_calls=(CALLED,)), Turn(4, 5, 0.5, "length", 4, 4)],
        0.75, "length", 0.7,
        text=f"assistant: {asks['content']}\ntool: {tool['content']}\nassistant: {answers['content']}",
        messages=[OPENING, asks, tool, answers],
    )  # fmt: skip
    return TrajectoryGroup(prompt, [one, two])


def _second() -> TrajectoryGroup:
    prompt = Prompt("a \ud83d\0\x1b[31m", [ODD], "toy", {}, "made/up")
    several = trajectory_from(
        prompt, 0, [5], [7, 8, 9, 3, 2], [1, 1, 0, 1, 1], [-0.5, -0.25, 0.0, -0.75, -1.5],
        [Turn(0, 2, 0.0, "stop", 1, 1), Turn(3, 5, 2.0, "stop", 2, 2)], 2.0, "stop", 0.7,
        text="half of a pair \ud83d, a NUL \0 and an escape \x1b[31m",
        messages=[ODD, {"role": "assistant", "content": "half of a pair \ud83d, a NUL \0 and an escape \x1b[31m"}],
        restarts=[Restart(3, to_token_array([5, 5, 5])), Restart(4, to_token_array([6, 6]))],
    )  # fmt: skip
    failed = trajectory_from(
        prompt, 1, [5], [7, 8], [1, 1], [-0.5, -0.25], [Turn(0, 2, 3.0, "stop", 1, 1)], 3.0, "stop", 0.7
    )
    failed.fail("timeout", "It took more than a second.")
    empty = trajectory_from(prompt, 2, [5], [], [], [], [], 0.0, "abort", 0.7)
    return TrajectoryGroup(prompt, [several, failed, empty])


def _plain(index: int) -> TrajectoryGroup:
    prompt = Prompt(f"plain {index}", [OPENING], "toy")
    turns = [Turn(0, 40, 1.0, "stop", 1, 1)]
    rows: list[Any] = [
        trajectory_from(prompt, n, [5, n], [index % 90 + 3] * 40, [1] * 40, [-0.125 * n] * 40, turns, 1.0, "stop", 0.7)
        for n in range(2)
    ]
    return TrajectoryGroup(prompt, rows)


def assert_rollouts_match_batch(table: pa.Table, batch: TrainBatch, uids: Sequence[str]) -> None:
    """These rollouts are those of the batch, whose sequences have these uids: every number of a token, to the bit.

    Old log-probs that the batch does not have yet may be those that its update told.
    """
    offsets, prompts = batch.offsets.tolist(), batch.prompt_lengths.tolist()
    sequence = 0
    for row in table.to_pylist():
        mine = range(sequence, sequence + 1 + len(row["restarts"]))
        assert {uids[n] for n in mine} == {row["uid"]}
        if batch.episode_ids is not None:
            assert len({int(batch.episode_ids[n]) for n in mine}) == 1
        assert {int(batch.group_ids[n]) for n in mine} == {row["group"]}
        places = [slice(offsets[n] + prompts[n], offsets[n + 1]) for n in mine]
        for column, name in OF_TOKENS.items():
            tensor = getattr(batch, name)
            if tensor is None:
                assert row[column] is None or name == "old_logprobs", column
                continue
            wanted = torch.cat([tensor[place] for place in places]).numpy()
            assert np.array(row[column], wanted.dtype).tobytes() == wanted.tobytes(), (row["uid"], column)
        heads = [row["prompt_ids"], *(one["prompt_ids"] for one in row["restarts"])]
        assert heads == [batch.input_ids[offsets[n] : offsets[n] + prompts[n]].tolist() for n in mine]
        starts = np.cumsum([place.stop - place.start for place in places])[:-1].tolist()
        assert [one["start"] for one in row["restarts"]] == starts
        sequence = mine.stop
    assert sequence == len(batch) == len(uids)
