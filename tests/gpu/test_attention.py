"""Compares the fused kernels of this GPU with attention in float32, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from skyrl_train.models.flash_attention import AttentionFeatures, FlashKernel, find_flash_kernels
from skyrl_train.models.ragged_attention import Segments, ragged_attention
from skyrl_train.models.shared_prompts import SharedPromptLayout

pytestmark = pytest.mark.gpu
LENGTHS = [700, 1, 257, 64, 700, 3]


def kernels(features: AttentionFeatures) -> list[FlashKernel]:
    """Return the kernels that can run on this GPU."""
    return list(find_flash_kernels(torch.cuda.get_device_capability(), features)) or pytest.skip("no fused kernel")


def make_layout(shared: bool) -> SharedPromptLayout:
    offsets = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0)
    if not shared:
        return SharedPromptLayout.from_offsets(offsets, None)
    groups = torch.tensor([0, 600, 600, 0, 100, 100], device="cuda")  # two groups of 3 sequences
    lengths = torch.tensor([0, 700, 601, 857, 164, 800, 103], device="cuda")
    return SharedPromptLayout.from_offsets(lengths.cumsum(0), groups)


def attend(inputs: list[Tensor], weights: Tensor, segments: Segments, window: int | None) -> tuple[Tensor, ...]:
    """Return output and gradients, all in float32; the fourth of `inputs` are sinks."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    sinks = leaves[3] if len(leaves) > 3 else None
    output = ragged_attention(leaves[0], leaves[1], leaves[2], segments, sliding_window=window, sinks=sinks)
    gradients = torch.autograd.grad((output.float() * weights).sum(), leaves)
    return tuple(x.float() for x in (output, *gradients))


@pytest.mark.parametrize("shared", [False, True], ids=["sequences", "shared prompts"])
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (14, 2), (4, 1)])
@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
def test_fused_kernels_are_as_accurate_as_sdpa(
    head_size: int,
    heads: int,
    kv_heads: int,
    window: int | None,
    shared: bool,
    with_sinks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = make_layout(shared)
    generator = torch.Generator("cuda").manual_seed(0)
    inputs = [
        torch.randn(len(layout.token_indices), count, head_size, generator=generator, device="cuda").bfloat16()
        for count in (heads, kv_heads, kv_heads)
    ]
    weights = torch.randn(inputs[0].shape, generator=generator, device="cuda")
    if with_sinks:
        inputs.append(torch.linspace(-2.0, 3.0, heads, device="cuda").bfloat16())
    exact = attend([x.float() for x in inputs], weights, layout.segments, window)
    with monkeypatch.context() as patch:
        patch.setattr("skyrl_train.models.ragged_attention.get_flash_kernel", lambda *args, **features: None)
        unfused = attend(inputs, weights, layout.segments, window)
    features = AttentionFeatures(head_size, heads // kv_heads, window=window is not None, sinks=with_sinks)
    for kernel in kernels(features):
        with monkeypatch.context() as patch:
            patch.setattr("skyrl_train.models.ragged_attention.get_flash_kernel", lambda *args, k=kernel, **features: k)
            fused = attend(inputs, weights, layout.segments, window)
        for expected, reference, actual in zip(exact, unfused, fused, strict=True):
            error, allowed = (
                (actual - expected).norm() / expected.norm(),
                (reference - expected).norm() / expected.norm(),
            )
            # The rounding to bfloat16 does not average out in the few sinks.
            floor = 1e-3 if expected.numel() > heads else 2**-8
            assert error <= 2 * allowed + floor, f"{kernel.name}: {error} instead of {allowed}"


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_gradients_are_deterministic(head_size: int) -> None:
    layout = make_layout(shared=True)
    inputs = [torch.randn(len(layout.token_indices), n, head_size, device="cuda").bfloat16() for n in (8, 2, 2)]
    weights = torch.randn(inputs[0].shape, device="cuda")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # learners do not, but other programs may
    try:
        runs = [attend(inputs, weights, layout.segments, None) for _ in range(4)]
    finally:
        torch.use_deterministic_algorithms(before)
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))
