"""The base class of strategies, which shard one model over ranks, and update, move and save it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from skyrl_train.config.choices import OptimizerName
from skyrl_train.config.schema import OptimizerConfig
from skyrl_train.errors import CheckpointError, CheckpointMismatch, ConfigError, NonFiniteUpdate
from skyrl_train.models.sharded_tensor import ShardedTensor, replicated
from skyrl_train.strategies import adamw_8bit
from skyrl_train.strategies.checkpoint_shards import (
    CheckpointReader,
    CheckpointShard,
    ParameterSlice,
    open_shards,
    to_local,
)
from skyrl_train.strategies.cpu_offload import CpuOffloader
from skyrl_train.strategies.muon import RowShards
from skyrl_train.strategies.optimizers import (
    CompositeOptimizer,
    build_optimizer,
    choose_optimizer,
    classify_parameters,
)

SCHEDULES = (
    *("constant", "constant_with_warmup", "cosine", "cosine_with_restarts", "inverse_sqrt", "linear", "polynomial"),
)
"""The schedules of transformers that need only the numbers of warm-up steps and of all steps."""
_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""Keys of the optimizers' state that have the parameter's shape and dtype."""
_UNSHARDED_STATE = ("step", *adamw_8bit.BLOCK_SCALES)
"""Keys of the optimizers' state that do not have the parameter's shape."""


def get_widest_dtype(module: nn.Module) -> torch.dtype:
    """Return the widest dtype of all parameters: that of the trained ones, if frozen ones have the compute dtype."""
    return max((parameter.dtype for parameter in module.parameters()), key=lambda dtype: dtype.itemsize)


def _clip(gradients: Collection[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients to a total norm of at most `max_norm`, without reading `norm` []."""
    factor = torch.where(norm > max_norm, max_norm / norm, 1.0)
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        by_dtype[gradient.dtype].append(gradient)
    for dtype, tensors in by_dtype.items():
        torch._foreach_mul_(tensors, factor.to(torch.promote_types(dtype, torch.float32)))


class LearningRates(NamedTuple):
    """The learning rates that the schedules of two runs give the same update."""

    in_checkpoint: float
    """From the schedule of the run that saved the checkpoint."""
    in_run: float
    """From the schedule of this run."""


class Strategy(ABC):
    """One trained or frozen model on one rank: its parameters, full or sharded, and the optimizer of this rank's shard.

    Gradients are summed over ranks, not averaged: losses contain global denominators. The optimizer works on plain
    views of the local rows, so sharding costs nothing extra and its state is plain, too. Subclasses place the module
    (`prepare`) and define how a number is summed over ranks (`_sum_over_ranks`).
    """

    def __init__(
        self, optimizer_config: OptimizerConfig | None, device: torch.device | str, rank: int, world_size: int
    ):
        """Store the settings; call `prepare` next.

        Args:
            optimizer_config: Optimizer settings; None for a frozen model.
            device: Device of the model.
            rank: This process's rank.
            world_size: Number of ranks.
        """
        self.optimizer_config = optimizer_config
        self.device = torch.device(device)
        self.rank = rank
        self.world_size = world_size
        self.max_skipped_updates = 5
        """The run stops after this many consecutive updates without a finite gradient
        (trainer.guards.max_skipped_updates).
        """
        self._copied_counts: tuple[tuple[tuple[int, ...], torch.device], Tensor] | None = None
        self._updates = 0
        self._skipped_in_a_row = 0
        self._optimizer: torch.optim.Optimizer | CompositeOptimizer | None = None

    @abstractmethod
    def prepare(self, model: nn.Module, total_steps: int | None) -> nn.Module:
        """Shard or wrap a model, and build optimizer and schedule unless it is frozen.

        The model is a RaggedModel, or a module with the same methods: `decoder_layers()`, the blocks to shard
        separately; `hf_name(name)`, a parameter's name in the Hugging Face checkpoint; and `head_parameters()`, the
        parameters that forward reads without running their module. Parameters on the meta device are materialized: see
        strategies.materialize.

        Args:
            model: The model; it is changed.
            total_steps: Number of updates of the run, for the schedule. None freezes the model.

        Returns:
            The module to call for a forward pass.

        Raises:
            ConfigError: Settings do not fit the ranks, or a trained model has no optimizer settings.
        """

    def _register_module(self, model: nn.Module, total_steps: int | None) -> None:
        """Store the placed module with its names and views, and build the optimizer unless it is frozen.

        Parameters without gradient keep their loaded values: they have no copies or state, and are not saved.
        """
        self.module = model
        if total_steps is None:
            model.requires_grad_(False)
        hf_name: Any = model.hf_name
        self._parameters: dict[str, nn.Parameter] = {hf_name(name): p for name, p in model.named_parameters()}
        self._saved = {name: p for name, p in self._parameters.items() if p.requires_grad or total_steps is None}
        if total_steps is None:
            return
        settings = self._schedule(total_steps)
        self._views = {name: nn.Parameter(to_local(p.detach())) for name, p in self._saved.items()}
        kinds = classify_parameters(model)
        chosen = {name: choose_optimizer(settings.name, kinds[id(p)], p.numel()) for name, p in self._saved.items()}
        self._optimizer = build_optimizer(settings, self._views, chosen, self._row_shards)

    def _row_shards(self, name: str) -> RowShards | None:
        """Return how the rows of a matrix are sharded; None if this rank holds the full matrix."""
        return None

    def _schedule(self, total_steps: int) -> OptimizerConfig:
        """Check and store the schedule, and return the optimizer's settings, which a trained model must have."""
        settings = self.optimizer_config
        if settings is None:
            raise ConfigError(
                "A model that is being trained needs optimizer settings. Set trainer.policy.optimizer_config, or "
                "trainer.critic.optimizer_config for a critic."
            )
        if settings.scheduler not in SCHEDULES:
            raise ConfigError(
                f"optimizer_config.scheduler={settings.scheduler!r} is not a known schedule. Choose one of: "
                f"{', '.join(SCHEDULES)}."
            )
        from transformers import get_scheduler  # imports peft, which takes a second, and which the driver does not need

        schedule = get_scheduler(
            settings.scheduler, torch.optim.SGD([nn.Parameter(torch.zeros(1))]), settings.num_warmup_steps, total_steps
        )
        self._lr_factor = schedule.lr_lambdas[0]
        return settings

    def backward(self, loss: Tensor, is_last_micro_batch: bool) -> None:
        """Accumulate the gradients of one micro-batch.

        Args:
            loss: The loss of the micro-batch [].
            is_last_micro_batch: The micro-batch is the last one of the update, so gradients must be reduced over ranks.
        """
        loss.backward()

    def step(self) -> dict[str, float]:
        """Clip gradients, update parameters and schedule, and reset gradients. All ranks must call it.

        If the gradient is not finite on any rank, all ranks skip the update: parameters stay bitwise equal. The
        schedule also counts skipped updates, so that it ends with the run.

        Returns:
            grad_norm: Norm of the summed gradient, before clipping.
            lr: Learning rate of this update.
            skipped: 1 if the update was skipped, else 0.

        Raises:
            NonFiniteUpdate: `max_skipped_updates` consecutive updates were skipped.
        """
        assert self._optimizer is not None and self.optimizer_config is not None, "a frozen model does not step"
        lr = self._next_lr()
        gradients_by_name = {name: to_local(p.grad) for name, p in self._parameters.items() if p.grad is not None}
        norm = self._global_norm(gradients_by_name)
        if self.optimizer_config.max_grad_norm > 0:
            _clip(gradients_by_name.values(), norm, self.optimizer_config.max_grad_norm)
        for name, view in self._views.items():
            parameter = self._parameters[name]
            view.data = to_local(parameter.detach())
            view.grad = None if parameter.grad is None else to_local(parameter.grad)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._step_if(self._optimizer, torch.isfinite(norm))
        self._optimizer.zero_grad()
        for parameter in self._parameters.values():
            parameter.grad = None
        total = float(norm)  # the update's first wait for the device: everything above is only enqueued
        return self._finish_step(total, lr, math.isfinite(total))

    @staticmethod
    def _step_if(optimizer: Any, is_finite: Tensor) -> None:
        """Take the optimizer step if `is_finite` [] is True.

        Fused optimizers of torch read `found_inf` in their kernels, and change nothing if it is 1. For others the host
        waits for the value.
        """
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.found_inf = is_finite.logical_not().float()
            optimizer.step()
        elif is_finite:
            optimizer.step()

    def _next_lr(self) -> float:
        """Return the learning rate of the next update."""
        assert self.optimizer_config is not None
        return self.optimizer_config.lr * float(self._lr_factor(self._updates))

    def _finish_step(self, norm: float, lr: float, finite: bool) -> dict[str, float]:
        """Count the update and return the result of `step`. Raises NonFiniteUpdate after too many skipped updates in a
        row.
        """
        self._updates += 1
        self._skipped_in_a_row = 0 if finite else self._skipped_in_a_row + 1
        # The norm is global, so all ranks stop at the same update.
        if self._skipped_in_a_row >= self.max_skipped_updates:
            raise NonFiniteUpdate(
                f"The gradient was not finite in {self.max_skipped_updates} consecutive updates (trainer.guards."
                "max_skipped_updates), so the model is no longer trained. Lower the learning rate, or check rewards "
                "and log-probs for NaN."
            )
        return {"grad_norm": norm, "lr": lr, "skipped": float(not finite)}

    def _global_norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return the 2-norm over all parameters and ranks [], float64 and equal on all ranks, so that they decide the
        same.
        """
        if not gradients:
            return self._sum_over_ranks(torch.zeros(()).double()).sqrt()
        squares = torch.stack(torch._foreach_norm(list(gradients.values()))).double().square()
        copies = tuple(self._num_replicas(name) for name in gradients)
        if set(copies) != {1}:
            squares = squares / self._replica_counts(copies, squares.device)
        return self._sum_over_ranks(squares.sum()).sqrt()

    def _replica_counts(self, copies: tuple[int, ...], device: torch.device) -> Tensor:
        """Return numbers of replicas as a tensor that is copied to the device only once."""
        if self._copied_counts is None or self._copied_counts[0] != (copies, device):
            counts = torch.tensor(copies, dtype=torch.float64, device=device)
            self._copied_counts = (copies, device), counts
        return self._copied_counts[1]

    def _num_replicas(self, name: str) -> int:
        """Return how many ranks of `_sum_over_ranks` hold an identical copy of a parameter's shard."""
        return 1

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        return value

    def free_transient_memory(self) -> None:
        """Free gathered weights and return the CUDA allocator's cached memory."""
        if self.device.type != "cpu":
            torch.cuda.empty_cache()

    def offload(self) -> int:
        """Move parameters, gradients and optimizer state to host memory, and return the freed bytes (0 on CPUs)."""
        if self.device.type == "cpu":
            return 0
        before = torch.cuda.memory_allocated(self.device)
        self._move("cpu")
        self._move_state("cpu")
        torch.cuda.empty_cache()
        return before - torch.cuda.memory_allocated(self.device)

    def onload(self) -> None:
        """Move parameters, gradients and optimizer state back to the device."""
        if self.device.type != "cpu":
            self._move(self.device)
            self._move_state(self.device)

    def onload_parameters_only(self) -> None:
        """Move the parameters to the device and the optimizer state to host memory.

        Use this before a weight sync. It also returns the CUDA allocator's cached memory.
        """
        if self.device.type != "cpu":
            self._move_state("cpu")
            self._move(self.device)
            torch.cuda.empty_cache()

    @cached_property
    def _offloader(self) -> CpuOffloader:
        return CpuOffloader(self.device)

    @torch.no_grad()
    def _move(self, device: torch.device | str) -> None:
        tensors = {**self._parameters, **{f"{name} (buffer)": buffer for name, buffer in self.module.named_buffers()}}
        moved = self._offloader.move({name: to_local(tensor.detach()) for name, tensor in tensors.items()}, device)
        names = {id(tensor): name for name, tensor in tensors.items()}

        def to_moved(tensor: Tensor) -> Tensor:
            moved_tensor = moved[names[id(tensor)]]
            if isinstance(tensor, DTensor):  # from_local would move the tensor to the devices of the mesh
                return DTensor(moved_tensor, tensor._spec, requires_grad=False)
            return moved_tensor

        self.module._apply(to_moved)
        if self._optimizer is not None:
            for name, view in self._views.items():
                view.data = to_local(self._parameters[name].detach())

    def _move_state(self, device: torch.device | str) -> None:
        """Move the optimizer's state."""
        states: Mapping[Tensor, dict[str, Any]] = self._optimizer.state if self._optimizer is not None else {}
        tensors = {
            (id(view), key): value
            for view, state in states.items()
            for key, value in state.items()
            if isinstance(value, Tensor) and key not in adamw_8bit.SHARED_STATE
        }
        moved = self._offloader.move(tensors, device)
        for view, state in states.items():
            state |= {key: moved[id(view), key] for key in state if (id(view), key) in moved}

    def sharded_parameters(self, trained_only: bool = False) -> Iterator[tuple[str, ShardedTensor]]:
        """Yield (Hugging Face name, this rank's shard) of every parameter, in an order that is the same on all ranks.

        Tensors are on the device, and tied weights occur once.

        Args:
            trained_only: Leave out frozen parameters.
        """
        for name, parameter in self._parameters.items():
            if parameter.requires_grad or not trained_only:
                yield name, self._sharded(name, parameter)

    def full_parameters(self, trained_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor) of every parameter. This is a collective: all ranks must iterate.

        Args:
            trained_only: Leave out frozen parameters.
        """
        for name, parameter in self.sharded_parameters(trained_only):
            yield name, parameter.full_tensor()

    def _sharded(self, name: str, parameter: nn.Parameter) -> ShardedTensor:
        return replicated(parameter.detach().to(self.device), self.rank)

    def _slices(self) -> dict[str, ParameterSlice]:
        return {name: ParameterSlice.from_tensor(parameter) for name, parameter in self._saved.items()}

    def _local_slice(self, name: str) -> Tensor:
        """Return this rank's slice of a parameter, sharing its memory."""
        return to_local(self._saved[name].detach())

    def _state(self, name: str) -> dict[str, Tensor]:
        """Return the state to save of this rank's slice of a parameter; empty before the first step."""
        assert self._optimizer is not None
        state = self._optimizer.state[self._views[name]]
        return adamw_8bit.get_saved_state(state) if "state1" in state else state

    def _to_saved(self, name: str, local: Tensor) -> Tensor:
        """Return the tensor to save for a CPU tensor in the shape of this rank's shard; all ranks call it."""
        return local

    def _is_saved_here(self, name: str) -> bool:
        """True if this rank saves its slice of a parameter, which other ranks may also hold."""
        return True

    def _from_saved(self, name: str, elements: Tensor, like: Tensor) -> Tensor:
        """Return this rank's shard in the shape of `like` from its saved elements: the inverse of `_to_saved`."""
        return elements.view_as(like)

    @property
    def _optimizer_name(self) -> str | None:
        """The optimizer_config.name with which the state was made; None for a frozen model."""
        return None if self._optimizer is None or self.optimizer_config is None else self.optimizer_config.name

    @property
    def num_updates(self) -> int:
        """Number of optimizer steps since the model was loaded from Hugging Face, skipped ones included."""
        return self._updates

    def save(self, folder: Path) -> None:
        """Write this rank's files of a checkpoint; all ranks must call it.

        Args:
            folder: The folder of the checkpoint; it is created if necessary.

        Raises:
            OSError: A file cannot be written.
        """
        self.get_checkpoint_shard().write(folder)

    def get_checkpoint_shard(self, copy: bool = False) -> CheckpointShard:
        """Return this rank's shard of parameters, optimizer and schedule, in host memory; all ranks must call it.

        It contains every parameter as param, and the optimizer's state of it, such as exp_avg, exp_avg_sq and step.

        Args:
            copy: Copy the tensors, so that training does not change them; otherwise they may share the model's memory.
        """
        tensors, slices = {}, self._slices()
        for name, parameter_slice in slices.items():
            slices[name] = (
                parameter_slice if self._is_saved_here(name) else replace(parameter_slice, stop=parameter_slice.start)
            )
            state = self._state(name) if self._optimizer is not None else {}
            for key, value in {"param": self._local_slice(name), **state}.items():
                value = value.to("cpu", copy=copy)  # an accelerator may be full
                is_unsharded = key in _UNSHARDED_STATE
                saved_tensor = value if is_unsharded else self._to_saved(name, value)
                is_saved_here = is_unsharded or self._is_saved_here(name)
                tensors[f"{key}/{name}"] = saved_tensor if is_saved_here else saved_tensor.new_empty(0)
        meta = {
            "world_size": self.world_size,
            "updates": self._updates,
            "skipped_in_a_row": self._skipped_in_a_row,
            "trained": self._optimizer is not None,
            "optimizer": self._optimizer_name,
            "next_lr": None if self._optimizer is None else self._next_lr(),
        }
        return CheckpointShard(self.rank, slices, tensors, meta)

    @torch.no_grad()
    def load(self, folder: Path) -> LearningRates | None:
        """Read what `save` has written, also with another number of ranks.

        Returns:
            The learning rates of the next update; None for a frozen model, and for a checkpoint without a recorded one.

        Raises:
            CheckpointError: The checkpoint is incomplete or corrupt, from another model, or without optimizer state.
            CheckpointMismatch: The checkpoint has the state of another optimizer.
        """
        slices = self._slices()
        with open_shards(folder) as reader:
            reader.check_parameters(slices)
            if self._optimizer is not None and not reader.read_int("trained"):
                raise CheckpointError(
                    f"{folder} was saved from a frozen model: it has no optimizer state to resume from. Resume from a "
                    "checkpoint of a trained model."
                )
            self._check_same_optimizer(reader)
            for name in self._saved:
                local = self._local_slice(name)
                local.copy_(self._from_saved(name, reader.read_elements(f"param/{name}", slices[name]), local))
                if self._optimizer is not None:
                    self._load_state(reader, name, slices[name])
            self._updates = reader.read_int("updates")
            self._skipped_in_a_row = reader.read_int("skipped_in_a_row")
            saved_lr = reader.read_optional_float("next_lr")
        return None if self._optimizer is None or saved_lr is None else LearningRates(saved_lr, self._next_lr())

    def _check_same_optimizer(self, reader: CheckpointReader) -> None:
        saved = reader.read_string("optimizer", OptimizerName.ADAMW)
        if self._optimizer_name not in (None, saved):
            raise CheckpointMismatch(
                f"{reader.folder} was saved with optimizer_config.name={saved!r}, and this run has "
                f"optimizer_config.name={self._optimizer_name!r}, which keeps another state. Set "
                f"optimizer_config.name={saved} to resume, or start a new run from the exported model."
            )

    def _load_state(self, reader: CheckpointReader, name: str, parameter_slice: ParameterSlice) -> None:
        assert self._optimizer is not None
        view = self._views[name]
        self._optimizer.state.pop(view, None)
        if f"state1/{name}" in reader:
            if view.numel():
                assert isinstance(self._optimizer, CompositeOptimizer)
                optimizer = self._optimizer.optimizers[OptimizerName.ADAMW_8BIT]
                adamw_8bit.load_state(optimizer, view, reader, name, parameter_slice)
            return
        state = {
            key: self._from_saved(name, reader.read_elements(f"{key}/{name}", parameter_slice), view)
            for key in _MOMENTS
            if f"{key}/{name}" in reader
        }
        if f"step/{name}" in reader:
            state["step"] = reader.read_scalar(f"step/{name}")
        if state:
            self._optimizer.state[view] = {key: value.to(view.device) for key, value in state.items()}
