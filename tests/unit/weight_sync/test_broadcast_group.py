"""Ends of a transfer group: deadlines, aborts, and failures while other ranks take part in a collective."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from skyrl_train.cluster import addresses
from skyrl_train.cluster.addresses import configured_interface, free_address
from skyrl_train.errors import WeightSyncError
from skyrl_train.weight_sync import broadcast
from skyrl_train.weight_sync.broadcast import ROOT_RANK, BroadcastGroup, abort_group
from skyrl_train.weight_sync.buckets import DoubleBuffer
from skyrl_train.weight_sync.sender import WeightSender


def address() -> str:
    return "{}:{}".format(*free_address())


@pytest.mark.defect("failed-rank-leaves-gather")
@pytest.mark.parametrize("fails", ["as the header is sent", "without a group", "without memory for it"])
def test_failed_sender_still_gathers_with_other_ranks(fails: str, monkeypatch: pytest.MonkeyPatch):
    """The other ranks gather the next bucket, and would wait for this one until the deadline of an update."""
    read: list[str] = []

    def parameters() -> Iterator[tuple[str, Tensor]]:
        for name in "abc":
            read.append(name)
            yield name, torch.ones(64)

    sender = WeightSender(parameters, wire_dtype="float32", bucket_bytes=1, rank=ROOT_RANK)
    with ThreadPoolExecutor(1) as pool:
        group_address = address()
        joining = pool.submit(BroadcastGroup, group_address, 1, 2, "cpu", 20.0)
        sender.connect("broadcast", group_address, 2, 20.0)
        sender.prepare_manifest(1)
        read.clear()
        if fails == "as the header is sent":
            joining.result().close()
        if fails == "without a group":
            sender._group = None
        if fails == "without memory for it":
            monkeypatch.setattr(DoubleBuffer, "take", out_of_memory)
        with pytest.raises((WeightSyncError, MemoryError)):
            sender.send(0)
        assert read == (["a"] if fails == "without memory for it" else ["a", "b"])
        sender.close()
        joining.result().close()


def out_of_memory(*arguments: Any) -> Any:
    raise MemoryError


class Work:
    """A transfer that ends just after a wait for it has timed out, as torch's may."""

    def __init__(self, finish: Callable[[], None]):
        self._finish = finish

    def wait(self, timeout: timedelta | None = None) -> None:
        if timeout is not None:
            raise RuntimeError("Operation timed out!")
        self._finish()

    def is_completed(self) -> bool:
        return True


def raise_closed() -> None:
    raise RuntimeError("Connection closed by peer")


@pytest.mark.defect("transfer-ends-at-deadline")
def test_transfer_that_ends_at_timeout_succeeds():
    assert broadcast._completes_within(Work(lambda: None), 0.2, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="closed by peer"):
        broadcast._completes_within(Work(raise_closed), 0.2, torch.device("cpu"))


@pytest.mark.defect("closing-leaves-transfer-running")
@pytest.mark.parametrize("closes_first", [0, 1, 2])
def test_close_ends_pending_transfers_of_all_ranks(closes_first: int):
    """Rank 2 does not take part in the transfer of ranks 0 and 1, so that it would only end at its deadline."""
    group_address = address()
    with ThreadPoolExecutor(3) as pool:
        groups = list(pool.map(lambda rank: BroadcastGroup(group_address, rank, 3, "cpu", 60.0), range(3)))
        transfers = [pool.submit(group.broadcast, torch.zeros(8)) for group in groups[:2]]
        transfers.append(pool.submit(groups[1].broadcast, torch.zeros(8)))
        time.sleep(0.3)
        start = time.monotonic()
        for group in (groups[closes_first], *groups):
            group.close()
        for transfer in transfers:
            assert isinstance(transfer.exception(timeout=20), WeightSyncError | AttributeError | None)
        groups.clear()
    assert time.monotonic() - start < 10


@pytest.mark.defect("engines-wait-for-failed-root")
def test_absent_root_has_its_own_timeout(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(broadcast, "ROOT_CONNECT_TIMEOUT_S", 0.5)
    start = time.monotonic()
    with pytest.raises(WeightSyncError, match="rank 1 of 2 could not connect to the other ranks"):
        BroadcastGroup(address(), 1, 2, "cpu", 600.0)
    assert time.monotonic() - start < 20


def test_abort_does_not_wait_for_stopped_root(monkeypatch: pytest.MonkeyPatch):
    """The kernel accepts connections to a process that was stopped, but nothing answers."""
    monkeypatch.setattr(broadcast, "_CONNECT_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as root:
        start = time.monotonic()
        abort_group(f"127.0.0.1:{root.getsockname()[1]}")
        assert 0.5 < time.monotonic() - start < 5
        (thread,) = (thread for thread in threading.enumerate() if thread.name == "abort of a weight transfer")
        assert thread.daemon, "it must not prevent the end of the process"
    thread.join(10)
    assert not thread.is_alive()


def test_failed_connection_closes_group(monkeypatch: pytest.MonkeyPatch):
    def broadcast(group: BroadcastGroup, tensor: Tensor) -> None:
        raise WeightSyncError("a transfer of 8 bytes did not complete")

    closed: list[BroadcastGroup] = []
    original_close = BroadcastGroup.close

    def close(group: BroadcastGroup) -> None:
        closed.append(group)
        original_close(group)

    monkeypatch.setattr(BroadcastGroup, "broadcast", broadcast)
    monkeypatch.setattr(BroadcastGroup, "close", close)
    with pytest.raises(
        WeightSyncError, match="rank 0 of 1 could not connect to the other ranks of the weight transfer"
    ):
        BroadcastGroup(address(), ROOT_RANK, 1, "cpu", 20.0)
    assert len(closed) == 1


@pytest.mark.defect("remote-weight-transfer-on-loopback")
def test_chosen_interface_is_not_users_choice(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    addresses.choose_interface("127.0.0.1")
    try:
        assert configured_interface() == ""
        code = "from skyrl_train.cluster.addresses import configured_interface; print([configured_interface()])"
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert child.stdout == "['']\n", "nor that of child processes"
    finally:
        addresses.reset_interface()
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    addresses.choose_interface("127.0.0.1")
    assert configured_interface() == "eth7"
    addresses.reset_interface()
    assert configured_interface() == "eth7"
