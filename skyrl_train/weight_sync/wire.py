"""The messages between trainer and engines in a weight sync."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from skyrl_train.errors import WeightSyncError

ROUTES = frozenset({"in_process", "broadcast", "ipc", "checkpoint"})


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One full (unsharded) parameter, under its Hugging Face name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """torch's name of the wire dtype, e.g. "float32"."""
    fingerprint: int = 0
    """Fingerprint of the tensor in that dtype; see buckets.fingerprint."""

    def __reduce__(self) -> tuple[type[TensorSpec], tuple[Any, ...]]:
        return TensorSpec, (self.name, self.shape, self.dtype, self.fingerprint)  # compact: thousands are sent


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """A LoRA adapter that is synced separately from its model: W x becomes W x + scaling · B (A x)."""

    rank: int
    scaling: float
    layers: tuple[str, ...]
    """Names of the linear layers that it changes; `adapter_names` gives the names of their A and B."""


def adapter_names(layer: str) -> tuple[str, str]:
    """The names of a layer's A [rank, in] and B [out, rank] among the tensors of a sync."""
    return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that a sync will send, announced before the first byte; it also determines the buckets."""

    version: int
    tensors: tuple[TensorSpec, ...]
    non_finite: tuple[str, ...] = ()
    """Names of tensors with NaN or infinity; a sync with any is refused."""
    bucket_bytes: int = 1 << 28
    base_version: int | None = None
    """Only tensors that changed since this version are sent; None: all tensors."""
    rehearsal: bool = False
    """The weights are altered on purpose, to test the probe; the true weights of the same version follow."""
    adapter: AdapterSpec | None = None
    """The adapter whose tensors are among those sent, besides its model's. None: no adapter is to be served."""
    updates: int = 0
    """The optimizer steps that made these weights: the same for one version, whoever sends it, and whenever."""


@dataclass(frozen=True, slots=True)
class SharedHandle:
    """Memory of another process on this machine; see handover.py."""

    slot: int
    """The slot of the trainer rank that offers it: an engine takes the one in its own slot."""
    size: int
    """Bytes."""
    file: str | None = None
    """CPU: the path of a file in memory."""
    cuda: tuple[Any, ...] | None = None
    """CUDA: torch's data for mapping another process's tensor."""
    place: int = 0
    """Which of the pages this is that a rank shares in turn: 0 or 1."""
    key: str = ""
    """Of this page: another one in its place has another."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Consecutive tensors of the manifest, packed as bytes (see buckets.py)."""

    index: int
    names: tuple[str, ...]
    fingerprints: tuple[int, ...]
    payload: Tensor | None = None
    """uint8 [bytes], if the route passes them in the call (`in_process`); else None."""
    handles: tuple[SharedHandle, ...] = ()
    """`ipc`: the bytes in memory, one handle per trainer rank that offers them."""
    file: str | None = None
    """`checkpoint`: a safetensors file in a folder that trainer and engines share."""


@functools.cache
def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightSyncError(f"{name!r} is not the name of a torch dtype.")
    return dtype


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
