"""Log-probs, entropies and their gradients on this GPU: fused kernels, and products that are not rounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from skyrl_train.models import sampled_logprobs as module
from skyrl_train.models.logits import LogitTransform
from skyrl_train.models.sampled_logprobs import sampled_logprobs

pytestmark = pytest.mark.gpu
ROWS, SIZE, VOCABULARY = 300, 256, 151_936
SHAPES = [LogitTransform(), LogitTransform(factor=0.3), LogitTransform(factor=1.5, softcap=30.0)]


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(ROWS, SIZE, generator=generator, device="cuda").to(dtype)
    weight = (torch.randn(VOCABULARY, SIZE, generator=generator, device="cuda") / 8).to(dtype)
    targets = torch.randint(0, VOCABULARY, (ROWS,), generator=generator, device="cuda")
    return hidden, weight, targets, 0.5 + torch.rand(ROWS, generator=generator, device="cuda")


def outcome(given: tuple[Tensor, ...], shape: LogitTransform, rows: int, kept: int, dtype: torch.dtype) -> list[Tensor]:
    """Log-probs, entropies, and the gradients of states and weight, in float64."""
    hidden, weight = (x.detach().to(dtype).requires_grad_() for x in given[:2])
    divisor = given[3].to(torch.promote_types(dtype, torch.float32))
    logprobs, entropy = sampled_logprobs(hidden, weight, None, given[2], divisor, shape, rows, True, kept)
    weights = torch.linspace(-1, 1, ROWS, device="cuda", dtype=logprobs.dtype)
    gradients = torch.autograd.grad((logprobs * weights + 0.3 * entropy).sum(), (hidden, weight))
    return [x.detach().double() for x in (logprobs, entropy, *gradients)]


def errors(got: list[Tensor], wanted: list[Tensor]) -> list[float]:
    return [float((a - b).norm() / b.norm()) for a, b in zip(got, wanted, strict=True)]


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "passes"])
@pytest.mark.parametrize(("rows", "kept"), [(1000, 0), (1000, 1), (128, 0), (128, 1)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_and_gradients_are_those_of_double_precision(
    dtype: torch.dtype, shape: LogitTransform, rows: int, kept: int, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = inputs(dtype)
    exact = outcome(given, shape, 64, 0, torch.float64)
    if fused:
        assert module.get_fused_kernel(given[0], given[1]) is not None, "Triton does not work here"
    else:
        monkeypatch.setattr(module, "get_fused_kernel", lambda hidden, weight: None)
    logprobs, entropy, d_hidden, d_weight = errors(outcome(given, shape, rows, kept, dtype), exact)
    # Values are never rounded to half precision; the gradient of the logits is, and that of the states and the weight.
    assert max(logprobs, entropy) < 1e-5
    assert max(d_hidden, d_weight) < (1e-2 if dtype == torch.bfloat16 else 1e-4)


def test_an_update_needs_few_chunks_of_memory_and_gives_the_same_bits_every_time() -> None:
    hidden, weight, targets, divisor = inputs(torch.bfloat16)
    rows = 64
    torch.cuda.synchronize()
    runs: list[Any] = []
    for attempt in range(3):
        states, head = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        logprobs, entropy = sampled_logprobs(states, head, None, targets, divisor, LogitTransform(), rows, True, 1)
        gradients = torch.autograd.grad((logprobs + entropy).sum(), (states, head))
        peak = torch.cuda.max_memory_allocated() - before
        chunk, of_weight = 4 * rows * VOCABULARY, 6 * weight.numel()  # its gradient, in float32 and in bfloat16
        # The first time, cuBLAS gets memory of its own.
        assert peak < 3 * chunk + of_weight + (8 << 20) or attempt == 0
        runs.append((logprobs, entropy, *gradients))
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))
