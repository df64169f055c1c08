"""LoRA adapters of the transformers engine: low-rank terms, added for those rows of a batch that request them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from skyrl_train.engines.peft_adapter import read_adapter
from skyrl_train.errors import UnsupportedParameter
from skyrl_train.models.lora import get_adaptable_linears, get_exported_names
from skyrl_train.weight_sync.protocol import AdapterSpec, adapter_names
from skyrl_train.weight_sync.receiver import adapter_layout


@dataclass(frozen=True, eq=False, slots=True)
class Adapter:
    """W x becomes W x + scaling · B (A x) in some linear layers."""

    name: str
    scaling: float
    layers: Mapping[str, tuple[Tensor, Tensor]]
    """Name of a layer -> its A [r, in] and B [out, r], in the layer's dtype."""


AdaptedRows = Sequence[tuple[Adapter, Tensor]]
"""The adapters used in a forward, each with the int64 indices of its tokens among all tokens of the forward."""


def adapted_rows(adapters: Sequence[Adapter | None], lengths: Sequence[int], device: torch.device) -> AdaptedRows:
    """The AdaptedRows of packed sequences with `lengths` tokens and these adapters (None: no adapter)."""
    places: dict[Adapter, list[range]] = {}
    start = 0
    for adapter, length in zip(adapters, lengths, strict=True):
        if adapter is not None:
            places.setdefault(adapter, []).append(range(start, start + length))
        start += length
    return [
        (adapter, torch.tensor([place for run in runs for place in run], device=device))
        for adapter, runs in places.items()
    ]


class Adapters:
    """The adapters of one model, loaded through hooks: the model's parameters and their names stay as they are."""

    def __init__(self, model: PreTrainedModel, engine: str):
        self._engine = engine
        self._linears = get_adaptable_linears(model)
        self._exported = get_exported_names(model)
        self._loaded: dict[str, Adapter] = {}
        self._hooked: set[str] = set()
        self._acting: AdaptedRows = ()
        self._synced: Adapter | None = None

    @property
    def names(self) -> Collection[str]:
        """The names of the loaded adapters."""
        return self._loaded.keys()

    def get(self, name: str | None) -> Adapter | None:
        """The adapter called `name`; None for None. Raises UnsupportedParameter for a name that is not loaded."""
        if name is None:
            return None
        if name not in self._loaded:
            known = ", ".join(sorted(self._loaded)) or "none"
            raise UnsupportedParameter(
                f"Engine {self._engine!r} cannot honour adapter={name!r}: adapters loaded: {known}."
            )
        return self._loaded[name]

    def read(self, name: str, path: str) -> Adapter:
        """Read the adapter in a peft folder, without adding it. Raises EngineError naming a bad option or tensor."""
        linears = {exported: self._linears[layer] for layer, exported in self._exported.items()}
        found = read_adapter(path, linears, adapter=name, engine=self._engine)

        def ready(layer: str, tensor: Tensor) -> Tensor:
            weight = self._linears[layer].weight
            return tensor.to(weight.device, weight.dtype)

        layers = {}
        for layer, exported in self._exported.items():
            if exported in found.layers:
                down, up = found.layers[exported]
                layers[layer] = (ready(layer, down), ready(layer, up))
        return Adapter(name, found.scaling, layers)

    def add(self, adapter: Adapter) -> None:
        """Add an adapter; it replaces an earlier one of the same name for new requests."""
        self._loaded[adapter.name] = adapter
        self._hook(adapter)

    def zero_adapter(self, spec: AdapterSpec) -> Adapter:
        """A zero adapter for a weight sync to fill. Raises WeightSyncError for layers that the model does not have."""
        layout = adapter_layout(spec, self._linears)
        layers = {}
        for layer in spec.layers:
            device = self._linears[layer].weight.device
            down, up = (torch.zeros_like(layout[name], device=device) for name in adapter_names(layer))
            layers[layer] = (down, up)
        return Adapter("", spec.scaling, layers)

    @property
    def synced(self) -> Adapter | None:
        """The adapter of the last weight sync, used for every token that has no adapter of its own."""
        return self._synced

    @synced.setter
    def synced(self, adapter: Adapter | None) -> None:
        self._synced = adapter
        if adapter is not None:
            self._hook(adapter)

    def _hook(self, adapter: Adapter) -> None:
        for layer in adapter.layers.keys() - self._hooked:
            self._linears[layer].register_forward_hook(partial(self._adapt, layer))
            self._hooked.add(layer)

    def remove(self, name: str) -> None:
        """Forget an adapter; a name that is not loaded is ignored."""
        self._loaded.pop(name, None)

    @contextmanager
    def applied(self, rows: AdaptedRows) -> Iterator[None]:
        """Use these adapters for these tokens in forwards inside the block."""
        self._acting = rows
        try:
            yield
        finally:
            self._acting = ()

    def _adapt(self, layer: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        every, adapted = inputs[0].flatten(0, -2), output.view(-1, output.shape[-1])
        if self._synced is not None and layer in self._synced.layers:
            down, up = self._synced.layers[layer]
            low = every @ down.T
            for _, places in self._acting:
                low.index_fill_(0, places, 0.0)
            adapted.addmm_(low, up.T, alpha=self._synced.scaling)
        for adapter, places in self._acting:
            if layer in adapter.layers:
                down, up = adapter.layers[layer]
                term = (every.index_select(0, places) @ down.T) @ up.T
                adapted.index_add_(0, places, term, alpha=adapter.scaling)
