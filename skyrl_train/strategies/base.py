"""The interface of strategies, which shard one model over ranks, update, move and save it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor, nn

if TYPE_CHECKING:
    from skyrl_train.strategies.sharded_tensor import ShardedTensor
    from skyrl_train.strategies.shards import Shard


class LearningRates(NamedTuple):
    """The learning rates that two schedules give the same update."""

    saved: float
    """By the schedule of the run that saved the checkpoint."""
    now: float
    """By the schedule of this run."""


class TensorPart(Protocol):
    """The part of a parameter that a rank has: share `rank` of `size` of each of the `blocks` along `dim`."""

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
    """The ranks that a model's layers, or their experts, are divided over."""

    @property
    def key(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def rank(self) -> int: ...
    def sum(self, values: Tensor) -> Tensor: ...
    def gather(self, values: Tensor) -> list[Tensor]: ...


class Strategy(Protocol):
    """One trained (or frozen) model on one rank.

    Gradients are summed over ranks, not averaged: losses contain global denominators. The module given to `prepare` has
    three methods in addition to forward, as TokenScorer does: `decoder_layers()`, the blocks to shard one by one;
    `hf_name(name)`, a parameter's name in the Hugging Face checkpoint; and `head_parameters()`, the parameters that
    forward reads without running their module.
    """

    rank: int
    world_size: int
    max_skipped_updates: int
    """After this many consecutive updates without a finite gradient `step` raises NonFiniteUpdate."""

    def prepare(self, scorer: nn.Module, total_steps: int | None) -> nn.Module:
        """Shard or wrap the scorer, build optimizer and schedule (neither if total_steps is None: a frozen model).

        Parameters on the meta device get memory and the values of the checkpoint: see strategies.fill.
        """

    def backward(self, loss: Tensor, last: bool) -> None:
        """Accumulate gradients; `last`: it is the last micro-batch of the update, so reduce gradients over ranks."""

    def step(self) -> dict[str, float]:
        """Clip, step, schedule, zero. Returns grad_norm (of the summed gradient, before clipping), lr and skipped.

        If the gradient is not finite on any rank, all ranks skip: parameters stay bit-equal and `skipped` is 1.
        """

    def rest(self) -> None:
        """Give up what only the next pass needs: gathered weights, and memory that torch keeps for it (on GPUs)."""

    def offload(self) -> int:
        """Move parameters, gradients and optimizer state to host memory; returns the bytes freed (0 on CPU)."""

    def onload(self) -> None:
        """Move them back to the device."""

    def keep_parameters(self) -> None:
        """Have the parameters on the device and all else in host memory: what a weight sync needs."""

    def sharded_parameters(self, trained_only: bool = False) -> Iterator[tuple[str, ShardedTensor]]:
        """(Hugging Face name, this rank's part) of every parameter, in an order that is the same on all ranks.

        With `trained_only` frozen parameters are left out.
        """

    def full_parameters(self, trained_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        """The same, but whole; a collective: all ranks must iterate."""

    @property
    def updates(self) -> int:
        """Optimizer steps since the model was loaded from Hugging Face, skipped ones included."""

    def shard(self, copied: bool = False) -> Shard:
        """This rank's part of parameters, optimizer and schedule, in host memory; all ranks call it.

        `copied`: in memory of its own, which training does not change; otherwise it may share the model's.
        """

    def save(self, directory: Path) -> None:
        """Write `shard` as safetensors and JSON; all ranks call it."""

    def load(self, directory: Path) -> LearningRates | None:
        """The inverse of `save`, also for a checkpoint of another world size.

        Returns:
            The learning rates of the next update; None for a frozen model, and if the checkpoint has not recorded its.
        """
