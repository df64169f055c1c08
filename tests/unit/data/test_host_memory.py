"""Host memory for copies of a GPU's tensors, pinned through a fake CUDA runtime."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from skyrl_train.data import host_memory
from skyrl_train.data.host_memory import MIN_PINNED_BYTES, empty_host_tensor

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LARGE = MIN_PINNED_BYTES // 4


class FakeRuntime:
    """Records pinned ranges of memory, and reads each one when it is pinned and unpinned: it must be mapped."""

    def __init__(self, error: int = 0):
        self.error = error
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert len(ctypes.string_at(address, size)) == size
        if not self.error:
            self.pinned[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        size = self.pinned.pop(address)
        assert len(ctypes.string_at(address, size)) == size
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    runtime = FakeRuntime()
    monkeypatch.setattr(host_memory, "_cudart", lambda: runtime)
    return runtime


def test_large_tensors_for_gpus_are_pinned_while_used(runtime: FakeRuntime):
    tensors = [empty_host_tensor((LARGE + n,), torch.float32, CUDA) for n in (-1, 0, 1)]
    tensors.append(empty_host_tensor((LARGE,), torch.float32, CPU))
    assert list(runtime.pinned.values()) == [4 * LARGE, 4 * (LARGE + 1)]  # not a power of two
    row = tensors[2].view(torch.int16)[7:9].zero_()
    address = tensors[2].data_ptr()
    tensors.clear()
    assert list(runtime.pinned) == [address]
    assert row.tolist() == [0, 0]
    del row
    assert not runtime.pinned


@pytest.mark.defect("offload-buffers-share-pages")
def test_pinned_tensors_do_not_share_pages(runtime: FakeRuntime):
    tensors = [empty_host_tensor((LARGE + 37 * n,), torch.float32, CUDA) for n in range(8)]
    tensors.append(empty_host_tensor((401, 300), torch.bfloat16, CUDA))
    assert (tensors[-1].shape, tensors[-1].dtype) == ((401, 300), torch.bfloat16)
    pages = [
        range(start // mmap.PAGESIZE, (start + size - 1) // mmap.PAGESIZE + 1) for start, size in runtime.pinned.items()
    ]
    assert len(pages) == len(tensors)
    assert len({page for pages_of_tensor in pages for page in pages_of_tensor}) == sum(map(len, pages))


def test_memory_that_cannot_be_pinned_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, runtime: FakeRuntime
):
    runtime.error = 2
    cleared: list[Any] = []
    empty = torch.empty

    def record_clearing(*shape: Any, device: Any = None, **options: Any) -> Tensor:
        cleared.append(device)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "empty", record_clearing)
    tensor = empty_host_tensor((LARGE,), torch.float32, CUDA)
    monkeypatch.setattr(torch, "empty", empty)
    assert cleared == [CUDA]
    assert tensor.fill_(3.0).sum() == 3.0 * LARGE
    del tensor
    assert "Host memory cannot be pinned (CUDA error 2)" in caplog.text


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_tensors_share_file(device: torch.device, runtime: FakeRuntime):
    file = os.memfd_create("copies")
    os.ftruncate(file, 8)
    first, second = (empty_host_tensor((4,), torch.int16, device, shared_file=file) for _ in range(2))
    first[2] = 7
    assert second.tolist() == [0, 0, 7, 0]
    assert len(runtime.pinned) == (2 if device == CUDA else 0)
    del first, second
    os.close(file)
    assert not runtime.pinned


def test_empty_tensors_need_no_memory(runtime: FakeRuntime):
    assert empty_host_tensor((0, 4), torch.float32, CUDA).shape == (0, 4)
    assert empty_host_tensor((), torch.bfloat16, CUDA).shape == ()
    assert not runtime.pinned
