from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from skyrl_train.models.ragged_attention import Segments, deterministic_index_select, ragged_attention


def make_qkv(tokens: int, heads: int, kv_heads: int, size: int = 8) -> tuple[Tensor, Tensor, Tensor]:
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
    """Compute attention from one [T, T] matrix of scores and an explicit mask."""
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scaling
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.arange(len(owner))
    distance = position[:, None] - position[None, :]
    visible = (owner[:, None] == owner[None, :]) & (distance >= 0)
    if window is not None:
        visible &= distance < window
    weights = scores.masked_fill(~visible, -torch.inf).exp()
    sink_weights = 0.0 if sinks is None else sinks.exp()[:, None, None]
    return torch.einsum("hqk,khd->qhd", weights / (weights.sum(-1, keepdim=True) + sink_weights), value)


def to_offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


@pytest.mark.parametrize("lengths", [[5, 9, 5, 1, 9, 3], [4, 4, 4], [7], [1, 1], [3, 0, 2]])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (4, 1)])
@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_values_and_gradients_match_the_definition(
    lengths: list[int], heads: int, kv_heads: int, window: int | None, cap: float | None
) -> None:
    inputs = make_qkv(sum(lengths), heads, kv_heads)
    weights = torch.randn(sum(lengths), heads, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = plain_attention(*inputs, lengths, 0.5, window, cap)
    expected_gradients = torch.autograd.grad((expected * weights).sum(), inputs)
    actual = ragged_attention(*inputs, to_offsets(lengths), scaling=0.5, sliding_window=window, softcap=cap)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(torch.autograd.grad((actual * weights).sum(), inputs), expected_gradients)


@pytest.mark.parametrize("lengths", [[5, 9, 5, 1, 9, 3], [7]])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3)])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_sinks_match_the_definition(
    lengths: list[int], heads: int, kv_heads: int, window: int | None, cap: float | None
) -> None:
    sinks = torch.linspace(-2.0, 3.0, heads, dtype=torch.float64).requires_grad_()
    inputs = *make_qkv(sum(lengths), heads, kv_heads), sinks
    weights = torch.randn(sum(lengths), heads, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = plain_attention(*inputs[:3], lengths, 0.5, window, cap, sinks)
    expected_gradients = torch.autograd.grad((expected * weights).sum(), inputs)
    options: dict[str, Any] = {"scaling": 0.5, "sliding_window": window, "softcap": cap, "sinks": sinks}
    actual = ragged_attention(*inputs[:3], to_offsets(lengths), **options)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(torch.autograd.grad((actual * weights).sum(), inputs), expected_gradients)


def test_default_scaling_uses_the_head_size() -> None:
    inputs = make_qkv(6, 2, 2, size=16)
    attended = ragged_attention(*inputs, to_offsets([2, 4]))
    torch.testing.assert_close(attended, ragged_attention(*inputs, to_offsets([2, 4]), scaling=0.25))


def test_sequences_do_not_see_each_other() -> None:
    query, key, value = make_qkv(9, 2, 2)
    packed = ragged_attention(query, key, value, to_offsets([4, 5]))
    alone = ragged_attention(query[4:], key[4:], value[4:], to_offsets([5]))
    torch.testing.assert_close(packed[4:], alone, rtol=0, atol=1e-15)


def test_sort_by_length_groups_equal_lengths() -> None:
    segments, tokens = Segments.from_offsets(to_offsets([3, 1, 3, 2])).sort_by_length()
    assert segments.lengths == (1, 2, 3, 3)
    assert segments.group_equal_lengths() == [(1, 1, 1), (1, 2, 2), (2, 3, 3)]
    assert tokens.tolist() == [3, 7, 8, 0, 1, 2, 4, 5, 6]
    assert segments.offsets.tolist() == [0, 1, 3, 6, 9]


def test_offsets_must_cover_all_tokens() -> None:
    with pytest.raises(AssertionError, match="cover 4 of 6"):
        ragged_attention(*make_qkv(6, 2, 2), to_offsets([2, 2]))


def test_half_precision_is_close_to_double() -> None:
    inputs = query, key, value = make_qkv(20, 4, 2)
    low = ragged_attention(query.bfloat16(), key.bfloat16(), value.bfloat16(), to_offsets([12, 8]))
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.double(), ragged_attention(*inputs, to_offsets([12, 8])), rtol=0.05, atol=0.05)


def test_index_select_gradients_are_deterministic():
    """Threads that add to one row in varying order would prevent resumed runs from being bitwise equal."""
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
    """A mode that records the dtype of every tensor into which an operator adds rows."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.index_add_, torch.ops.aten.index_put_):
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def test_index_select_gradients_sum_in_float32():
    """PyTorch's CPU kernel sums in float32 anyway. The CUDA kernel does not: sums in bfloat16 stop growing at 256."""
    rows = torch.zeros(1, 4, dtype=torch.bfloat16, requires_grad=True)
    total = deterministic_index_select(rows, torch.zeros(1024, dtype=torch.long)).sum()
    with AccumulatorDtypes() as accumulators:
        total.backward()
    assert rows.grad is not None
    assert rows.grad.tolist() == [[1024.0] * 4]
    assert accumulators.dtypes == [torch.float32]
