"""Division of batches among ranks, and how often their tensors are stored."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from skyrl_train.algorithms.token_selection import select_kl_cov_tokens
from skyrl_train.data.batch import TrainBatch
from skyrl_train.learner.batch_sharding import MicroBatchLimits, should_share_prompts, split_into_micro_batches
from skyrl_train.learner.learner import BatchSizes, Learner, LocalWorker, WorkerGroup, mini_batch_rows
from skyrl_train.learner.worker import MiniBatch
from skyrl_train.metrics import Metrics
from tests.support.padded_reference import grouped_batch

GROUPS = [(5, [9, 4, 7]), (3, [2, 8]), (6, [1, 1, 12]), (4, [6, 3])]
DATA_PARALLEL_SIZE = 2


class Rank:
    """A rank whose log-prob of a token is its id. It records the batches of its calls."""

    def __init__(self, batches: list[tuple[str, TrainBatch]]):
        self.batches = batches

    def forward(self, micro_batches: list[TrainBatch], count: int, share: bool) -> Tensor:
        self.batches += [("forward", batch) for batch in micro_batches]
        return torch.cat([torch.zeros(0), *(batch.input_ids.float() for batch in micro_batches)])

    def update(self, mini_batch: MiniBatch) -> dict[str, Any]:
        self.batches += [("update", batch) for batch in mini_batch.micro_batches]
        logprobs = [torch.zeros(0)]
        for batch, indices in zip(mini_batch.micro_batches, mini_batch.logprob_indices or (), strict=False):
            logprobs += [batch.select([row]).input_ids.float() for row in indices]
        return Metrics().to_dict() | {"logprobs": torch.cat(logprobs)}


class Group(WorkerGroup):
    """A worker group of ranks in this process, which records the values that are stored for them."""

    def __init__(
        self, stored: list[Any], ranks: int = DATA_PARALLEL_SIZE, parallel_size: int = 1, kind: type[Rank] = Rank
    ):
        self.stored = stored
        super().__init__([LocalWorker(kind([])) for _ in range(ranks)], parallel_size)  # type: ignore[arg-type]

    @property
    def batches(self) -> list[tuple[str, TrainBatch]]:
        """(method, micro-batch) of all calls on all ranks."""
        return [call for worker in self.workers for call in worker.worker.batches]

    def batches_of(self, method: str) -> list[TrainBatch]:
        """Return the micro-batches of all calls of a method."""
        return [batch for name, batch in self.batches if name == method]

    def put(self, value: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread(), "storing would block the event loop"
        self.stored.append(value)
        return value


def numbered_batch() -> TrainBatch:
    """Return a batch in which the reward of each row is its index."""
    batch = grouped_batch(GROUPS)
    rows = torch.arange(len(batch))
    logprobs = -torch.rand(len(batch.input_ids))
    return replace(
        batch, rewards=rows.float(), episode_ids=rows, rollout_logprobs=logprobs, sequence_advantages=rows - 2.0
    )


def assert_rows_of(batch: TrainBatch, parts: Sequence[TrainBatch], fields: Sequence[str], times: int = 1) -> None:
    """Assert that the parts have every row of the batch `times` times, with the same values of `fields`."""
    assert sorted(int(row) for part in parts for row in part.rewards) == sorted([*range(len(batch))] * times)
    for part in parts:
        expected = batch.select(part.rewards.long())
        for name in fields:
            assert torch.equal(getattr(part, name), getattr(expected, name)), name


def train_step(learner: Learner, batch: TrainBatch) -> TrainBatch:
    """Take a step on a batch and return the batch with its log-probs. The returns of a critic equal its values."""

    async def run() -> TrainBatch:
        scored = await learner.add_logprobs_and_values(batch)
        scored = scored.with_tokens(returns=scored.values)
        await learner.update(scored)
        return scored

    return asyncio.run(run())


@pytest.mark.parametrize(("mini_batch_groups", "epochs"), [(4, 1), (1, 1), (3, 2)])
def test_tokens_are_stored_once_for_all_calls(mini_batch_groups: int, epochs: int):
    stored: list[Any] = []
    policy, reference, critic = Group(stored), Group(stored), Group(stored)
    sizes = BatchSizes(mini_batch_groups, mini_batch_groups, epochs, max_tokens_per_microbatch=40)
    learner = Learner(policy, reference, sizes, critic=critic, needs_old_logprobs=True)
    batch = numbered_batch()
    scored = train_step(learner, batch)
    assert scored.ref_logprobs is not None and torch.equal(scored.ref_logprobs, batch.input_ids.float())
    shards = [value for value in stored if isinstance(value, TrainBatch)]
    assert sum(len(shard.input_ids) for shard in shards) == len(batch.input_ids)
    updates_of_fields = [value for value in stored if not isinstance(value, TrainBatch)]
    assert updates_of_fields
    assert not {"input_ids", "loss_mask"} & {name for fields in updates_of_fields for name in fields}
    for group in (policy, reference, critic):
        assert_rows_of(scored, group.batches_of("forward"), ["input_ids", "loss_mask"])
    updates = policy.batches_of("update")
    read = ["input_ids", "loss_mask", "rollout_logprobs", "old_logprobs", "ref_logprobs"]
    assert_rows_of(scored, updates, [*read, "sequence_advantages", "episode_ids", "temperature"], times=epochs)
    assert all(update.sequence_weights is not None for update in updates)
    assert all(update.values is None and update.returns is None for update in updates)
    updates = critic.batches_of("update")
    assert_rows_of(scored, updates, ["input_ids", "loss_mask", "values", "returns"], times=epochs)
    assert learner._sharded_batches == {}


def test_token_selection_reuses_stored_mini_batch():
    stored: list[Any] = []
    policy = Group(stored)
    logprobs: list[Tensor] = []

    def select(current: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        logprobs.append(current)
        return select_kl_cov_tokens(current, old, advantages, mask, kl_cov_frac=0.2)

    learner = Learner(policy, None, BatchSizes(2, max_tokens_per_microbatch=40), token_selector=select)
    batch = numbered_batch()
    train_step(learner, batch)
    assert torch.equal(torch.cat(logprobs), batch.input_ids.float())
    assert sum(len(value.input_ids) for value in stored if isinstance(value, TrainBatch)) == len(batch.input_ids)


def test_changed_mask_reaches_the_update():
    """An off-policy correction may mask sequences. Rows without a token in the loss are left out of the update."""
    policy = Group([])
    learner = Learner(policy, None, BatchSizes(2), needs_old_logprobs=True)
    batch = numbered_batch()
    mask = batch.loss_mask & batch.expand_to_tokens(batch.rewards != 4)

    async def run() -> None:
        scored = await learner.add_logprobs_and_values(batch)
        await learner.update(scored.with_tokens(loss_mask=mask))

    asyncio.run(run())
    updates = policy.batches_of("update")
    assert sorted(int(row) for update in updates for row in update.rewards) == [
        row for row in range(len(batch)) if row != 4
    ]
    for update in updates:
        expected = batch.with_tokens(loss_mask=mask).select(update.rewards.long())
        assert torch.equal(update.loss_mask, expected.loss_mask)


@pytest.mark.parametrize("share", [True, False])
def test_update_passes_depend_only_on_their_mini_batch(share: bool):
    policy = Group([])
    learner = Learner(
        policy, None, BatchSizes(3, max_tokens_per_microbatch=40, share_prompt=share), needs_old_logprobs=True
    )
    batch = numbered_batch()
    train_step(learner, batch)
    actual = [update.rewards.int().tolist() for update in policy.batches_of("update")]
    expected = []
    for rows in mini_batch_rows(batch, 3):
        passes = split_into_micro_batches(
            batch.select(rows), DATA_PARALLEL_SIZE, MicroBatchLimits(1, 40, 6 * 1024, share), share
        )
        expected += [[rows[row] for row in indices] for rank_passes in passes for indices in rank_passes]
    assert sorted(actual) == sorted(expected)


def test_critic_with_other_mini_batch_size():
    stored: list[Any] = []
    policy, critic = Group(stored), Group(stored)
    learner = Learner(policy, None, BatchSizes(4, critic_mini_batch_size=1), critic=critic)
    batch = numbered_batch()
    scored = train_step(learner, batch)
    updates = critic.batches_of("update")
    assert_rows_of(scored, updates, ["input_ids", "loss_mask", "values", "returns"])
    assert_rows_of(scored, policy.batches_of("update"), ["input_ids", "rollout_logprobs"])


def test_empty_shards_and_parallel_ranks_take_every_call():
    policy = Group([], ranks=8, parallel_size=2)
    batch = numbered_batch().select([0, 1, 2])
    learner = Learner(policy, None, BatchSizes(1), needs_old_logprobs=True)
    train_step(learner, batch)
    for method in ("forward", "update"):
        assert_rows_of(batch, policy.batches_of(method), ["input_ids"], times=2)


def test_known_routing_is_stored_for_policy_only():
    policy, reference = Group([]), Group([])
    learner = Learner(
        policy,
        reference,
        BatchSizes(2, max_tokens_per_microbatch=40),
        needs_old_logprobs=True,
        moe_routing_replay="rollout",
    )
    batch = numbered_batch()
    batch = batch.with_tokens(routing=torch.arange(len(batch.input_ids), dtype=torch.int16).reshape(-1, 1, 1))
    train_step(learner, batch)
    for method in ("forward", "update"):
        assert_rows_of(batch, policy.batches_of(method), ["input_ids", "routing"])
    assert all(part.routing is None for _, part in reference.batches) and reference.batches
    assert sum(len(value.input_ids) for value in policy.stored if isinstance(value, TrainBatch)) == len(batch.input_ids)


def test_update_logprobs_are_in_batch_order():
    policy = Group([])
    learner = Learner(policy, None, BatchSizes(4, max_tokens_per_microbatch=40))
    learner.num_sequences_with_logprobs = 5
    batch = numbered_batch()
    asyncio.run(learner.update(batch))
    first = int(batch.offsets[5])
    assert learner.update_logprobs is not None and torch.equal(
        learner.update_logprobs[:first], batch.input_ids[:first].float()
    )
    assert not learner.update_logprobs[first:].any()


def test_mini_batch_is_freed_after_its_last_step():
    policy = Group([])
    learner = Learner(policy, None, BatchSizes(2, update_epochs_per_batch=2), needs_old_logprobs=True)
    batch = numbered_batch()
    num_stored: list[int] = []

    async def run() -> None:
        scored = await learner.add_logprobs_and_values(batch)
        shards = await learner._shards(policy, scored)
        original = policy.call_sharded

        async def count_and_call(method: str, args: Sequence[Any]) -> list[Any]:
            num_stored.append(sum(mini_batch.stored is not None for mini_batch in shards.mini_batches))
            return await original(method, args)

        policy.call_sharded = count_and_call  # type: ignore[method-assign, assignment]
        await learner.update(scored)
        assert not any(mini_batch.stored for mini_batch in shards.mini_batches)

    asyncio.run(run())
    assert num_stored == [2, 2, 2, 1]


def test_probe_keeps_stored_shards():
    stored: list[Any] = []
    policy = Group(stored)
    learner = Learner(policy, None, BatchSizes(2), needs_old_logprobs=True)
    batch, probe = numbered_batch(), grouped_batch([(2, [3])])

    async def run() -> None:
        scored = await learner.add_logprobs_and_values(batch)
        await learner.compute_logprobs_or_values(policy, probe)
        await learner.update(scored)

    asyncio.run(run())
    shards = [value for value in stored if isinstance(value, TrainBatch)]
    assert sum(len(shard.input_ids) for shard in shards) == len(batch.input_ids) + len(probe.input_ids)


def test_longest_sequences_are_spread_over_ranks():
    policy = Group([])
    batch = grouped_batch([(2, [100]), (2, [10])] * 4)
    learner = Learner(policy, None, BatchSizes(2), needs_old_logprobs=True)
    train_step(learner, batch)
    first, second = (
        sum(len(batch.input_ids) for method, batch in worker.worker.batches if method == "forward")
        for worker in policy.workers
    )
    assert first == second


def test_probe_rows_are_balanced_over_ranks():
    policy = Group([])
    learner = Learner(policy, None, BatchSizes(1))
    batch = grouped_batch([(2, [9])] * 6)
    asyncio.run(learner.compute_logprobs_or_values(policy, batch))
    assert [len(worker.worker.batches) for worker in policy.workers] == [3, 3]


def test_routing_of_forward_is_stored_for_update():
    class RoutingRank(Rank):
        def forward_with_routing(
            self, micro_batches: list[TrainBatch], count: int, share: bool
        ) -> tuple[Tensor, Tensor]:
            scores = self.forward(micro_batches, count, share)
            return scores, scores.short().reshape(-1, 1, 1)

    policy = Group([], kind=RoutingRank)
    learner = Learner(policy, None, BatchSizes(2, max_tokens_per_microbatch=40), moe_routing_replay="old_policy")
    batch = numbered_batch()
    scored = train_step(learner, batch)
    assert scored.routing is not None and torch.equal(scored.routing.flatten(), batch.input_ids.short())
    assert_rows_of(scored, policy.batches_of("update"), ["input_ids", "routing"])


def test_other_batch_is_not_mistaken_for_stored_one():
    policy = Group([])
    learner = Learner(policy, None, BatchSizes(4), needs_old_logprobs=True)
    first, other = numbered_batch(), numbered_batch()
    other = other.with_tokens(input_ids=other.input_ids + 1)

    async def run() -> list[Tensor | None]:
        return [(await learner.add_logprobs_and_values(batch)).old_logprobs for batch in (first, other, first)]

    for batch, scores in zip((first, other, first), asyncio.run(run()), strict=True):
        assert scores is not None and torch.equal(scores, batch.input_ids.float())


def test_rows_are_restored_from_their_arrays():
    batch = numbered_batch()
    rows = [7, 2, 3]
    restored = (
        batch.select_logprob_inputs()
        .select(rows)
        .with_arrays(batch.to_arrays(rows, without=("input_ids", "loss_mask")))
    )
    assert torch.equal(restored.rollout_logprobs, batch.select(rows).rollout_logprobs)  # type: ignore[arg-type]
    assert torch.equal(restored.offsets, batch.select(rows).offsets)
    assert all(isinstance(value, np.ndarray) for value in batch.to_arrays(rows, without=()).values())


SHAPES = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.integers(1, 30), min_size=1, max_size=6)), min_size=1, max_size=6
)


def limits(sequences: int | None = None, tokens: int | None = None, share: bool | None = True) -> MicroBatchLimits:
    return MicroBatchLimits(sequences, tokens, attention_tokens=6 * 1024, share_prompt=share)


def num_computed_tokens(batch: TrainBatch, rows: list[int]) -> int:
    """Return the number of tokens that the model computes for these rows, with shared prompts."""
    part = batch.select(rows)
    return int(part.lengths.sum() - part.shared_prompt_lengths().sum())


@settings(deadline=None, max_examples=60)
@given(SHAPES, st.integers(1, 4), st.integers(20, 200), st.booleans())
def test_every_sequence_is_run_once_within_the_budget(shapes, ranks: int, budget: int, share: bool):  # type: ignore[no-untyped-def]
    batch = grouped_batch(shapes)
    plan = split_into_micro_batches(batch, ranks, limits(tokens=budget), share)
    assert len(plan) == ranks
    assert sorted(row for rank in plan for rows in rank for row in rows) == list(range(len(batch)))
    for rows in (rows for rank in plan for rows in rank):
        num_tokens = num_computed_tokens(batch, rows) if share else int(batch.lengths[rows].sum())
        assert num_tokens <= budget or len(rows) == 1


def test_micro_batches_have_the_given_number_of_sequences():
    batch = grouped_batch([(8, [3] * 5), (4, [2] * 2)])
    for share in (True, False):
        (plan,) = split_into_micro_batches(batch, 1, limits(sequences=2), share)
        assert [len(rows) for rows in plan] == [2, 2, 2, 1]


def test_samples_of_a_prompt_share_a_rank():
    batch = grouped_batch([(50, [10] * 4)] * 4)
    plan = split_into_micro_batches(batch, 2, limits(tokens=10_000), share_prompts=True)
    assert [[num_computed_tokens(batch, rows) for rows in rank] for rank in plan] == [[180], [180]]


def test_large_group_is_split_over_ranks():
    batch = grouped_batch([(5, [100] * 8)])
    plan = split_into_micro_batches(batch, 2, limits(tokens=10_000), share_prompts=True)
    assert [[len(rows) for rows in rank] for rank in plan] == [[4], [4]]


def test_equal_lengths_do_not_mix_prompts():
    """If sequences were sorted only by length, samples of two prompts would alternate and share nothing."""
    batch = grouped_batch([(9, [5, 3]), (9, [4, 2])])
    (plan,) = split_into_micro_batches(batch, 1, limits(tokens=10_000), share_prompts=True)
    assert [num_computed_tokens(batch, rows) for rows in plan] == [18 + 14]


@pytest.mark.parametrize(("prompt", "expected"), [(1, False), (40, True)])
def test_prompt_sharing_is_enabled_automatically(prompt: int, expected: bool):
    batch = grouped_batch([(prompt, [60, 60])])
    assert should_share_prompts(batch, limits(share=None)) is expected
    assert should_share_prompts(batch, limits(share=True)) and not should_share_prompts(batch, limits(share=False))


def test_single_sequence_passes_share_no_prompts():
    batch = grouped_batch([(500, [100] * 8)] * 3)
    for share in (None, True):
        single = limits(sequences=1, share=share)
        assert not should_share_prompts(batch, single)
        plan = split_into_micro_batches(batch, 2, single, should_share_prompts(batch, single))
        assert [sum(num_computed_tokens(batch, rows) for rows in rank) for rank in plan] == [7200, 7200]


def test_prompt_cost_counts_once_per_pass():
    batch = grouped_batch([(1000, [10] * 8), (10, [1000] * 4)])
    plan = split_into_micro_batches(batch, 2, limits(sequences=2), share_prompts=True)
    loads = [sum(num_computed_tokens(batch, rows) for rows in rank) for rank in plan]
    assert max(loads) <= 1.1 * sum(loads) / 2


def test_token_budget_limits_shared_prompts():
    """A single pass would compute 3,640 tokens, but need keys and values of 195,640."""
    batch = grouped_batch([(3000, [10] * 64)])
    (plan,) = split_into_micro_batches(batch, 1, limits(tokens=4096), share_prompts=True)
    assert all(int(batch.lengths[rows].sum()) <= 4 * 4096 for rows in plan)
