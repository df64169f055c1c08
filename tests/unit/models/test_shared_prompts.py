from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from skyrl_train.models.ragged_attention import deterministic_index_select, ragged_attention
from skyrl_train.models.shared_prompts import SharedPromptLayout
from tests.support.padded_reference import grouped_batch

GROUPS = {
    "one group": [(5, [3, 7, 3])],
    "several": [(5, [3, 7, 3]), (2, [4]), (9, [1, 1]), (1, [2, 6])],
    "empty answers": [(4, [0, 3, 0]), (3, [0, 0])],
    "nothing in common": [(3, [4]), (3, [4])],
}


@pytest.mark.parametrize("name", GROUPS)
def test_every_prompt_is_computed_once_and_every_token_finds_its_own(name: str) -> None:
    groups = GROUPS[name]
    batch = grouped_batch(groups)
    packing = SharedPromptLayout.from_offsets(batch.offsets, batch.shared_prompt_lengths())
    assert len(packing.token_indices) == sum(prompt + sum(answers) for prompt, answers in groups)
    found = packing.token_indices[packing.inverse_indices]
    assert torch.equal(batch.input_ids[found], batch.input_ids)
    assert torch.equal(batch.position_ids[found], batch.position_ids)
    assert torch.equal(batch.expand_to_tokens(batch.group_ids)[found], batch.expand_to_tokens(batch.group_ids))


@pytest.mark.parametrize("name", GROUPS)
def test_a_token_sees_what_precedes_it_in_its_own_sequence_and_itself(name: str) -> None:
    batch = grouped_batch(GROUPS[name])
    packing = SharedPromptLayout.from_offsets(batch.offsets, batch.shared_prompt_lengths())
    segments = packing.segments
    keys = torch.arange(len(packing.token_indices)) if segments.key_indices is None else segments.key_indices
    key_offsets = segments.offsets if segments.key_offsets is None else segments.key_offsets
    seen = {}
    for stretch, length in enumerate(segments.lengths):
        visible = keys[int(key_offsets[stretch]) : int(key_offsets[stretch + 1])]
        assert len(visible) == segments.attended_lengths[stretch]
        for place in range(length):
            last = len(visible) - length + place
            seen[int(segments.offsets[stretch]) + place] = packing.token_indices[visible[: last + 1]]
    for row in range(len(batch)):
        for token in range(int(batch.offsets[row]), int(batch.offsets[row + 1])):
            expected = batch.input_ids[int(batch.offsets[row]) : token + 1]
            assert torch.equal(batch.input_ids[seen[int(packing.inverse_indices[token])]], expected)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("name", GROUPS)
def test_attention_over_shared_prompts_is_that_over_whole_sequences(
    name: str, window: int | None, cap: float | None
) -> None:
    batch = grouped_batch(GROUPS[name])
    packing = SharedPromptLayout.from_offsets(batch.offsets, batch.shared_prompt_lengths())
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(300, 3, 4, 8, generator=generator, dtype=torch.float64)
    # Equal tokens at equal places have equal queries, keys and values, as in a model.
    whole = (table[batch.input_ids] + batch.position_ids[:, None, None, None]).requires_grad_()
    options: dict[str, Any] = {"scaling": 0.3, "sliding_window": window, "softcap": cap}
    expected = ragged_attention(whole[:, 0], whole[:, 1, :2], whole[:, 2, :2], batch.offsets, **options)
    some = whole[packing.token_indices]
    got = ragged_attention(some[:, 0], some[:, 1, :2], some[:, 2, :2], packing.segments, **options)[
        packing.inverse_indices
    ]
    torch.testing.assert_close(got, expected)
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    wanted, found = (torch.autograd.grad((out * weights).sum(), whole)[0] for out in (expected, got))
    # A prompt's gradients meet in the token that is computed.
    root = packing.token_indices[packing.inverse_indices]
    gathered = torch.zeros_like(wanted).index_add(0, root, wanted)
    torch.testing.assert_close(found, gathered)


def test_samples_whose_prompts_differ_share_nothing() -> None:
    batch = grouped_batch([(4, [3, 3, 3])])
    changed = batch.input_ids.clone()
    changed[int(batch.offsets[1])] += 1
    assert batch.shared_prompt_lengths().tolist() == [0, 4, 4]
    assert replace(batch, input_ids=changed).shared_prompt_lengths().tolist() == [0, 0, 0]


def test_neighbours_that_would_share_different_numbers_of_tokens_are_a_bug_not_a_guess() -> None:
    batch = grouped_batch([(4, [3, 3, 3])])
    with pytest.raises(AssertionError, match="different numbers"):
        SharedPromptLayout.from_offsets(batch.offsets, torch.tensor([0, 4, 3]))


@pytest.mark.parametrize("share", [False, True])
def test_a_batch_of_few_tokens_is_filled_up_with_tokens_that_nobody_sees(share: bool) -> None:
    batch = grouped_batch([(1, [1, 1])])
    repeated = batch.shared_prompt_lengths() if share else None
    packing = SharedPromptLayout.from_offsets(batch.offsets, repeated)
    full = SharedPromptLayout.from_offsets(batch.offsets, repeated, min_tokens=7)
    assert len(full.token_indices) == sum(full.segments.lengths) == 7
    assert len(packing.token_indices) == (3 if share else 4)
    assert torch.equal(batch.input_ids[full.token_indices[full.inverse_indices]], batch.input_ids)
    assert (
        SharedPromptLayout.from_offsets(batch.offsets, repeated, min_tokens=3).segments.lengths
        == packing.segments.lengths
    )
    states = []
    for one in (packing, full):
        table = (batch.input_ids.double() * (1 + batch.position_ids))[one.token_indices]
        qkv = table[:, None, None].expand(-1, 1, 4).sin()
        states.append(ragged_attention(qkv, qkv, qkv, one.segments)[one.inverse_indices])
    torch.testing.assert_close(*states)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_of_a_row_that_is_taken_often_are_summed_before_they_are_rounded(dtype: torch.dtype) -> None:
    rows = torch.zeros(3, 2, dtype=dtype, requires_grad=True)
    index = torch.tensor([1] * 400 + [2])
    weights = torch.full((401, 2), 1.0078125, dtype=dtype)  # the step after 1 in bfloat16
    taken = deterministic_index_select(rows, index)
    assert torch.equal(taken, rows[index])
    (gradient,) = torch.autograd.grad((taken * weights).sum(), rows)
    assert gradient.dtype == dtype
    assert gradient.tolist() == [[0, 0], [torch.tensor(403.125).to(dtype).item()] * 2, [1.0078125] * 2]
