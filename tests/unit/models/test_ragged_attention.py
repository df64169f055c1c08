from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from skyrl_train.models.ragged_attention import Segments, deterministic_index_select, ragged_attention


def qkv(tokens: int, heads: int, kv_heads: int, size: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(tokens, count, size, generator=generator, dtype=torch.float64).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    )
    return query, key, value


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: list[int],
    scaling: float,
    window: int | None,
    cap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """One [T, T] matrix of scores and a mask written out from the definition."""
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scaling
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(len(owner))
    back = place[:, None] - place[None, :]
    seen = (owner[:, None] == owner[None, :]) & (back >= 0)
    if window is not None:
        seen &= back < window
    weights = scores.masked_fill(~seen, -torch.inf).exp()
    beside = 0.0 if sinks is None else sinks.exp()[:, None, None]
    return torch.einsum("hqk,khd->qhd", weights / (weights.sum(-1, keepdim=True) + beside), value)


def offsets_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


@pytest.mark.parametrize("lengths", [[5, 9, 5, 1, 9, 3], [4, 4, 4], [7], [1, 1], [3, 0, 2]])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (4, 1)])
@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_values_and_gradients_are_those_of_the_definition(
    lengths: list[int], heads: int, kv_heads: int, window: int | None, cap: float | None
) -> None:
    inputs = qkv(sum(lengths), heads, kv_heads)
    weights = torch.randn(sum(lengths), heads, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = plain_attention(*inputs, lengths, 0.5, window, cap)
    wanted = torch.autograd.grad((expected * weights).sum(), inputs)
    got = ragged_attention(*inputs, offsets_of(lengths), scaling=0.5, sliding_window=window, softcap=cap)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(torch.autograd.grad((got * weights).sum(), inputs), wanted)


@pytest.mark.parametrize("lengths", [[5, 9, 5, 1, 9, 3], [7]])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3)])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_a_sink_takes_its_share_of_every_token_s_attention(
    lengths: list[int], heads: int, kv_heads: int, window: int | None, cap: float | None
) -> None:
    sinks = torch.linspace(-2.0, 3.0, heads, dtype=torch.float64).requires_grad_()
    inputs = *qkv(sum(lengths), heads, kv_heads), sinks
    weights = torch.randn(sum(lengths), heads, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = plain_attention(*inputs[:3], lengths, 0.5, window, cap, sinks)
    wanted = torch.autograd.grad((expected * weights).sum(), inputs)
    rules: dict[str, Any] = {"scaling": 0.5, "sliding_window": window, "softcap": cap, "sinks": sinks}
    got = ragged_attention(*inputs[:3], offsets_of(lengths), **rules)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(torch.autograd.grad((got * weights).sum(), inputs), wanted)


def test_scaling_defaults_to_one_over_the_root_of_the_head_size() -> None:
    inputs = qkv(6, 2, 2, size=16)
    got = ragged_attention(*inputs, offsets_of([2, 4]))
    torch.testing.assert_close(got, ragged_attention(*inputs, offsets_of([2, 4]), scaling=0.25))


def test_a_sequence_does_not_notice_its_neighbours() -> None:
    query, key, value = qkv(9, 2, 2)
    packed = ragged_attention(query, key, value, offsets_of([4, 5]))
    alone = ragged_attention(query[4:], key[4:], value[4:], offsets_of([5]))
    torch.testing.assert_close(packed[4:], alone, rtol=0, atol=1e-15)


def test_sorting_by_length_groups_equal_lengths_and_keeps_every_token() -> None:
    segments, tokens = Segments.from_offsets(offsets_of([3, 1, 3, 2])).sort_by_length()
    assert segments.lengths == (1, 2, 3, 3)
    assert segments.group_equal_lengths() == [(1, 1, 1), (1, 2, 2), (2, 3, 3)]
    assert tokens.tolist() == [3, 7, 8, 0, 1, 2, 4, 5, 6]
    assert segments.offsets.tolist() == [0, 1, 3, 6, 9]


def test_offsets_that_do_not_cover_the_tokens_are_a_bug_not_a_guess() -> None:
    with pytest.raises(AssertionError, match="cover 4 of 6"):
        ragged_attention(*qkv(6, 2, 2), offsets_of([2, 2]))


def test_half_precision_on_the_cpu_stays_close_to_double() -> None:
    inputs = query, key, value = qkv(20, 4, 2)
    low = ragged_attention(query.bfloat16(), key.bfloat16(), value.bfloat16(), offsets_of([12, 8]))
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.double(), ragged_attention(*inputs, offsets_of([12, 8])), rtol=0.05, atol=0.05)


def test_gradients_of_a_row_taken_often_are_the_same_bits_every_time():
    """Threads that add into one row as they come round differently each time: a run could not go on bit for bit."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2048, 2, 64, generator=generator)
    index = torch.cat([torch.arange(64).repeat(400), torch.arange(64, 2048)])
    weights = torch.randn(len(index), 2, 64, generator=generator)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        leaf = rows.requires_grad_()
        gradients = [
            torch.autograd.grad((deterministic_index_select(leaf, index) * weights).sum(), leaf)[0] for _ in range(8)
        ]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(gradients[0], other) for other in gradients[1:])


class AccumulatorDtypes(TorchDispatchMode):
    """Records the dtype of every tensor into which an operator adds rows."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.index_add_, torch.ops.aten.index_put_):
            self.seen.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def test_gathered_gradient_is_summed_in_float32():
    """PyTorch's CPU kernel widens by itself, the one for CUDA does not: there, bfloat16 stops counting at 256."""
    rows = torch.zeros(1, 4, dtype=torch.bfloat16, requires_grad=True)
    total = deterministic_index_select(rows, torch.zeros(1024, dtype=torch.long)).sum()
    with AccumulatorDtypes() as accumulators:
        total.backward()
    assert rows.grad is not None
    assert rows.grad.tolist() == [[1024.0] * 4]
    assert accumulators.seen == [torch.float32]
