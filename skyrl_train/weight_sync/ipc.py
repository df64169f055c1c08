"""The `ipc` route: a bucket is in memory that trainer and engine, on one machine, both map. Both ends are here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from skyrl_train.errors import WeightSyncError
from skyrl_train.weight_sync.wire import SharedHandle

_NAME = "skyrl-weights"


@dataclass
class _Page:
    """One buffer, and the handle with which other processes map it."""

    buffer: Tensor
    handle: SharedHandle
    file: int | None
    """The file descriptor that keeps a CPU page alive."""


class SharedPages:
    """The trainer's end: two pages used in turn, so that one is filled while engines read the other.

    On a CPU a page is an unnamed file (memfd), which others open through this process's descriptor: so nothing remains,
    however this process ends. On CUDA it is a tensor whose handle is sent.
    """

    def __init__(self, device: torch.device | str, slot: int):
        self._device = torch.device(device)
        self._slot = slot
        self._pages: list[_Page | None] = [None, None]

    def page(self, index: int, size: int) -> tuple[Tensor, SharedHandle]:
        """Page `index` % 2 as uint8 [size], to be filled, and the handle to read it with."""
        place = index % 2
        page = self._pages[place]
        if page is None or page.buffer.numel() < size:
            self._drop(place)
            page = self._pages[place] = self._new(size)
        handle = SharedHandle(page.handle.slot, size, page.handle.file, page.handle.cuda)
        return page.buffer[:size], handle

    def close(self) -> None:
        """Free both pages."""
        for place in range(2):
            self._drop(place)

    def _new(self, size: int) -> _Page:
        if self._device.type == "cuda":
            from torch.multiprocessing.reductions import reduce_tensor

            buffer = torch.zeros(size, dtype=torch.uint8, device=self._device)
            return _Page(buffer, SharedHandle(self._slot, size, cuda=reduce_tensor(buffer)), None)
        file = _memory_file()
        os.ftruncate(file, size)
        path = f"/proc/{os.getpid()}/fd/{file}"
        return _Page(_map(path, size), SharedHandle(self._slot, size, file=path), file)

    def _drop(self, place: int) -> None:
        page, self._pages[place] = self._pages[place], None
        if page is not None and page.file is not None:
            os.close(page.file)


def open_handle(handle: SharedHandle) -> Tensor:
    """The engine's end: map the other process's memory as uint8 [size], without a copy. Raises WeightSyncError."""
    try:
        if handle.cuda is not None:
            rebuild, arguments = handle.cuda
            tensor: Tensor = rebuild(*_on_my_device(arguments))
            torch.cuda.synchronize()
            return tensor[: handle.size]
        assert handle.file is not None
        # Mapping extends a file to the requested length, so check first that it is a page of sufficient size.
        if _NAME not in os.readlink(handle.file) or os.stat(handle.file).st_size < handle.size:
            raise WeightSyncError(f"{handle.file} is not {handle.size} bytes of a trainer's memory")
        return _map(handle.file, handle.size)
    except (RuntimeError, OSError) as error:
        reason = str(error).partition("\n")[0][:200]
        raise WeightSyncError(f"the trainer's memory cannot be mapped: {reason}") from error


def _map(path: str, size: int) -> Tensor:
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


def _memory_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create(_NAME)
    raise WeightSyncError("the ipc route on CPUs needs Linux; use generator.weight_sync_route=broadcast.")


def _on_my_device(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replace the sender's device index in a handle by ours: every process numbers its visible accelerators."""
    device_index = 6  # of torch.multiprocessing.reductions.rebuild_cuda_tensor
    mine = list(arguments)
    mine[device_index] = torch.cuda.current_device()
    return tuple(mine)
