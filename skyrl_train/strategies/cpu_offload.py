"""Copies tensors to host memory and back, with pinned buffers that are allocated once and a dedicated CUDA stream."""

from __future__ import annotations

import logging
import mmap
import weakref
from collections.abc import Hashable, Mapping
from contextlib import suppress
from typing import TypeVar

import torch
from torch import Tensor

log = logging.getLogger(__name__)
Name = TypeVar("Name", bound=Hashable)

MIN_PINNED_BYTES = 1 << 16
"""Size in bytes below which a tensor is copied without a pinned buffer."""


class CpuOffloader:
    """Moves named tensors between one accelerator and host memory, at the speed of the bus.

    All copies of a call are queued at once, without waiting in between. A name keeps its pinned buffer, so all tensors
    of a name must have the same shape and dtype. The buffer's content is valid until the tensor is back on the
    accelerator.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._buffers: dict[Hashable, Tensor] = {}

    def move(self, tensors: Mapping[Name, Tensor], device: torch.device | str) -> dict[Name, Tensor]:
        """Copy tensors to host memory or to the accelerator.

        A tensor that is already there is returned unchanged. In host memory the copies are complete at return, so the
        originals may be freed. On the accelerator they are complete for all later work of the current stream.

        Args:
            tensors: Name -> tensor. A name is the key of a pinned buffer.
            device: "cpu", or the accelerator.

        Returns:
            Name -> tensor on `device`.
        """
        target = torch.device(device).type
        to_copy = {name: tensor for name, tensor in tensors.items() if self._device_type(tensor) != target}
        return {**tensors, **(self._copy_to_host(to_copy) if target == "cpu" else self._copy_to_device(to_copy))}

    def _copy_to_host(self, tensors: Mapping[Name, Tensor]) -> dict[Name, Tensor]:
        copies = {name: self._buffer(name, tensor) for name, tensor in tensors.items()}
        # Wait for kernels that still write into the tensors.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._copy(tensors, copies)
        self._stream.synchronize()
        return copies

    def _copy_to_device(self, tensors: Mapping[Name, Tensor]) -> dict[Name, Tensor]:
        copies = {name: torch.empty_like(tensor, device=self._device) for name, tensor in tensors.items()}
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)  # for kernels that still use the memory of the copies
        self._copy(tensors, copies)
        current.wait_stream(self._stream)
        return copies

    def _copy(self, tensors: Mapping[Name, Tensor], copies: Mapping[Name, Tensor]) -> None:
        with torch.cuda.stream(self._stream):
            for name, tensor in tensors.items():
                copies[name].copy_(tensor, non_blocking=True)

    def _device_type(self, tensor: Tensor) -> str:
        return tensor.device.type

    def _buffer(self, name: Hashable, tensor: Tensor) -> Tensor:
        if tensor.nbytes < MIN_PINNED_BYTES:
            return torch.empty_like(tensor, device="cpu")
        if name not in self._buffers:
            self._buffers[name] = _allocate_pages(tensor)
            self._pin(self._buffers[name])
        return self._buffers[name]

    def _pin(self, buffer: Tensor) -> None:
        """Pin a buffer's memory in place: torch's allocator of pinned memory rounds sizes up to powers of two."""
        if status := int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)):
            log.warning("Host memory cannot be pinned (CUDA error %d). Offloading is slower.", status)
            with suppress(RuntimeError):  # the next kernel raises that error again: clear it here
                torch.empty(1, device=self._device).zero_()
            return
        weakref.finalize(self, _unpin, buffer.untyped_storage()).atexit = False


def _allocate_pages(tensor: Tensor) -> Tensor:
    """Return host memory for a tensor in dedicated pages: the driver pins full pages, and each of them only once."""
    pages = mmap.mmap(-1, tensor.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=tensor.dtype).view(tensor.shape)


def _unpin(storage: torch.UntypedStorage) -> None:
    torch.cuda.cudart().cudaHostUnregister(storage.data_ptr())
