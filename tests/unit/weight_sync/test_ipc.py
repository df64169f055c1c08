"""Memory that two processes map: both see the same bytes, and nothing is left behind."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from skyrl_train.errors import WeightSyncError
from skyrl_train.weight_sync.ipc import MappedBuffers, SharedBuffers
from skyrl_train.weight_sync.protocol import SharedHandle
from skyrl_train.weight_sync.sender import WeightSender


def reader(connection: Connection) -> None:
    """Run a process that maps each handle it receives, sends back the bytes and overwrites the first."""
    buffers = MappedBuffers()
    while (handle := connection.recv()) is not None:
        memory = buffers.open(handle)
        connection.send(bytes(memory.tolist()))
        memory[0] = 99
        connection.send(memory.numel())


def test_processes_share_buffer_memory():
    context = multiprocessing.get_context("spawn")
    connection, other = context.Pipe()
    process = context.Process(target=reader, args=(other,), daemon=True)
    process.start()
    buffers = SharedBuffers("cpu", slot=3)
    try:
        for index, size in enumerate((32, 64, 16, 128)):
            buffer = buffers.buffer(index, size)
            buffer.copy_(torch.arange(index, index + size, dtype=torch.uint8))
            handle = buffers.handle(index, size)
            assert (handle.slot, handle.size) == (3, size)
            connection.send(handle)
            assert connection.recv() == bytes(range(index, index + size))
            assert connection.recv() == size
            assert buffer[0] == 99
        connection.send(None)
        process.join(20)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
        buffers.close()


@pytest.mark.defect("dead-engine-leaks-ipc-pages")
def test_buffers_outlive_connections():
    """On CUDA, memory leaks if a buffer is freed while an engine maps it, or before any engine mapped it."""
    tensors = {"small": torch.ones(8), "large": torch.ones(4096)}
    sender = WeightSender(lambda: iter(tensors.items()), wire_dtype="float32", bucket_bytes=1, rank=0)
    sender.connect("ipc", "", 2, 20.0)
    sender.prepare_manifest(1)
    first = sender.send(0)
    sender.disconnect()
    sender.connect("ipc", "", 2, 20.0)
    sender.prepare_manifest(2)
    again, other = sender.send(0), sender.send(1)
    assert first is not None and again is not None and other is not None
    assert first.handles[0].key == again.handles[0].key
    assert {os.stat(str(handle.file)).st_size for handle in (*again.handles, *other.handles)} == {4096 * 4}
    sender.close()
    assert not os.path.exists(str(again.handles[0].file))


def test_two_buffers_alternate_and_grow():
    buffers = SharedBuffers("cpu", slot=0)
    first, second = buffers.buffer(0, 64), buffers.buffer(1, 64)
    first.fill_(1)
    second.fill_(2)
    handle, other = buffers.handle(0, 64), buffers.handle(1, 64)
    again = buffers.buffer(2, 16)
    again.fill_(3)
    smaller = buffers.handle(2, 16)
    assert (handle.file, handle.key) == (smaller.file, smaller.key) != (other.file, other.key)
    assert first.tolist() == [3] * 16 + [1] * 48  # the same memory
    assert second.tolist() == [2] * 64
    mapped = MappedBuffers()
    assert mapped.open(smaller).tolist() == [3] * 16
    assert mapped.open(handle).data_ptr() == mapped.open(smaller).data_ptr(), "mapped once, whatever the size"
    larger = buffers.buffer(2, 4096)
    larger.fill_(4)
    handle = buffers.handle(2, 4096)
    assert handle.key != smaller.key
    assert mapped.open(handle).tolist() == [4] * 4096, "another buffer, even if its file descriptor has the same number"
    assert first.tolist() == [3] * 16 + [1] * 48  # the old buffer is unchanged for processes that still read it
    buffers.close()


def test_closed_buffer_cannot_be_mapped():
    before = set(os.listdir(f"/proc/{os.getpid()}/fd"))
    buffers = SharedBuffers("cpu", slot=0)
    buffers.buffer(0, 64)
    handle = buffers.handle(0, 64)
    buffers.close()
    buffers.close()
    with pytest.raises(WeightSyncError, match="the trainer's memory cannot be mapped"):
        MappedBuffers().open(handle)
    with pytest.raises(WeightSyncError, match="the trainer's memory cannot be mapped"):
        MappedBuffers().open(replace(handle, file="/proc/999999999/fd/3"))
    assert set(os.listdir(f"/proc/{os.getpid()}/fd")) <= before


def test_invalid_handles_are_rejected(tmp_path: Path):
    buffers = SharedBuffers("cpu", slot=0)
    buffers.buffer(0, 64)
    handle = buffers.handle(0, 64)
    with (tmp_path / "other").open("wb+") as other:
        other.write(bytes(64))
        other.flush()
        for invalid in (
            SharedHandle(0, 1 << 20, file=handle.file),
            SharedHandle(0, 64, file=f"/proc/{os.getpid()}/fd/{other.fileno()}"),
        ):
            with pytest.raises(WeightSyncError, match="is not a trainer's buffer of at least"):
                MappedBuffers().open(invalid)
    buffers.close()
