"""The way of tensors to host memory and back: pinned buffers that are allocated once, and a stream of its own."""

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
"""Bytes below which a tensor is not worth pages of its own: it is moved as it is."""


class CpuOffloader:
    """Moves named tensors between one accelerator and host memory, at the speed of the bus.

    The copies of a call are queued at once, and no other work waits in between. A name keeps its buffer, so its tensors
    must be alike; what is in it counts until the tensor is back.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._buffers: dict[Hashable, Tensor] = {}

    def move(self, tensors: Mapping[Name, Tensor], device: torch.device | str) -> dict[Name, Tensor]:
        """These tensors in host memory (`device` "cpu") or on the accelerator; what is there already stays as it is.

        In host memory the copies are complete, so that the tensors may be freed; on the accelerator they are for all
        that the current stream does from now on.
        """
        there = torch.device(device).type
        going = {name: tensor for name, tensor in tensors.items() if self._place(tensor) != there}
        return {**tensors, **(self._copy_to_host(going) if there == "cpu" else self._copy_to_device(going))}

    def _copy_to_host(self, tensors: Mapping[Name, Tensor]) -> dict[Name, Tensor]:
        copies = {name: self._buffer(name, tensor) for name, tensor in tensors.items()}
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # for what still writes into them
        self._copy(tensors, copies)
        self._stream.synchronize()
        return copies

    def _copy_to_device(self, tensors: Mapping[Name, Tensor]) -> dict[Name, Tensor]:
        copies = {name: torch.empty_like(tensor, device=self._device) for name, tensor in tensors.items()}
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)  # for what still uses the memory that the copies got
        self._copy(tensors, copies)
        current.wait_stream(self._stream)
        return copies

    def _copy(self, tensors: Mapping[Name, Tensor], copies: Mapping[Name, Tensor]) -> None:
        with torch.cuda.stream(self._stream):
            for name, tensor in tensors.items():
                copies[name].copy_(tensor, non_blocking=True)

    def _place(self, tensor: Tensor) -> str:
        return tensor.device.type

    def _buffer(self, name: Hashable, tensor: Tensor) -> Tensor:
        if tensor.nbytes < MIN_PINNED_BYTES:
            return torch.empty_like(tensor, device="cpu")
        if name not in self._buffers:
            self._buffers[name] = _own_pages(tensor)
            self._pin(self._buffers[name])
        return self._buffers[name]

    def _pin(self, buffer: Tensor) -> None:
        """Pin a buffer's own memory: torch's allocator of pinned memory rounds sizes up to powers of two."""
        if status := int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)):
            log.warning("Host memory cannot be pinned (CUDA error %d): offloading is slower.", status)
            with suppress(RuntimeError):  # the next kernel, whichever it is, raises that error again
                torch.empty(1, device=self._device).zero_()
            return
        weakref.finalize(self, _unpin, buffer.untyped_storage()).atexit = False  # which is freed after that


def _own_pages(tensor: Tensor) -> Tensor:
    """Host memory for a tensor like this, in pages of its own: the driver pins whole pages, and each of them once."""
    pages = mmap.mmap(-1, tensor.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=tensor.dtype).view(tensor.shape)


def _unpin(storage: torch.UntypedStorage) -> None:
    torch.cuda.cudart().cudaHostUnregister(storage.data_ptr())
