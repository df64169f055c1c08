"""The `ipc` route: buckets in memory that the trainer and the engines of one node both map.

Accelerators copy asynchronously, and neither process waits for the queue of the other. So each end waits for its own
copies before it passes a buffer to the other end: the trainer for those that fill it, the engine for those that read
it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from skyrl_train.errors import WeightSyncError
from skyrl_train.weight_sync.protocol import SharedHandle

_NAME = "skyrl-weights"


@dataclass
class _SharedBuffer:
    """A buffer, and the handle with which other processes map all of it."""

    buffer: Tensor
    handle: SharedHandle
    file: int | None
    """File descriptor that keeps a CPU buffer alive."""


class SharedBuffers:
    """The trainer's end: two buffers that are used alternately, so that one is filled while engines read the other.

    On a CPU a buffer is an unnamed file (memfd), which other processes open through this process's descriptor. So
    nothing is left over, however this process ends. On CUDA it is a tensor whose handle is sent.
    """

    def __init__(self, device: torch.device | str, slot: int):
        """Create buffers on a device; they are allocated on first use.

        Args:
            device: Device of the buffers.
            slot: Slot of this trainer rank, which handles name.
        """
        self._device = torch.device(device)
        self._slot = slot
        self._buffers: list[_SharedBuffer | None] = [None, None]

    def buffer(self, index: int, size: int, largest: int = 0) -> Tensor:
        """Return the buffer for bucket `index` as uint8 [size], to be filled.

        Args:
            index: Index of the bucket; buckets use the two buffers alternately.
            size: Bytes of the bucket.
            largest: Bytes of the largest bucket, if known, so that the buffer need not be reallocated for it.

        Raises:
            WeightSyncError: This system cannot share CPU memory.
        """
        position = index % 2
        shared = self._buffers[position]
        if shared is None or shared.buffer.numel() < size:
            shared = None  # otherwise both the old and the new memory would exist
            self._drop(position)
            shared = self._buffers[position] = self._new(position, max(size, largest))
        return shared.buffer[:size]

    def handle(self, index: int, size: int) -> SharedHandle:
        """Return the handle with which engines read the first `size` bytes of bucket `index`.

        Waits until the copies that fill the buffer are done.
        """
        shared = self._buffers[index % 2]
        assert shared is not None, "the buffer is filled first"
        wait_for_copies(self._device)
        return replace(shared.handle, size=size)

    def close(self) -> None:
        """Free both buffers."""
        for position in range(2):
            self._drop(position)

    def _new(self, position: int, size: int) -> _SharedBuffer:
        handle = SharedHandle(self._slot, size, place=position, key=uuid4().hex)
        if self._device.type == "cuda":
            buffer = torch.zeros(size, dtype=torch.uint8, device=self._device)
            return _SharedBuffer(buffer, replace(handle, cuda=reduce_tensor(buffer)), None)
        file = _create_memfd()
        os.ftruncate(file, size)
        path = f"/proc/{os.getpid()}/fd/{file}"
        return _SharedBuffer(_map(path, size), replace(handle, file=path), file)

    def _drop(self, position: int) -> None:
        shared, self._buffers[position] = self._buffers[position], None
        if shared is not None and shared.file is not None:
            os.close(shared.file)
        if shared is not None and self._device.type == "cuda":
            del shared
            torch.cuda.ipc_collect()  # memory that no engine maps any more


class MappedBuffers:
    """The engine's end: a buffer is mapped once, and stays mapped until the trainer reallocates it.

    torch counts a mapping for each time that CUDA memory is shared, so mapping it for every bucket would leak it.
    """

    def __init__(self, device: torch.device | str = "cpu"):
        """Create an end without mappings.

        Args:
            device: The engine's device, for buffers on CUDA.
        """
        self._device = torch.device(device)
        self._buffers: dict[int, tuple[str, Tensor]] = {}

    def open(self, handle: SharedHandle) -> Tensor:
        """Return the other process's memory as uint8 [size], without a copy.

        Raises:
            WeightSyncError: The memory cannot be mapped.
        """
        key, buffer = self._buffers.get(handle.place, ("", None))
        if buffer is None or key != handle.key or buffer.numel() < handle.size:
            self._buffers.pop(handle.place, None)
            buffer = _map_handle(handle, self._device)
            self._buffers[handle.place] = handle.key, buffer
        return buffer[: handle.size]

    def wait_for_reads(self) -> None:
        """Wait for this process's copies out of the buffers, after which the trainer may fill them again."""
        wait_for_copies(self._device)

    def close(self) -> None:
        """Drop all mappings."""
        self._buffers = {}


def wait_for_copies(device: torch.device) -> None:
    """Wait for everything that this thread has queued on the device."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _map_handle(handle: SharedHandle, device: torch.device) -> Tensor:
    try:
        if handle.cuda is not None:
            rebuild, arguments = handle.cuda
            tensor: Tensor = rebuild(*_with_local_device(arguments, device))
            return tensor
        if handle.file is None:
            raise WeightSyncError("a handle has neither memory of an accelerator nor a file")
        # Mapping extends a file to the requested length, so request the actual one.
        size = os.stat(handle.file).st_size
        if _NAME not in os.readlink(handle.file) or size < handle.size:
            raise WeightSyncError(f"{handle.file} is not a trainer's buffer of at least {handle.size} bytes")
        return _map(handle.file, size)
    except (RuntimeError, OSError) as error:
        reason = str(error).partition("\n")[0][:200]
        raise WeightSyncError(f"the trainer's memory cannot be mapped: {reason}") from error


def _map(path: str, size: int) -> Tensor:
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


def _create_memfd() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create(_NAME)
    raise WeightSyncError("the ipc route on CPUs requires Linux; use generator.weight_sync_route=broadcast.")


def _with_local_device(arguments: tuple[Any, ...], device: torch.device) -> tuple[Any, ...]:
    """Replace the sender's device index in a handle by ours, because every process numbers its visible devices
    itself.
    """
    device_index = 6  # position in the arguments of torch.multiprocessing.reductions.rebuild_cuda_tensor
    local_arguments = list(arguments)
    local_arguments[device_index] = torch.cuda.current_device() if device.index is None else device.index
    return tuple(local_arguments)
