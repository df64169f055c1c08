"""DeepSpeed's ZeRO: shards optimizer state and gradients over ranks (stage 2), and also parameters (stage 3)."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from skyrl_train.config.schema import DeepSpeedConfig, FSDPConfig, OptimizerConfig
from skyrl_train.errors import ConfigError
from skyrl_train.models.sharded_tensor import ShardedTensor, gather_equal_ranges, gather_ranges
from skyrl_train.strategies.base import LearningRates, Strategy, get_widest_dtype
from skyrl_train.strategies.checkpoint_shards import CheckpointReader, ParameterSlice
from skyrl_train.strategies.materialize import materialize_full

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class _FlatSlice:
    """This rank's full-precision shard of a parameter: its `slice`, stored in `flat` from `offset` on."""

    flat: Tensor
    offset: int
    slice: ParameterSlice

    def extract(self, tensor: Tensor) -> Tensor:
        """Return the shard's elements in a tensor with the layout of `flat`."""
        return tensor.narrow(0, self.offset, self.slice.stop - self.slice.start)


class DeepSpeedStrategy(Strategy):
    """A strategy with DeepSpeed's ZeRO stage 2 or 3.

    With a compute dtype narrower than the parameters', the model's parameters get that dtype, and the optimizer has
    float32 copies. Gradients are summed over ranks after every micro-batch, in float32. Every rank holds the full
    frozen model unless zero_stage is 3. No DeepSpeed operator is compiled: AdamW is torch's.
    """

    def __init__(
        self,
        *,
        optimizer_config: OptimizerConfig | None,
        deepspeed_config: DeepSpeedConfig,
        fsdp_config: FSDPConfig | None = None,
        device: torch.device | str,
        rank: int,
        world_size: int,
        compute_dtype: torch.dtype = torch.float32,
    ):
        """Import DeepSpeed. Call `init_process_group` first, even for one rank.

        Args:
            optimizer_config: Optimizer settings; None for a frozen model.
            deepspeed_config: Settings of ZeRO.
            fsdp_config: Not used.
            device: Device of the computation; the model given to `prepare` is on the CPU or the meta device.
            rank: This process's rank.
            world_size: Number of ranks.
            compute_dtype: Dtype of the parameters that the model computes with.

        Raises:
            ConfigError: DeepSpeed is not installed.
        """
        super().__init__(optimizer_config, device, rank, world_size)
        self.deepspeed_config = deepspeed_config
        self.compute_dtype = compute_dtype
        self.library = _import_deepspeed(self.device.type)

    def prepare(self, model: nn.Module, total_steps: int | None) -> nn.Module:
        self.module: Any = model
        if total_steps is None:
            model.requires_grad_(False)
        hf_name: Any = model.hf_name
        self._parameters = {hf_name(name): parameter for name, parameter in model.named_parameters()}
        self._saved = {name: p for name, p in self._parameters.items() if p.requires_grad or total_steps is None}
        narrower = self.compute_dtype.itemsize < get_widest_dtype(model).itemsize
        self._dtype = self.compute_dtype if narrower else get_widest_dtype(model)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(self._dtype)
        if total_steps is None and self.deepspeed_config.zero_stage < 3:
            materialize_full(model)
            self._place_unsharded(self.device)
            return model
        self.module = self._initialize(model, total_steps)
        return self.module

    def _initialize(self, root: nn.Module, total_steps: int | None) -> Any:
        config = self._config()
        self.library.utils.groups._WORLD_GROUP = dist.group.WORLD  # otherwise DeepSpeed makes one without our deadline
        model: Any = root
        if self.deepspeed_config.zero_stage == 3:
            # Module by module, so that neither host nor device ever holds the full model.
            for module in (*(submodule for submodule in root.modules() if submodule._parameters), root):
                materialize_full(root, module)
                self.library.zero.Init(module=module, config_dict_or_path=config)
            for parameter in model.head_parameters():
                self.library.zero.register_external_parameter(root, parameter)
        else:
            materialize_full(root)
        if total_steps is None:
            engine = self._engine(root, None, config)
            self._flat_slices = {name: _partition(p, None, 0, self.rank) for name, p in self._saved.items()}
            return engine
        settings = self._schedule(total_steps)
        betas = (settings.adam_betas[0], settings.adam_betas[1])
        self._optimizer = torch.optim.AdamW(
            self._saved.values(), lr=settings.lr, betas=betas, weight_decay=settings.weight_decay, fused=True
        )
        engine = self._engine(root, self._optimizer, config)
        self._flat_slices = {
            name: self._flat_slice(parameter, engine.optimizer) for name, parameter in self._saved.items()
        }
        return engine

    def _engine(self, root: nn.Module, optimizer: torch.optim.Optimizer | None, config: dict[str, Any]) -> Any:
        engine = self.library.initialize(model=root, optimizer=optimizer, config=config)[0]
        # The stack would keep a replaced reference model in memory.
        self.library.zero.parameter_offload.FWD_MODULE_STACK.clear()
        return engine

    def _config(self) -> dict[str, Any]:
        """Return the configuration in DeepSpeed's format."""
        on_host = {"device": "cpu", "pin_memory": self.device.type != "cpu"}
        stage: dict[str, Any] = {"stage": self.deepspeed_config.zero_stage, "overlap_comm": self.device.type != "cpu"}
        if self.deepspeed_config.offload_optimizer:
            stage["offload_optimizer"] = on_host
        if self.deepspeed_config.offload_parameters:
            stage["offload_param"] = on_host
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,  # `backward` decides when an update ends
            "gradient_clipping": self.optimizer_config.max_grad_norm if self.optimizer_config else 0.0,
            "bf16": {"enabled": self._dtype == torch.bfloat16},
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": stage | dict(self.deepspeed_config.zero_optimization),
        }

    def _flat_slice(self, parameter: Any, zero: Any) -> _FlatSlice:
        if self.deepspeed_config.zero_stage == 3:
            group, offset, _ = zero.grad_position[zero.get_param_id(parameter)]
            return _partition(parameter, zero.fp32_partitioned_groups_flat[group], offset, self.rank)
        shape, fragment = tuple(parameter.shape), parameter._hp_mapping
        if fragment is None:  # other ranks hold all of it
            return _FlatSlice(zero.single_partition_of_fp32_groups[0], 0, ParameterSlice(shape, "float32", 0, 0))
        start, length = fragment.lp_fragment_address.start, fragment.lp_fragment_address.numel
        flat = zero.single_partition_of_fp32_groups[fragment.param_group_index]
        return _FlatSlice(
            flat, fragment.hp_fragment_address.start, ParameterSlice(shape, "float32", start, start + length)
        )

    def backward(self, loss: Tensor, is_last_micro_batch: bool) -> None:
        self.module.set_gradient_accumulation_boundary(is_last_micro_batch)
        self.module.backward(loss * self.world_size, scale_wrt_gas=False)  # DeepSpeed averages over ranks

    def step(self) -> dict[str, float]:
        assert self._optimizer is not None and self.optimizer_config is not None, "a frozen model does not step"
        lr = self._next_lr()
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self.module.step()
        stepped = self.module.was_step_applied()
        if self.deepspeed_config.zero_stage < 3 and not stepped:
            # With the optimizer in host memory DeepSpeed would add the next gradients to the non-finite ones.
            averaged = self.module.optimizer.averaged_gradients
            averaged.update(dict.fromkeys(averaged))
        return self._finish_step(float(self.module.get_global_grad_norm()), lr, stepped)

    def _move(self, device: torch.device | str) -> None:
        """Move all tensors to host memory that are not already there, or back to the device."""
        if torch.device(device).type == "cpu":
            self._offload_tensors()
        else:
            self._onload_tensors()

    def _place_unsharded(self, device: torch.device | str) -> None:
        self.module.to(device)
        self._flat_slices = {
            name: _FlatSlice(p.detach().view(-1), 0, ParameterSlice.from_tensor(p)) for name, p in self._saved.items()
        }

    def _offload_tensors(self) -> None:
        if self.deepspeed_config.zero_stage < 3 and self._optimizer is None:
            self._place_unsharded("cpu")
            return
        if self.deepspeed_config.zero_stage < 3:
            states = self.library.zero.offload_config.OffloadStateTypeEnum
            others = [state for state in states if state is not states.optim_states]
            self.module.offload_states(include=others, pin_memory=False)
        elif self._optimizer is None or self.deepspeed_config.offload_parameters:
            self.module.optimizer.empty_partition_cache()
        else:
            states = self.library.zero.offload_config.OffloadStateTypeEnum
            self.module.offload_states(include=[states.lp_grads, states.contiguous_grad_buffer], pin_memory=False)
        self._move_unmanaged("cpu")

    def _onload_tensors(self) -> None:
        if self.deepspeed_config.zero_stage < 3 and self._optimizer is None:
            self._place_unsharded(self.device)
            return
        if self._optimizer is not None and (
            self.deepspeed_config.zero_stage < 3 or not self.deepspeed_config.offload_parameters
        ):
            self.module.reload_states()
        self._move_unmanaged(self.device)
        if self.deepspeed_config.zero_stage < 3:
            return
        zero = self.module.optimizer
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    def _move_unmanaged(self, device: torch.device | str) -> None:
        """Move the tensors that DeepSpeed does not move: frozen parameters, and in stage 3 the weights of torch's
        optimizer.
        """
        sharded = self.deepspeed_config.zero_stage == 3
        if not (sharded and self.deepspeed_config.offload_parameters):
            for parameter in self._parameters.values():
                if not parameter.requires_grad:
                    tensor: Any = parameter.ds_tensor if sharded else parameter  # type: ignore[attr-defined]
                    tensor.data = tensor.data.to(device)
            if sharded and self._optimizer is not None:
                self._move_partitions(device)
        if not sharded or self._optimizer is None or self.deepspeed_config.offload_optimizer:
            return
        for flat_slice in self._flat_slices.values():
            flat_slice.flat.data = flat_slice.flat.data.to(device)

    def _move_state(self, device: torch.device | str) -> None:
        if self._optimizer is None or self.deepspeed_config.offload_optimizer:
            return
        for state in self._optimizer.state.values():
            state |= {key: value.to(device) for key, value in state.items()}

    def _move_partitions(self, device: torch.device | str) -> None:
        """Move stage 3's compute copies of trained parameters: DeepSpeed's own move fails with frozen parameters."""
        zero = self.module.optimizer
        buffer = zero.lp_param_buffer
        buffer.data = buffer.data.to(device)
        start = 0
        for flat, partitions in zip(zero.fp16_partitioned_groups_flat, zero.fp16_partitioned_groups, strict=True):
            # If all is float32, these are also the optimizer's weights.
            flat.data = buffer.narrow(0, start, flat.numel())
            for partition in partitions:
                partition.data = buffer.narrow(0, start, partition.numel())
                start += partition.numel()

    def _sharded(self, name: str, parameter: Any) -> ShardedTensor:
        """Return this rank's part of a parameter; that of a trained parameter is in float32.

        See `Strategy.sharded_parameters`.
        """
        is_trained = parameter.requires_grad
        if self.deepspeed_config.zero_stage < 3 and not (is_trained and parameter.dtype != torch.float32):
            return super()._sharded(name, parameter)
        flat_slice = self._flat_slices[name] if name in self._flat_slices else _partition(parameter, None, 0, self.rank)
        shape, start = flat_slice.slice.shape, flat_slice.slice.start
        if self.deepspeed_config.zero_stage == 3:
            gather = partial(gather_equal_ranges, shape, parameter.partition_numel(), self.world_size)
        else:
            gather = partial(gather_ranges, shape, start)
        return ShardedTensor(flat_slice.extract(flat_slice.flat.detach()).to(self.device), shape, start, True, gather)

    def _slices(self) -> dict[str, ParameterSlice]:
        return {name: flat_slice.slice for name, flat_slice in self._flat_slices.items()}

    def _local_slice(self, name: str) -> Tensor:
        flat_slice = self._flat_slices[name]
        return flat_slice.extract(flat_slice.flat.detach())

    def _state(self, name: str) -> dict[str, Tensor]:
        assert self._optimizer is not None
        flat_slice = self._flat_slices[name]
        state = self._optimizer.state[flat_slice.flat]
        return {key: flat_slice.extract(value) if key in _MOMENTS else value.clone() for key, value in state.items()}

    def load(self, folder: Path) -> LearningRates | None:
        for state in self._optimizer.state.values() if self._optimizer is not None else ():
            state["step"].zero_()  # parameters share one: see _load_state
        rates = super().load(folder)
        self._update_compute_copies()
        return rates

    def _load_state(self, reader: CheckpointReader, name: str, parameter_slice: ParameterSlice) -> None:
        assert self._optimizer is not None
        flat = self._flat_slices[name].flat
        saved = f"step/{name}" in reader
        state = self._optimizer.state[flat]
        if not state:
            state |= {"step": torch.zeros((), device=flat.device), **{key: torch.zeros_like(flat) for key in _MOMENTS}}
        if saved:  # a parameter without state (it had no gradient) must not reset others in the same flat tensor
            state["step"].copy_(reader.read_scalar(f"step/{name}").clamp(min=float(state["step"])))
        for key, value in self._state(name).items():
            if key in _MOMENTS:
                value.copy_(
                    reader.read_elements(f"{key}/{name}", parameter_slice) if saved else torch.zeros_like(value)
                )

    def _update_compute_copies(self) -> None:
        """Copy the loaded parameters to those that the model computes with."""
        if self.deepspeed_config.zero_stage < 3:
            if self._optimizer is not None:
                self.module.optimizer.update_lp_params()
            return
        zero = self.module.optimizer
        zero.empty_partition_cache()
        if self._optimizer is not None:
            for group in range(len(zero.fp32_partitioned_groups_flat)):
                zero._reassign_or_swap_out_partitioned_parameters(group)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


def _partition(parameter: Any, flat: Tensor | None, offset: int, rank: int) -> _FlatSlice:
    """Return a rank's shard in ZeRO 3, which splits parameters into equal lengths and pads the last.

    `flat` None means the compute copy.
    """
    flat = parameter.ds_tensor if flat is None else flat
    length, total = parameter.partition_numel(), parameter.ds_numel
    start, stop = min(rank * length, total), min((rank + 1) * length, total)
    dtype = str(flat.dtype).removeprefix("torch.")
    return _FlatSlice(flat, offset, ParameterSlice(tuple(parameter.ds_shape), dtype, start, stop))


def _import_deepspeed(device: str) -> Any:
    os.environ |= {"DS_ACCELERATOR": device, "LOCAL_RANK": "0"}  # every rank sees one device
    try:
        import deepspeed
    except ImportError as error:
        raise ConfigError(
            "trainer.strategy='deepspeed' needs DeepSpeed, which is not installed. Run "
            "`pip install 'skyrl-train[deepspeed]'`, or set trainer.strategy=fsdp2."
        ) from error
    if device == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
            False  # it would be compiled, and is only for inference
        )
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*torch.distributed.*deprecated")
    return deepspeed
