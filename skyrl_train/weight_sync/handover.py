"""The routes that hand a bucket over, with both of their ends.

`ipc`: it is in memory that trainer and engine, on one machine, both map. `checkpoint`: it is a safetensors file in a
folder that they share.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from skyrl_train.errors import WeightSyncError
from skyrl_train.weight_sync.protocol import SharedHandle

_NAME = "skyrl-weights"

# -- ipc
#
# Accelerators copy when they get to it. Neither process waits for the other's queue, so each end waits for its own
# copies before it lets the other one have a page: the trainer for what fills it, the engine for what reads it.


@dataclass
class _SharedBuffer:
    """One buffer, and the handle with which other processes map all of it."""

    buffer: Tensor
    handle: SharedHandle
    file: int | None
    """The file descriptor that keeps a CPU page alive."""


class SharedBuffers:
    """The trainer's end: two pages used in turn, so that one is filled while engines read the other.

    On a CPU a page is an unnamed file (memfd), which others open through this process's descriptor: so nothing remains,
    however this process ends. On CUDA it is a tensor whose handle is sent.
    """

    def __init__(self, device: torch.device | str, slot: int):
        self._device = torch.device(device)
        self._slot = slot
        self._buffers: list[_SharedBuffer | None] = [None, None]

    def buffer(self, index: int, size: int, largest: int = 0) -> Tensor:
        """Page `index` % 2 as uint8 [size], to be filled. `largest`: the most bytes that it is known to be for."""
        place = index % 2
        page = self._buffers[place]
        if page is None or page.buffer.numel() < size:
            page = None  # or its memory would stay beside that of the next one
            self._drop(place)
            page = self._buffers[place] = self._new(place, max(size, largest))
        return page.buffer[:size]

    def handle(self, index: int, size: int) -> SharedHandle:
        """The handle with which others read the first `size` bytes of page `index` % 2, which are there by now."""
        page = self._buffers[index % 2]
        assert page is not None, "a page is filled first"
        wait_for_copies(self._device)
        return replace(page.handle, size=size)

    def close(self) -> None:
        """Free both pages."""
        for place in range(2):
            self._drop(place)

    def _new(self, place: int, size: int) -> _SharedBuffer:
        handle = SharedHandle(self._slot, size, place=place, key=uuid4().hex)
        if self._device.type == "cuda":
            buffer = torch.zeros(size, dtype=torch.uint8, device=self._device)
            return _SharedBuffer(buffer, replace(handle, cuda=reduce_tensor(buffer)), None)
        file = _create_memfd()
        os.ftruncate(file, size)
        path = f"/proc/{os.getpid()}/fd/{file}"
        return _SharedBuffer(_map(path, size), replace(handle, file=path), file)

    def _drop(self, place: int) -> None:
        page, self._buffers[place] = self._buffers[place], None
        if page is not None and page.file is not None:
            os.close(page.file)
        if page is not None and self._device.type == "cuda":
            del page
            torch.cuda.ipc_collect()  # memory that no engine maps any more


class MappedBuffers:
    """The engine's end: a page is mapped once, and kept until the trainer makes another in its place.

    torch counts one mapping for each time that CUDA memory is shared, so mapping a page for every bucket would leak it.
    """

    def __init__(self, device: torch.device | str = "cpu"):
        """`device`: the engine's, for pages on CUDA."""
        self._device = torch.device(device)
        self._buffers: dict[int, tuple[str, Tensor]] = {}

    def open(self, handle: SharedHandle) -> Tensor:
        """The other process's memory as uint8 [size], without a copy. Raises WeightSyncError."""
        key, page = self._buffers.get(handle.place, ("", None))
        if page is None or key != handle.key or page.numel() < handle.size:
            self._buffers.pop(handle.place, None)
            page = _map_handle(handle, self._device)
            self._buffers[handle.place] = handle.key, page
        return page[: handle.size]

    def wait_for_reads(self) -> None:
        """Wait for this process's copies out of the pages, which the trainer may then fill again."""
        wait_for_copies(self._device)

    def close(self) -> None:
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
            raise WeightSyncError("a handle names neither memory of an accelerator nor a file")
        # Mapping extends a file to the requested length, so ask for what is there.
        size = os.stat(handle.file).st_size
        if _NAME not in os.readlink(handle.file) or size < handle.size:
            raise WeightSyncError(f"{handle.file} is not {handle.size} bytes of a trainer's memory")
        return _map(handle.file, size)
    except (RuntimeError, OSError) as error:
        reason = str(error).partition("\n")[0][:200]
        raise WeightSyncError(f"the trainer's memory cannot be mapped: {reason}") from error


def _map(path: str, size: int) -> Tensor:
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


def _create_memfd() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create(_NAME)
    raise WeightSyncError("the ipc route on CPUs needs Linux; use generator.weight_sync_route=broadcast.")


def _with_local_device(arguments: tuple[Any, ...], device: torch.device) -> tuple[Any, ...]:
    """Replace the sender's device index in a handle by ours: every process numbers its visible accelerators."""
    device_index = 6  # of torch.multiprocessing.reductions.rebuild_cuda_tensor
    mine = list(arguments)
    mine[device_index] = torch.cuda.current_device() if device.index is None else device.index
    return tuple(mine)


# -- checkpoint


class BucketFolder:
    """The trainer's end: one folder per version, deleted when the next one begins or the sender closes."""

    def __init__(self, folder: str):
        self._root = Path(folder)
        self._current: Path | None = None

    def write(self, version: int, index: int, tensors: Sequence[tuple[str, Tensor]]) -> str:
        """Write a bucket; returns the file's path. Raises WeightSyncError if it cannot be written."""
        folder = self._root / f"version_{version}"
        if folder != self._current:
            self.close()
            shutil.rmtree(folder, ignore_errors=True)
        path = folder / f"bucket_{index:05d}.safetensors"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._current = folder
            save_file({name: tensor.contiguous() for name, tensor in tensors}, path)
        except (OSError, SafetensorError) as error:
            raise WeightSyncError(f"bucket {index} could not be written to {path}: {error}") from error
        return str(path)

    def close(self) -> None:
        """Delete the current folder."""
        if self._current is not None:
            shutil.rmtree(self._current, ignore_errors=True)
            self._current = None


def read_bucket(path: str, device: torch.device) -> dict[str, Tensor]:
    """The engine's end: read a bucket. Raises WeightSyncError for a missing or incomplete file."""
    try:
        return load_file(path, device=str(device))
    except (OSError, SafetensorError) as error:
        raise WeightSyncError(f"{path} cannot be read: {error}") from error
