"""Logits of a chunk of rows: their matrix products, and an architecture's transform of the outputs of its head.

Legend: n rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class LogitTransform:
    """An architecture's transform of the outputs of its head: softcap * tanh(factor * outputs / softcap).

    Without a softcap it is factor * outputs.
    """

    factor: float = 1.0
    softcap: float | None = None

    def __call__(self, raw: Tensor) -> Tensor:
        """Return transformed logits [..., V], at least float32.

        `raw` is changed in place if it already has that dtype.
        """
        logits = raw.to(torch.promote_types(raw.dtype, torch.float32))
        if self.factor != 1.0:
            logits = logits.mul_(self.factor)
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)

    def backward_(self, gradient: Tensor, logits: Tensor | None) -> Tensor:
        """Convert d loss / d logits to d loss / d raw logits, in place.

        Args:
            gradient: d loss / d logits [..., V]; it is overwritten and returned.
            logits: The result of the call, needed only with a softcap; it is overwritten.
        """
        if self.softcap is not None:
            assert logits is not None
            gradient.mul_(logits.div_(self.softcap).square_().neg_().add_(1.0))
        return gradient if self.factor == 1.0 else gradient.mul_(self.factor)


def split_slices(count: int, size: int) -> list[slice]:
    """Return consecutive slices of `size` items that cover `count` items; the last may reach beyond."""
    return [slice(start, start + size) for start in range(0, count, size)]


def compute_logits(states: Tensor, weight: Tensor, bias: Tensor | None, scratch: Tensor | None) -> Tensor:
    """Return states times the transposed weight, plus the bias, [n, V], at least float32.

    Args:
        states: Hidden states [n, D].
        weight: The head's weight [V, D].
        bias: The head's bias [V], or None.
        scratch: Memory [at least n, V] whose first n rows hold the result; None to allocate it.
    """
    dtype = torch.promote_types(states.dtype, torch.float32)
    out = states.new_empty(len(states), len(weight), dtype=dtype) if scratch is None else scratch[: len(states)]
    if states.dtype == dtype:
        torch.mm(states, weight.t(), out=out)
    elif supports_float32_output(states):
        torch.mm(states, weight.t(), dtype, out=out)
    else:
        out.copy_(states @ weight.t())
    return out if bias is None else out.add_(bias)


def accumulate_weight_grad(total: Tensor, gradient: Tensor, states: Tensor) -> None:
    """Add the transposed gradient times the states to a weight gradient, in place.

    Args:
        total: Gradient of the head's weight [V, D], at least float32; it is changed.
        gradient: Gradient of the logits [n, V].
        states: Hidden states [n, D].
    """
    if states.dtype == total.dtype:
        total.addmm_(gradient.t(), states)
    elif supports_float32_output(states) and _supports_float32_accumulation(states.device):
        torch.addmm(total, gradient.t(), states, total.dtype, out=total)
    elif supports_float32_output(states):
        total += torch.mm(gradient.t(), states, total.dtype, out=torch.empty_like(total))
    else:
        total += gradient.t() @ states


def supports_float32_output(tensor: Tensor) -> bool:
    """True if products of half-precision tensors can be returned in float32, as they are summed, without rounding."""
    return tensor.is_cuda and torch.version.hip is None


@cache
def _supports_float32_accumulation(device: torch.device) -> bool:
    """True if torch can add such a product to float32 numbers; early versions of addmm only accept half precision."""
    numbers = torch.zeros(8, 8, device=device)
    half = numbers.to(torch.bfloat16)
    try:
        torch.addmm(numbers, half, half, numbers.dtype, out=numbers)
    except RuntimeError:
        return False
    return True
