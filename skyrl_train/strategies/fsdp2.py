"""Parameters, gradients and optimizer state sharded over ranks with torch's fully_shard; gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from skyrl_train.errors import ConfigError
from skyrl_train.strategies.base import DeepSpeedSettings, FSDPSettings, OptimizerSettings
from skyrl_train.strategies.optimizer import OptimizedModel, widest_dtype


class FSDP2Strategy(OptimizedModel):
    """Every decoder layer is a unit, and the root holds the rest. Needs `init_process_group` first, also for one rank.

    Parameters and gradients keep the dtype the model was loaded in; `compute_dtype` is that of gathered weights and
    activations. Gradients are summed over ranks in the parameters' dtype: once an update where memory is not short (on
    CPUs, and without reshard_after_forward), else after every micro-batch, so that a whole gradient never exists. Load
    the model on the CPU: layers move to the device one by one as they are sharded.
    """

    def __init__(
        self,
        *,
        optimizer: OptimizerSettings | None,
        fsdp: FSDPSettings,
        deepspeed: DeepSpeedSettings | None = None,
        device: torch.device | str,
        rank: int,
        world_size: int,
        compute_dtype: torch.dtype = torch.float32,
    ):
        super().__init__(optimizer, device, rank, world_size)
        size = world_size if fsdp.fsdp_size == -1 else fsdp.fsdp_size
        if size < 1 or world_size % size:
            raise ConfigError(
                f"fsdp_config.fsdp_size={fsdp.fsdp_size} does not divide the {world_size} ranks of the model; "
                "use -1 (all of them) or a divisor."
            )
        self.fsdp = fsdp
        self.shard_size = size
        self.compute_dtype = compute_dtype
        self.reduce_once = self.device.type == "cpu" or not fsdp.reshard_after_forward

    def prepare(self, scorer: nn.Module, total_steps: int | None) -> nn.Module:
        self.mesh = self._mesh()
        dtype = widest_dtype(scorer)
        narrower = self.compute_dtype.itemsize < dtype.itemsize
        options: dict[str, Any] = {
            "mesh": self.mesh,
            "reshard_after_forward": self.fsdp.reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=self.compute_dtype if narrower else None,
                reduce_dtype=dtype if narrower else None,
                cast_forward_inputs=False,  # would round temperatures; activations follow the embedding's dtype anyway
            ),
            "offload_policy": CPUOffloadPolicy() if self._offloads else OffloadPolicy(),
        }
        layers: Any = scorer.decoder_layers
        for layer in layers():
            fully_shard(layer, **options)
        root: Any = fully_shard(scorer, **options)
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        self._own(root, total_steps)
        return root

    @property
    def _offloads(self) -> bool:
        return self.fsdp.cpu_offload and self.device.type != "cpu"

    def _mesh(self) -> DeviceMesh:
        replicas = self.world_size // self.shard_size
        if replicas == 1:
            return init_device_mesh(self.device.type, (self.world_size,), mesh_dim_names=("shard",))
        return init_device_mesh(self.device.type, (replicas, self.shard_size), mesh_dim_names=("replicate", "shard"))

    def backward(self, loss: Tensor, last: bool) -> None:
        root: Any = self.scorer
        root.set_requires_gradient_sync(last or not self.reduce_once)
        loss.backward()

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        dist.all_reduce(value, group=self.mesh.get_group("shard"))
        return value

    def offload(self) -> int:
        return 0 if self._offloads else super().offload()

    def onload(self) -> None:
        if not self._offloads:
            super().onload()
