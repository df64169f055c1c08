"""Host memory for copies of a GPU's tensors, pinned in place so that they travel at the speed of the bus."""

from __future__ import annotations

import logging
import math
import mmap
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

MIN_PINNED_BYTES = 1 << 16
"""Size in bytes below which memory is not pinned."""


def empty_host_tensor(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, shared_file: int | None = None
) -> Tensor:
    """Return an uninitialized tensor in host memory, for copies from and to a device.

    For a GPU its memory is pinned until the tensor and all views of it are freed. It has exactly the size of the
    tensor, whereas torch's allocator of pinned memory rounds sizes up to powers of two.

    Args:
        shape: The shape.
        dtype: The dtype.
        device: The device that the tensor is copied from or to.
        shared_file: Descriptor of a file in memory that holds the tensor, at least as large as it; the file's content
            is that of the tensor. None: the memory is private.
    """
    size = math.prod(shape) * dtype.itemsize
    if not size or (shared_file is None and (device.type != "cuda" or size < MIN_PINNED_BYTES)):
        return torch.empty(tuple(shape), dtype=dtype)
    file, flags = (-1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) if shared_file is None else (shared_file, mmap.MAP_SHARED)
    pages = _Pages(file, size, flags)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    if device.type == "cuda":
        pages.pin(memory.data_ptr(), device)
    return memory.view(dtype).view(tuple(shape))


class _Pages(mmap.mmap):
    """Mapped memory of its own pages: the driver pins full pages, and each of them only once."""

    _pinned_address = 0
    """0: not pinned."""

    def pin(self, address: int, device: torch.device) -> None:
        if status := int(_cudart().cudaHostRegister(address, len(self), 0)):
            log.warning("Host memory cannot be pinned (CUDA error %d). Copies from and to the GPU are slower.", status)
            with suppress(RuntimeError):  # the next kernel raises that error again: clear it here
                torch.empty(1, device=device).zero_()
            return
        self._pinned_address = address

    def __del__(self) -> None:  # before the memory is unmapped
        if self._pinned_address and not sys.is_finalizing():
            _cudart().cudaHostUnregister(self._pinned_address)


def _cudart() -> Any:
    return torch.cuda.cudart()
