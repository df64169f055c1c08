"""How one model is spread over ranks, stepped, moved and stored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn


class Strategy(Protocol):
    """One trained (or frozen) model on one rank. Gradients are summed over ranks, not averaged: losses carry global denominators."""

    rank: int
    world_size: int

    def prepare(self, scorer: nn.Module, total_steps: int | None) -> nn.Module:
        """Shard or wrap the TokenScorer, build optimizer and schedule (none when total_steps is None: a frozen model)."""

    def backward(self, loss: Tensor, last: bool) -> None:
        """Accumulate gradients; `last` is the last micro-batch of the update, after which gradients are reduced over ranks."""

    def step(self) -> dict[str, float]:
        """Clip, step, schedule, zero. Returns grad_norm (of the summed gradient, before clipping), lr and skipped.

        A gradient that is not finite on any rank makes every rank skip: parameters stay bit-equal and `skipped` is 1.
        """

    def offload(self) -> int:
        """Parameters, gradients and optimizer state to host memory; returns the bytes freed (0 on CPU)."""

    def onload(self) -> None: ...

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) of every parameter, in a fixed order; a collective: all ranks must iterate."""

    def save(self, directory: Path) -> None:
        """This rank's part of parameters, optimizer and schedule, as safetensors and JSON; all ranks call it."""

    def load(self, directory: Path) -> None:
        """The inverse, also from a checkpoint of another world size."""
