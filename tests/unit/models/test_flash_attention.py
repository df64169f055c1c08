"""Kernels as strict as the real ones about arguments, with scaled dot product attention behind them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from skyrl_train.models import flash_attention, ragged_attention
from skyrl_train.models.flash_attention import FlashKernel, VarlenArgs, choose_flash_kernel, get_flash_kernel
from skyrl_train.models.shared_prompts import SharedPromptLayout

HEAD_SIZE = 8
HOPPER, AMPERE, TURING = (9, 0), (8, 0), (7, 5)
VARLEN = "torch's variable-length flash attention"


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, key_starts: Tensor, longest: Any, **rules: Any
) -> Tensor:
    """Stretch by stretch, the last query level with the last key; refuses what the CUDA kernels refuse."""
    assert all(x.is_contiguous() and x.ndim == 3 for x in (query, key, value))
    assert starts.dtype == key_starts.dtype == torch.int32 and len(starts) == len(key_starts)
    assert (int(starts[-1]), int(key_starts[-1])) == (len(query), len(key))
    assert longest == (int(starts.diff().max()), int(key_starts.diff().max()))
    left, right = rules["window"]
    parts = []
    for (a, b), (c, d) in zip(starts.unfold(0, 2, 1).tolist(), key_starts.unfold(0, 2, 1).tolist(), strict=True):
        level = torch.arange(d - c) - (torch.arange(b - a)[:, None] + (d - c) - (b - a))  # > 0: a later key
        seen = torch.ones_like(level, dtype=torch.bool)
        seen &= (level <= right) if right >= 0 else True
        seen &= (level >= -left) if left >= 0 else True
        q, k, v = (x.transpose(0, 1) for x in (query[a:b], key[c:d], value[c:d]))
        parts.append(scaled_dot_product_attention(q, k, v, seen, scale=rules["scale"], enable_gqa=True).transpose(0, 1))
    return torch.cat(parts)


def varlen_of_torch_2_11(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    assert query.shape[1] == key.shape[1], "as many key/value heads as query heads"
    return varlen_attention(query, key, value, cu_seq_q, cu_seq_k, (max_q, max_k), scale=scale, window=window_size)


def varlen_of_torch_2_13(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, enable_gqa: bool = False, **rules: Any
) -> Tensor:
    assert enable_gqa == (query.shape[1] != key.shape[1])
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    return varlen_of_torch_2_11(query, key, value, *args, **rules)


def flash_attention_3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Any = None,
    seqused_k: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Any = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    num_splits: int = 1,
    deterministic: bool = False,
) -> Tensor:
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    window = (window_size[0], 0) if causal else window_size
    longest = max_seqlen_q, max_seqlen_k
    return varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, longest, scale=softmax_scale, window=window)


def first_flash_attention_3(*args: Any, **options: Any) -> tuple[Tensor, None]:
    return flash_attention_3(*args, **options), None


KERNELS = {
    "2.11": flash_attention.torch_varlen(varlen_of_torch_2_11),
    "2.13": flash_attention.torch_varlen(varlen_of_torch_2_13),
    "fa3": flash_attention.flash_attention_3(flash_attention_3),
    "first fa3": flash_attention.flash_attention_3(first_flash_attention_3),
}


@pytest.mark.defect("grouped-heads-on-torch-2-11")
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (4, 1)])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("repeated", [None, [0, 4, 4, 0]], ids=["sequences", "shared prompts"])
def test_a_kernel_gets_what_makes_it_compute_the_same_attention(
    kernel: FlashKernel,
    heads: int,
    kv_heads: int,
    window: int | None,
    repeated: list[int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offsets = torch.tensor([0, 6, 11, 15, 18])
    packing = SharedPromptLayout.from_offsets(offsets, None if repeated is None else torch.tensor(repeated))
    generator = torch.Generator().manual_seed(0)
    shape = len(packing.token_indices), HEAD_SIZE
    inputs = [
        torch.randn(count, *shape, generator=generator, dtype=torch.float64).transpose(0, 1).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    ]
    weights = torch.randn(shape[0], heads, HEAD_SIZE, generator=generator, dtype=torch.float64)

    def attend() -> tuple[Tensor, tuple[Tensor, ...]]:
        query, key, value = inputs
        options: Any = {"scaling": 0.3, "sliding_window": window}
        output = ragged_attention.ragged_attention(query, key, value, packing.segments, **options)
        return output, torch.autograd.grad((output * weights).sum(), inputs)

    expected = attend()
    monkeypatch.setattr(ragged_attention, "get_flash_kernel", lambda query, value, with_sinks: kernel)
    torch.testing.assert_close(attend(), expected)


@pytest.fixture
def varlen_on_cpus(monkeypatch: pytest.MonkeyPatch) -> FlashKernel:
    """torch's kernel as `ragged_attention` gets it, on CPUs: its operators have kernels written out from the paper."""
    from torch.nn.attention import varlen

    varlen._varlen_attn.register_kernel("cpu")(forward_of_flash_attention)
    varlen._varlen_attn_backward.register_kernel("cpu")(backward_of_flash_attention)
    kernel = flash_attention.torch_varlen(varlen.varlen_attn)
    monkeypatch.setattr(ragged_attention, "get_flash_kernel", lambda query, value, with_sinks: kernel)
    return kernel


def weights_of(
    query: Tensor, key: Tensor, lse: Tensor | None, starts: Tensor, key_starts: Tensor, scale: float, left: int
) -> tuple[Tensor, Tensor]:
    """exp(scores - lse) [H, T, S], 0 for what is not seen, and the scores' log-sum-exp [H, T] if none is given."""
    owner, of_key = (torch.repeat_interleave(torch.arange(len(x) - 1), x.diff()) for x in (starts, key_starts))
    place, of_keys = (torch.arange(len(own)) - x[1:][own] for own, x in ((owner, starts), (of_key, key_starts)))
    back = place[:, None] - of_keys
    seen = (owner[:, None] == of_key) & (back >= 0) & ((back <= left) if left >= 0 else True)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1) if lse is None else lse
    return (scores - lse.unsqueeze(2)).exp(), lse


def forward_of_flash_attention(
    query: Tensor, key: Tensor, value: Tensor, starts: Any, key_starts: Any, most: int, most_keys: int, *rules: Any
) -> tuple[Tensor, Tensor, Tensor]:
    _, scale, window, *_ = rules
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    weights, lse = weights_of(query, key, None, starts, key_starts, scale, window[0])
    return torch.einsum("hqk,khd->qhd", weights, value), lse, torch.zeros(2, dtype=torch.uint64)


def backward_of_flash_attention(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, *rules: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Dao et al., arXiv:2205.14135, B.4: from what the forward pass keeps, not from a softmax of its own."""
    starts, key_starts, _, _, _, _, scale, window = rules
    shape = key.shape
    key, value = (x.repeat_interleave(query.shape[1] // shape[1], 1) for x in (key, value))
    weights, _ = weights_of(query, key, lse, starts, key_starts, scale, window[0])
    mean = (gradient * output).sum(-1).T.unsqueeze(2)
    of_scores = weights * (torch.einsum("qhd,khd->hqk", gradient, value) - mean) * scale
    of_keys = torch.einsum("hqk,qhd->khd", of_scores, query), torch.einsum("hqk,qhd->khd", weights, gradient)
    of_key, of_value = (x.unflatten(1, (shape[1], -1)).sum(2) for x in of_keys)
    return torch.einsum("hqk,khd->qhd", of_scores, key), of_key, of_value


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3)])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("repeated", [None, [0, 4, 4, 0]], ids=["sequences", "shared prompts"])
def test_sinks_are_exact_with_a_kernel_that_knows_none(
    heads: int, kv_heads: int, window: int | None, repeated: list[int] | None, request: pytest.FixtureRequest
) -> None:
    packing = SharedPromptLayout.from_offsets(
        torch.tensor([0, 6, 11, 15, 18]), None if repeated is None else torch.tensor(repeated)
    )
    generator = torch.Generator().manual_seed(0)
    shape = len(packing.token_indices), HEAD_SIZE
    inputs = [
        torch.randn(count, *shape, generator=generator, dtype=torch.float64).transpose(0, 1).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    ]
    inputs.append(torch.linspace(-2.0, 3.0, heads, dtype=torch.float64).requires_grad_())
    weights = torch.randn(shape[0], heads, HEAD_SIZE, generator=generator, dtype=torch.float64)

    def attend() -> tuple[Tensor, tuple[Tensor, ...]]:
        query, key, value, sinks = inputs
        options: Any = {"scaling": 0.3, "sliding_window": window, "sinks": sinks}
        output = ragged_attention.ragged_attention(query, key, value, packing.segments, **options)
        return output, torch.autograd.grad((output * weights).sum(), inputs)

    expected = attend()
    request.getfixturevalue("varlen_on_cpus")
    torch.testing.assert_close(attend(), expected)


def test_flash_attention_3_adds_up_in_one_order_where_that_is_asked_for() -> None:
    asked: list[bool] = []

    def attend(query: Tensor, *args: Any, deterministic: bool, **options: Any) -> Tensor:
        asked.append(deterministic)
        return query

    offsets, heads = torch.tensor([0, 2], dtype=torch.int32), torch.zeros(2, 1, HEAD_SIZE)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        for wanted in (True, False):
            torch.use_deterministic_algorithms(wanted)
            kernel, stretches = flash_attention.flash_attention_3(attend), VarlenArgs(offsets, offsets, 2, 2, 1.0, None)
            kernel.attend(heads, heads, heads, stretches, None)
    finally:
        torch.use_deterministic_algorithms(before)
    assert asked == [True, False]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Writes the module of FlashAttention-3 to a place that Python finds."""
    monkeypatch.syspath_prepend(tmp_path)
    before = sys.modules.pop("flash_attn_interface", None)

    def install(source: str) -> None:
        (tmp_path / "flash_attn_interface.py").write_text(source)

    yield install
    sys.modules.pop("flash_attn_interface", None)
    if before is not None:
        sys.modules["flash_attn_interface"] = before


@pytest.mark.parametrize(
    ("capability", "head_size", "name"),
    [
        (HOPPER, 128, "FlashAttention-3"),
        (HOPPER, 256, "FlashAttention-3"),
        (AMPERE, 128, VARLEN),
        ((12, 0), 128, VARLEN),
        (TURING, 128, None),
    ],
)
def test_flash_attention_3_runs_where_it_is_installed_and_fit_for_the_device(
    capability: tuple[int, int],
    head_size: int,
    name: str | None,
    installed: Callable[[str], None],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed("def flash_attn_varlen_func(): ...")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)  # as in learners on accelerators
    kernel = choose_flash_kernel(capability, head_size)
    assert (kernel and kernel.name) == name
    assert (name or "scaled dot product attention") in capfd.readouterr().err


def test_where_flash_attention_3_has_no_fixed_order_it_is_not_used_if_one_is_asked_for(
    installed: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed("def flash_attn_varlen_func(): ...")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    names = {size: kernel.name for size in (128, 256) if (kernel := choose_flash_kernel(HOPPER, size)) is not None}
    assert names == {128: "FlashAttention-3", 256: VARLEN}


def test_with_sinks_it_is_not_used(installed: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    installed("def flash_attn_varlen_func(): ...")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    with_sinks, without = choose_flash_kernel(HOPPER, 64, with_sinks=True), choose_flash_kernel(HOPPER, 64)
    assert with_sinks is not None and without is not None
    assert (with_sinks.name, without.name) == (VARLEN, "FlashAttention-3")


def test_without_flash_attention_3_torch_has_a_kernel(capfd: pytest.CaptureFixture[str]) -> None:
    kernel = choose_flash_kernel(HOPPER, 128)
    assert kernel is not None and kernel.name == VARLEN
    assert "warning" not in capfd.readouterr().err


@pytest.mark.parametrize("source", ["import a_part_of_it", "raise OSError('undefined symbol')"])
def test_a_flash_attention_3_that_does_not_load_is_said_and_not_used(
    source: str, installed: Callable[[str], None], capfd: pytest.CaptureFixture[str]
) -> None:
    installed(source)
    kernel = choose_flash_kernel(HOPPER, 128)
    assert kernel is not None and kernel.name == VARLEN
    reason = "a_part_of_it" if "import" in source else "undefined symbol"
    said = capfd.readouterr().err
    assert "does not load" in said and reason in said


class OnDevice:
    """What is asked of a tensor before a kernel is chosen."""

    is_cuda = True
    device = torch.device("cuda", 0)

    def __init__(self, size: int, dtype: torch.dtype = torch.bfloat16):
        self.shape, self.dtype = (5, 4, size), dtype


def test_the_choice_is_made_once_and_only_for_what_kernels_take(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: AMPERE)
    kernel_for: Any = get_flash_kernel
    flash_attention._kernel_of_device.cache_clear()
    try:
        kernels = [kernel_for(OnDevice(64), OnDevice(64)) for _ in range(3)]
    finally:
        flash_attention._kernel_of_device.cache_clear()
    assert kernels[0] is not None and all(kernel is kernels[0] for kernel in kernels)
    assert capfd.readouterr().err.count("attention (") == 1
    others = [(OnDevice(64), OnDevice(32)), (OnDevice(68), OnDevice(68)), (OnDevice(264), OnDevice(264))]
    wide = OnDevice(64, torch.float32)
    assert [kernel_for(*pair) for pair in (*others, (wide, wide))] == [None] * 4
    assert kernel_for(torch.zeros(5, 4, 64, dtype=torch.bfloat16), torch.zeros(5, 4, 64)) is None
