"""What ranks are given of a batch, and how often it moves."""

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
PARTS = 2


class Rank:
    """Scores every token by its id, and keeps what updates have."""

    def __init__(self, seen: list[tuple[str, TrainBatch]]):
        self._seen = seen

    def forward(self, micro_batches: list[TrainBatch], count: int, share: bool) -> Tensor:
        self._seen += [("forward", one) for one in micro_batches]
        return torch.cat([torch.zeros(0), *(one.input_ids.float() for one in micro_batches)])

    def update(self, mini_batch: MiniBatch) -> dict[str, Any]:
        self._seen += [("update", one) for one in mini_batch.micro_batches]
        told = [torch.zeros(0)]
        for one, wanted in zip(mini_batch.micro_batches, mini_batch.logprob_indices or (), strict=False):
            told += [one.select([row]).input_ids.float() for row in wanted]
        return Metrics().to_dict() | {"logprobs": torch.cat(told)}


class Group(WorkerGroup):
    """Ranks in this process, and what was put where they read it."""

    def __init__(self, stored: list[Any], ranks: int = PARTS, parallel_size: int = 1, kind: type[Rank] = Rank):
        self.stored = stored
        super().__init__([LocalWorker(kind([])) for _ in range(ranks)], parallel_size)  # type: ignore[arg-type]

    @property
    def seen(self) -> list[tuple[str, TrainBatch]]:
        return [one for worker in self.workers for one in worker.worker._seen]

    def put(self, value: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread(), "the event loop would stand still"
        self.stored.append(value)
        return value


def numbered() -> TrainBatch:
    """Each row says which one it is."""
    batch = grouped_batch(GROUPS)
    rows = torch.arange(len(batch))
    logprobs = -torch.rand(len(batch.input_ids))
    return replace(
        batch, rewards=rows.float(), episode_ids=rows, rollout_logprobs=logprobs, sequence_advantages=rows - 2.0
    )


def assert_rows_of(batch: TrainBatch, seen: Sequence[TrainBatch], fields: Sequence[str], times: int = 1) -> None:
    """Every row of the batch is there so many times, whole."""
    assert sorted(int(row) for one in seen for row in one.rewards) == sorted([*range(len(batch))] * times)
    for one in seen:
        whole = batch.select(one.rewards.long())
        for name in fields:
            assert torch.equal(getattr(one, name), getattr(whole, name)), name


def train_step(learner: Learner, batch: TrainBatch) -> TrainBatch:
    """The batch as it was scored, after a step on it; a critic learns the values that it has."""

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
    batch = numbered()
    scored = train_step(learner, batch)
    assert scored.ref_logprobs is not None and torch.equal(scored.ref_logprobs, batch.input_ids.float())
    of_tokens = [one for one in stored if isinstance(one, TrainBatch)]
    assert sum(len(one.input_ids) for one in of_tokens) == len(batch.input_ids)
    found = [one for one in stored if not isinstance(one, TrainBatch)]
    assert found and not {"input_ids", "loss_mask"} & {name for one in found for name in one}
    for group in (policy, reference, critic):
        assert_rows_of(scored, [one for call, one in group.seen if call == "forward"], ["input_ids", "loss_mask"])
    updates = [one for call, one in policy.seen if call == "update"]
    read = ["input_ids", "loss_mask", "rollout_logprobs", "old_logprobs", "ref_logprobs"]
    assert_rows_of(scored, updates, [*read, "sequence_advantages", "episode_ids", "temperature"], times=epochs)
    assert all(one.sequence_weights is not None for one in updates)
    assert all(one.values is None and one.returns is None for one in updates)
    updates = [one for call, one in critic.seen if call == "update"]
    assert_rows_of(scored, updates, ["input_ids", "loss_mask", "values", "returns"], times=epochs)
    assert learner._sharded_batches == {}


def test_token_selection_reuses_stored_mini_batch():
    stored: list[Any] = []
    policy = Group(stored)
    chosen: list[Tensor] = []

    def choose(current: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        chosen.append(current)
        return select_kl_cov_tokens(current, old, advantages, mask, kl_cov_frac=0.2)

    learner = Learner(policy, None, BatchSizes(2, max_tokens_per_microbatch=40), token_selector=choose)
    batch = numbered()
    train_step(learner, batch)
    assert torch.equal(torch.cat(chosen), batch.input_ids.float())
    assert sum(len(one.input_ids) for one in stored if isinstance(one, TrainBatch)) == len(batch.input_ids)


def test_changed_mask_reaches_the_update():
    """As a correction does that rejects sequences: rows without a token that counts are left out."""
    policy = Group([])
    learner = Learner(policy, None, BatchSizes(2), needs_old_logprobs=True)
    batch = numbered()
    mask = batch.loss_mask & batch.expand_to_tokens(batch.rewards != 4)

    async def run() -> None:
        scored = await learner.add_logprobs_and_values(batch)
        await learner.update(scored.with_tokens(loss_mask=mask))

    asyncio.run(run())
    updates = [one for call, one in policy.seen if call == "update"]
    assert sorted(int(row) for one in updates for row in one.rewards) == [row for row in range(len(batch)) if row != 4]
    for one in updates:
        assert torch.equal(one.loss_mask, batch.with_tokens(loss_mask=mask).select(one.rewards.long()).loss_mask)


@pytest.mark.parametrize("share", [True, False])
def test_update_passes_depend_only_on_their_mini_batch(share: bool):
    policy = Group([])
    learner = Learner(
        policy, None, BatchSizes(3, max_tokens_per_microbatch=40, share_prompt=share), needs_old_logprobs=True
    )
    batch = numbered()
    train_step(learner, batch)
    found = [one.rewards.int().tolist() for call, one in policy.seen if call == "update"]
    wanted = []
    for rows in mini_batch_rows(batch, 3):
        passes = split_into_micro_batches(batch.select(rows), PARTS, MicroBatchLimits(1, 40, 6 * 1024, share), share)
        wanted += [[rows[row] for row in one] for of_part in passes for one in of_part]
    assert sorted(found) == sorted(wanted)


def test_critic_with_other_mini_batch_size():
    stored: list[Any] = []
    policy, critic = Group(stored), Group(stored)
    learner = Learner(policy, None, BatchSizes(4, critic_mini_batch_size=1), critic=critic)
    batch = numbered()
    scored = train_step(learner, batch)
    updates = [one for call, one in critic.seen if call == "update"]
    assert_rows_of(scored, updates, ["input_ids", "loss_mask", "values", "returns"])
    assert_rows_of(scored, [one for call, one in policy.seen if call == "update"], ["input_ids", "rollout_logprobs"])


def test_empty_shards_and_parallel_ranks_take_every_call():
    policy = Group([], ranks=8, parallel_size=2)
    batch = numbered().select([0, 1, 2])
    learner = Learner(policy, None, BatchSizes(1), needs_old_logprobs=True)
    train_step(learner, batch)
    for call in ("forward", "update"):
        assert_rows_of(batch, [one for name, one in policy.seen if name == call], ["input_ids"], times=2)


def test_known_routing_is_stored_for_policy_only():
    policy, reference = Group([]), Group([])
    learner = Learner(
        policy,
        reference,
        BatchSizes(2, max_tokens_per_microbatch=40),
        needs_old_logprobs=True,
        moe_routing_replay="rollout",
    )
    batch = numbered()
    batch = batch.with_tokens(routing=torch.arange(len(batch.input_ids), dtype=torch.int16).reshape(-1, 1, 1))
    train_step(learner, batch)
    for call in ("forward", "update"):
        assert_rows_of(batch, [one for name, one in policy.seen if name == call], ["input_ids", "routing"])
    assert all(one.routing is None for _, one in reference.seen) and reference.seen
    assert sum(len(one.input_ids) for one in policy.stored if isinstance(one, TrainBatch)) == len(batch.input_ids)


def test_update_logprobs_are_in_batch_order():
    policy = Group([])
    learner = Learner(policy, None, BatchSizes(4, max_tokens_per_microbatch=40))
    learner.num_sequences_with_logprobs = 5
    batch = numbered()
    asyncio.run(learner.update(batch))
    first = int(batch.offsets[5])
    assert learner.update_logprobs is not None and torch.equal(
        learner.update_logprobs[:first], batch.input_ids[:first].float()
    )
    assert not learner.update_logprobs[first:].any()


def test_mini_batch_is_freed_after_its_last_step():
    policy = Group([])
    learner = Learner(policy, None, BatchSizes(2, update_epochs_per_batch=2), needs_old_logprobs=True)
    batch = numbered()
    left: list[int] = []

    async def run() -> None:
        scored = await learner.add_logprobs_and_values(batch)
        shards = await learner._shards(policy, scored)
        scatter = policy.call_sharded

        async def watched(method: str, args: Sequence[Any]) -> list[Any]:
            left.append(sum(one.stored is not None for one in shards.mini_batches))
            return await scatter(method, args)

        policy.call_sharded = watched  # type: ignore[method-assign, assignment]
        await learner.update(scored)
        assert not any(one.stored for one in shards.mini_batches)

    asyncio.run(run())
    assert left == [2, 2, 2, 1]


def test_probe_keeps_stored_shards():
    stored: list[Any] = []
    policy = Group(stored)
    learner = Learner(policy, None, BatchSizes(2), needs_old_logprobs=True)
    batch, probe = numbered(), grouped_batch([(2, [3])])

    async def run() -> None:
        scored = await learner.add_logprobs_and_values(batch)
        await learner.compute_logprobs_or_values(policy, probe)
        await learner.update(scored)

    asyncio.run(run())
    of_tokens = [one for one in stored if isinstance(one, TrainBatch)]
    assert sum(len(one.input_ids) for one in of_tokens) == len(batch.input_ids) + len(probe.input_ids)


def test_longest_sequences_are_spread_over_ranks():
    policy = Group([])
    batch = grouped_batch([(2, [100]), (2, [10])] * 4)
    learner = Learner(policy, None, BatchSizes(2), needs_old_logprobs=True)
    train_step(learner, batch)
    first, second = (
        sum(len(one.input_ids) for call, one in worker.worker._seen if call == "forward") for worker in policy.workers
    )
    assert first == second


def test_probe_rows_are_balanced_over_ranks():
    policy = Group([])
    learner = Learner(policy, None, BatchSizes(1))
    batch = grouped_batch([(2, [9])] * 6)
    asyncio.run(learner.compute_logprobs_or_values(policy, batch))
    assert [len([one for _, one in worker.worker._seen]) for worker in policy.workers] == [3, 3]


def test_routing_of_forward_is_stored_for_update():
    class Routes(Rank):
        def forward_with_routing(
            self, micro_batches: list[TrainBatch], count: int, share: bool
        ) -> tuple[Tensor, Tensor]:
            scores = self.forward(micro_batches, count, share)
            return scores, scores.short().reshape(-1, 1, 1)

    policy = Group([], kind=Routes)
    learner = Learner(policy, None, BatchSizes(2, max_tokens_per_microbatch=40), moe_routing_replay="old_policy")
    batch = numbered()
    scored = train_step(learner, batch)
    assert scored.routing is not None and torch.equal(scored.routing.flatten(), batch.input_ids.short())
    assert_rows_of(scored, [one for call, one in policy.seen if call == "update"], ["input_ids", "routing"])


def test_other_batch_is_not_mistaken_for_stored_one():
    policy = Group([])
    learner = Learner(policy, None, BatchSizes(4), needs_old_logprobs=True)
    one, other = numbered(), numbered()
    other = other.with_tokens(input_ids=other.input_ids + 1)

    async def run() -> list[Tensor | None]:
        return [(await learner.add_logprobs_and_values(batch)).old_logprobs for batch in (one, other, one)]

    for batch, scores in zip((one, other, one), asyncio.run(run()), strict=True):
        assert scores is not None and torch.equal(scores, batch.input_ids.float())


def test_arrays_of_rows_make_them_again_elsewhere():
    batch = numbered()
    rows = [7, 2, 3]
    there = (
        batch.select_logprob_inputs()
        .select(rows)
        .with_arrays(batch.to_arrays(rows, without=("input_ids", "loss_mask")))
    )
    assert torch.equal(there.rollout_logprobs, batch.select(rows).rollout_logprobs)  # type: ignore[arg-type]
    assert torch.equal(there.offsets, batch.select(rows).offsets)
    assert all(isinstance(value, np.ndarray) for value in batch.to_arrays(rows, without=()).values())


SHAPES = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.integers(1, 30), min_size=1, max_size=6)), min_size=1, max_size=6
)


def limits(sequences: int | None = None, tokens: int | None = None, share: bool | None = True) -> MicroBatchLimits:
    return MicroBatchLimits(sequences, tokens, attention_tokens=6 * 1024, share_prompt=share)


def computed(batch: TrainBatch, rows: list[int]) -> int:
    """Tokens that go through the model for these rows."""
    part = batch.select(rows)
    return int(part.lengths.sum() - part.shared_prompt_lengths().sum())


@settings(deadline=None, max_examples=60)
@given(SHAPES, st.integers(1, 4), st.integers(20, 200), st.booleans())
def test_every_sequence_is_run_once_within_the_budget(shapes, ranks: int, budget: int, share: bool):  # type: ignore[no-untyped-def]
    batch = grouped_batch(shapes)
    plan = split_into_micro_batches(batch, ranks, limits(tokens=budget), share)
    assert len(plan) == ranks
    assert sorted(row for rank in plan for one in rank for row in one) == list(range(len(batch)))
    for one in (one for rank in plan for one in rank):
        used = computed(batch, one) if share else int(batch.lengths[one].sum())
        assert used <= budget or len(one) == 1


def test_a_number_of_sequences_means_what_it_says():
    batch = grouped_batch([(8, [3] * 5), (4, [2] * 2)])
    for share in (True, False):
        (plan,) = split_into_micro_batches(batch, 1, limits(sequences=2), share)
        assert [len(one) for one in plan] == [2, 2, 2, 1]


def test_samples_of_a_prompt_share_a_rank():
    batch = grouped_batch([(50, [10] * 4)] * 4)
    plan = split_into_micro_batches(batch, 2, limits(tokens=10_000), share_prompts=True)
    assert [[computed(batch, one) for one in rank] for rank in plan] == [[180], [180]]


def test_large_group_is_split_over_ranks():
    batch = grouped_batch([(5, [100] * 8)])
    plan = split_into_micro_batches(batch, 2, limits(tokens=10_000), share_prompts=True)
    assert [[len(one) for one in rank] for rank in plan] == [[4], [4]]


def test_equal_lengths_do_not_mix_prompts():
    """Sorted by length alone, samples of two prompts would alternate, and nothing would be shared."""
    batch = grouped_batch([(9, [5, 3]), (9, [4, 2])])
    (plan,) = split_into_micro_batches(batch, 1, limits(tokens=10_000), share_prompts=True)
    assert [computed(batch, one) for one in plan] == [18 + 14]


@pytest.mark.parametrize(("prompt", "expected"), [(1, False), (40, True)])
def test_prompt_sharing_is_enabled_automatically(prompt: int, expected: bool):
    batch = grouped_batch([(prompt, [60, 60])])
    assert should_share_prompts(batch, limits(share=None)) is expected
    assert should_share_prompts(batch, limits(share=True)) and not should_share_prompts(batch, limits(share=False))


def test_single_sequence_passes_share_no_prompts():
    batch = grouped_batch([(500, [100] * 8)] * 3)
    for share in (None, True):
        one_each = limits(sequences=1, share=share)
        assert not should_share_prompts(batch, one_each)
        plan = split_into_micro_batches(batch, 2, one_each, should_share_prompts(batch, one_each))
        assert [sum(computed(batch, one) for one in rank) for rank in plan] == [7200, 7200]


def test_prompt_cost_counts_once_per_pass():
    batch = grouped_batch([(1000, [10] * 8), (10, [1000] * 4)])
    plan = split_into_micro_batches(batch, 2, limits(sequences=2), share_prompts=True)
    loads = [sum(computed(batch, one) for one in rank) for rank in plan]
    assert max(loads) <= 1.1 * sum(loads) / 2


def test_token_budget_limits_shared_prompts():
    """One pass would compute 3,640 tokens, and keep keys and values for 195,640."""
    batch = grouped_batch([(3000, [10] * 64)])
    (plan,) = split_into_micro_batches(batch, 1, limits(tokens=4096), share_prompts=True)
    assert all(int(batch.lengths[one].sum()) <= 4 * 4096 for one in plan)
