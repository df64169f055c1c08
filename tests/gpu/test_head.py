"""Log-probs, entropies and their gradients on this GPU, with fused kernels and with float32 products."""

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
TRANSFORMS = [LogitTransform(), LogitTransform(factor=0.3), LogitTransform(factor=1.5, softcap=30.0)]


def make_inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(ROWS, SIZE, generator=generator, device="cuda").to(dtype)
    weight = (torch.randn(VOCABULARY, SIZE, generator=generator, device="cuda") / 8).to(dtype)
    targets = torch.randint(0, VOCABULARY, (ROWS,), generator=generator, device="cuda")
    return hidden, weight, targets, 0.5 + torch.rand(ROWS, generator=generator, device="cuda")


def compute(
    inputs: tuple[Tensor, ...], transform: LogitTransform, rows: int, cached: int, dtype: torch.dtype
) -> list[Tensor]:
    """Return log-probs, entropies, and the gradients of states and weight, in float64."""
    hidden, weight = (x.detach().to(dtype).requires_grad_() for x in inputs[:2])
    temperature = inputs[3].to(torch.promote_types(dtype, torch.float32))
    logprobs, entropy = sampled_logprobs(hidden, weight, None, inputs[2], temperature, transform, rows, True, cached)
    weights = torch.linspace(-1, 1, ROWS, device="cuda", dtype=logprobs.dtype)
    gradients = torch.autograd.grad((logprobs * weights + 0.3 * entropy).sum(), (hidden, weight))
    return [x.detach().double() for x in (logprobs, entropy, *gradients)]


def relative_errors(actual: list[Tensor], expected: list[Tensor]) -> list[float]:
    return [float((a - b).norm() / b.norm()) for a, b in zip(actual, expected, strict=True)]


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "passes"])
@pytest.mark.parametrize(("rows", "cached"), [(1000, 0), (1000, 1), (128, 0), (128, 1)])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_and_gradients_match_double_precision(
    dtype: torch.dtype, transform: LogitTransform, rows: int, cached: int, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_inputs(dtype)
    exact = compute(inputs, transform, 64, 0, torch.float64)
    if fused:
        assert module.get_fused_kernel(inputs[0], inputs[1]) is not None, "Triton does not work on this machine"
    else:
        monkeypatch.setattr(module, "get_fused_kernel", lambda hidden, weight: None)
    logprobs, entropy, d_hidden, d_weight = relative_errors(compute(inputs, transform, rows, cached, dtype), exact)
    # Values are never rounded to half precision; the gradient of the logits is, and that of the states and the weight.
    assert max(logprobs, entropy) < 1e-5
    assert max(d_hidden, d_weight) < (1e-2 if dtype == torch.bfloat16 else 1e-4)


def test_update_is_deterministic_in_bounded_memory() -> None:
    hidden, weight, targets, temperature = make_inputs(torch.bfloat16)
    rows = 64
    torch.cuda.synchronize()
    runs: list[Any] = []
    for attempt in range(3):
        states, head = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        logprobs, entropy = sampled_logprobs(states, head, None, targets, temperature, LogitTransform(), rows, True, 1)
        gradients = torch.autograd.grad((logprobs + entropy).sum(), (states, head))
        peak = torch.cuda.max_memory_allocated() - before
        chunk, weight_gradients = 4 * rows * VOCABULARY, 6 * weight.numel()  # its gradient, in float32 and in bfloat16
        # In the first run, cuBLAS allocates its workspace.
        assert peak < 3 * chunk + weight_gradients + (8 << 20) or attempt == 0
        runs.append((logprobs, entropy, *gradients))
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))
