"""The bytes of weights, for both ends of a weight sync: their layout in buckets, fingerprints, and finiteness."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby

import numpy as np
import torch
from torch import Tensor

from skyrl_train.weight_sync.protocol import Bucket, Manifest, TensorSpec, dtype_of

ALIGNMENT = 16
"""Bytes. Every tensor starts at a multiple of it, so that bytes can be viewed as any dtype, and are whole words."""
_LARGE_TENSOR_BYTES = 1 << 20
"""Bytes. For smaller tensors one call per tensor costs more than summing their bytes."""
WORD_BYTES = 8
"""Bytes of the words that a fingerprint sums."""
CACHE_BYTES = 1 << 20
"""Bytes that a CPU looks at for one thing after the other, which are read from memory once."""

# -- layout


def num_bytes(spec: TensorSpec) -> int:
    """Bytes of a tensor in its wire dtype."""
    return _num_bytes(spec.shape, spec.dtype)


@functools.lru_cache(1 << 14)
def _num_bytes(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * dtype_of(dtype).itemsize


def plan_buckets(manifest: Manifest) -> list[Bucket]:
    """The manifest's tensors in order, in buckets of at most `bucket_bytes`; a larger tensor has its own bucket."""
    cut: list[list[TensorSpec]] = []
    used = 0
    for spec in manifest.tensors:
        size = _aligned(num_bytes(spec))
        if not cut or used + size > manifest.bucket_bytes:
            cut.append([])
            used = 0
        cut[-1].append(spec)
        used += size
    return [
        Bucket(index, tuple(spec.name for spec in specs), tuple(spec.fingerprint for spec in specs))
        for index, specs in enumerate(cut)
    ]


def buffer_bytes(specs: Sequence[TensorSpec]) -> int:
    """Bytes of a buffer for these tensors."""
    return sum(_aligned(num_bytes(spec)) for spec in specs)


def tensor_views(buffer: Tensor, specs: Sequence[TensorSpec]) -> Iterator[Tensor]:
    """Views of a uint8 buffer as these tensors, in their dtypes and shapes, for writing or reading."""
    start = 0
    for name, run in groupby(specs, key=lambda spec: spec.dtype):
        same = list(run)
        dtype = dtype_of(name)
        end = start + buffer_bytes(same)
        places = buffer[start:end].view(dtype).split([_aligned(num_bytes(spec)) // dtype.itemsize for spec in same])
        for spec, place in zip(same, places, strict=True):
            padded = num_bytes(spec) % ALIGNMENT
            yield (place[: math.prod(spec.shape)] if padded else place).view(spec.shape)
        start = end


def pack(buffer: Tensor, specs: Sequence[TensorSpec], tensors: Iterable[Tensor]) -> None:
    """Copy tensors, in their wire dtypes, into a buffer that may have been used before."""
    whole_words = all(num_bytes(spec) % ALIGNMENT == 0 and spec.dtype == specs[0].dtype for spec in specs)
    if buffer.is_cpu and whole_words:
        tensors = list(tensors)
        if all(tensor.is_cpu for tensor in tensors):  # one call instead of one for each
            torch.cat([tensor.reshape(-1) for tensor in tensors], out=buffer.view(dtype_of(specs[0].dtype)))
            return
    zero_padding(buffer, specs)
    for place, tensor in zip(tensor_views(buffer, specs), tensors, strict=True):
        place.copy_(tensor)


def zero_padding(buffer: Tensor, specs: Sequence[TensorSpec]) -> None:
    """Zero the gaps between the tensors of a reused buffer, as fingerprints include them."""
    start = 0
    for spec in specs:
        size = num_bytes(spec)
        if size % ALIGNMENT:
            buffer[start + size : start + _aligned(size)] = 0
        start += _aligned(size)


def packed_fingerprints(buffer: Tensor, specs: Sequence[TensorSpec]) -> list[int]:
    """The fingerprint of each tensor in a buffer whose gaps are zero."""
    if not buffer.is_cpu or buffer.numel() > len(specs) * _LARGE_TENSOR_BYTES:
        return fingerprints(tensor_views(buffer, specs))
    words = [_aligned(num_bytes(spec)) // WORD_BYTES for spec in specs]
    starts = [end - count for end, count in zip(accumulate(words), words, strict=True) if count]
    sums = iter(np.add.reduceat(buffer.view(torch.int64).numpy(), starts).tolist() if starts else [])
    return [next(sums) if count else 0 for count in words]


def zeroed_buffer(specs: Sequence[TensorSpec], device: torch.device | str) -> Tensor:
    """A new uint8 buffer, zeroed so that gaps between tensors contain no old memory of this process."""
    return torch.zeros(buffer_bytes(specs), dtype=torch.uint8, device=device)


class DoubleBuffer:
    """Two buffers that are used in turn: allocating new memory costs more than the copy into it."""

    def __init__(self) -> None:
        self._buffers: list[Tensor | None] = [None, None]

    def take(self, index: int, size: int, device: torch.device | str) -> Tensor:
        """A buffer uint8 [size], which still contains bucket `index` - 2."""
        buffer = self._buffers[index % 2]
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[index % 2] = torch.zeros(size, dtype=torch.uint8, device=device)
        return buffer[:size]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


# -- fingerprints


def fingerprint(tensor: Tensor) -> int:
    """The wrapping sum of the tensor's bytes as int64 words, padded with zeros.

    Any flipped bit changes it, and it is additive over shards and over fused parameters of whole words. It cannot
    detect swapped words, nor an even number of flips of the words' highest bit; the probe can.
    """
    return int(_int64_words(tensor, 0).sum().item())


def fingerprints(tensors: Iterable[Tensor]) -> list[int]:
    """The fingerprint of each, in their order. Tensors and accelerators are as those of `inspect_parts`."""
    return [total for total, _ in _scan(((tensor, 0) for tensor in tensors), also_finite=False)]


def scan_shards(parts: Iterable[tuple[Tensor, int]]) -> list[tuple[int, int]]:
    """In their order: fingerprints of parts of tensors, and 1 for one that holds NaN or infinity, else 0.

    A part is its elements [...] and the position of its first byte in the tensor. The fingerprints of all parts of a
    tensor add up to its own. Parts may lie on several devices; accelerators are waited for once, at the end.
    """
    return _scan(parts, also_finite=True)


def all_finite(tensor: Tensor) -> bool:
    """Whether a floating-point tensor holds neither NaN nor infinity."""
    if math.isfinite(tensor.sum().item()):  # neither can cancel out in a sum
        return True
    low, high = tensor.aminmax()  # a sum of finite values may overflow; aminmax propagates NaN, too
    return math.isfinite(low.item()) and math.isfinite(high.item())


def _scan(parts: Iterable[tuple[Tensor, int]], also_finite: bool) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    queued: dict[int, Tensor] = {}
    device: torch.device | None = None
    for elements, position in parts:
        if elements.is_cpu:
            found.append(_scan_on_cpu(elements, position, also_finite))
        else:
            device = device or elements.device
            queued[len(found)] = inspect_on_device(elements, position, also_finite).to(device)
            found.append((0, 0))
    if queued:
        for place, (total, *non_finite) in zip(queued, torch.stack([*queued.values()]).tolist(), strict=True):
            found[place] = total, sum(non_finite)
    return found


def _scan_on_cpu(elements: Tensor, position: int, also_finite: bool) -> tuple[int, int]:
    if not also_finite or not elements.is_floating_point():
        return int(_int64_words(elements, position).sum().item()), 0
    if elements.nbytes <= CACHE_BYTES:
        return int(_int64_words(elements, position).sum().item()), int(not all_finite(elements))
    pieces = elements.reshape(-1).split(CACHE_BYTES // elements.itemsize)
    found = [_scan_on_cpu(piece, position + index * CACHE_BYTES, also_finite) for index, piece in enumerate(pieces)]
    return _wrap_int64(sum(total for total, _ in found)), max(wrong for _, wrong in found)


def inspect_on_device(elements: Tensor, position: int, also_finite: bool) -> Tensor:
    """The sum of the words and, if asked for, whether something is not finite. Nothing is waited for."""
    bits = _int64_words(elements, position).sum()
    if not also_finite:
        return bits.view(1)
    finite = torch.ones((), dtype=torch.bool, device=elements.device)
    if elements.is_floating_point() and elements.numel():
        finite = torch.stack(elements.aminmax()).isfinite().all()  # propagates NaN
    return torch.stack((bits, (~finite).to(torch.int64)))


def _int64_words(tensor: Tensor, position: int) -> Tensor:
    """The int64 words that a tensor's bytes lie in, from byte `position` on, among zeros."""
    flat = tensor.detach().contiguous().view(-1)
    if not flat.numel():
        return flat.new_zeros(0, dtype=torch.int64)
    skipped = position % WORD_BYTES
    alone = flat.numel() == 1  # may have any stride, with which it cannot be viewed as another dtype
    if alone or skipped or flat.nbytes % WORD_BYTES or flat.storage_offset() * flat.itemsize % WORD_BYTES:
        padded = torch.zeros(
            -(-(skipped + flat.nbytes) // WORD_BYTES) * WORD_BYTES, dtype=torch.uint8, device=flat.device
        )
        padded[skipped : skipped + flat.nbytes].view(flat.dtype).copy_(flat)
        flat = padded
    return flat.view(torch.int64)


def _wrap_int64(value: int) -> int:
    """As int64 arithmetic wraps."""
    return (value + 2**63) % 2**64 - 2**63
