"""The messages between trainer and engines in a weight sync."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ROUTES = frozenset({"in_process", "broadcast", "ipc", "checkpoint"})

WORD = 8
"""Bytes of the words that a fingerprint sums."""
_IN_CACHE = 1 << 20
"""Bytes that a CPU looks at for one thing after the other, which are read from memory once."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One full (unsharded) parameter, under its Hugging Face name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """torch's name of the wire dtype, e.g. "float32"."""
    fingerprint: int = 0
    """The `fingerprint` of the tensor in that dtype."""

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
    """Memory of another process on this machine; see ipc.py."""

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


def fingerprint(tensor: Tensor) -> int:
    """The wrapping sum of the tensor's bytes as int64 words, padded with zeros.

    Any flipped bit changes it, and it is additive over shards and over fused parameters of whole words. It cannot
    detect swapped words, nor an even number of flips of the words' highest bit; the probe can.
    """
    return int(_words(tensor, 0).sum().item())


def looks(parts: Iterable[tuple[Tensor, int]]) -> list[tuple[int, int]]:
    """In their order: fingerprints of parts of tensors, and 1 for one that holds NaN or infinity, else 0.

    A part is its elements [...] and the position of its first byte in the tensor. The fingerprints of all parts of a
    tensor add up to its own. Parts may lie on several devices; accelerators are waited for once, at the end.
    """
    found: list[tuple[int, int]] = []
    queued: dict[int, Tensor] = {}
    device: torch.device | None = None
    for elements, position in parts:
        if elements.is_cpu:
            found.append(_look(elements, position))
        else:
            device = device or elements.device
            queued[len(found)] = _look_on_device(elements, position).to(device)
            found.append((0, 0))
    if queued:
        for place, (total, non_finite) in zip(queued, torch.stack([*queued.values()]).tolist(), strict=True):
            found[place] = total, non_finite
    return found


def _look(elements: Tensor, position: int) -> tuple[int, int]:
    total, is_finite = 0, True
    pieces = (elements,) if elements.nbytes <= _IN_CACHE else elements.reshape(-1).split(_IN_CACHE // elements.itemsize)
    for piece in pieces:
        total += int(_words(piece, position).sum().item())
        is_finite = is_finite and (not piece.is_floating_point() or all_finite(piece))
        position += piece.nbytes
    return _wrapped(total), int(not is_finite)


def _look_on_device(elements: Tensor, position: int) -> Tensor:
    """Nothing is waited for."""
    bits, finite = _words(elements, position).sum(), torch.ones((), dtype=torch.bool, device=elements.device)
    if elements.is_floating_point() and elements.numel():
        finite = torch.stack(elements.aminmax()).isfinite().all()  # propagates NaN
    return torch.stack((bits, (~finite).to(torch.int64)))


def all_finite(tensor: Tensor) -> bool:
    """Whether a floating-point tensor holds neither NaN nor infinity."""
    if math.isfinite(tensor.sum().item()):  # neither can cancel out in a sum
        return True
    low, high = tensor.aminmax()  # a sum of finite values may overflow; aminmax propagates NaN, too
    return math.isfinite(low.item()) and math.isfinite(high.item())


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


@functools.cache
def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    assert isinstance(dtype, torch.dtype), f"no torch dtype is called {name!r}"
    return dtype


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
