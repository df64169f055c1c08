"""Connects the ranks of one model: torch's default process group, with deadlines."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from skyrl_train.cluster.addresses import choose_interface, listen, local_address_towards, reset_interface
from skyrl_train.errors import DeadlineExceeded

_BACKENDS = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"}
"""The backends of torch. With NCCL, host tensors (offloaded shards, agreement flags) still use gloo."""


def init_process_group(
    rank: int,
    world_size: int,
    address: str,
    port: int,
    backend: str,
    timeout_s: float,
    collective_timeout_s: float | None = None,
) -> None:
    """Join the process group that rank 0 hosts at address:port.

    Rank 0 listens only there. gloo uses the interface towards that address, unless GLOO_SOCKET_IFNAME is set. The call
    blocks until all ranks have joined.

    Args:
        rank: This process's rank.
        world_size: Number of ranks.
        address: Host name or IP address of rank 0.
        port: Port of rank 0.
        backend: "gloo" or "nccl".
        timeout_s: Deadline for joining, in seconds.
        collective_timeout_s: Deadline of each collective, in seconds; None for `timeout_s`.

    Raises:
        DeadlineExceeded: Not all ranks have joined within `timeout_s`, or the connection failed.
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
        action = f"Rank {rank}: the rendezvous of {world_size} ranks at {address}:{port}"
        raise DeadlineExceeded(action, timeout_s) from error


def make_subgroups(size: int, timeout_s: float) -> dist.ProcessGroup:
    """Split the ranks into groups of `size` consecutive ranks, and return this rank's group. All ranks must call it.

    Args:
        size: Number of ranks of a group.
        timeout_s: Deadline of a collective in these groups, in seconds.
    """
    group: dist.ProcessGroup = dist.new_subgroups(size, timeout=timedelta(seconds=timeout_s))[0]
    return group


def close_process_group() -> None:
    """Leave the default process group and its subgroups; nothing happens if there is none."""
    if dist.is_initialized():
        dist.destroy_process_group()
    reset_interface()
