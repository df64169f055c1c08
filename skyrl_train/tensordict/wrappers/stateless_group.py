"""A process group that is separate from the default one, with the interface of vLLM's PyNcclCommunicator."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from torch import Tensor

from skyrl_train.errors import ConfigError
from skyrl_train.weight_sync.broadcast import ROOT_RANK, BroadcastGroup


class StatelessGroup:
    """A process group in which rank 0 broadcasts tensors. `close` ends its connections."""

    def __init__(self, address: str, rank: int, world_size: int, device: torch.device, timeout: float):
        self.rank, self.world_size, self.device = rank, world_size, device
        self._group = BroadcastGroup(address, rank, world_size, device, timeout)

    def broadcast(self, tensor: Tensor, src: int = ROOT_RANK, stream: Any = None) -> Tensor:
        """Fill `tensor` with rank 0's values and return it once they have arrived; `stream` is ignored.

        Raises ConfigError for another `src` or device, WeightSyncError if a rank is lost or late.
        """
        if src != ROOT_RANK:
            raise ConfigError(f"src={src}: only rank {ROOT_RANK} can broadcast.")
        if tensor.device.type != self.device.type:
            raise ConfigError(
                f"The tensor is on {tensor.device}, but the group on {self.device}. Move the tensor there first."
            )
        if not tensor.is_contiguous():
            raise ConfigError("The tensor cannot be filled in place. Make it contiguous: tensor = tensor.contiguous().")
        self._group.broadcast(tensor)
        return tensor

    def close(self) -> None:
        """Leave the group and close its connections."""
        self._group.close()


def stateless_init_process_group(
    master_address: str,
    master_port: int | str,
    rank: int,
    world_size: int,
    device: torch.device | str | int | None = None,
    timeout: float = 300.0,
) -> StatelessGroup:
    """Form a group of `world_size` processes at an address where rank 0 listens: NCCL on accelerators, gloo on CPUs.

    Blocks until all ranks have joined. `device` is by default the first accelerator, if any. Raises WeightSyncError if
    not all ranks join within `timeout` seconds, ConfigError for a rank outside the group.
    """
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank={rank} must be from 0 to {world_size - 1} (world_size={world_size}).")
    if device is None:
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    return StatelessGroup(f"{master_address}:{int(master_port)}", rank, world_size, torch.device(device), timeout)


async def stateless_init_process_group_async(*args: Any, **options: Any) -> StatelessGroup:
    """Form a group like `stateless_init_process_group`, with the same arguments, without blocking the event loop."""
    return await asyncio.to_thread(stateless_init_process_group, *args, **options)
