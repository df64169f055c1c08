"""What is said on the wire between trainer and engines while weights move."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One full (unsharded) parameter as Hugging Face names it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Of the wire, e.g. "float32": torch's name."""
    fingerprint: int = 0
    """Of the tensor in that dtype; see `fingerprint`."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything a sync will send, announced before the first byte; how it is cut into buckets follows from it."""

    version: int
    tensors: tuple[TensorSpec, ...]
    non_finite: tuple[str, ...] = ()
    """Names of tensors that hold NaN or infinity: a sync with any is refused."""
    bucket_bytes: int = 1 << 28


@dataclass(frozen=True, slots=True)
class Bucket:
    """Consecutive tensors of the manifest, packed byte after byte (see buckets.py)."""

    index: int
    names: tuple[str, ...]
    fingerprints: tuple[int, ...]
    payload: Tensor | None = None
    """uint8 [bytes]: only where the route hands tensors over in the call (`in_process`); else None."""


def fingerprint(tensor: Tensor) -> int:
    """Wrapping int64 sum of the bit patterns: it adds up over shards and fused parameters; a flipped bit changes it."""
    flat = tensor.detach().contiguous().view(-1)
    return int(flat.view(_BITS[flat.element_size()]).sum(dtype=torch.int64).item())


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    assert isinstance(dtype, torch.dtype), f"no torch dtype is called {name!r}"
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
