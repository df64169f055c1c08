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
"""Key that `abort_group` sets in the group's store."""
_POLL_INTERVAL_S = 0.2
_CONNECT_TIMEOUT_S = 5.0
"""A live root accepts a connection within this time."""
ROOT_CONNECT_TIMEOUT_S = 60.0
"""The root listens within this time. It does so first, but may be called later than the engines."""
_NCCL_POLL_INTERVAL_S = 0.0005
Address = tuple[str, int]
"""IP address and port."""
_create_device_lock = threading.Lock()


class BroadcastGroup:
    """A process group of gloo (CPU) or NCCL (CUDA), independent of torch's default group, which the trainer's ranks
    use.

    Connecting and every transfer are collectives with a deadline. They end earlier after `abort_group`, except while
    NCCL itself connects; the deadline for that is the one of the process's first group. After a failure the group is
    unusable: close it and create a new one. Methods block.
    """

    def __init__(self, address: str, rank: int, world_size: int, device: torch.device | str, timeout_s: float):
        """Connect all ranks of the group. Blocks until they are connected.

        gloo listens on the address from which this machine reaches the root, unless GLOO_SOCKET_IFNAME names an
        interface.

        Args:
            address: "host:port" with a free port of rank 0's machine, at which only rank 0 listens.
            rank: Rank of this process; 0 is the root.
            world_size: Number of ranks.
            device: Device of the tensors: "cpu" or a CUDA device.
            timeout_s: Deadline in seconds of connecting, and of each transfer.

        Raises:
            WeightSyncError: Not all ranks connected within `timeout_s`.
        """
        self.rank = rank
        self.device = torch.device(device)
        self._timeout = timedelta(seconds=timeout_s)
        self._store: Any = None
        self._group: Any = None
        self._devices: list[Address] = []
        """gloo: address at which each rank listens."""
        host, _, port = address.rpartition(":")
        try:
            listen_fd = listen(host, int(port)).detach() if rank == ROOT_RANK else None
            if rank != ROOT_RANK:
                _wait_for_root(host, int(port), min(timeout_s, ROOT_CONNECT_TIMEOUT_S))
            self._store = _store(address, self._timeout, listen_fd)
            self._rendezvous(world_size)
            self._connect(world_size, local_address_towards(host, int(port)))
            self._connect_all(world_size)
        except (RuntimeError, OSError, WeightSyncError) as error:
            self.close()
            raise WeightSyncError(
                f"rank {rank} of {world_size} could not connect to the other ranks of the weight transfer at "
                f"{address} within {timeout_s:g} s: {_first_line(error)}"
            ) from error

    def broadcast(self, tensor: Tensor, overlapped_work: Callable[[], None] | None = None) -> None:
        """Copy the root's tensor into the tensors of all other ranks.

        Args:
            tensor: The root's tensor, or one of the same shape and dtype that is overwritten.
            overlapped_work: Called on this thread during the transfer. None: nothing runs meanwhile.

        Raises:
            WeightSyncError: The transfer failed, was aborted or did not complete before the deadline.
        """
        options = dist.BroadcastOptions()
        options.rootRank = ROOT_RANK
        transfer = None
        try:
            transfer = self._group.broadcast([tensor], options)
            if overlapped_work is not None:
                overlapped_work()
            self._wait(transfer)
            if tensor.is_cuda:
                torch.cuda.current_stream(tensor.device).synchronize()
        except RuntimeError as error:
            raise WeightSyncError(
                f"a transfer of {tensor.nbytes} bytes did not complete on rank {self.rank} "
                f"(deadline {self._timeout.total_seconds():g} s): {_first_line(error)}"
            ) from error
        finally:
            transfer = None  # otherwise the traceback of an exception would keep it and the connections alive

    def send_bucket(
        self, version: int, index: int, buffer: Tensor, overlapped_work: Callable[[], None] | None = None
    ) -> None:
        """Send a header, then the bytes of a bucket. Called on the root.

        Args:
            version: Version of the weights.
            index: Index of the bucket.
            buffer: uint8 [bytes].
            overlapped_work: Called on this thread during the transfer of the bytes. None: nothing runs meanwhile.

        Raises:
            WeightSyncError: The transfer failed; see `broadcast`.
        """
        self.broadcast(torch.tensor([version, index, buffer.numel()], dtype=torch.int64, device=self.device))
        self.broadcast(buffer, overlapped_work)

    def receive_bucket(
        self, version: int, index: int, buffer: Tensor, overlapped_work: Callable[[], None] | None = None
    ) -> None:
        """Receive a bucket into `buffer`, after its header was checked: gloo ends the whole process if lengths differ.

        Args:
            version: Expected version of the weights.
            index: Expected index of the bucket.
            buffer: uint8 [bytes], overwritten.
            overlapped_work: Called on this thread during the transfer of the bytes. None: nothing runs meanwhile.

        Raises:
            WeightSyncError: Another bucket is being sent, or the transfer failed; see `broadcast`.
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
        """Close the connections, so that ranks that wait for this one fail immediately instead of at their deadline."""
        group, self._group = self._group, None
        if self._devices:
            shut_down_connections(self._devices[self.rank], self._devices)
        if group is not None:
            group.abort()
        self._store = None

    def _connect(self, world_size: int, own: str) -> None:
        """Create the backend's group. `own` is the address to listen at; NCCL chooses its own, or
        NCCL_SOCKET_IFNAME's.
        """
        if self.device.type != "cpu":
            self._group = _nccl(self._store, self.rank, world_size, self._timeout)
            return
        gloo: Any = dist.ProcessGroupGloo  # its options are not typed
        device, address = create_gloo_device(own, configured_interface())
        self._store.set(f"device {self.rank}", json.dumps(address))
        settings = gloo._Options()
        settings._devices, settings._timeout = [device], self._timeout
        self._group = gloo(self._store, self.rank, world_size, settings)
        addresses = (json.loads(self._store.get(f"device {rank}")) for rank in range(world_size))
        self._devices = [(host, port) for host, port in addresses]

    def _rendezvous(self, world_size: int) -> None:
        """Wait for all ranks. Unlike the backend's own wait, this one can be aborted."""
        self._store.set(f"rank {self.rank}", "")
        deadline = time.monotonic() + self._timeout.total_seconds()
        absent = list(range(world_size))
        while absent := [rank for rank in absent if not self._store.check([f"rank {rank}"])]:
            self._check_aborted()
            if time.monotonic() > deadline:
                raise RuntimeError(f"rank {absent[0]} did not connect")
            time.sleep(_POLL_INTERVAL_S / 10)

    def _wait(self, transfer: Any) -> None:
        """Wait for a transfer. Raises RuntimeError if it fails, is aborted or takes too long."""
        deadline = time.monotonic() + self._timeout.total_seconds()
        try:
            while not _completes_within(transfer, _POLL_INTERVAL_S, self.device):
                self._check_aborted()
                if time.monotonic() > deadline:
                    raise RuntimeError("the deadline has passed")
        finally:
            transfer = None  # see `broadcast`

    def _check_aborted(self) -> None:
        if self._store.check([_ABORTED_KEY]):
            raise RuntimeError("it was aborted, because it failed on another rank")

    def _connect_all(self, world_size: int) -> None:
        """Make all ranks connect now: NCCL connects only on first use, but a missing rank must be noticed here."""
        self.broadcast(torch.full((1,), world_size, dtype=torch.int64, device=self.device))


def abort_group(address: str) -> None:
    """Make all waits of the group at this address fail. Call this if one of its ranks has failed.

    Blocks for at most about 10 s. Does nothing if the group no longer exists.
    """
    # A client of a store waits without a limit for a root that was stopped (SIGSTOP) and still accepts connections.
    thread = threading.Thread(target=_set_aborted, args=(address,), name="abort of a weight transfer", daemon=True)
    thread.start()
    thread.join(2 * _CONNECT_TIMEOUT_S)


def _set_aborted(address: str) -> None:
    host, _, port = address.rpartition(":")
    with suppress(RuntimeError, OSError):
        socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S).close()  # a store would retry many times
        _store(address, timedelta(seconds=_CONNECT_TIMEOUT_S)).set(_ABORTED_KEY, "")


def _wait_for_root(host: str, port: int, within_s: float) -> None:
    """Wait until the root listens. The wait of a store would take as long as a transfer may. Raises OSError."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            return socket.create_connection((host, port), _CONNECT_TIMEOUT_S).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_INTERVAL_S)


def _store(address: str, timeout: timedelta, listen_fd: int | None = None) -> Any:
    """Open the group's store without waiting for other ranks, as that wait could not be aborted.

    `listens` is the descriptor of the root's socket.
    """
    host, _, port = address.rpartition(":")
    return dist.TCPStore(
        host,
        int(port),
        None,
        is_master=listen_fd is not None,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listen_fd,
    )


def _completes_within(transfer: Any, seconds: float, device: torch.device) -> bool:
    """Return True if a transfer ends within this time. Raises RuntimeError if it fails."""
    if device.type == "cpu":
        try:
            transfer.wait(timedelta(seconds=seconds))
        except RuntimeError:
            if not transfer.is_completed():
                return False
        try:
            transfer.wait()  # returns if the transfer ended just after the first wait, or raises its error
        finally:
            transfer = None
        return True
    deadline = time.monotonic() + seconds  # NCCL's own wait marks a transfer as failed when it times out
    while not transfer.is_completed():
        if time.monotonic() > deadline:
            return False
        time.sleep(_NCCL_POLL_INTERVAL_S)
    transfer.wait()
    return True


def _nccl(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    # Otherwise NCCL waits for its peers forever in the first transfer.
    options.config.blocking = 0
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(math.ceil(timeout.total_seconds())))
    # NCCL's watchdog ends the process after its own timeout, so the wait in `broadcast` must time out earlier.
    options._timeout = 4 * timeout
    # It also ends the process when a peer is lost. `_wait` notices that, and trainer and other engines survive it.
    with _environment("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):
        return dist.ProcessGroupNCCL(store, rank, world_size, options)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable of this process inside the block."""
    original = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if original is None:
            del os.environ[name]
        else:
            os.environ[name] = original


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]


# -- the sockets of gloo
#
# torch's own `abort` does nothing for gloo, and its destructor waits as well. Each gloo device listens at its own port,
# to which the other ranks connect. Shutting these connections down makes running transfers fail at both ends.


def create_gloo_device(host: str, interface: str) -> tuple[Any, Address]:
    """Create a gloo device that listens at an address of this machine.

    Args:
        host: Address to listen at.
        interface: Network interface to listen on instead of `host`, or "".

    Returns:
        The device and the address at which it listens. The address is (`host`, 0) if it cannot be found out.
    """
    gloo: Any = dist.ProcessGroupGloo  # its methods are not typed
    with _create_device_lock:
        earlier = _listening_addresses()
        device = gloo.create_device(hostname="" if interface else host, interface=interface)
        new = _listening_addresses() - earlier
    return device, new.pop() if len(new) == 1 else (host, 0)


def shut_down_connections(own: Address, others: Sequence[Address]) -> None:
    """Shut down this process's connections between gloo devices. Those that no longer exist are ignored.

    Args:
        own: Address at which this rank's device listens.
        others: Addresses of all devices.
    """
    for entry in psutil.Process().net_connections("tcp"):
        if not entry.raddr or not (entry.laddr.port == own[1] or _to_ipv4(entry.raddr) in others):
            continue
        with suppress(OSError), socket.socket(fileno=os.dup(entry.fd)) as duplicate:
            if duplicate.getsockname()[1] == entry.laddr.port:  # otherwise another thread uses the descriptor by now
                duplicate.shutdown(socket.SHUT_RDWR)


def _listening_addresses() -> set[Address]:
    entries = psutil.Process().net_connections("tcp")
    return {_to_ipv4(entry.laddr) for entry in entries if entry.status == psutil.CONN_LISTEN}


def _to_ipv4(address: Any) -> Address:
    """Return address and port, with an IPv4 address written as such even if the socket is one of IPv6."""
    return str(address.ip).removeprefix("::ffff:"), int(address.port)
