"""Log-probs and entropies of given tokens from hidden states, in chunks of rows whose logits are computed twice.

Legend: N rows, D hidden size, V vocabulary. Probabilities of a few chunks are kept for backward. The logits of all
others are recomputed there, so memory does not grow with N x V. There is one matrix product in forward, and three in
backward (logits, unless kept; states; weight).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from skyrl_train.models.logits import LogitTransform, accumulate_weight_grad, compute_logits, split_slices
from skyrl_train.terminal import print_stderr

FusedLogprobs = Callable[..., tuple[Tensor, Tensor]]
_TINY = torch.finfo(torch.float32).tiny


def sampled_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor | None,
    transform: LogitTransform,
    chunk_rows: int,
    compute_entropy: bool,
    cached_chunks: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return log softmax(logits / temperature) of each row's target, and each row's entropy, in nats.

    On GPUs with Triton, fused kernels compute this (see fused_logprobs); the code here is their reference. The result
    is differentiable once, in hidden, weight and bias.

    Args:
        hidden: Hidden states [N, D], with N at least 1.
        weight: The head's weight [V, D].
        bias: The head's bias [V], or None.
        targets: Target token of each row [N] int64.
        temperature: Sampling temperature of each row [N]; None if all are 1.
        transform: The architecture's transform of the head's outputs.
        chunk_rows: Number of rows of a chunk.
        compute_entropy: Compute the entropy; otherwise its values are arbitrary.
        cached_chunks: Number of chunks whose probabilities (chunk_rows x V) are kept for backward instead of
            recomputed.

    Returns:
        Log-probs [N] and entropies [N], at least float32, whatever the dtype of the matrix products.
    """
    fused = get_fused_kernel(hidden, weight) if bias is None else None
    if fused is not None:
        temperature = torch.ones_like(targets, dtype=torch.float32) if temperature is None else temperature
        return fused(hidden, weight, targets, temperature, transform, chunk_rows, cached_chunks)
    if not torch.is_grad_enabled() or transform.softcap is not None:  # a softcap's gradient needs the logits themselves
        cached_chunks = 0
    temperature_column = None if temperature is None else temperature.unsqueeze(1)
    result: tuple[Tensor, Tensor] = _SampledLogprobs.apply(
        hidden, weight, bias, targets, temperature_column, transform, chunk_rows, compute_entropy, cached_chunks
    )
    return result


class _SampledLogprobs(torch.autograd.Function):
    """The eager implementation, with a backward pass in the memory of the logits and of one copy of them.

    With p = softmax, the gradient of the log-prob of token y is 1[j = y] - p_j, and that of the entropy H is -p_j (log
    p_j + H).
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor | None,
        transform: LogitTransform,
        chunk_rows: int,
        compute_entropy: bool,
        cached_chunks: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.transform, ctx.chunk_rows = transform, chunk_rows
        ctx.product_dtype = linear(hidden[:0], weight[:0]).dtype  # autocast may narrow it
        states, narrow_weight = hidden.to(ctx.product_dtype), weight.to(ctx.product_dtype)
        scratch = _scratch(ctx, hidden, weight)
        results: list[tuple[Tensor, Tensor, Tensor]] = []
        cached_probabilities: list[Tensor] = []
        for chunk in split_slices(len(hidden), chunk_rows):
            logits = transform(compute_logits(states[chunk], narrow_weight, bias, scratch))
            if temperature is not None:
                logits.div_(temperature[chunk])
            probabilities = torch.softmax(logits, -1)
            if len(cached_probabilities) < cached_chunks:
                cached_probabilities.append(probabilities)
            results.append(_logprobs_and_entropy(logits, probabilities, targets[chunk], compute_entropy))
        logprobs, entropy, logsumexp = (torch.cat(column) for column in zip(*results, strict=True))
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, entropy, logsumexp, *cached_probabilities)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, d_logprobs: Tensor | None, d_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperature, entropy, logsumexp, *cached_probabilities = ctx.saved_tensors
        if d_logprobs is None:
            d_logprobs = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
        dtype = ctx.product_dtype
        states, narrow_weight = hidden.to(dtype), weight.to(dtype)
        trains_hidden, trains_weight, trains_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(states) if trains_hidden else None
        # Sum over chunks in at least float32: in half precision the error would grow with their number.
        sum_dtype = torch.promote_types(dtype, torch.float32)
        d_weight = torch.zeros_like(narrow_weight, dtype=sum_dtype) if trains_weight else None
        d_bias = torch.zeros_like(bias, dtype=sum_dtype) if trains_bias else None
        scratch = _scratch(ctx, hidden, weight)
        for chunk, probabilities in zip_longest(split_slices(len(hidden), ctx.chunk_rows), cached_probabilities):
            if probabilities is None:
                logits = ctx.transform(compute_logits(states[chunk], narrow_weight, bias, scratch))
                capped = None if ctx.transform.softcap is None else logits.clone()
                if temperature is not None:
                    logits.div_(temperature[chunk])
                log_probs = logits.sub_(logsumexp[chunk].unsqueeze(1))
                probabilities = gradient = log_probs.exp_() if d_entropy is None else log_probs.exp()
            else:
                capped, gradient = None, scratch[: len(probabilities)]
                # Probabilities too small for a logarithm have a gradient of 0 either way.
                log_probs = probabilities if d_entropy is None else probabilities.clamp(min=_TINY).log_()
            factor = -d_logprobs[chunk].unsqueeze(1)
            if d_entropy is not None:
                factor = log_probs.add_(entropy[chunk].unsqueeze(1)).mul_(-d_entropy[chunk].unsqueeze(1)).add_(factor)
            torch.mul(probabilities, factor, out=gradient)
            target_column = targets[chunk].unsqueeze(1)
            gradient.scatter_add_(1, target_column, d_logprobs[chunk].unsqueeze(1).to(gradient.dtype))
            if temperature is not None:
                gradient.div_(temperature[chunk])
            narrow_gradient = ctx.transform.backward_(gradient, capped).to(dtype)
            if d_hidden is not None:
                torch.mm(narrow_gradient, narrow_weight, out=d_hidden[chunk])
            if d_weight is not None:
                accumulate_weight_grad(d_weight, narrow_gradient, states[chunk])
            if d_bias is not None:
                d_bias += gradient.sum(0)
        return (
            None if d_hidden is None else d_hidden.to(hidden.dtype),
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(bias.dtype),
            *(None,) * 6,
        )


def _scratch(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
    """Return memory for one chunk, reused for all: new pages from the operating system take longer than a pass."""
    dtype = torch.promote_types(ctx.product_dtype, torch.float32)
    return torch.empty(min(ctx.chunk_rows, len(hidden)), len(weight), dtype=dtype, device=hidden.device)


def get_fused_kernel(hidden: Tensor, weight: Tensor) -> FusedLogprobs | None:
    """Return the fused implementation of `sampled_logprobs`; None on CPUs, without Triton, and in double precision.

    The first call on a device tries the kernels and prints on stderr whether they are used.
    """
    narrow = max(hidden.dtype.itemsize, weight.dtype.itemsize) <= torch.float32.itemsize
    return _fused_kernel_of_device(hidden.device) if hidden.is_cuda and narrow else None


@cache
def _fused_kernel_of_device(device: torch.device) -> FusedLogprobs | None:
    """Try the kernels, forward and backward: Triton may be installed without a working compiler."""
    try:
        fused: FusedLogprobs = importlib.import_module("skyrl_train.models.fused_logprobs").fused_logprobs
        weight, target = torch.ones(16, 16, device=device), torch.zeros(1, dtype=torch.int64, device=device)
        with torch.enable_grad():
            states = torch.ones(1, 16, device=device, requires_grad=True)
            fused(states, weight, target, weight[0, :1], LogitTransform(), 1)[0].sum().backward()  # type: ignore[no-untyped-call]
    except Exception as error:  # compilers and drivers raise any type of error
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        print_stderr(
            f"note: log-probs on {device}: several passes over logits, because Triton does not work ({reason})"
        )
        return None
    print_stderr(f"note: log-probs on {device}: fused kernels")
    return fused


def _logprobs_and_entropy(
    logits: Tensor, probabilities: Tensor, targets: Tensor, compute_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs, entropies and log-sum-exp, all [n], from logits [n, V] and their softmax.

    The logits are overwritten. The most likely token's probability is at least 1 / V, so its logarithm is exact to
    rounding; a target's probability may be 0.
    """
    largest = logits.amax(-1, keepdim=True)
    total = -probabilities.amax(-1).log()  # log of the sum of exp(logits - largest)
    logits.sub_(largest)
    logprobs = logits.gather(1, targets.unsqueeze(1)).squeeze(1) - total
    entropy = torch.zeros_like(logprobs)
    if compute_entropy:
        entropy = total - logits.mul_(probabilities).sum(-1)
    return logprobs, entropy, total + largest.squeeze(1)
