"""The storage of an engine's weights, as a receiver uses it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from skyrl_train.errors import WeightSyncError
from skyrl_train.weight_sync.wire import AdapterSpec, adapter_names


class WeightStore(Protocol):
    """Loads full Hugging Face tensors into an engine, which may fuse, split and repack them.

    A sync is start(), load() for every bucket, finish(); in between the engine has a mixture of two versions.
    """

    def layout(self, adapter: AdapterSpec | None = None) -> Mapping[str, Tensor]:
        """Hugging Face name -> tensor, the engine's own or one on the meta device; tied ones under one or both names.

        It includes the tensors of the sync's `adapter`, which is served once `finish` returns; None: from then on no
        adapter is served. Raises WeightSyncError for an adapter that cannot be served, e.g. by `refuse_adapter`.
        """

    def start(self) -> None:
        """Prepare to load, even if an earlier sync was not finished."""

    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Load full tensors, on the receiver's device and in the wire dtype; their memory is reused after the call."""

    def finish(self) -> None:
        """All tensors of the sync were loaded: use them."""

    def held(self, name: str) -> Tensor | None:
        """The loaded tensor of this name, no copy of it; None if the engine does not keep it as such."""


class InPlace:
    """A WeightStore for a plain model: overwrites the tensors of the same names."""

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
        torch._foreach_copy_([self._held[name] for name, _ in tensors], [tensor for _, tensor in tensors])

    def finish(self) -> None:
        self._held = self._parameters()  # read again: the model must still use the tensors that were loaded into

    def held(self, name: str) -> Tensor | None:
        return self._held[name]


def refuse_adapter(adapter: AdapterSpec | None) -> None:
    """Raises WeightSyncError if there is an adapter."""
    if adapter is not None:
        raise WeightSyncError(
            "this engine takes no adapter apart from its model; set trainer.policy.model.lora.sync=merged."
        )


def adapter_layout(adapter: AdapterSpec, linears: Mapping[str, nn.Linear]) -> dict[str, Tensor]:
    """Name -> A and B of every layer on the meta device, in the layer's dtype. Raises WeightSyncError."""
    layout = {}
    for layer in adapter.layers:
        if layer not in linears:
            raise WeightSyncError(f"the adapter changes {layer}, which is no linear layer of the engine's model.")
        linear = linears[layer]
        shapes = ((adapter.rank, linear.in_features), (linear.out_features, adapter.rank))
        for name, shape in zip(adapter_names(layer), shapes, strict=True):
            layout[name] = torch.empty(shape, dtype=linear.weight.dtype, device="meta")
    return layout
