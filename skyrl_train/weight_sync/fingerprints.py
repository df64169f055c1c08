"""What bits weights are made of, for both ends of a weight sync: sums of their words, and whether all are finite."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

WORD = 8
"""Bytes of the words that a fingerprint sums."""
_IN_CACHE = 1 << 20
"""Bytes that a CPU looks at for one thing after the other, which are read from memory once."""


def fingerprint(tensor: Tensor) -> int:
    """The wrapping sum of the tensor's bytes as int64 words, padded with zeros.

    Any flipped bit changes it, and it is additive over shards and over fused parameters of whole words. It cannot
    detect swapped words, nor an even number of flips of the words' highest bit; the probe can.
    """
    return int(_words(tensor, 0).sum().item())


def fingerprints(tensors: Iterable[Tensor]) -> list[int]:
    """The fingerprint of each, in their order. Tensors and accelerators are as those of `looks`."""
    return [total for total, _ in _look_at(((tensor, 0) for tensor in tensors), also_finite=False)]


def looks(parts: Iterable[tuple[Tensor, int]]) -> list[tuple[int, int]]:
    """In their order: fingerprints of parts of tensors, and 1 for one that holds NaN or infinity, else 0.

    A part is its elements [...] and the position of its first byte in the tensor. The fingerprints of all parts of a
    tensor add up to its own. Parts may lie on several devices; accelerators are waited for once, at the end.
    """
    return _look_at(parts, also_finite=True)


def all_finite(tensor: Tensor) -> bool:
    """Whether a floating-point tensor holds neither NaN nor infinity."""
    if math.isfinite(tensor.sum().item()):  # neither can cancel out in a sum
        return True
    low, high = tensor.aminmax()  # a sum of finite values may overflow; aminmax propagates NaN, too
    return math.isfinite(low.item()) and math.isfinite(high.item())


def _look_at(parts: Iterable[tuple[Tensor, int]], also_finite: bool) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    queued: dict[int, Tensor] = {}
    device: torch.device | None = None
    for elements, position in parts:
        if elements.is_cpu:
            found.append(_look(elements, position, also_finite))
        else:
            device = device or elements.device
            queued[len(found)] = _look_on_device(elements, position, also_finite).to(device)
            found.append((0, 0))
    if queued:
        for place, (total, *non_finite) in zip(queued, torch.stack([*queued.values()]).tolist(), strict=True):
            found[place] = total, sum(non_finite)
    return found


def _look(elements: Tensor, position: int, also_finite: bool) -> tuple[int, int]:
    if not also_finite or not elements.is_floating_point():
        return int(_words(elements, position).sum().item()), 0
    if elements.nbytes <= _IN_CACHE:
        return int(_words(elements, position).sum().item()), int(not all_finite(elements))
    pieces = elements.reshape(-1).split(_IN_CACHE // elements.itemsize)
    found = [_look(piece, position + index * _IN_CACHE, also_finite) for index, piece in enumerate(pieces)]
    return _wrapped(sum(total for total, _ in found)), max(wrong for _, wrong in found)


def _look_on_device(elements: Tensor, position: int, also_finite: bool) -> Tensor:
    """The sum of the words and, if asked for, whether something is not finite. Nothing is waited for."""
    bits = _words(elements, position).sum()
    if not also_finite:
        return bits.view(1)
    finite = torch.ones((), dtype=torch.bool, device=elements.device)
    if elements.is_floating_point() and elements.numel():
        finite = torch.stack(elements.aminmax()).isfinite().all()  # propagates NaN
    return torch.stack((bits, (~finite).to(torch.int64)))


def _words(tensor: Tensor, position: int) -> Tensor:
    """The int64 words that a tensor's bytes lie in, from byte `position` on, among zeros."""
    flat = tensor.detach().contiguous().view(-1)
    if not flat.numel():
        return flat.new_zeros(0, dtype=torch.int64)
    skipped = position % WORD
    alone = flat.numel() == 1  # may have any stride, with which it cannot be viewed as another dtype
    if alone or skipped or flat.nbytes % WORD or flat.storage_offset() * flat.itemsize % WORD:
        padded = torch.zeros(-(-(skipped + flat.nbytes) // WORD) * WORD, dtype=torch.uint8, device=flat.device)
        padded[skipped : skipped + flat.nbytes].view(flat.dtype).copy_(flat)
        flat = padded
    return flat.view(torch.int64)


def _wrapped(value: int) -> int:
    """As int64 arithmetic wraps."""
    return (value + 2**63) % 2**64 - 2**63
