from __future__ import annotations

import pickle
import warnings
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from skyrl_train.data.batch import SEQUENCE_FIELDS, TOKEN_FIELDS, TrainBatch, collate, concat_batches, pack
from skyrl_train.data.messages import Prompt
from skyrl_train.data.trajectory import FAILED, OK, Trajectory, TrajectoryGroup, Turn
from tests.support.padded_reference import grouped_batch
from tests.support.tensor_size_mode import LargestTensor
from tests.support.trajectories import trajectory_from


def trajectory(prompt: Prompt, sample: int, prompt_ids: list[int], response: list[int], status: str = OK) -> Trajectory:
    length = len(response)
    return trajectory_from(
        prompt=prompt,
        sample=sample,
        prompt_ids=prompt_ids,
        response_ids=response,
        loss_mask=[1] * length,
        logprobs=[-0.5 - i for i in range(length)],
        turns=[Turn(0, length, 1.0, "stop", 3 + sample, 5)] if length else [],
        reward=float(sample),
        stop_reason="stop",
        temperature=0.7,
        status=status,
    )


def group(index: int, lengths: list[tuple[int, int]], status: str = OK) -> TrajectoryGroup:
    prompt = Prompt(uid=str(index), messages=[], env_class="none")
    items = [
        trajectory(prompt, sample, [10 * index + i for i in range(p)], [100 * sample + i for i in range(r)], status)
        for sample, (p, r) in enumerate(lengths)
    ]
    return TrajectoryGroup(prompt, items)


shapes = st.lists(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=4), min_size=1, max_size=4
)


def make_batch(groups: list[list[tuple[int, int]]]) -> TrainBatch:
    batch = collate([group(index, lengths) for index, lengths in enumerate(groups)])
    return batch.with_tokens(advantages=torch.arange(len(batch.input_ids), dtype=torch.float32))


def assert_same(left: TrainBatch, right: TrainBatch) -> None:
    for field in fields(TrainBatch):
        first, second = getattr(left, field.name), getattr(right, field.name)
        assert (first is None) == (second is None), field.name
        if first is not None:
            assert first.dtype == second.dtype, field.name
            assert torch.equal(first, second), field.name


def test_fields_are_per_token_or_per_sequence():
    assert {field.name for field in fields(TrainBatch)} == {*TOKEN_FIELDS, *SEQUENCE_FIELDS, "offsets"}


def test_tokens_are_held_once():
    groups = [group(0, [(2, 3), (2, 4)]), group(1, [(3, 1)])]
    before = [
        (item.prompt_ids.tolist(), item.response_ids.tolist(), item.logprobs.tolist())
        for item in get_trajectories(groups)
    ]
    batch = collate(groups)
    assert batch.input_ids.dtype == torch.int32
    assert [
        (x.prompt_ids.tolist(), x.response_ids.tolist(), x.logprobs.tolist()) for x in get_trajectories(groups)
    ] == before
    assert batch.rollout_logprobs is not None
    for item in get_trajectories(groups):
        assert np.shares_memory(item.response_ids, batch.input_ids.numpy())
        assert np.shares_memory(item.prompt_ids, batch.input_ids.numpy())
        assert np.shares_memory(item.logprobs, batch.rollout_logprobs.numpy())
    assert_same(collate(groups), batch)  # once more, of the views


def get_trajectories(groups: list[TrajectoryGroup]) -> list[Trajectory]:
    return [item for one in groups for item in one.trajectories]


def test_consecutive_sequences_are_views_without_copy():
    batch = make_batch([[(2, 3), (1, 4)], [(3, 1), (2, 2)]])
    for rows in ([1, 2], [0, 1, 2, 3], [2, 0], [0, 2, 3], []):
        assert_same(batch.select(rows, copy=False), batch.select(rows))
    assert batch.advantages is not None
    for copy, shares in ((False, True), (True, False)):
        found = batch.select([1, 2], copy=copy)
        assert found.advantages is not None
        assert np.shares_memory(found.advantages.numpy(), batch.advantages.numpy()) == shares
        # what is sent to another process takes no more along than its own tokens
        assert (found.advantages.untyped_storage().nbytes() == found.advantages.nbytes) == copy


def test_logprob_inputs_omit_other_fields():
    batch = make_batch([[(2, 3), (1, 4)]])
    kept = {name for name in TOKEN_FIELDS if getattr(batch.select_logprob_inputs(), name) is not None}
    assert kept == {"input_ids", "loss_mask"}


def test_update_inputs_omit_other_fields():
    batch = make_batch([[(2, 3), (1, 4)]])
    batch = batch.with_tokens(values=batch.advantages, returns=batch.advantages, old_logprobs=batch.advantages)
    for role, wanted in (
        ("policy", {"input_ids", "loss_mask", "rollout_logprobs", "old_logprobs", "advantages"}),
        ("critic", {"input_ids", "loss_mask", "values", "returns"}),
    ):
        sent = batch.select_update_inputs(role)
        assert {name for name in TOKEN_FIELDS if getattr(sent, name) is not None} == wanted


@given(shapes)
def test_pickled_selection_excludes_rest_of_batch(groups: list[list[tuple[int, int]]]):
    batch = make_batch(groups)
    part = batch.select([0], copy=False)
    for one in (batch, part):
        buffers: list[pickle.PickleBuffer] = []
        text = pickle.dumps(one, protocol=5, buffer_callback=buffers.append)
        held = {f.name: getattr(one, f.name) for f in fields(one) if getattr(one, f.name) is not None}
        assert sum(buffer.raw().nbytes for buffer in buffers) == sum(value.nbytes for value in held.values())
        with warnings.catch_warnings(action="error"):
            arrived = pickle.loads(text, buffers=[bytes(buffer) for buffer in buffers])  # which is read-only
        for name, value in held.items():
            assert torch.equal(getattr(arrived, name), value)
            assert getattr(arrived, name).dtype == value.dtype


def test_the_example_of_the_docstring():
    prompt = Prompt(uid="0", messages=[], env_class="none")
    items = [trajectory(prompt, 0, [5, 6], [7, 2]), trajectory(prompt, 1, [5, 6], [8])]
    batch = collate([TrajectoryGroup(prompt, items)])
    assert batch.input_ids.tolist() == [5, 6, 7, 2, 5, 6, 8]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert batch.loss_mask.int().tolist() == [0, 0, 1, 1, 0, 0, 1]
    assert batch.offsets.tolist() == [0, 4, 7]
    assert batch.prompt_lengths.tolist() == [2, 2]
    assert batch.rollout_logprobs is not None
    assert batch.rollout_logprobs.tolist() == [0, 0, -0.5, -1.5, 0, 0, -0.5], "the log-prob of a token is at its place"
    assert batch.min_versions.tolist() == [3, 4]
    assert batch.max_versions.tolist() == [5, 5]
    assert batch.rewards.tolist() == [0, 1]
    assert batch.temperature.tolist() == pytest.approx([0.7, 0.7])


def test_failed_trajectories_keep_masked_rows():
    batch = collate([group(0, [(2, 3)]), group(1, [(2, 3)], FAILED), group(2, [(1, 1)])])
    assert batch.group_ids.tolist() == [0, 1, 2]
    assert batch.status.tolist() == [True, False, True]
    assert batch.sum_per_sequence(batch.loss_mask.float()).tolist() == [3, 0, 1]
    assert batch.num_loss_tokens.tolist() == [3, 0, 1]


def test_token_fields_of_different_length_raise():
    broken = group(7, [(2, 3)])
    broken.trajectories[0].logprobs = broken.trajectories[0].logprobs[:-1]
    with pytest.raises(ValueError, match="prompt 7"):
        collate([broken])


@given(shapes, st.randoms(use_true_random=False))
def test_selecting_in_any_order_and_back_changes_nothing(groups, random):
    batch = make_batch(groups)
    order = list(range(len(batch)))
    random.shuffle(order)
    shuffled = batch.select(order)
    assert shuffled.position_ids[shuffled.offsets[:-1]].eq(0).all()
    back = torch.argsort(torch.tensor(order))
    assert_same(shuffled.select(back), batch)


@given(shapes, st.none() | st.integers(1, 4), st.none() | st.integers(1, 20))
def test_splitting_and_concatenating_restores_batch(groups, max_sequences, token_budget):
    batch = make_batch(groups)
    parts = batch.split_micro_batches(max_sequences=max_sequences, token_budget=token_budget)
    assert_same(concat_batches(parts), batch)
    for part in parts:
        assert max_sequences is None or len(part) <= max_sequences
        assert token_budget is None or len(part.input_ids) <= token_budget or len(part) == 1


@given(shapes, st.integers(1, 6))
def test_partition_is_complete_and_balanced(groups, ranks):
    batch = make_batch(groups)
    rows = batch.partition(ranks)
    assert sorted(row for of_rank in rows for row in of_rank) == list(range(len(batch)))
    loads = [int(batch.lengths[of_rank].sum()) for of_rank in rows]
    assert max(loads) - min(loads) <= int(batch.lengths.max())


def test_sharding_balances_the_given_cost_not_the_tokens():
    batch = make_batch([[(1, 5), (1, 5), (1, 5), (1, 0)]])
    rows = batch.partition(2, cost=torch.tensor([1.0, 1.0, 1.0, 3.0]))
    assert rows == [[3], [0, 1, 2]]


@given(shapes)
def test_per_token_and_per_sequence_views_agree(groups):
    batch = make_batch(groups)
    assert torch.equal(batch.expand_to_tokens(torch.arange(len(batch))), batch.sequence_ids)
    assert torch.equal(batch.sum_per_sequence(torch.ones(len(batch.input_ids))), batch.lengths.float())


@given(shapes)
def test_padded_tensor_holds_every_token_once(groups):
    batch = make_batch(groups)
    rectangle = batch.padded(batch.input_ids, fill=-1)
    assert rectangle.shape == (len(batch), int(batch.lengths.max()))
    for row, (start, stop) in enumerate(zip(batch.offsets[:-1], batch.offsets[1:], strict=True)):
        length = int(stop - start)
        assert torch.equal(rectangle[row, :length], batch.input_ids[start:stop])
        assert rectangle[row, length:].eq(-1).all()


def test_with_tokens_rejects_length_and_name():
    batch = make_batch([[(2, 2)]])
    with pytest.raises(ValueError, match=r"values: .* for 4 tokens"):
        batch.with_tokens(values=torch.zeros(3))
    with pytest.raises(ValueError, match="rewards: must be one of"):
        batch.with_tokens(rewards=torch.zeros(4))


def test_concat_rejects_partly_missing_tensor():
    batch = make_batch([[(2, 2), (1, 1)]])
    with pytest.raises(ValueError, match="advantages"):
        concat_batches([batch, batch.with_tokens(advantages=None)])


def test_a_sequence_longer_than_the_budget_stands_alone():
    assert pack([3, 9, 2, 2, 2], max_sequences=None, token_budget=5) == [[0], [1], [2, 3], [4]]
    assert pack([1, 1, 1], max_sequences=2, token_budget=None) == [[0, 1], [2]]
    assert pack([], max_sequences=2, token_budget=2) == []


def test_differently_routed_prompts_are_not_shared() -> None:
    batch = grouped_batch([(3, [2, 2, 2])])
    assert batch.shared_prompt_lengths().tolist() == [0, 3, 3]
    routing = torch.zeros(len(batch.input_ids), 1, 2, dtype=torch.int16)
    assert batch.with_tokens(routing=routing).shared_prompt_lengths().tolist() == [0, 3, 3]
    routing[int(batch.offsets[1])] = 1
    assert batch.with_tokens(routing=routing).shared_prompt_lengths().tolist() == [0, 0, 0]


@pytest.mark.defect("batch-split-quadratic")
def test_selection_cost_is_independent_of_batch():
    prompt = Prompt("p", [], "none")
    one = [Turn(0, 1, 1.0, "stop", 0, 0)]
    items = [trajectory_from(prompt, n, [1], [2], [1], [-0.5], one, 1.0, "stop", 1.0) for n in range(500)]
    batch = collate([TrajectoryGroup(prompt, items)])
    with LargestTensor() as largest:
        part = batch.select([3, 4, 400])
    assert part.input_ids.tolist() == [1, 2] * 3
    assert largest.max_elements <= 8
