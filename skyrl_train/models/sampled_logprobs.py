"""Log-probs and entropies of chosen tokens from hidden states, without keeping logits: rows at a time, twice.

Legend: N rows, D hidden size, V vocabulary. The logits of a chunk are made again in backward, so no tensor of N x V
outlives a chunk. Matrix products: one forward, three backward (logits, states, weight).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear


@dataclass(frozen=True)
class LogitShape:
    """What an architecture does to logits after its head: softcap * tanh(factor * logits / softcap)."""

    factor: float = 1.0
    softcap: float | None = None

    def __call__(self, raw: Tensor) -> Tensor:
        """[..., V] at least float32, in place where `raw` is that already."""
        logits = raw.to(torch.promote_types(raw.dtype, torch.float32))
        if self.factor != 1.0:
            logits = logits.mul_(self.factor)
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)

    def backward_(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """d loss / d raw from d loss / d logits, in place; `logits` are what the call returned, and are spoilt."""
        if self.softcap is not None:
            gradient.mul_(logits.div_(self.softcap).square_().neg_().add_(1.0))
        return gradient if self.factor == 1.0 else gradient.mul_(self.factor)


def sampled_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    divisor: Tensor,
    shape: LogitShape,
    chunk_rows: int,
    wants_entropy: bool,
) -> tuple[Tensor, Tensor]:
    """[N] log softmax(logits / divisor) of each row's target and [N] entropy (zeros unless wanted), nats.

    hidden [N, D], weight [V, D], bias [V] or None, targets [N] int64, divisor [N] (the temperature). At least float32,
    whatever the matrix products are computed in. Differentiable once, in hidden, weight and bias.
    """
    scaled = None if bool((divisor == 1).all()) else divisor.unsqueeze(1)
    found: tuple[Tensor, Tensor] = _SampledLogprobs.apply(
        hidden, weight, bias, targets, scaled, shape, chunk_rows, wants_entropy
    )
    return found


class _SampledLogprobs(torch.autograd.Function):
    """With p = softmax, the gradient of the log-prob of token y is 1[j = y] - p_j, and of the entropy H
    -p_j (log p_j + H). Both are made in the memory of the logits and of one copy of them.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        divisor: Tensor | None,
        shape: LogitShape,
        chunk_rows: int,
        wants_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.chunk_rows = shape, chunk_rows
        parts = []
        for rows in range(0, len(hidden), chunk_rows):
            chunk = slice(rows, rows + chunk_rows)
            raw = linear(hidden[chunk], weight, bias)
            logits = shape(raw)
            if divisor is not None:
                logits.div_(divisor[chunk])
            parts.append(_scores(logits, targets[chunk], wants_entropy))
            ctx.product_dtype = raw.dtype
        logprobs, entropy, normaliser = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, bias, targets, divisor, entropy, normaliser)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, d_logprobs: Tensor | None, d_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, divisor, entropy, normaliser = ctx.saved_tensors
        if d_logprobs is None:
            d_logprobs = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
        dtype = ctx.product_dtype  # as in forward, where autocast may have narrowed it
        states, rows_of_weight = hidden.to(dtype), weight.to(dtype)
        d_hidden = torch.empty_like(states)
        trains_hidden, trains_weight, trains_bias = ctx.needs_input_grad[:3]
        # Summed over chunks in at least float32: in half precision the error would grow with their number.
        wide = torch.promote_types(dtype, torch.float32)
        d_weight = torch.zeros_like(rows_of_weight, dtype=wide) if trains_weight else None
        d_bias = torch.zeros_like(bias, dtype=wide) if trains_bias else None
        for rows in range(0, len(hidden), ctx.chunk_rows):
            chunk = slice(rows, rows + ctx.chunk_rows)
            raw = linear(states[chunk], rows_of_weight, None if bias is None else bias.to(dtype))
            logits = ctx.shape(raw)
            kept = logits if ctx.shape.softcap is None else logits.clone()
            if divisor is not None:
                logits.div_(divisor[chunk])
            logs = logits.sub_(normaliser[chunk].unsqueeze(1))
            gradient = logs.exp()
            if d_entropy is None:
                gradient.mul_(-d_logprobs[chunk].unsqueeze(1))
            else:
                logs.add_(entropy[chunk].unsqueeze(1)).mul_(d_entropy[chunk].unsqueeze(1))
                gradient.mul_(logs.add_(d_logprobs[chunk].unsqueeze(1)).neg_())
            chosen = targets[chunk].unsqueeze(1)
            gradient.scatter_add_(1, chosen, d_logprobs[chunk].unsqueeze(1).to(gradient.dtype))
            if divisor is not None:
                gradient.div_(divisor[chunk])
            narrow = ctx.shape.backward_(gradient, kept).to(dtype)
            if trains_hidden:
                torch.mm(narrow, rows_of_weight, out=d_hidden[chunk])
            if d_weight is not None and wide == dtype:
                d_weight.addmm_(narrow.t(), states[chunk])
            elif d_weight is not None:
                d_weight += narrow.t() @ states[chunk]
            if d_bias is not None:
                d_bias += gradient.sum(0)
        return (
            d_hidden.to(hidden.dtype) if trains_hidden else None,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(bias.dtype),
            *(None,) * 5,
        )


def _scores(logits: Tensor, targets: Tensor, wants_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs [n], entropies [n] and log-sum-exp [n] of logits [n, V], which are spoilt."""
    largest = logits.amax(-1, keepdim=True)
    logits.sub_(largest)
    chosen = logits.gather(1, targets.unsqueeze(1)).squeeze(1)
    exponentials = logits.exp() if wants_entropy else logits.exp_()
    total = exponentials.sum(-1)
    normaliser = total.log()
    entropy = torch.zeros_like(chosen)
    if wants_entropy:
        entropy = normaliser - logits.mul_(exponentials).sum(-1) / total
    return chosen - normaliser, entropy, normaliser + largest.squeeze(1)
