"""Triton kernels of `sampled_logprobs` for GPUs: one kernel per chunk of logits in forward, and one in backward.

Legend: N rows, n rows of a chunk, D hidden size, V vocabulary. The matrix product writes a chunk's logits once, and
each kernel reads them once. The backward kernel writes the gradient in the narrow dtype that the following products
read. Importing this module requires Triton.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from skyrl_train.models.logits import LogitTransform, accumulate_weight_grad, compute_logits, split_slices

_LOWEST = tl.constexpr(-3.0e38)
"""Below every logit, and finite: the difference of two infinities would be NaN."""
BLOCK_SIZE, NUM_WARPS = 4096, 8


@triton.jit
def _transform_logits(raw, factor, softcap, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    logits = raw * factor
    if CAPPED:
        logits = softcap * (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0)  # softcap * tanh(logits / softcap)
    return logits


@triton.jit
def _logprob_kernel(  # type: ignore[no-untyped-def]
    raw_ptr,
    targets_ptr,
    temperature_ptr,
    logprobs_ptr,
    entropy_ptr,
    logsumexp_ptr,
    vocabulary,
    factor,
    softcap,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the log-prob of the target, the entropy and the log-sum-exp of one row per program.

    Every lane keeps, over the logits x that it read, the maximum m, s = sum of exp(x - m), and t = sum of (x - m) exp(x
    - m). Lanes are combined at the end. The entropy is log s - t / s.
    """
    row = tl.program_id(0).to(tl.int64)
    raw_ptr += row * vocabulary
    temperature = tl.load(temperature_ptr + row)
    largest = tl.full([BLOCK], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        raw = tl.load(raw_ptr + columns, mask=inside, other=0.0)
        logits = tl.where(inside, _transform_logits(raw, factor, softcap, CAPPED) / temperature, _LOWEST)
        larger = tl.maximum(largest, logits)
        shrunk = tl.exp(largest - larger)
        weighted = shrunk * (weighted + (largest - larger) * total)
        term = tl.exp(logits - larger)
        total = shrunk * total + term
        weighted += tl.where(term > 0.0, (logits - larger) * term, 0.0)
        largest = larger
    top = tl.max(largest, 0)
    shrunk = tl.exp(largest - top)
    weighted_sum = tl.sum(shrunk * (weighted + (largest - top) * total), 0)
    sum_of_all = tl.sum(shrunk * total, 0)
    log_sum = tl.log(sum_of_all)
    chosen = tl.load(raw_ptr + tl.load(targets_ptr + row))
    tl.store(logprobs_ptr + row, _transform_logits(chosen, factor, softcap, CAPPED) / temperature - top - log_sum)
    tl.store(entropy_ptr + row, log_sum - weighted_sum / sum_of_all)
    tl.store(logsumexp_ptr + row, top + log_sum)


@triton.jit
def _gradient_kernel(  # type: ignore[no-untyped-def]
    raw_ptr,
    targets_ptr,
    temperature_ptr,
    entropy_ptr,
    logsumexp_ptr,
    d_logprobs_ptr,
    d_entropy_ptr,
    gradient_ptr,
    vocabulary,
    factor,
    softcap,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute d loss / d raw logits of one block of a row per program; see sampled_logprobs._SampledLogprobs."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocabulary
    temperature, d_logprob = tl.load(temperature_ptr + row), tl.load(d_logprobs_ptr + row)
    transformed = _transform_logits(
        tl.load(raw_ptr + row * vocabulary + columns, mask=inside, other=0.0), factor, softcap, CAPPED
    )
    logs = transformed / temperature - tl.load(logsumexp_ptr + row)
    coefficient = d_logprob + tl.load(d_entropy_ptr + row) * (logs + tl.load(entropy_ptr + row))
    gradient = -tl.exp(logs) * coefficient
    gradient = tl.where(columns == tl.load(targets_ptr + row), gradient + d_logprob, gradient)
    gradient = gradient / temperature * factor
    if CAPPED:
        gradient *= 1.0 - (transformed / softcap) * (transformed / softcap)
    tl.store(gradient_ptr + row * vocabulary + columns, gradient.to(gradient_ptr.dtype.element_ty), mask=inside)


def _launch_logprob_kernel(logits: Tensor, rows: list[Tensor], transform: LogitTransform) -> None:
    """Run the kernel on raw logits [n, V].

    rows, [n] each: targets, temperature; results: logprobs, entropy, logsumexp.
    """
    with torch.cuda.device_of(logits):
        _logprob_kernel[(len(logits),)](
            logits,
            *rows,
            logits.shape[1],
            transform.factor,
            transform.softcap or 1.0,
            CAPPED=transform.softcap is not None,
            BLOCK=BLOCK_SIZE,
            num_warps=NUM_WARPS,
        )


def _launch_gradient_kernel(logits: Tensor, rows: list[Tensor], transform: LogitTransform, gradient: Tensor) -> None:
    """Run the kernel on raw logits [n, V] and write `gradient` [n, V].

    rows, [n] each: targets, temperature, entropy, logsumexp, d logprobs, d entropy.
    """
    with torch.cuda.device_of(logits):
        _gradient_kernel[(len(logits), triton.cdiv(logits.shape[1], BLOCK_SIZE))](
            logits,
            *rows,
            gradient,
            logits.shape[1],
            transform.factor,
            transform.softcap or 1.0,
            CAPPED=transform.softcap is not None,
            BLOCK=BLOCK_SIZE,
            num_warps=NUM_WARPS,
        )


def fused_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Tensor,
    transform: LogitTransform,
    chunk_rows: int,
    cached_chunks: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return log-probs [N] and entropies [N], in nats, float32, without computing all logits at once.

    The result is that of `sampled_logprobs` for the head's transformed outputs. The head must not have a bias.

    Args:
        hidden: Hidden states [N, D], float32 or a smaller dtype.
        weight: The head's weight [vocabulary size, D], float32 or a smaller dtype.
        targets: Target token of each row [N] int64.
        temperature: Sampling temperature of each row [N].
        transform: The architecture's transform of the head's outputs.
        chunk_rows: Number of rows of a chunk.
        cached_chunks: Number of chunks whose logits are kept for backward instead of recomputed.
    """
    if not torch.is_grad_enabled():
        cached_chunks = 0
    result: tuple[Tensor, Tensor] = _FusedLogprobs.apply(
        hidden, weight, targets, temperature.float(), transform, chunk_rows, cached_chunks
    )
    return result


class _FusedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: Tensor,
        transform: LogitTransform,
        chunk_rows: int,
        cached_chunks: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.transform, ctx.chunk_rows = transform, chunk_rows
        ctx.product_dtype = linear(hidden[:0], weight[:0]).dtype  # autocast may narrow it
        states, narrow_weight = hidden.to(ctx.product_dtype), weight.to(ctx.product_dtype)
        logprobs, entropy, logsumexp = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))
        cached_logits: list[Tensor] = []
        scratch: Tensor | None = None
        for chunk in split_slices(len(hidden), chunk_rows):
            is_cached = len(cached_logits) < cached_chunks
            logits = compute_logits(states[chunk], narrow_weight, None, None if is_cached else scratch)
            if is_cached:
                cached_logits.append(logits)
            elif scratch is None:
                scratch = logits
            rows = (targets, temperature, logprobs, entropy, logsumexp)
            _launch_logprob_kernel(logits, [row[chunk] for row in rows], transform)
        ctx.save_for_backward(hidden, weight, targets, temperature, entropy, logsumexp, *cached_logits)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, d_logprobs: Tensor | None, d_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, temperature, entropy, logsumexp, *cached_logits = ctx.saved_tensors
        output_grads = [torch.zeros_like(entropy) if d is None else d.contiguous() for d in (d_logprobs, d_entropy)]
        states, narrow_weight = hidden.to(ctx.product_dtype), weight.to(ctx.product_dtype)
        d_hidden = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        # Sum over chunks in float32: in half precision the error would grow with their number.
        d_weight = torch.zeros_like(narrow_weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        scratch: Tensor | None = None
        gradient_buffer: Tensor | None = None
        for chunk, logits in zip_longest(split_slices(len(hidden), ctx.chunk_rows), cached_logits):
            if logits is None:
                logits = compute_logits(states[chunk], narrow_weight, None, scratch)
                scratch = logits if scratch is None else scratch
            gradient_buffer = (
                torch.empty_like(logits, dtype=states.dtype) if gradient_buffer is None else gradient_buffer
            )
            gradient = gradient_buffer[: len(logits)]
            rows = (targets, temperature, entropy, logsumexp, *output_grads)
            _launch_gradient_kernel(logits, [row[chunk] for row in rows], ctx.transform, gradient)
            if d_hidden is not None:
                torch.mm(gradient, narrow_weight, out=d_hidden[chunk])
            if d_weight is not None:
                accumulate_weight_grad(d_weight, gradient, states[chunk])
        return (
            None if d_hidden is None else d_hidden.to(hidden.dtype),
            None if d_weight is None else d_weight.to(weight.dtype),
            *(None,) * 5,
        )
