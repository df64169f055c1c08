"""What a trainer rank has of a tensor, as its end of a weight sync sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, Self

from torch import Tensor


class Sharded(Protocol):
    """This rank's part of a tensor: see strategies/sharded_tensor.py."""

    @property
    def local(self) -> Tensor: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def start(self) -> int: ...
    @property
    def counts(self) -> bool: ...
    @property
    def elements(self) -> Tensor: ...
    def map(self, change: Callable[[Tensor], Tensor], /) -> Self: ...
    def whole(self) -> Tensor: ...


@dataclass(frozen=True)
class Whole:
    """A tensor of a trainer with one rank."""

    local: Tensor
    start = 0
    counts = True

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.local.shape)

    @property
    def elements(self) -> Tensor:
        return self.local.reshape(-1)

    def map(self, change: Callable[[Tensor], Tensor]) -> Whole:
        return Whole(change(self.local))

    def whole(self) -> Tensor:
        return self.local


def sharded(tensor: Any) -> Sharded:
    """A plain tensor is whole."""
    return Whole(tensor.detach()) if isinstance(tensor, Tensor) else tensor
