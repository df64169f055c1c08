"""Logits of a chunk of rows: their matrix products, and what an architecture does to them after its head."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class LogitTransform:
    """How an architecture transforms logits after its head: softcap * tanh(factor * logits / softcap)."""

    factor: float = 1.0
    softcap: float | None = None

    def __call__(self, raw: Tensor) -> Tensor:
        """[..., V] transformed logits, at least float32; in place if `raw` is that already."""
        logits = raw.to(torch.promote_types(raw.dtype, torch.float32))
        if self.factor != 1.0:
            logits = logits.mul_(self.factor)
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)

    def backward_(self, gradient: Tensor, logits: Tensor | None) -> Tensor:
        """d loss / d raw from d loss / d logits, in place.

        `logits`: the result of the call, needed only with a softcap; they are overwritten.
        """
        if self.softcap is not None:
            assert logits is not None
            gradient.mul_(logits.div_(self.softcap).square_().neg_().add_(1.0))
        return gradient if self.factor == 1.0 else gradient.mul_(self.factor)


def split_slices(count: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, count, size)]


def compute_logits(states: Tensor, weight: Tensor, bias: Tensor | None, scratch: Tensor | None) -> Tensor:
    """states [n, D] times weight, plus bias, at least float32: in the first n rows of scratch [>= n, V] if given."""
    wide = torch.promote_types(states.dtype, torch.float32)
    out = states.new_empty(len(states), len(weight), dtype=wide) if scratch is None else scratch[: len(states)]
    if states.dtype == wide:
        torch.mm(states, weight.t(), out=out)
    elif supports_float32_output(states):
        torch.mm(states, weight.t(), wide, out=out)
    else:
        out.copy_(states @ weight.t())
    return out if bias is None else out.add_(bias)


def accumulate_weight_grad(total: Tensor, gradient: Tensor, states: Tensor) -> None:
    """Add gradient [n, V] transposed times states [n, D] to total [V, D], which is at least float32."""
    if states.dtype == total.dtype:
        total.addmm_(gradient.t(), states)
    elif supports_float32_output(states) and _supports_float32_accumulation(states.device):
        torch.addmm(total, gradient.t(), states, total.dtype, out=total)
    elif supports_float32_output(states):
        total += torch.mm(gradient.t(), states, total.dtype, out=torch.empty_like(total))
    else:
        total += gradient.t() @ states


def supports_float32_output(tensor: Tensor) -> bool:
    """Whether products of half-precision tensors can be had as they are summed, in float32, without rounding first."""
    return tensor.is_cuda and torch.version.hip is None


@cache
def _supports_float32_accumulation(device: torch.device) -> bool:
    """Whether torch adds such a product to float32 numbers: its first versions of this only took half precision."""
    numbers = torch.zeros(8, 8, device=device)
    half = numbers.to(torch.bfloat16)
    try:
        torch.addmm(numbers, half, half, numbers.dtype, out=numbers)
    except RuntimeError:
        return False
    return True
