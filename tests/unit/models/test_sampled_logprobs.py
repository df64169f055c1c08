from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from skyrl_train.models import logits, sampled_logprobs as module
from skyrl_train.models.logits import LogitTransform

ROWS, SIZE, VOCABULARY = 7, 5, 11
sampled_logprobs: Any = module.sampled_logprobs
TRANSFORMS = [
    LogitTransform(),
    LogitTransform(factor=0.3),
    LogitTransform(softcap=2.0),
    LogitTransform(factor=1.5, softcap=1.0),
]


def make_inputs(bias: bool, dtype: torch.dtype = torch.float64) -> Any:
    """Return hidden, weight, bias, targets, temperature."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, head_bias = (
        torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for size in ((ROWS, SIZE), (VOCABULARY, SIZE), (VOCABULARY,))
    )
    targets = torch.randint(0, VOCABULARY, (ROWS,), generator=generator)
    temperature = (0.5 + torch.rand(ROWS, generator=generator, dtype=torch.float64)).to(dtype)
    return hidden, weight, head_bias if bias else None, targets, temperature


def reference(*inputs: Any) -> tuple[Tensor, Tensor]:
    hidden, weight, bias, targets, temperature, transform = inputs
    logits = hidden @ weight.T * transform.factor if bias is None else (hidden @ weight.T + bias) * transform.factor
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    logprobs = (logits / temperature[:, None]).log_softmax(-1)
    return logprobs[torch.arange(ROWS), targets], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("cached_chunks", [0, 2, 100])
@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_values_and_gradients_match_the_definition(
    transform: LogitTransform, bias: bool, chunk_rows: int, cached_chunks: int
) -> None:
    inputs = make_inputs(bias)
    expected = reference(*inputs, transform)
    actual = sampled_logprobs(*inputs, transform, chunk_rows, compute_entropy=True, cached_chunks=cached_chunks)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    trained = [x for x in inputs[:3] if x is not None]
    weights = torch.linspace(-1, 1, ROWS, dtype=torch.float64)
    for entropy_coef in (0.0, 0.7):
        losses = [
            (values * weights + entropy_coef * entropies * weights**2).sum() for values, entropies in (expected, actual)
        ]
        expected_gradients, gradients = (torch.autograd.grad(loss, trained, retain_graph=True) for loss in losses)
        torch.testing.assert_close(gradients, expected_gradients, rtol=0, atol=1e-12)


@pytest.mark.parametrize("used", [0, 1])
def test_loss_can_use_one_result(used: int) -> None:
    inputs = make_inputs(bias=False)
    inputs = (*inputs[:4], torch.ones_like(inputs[4]))  # temperature 1 skips a division
    expected = torch.autograd.grad(reference(*inputs, LogitTransform())[used].sum(), inputs[:2])
    actual = torch.autograd.grad(sampled_logprobs(*inputs, LogitTransform(), 3, True)[used].sum(), inputs[:2])
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_gradients_match_finite_differences() -> None:
    hidden, weight, bias, targets, temperature = make_inputs(bias=True)

    def compute(*trained: Tensor) -> Any:
        return sampled_logprobs(*trained, targets, temperature, LogitTransform(0.5, 3.0), 2, True)

    assert torch.autograd.gradcheck(compute, (hidden, weight, bias))


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_frozen_inputs_get_no_gradient(frozen: int) -> None:
    inputs = make_inputs(bias=True)
    expected = torch.autograd.grad(sampled_logprobs(*inputs, LogitTransform(), 3, True)[0].sum(), inputs[:3])
    inputs[frozen].requires_grad_(False)
    sampled_logprobs(*inputs, LogitTransform(), 3, True)[0].sum().backward()
    for index, (tensor, gradient) in enumerate(zip(inputs[:3], expected, strict=True)):
        assert tensor is not None
        if index == frozen:
            assert tensor.grad is None
        else:
            torch.testing.assert_close(tensor.grad, gradient)


def test_half_precision_softmax_is_float32() -> None:
    inputs = make_inputs(bias=False, dtype=torch.bfloat16)
    logprobs, entropy = sampled_logprobs(*inputs, LogitTransform(), 3, True)
    assert logprobs.dtype == entropy.dtype == torch.float32
    exact = reference(*(x.double() if x is not None and x.is_floating_point() else x for x in inputs), LogitTransform())
    torch.testing.assert_close(logprobs.double(), exact[0], rtol=0.03, atol=0.03)
    logprobs.sum().backward()
    assert inputs[0].grad is not None and inputs[0].grad.dtype == torch.bfloat16


def test_logits_of_any_size_are_finite() -> None:
    hidden, weight, _, targets, temperature = make_inputs(bias=False)
    inputs = (hidden.detach() * 1e4).requires_grad_(), weight, None, targets, temperature
    logprobs, entropy = sampled_logprobs(*inputs, LogitTransform(), 3, True)
    (logprobs + entropy).sum().backward()
    assert torch.isfinite(logprobs).all() and torch.isfinite(entropy).all() and torch.isfinite(weight.grad).all()


def test_full_logits_are_never_saved() -> None:
    sizes: list[int] = []

    def count(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    inputs = make_inputs(bias=False)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        sampled_logprobs(*inputs, LogitTransform(), 2, True)
    assert max(sizes) < ROWS * VOCABULARY


def test_more_chunks_keep_weight_gradient_accurate() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, 32, generator=generator) for rows in (512, 64))
    targets, temperature = torch.randint(0, 64, (512,), generator=generator), torch.ones(512)
    errors = []
    for rows in (512, 2):
        exact, half = (weight.to(dtype).requires_grad_() for dtype in (torch.float64, torch.bfloat16))
        for head_weight in (exact, half):
            inputs = hidden.to(head_weight.dtype), head_weight, None, targets, temperature.to(head_weight.dtype)
            sampled_logprobs(*inputs, LogitTransform(), rows, False, cached_chunks=4)[0].sum().backward()
        assert exact.grad is not None and half.grad is not None
        errors.append(float((half.grad - exact.grad).norm() / exact.grad.norm()))
    assert errors[1] < 1.5 * errors[0] < 0.02


@pytest.fixture(params=["current", "first version"])
def float32_products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Emulate on the CPU the bfloat16 matrix products of GPUs with float32 results, under torch's names."""
    accumulator_dtype = torch.float32 if request.param == "current" else torch.bfloat16

    def mm(a: Tensor, b: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
        assert a.dtype == b.dtype == torch.bfloat16 and out.dtype == out_dtype == torch.float32
        return torch.mm(a.float(), b.float(), out=out)

    def addmm(
        start: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1, out: Tensor
    ) -> Tensor:
        assert a.dtype == b.dtype == torch.bfloat16 and out.dtype == out_dtype == torch.float32
        if start.dtype != accumulator_dtype:
            raise RuntimeError("self and mat2 must have the same dtype")
        return torch.addmm(start, a.float(), b.float(), beta=beta, alpha=alpha, out=out)

    monkeypatch.setattr(logits, "supports_float32_output", lambda tensor: True)
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("mm.dtype_out", mm, "CPU")
        library.impl("addmm.dtype_out", addmm, "CPU")
        logits._supports_float32_accumulation.cache_clear()
        yield
    logits._supports_float32_accumulation.cache_clear()


@pytest.mark.defect("logits-rounded-to-half-precision")
def test_gpu_products_are_not_rounded(float32_products: None) -> None:
    inputs = make_inputs(bias=False, dtype=torch.bfloat16)
    exact = tuple(x.detach().double().requires_grad_() for x in inputs[:2])
    expected = reference(*exact, *inputs[2:4], inputs[4].double(), LogitTransform())
    actual = sampled_logprobs(*inputs[:4], inputs[4].float(), LogitTransform(), 3, True)
    torch.testing.assert_close([x.double() for x in actual], list(expected), rtol=0, atol=1e-5)
    for step in range(3):  # only the gradient of the logits is rounded, not its partial sums
        total = torch.zeros(VOCABULARY, SIZE)
        gradient = torch.full((200, VOCABULARY), 1 / (step + 3), dtype=torch.bfloat16)
        states = torch.ones(200, SIZE, dtype=torch.bfloat16)
        for chunk in module.split_slices(200, 7):
            module.accumulate_weight_grad(total, gradient[chunk], states[chunk])
        torch.testing.assert_close(total, 200 * gradient[:1].float().T.expand(-1, SIZE), rtol=1e-6, atol=0)


class FakeCudaTensor:
    """The attributes of a tensor that are read before its kernels are chosen."""

    is_cuda = True
    device = torch.device("cuda", 0)

    def __init__(self, dtype: torch.dtype = torch.bfloat16):
        self.dtype = dtype


@pytest.mark.parametrize("works", [True, False])
def test_fused_kernels_are_tried_once(
    works: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    calls: list[Tensor] = []

    def fused(hidden: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        calls.append(hidden)
        if not works:
            raise RuntimeError("Failed to find C compiler\nand more")
        return hidden * 2, hidden

    monkeypatch.setitem(sys.modules, "skyrl_train.models.fused_logprobs", SimpleNamespace(fused_logprobs=fused))
    monkeypatch.setattr(FakeCudaTensor, "device", torch.device("cpu"))
    get_kernel: Any = module.get_fused_kernel
    module._fused_kernel_of_device.cache_clear()
    try:
        kernels = [get_kernel(FakeCudaTensor(), FakeCudaTensor(torch.float32)) for _ in range(3)]
    finally:
        module._fused_kernel_of_device.cache_clear()
    assert kernels == [fused if works else None] * 3
    assert len(calls) == 1
    stderr = capfd.readouterr().err
    assert (
        stderr.count("note: log-probs on") == 1 and ("C compiler" in stderr) == (not works) and "and more" not in stderr
    )
    assert get_kernel(FakeCudaTensor(torch.float64), FakeCudaTensor()) is None
    assert get_kernel(torch.zeros(1), torch.zeros(1)) is None


def test_fused_kernels_do_not_support_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, bias, targets, temperature = make_inputs(bias=True)
    calls: list[tuple[Any, ...]] = []

    def fused(*arguments: Any) -> tuple[Tensor, Tensor]:
        calls.append(arguments)
        return temperature, temperature

    monkeypatch.setattr(module, "get_fused_kernel", lambda hidden, weight: fused)
    transform = LogitTransform()
    assert sampled_logprobs(hidden, weight, None, targets, temperature, transform, 3, False, 1) == (
        temperature,
        temperature,
    )
    assert calls == [(hidden, weight, targets, temperature, transform, 3, 1)]
    sampled_logprobs(hidden, weight, bias, targets, temperature, transform, 3, False, 1)
    assert len(calls) == 1
