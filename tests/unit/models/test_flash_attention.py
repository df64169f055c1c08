"""Fake kernels that check their arguments as strictly as the real ones, and use scaled dot product attention."""

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
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, key_starts: Tensor, max_lengths: Any, **options: Any
) -> Tensor:
    """Compute attention segment by segment, with the last query aligned with the last key.

    It rejects arguments that the CUDA kernels reject.
    """
    assert all(x.is_contiguous() and x.ndim == 3 for x in (query, key, value))
    assert starts.dtype == key_starts.dtype == torch.int32 and len(starts) == len(key_starts)
    assert (int(starts[-1]), int(key_starts[-1])) == (len(query), len(key))
    assert max_lengths == (int(starts.diff().max()), int(key_starts.diff().max()))
    left, right = options["window"]
    outputs = []
    for (a, b), (c, d) in zip(starts.unfold(0, 2, 1).tolist(), key_starts.unfold(0, 2, 1).tolist(), strict=True):
        offset = torch.arange(d - c) - (torch.arange(b - a)[:, None] + (d - c) - (b - a))  # > 0: a later key
        visible = torch.ones_like(offset, dtype=torch.bool)
        visible &= (offset <= right) if right >= 0 else True
        visible &= (offset >= -left) if left >= 0 else True
        q, k, v = (x.transpose(0, 1) for x in (query[a:b], key[c:d], value[c:d]))
        outputs.append(
            scaled_dot_product_attention(q, k, v, visible, scale=options["scale"], enable_gqa=True).transpose(0, 1)
        )
    return torch.cat(outputs)


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
    assert query.shape[1] == key.shape[1], "torch 2.11 does not support grouped heads"
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
    max_lengths = max_seqlen_q, max_seqlen_k
    return varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, max_lengths, scale=softmax_scale, window=window)


def flash_attention_3_with_lse(*args: Any, **options: Any) -> tuple[Tensor, None]:
    return flash_attention_3(*args, **options), None


KERNELS = {
    "2.11": flash_attention.torch_varlen(varlen_of_torch_2_11),
    "2.13": flash_attention.torch_varlen(varlen_of_torch_2_13),
    "fa3": flash_attention.flash_attention_3(flash_attention_3),
    "fa3 with lse": flash_attention.flash_attention_3(flash_attention_3_with_lse),
}


@pytest.mark.defect("grouped-heads-on-torch-2-11")
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (4, 1)])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("repeated", [None, [0, 4, 4, 0]], ids=["sequences", "shared prompts"])
def test_kernels_compute_the_same_attention(
    kernel: FlashKernel,
    heads: int,
    kv_heads: int,
    window: int | None,
    repeated: list[int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offsets = torch.tensor([0, 6, 11, 15, 18])
    layout = SharedPromptLayout.from_offsets(offsets, None if repeated is None else torch.tensor(repeated))
    generator = torch.Generator().manual_seed(0)
    shape = len(layout.token_indices), HEAD_SIZE
    inputs = [
        torch.randn(count, *shape, generator=generator, dtype=torch.float64).transpose(0, 1).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    ]
    weights = torch.randn(shape[0], heads, HEAD_SIZE, generator=generator, dtype=torch.float64)

    def attend() -> tuple[Tensor, tuple[Tensor, ...]]:
        query, key, value = inputs
        options: Any = {"scaling": 0.3, "sliding_window": window}
        output = ragged_attention.ragged_attention(query, key, value, layout.segments, **options)
        return output, torch.autograd.grad((output * weights).sum(), inputs)

    expected = attend()
    monkeypatch.setattr(ragged_attention, "get_flash_kernel", lambda query, value, with_sinks: kernel)
    torch.testing.assert_close(attend(), expected)


@pytest.fixture
def varlen_on_cpus(monkeypatch: pytest.MonkeyPatch) -> FlashKernel:
    """Return torch's kernel for `ragged_attention` on CPUs: its operators get implementations from the paper."""
    from torch.nn.attention import varlen

    varlen._varlen_attn.register_kernel("cpu")(reference_forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(reference_backward)
    kernel = flash_attention.torch_varlen(varlen.varlen_attn)
    monkeypatch.setattr(ragged_attention, "get_flash_kernel", lambda query, value, with_sinks: kernel)
    return kernel


def attention_weights(
    query: Tensor, key: Tensor, lse: Tensor | None, starts: Tensor, key_starts: Tensor, scale: float, left: int
) -> tuple[Tensor, Tensor]:
    """Return exp(scores - lse) [H, T, S], 0 for hidden keys, and the log-sum-exp [H, T] if `lse` is None."""
    query_segment, key_segment = (
        torch.repeat_interleave(torch.arange(len(x) - 1), x.diff()) for x in (starts, key_starts)
    )
    query_offset, key_offset = (
        torch.arange(len(segment)) - x[1:][segment]
        for segment, x in ((query_segment, starts), (key_segment, key_starts))
    )
    distance = query_offset[:, None] - key_offset
    visible = (query_segment[:, None] == key_segment) & (distance >= 0) & ((distance <= left) if left >= 0 else True)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(-1) if lse is None else lse
    return (scores - lse.unsqueeze(2)).exp(), lse


def reference_forward(
    query: Tensor, key: Tensor, value: Tensor, starts: Any, key_starts: Any, max_query: int, max_key: int, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    _, scale, window, *_ = options
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    weights, lse = attention_weights(query, key, None, starts, key_starts, scale, window[0])
    return torch.einsum("hqk,khd->qhd", weights, value), lse, torch.zeros(2, dtype=torch.uint64)


def reference_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the backward pass of Dao et al. (arXiv:2205.14135, B.4) from saved tensors, without another softmax."""
    starts, key_starts, _, _, _, _, scale, window = options
    shape = key.shape
    key, value = (x.repeat_interleave(query.shape[1] // shape[1], 1) for x in (key, value))
    weights, _ = attention_weights(query, key, lse, starts, key_starts, scale, window[0])
    mean = (gradient * output).sum(-1).T.unsqueeze(2)
    score_gradient = weights * (torch.einsum("qhd,khd->hqk", gradient, value) - mean) * scale
    head_gradients = (
        torch.einsum("hqk,qhd->khd", score_gradient, query),
        torch.einsum("hqk,qhd->khd", weights, gradient),
    )
    key_gradient, value_gradient = (x.unflatten(1, (shape[1], -1)).sum(2) for x in head_gradients)
    return torch.einsum("hqk,khd->qhd", score_gradient, key), key_gradient, value_gradient


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3)])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("repeated", [None, [0, 4, 4, 0]], ids=["sequences", "shared prompts"])
def test_sinks_are_exact(
    heads: int, kv_heads: int, window: int | None, repeated: list[int] | None, request: pytest.FixtureRequest
) -> None:
    layout = SharedPromptLayout.from_offsets(
        torch.tensor([0, 6, 11, 15, 18]), None if repeated is None else torch.tensor(repeated)
    )
    generator = torch.Generator().manual_seed(0)
    shape = len(layout.token_indices), HEAD_SIZE
    inputs = [
        torch.randn(count, *shape, generator=generator, dtype=torch.float64).transpose(0, 1).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    ]
    inputs.append(torch.linspace(-2.0, 3.0, heads, dtype=torch.float64).requires_grad_())
    weights = torch.randn(shape[0], heads, HEAD_SIZE, generator=generator, dtype=torch.float64)

    def attend() -> tuple[Tensor, tuple[Tensor, ...]]:
        query, key, value, sinks = inputs
        options: Any = {"scaling": 0.3, "sliding_window": window, "sinks": sinks}
        output = ragged_attention.ragged_attention(query, key, value, layout.segments, **options)
        return output, torch.autograd.grad((output * weights).sum(), inputs)

    expected = attend()
    request.getfixturevalue("varlen_on_cpus")
    torch.testing.assert_close(attend(), expected)


def test_flash_attention_3_gets_the_deterministic_flag() -> None:
    flags: list[bool] = []

    def attend(query: Tensor, *args: Any, deterministic: bool, **options: Any) -> Tensor:
        flags.append(deterministic)
        return query

    offsets, heads = torch.tensor([0, 2], dtype=torch.int32), torch.zeros(2, 1, HEAD_SIZE)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        for is_deterministic in (True, False):
            torch.use_deterministic_algorithms(is_deterministic)
            kernel, varlen_args = (
                flash_attention.flash_attention_3(attend),
                VarlenArgs(offsets, offsets, 2, 2, 1.0, None),
            )
            kernel.attend(heads, heads, heads, varlen_args, None)
    finally:
        torch.use_deterministic_algorithms(before)
    assert flags == [True, False]


@pytest.fixture
def install_flash_attention_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Return a function that writes the module of FlashAttention-3 to a folder on Python's path."""
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
def test_flash_attention_3_runs_on_supported_devices(
    capability: tuple[int, int],
    head_size: int,
    name: str | None,
    install_flash_attention_3: Callable[[str], None],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install_flash_attention_3("def flash_attn_varlen_func(): ...")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)  # as in learners on accelerators
    kernel = choose_flash_kernel(capability, head_size)
    assert (kernel and kernel.name) == name
    assert (name or "scaled dot product attention") in capfd.readouterr().err


def test_deterministic_fa3_is_limited_by_head_size(
    install_flash_attention_3: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install_flash_attention_3("def flash_attn_varlen_func(): ...")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    names = {size: kernel.name for size in (128, 256) if (kernel := choose_flash_kernel(HOPPER, size)) is not None}
    assert names == {128: "FlashAttention-3", 256: VARLEN}


def test_flash_attention_3_is_not_used_with_sinks(
    install_flash_attention_3: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install_flash_attention_3("def flash_attn_varlen_func(): ...")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    with_sinks, without = choose_flash_kernel(HOPPER, 64, with_sinks=True), choose_flash_kernel(HOPPER, 64)
    assert with_sinks is not None and without is not None
    assert (with_sinks.name, without.name) == (VARLEN, "FlashAttention-3")


def test_torch_kernel_is_the_fallback(capfd: pytest.CaptureFixture[str]) -> None:
    kernel = choose_flash_kernel(HOPPER, 128)
    assert kernel is not None and kernel.name == VARLEN
    assert "warning" not in capfd.readouterr().err


@pytest.mark.parametrize("source", ["import a_part_of_it", "raise OSError('undefined symbol')"])
def test_broken_flash_attention_3_is_reported(
    source: str, install_flash_attention_3: Callable[[str], None], capfd: pytest.CaptureFixture[str]
) -> None:
    install_flash_attention_3(source)
    kernel = choose_flash_kernel(HOPPER, 128)
    assert kernel is not None and kernel.name == VARLEN
    reason = "a_part_of_it" if "import" in source else "undefined symbol"
    stderr = capfd.readouterr().err
    assert "cannot be loaded" in stderr and reason in stderr


class FakeCudaTensor:
    """The attributes of a tensor that are read before a kernel is chosen."""

    is_cuda = True
    device = torch.device("cuda", 0)

    def __init__(self, size: int, dtype: torch.dtype = torch.bfloat16):
        self.shape, self.dtype = (5, 4, size), dtype


def test_kernel_is_chosen_once_for_supported_tensors(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: AMPERE)
    kernel_for: Any = get_flash_kernel
    flash_attention._kernel_of_device.cache_clear()
    try:
        kernels = [kernel_for(FakeCudaTensor(64), FakeCudaTensor(64)) for _ in range(3)]
    finally:
        flash_attention._kernel_of_device.cache_clear()
    assert kernels[0] is not None and all(kernel is kernels[0] for kernel in kernels)
    assert capfd.readouterr().err.count("attention (") == 1
    unsupported = [
        (FakeCudaTensor(64), FakeCudaTensor(32)),
        (FakeCudaTensor(68), FakeCudaTensor(68)),
        (FakeCudaTensor(264), FakeCudaTensor(264)),
    ]
    float32_tensor = FakeCudaTensor(64, torch.float32)
    assert [kernel_for(*pair) for pair in (*unsupported, (float32_tensor, float32_tensor))] == [None] * 4
    assert kernel_for(torch.zeros(5, 4, 64, dtype=torch.bfloat16), torch.zeros(5, 4, 64)) is None
