"""A strategy that shards parameters, gradients and optimizer state with torch's fully_shard.

Collectives use gloo on CPUs and NCCL on GPUs.
"""

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
from skyrl_train.strategies.muon import RowShards


class FSDP2Strategy(Strategy):
    """A strategy that shards each decoder layer separately, and the rest as the root.

    Parameters and gradients keep the dtype in which the model was loaded; `compute_dtype` is that of gathered weights
    and activations. Gradients are summed over ranks in the parameters' dtype. With `reduce_once` that happens once per
    update, otherwise after every micro-batch, so that a full gradient never exists. If `reduce_once` is null, it is on
    for CPUs, and for GPUs without reshard_after_forward. A meta-device model is sharded first and then read row by row;
    a model on the CPU is moved layer by layer.
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
        """Check the settings. Call `init_process_group` before `prepare`, even for one rank.

        Args:
            optimizer_config: Optimizer settings; None for a frozen model.
            fsdp_config: Settings of FSDP.
            deepspeed_config: Not used.
            device: Device of the model.
            rank: This process's rank.
            world_size: Number of ranks.
            compute_dtype: Dtype of gathered weights and activations.

        Raises:
            ConfigError: fsdp_size does not divide the number of ranks.
        """
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
        saves_memory = self.device.type != "cpu" and bool(self._reshards)
        self.reduce_once = not saves_memory if fsdp_config.reduce_once is None else fsdp_config.reduce_once

    def prepare(self, model: Any, total_steps: int | None) -> nn.Module:
        """Shard a model with FSDP2, and build optimizer and schedule unless it is frozen.

        With tensor parallelism, layers are sharded over the ranks that hold the same tensor-parallel shard, and the
        rest over all ranks. With expert parallelism, experts are sharded over the ranks that hold the same experts, and
        everything else over all ranks.

        Args:
            model: The model; it is changed. See `Strategy.prepare` for its methods.
            total_steps: Number of updates of the run, for the schedule. None freezes the model.

        Returns:
            The module to call for a forward pass.

        Raises:
            ConfigError: Settings do not fit the ranks, or a trained model has no optimizer settings.
        """
        self.tensor_parallel, self.expert_parallel = model.tensor_parallel, model.expert_parallel
        self.parameter_shards = model.parameter_shards
        same_shard_ranks, all_ranks = self._meshes()
        self.mesh = all_ranks if self.expert_parallel is not None else same_shard_ranks
        layers = model.decoder_layers()
        layer_parameters = {id(parameter) for layer in layers for parameter in layer.parameters()}
        names = {
            model.hf_name(name) for name, parameter in model.named_parameters() if id(parameter) in layer_parameters
        }
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
            fully_shard(experts, mesh=same_shard_ranks, **options)
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
        """Return the mesh of ranks that hold the same tensor- or expert-parallel shard, and the mesh of all ranks.

        Consecutive ranks hold different shards.
        """
        num_shards = 1 if self._parallel_group is None else self._parallel_group.size
        ranks = self.world_size // num_shards
        size = ranks if self.fsdp_config.fsdp_size == -1 else self.fsdp_config.fsdp_size
        if self.expert_parallel is not None and self.fsdp_config.fsdp_size != -1:
            # fsdp_size counts the ranks of layers that are not experts.
            if size % num_shards:
                raise ConfigError(
                    f"fsdp_config.fsdp_size={size} is not a multiple of {self.expert_parallel.size_key}={num_shards}. "
                    "Use a multiple, or -1 for all ranks."
                )
            size //= num_shards
        if ranks % size:
            raise ConfigError(_no_divisor(size, ranks, "ranks that hold the same part of the model"))
        all_ranks = self._mesh(ranks // size, size * num_shards)
        if num_shards == 1:
            return all_ranks, all_ranks
        names = ("replicate", "shard", "tensor")
        mesh = init_device_mesh(self.device.type, (ranks // size, size, num_shards), mesh_dim_names=names)
        return mesh["shard"] if size == ranks else mesh["replicate", "shard"], all_ranks

    @property
    def _parallel_group(self) -> ParallelGroup | None:
        """The ranks that hold different tensor- or expert-parallel shards; None without such parallelism."""
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
        """Free gathered layers and other memory that is only needed within a pass.

        Without resharding after forward, a pass without gradient leaves all layers gathered.
        """
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        super().free_transient_memory()

    def step(self) -> dict[str, float]:
        self._reduce_replicated_grads()
        return super().step()

    def _reduce_replicated_grads(self) -> None:
        """Sum the gradients of parameters that tensor-parallel ranks replicate: each rank has a partial sum."""
        for name, parameter in self._parameters.items():
            if self.tensor_parallel is not None and name in self._replicated and parameter.grad is not None:
                gradient = to_local(parameter.grad)
                gradient.copy_(self.tensor_parallel.all_reduce(gradient))

    def _num_replicas(self, name: str) -> int:
        return self.tensor_parallel.size if self.tensor_parallel is not None and name in self._replicated else 1

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        dist.all_reduce(value, group=self.mesh.get_group("shard"))
        return value if self.tensor_parallel is None else self.tensor_parallel.all_reduce(value)

    def _sharded(self, name: str, parameter: nn.Parameter) -> ShardedTensor:
        tensor: Any = parameter.detach()
        mesh, placements, shape, stride = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()
        replica = zip(mesh.get_coordinate(), placements, strict=True)
        is_first_replica = all(index == 0 for index, placement in replica if placement.is_replicate())
        if self.tensor_parallel is not None and name in self._replicated:
            is_first_replica = is_first_replica and self.tensor_parallel.rank == 0

        def gather(local: Tensor) -> Tensor:
            rows = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
            return self._full_tensor(name, rows.full_tensor())

        slice_, shard = ParameterSlice.from_tensor(tensor), self.parameter_shards.get(name)
        sharded = ShardedTensor(tensor.to_local().to(self.device), slice_.shape, slice_.start, is_first_replica, gather)
        if shard is None:
            return sharded
        slice_ = slice_.to_full(shard)
        if shard.dim == 0:
            return replace(sharded, shape=slice_.shape, start=slice_.start)
        zero_pad = partial(_pad_with_zeros, shard)
        return replace(sharded, shape=slice_.shape, start=slice_.start, zero_pad=zero_pad, select_columns=shard.extract)

    def _row_shards(self, name: str) -> RowShards:
        parameter: Any = self._saved[name]
        group, shape, shard = (
            parameter.device_mesh.get_group("shard"),
            list(parameter.shape),
            self.parameter_shards.get(name),
        )
        size, count = dist.get_world_size(group), shape[0]
        chunk = -(-count // size)  # fully_shard splits rows like torch.chunk
        rows = tuple(max(0, min(chunk, count - rank * chunk)) for rank in range(size))
        if shard is not None:
            shape[shard.dim] *= shard.size
        to_shard = (lambda full: full) if shard is None else shard.extract
        return RowShards(group, (shape[0], shape[1]), rows, partial(self._full_tensor, name), to_shard)

    def _full_tensor(self, name: str, tensor: Tensor) -> Tensor:
        """Return the full parameter, on the device of `tensor`, merged from all ranks if `tensor` is only a shard."""
        shard, group = self.parameter_shards.get(name), self._parallel_group
        return tensor if shard is None or group is None else shard.merge(group.all_gather(tensor))

    def _slices(self) -> dict[str, ParameterSlice]:
        """Return slices of full parameters. A shard of rows is a slice; other shards are gathered for saving."""
        slices = super()._slices()
        for name, shard in self.parameter_shards.items():
            if name in slices:
                slices[name] = slices[name].to_full(shard)
        return slices

    def _to_saved(self, name: str, local: Tensor) -> Tensor:
        return local if self._is_row_sharded(name) else self._full_tensor(name, local)

    def _from_saved(self, name: str, elements: Tensor, like: Tensor) -> Tensor:
        if self._is_row_sharded(name):
            return super()._from_saved(name, elements, like)
        shard = self.parameter_shards[name]
        sizes = list(like.shape)
        sizes[shard.dim] *= shard.size
        return shard.extract(elements.view(sizes))

    def _is_saved_here(self, name: str) -> bool:
        is_replica = name in self._replicated or not self._is_row_sharded(name)
        return not is_replica or self.tensor_parallel is None or self.tensor_parallel.rank == 0

    def _is_row_sharded(self, name: str) -> bool:
        """True if a rank holds rows of a parameter, or all of it."""
        return name not in self.parameter_shards or self.parameter_shards[name].dim == 0

    def _move(self, device: torch.device | str) -> None:
        if not self._offloads:
            super()._move(device)

    def _move_state(self, device: torch.device | str) -> None:
        if not self._offloads:
            super()._move_state(device)


def _pad_with_zeros(shard: ParameterShard, local: Tensor) -> Tensor:
    return shard.merge([local if rank == shard.rank else torch.zeros_like(local) for rank in range(shard.size)])


def _no_divisor(size: int, count: int, what: str) -> str:
    return f"fsdp_config.fsdp_size={size} does not divide the {count} {what}; use -1 (all of them) or a divisor."
