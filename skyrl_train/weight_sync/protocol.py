"""Messages between trainer and engines in a weight sync."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from skyrl_train.errors import WeightSyncError


class WeightRoute(StrEnum):
    """Ways in which weights travel from the trainer to engines."""

    IN_PROCESS = "in_process"
    """Tensors are passed in the call."""
    BROADCAST = "broadcast"
    """A process group of the trainer's rank 0 and all engines; see broadcast.py."""
    IPC = "ipc"
    """Memory that trainer and engines of one node map; see ipc.py."""
    CHECKPOINT = "checkpoint"
    """Files in a shared folder; see checkpoint_route.py."""


WEIGHT_ROUTES = frozenset(route.value for route in WeightRoute)
"""Names of all routes."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, shape and dtype of one full (unsharded) parameter in a sync."""

    name: str
    """Hugging Face name."""
    shape: tuple[int, ...]
    dtype: str
    """torch's name of the dtype in which it is sent, e.g. "float32"."""
    fingerprint: int = 0
    """Fingerprint of the tensor in that dtype; see buckets.fingerprint."""
    changed: int | None = None
    """Number of elements whose bits changed since the manifest's `base_version`; None if it was not counted. Their
    positions and values are sent if they have fewer bytes than the tensor; see changes.py.
    """

    def __reduce__(self) -> tuple[type[TensorSpec], tuple[Any, ...]]:
        # Compact, because thousands are sent.
        return TensorSpec, (self.name, self.shape, self.dtype, self.fingerprint, self.changed)


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """A LoRA adapter that is synced separately from its model: W x becomes W x + scaling · B (A x)."""

    rank: int
    scaling: float
    layers: tuple[str, ...]
    """Names of the linear layers that the adapter changes. `adapter_names` gives the names of their A and B."""


def adapter_names(layer: str) -> tuple[str, str]:
    """Return the names of a layer's A [rank, in] and B [out, rank] among the tensors of a sync."""
    return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


@dataclass(frozen=True, slots=True)
class Manifest:
    """Announcement of everything that a sync will send. It also determines the buckets."""

    version: int
    tensors: tuple[TensorSpec, ...]
    non_finite: tuple[str, ...] = ()
    """Names of tensors with NaN or infinity. Engines reject a sync with any."""
    bucket_bytes: int = 1 << 28
    """Maximum size of a bucket of several tensors."""
    base_version: int | None = None
    """If not None, the sync sends only what changed since this version: tensors, or elements of tensors."""
    is_self_test: bool = False
    """True if the weights are perturbed to test the probe. The true weights of the same version follow."""
    adapter: AdapterSpec | None = None
    """Adapter whose tensors are sent in addition to its model's, and which engines then serve. None means no
    adapter.
    """
    updates: int = 0
    """Number of optimizer steps that made these weights. It is the same whenever one version is sent."""
    precedes_changes: bool = False
    """True if the next sync may send only changed elements, so that the engine must be able to read these tensors
    again.
    """


@dataclass(frozen=True, slots=True)
class SharedHandle:
    """Memory of another process of the same node; see ipc.py."""

    slot: int
    """Slot of the trainer rank that shares the memory. An engine reads that of its own slot if there is one."""
    size: int
    """Number of bytes to read."""
    file: str | None = None
    """CPU: path of a file in memory."""
    cuda: tuple[Any, ...] | None = None
    """CUDA: torch's data for mapping a tensor of another process."""
    place: int = 0
    """Index of the buffer among the two that a rank uses alternately: 0 or 1."""
    key: str = ""
    """Unique id of this buffer. It changes when the sender reallocates the buffer, so that the receiver maps it
    again.
    """


@dataclass(frozen=True, slots=True)
class Bucket:
    """Consecutive tensors of the manifest, or their changes, packed as bytes (see buckets.py and changes.py)."""

    index: int
    names: tuple[str, ...]
    fingerprints: tuple[int, ...]
    payload: Tensor | None = None
    """Route `in_process`: the bytes, uint8 [bytes]."""
    handles: tuple[SharedHandle, ...] = ()
    """Route `ipc`: the bytes in shared memory, one handle per trainer rank that shares them."""
    file: str | None = None
    """Route `checkpoint`: path of a safetensors file in the shared folder."""


@functools.cache
def dtype_of(name: str) -> torch.dtype:
    """Return torch's dtype of a name such as "bfloat16".

    Raises:
        WeightSyncError: There is no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightSyncError(f"{name!r} is not the name of a torch dtype.")
    return dtype


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
