"""Where an engine's weights lie: what a receiver needs of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from skyrl_train.errors import WeightSyncError
from skyrl_train.weight_sync.wire import AdapterSpec, adapter_names


class WeightStore(Protocol):
    """Loads full Hugging Face tensors into an engine, which fuses, splits and repacks them as it likes.

    A sync is start(), load() for every bucket, finish(); between start and finish the engine holds a mixture.
    """

    def layout(self, adapter: AdapterSpec | None = None) -> Mapping[str, Tensor]:
        """Tensors by Hugging Face name (tied ones under one or both): those held, or stand-ins on the meta device.

        With those of the `adapter` that the sync brings: it is served once `finish` returns, and none is where the sync
        brings none. Raises WeightSyncError for one that cannot be served, also by `refuse_adapter`.
        """

    def start(self) -> None: ...

    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Whole tensors on the receiver's device, in the wire's dtype; they are overwritten after the call."""

    def finish(self) -> None: ...

    def held(self, name: str) -> Tensor | None:
        """The tensor held under this name, or None where the engine does not keep it as such."""


class InPlace:
    """A plain model: every tensor is written over the one of the same name."""

    def __init__(self, parameters: Callable[[], Mapping[str, Tensor]]):
        self._parameters = parameters
        self._held: Mapping[str, Tensor] = {}

    def layout(self, adapter: AdapterSpec | None = None) -> Mapping[str, Tensor]:
        refuse_adapter(adapter)
        return self._parameters()

    def start(self) -> None:
        self._held = self._parameters()

    @torch.no_grad()
    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            self._held[name].copy_(tensor)

    def finish(self) -> None:
        self._held = self._parameters()  # asked again: what was loaded into must still be what is used

    def held(self, name: str) -> Tensor | None:
        return self._held[name]


def refuse_adapter(adapter: AdapterSpec | None) -> None:
    """Raises WeightSyncError when there is one."""
    if adapter is not None:
        raise WeightSyncError(
            "this engine takes no adapter apart from its model; set trainer.policy.model.lora.sync=merged."
        )


def adapter_layout(adapter: AdapterSpec, linears: Mapping[str, nn.Linear]) -> dict[str, Tensor]:
    """Stand-ins on the meta device for A and B, in the dtype of their layers. Raises WeightSyncError."""
    layout = {}
    for layer in adapter.layers:
        if layer not in linears:
            raise WeightSyncError(f"the adapter changes {layer}, which is no linear layer of the engine's model.")
        linear = linears[layer]
        shapes = ((adapter.rank, linear.in_features), (linear.out_features, adapter.rank))
        for name, shape in zip(adapter_names(layer), shapes, strict=True):
            layout[name] = torch.empty(shape, dtype=linear.weight.dtype, device="meta")
    return layout
