"""Connects the ranks of one model: torch's default process group, with a deadline."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from skyrl_train.cluster.addresses import choose_interface, listen, local_address_towards, reset_interface
from skyrl_train.errors import DeadlineExceeded

_BACKENDS = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"}
"""With NCCL, host tensors (offloaded shards, agreement flags) still go through gloo."""


def init_process_group(
    rank: int,
    world_size: int,
    address: str,
    port: int,
    backend: str,
    timeout_s: float,
    collective_timeout_s: float | None = None,
) -> None:
    """Join the group that rank 0 hosts at address:port. `collective_s`: deadline of a collective, else `timeout_s`.

    It listens there and nowhere else, and gloo where this machine reaches it, unless GLOO_SOCKET_IFNAME says where.
    Raises DeadlineExceeded if not all ranks join within `timeout_s` seconds.
    """
    try:
        store = dist.TCPStore(
            address,
            port,
            world_size,
            rank == 0,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listen(address, port).detach() if rank == 0 else None,
        )
        choose_interface(local_address_towards(address, port))
        dist.init_process_group(
            _BACKENDS[backend],
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=collective_timeout_s or timeout_s),
        )
    except (dist.DistStoreError, dist.DistNetworkError, OSError) as error:
        reset_interface()
        meeting = f"Rank {rank}: the meeting of {world_size} ranks at {address}:{port}"
        raise DeadlineExceeded(meeting, timeout_s) from error


def make_subgroups(size: int, timeout_s: float) -> dist.ProcessGroup:
    """Make groups of `size` neighbouring ranks, with their own deadline; returns this rank's. All ranks call it."""
    group: dist.ProcessGroup = dist.new_subgroups(size, timeout=timedelta(seconds=timeout_s))[0]
    return group


def close_process_group() -> None:
    """Leave the default group and its subgroups, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
    reset_interface()
