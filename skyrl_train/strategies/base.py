"""How one model is spread over ranks, stepped, moved and stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn


class OptimizerSettings(Protocol):
    """trainer.*.optimizer_config: what AdamW and its schedule need."""

    @property
    def lr(self) -> float: ...
    @property
    def adam_betas(self) -> Sequence[float]: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def max_grad_norm(self) -> float: ...
    @property
    def num_warmup_steps(self) -> int: ...
    @property
    def scheduler(self) -> str: ...


class FSDPSettings(Protocol):
    """trainer.*.fsdp_config."""

    @property
    def cpu_offload(self) -> bool: ...
    @property
    def reshard_after_forward(self) -> bool | int: ...
    @property
    def fsdp_size(self) -> int: ...


class DeepSpeedSettings(Protocol):
    """trainer.*.deepspeed_config."""

    @property
    def zero_stage(self) -> int: ...
    @property
    def offload_optimizer(self) -> bool: ...
    @property
    def offload_parameters(self) -> bool: ...
    @property
    def zero_optimization(self) -> Mapping[str, Any]: ...


class TensorPart(Protocol):
    """Which part of a parameter a rank has: of each of `blocks` that lie along `dim`, share `rank` of `size`."""

    @property
    def dim(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def rank(self) -> int: ...
    def of(self, whole: Tensor) -> Tensor: ...
    def whole(self, parts: list[Tensor]) -> Tensor: ...


class TensorGroup(Protocol):
    """The ranks that have the parts of a model."""

    @property
    def size(self) -> int: ...
    @property
    def rank(self) -> int: ...
    def sum(self, values: Tensor) -> Tensor: ...
    def gather(self, values: Tensor) -> list[Tensor]: ...


class Strategy(Protocol):
    """One trained (or frozen) model on one rank.

    Gradients are summed over ranks, not averaged: losses carry global denominators. The module given to `prepare` has
    three methods besides forward, as TokenScorer does: `decoder_layers()`, the blocks that are sharded one by one;
    `hf_name(name)`, a parameter's name in the Hugging Face checkpoint; and `head_parameters()`, those of a module that
    forward does not run.
    """

    rank: int
    world_size: int

    def prepare(self, scorer: nn.Module, total_steps: int | None) -> nn.Module:
        """Shard or wrap the scorer, build optimizer and schedule (none when total_steps is None: a frozen model)."""

    def backward(self, loss: Tensor, last: bool) -> None:
        """Accumulate gradients; `last` is the last micro-batch of the update: then gradients are reduced over ranks."""

    def step(self) -> dict[str, float]:
        """Clip, step, schedule, zero. Returns grad_norm (of the summed gradient, before clipping), lr and skipped.

        A gradient that is not finite on any rank makes every rank skip: parameters stay bit-equal and `skipped` is 1.
        """

    def offload(self) -> int:
        """Parameters, gradients and optimizer state to host memory; returns the bytes freed (0 on CPU)."""

    def onload(self) -> None: ...

    def full_parameters(self, trained_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) of every parameter, in a fixed order; a collective: all ranks iterate.

        With `trained_only` frozen ones are left out, and not gathered.
        """

    def save(self, directory: Path) -> None:
        """This rank's part of parameters, optimizer and schedule, as safetensors and JSON; all ranks call it."""

    def load(self, directory: Path) -> None:
        """The inverse, also from a checkpoint of another world size."""
