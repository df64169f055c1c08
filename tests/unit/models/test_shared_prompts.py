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
    "empty responses": [(4, [0, 3, 0]), (3, [0, 0])],
    "nothing in common": [(3, [4]), (3, [4])],
}


@pytest.mark.parametrize("name", GROUPS)
def test_prompts_run_once_and_tokens_are_restored(name: str) -> None:
    groups = GROUPS[name]
    batch = grouped_batch(groups)
    layout = SharedPromptLayout.from_offsets(batch.offsets, batch.shared_prompt_lengths())
    assert len(layout.token_indices) == sum(prompt + sum(responses) for prompt, responses in groups)
    indices = layout.token_indices[layout.inverse_indices]
    assert torch.equal(batch.input_ids[indices], batch.input_ids)
    assert torch.equal(batch.position_ids[indices], batch.position_ids)
    assert torch.equal(batch.expand_to_tokens(batch.group_ids)[indices], batch.expand_to_tokens(batch.group_ids))


@pytest.mark.parametrize("name", GROUPS)
def test_token_attends_only_to_its_sequence(name: str) -> None:
    batch = grouped_batch(GROUPS[name])
    layout = SharedPromptLayout.from_offsets(batch.offsets, batch.shared_prompt_lengths())
    segments = layout.segments
    keys = torch.arange(len(layout.token_indices)) if segments.key_indices is None else segments.key_indices
    key_offsets = segments.offsets if segments.key_offsets is None else segments.key_offsets
    attended = {}
    for segment, length in enumerate(segments.lengths):
        visible = keys[int(key_offsets[segment]) : int(key_offsets[segment + 1])]
        assert len(visible) == segments.attended_lengths[segment]
        for index in range(length):
            last = len(visible) - length + index
            attended[int(segments.offsets[segment]) + index] = layout.token_indices[visible[: last + 1]]
    for row in range(len(batch)):
        for token in range(int(batch.offsets[row]), int(batch.offsets[row + 1])):
            expected = batch.input_ids[int(batch.offsets[row]) : token + 1]
            assert torch.equal(batch.input_ids[attended[int(layout.inverse_indices[token])]], expected)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("name", GROUPS)
def test_shared_prompts_keep_attention_and_gradients(name: str, window: int | None, cap: float | None) -> None:
    batch = grouped_batch(GROUPS[name])
    layout = SharedPromptLayout.from_offsets(batch.offsets, batch.shared_prompt_lengths())
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(300, 3, 4, 8, generator=generator, dtype=torch.float64)
    # Equal tokens at equal positions have equal queries, keys and values, as in a model.
    states = (table[batch.input_ids] + batch.position_ids[:, None, None, None]).requires_grad_()
    options: dict[str, Any] = {"scaling": 0.3, "sliding_window": window, "softcap": cap}
    expected = ragged_attention(states[:, 0], states[:, 1, :2], states[:, 2, :2], batch.offsets, **options)
    shared_states = states[layout.token_indices]
    actual = ragged_attention(
        shared_states[:, 0], shared_states[:, 1, :2], shared_states[:, 2, :2], layout.segments, **options
    )[layout.inverse_indices]
    torch.testing.assert_close(actual, expected)
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    expected_gradient, gradient = (torch.autograd.grad((out * weights).sum(), states)[0] for out in (expected, actual))
    # The gradients of a shared prompt are summed at the token that runs.
    root = layout.token_indices[layout.inverse_indices]
    gathered = torch.zeros_like(expected_gradient).index_add(0, root, expected_gradient)
    torch.testing.assert_close(gradient, gathered)


def test_different_prompts_are_not_shared() -> None:
    batch = grouped_batch([(4, [3, 3, 3])])
    changed = batch.input_ids.clone()
    changed[int(batch.offsets[1])] += 1
    assert batch.shared_prompt_lengths().tolist() == [0, 4, 4]
    assert replace(batch, input_ids=changed).shared_prompt_lengths().tolist() == [0, 0, 0]


def test_inconsistent_shared_lengths_raise_assertion_error() -> None:
    batch = grouped_batch([(4, [3, 3, 3])])
    with pytest.raises(AssertionError, match="different numbers"):
        SharedPromptLayout.from_offsets(batch.offsets, torch.tensor([0, 4, 3]))


@pytest.mark.parametrize("share", [False, True])
def test_small_batch_is_padded_with_ignored_tokens(share: bool) -> None:
    batch = grouped_batch([(1, [1, 1])])
    shared_lengths = batch.shared_prompt_lengths() if share else None
    layout = SharedPromptLayout.from_offsets(batch.offsets, shared_lengths)
    padded = SharedPromptLayout.from_offsets(batch.offsets, shared_lengths, min_tokens=7)
    assert len(padded.token_indices) == sum(padded.segments.lengths) == 7
    assert len(layout.token_indices) == (3 if share else 4)
    assert torch.equal(batch.input_ids[padded.token_indices[padded.inverse_indices]], batch.input_ids)
    assert (
        SharedPromptLayout.from_offsets(batch.offsets, shared_lengths, min_tokens=3).segments.lengths
        == layout.segments.lengths
    )
    states = []
    for candidate in (layout, padded):
        table = (batch.input_ids.double() * (1 + batch.position_ids))[candidate.token_indices]
        qkv = table[:, None, None].expand(-1, 1, 4).sin()
        states.append(ragged_attention(qkv, qkv, qkv, candidate.segments)[candidate.inverse_indices])
    torch.testing.assert_close(*states)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_index_select_gradients_are_rounded_once(dtype: torch.dtype) -> None:
    rows = torch.zeros(3, 2, dtype=dtype, requires_grad=True)
    index = torch.tensor([1] * 400 + [2])
    weights = torch.full((401, 2), 1.0078125, dtype=dtype)  # the step after 1 in bfloat16
    selected = deterministic_index_select(rows, index)
    assert torch.equal(selected, rows[index])
    (gradient,) = torch.autograd.grad((selected * weights).sum(), rows)
    assert gradient.dtype == dtype
    assert gradient.tolist() == [[0, 0], [torch.tensor(403.125).to(dtype).item()] * 2, [1.0078125] * 2]
