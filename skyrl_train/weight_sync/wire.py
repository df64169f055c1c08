"""What is said on the wire between trainer and engines while weights move."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ROUTES = frozenset({"in_process", "broadcast", "ipc", "checkpoint"})

WORD = 8
"""Bytes that a fingerprint adds at a time."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One full (unsharded) parameter as Hugging Face names it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Of the wire, e.g. "float32": torch's name."""
    fingerprint: int = 0
    """Of the tensor in that dtype; see `fingerprint`."""

    def __reduce__(self) -> tuple[type[TensorSpec], tuple[Any, ...]]:
        return TensorSpec, (self.name, self.shape, self.dtype, self.fingerprint)  # thousands of them travel


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """A LoRA adapter that is synced apart from the model under it: W x becomes W x + scaling · B (A x)."""

    rank: int
    scaling: float
    layers: tuple[str, ...]
    """Names of the linear layers that it changes; what A and B are called: `adapter_names`."""


def adapter_names(layer: str) -> tuple[str, str]:
    """Of a layer's A [rank, in] and B [out, rank] among the tensors of a sync."""
    return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything a sync will send, announced before the first byte; how it is cut into buckets follows from it."""

    version: int
    tensors: tuple[TensorSpec, ...]
    non_finite: tuple[str, ...] = ()
    """Names of tensors that hold NaN or infinity: a sync with any is refused."""
    bucket_bytes: int = 1 << 28
    base_version: int | None = None
    """Only what changed since this version is sent; None: everything."""
    rehearsal: bool = False
    """The weights are altered on purpose, to see that the probe notices; the same version follows."""
    adapter: AdapterSpec | None = None
    """Its tensors are among those sent; the others are the model's under it. None: what is served has no adapter."""


@dataclass(frozen=True, slots=True)
class SharedHandle:
    """Memory of another process on this machine; see ipc.py."""

    slot: int
    """Of the trainer rank that offers it: an engine takes the one beside it."""
    size: int
    """Bytes."""
    file: str | None = None
    """CPU: a file that lives in memory."""
    cuda: tuple[Any, ...] | None = None
    """CUDA: what torch needs to map another process's tensor."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Consecutive tensors of the manifest, packed byte after byte (see buckets.py)."""

    index: int
    names: tuple[str, ...]
    fingerprints: tuple[int, ...]
    payload: Tensor | None = None
    """uint8 [bytes]: only where the route hands tensors over in the call (`in_process`); else None."""
    handles: tuple[SharedHandle, ...] = ()
    """`ipc`: where the bytes lie in memory, one for each trainer rank that offers them."""
    file: str | None = None
    """`checkpoint`: a safetensors file in a folder that trainer and engines share."""


def fingerprint(tensor: Tensor) -> int:
    """Wrapping sum of the tensor's bytes read as int64 words, zeros after the last.

    A flipped bit changes it, and it adds up over shards and fused parameters of whole words. Blind to words that swap
    places and to an even number of flips of the words' highest bit: the probe is the proof against those.
    """
    if not tensor.numel():
        return 0
    flat = tensor.detach().contiguous().view(-1)
    if flat.nbytes % WORD or flat.storage_offset() * flat.itemsize % WORD:
        padded = torch.zeros(-(-flat.nbytes // WORD) * WORD, dtype=torch.uint8, device=flat.device)
        padded.view(flat.dtype)[: flat.numel()] = flat
        flat = padded
    return int(flat.view(torch.int64).sum().item())


def all_finite(tensor: Tensor) -> bool:
    """Whether a floating-point tensor holds neither NaN nor infinity."""
    if math.isfinite(tensor.sum().item()):  # neither can be summed away
        return True
    low, high = tensor.aminmax()  # a sum of finite values may overflow; NaN comes through here too
    return math.isfinite(low.item()) and math.isfinite(high.item())


@functools.cache
def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    assert isinstance(dtype, torch.dtype), f"no torch dtype is called {name!r}"
    return dtype


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
