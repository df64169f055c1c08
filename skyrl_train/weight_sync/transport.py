"""The `broadcast` route: a process group of its own between the trainer's rank 0 (root) and all engines."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_train.errors import WeightSyncError

ROOT = 0


class BroadcastGroup:
    """Beside the default world, never in it: the trainer's ranks have theirs already. gloo on CPU, NCCL on CUDA.

    Connecting, like every transfer, is a collective with a deadline. A group that failed once is useless: close it and
    connect anew.
    """

    def __init__(self, address: str, rank: int, world_size: int, device: torch.device | str, timeout_s: float):
        """`address` is "host:port" with a free port: rank 0 listens there, the others come to it.

        Raises WeightSyncError when not all `world_size` came within `timeout_s`.
        """
        self.rank = rank
        self.device = torch.device(device)
        self._timeout = timedelta(seconds=timeout_s)
        host, _, port = address.rpartition(":")
        try:
            # No waiting for the others here: it would not be interrupted by the deadline of a failed peer.
            self._store: Any = dist.TCPStore(
                host, int(port), None, is_master=rank == ROOT, timeout=self._timeout, wait_for_workers=False
            )
            self._group: Any = _backend(self.device.type, self._store, rank, world_size, self._timeout)
            self._check_in(world_size)
        except RuntimeError as error:
            raise WeightSyncError(
                f"rank {rank} of {world_size} could not meet the others of the weight transfer at {address} "
                f"within {timeout_s:g} s: {_first_line(error)}"
            ) from error

    def broadcast(self, tensor: Tensor, meanwhile: Callable[[], None] | None = None) -> None:
        """From the root into everybody's `tensor`, which has the same shape and dtype everywhere.

        `meanwhile` runs on this thread while the bytes move.
        """
        options = dist.BroadcastOptions()
        options.rootRank = ROOT
        under_way = None
        try:
            under_way = self._group.broadcast([tensor], options)
            if meanwhile is not None:
                meanwhile()
            under_way.wait(self._timeout)
            if tensor.is_cuda:
                torch.cuda.current_stream(tensor.device).synchronize()
        except RuntimeError as error:
            raise WeightSyncError(
                f"a transfer of {tensor.nbytes} bytes did not complete on rank {self.rank} "
                f"(deadline {self._timeout.total_seconds():g} s): {_first_line(error)}"
            ) from error
        finally:
            under_way = None  # an exception's traceback would keep it, and with it the connections, alive

    def send_bucket(
        self, version: int, index: int, buffer: Tensor, meanwhile: Callable[[], None] | None = None
    ) -> None:
        self.broadcast(torch.tensor([version, index, buffer.numel()], dtype=torch.int64, device=self.device))
        self.broadcast(buffer, meanwhile)

    def receive_bucket(
        self, version: int, index: int, buffer: Tensor, meanwhile: Callable[[], None] | None = None
    ) -> None:
        """Fills `buffer`. The header comes first: gloo ends the whole process when lengths differ."""
        header = torch.zeros(3, dtype=torch.int64, device=self.device)
        self.broadcast(header)
        expected = [version, index, buffer.numel()]
        if header.tolist() != expected:
            raise WeightSyncError(
                f"(version, bucket, bytes) {expected} was announced but {header.tolist()} is being sent: "
                "a bucket was lost or repeated"
            )
        self.broadcast(buffer, meanwhile)

    def close(self) -> None:
        """Drop the connections; a peer that waits for this rank fails at once instead of at its deadline."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()
        self._store = None

    def _check_in(self, world_size: int) -> None:
        """All connected, both ways: NCCL connects on first use only, and a missing peer must show here."""
        self.broadcast(torch.full((1,), world_size, dtype=torch.int64, device=self.device))


def _backend(device: str, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> Any:
    if device == "cpu":
        return dist.ProcessGroupGloo(store, rank, world_size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    # Past its own timeout NCCL's watchdog ends the process: the wait in `broadcast` must be the one that gives up.
    options._timeout = 4 * timeout
    return dist.ProcessGroupNCCL(store, rank, world_size, options)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]
