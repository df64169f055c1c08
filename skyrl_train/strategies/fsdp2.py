"""Parameters, gradients and optimizer state sharded over ranks with torch's fully_shard; gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from skyrl_train.config.schema import DeepSpeedConfig, FSDPConfig, OptimizerConfig
from skyrl_train.errors import ConfigError
from skyrl_train.models.parallel_group import ParallelGroup
from skyrl_train.models.parameter_shards import ParameterShard
from skyrl_train.models.sharded_tensor import ShardedTensor
from skyrl_train.strategies.base import Strategy, get_widest_dtype
from skyrl_train.strategies.checkpoint_shards import ParameterSlice, to_local
from skyrl_train.strategies.materialize import materialize_sharded


class FSDP2Strategy(Strategy):
    """Shards decoder layers one by one, and the rest as the root. Call `init_process_group` first, even for one rank.

    Parameters and gradients keep the dtype that the model was loaded in; `compute_dtype` is that of gathered weights
    and activations. Gradients are summed over ranks in the parameters' dtype: once per update (`reduce_once`; null
    does so on CPUs, and without reshard_after_forward), else after every micro-batch, so that a whole gradient never
    exists.
    A model on the meta device is sharded first, and read row by row; one on the CPU is moved layer by layer.
    """

    def __init__(
        self,
        *,
        optimizer_config: OptimizerConfig | None,
        fsdp_config: FSDPConfig,
        deepspeed_config: DeepSpeedConfig | None = None,
        device: torch.device | str,
        rank: int,
        world_size: int,
        compute_dtype: torch.dtype = torch.float32,
    ):
        super().__init__(optimizer_config, device, rank, world_size)
        if fsdp_config.fsdp_size != -1 and (fsdp_config.fsdp_size < 1 or world_size % fsdp_config.fsdp_size):
            raise ConfigError(_no_divisor(fsdp_config.fsdp_size, world_size, "ranks of the model"))
        self.fsdp_config = fsdp_config
        self.tensor_parallel: ParallelGroup | None = None
        self.expert_parallel: ParallelGroup | None = None
        self.parameter_shards: Mapping[str, ParameterShard] = {}
        self._replicated: frozenset[str] = frozenset()
        """Names of the layers' parameters that are replicated over the ranks of `tensor_parallel`."""
        self.compute_dtype = compute_dtype
        self._reshards = True if fsdp_config.reshard_after_forward is None else fsdp_config.reshard_after_forward
        frugal = self.device.type != "cpu" and bool(self._reshards)
        self.reduce_once = not frugal if fsdp_config.reduce_once is None else fsdp_config.reduce_once

    def prepare(self, model: Any, total_steps: int | None) -> nn.Module:
        """See `Strategy.prepare`. A scorer divided over `scorer.tensor_parallel` has the `model.parameter_shards` of its layers.

        Layers are then sharded over the ranks that have the same part, and the rest over all ranks. If it is divided
        over `scorer.expert_parallel`, that is so of its experts, and all else is sharded over all ranks.
        """
        self.tensor_parallel, self.expert_parallel = model.tensor_parallel, model.expert_parallel
        self.parameter_shards = model.parameter_shards
        same_part, all_ranks = self._meshes()
        self.mesh = all_ranks if self.expert_parallel is not None else same_part
        layers = model.decoder_layers()
        inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
        names = {model.hf_name(name) for name, parameter in model.named_parameters() if id(parameter) in inside}
        self._replicated = (
            frozenset(names - self.parameter_shards.keys()) if self.tensor_parallel is not None else frozenset()
        )
        dtype = get_widest_dtype(model)
        narrower = self.compute_dtype.itemsize < dtype.itemsize
        options: dict[str, Any] = {
            "reshard_after_forward": self._reshards,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=self.compute_dtype if narrower else None,
                reduce_dtype=dtype if narrower else None,
                cast_forward_inputs=False,  # it would round temperatures; activations have the embedding's dtype anyway
            ),
            "offload_policy": CPUOffloadPolicy() if self._offloads else OffloadPolicy(),
        }
        for experts in model.expert_modules():
            fully_shard(experts, mesh=same_part, **options)
        for layer in layers:
            fully_shard(layer, mesh=self.mesh, **options)
        root: Any = fully_shard(model, mesh=all_ranks, **options)
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        materialize_sharded(root, "cpu" if self._offloads else self.device)
        self._register_module(root, total_steps)
        return root

    @property
    def _offloads(self) -> bool:
        return self.fsdp_config.cpu_offload and self.device.type != "cpu"

    def _meshes(self) -> tuple[DeviceMesh, DeviceMesh]:
        """The meshes of ranks that have the same part, and of all. Those that have different ones are neighbours."""
        parts = 1 if self._parallel_group is None else self._parallel_group.size
        ranks = self.world_size // parts
        size = ranks if self.fsdp_config.fsdp_size == -1 else self.fsdp_config.fsdp_size
        if (
            self.expert_parallel is not None and self.fsdp_config.fsdp_size != -1
        ):  # which counts ranks of the other layers
            if size % parts:
                raise ConfigError(
                    f"fsdp_config.fsdp_size={size} is not divided by {self.expert_parallel.size_key}={parts}."
                )
            size //= parts
        if ranks % size:
            raise ConfigError(_no_divisor(size, ranks, "ranks that have the same part of the model"))
        all_ranks = self._mesh(ranks // size, size * parts)
        if parts == 1:
            return all_ranks, all_ranks
        names = ("replicate", "shard", "tensor")
        mesh = init_device_mesh(self.device.type, (ranks // size, size, parts), mesh_dim_names=names)
        return mesh["shard"] if size == ranks else mesh["replicate", "shard"], all_ranks

    @property
    def _parallel_group(self) -> ParallelGroup | None:
        """The ranks that have different `parts`."""
        return self.tensor_parallel or self.expert_parallel

    def _mesh(self, replicas: int, size: int) -> DeviceMesh:
        if replicas == 1:
            return init_device_mesh(self.device.type, (size,), mesh_dim_names=("shard",))
        return init_device_mesh(self.device.type, (replicas, size), mesh_dim_names=("replicate", "shard"))

    def backward(self, loss: Tensor, is_last_micro_batch: bool) -> None:
        root: Any = self.module
        root.set_requires_gradient_sync(is_last_micro_batch or not self.reduce_once)
        loss.backward()

    def free_transient_memory(self) -> None:
        """See `Strategy.rest`. Without resharding after forward, a pass without gradient leaves all layers gathered."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        super().free_transient_memory()

    def step(self) -> dict[str, float]:
        self._reduce_replicated_grads()
        return super().step()

    def _reduce_replicated_grads(self) -> None:
        """Sum the gradients of parameters that tensor-parallel ranks replicate: each rank has one summand."""
        for name, parameter in self._parameters.items():
            if self.tensor_parallel is not None and name in self._replicated and parameter.grad is not None:
                held = to_local(parameter.grad)
                held.copy_(self.tensor_parallel.all_reduce(held))

    def _num_replicas(self, name: str) -> int:
        return self.tensor_parallel.size if self.tensor_parallel is not None and name in self._replicated else 1

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        dist.all_reduce(value, group=self.mesh.get_group("shard"))
        return value if self.tensor_parallel is None else self.tensor_parallel.all_reduce(value)

    def _sharded(self, name: str, parameter: nn.Parameter) -> ShardedTensor:
        tensor: Any = parameter.detach()
        mesh, placements, shape, stride = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()
        replica = zip(mesh.get_coordinate(), placements, strict=True)
        first = all(index == 0 for index, placement in replica if placement.is_replicate())
        if self.tensor_parallel is not None and name in self._replicated:
            first = first and self.tensor_parallel.rank == 0

        def gather(held: Tensor) -> Tensor:
            rows = DTensor.from_local(held, mesh, placements, run_check=False, shape=shape, stride=stride)
            return self._full_tensor(name, rows.full_tensor())

        piece, part = ParameterSlice.from_tensor(tensor), self.parameter_shards.get(name)
        sharded = ShardedTensor(tensor.to_local().to(self.device), piece.shape, piece.start, first, gather)
        if part is None:
            return sharded
        piece = piece.to_full(part)
        if part.dim == 0:
            return replace(sharded, shape=piece.shape, start=piece.start)
        zero_pad = partial(_pad_with_zeros, part)
        return replace(sharded, shape=piece.shape, start=piece.start, zero_pad=zero_pad, select_columns=part.extract)

    def _full_tensor(self, name: str, tensor: Tensor) -> Tensor:
        """The whole parameter, on the device of `tensor`, gathered from all parts if `tensor` is only a part."""
        part, group = self.parameter_shards.get(name), self._parallel_group
        return tensor if part is None or group is None else part.merge(group.all_gather(tensor))

    def _slices(self) -> dict[str, ParameterSlice]:
        """Slices of whole parameters. A part that consists of rows is a slice; other parts are gathered for saving."""
        slices = super()._slices()
        for name, part in self.parameter_shards.items():
            if name in slices:
                slices[name] = slices[name].to_full(part)
        return slices

    def _to_saved(self, name: str, held: Tensor) -> Tensor:
        return held if self._is_row_sharded(name) else self._full_tensor(name, held)

    def _from_saved(self, name: str, elements: Tensor, like: Tensor) -> Tensor:
        if self._is_row_sharded(name):
            return super()._from_saved(name, elements, like)
        part = self.parameter_shards[name]
        sizes = list(like.shape)
        sizes[part.dim] *= part.size
        return part.extract(elements.view(sizes))

    def _is_saved_here(self, name: str) -> bool:
        whole = name in self._replicated or not self._is_row_sharded(name)
        return not whole or self.tensor_parallel is None or self.tensor_parallel.rank == 0

    def _is_row_sharded(self, name: str) -> bool:
        """Whether a rank has rows of a parameter, or all of it."""
        return name not in self.parameter_shards or self.parameter_shards[name].dim == 0

    def _move(self, device: torch.device | str) -> None:
        if not self._offloads:
            super()._move(device)

    def _move_state(self, device: torch.device | str) -> None:
        if not self._offloads:
            super()._move_state(device)


def _pad_with_zeros(part: ParameterShard, held: Tensor) -> Tensor:
    return part.merge([held if rank == part.rank else torch.zeros_like(held) for rank in range(part.size)])


def _no_divisor(size: int, count: int, what: str) -> str:
    return f"fsdp_config.fsdp_size={size} does not divide the {count} {what}; use -1 (all of them) or a divisor."
