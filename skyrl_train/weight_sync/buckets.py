"""Layout of weights in buckets, fingerprints of tensors, and checks for NaN and infinity, for both ends of a sync."""

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
"""Bytes. Every tensor starts at a multiple of it, so that its bytes can be viewed as any dtype and as int64 words."""
_LARGE_TENSOR_BYTES = 1 << 20
"""Bytes. For smaller tensors, one call per tensor costs more than summing their bytes."""
WORD_BYTES = 8
"""Bytes of the int64 words that a fingerprint sums."""
CACHE_BYTES = 1 << 20
"""Bytes that a CPU processes at a time, so that several passes read them from the cache."""

# -- layout


def num_bytes(spec: TensorSpec) -> int:
    """Return the bytes of a tensor in its wire dtype, without padding."""
    return _num_bytes(spec.shape, spec.dtype)


@functools.lru_cache(1 << 14)
def _num_bytes(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * dtype_of(dtype).itemsize


def plan_buckets(manifest: Manifest) -> list[Bucket]:
    """Return the manifest's tensors, in the manifest's order, in buckets of at most `bucket_bytes` bytes.

    A larger tensor has its own bucket. Tensors count in full even if only their changes are sent, because the engine
    reconstructs a bucket's tensors together.
    """
    groups: list[list[TensorSpec]] = []
    used = 0
    for spec in manifest.tensors:
        size = _aligned(num_bytes(spec))
        if not groups or used + size > manifest.bucket_bytes:
            groups.append([])
            used = 0
        groups[-1].append(spec)
        used += size
    return [
        Bucket(index, tuple(spec.name for spec in specs), tuple(spec.fingerprint for spec in specs))
        for index, specs in enumerate(groups)
    ]


def buffer_bytes(specs: Sequence[TensorSpec]) -> int:
    """Return the bytes of a buffer for these tensors, with padding."""
    return sum(_aligned(num_bytes(spec)) for spec in specs)


def tensor_views(buffer: Tensor, specs: Sequence[TensorSpec]) -> Iterator[Tensor]:
    """Yield views of a buffer as these tensors, in their dtypes and shapes, for writing or reading.

    Args:
        buffer: uint8 [bytes], at least `buffer_bytes(specs)`.
        specs: Tensors in the order of the buffer.
    """
    start = 0
    for name, run in groupby(specs, key=lambda spec: spec.dtype):
        same_dtype = list(run)
        dtype = dtype_of(name)
        end = start + buffer_bytes(same_dtype)
        chunks = (
            buffer[start:end].view(dtype).split([_aligned(num_bytes(spec)) // dtype.itemsize for spec in same_dtype])
        )
        for spec, chunk in zip(same_dtype, chunks, strict=True):
            is_padded = num_bytes(spec) % ALIGNMENT
            yield (chunk[: math.prod(spec.shape)] if is_padded else chunk).view(spec.shape)
        start = end


def pack(buffer: Tensor, specs: Sequence[TensorSpec], tensors: Iterable[Tensor]) -> None:
    """Copy tensors into a buffer, which may have been used before.

    Args:
        buffer: uint8 [bytes], at least `buffer_bytes(specs)`.
        specs: The specs of the tensors, in the order in which they are packed.
        tensors: The tensors, in their wire dtypes.
    """
    needs_no_padding = all(num_bytes(spec) % ALIGNMENT == 0 and spec.dtype == specs[0].dtype for spec in specs)
    if buffer.is_cpu and needs_no_padding:
        tensors = list(tensors)
        if all(tensor.is_cpu for tensor in tensors):  # one call instead of one per tensor
            torch.cat([tensor.reshape(-1) for tensor in tensors], out=buffer.view(dtype_of(specs[0].dtype)))
            return
    zero_padding(buffer, specs)
    for view, tensor in zip(tensor_views(buffer, specs), tensors, strict=True):
        view.copy_(tensor)


def zero_padding(buffer: Tensor, specs: Sequence[TensorSpec]) -> None:
    """Zero the padding between the tensors of a reused buffer, because fingerprints include it."""
    start = 0
    for spec in specs:
        size = num_bytes(spec)
        if size % ALIGNMENT:
            buffer[start + size : start + _aligned(size)] = 0
        start += _aligned(size)


def packed_fingerprints(buffer: Tensor, specs: Sequence[TensorSpec]) -> list[int]:
    """Return the fingerprint of each tensor in a buffer whose padding is zero."""
    if not buffer.is_cpu or buffer.numel() > len(specs) * _LARGE_TENSOR_BYTES:
        return fingerprints(tensor_views(buffer, specs))
    words = [_aligned(num_bytes(spec)) // WORD_BYTES for spec in specs]
    starts = [end - count for end, count in zip(accumulate(words), words, strict=True) if count]
    sums = iter(np.add.reduceat(buffer.view(torch.int64).numpy(), starts).tolist() if starts else [])
    return [next(sums) if count else 0 for count in words]


def zeroed_buffer(specs: Sequence[TensorSpec], device: torch.device | str) -> Tensor:
    """Return a new uint8 buffer for these tensors, zeroed so that its padding has no old memory of this process."""
    return torch.zeros(buffer_bytes(specs), dtype=torch.uint8, device=device)


class DoubleBuffer:
    """Two buffers that are used alternately, because allocating memory costs more than copying into it."""

    def __init__(self) -> None:
        self._buffers: list[Tensor | None] = [None, None]

    def take(self, index: int, size: int, device: torch.device | str) -> Tensor:
        """Return a buffer for a bucket, uint8 [size].

        Buckets `index` and `index` + 2 share one, and its content is old.

        Args:
            index: Index of the bucket.
            size: Number of bytes.
            device: Device of a buffer that is newly allocated.
        """
        buffer = self._buffers[index % 2]
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[index % 2] = torch.zeros(size, dtype=torch.uint8, device=device)
        return buffer[:size]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


# -- fingerprints


def fingerprint(tensor: Tensor) -> int:
    """Return the wrapping sum of the tensor's bytes as int64 words, padded with zeros.

    Any flipped bit changes it. It is additive over shards, and over fused parameters of complete words. It cannot
    detect swapped words, nor an even number of flips of the highest bits of words; the probe can.
    """
    return int(_int64_words(tensor, 0).sum().item())


def fingerprints(tensors: Iterable[Tensor]) -> list[int]:
    """Return the fingerprint of each tensor, in the order of `tensors`.

    Tensors may be on several devices. Accelerators are synchronized once, at the end.
    """
    return [total for total, _ in _scan(((tensor, 0) for tensor in tensors), also_finite=False)]


def scan_shards(parts: Iterable[tuple[Tensor, int]]) -> list[tuple[int, int]]:
    """Return (fingerprint, 1 if it has NaN or infinity, else 0) of each shard, in the order of `parts`.

    The fingerprints of all shards of a tensor add up to that of the tensor. Shards may be on several devices.
    Accelerators are synchronized once, at the end.

    Args:
        parts: Elements of a shard [...], and the position of its first byte in the tensor.
    """
    return _scan(parts, also_finite=True)


def all_finite(tensor: Tensor) -> bool:
    """Return True if a floating-point tensor has neither NaN nor infinity."""
    if math.isfinite(tensor.sum().item()):  # NaN and infinity cannot cancel out in a sum
        return True
    low, high = tensor.aminmax()  # a sum of finite values may overflow; aminmax propagates NaN, too
    return math.isfinite(low.item()) and math.isfinite(high.item())


def _scan(parts: Iterable[tuple[Tensor, int]], also_finite: bool) -> list[tuple[int, int]]:
    results: list[tuple[int, int]] = []
    pending: dict[int, Tensor] = {}
    device: torch.device | None = None
    for elements, position in parts:
        if elements.is_cpu:
            results.append(_scan_on_cpu(elements, position, also_finite))
        else:
            device = device or elements.device
            pending[len(results)] = scan_on_device(elements, position, also_finite).to(device)
            results.append((0, 0))
    if pending:
        for index, (total, *non_finite) in zip(pending, torch.stack([*pending.values()]).tolist(), strict=True):
            results[index] = total, sum(non_finite)
    return results


def _scan_on_cpu(elements: Tensor, position: int, also_finite: bool) -> tuple[int, int]:
    if not also_finite or not elements.is_floating_point():
        return int(_int64_words(elements, position).sum().item()), 0
    if elements.nbytes <= CACHE_BYTES:
        return int(_int64_words(elements, position).sum().item()), int(not all_finite(elements))
    pieces = elements.reshape(-1).split(CACHE_BYTES // elements.itemsize)
    results = [_scan_on_cpu(piece, position + index * CACHE_BYTES, also_finite) for index, piece in enumerate(pieces)]
    return _wrap_int64(sum(total for total, _ in results)), max(non_finite for _, non_finite in results)


def scan_on_device(elements: Tensor, position: int, also_finite: bool) -> Tensor:
    """Return the sum of a shard's words and, if requested, 1 if it is not finite, as int64 [1 or 2] on its device.

    Does not synchronize the device.

    Args:
        elements: Elements of the shard [...].
        position: Position of the first byte in the tensor.
        also_finite: True to check for NaN and infinity, too.
    """
    bits = _int64_words(elements, position).sum()
    if not also_finite:
        return bits.view(1)
    finite = torch.ones((), dtype=torch.bool, device=elements.device)
    if elements.is_floating_point() and elements.numel():
        finite = torch.stack(elements.aminmax()).isfinite().all()  # propagates NaN
    return torch.stack((bits, (~finite).to(torch.int64)))


def _int64_words(tensor: Tensor, position: int) -> Tensor:
    """Return the int64 words that a tensor's bytes occupy from byte `position` on, padded with zeros."""
    flat = tensor.detach().contiguous().view(-1)
    if not flat.numel():
        return flat.new_zeros(0, dtype=torch.int64)
    offset = position % WORD_BYTES
    is_scalar = (
        flat.numel() == 1
    )  # a single element may have any stride, with which it cannot be viewed as another dtype
    if is_scalar or offset or flat.nbytes % WORD_BYTES or flat.storage_offset() * flat.itemsize % WORD_BYTES:
        padded = torch.zeros(
            -(-(offset + flat.nbytes) // WORD_BYTES) * WORD_BYTES, dtype=torch.uint8, device=flat.device
        )
        padded[offset : offset + flat.nbytes].view(flat.dtype).copy_(flat)
        flat = padded
    return flat.view(torch.int64)


def _wrap_int64(value: int) -> int:
    """Return the value as int64 arithmetic wraps it."""
    return (value + 2**63) % 2**64 - 2**63
