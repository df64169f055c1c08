from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from skyrl_train.data.batch import TrainBatch
from skyrl_train.learner.shards import PassLimits, micro_batches, shares_prompts
from tests.support.padded_reference import grouped_batch

SHAPES = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.integers(1, 30), min_size=1, max_size=6)), min_size=1, max_size=6
)


def limits(sequences: int | None = None, tokens: int | None = None, share: bool | None = True) -> PassLimits:
    return PassLimits(sequences, tokens, attention_tokens=6 * 1024, share_prompt=share)


def computed(batch: TrainBatch, rows: list[int]) -> int:
    """Tokens that go through the model for these rows."""
    part = batch.select(rows)
    return int(part.lengths.sum() - part.repeated_prompts().sum())


@settings(deadline=None, max_examples=60)
@given(SHAPES, st.integers(1, 4), st.integers(20, 200), st.booleans())
def test_every_sequence_is_run_once_within_the_budget(shapes, ranks: int, budget: int, share: bool):  # type: ignore[no-untyped-def]
    batch = grouped_batch(shapes)
    plan = micro_batches(batch, ranks, limits(tokens=budget), share)
    assert len(plan) == ranks
    assert sorted(row for rank in plan for one in rank for row in one) == list(range(len(batch)))
    for one in (one for rank in plan for one in rank):
        used = computed(batch, one) if share else int(batch.lengths[one].sum())
        assert used <= budget or len(one) == 1


def test_a_number_of_sequences_means_what_it_says():
    batch = grouped_batch([(8, [3] * 5), (4, [2] * 2)])
    for share in (True, False):
        (plan,) = micro_batches(batch, 1, limits(sequences=2), share)
        assert [len(one) for one in plan] == [2, 2, 2, 1]


def test_the_samples_of_a_prompt_stay_together_on_one_rank_where_ranks_stay_even():
    batch = grouped_batch([(50, [10] * 4)] * 4)
    plan = micro_batches(batch, 2, limits(tokens=10_000), share=True)
    assert [[computed(batch, one) for one in rank] for rank in plan] == [[180], [180]]


def test_a_group_is_cut_where_one_rank_would_wait_for_it():
    batch = grouped_batch([(5, [100] * 8)])
    plan = micro_batches(batch, 2, limits(tokens=10_000), share=True)
    assert [[len(one) for one in rank] for rank in plan] == [[4], [4]]


def test_equal_lengths_do_not_mix_prompts():
    """Sorted by length alone, samples of two prompts would alternate, and nothing would be shared."""
    batch = grouped_batch([(9, [5, 3]), (9, [4, 2])])
    (plan,) = micro_batches(batch, 1, limits(tokens=10_000), share=True)
    assert [computed(batch, one) for one in plan] == [18 + 14]


@pytest.mark.parametrize(("prompt", "expected"), [(1, False), (40, True)])
def test_prompts_are_shared_by_themselves_where_that_is_worth_it(prompt: int, expected: bool):
    batch = grouped_batch([(prompt, [60, 60])])
    assert shares_prompts(batch, limits(share=None)) is expected
    assert shares_prompts(batch, limits(share=True)) and not shares_prompts(batch, limits(share=False))


def test_passes_of_one_sequence_share_nothing_and_are_balanced_as_such():
    batch = grouped_batch([(500, [100] * 8)] * 3)
    for share in (None, True):
        one_each = limits(sequences=1, share=share)
        assert not shares_prompts(batch, one_each)
        plan = micro_batches(batch, 2, one_each, shares_prompts(batch, one_each))
        assert [sum(computed(batch, one) for one in rank) for rank in plan] == [7200, 7200]


def test_a_prompt_costs_once_for_every_pass_that_it_is_in():
    batch = grouped_batch([(1000, [10] * 8), (10, [1000] * 4)])
    plan = micro_batches(batch, 2, limits(sequences=2), share=True)
    loads = [sum(computed(batch, one) for one in rank) for rank in plan]
    assert max(loads) <= 1.1 * sum(loads) / 2


def test_keys_of_shared_prompts_are_bounded_by_the_budget_too():
    """One pass would compute 3,640 tokens, and keep keys and values for 195,640."""
    batch = grouped_batch([(3000, [10] * 64)])
    (plan,) = micro_batches(batch, 1, limits(tokens=4096), share=True)
    assert all(int(batch.lengths[one].sum()) <= 4 * 4096 for one in plan)
