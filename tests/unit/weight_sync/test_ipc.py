"""Memory that two processes map: what one writes the other reads, and nothing of it is left behind."""

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
    """A process that opens every handle it is sent, answers with the bytes, and leaves a mark on the first."""
    pages = MappedBuffers()
    while (handle := connection.recv()) is not None:
        memory = pages.open(handle)
        connection.send(bytes(memory.tolist()))
        memory[0] = 99
        connection.send(memory.numel())


def test_another_process_reads_what_was_written_and_writes_into_the_same_memory():
    context = multiprocessing.get_context("spawn")
    connection, other = context.Pipe()
    process = context.Process(target=reader, args=(other,), daemon=True)
    process.start()
    pages = SharedBuffers("cpu", slot=3)
    try:
        for index, size in enumerate((32, 64, 16, 128)):
            buffer = pages.buffer(index, size)
            buffer.copy_(torch.arange(index, index + size, dtype=torch.uint8))
            handle = pages.handle(index, size)
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
        pages.close()


@pytest.mark.defect("pages-lost-with-every-engine")
def test_pages_outlive_connections_and_have_room_for_the_largest_bucket():
    """On CUDA a page that is dropped while an engine maps it, or that none ever mapped, is memory lost."""
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


def test_two_pages_take_turns_and_grow():
    pages = SharedBuffers("cpu", slot=0)
    first, second = pages.buffer(0, 64), pages.buffer(1, 64)
    first.fill_(1)
    second.fill_(2)
    handle, other = pages.handle(0, 64), pages.handle(1, 64)
    again = pages.buffer(2, 16)
    again.fill_(3)
    smaller = pages.handle(2, 16)
    assert (handle.file, handle.key) == (smaller.file, smaller.key) != (other.file, other.key)
    assert first.tolist() == [3] * 16 + [1] * 48  # the same memory
    assert second.tolist() == [2] * 64
    mapped = MappedBuffers()
    assert mapped.open(smaller).tolist() == [3] * 16
    assert mapped.open(handle).data_ptr() == mapped.open(smaller).data_ptr(), "mapped once, whatever is read of it"
    larger = pages.buffer(2, 4096)
    larger.fill_(4)
    handle = pages.handle(2, 4096)
    assert handle.key != smaller.key
    assert mapped.open(handle).tolist() == [4] * 4096, "another page, whatever the number of its file"
    assert first.tolist() == [3] * 16 + [1] * 48  # another one; who still reads the old one is not disturbed
    pages.close()


def test_memory_that_is_gone_is_an_error_and_no_file_is_left():
    before = set(os.listdir(f"/proc/{os.getpid()}/fd"))
    pages = SharedBuffers("cpu", slot=0)
    pages.buffer(0, 64)
    handle = pages.handle(0, 64)
    pages.close()
    pages.close()
    with pytest.raises(WeightSyncError, match="the trainer's memory cannot be mapped"):
        MappedBuffers().open(handle)
    with pytest.raises(WeightSyncError, match="the trainer's memory cannot be mapped"):
        MappedBuffers().open(replace(handle, file="/proc/999999999/fd/3"))
    assert set(os.listdir(f"/proc/{os.getpid()}/fd")) <= before


def test_a_handle_may_not_ask_for_more_than_there_is_nor_for_any_other_file(tmp_path: Path):
    pages = SharedBuffers("cpu", slot=0)
    pages.buffer(0, 64)
    handle = pages.handle(0, 64)
    with (tmp_path / "other").open("wb+") as other:
        other.write(bytes(64))
        other.flush()
        for wrong in (
            SharedHandle(0, 1 << 20, file=handle.file),
            SharedHandle(0, 64, file=f"/proc/{os.getpid()}/fd/{other.fileno()}"),
        ):
            with pytest.raises(WeightSyncError, match="is not a trainer's buffer of at least"):
                MappedBuffers().open(wrong)
    pages.close()
