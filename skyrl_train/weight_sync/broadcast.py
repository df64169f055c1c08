"""The `broadcast` route: a separate process group of the trainer's rank 0 (root) and all engines."""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_train.cluster.addresses import configured_interface, listen, local_address_towards
from skyrl_train.errors import WeightSyncError

ROOT_RANK = 0
_ABORTED_KEY = "called off"
"""Key of the group's store."""
_POLL_INTERVAL_S = 0.2
_CONNECT_TIMEOUT_S = 5.0
"""Within this time a root that lives is reached."""
ROOT_CONNECT_TIMEOUT_S = 60.0
"""Within this time the root listens: it does so before all else, but may be asked later than the others."""
_NCCL_POLL_INTERVAL_S = 0.0005
Address = tuple[str, int]
"""(IP address, port)"""
_one_at_a_time = threading.Lock()


class BroadcastGroup:
    """A process group independent of torch's default group, which the trainer's ranks use. gloo on CPU, NCCL on CUDA.

    Connecting, like every transfer, is a collective with a deadline, and ends earlier if it is called off (`call_off`);
    only while NCCL itself connects it does not, and that deadline is the one of the process's first group. After a
    failure the group is unusable: close it and make a new one.
    """

    def __init__(self, address: str, rank: int, world_size: int, device: torch.device | str, timeout_s: float):
        """`address`: "host:port" with a free port of rank 0's machine, at which rank 0 alone listens.

        gloo listens where this machine reaches it, unless GLOO_SOCKET_IFNAME says where.

        Raises WeightSyncError if not all `world_size` ranks connect within `timeout_s`.
        """
        self.rank = rank
        self.device = torch.device(device)
        self._timeout = timedelta(seconds=timeout_s)
        self._store: Any = None
        self._group: Any = None
        self._devices: list[Address] = []
        """Of gloo: where each rank listens."""
        host, _, port = address.rpartition(":")
        try:
            listens = listen(host, int(port)).detach() if rank == ROOT_RANK else None
            if rank != ROOT_RANK:
                _wait_for_root(host, int(port), min(timeout_s, ROOT_CONNECT_TIMEOUT_S))
            self._store = _store(address, self._timeout, listens)
            self._rendezvous(world_size)
            self._connect(world_size, local_address_towards(host, int(port)))
            self._connect_all(world_size)
        except (RuntimeError, OSError, WeightSyncError) as error:
            self.close()
            raise WeightSyncError(
                f"rank {rank} of {world_size} could not meet the others of the weight transfer at {address} "
                f"within {timeout_s:g} s: {_first_line(error)}"
            ) from error

    def broadcast(self, tensor: Tensor, overlapped_work: Callable[[], None] | None = None) -> None:
        """Copy the root's `tensor` into those of all ranks, which have the same shape and dtype.

        `meanwhile` runs on this thread during the transfer. Raises WeightSyncError if it does not complete in time.
        """
        options = dist.BroadcastOptions()
        options.rootRank = ROOT_RANK
        under_way = None
        try:
            under_way = self._group.broadcast([tensor], options)
            if overlapped_work is not None:
                overlapped_work()
            self._wait(under_way)
            if tensor.is_cuda:
                torch.cuda.current_stream(tensor.device).synchronize()
        except RuntimeError as error:
            raise WeightSyncError(
                f"a transfer of {tensor.nbytes} bytes did not complete on rank {self.rank} "
                f"(deadline {self._timeout.total_seconds():g} s): {_first_line(error)}"
            ) from error
        finally:
            under_way = None  # otherwise an exception's traceback would keep it and the connections alive

    def send_bucket(
        self, version: int, index: int, buffer: Tensor, overlapped_work: Callable[[], None] | None = None
    ) -> None:
        """Send a header, then the bytes of a bucket."""
        self.broadcast(torch.tensor([version, index, buffer.numel()], dtype=torch.int64, device=self.device))
        self.broadcast(buffer, overlapped_work)

    def receive_bucket(
        self, version: int, index: int, buffer: Tensor, overlapped_work: Callable[[], None] | None = None
    ) -> None:
        """Receive a bucket into `buffer`, after checking its header: gloo ends the whole process if lengths differ.

        Raises WeightSyncError if another bucket is sent.
        """
        header = torch.zeros(3, dtype=torch.int64, device=self.device)
        self.broadcast(header)
        expected = [version, index, buffer.numel()]
        if header.tolist() != expected:
            raise WeightSyncError(
                f"(version, bucket, bytes) {expected} was announced but {header.tolist()} is being sent: "
                "a bucket was lost or repeated"
            )
        self.broadcast(buffer, overlapped_work)

    def close(self) -> None:
        """Close the connections: peers waiting for this rank fail at once instead of at their deadline."""
        group, self._group = self._group, None
        if self._devices:
            shut_down_connections(self._devices[self.rank], self._devices)
        if group is not None:
            group.abort()
        self._store = None

    def _connect(self, world_size: int, own: str) -> None:
        """Make the backend's group. `own`: the address to listen at; NCCL chooses its own, or NCCL_SOCKET_IFNAME's."""
        if self.device.type != "cpu":
            self._group = _nccl(self._store, self.rank, world_size, self._timeout)
            return
        gloo: Any = dist.ProcessGroupGloo  # whose options are not typed
        device, address = create_gloo_device(own, configured_interface())
        self._store.set(f"device {self.rank}", json.dumps(address))
        settings = gloo._Options()
        settings._devices, settings._timeout = [device], self._timeout
        self._group = gloo(self._store, self.rank, world_size, settings)
        found = (json.loads(self._store.get(f"device {rank}")) for rank in range(world_size))
        self._devices = [(host, port) for host, port in found]

    def _rendezvous(self, world_size: int) -> None:
        """Wait for all ranks: unlike the wait for them within the backend, this one can be called off."""
        self._store.set(f"rank {self.rank}", "")
        deadline = time.monotonic() + self._timeout.total_seconds()
        absent = list(range(world_size))
        while absent := [rank for rank in absent if not self._store.check([f"rank {rank}"])]:
            self._check_aborted()
            if time.monotonic() > deadline:
                raise RuntimeError(f"rank {absent[0]} did not come")
            time.sleep(_POLL_INTERVAL_S / 10)

    def _wait(self, under_way: Any) -> None:
        """Wait for a transfer. Raises RuntimeError if it fails, is called off or takes too long."""
        deadline = time.monotonic() + self._timeout.total_seconds()
        try:
            while not _completes_within(under_way, _POLL_INTERVAL_S, self.device):
                self._check_aborted()
                if time.monotonic() > deadline:
                    raise RuntimeError("it takes too long")
        finally:
            under_way = None  # see `broadcast`

    def _check_aborted(self) -> None:
        if self._store.check([_ABORTED_KEY]):
            raise RuntimeError("it was called off, as another one's part of it failed")

    def _connect_all(self, world_size: int) -> None:
        """Make all ranks connect: NCCL connects only on first use, but a missing peer must be noticed here."""
        self.broadcast(torch.full((1,), world_size, dtype=torch.int64, device=self.device))


def abort_group(address: str) -> None:
    """End whatever the ranks of the group at this address wait for, as one of them failed. No error if it is gone."""
    host, _, port = address.rpartition(":")
    with suppress(RuntimeError, OSError):
        socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S).close()  # a store would try again and again
        _store(address, timedelta(seconds=_CONNECT_TIMEOUT_S)).set(_ABORTED_KEY, "")


def _wait_for_root(host: str, port: int, within_s: float) -> None:
    """Wait for the root to listen. A store's own wait would last as long as a transfer may. Raises OSError."""
    until = time.monotonic() + within_s
    while True:
        try:
            return socket.create_connection((host, port), _CONNECT_TIMEOUT_S).close()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(_POLL_INTERVAL_S)


def _store(address: str, timeout: timedelta, listens: int | None = None) -> Any:
    """`listens`: the descriptor of the root's socket. Nobody waits here for others: that wait would not end early."""
    host, _, port = address.rpartition(":")
    return dist.TCPStore(
        host,
        int(port),
        None,
        is_master=listens is not None,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listens,
    )


def _completes_within(under_way: Any, seconds: float, device: torch.device) -> bool:
    """Whether a transfer ends within this time. Raises RuntimeError if it fails."""
    if device.type == "cpu":
        try:
            under_way.wait(timedelta(seconds=seconds))
        except RuntimeError:
            if not under_way.is_completed():
                return False
        try:
            under_way.wait()  # it may have ended just after that wait, or raises what went wrong
        finally:
            under_way = None
        return True
    until = time.monotonic() + seconds  # NCCL's own wait marks a transfer as failed when its time is over
    while not under_way.is_completed():
        if time.monotonic() > until:
            return False
        time.sleep(_NCCL_POLL_INTERVAL_S)
    under_way.wait()
    return True


def _nccl(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    # Otherwise NCCL waits for its peers for ever, in the first transfer.
    options.config.blocking = 0
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(math.ceil(timeout.total_seconds())))
    # After its own timeout NCCL's watchdog ends the process, so the wait in `broadcast` must time out earlier.
    options._timeout = 4 * timeout
    # So it does when a peer is lost, which `_wait` sees and the trainer and other engines survive.
    with _environment("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):
        return dist.ProcessGroupNCCL(store, rank, world_size, options)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Inside, a variable of this process's environment is set."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]


# -- the sockets of gloo
#
# torch's own `abort` does nothing for gloo, and its destructor waits, too. A gloo device listens at a port of its own,
# and ranks connect to each other's. Shutting these connections down makes transfers under way fail, at both ends.


def create_gloo_device(host: str, interface: str) -> tuple[Any, Address]:
    """A gloo device, and where it listens: at `host`, or at an interface's address, with port 0 if that is unknown."""
    gloo: Any = dist.ProcessGroupGloo  # whose methods are not typed
    with _one_at_a_time:
        before = _listening()
        device = gloo.create_device(hostname="" if interface else host, interface=interface)
        new = _listening() - before
    return device, new.pop() if len(new) == 1 else (host, 0)


def shut_down_connections(own: Address, others: Sequence[Address]) -> None:
    """Shut down this process's connections between these devices; no error for those that are gone."""
    for one in psutil.Process().net_connections("tcp"):
        if not one.raddr or not (one.laddr.port == own[1] or _plain(one.raddr) in others):
            continue
        with suppress(OSError), socket.socket(fileno=os.dup(one.fd)) as connection:
            if connection.getsockname()[1] == one.laddr.port:  # or another thread has the descriptor by now
                connection.shutdown(socket.SHUT_RDWR)


def _listening() -> set[Address]:
    found = psutil.Process().net_connections("tcp")
    return {_plain(one.laddr) for one in found if one.status == psutil.CONN_LISTEN}


def _plain(address: Any) -> Address:
    """IPv4 addresses as such, also if the socket is one of IPv6."""
    return str(address.ip).removeprefix("::ffff:"), int(address.port)
