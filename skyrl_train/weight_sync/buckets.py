"""How tensors lie in byte buffers: both ends of the wire."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from skyrl_train.weight_sync.wire import Bucket, Manifest, TensorSpec, dtype_of

ALIGNMENT = 16
"""Every tensor starts at a multiple of it, so that bytes can be viewed as any dtype."""


def num_bytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * dtype_of(spec.dtype).itemsize


def buckets(manifest: Manifest) -> list[Bucket]:
    """The manifest's tensors in order, cut before `bucket_bytes` would be passed; a larger tensor stands alone."""
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
    """Bytes of the buffer that holds these tensors."""
    return sum(_aligned(num_bytes(spec)) for spec in specs)


def views(buffer: Tensor, specs: Sequence[TensorSpec]) -> Iterator[Tensor]:
    """Each tensor's place in a uint8 buffer, in its own dtype and shape: to write into, or to read from."""
    start = 0
    for spec in specs:
        size = num_bytes(spec)
        yield buffer[start : start + size].view(dtype_of(spec.dtype)).view(spec.shape)
        start += _aligned(size)


def empty_buffer(specs: Sequence[TensorSpec], device: torch.device | str) -> Tensor:
    """uint8; zeroed, so that the gaps between tensors hold nothing of this process's memory."""
    return torch.zeros(buffer_bytes(specs), dtype=torch.uint8, device=device)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
