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
SHAPES = [
    LogitTransform(),
    LogitTransform(factor=0.3),
    LogitTransform(softcap=2.0),
    LogitTransform(factor=1.5, softcap=1.0),
]


def inputs(bias: bool, dtype: torch.dtype = torch.float64) -> Any:
    """hidden, weight, bias, targets, divisor."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, offset = (
        torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for size in ((ROWS, SIZE), (VOCABULARY, SIZE), (VOCABULARY,))
    )
    targets = torch.randint(0, VOCABULARY, (ROWS,), generator=generator)
    divisor = (0.5 + torch.rand(ROWS, generator=generator, dtype=torch.float64)).to(dtype)
    return hidden, weight, offset if bias else None, targets, divisor


def written_out(*given: Any) -> tuple[Tensor, Tensor]:
    hidden, weight, bias, targets, divisor, shape = given
    logits = hidden @ weight.T * shape.factor if bias is None else (hidden @ weight.T + bias) * shape.factor
    if shape.softcap is not None:
        logits = shape.softcap * torch.tanh(logits / shape.softcap)
    everything = (logits / divisor[:, None]).log_softmax(-1)
    return everything[torch.arange(ROWS), targets], -(everything.exp() * everything).sum(-1)


@pytest.mark.parametrize("kept_chunks", [0, 2, 100])
@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_those_of_the_definition(
    shape: LogitTransform, bias: bool, chunk_rows: int, kept_chunks: int
) -> None:
    given = inputs(bias)
    expected = written_out(*given, shape)
    got = sampled_logprobs(*given, shape, chunk_rows, compute_entropy=True, cached_chunks=kept_chunks)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    trained = [x for x in given[:3] if x is not None]
    weights = torch.linspace(-1, 1, ROWS, dtype=torch.float64)
    for entropy_coef in (0.0, 0.7):
        losses = [
            (values * weights + entropy_coef * entropies * weights**2).sum() for values, entropies in (expected, got)
        ]
        wanted, found = (torch.autograd.grad(loss, trained, retain_graph=True) for loss in losses)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("used", [0, 1])
def test_either_result_may_be_left_out_of_a_loss(used: int) -> None:
    given = inputs(bias=False)
    given = (*given[:4], torch.ones_like(given[4]))  # and temperature 1 is no pass of its own
    wanted = torch.autograd.grad(written_out(*given, LogitTransform())[used].sum(), given[:2])
    found = torch.autograd.grad(sampled_logprobs(*given, LogitTransform(), 3, True)[used].sum(), given[:2])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_gradients_are_numerically_right() -> None:
    hidden, weight, bias, targets, divisor = inputs(bias=True)

    def scored(*trained: Tensor) -> Any:
        return sampled_logprobs(*trained, targets, divisor, LogitTransform(0.5, 3.0), 2, True)

    assert torch.autograd.gradcheck(scored, (hidden, weight, bias))


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_what_is_frozen_gets_no_gradient_and_the_others_get_theirs(frozen: int) -> None:
    given = inputs(bias=True)
    whole = torch.autograd.grad(sampled_logprobs(*given, LogitTransform(), 3, True)[0].sum(), given[:3])
    given[frozen].requires_grad_(False)
    sampled_logprobs(*given, LogitTransform(), 3, True)[0].sum().backward()
    for index, (tensor, gradient) in enumerate(zip(given[:3], whole, strict=True)):
        assert tensor is not None
        if index == frozen:
            assert tensor.grad is None
        else:
            torch.testing.assert_close(tensor.grad, gradient)


def test_half_precision_products_are_normalised_in_float32() -> None:
    given = inputs(bias=False, dtype=torch.bfloat16)
    logprobs, entropy = sampled_logprobs(*given, LogitTransform(), 3, True)
    assert logprobs.dtype == entropy.dtype == torch.float32
    exact = written_out(
        *(x.double() if x is not None and x.is_floating_point() else x for x in given), LogitTransform()
    )
    torch.testing.assert_close(logprobs.double(), exact[0], rtol=0.03, atol=0.03)
    logprobs.sum().backward()
    assert given[0].grad is not None and given[0].grad.dtype == torch.bfloat16


def test_logits_of_any_size_are_finite() -> None:
    hidden, weight, _, targets, divisor = inputs(bias=False)
    given = (hidden.detach() * 1e4).requires_grad_(), weight, None, targets, divisor
    logprobs, entropy = sampled_logprobs(*given, LogitTransform(), 3, True)
    (logprobs + entropy).sum().backward()
    assert torch.isfinite(logprobs).all() and torch.isfinite(entropy).all() and torch.isfinite(weight.grad).all()


def test_no_tensor_of_rows_by_vocabulary_outlives_a_chunk() -> None:
    sizes: list[int] = []

    def count(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    given = inputs(bias=False)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        sampled_logprobs(*given, LogitTransform(), 2, True)
    assert max(sizes) < ROWS * VOCABULARY


def test_in_half_precision_the_weight_s_gradient_does_not_get_worse_with_the_number_of_chunks() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, 32, generator=generator) for rows in (512, 64))
    targets, divisor = torch.randint(0, 64, (512,), generator=generator), torch.ones(512)
    errors = []
    for rows in (512, 2):
        exact, half = (weight.to(dtype).requires_grad_() for dtype in (torch.float64, torch.bfloat16))
        for one in (exact, half):
            given = hidden.to(one.dtype), one, None, targets, divisor.to(one.dtype)
            sampled_logprobs(*given, LogitTransform(), rows, False, cached_chunks=4)[0].sum().backward()
        assert exact.grad is not None and half.grad is not None
        errors.append(float((half.grad - exact.grad).norm() / exact.grad.norm()))
    assert errors[1] < 1.5 * errors[0] < 0.02


@pytest.fixture(params=["now", "first"])
def wide_products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What GPUs have, on this CPU: products of bfloat16 that are given as they were summed, by torch's own names."""
    taken = torch.float32 if request.param == "now" else torch.bfloat16

    def mm(a: Tensor, b: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
        assert a.dtype == b.dtype == torch.bfloat16 and out.dtype == out_dtype == torch.float32
        return torch.mm(a.float(), b.float(), out=out)

    def addmm(
        start: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1, out: Tensor
    ) -> Tensor:
        assert a.dtype == b.dtype == torch.bfloat16 and out.dtype == out_dtype == torch.float32
        if start.dtype != taken:
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
def test_a_gpu_s_logits_and_weight_gradients_are_never_rounded_to_half_precision(wide_products: None) -> None:
    given = inputs(bias=False, dtype=torch.bfloat16)
    exact = tuple(x.detach().double().requires_grad_() for x in given[:2])
    wanted = written_out(*exact, *given[2:4], given[4].double(), LogitTransform())
    got = sampled_logprobs(*given[:4], given[4].float(), LogitTransform(), 3, True)
    torch.testing.assert_close([x.double() for x in got], list(wanted), rtol=0, atol=1e-5)
    for step in range(3):  # what is added up is not rounded on the way: only the gradient of the logits itself is
        total = torch.zeros(VOCABULARY, SIZE)
        gradient = torch.full((200, VOCABULARY), 1 / (step + 3), dtype=torch.bfloat16)
        states = torch.ones(200, SIZE, dtype=torch.bfloat16)
        for chunk in module.split_slices(200, 7):
            module.accumulate_weight_grad(total, gradient[chunk], states[chunk])
        torch.testing.assert_close(total, 200 * gradient[:1].float().T.expand(-1, SIZE), rtol=1e-6, atol=0)


class OnDevice:
    """What is asked of a tensor before its kernels are chosen."""

    is_cuda = True
    device = torch.device("cuda", 0)

    def __init__(self, dtype: torch.dtype = torch.bfloat16):
        self.dtype = dtype


@pytest.mark.parametrize("works", [True, False])
def test_fused_kernels_are_tried_once_and_only_where_they_can_run(
    works: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tried: list[Tensor] = []

    def fused(hidden: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        tried.append(hidden)
        if not works:
            raise RuntimeError("Failed to find C compiler\nand more")
        return hidden * 2, hidden

    monkeypatch.setitem(sys.modules, "skyrl_train.models.fused_logprobs", SimpleNamespace(fused_logprobs=fused))
    monkeypatch.setattr(OnDevice, "device", torch.device("cpu"))
    choice: Any = module.get_fused_kernel
    module._fused_kernel_of_device.cache_clear()
    try:
        found = [choice(OnDevice(), OnDevice(torch.float32)) for _ in range(3)]
    finally:
        module._fused_kernel_of_device.cache_clear()
    assert found == [fused if works else None] * 3
    assert len(tried) == 1
    said = capfd.readouterr().err
    assert said.count("note: log-probs on") == 1 and ("C compiler" in said) == (not works) and "and more" not in said
    assert choice(OnDevice(torch.float64), OnDevice()) is None
    assert choice(torch.zeros(1), torch.zeros(1)) is None


def test_what_is_fused_takes_everything_but_a_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, bias, targets, divisor = inputs(bias=True)
    calls: list[tuple[Any, ...]] = []

    def fused(*given: Any) -> tuple[Tensor, Tensor]:
        calls.append(given)
        return divisor, divisor

    monkeypatch.setattr(module, "get_fused_kernel", lambda hidden, weight: fused)
    shape = LogitTransform()
    assert sampled_logprobs(hidden, weight, None, targets, divisor, shape, 3, False, 1) == (divisor, divisor)
    assert calls == [(hidden, weight, targets, divisor, shape, 3, 1)]
    sampled_logprobs(hidden, weight, bias, targets, divisor, shape, 3, False, 1)
    assert len(calls) == 1
