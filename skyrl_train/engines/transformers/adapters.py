"""LoRA adapters of the transformers engine.

Forward hooks add the low-rank terms to the tokens of those requests that use an adapter.
"""

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
    """A LoRA adapter: W x becomes W x + scaling · B (A x) in some linear layers."""

    name: str
    scaling: float
    layers: Mapping[str, tuple[Tensor, Tensor]]
    """A [r, in] and B [out, r] in the layer's dtype, by module name of the layer."""


AdaptedRows = Sequence[tuple[Adapter, Tensor]]
"""The adapters used in a forward pass, each with the int64 indices of its tokens among all tokens of the pass."""


def adapted_rows(adapters: Sequence[Adapter | None], lengths: Sequence[int], device: torch.device) -> AdaptedRows:
    """Return the token indices of each adapter in a packed batch.

    Args:
        adapters: The adapter of each sequence; None for a sequence without one.
        lengths: The number of tokens of each sequence.
        device: Device of the index tensors.
    """
    ranges: dict[Adapter, list[range]] = {}
    start = 0
    for adapter, length in zip(adapters, lengths, strict=True):
        if adapter is not None:
            ranges.setdefault(adapter, []).append(range(start, start + length))
        start += length
    return [
        (adapter, torch.tensor([index for tokens in token_ranges for index in tokens], device=device))
        for adapter, token_ranges in ranges.items()
    ]


class Adapters:
    """The LoRA adapters of one model.

    Forward hooks apply them, so the model's parameters and their names do not change.
    """

    def __init__(self, model: PreTrainedModel, engine: str):
        """Collect the linear layers of `model` that can be adapted.

        Args:
            model: The base model.
            engine: The engine's name, for error messages.
        """
        self._engine = engine
        self._linears = get_adaptable_linears(model)
        self._exported = get_exported_names(model)
        self._loaded: dict[str, Adapter] = {}
        self._hooked: set[str] = set()
        self._active: AdaptedRows = ()
        self._synced: Adapter | None = None

    @property
    def names(self) -> Collection[str]:
        """Names of the adapters that `add` has loaded."""
        return self._loaded.keys()

    def get(self, name: str | None) -> Adapter | None:
        """Return the loaded adapter `name`, or None if `name` is None.

        Raises:
            UnsupportedParameter: No adapter of this name is loaded.
        """
        if name is None:
            return None
        if name not in self._loaded:
            loaded = ", ".join(sorted(self._loaded)) or "none"
            raise UnsupportedParameter(f"Engine {self._engine!r} rejects adapter={name!r}: adapters loaded: {loaded}.")
        return self._loaded[name]

    def read(self, name: str, path: str) -> Adapter:
        """Read an adapter that peft's `save_pretrained` wrote, without adding it.

        Args:
            name: Name of the adapter.
            path: The folder with adapter_config.json and adapter_model.safetensors.

        Returns:
            The adapter with tensors on the device and in the dtype of the layers that it adapts.

        Raises:
            EngineError: The folder cannot be read, or an option or a tensor does not fit the model.
        """
        linears = {exported: self._linears[layer] for layer, exported in self._exported.items()}
        tensors = read_adapter(path, linears, adapter=name, engine=self._engine)

        def like_weight(layer: str, tensor: Tensor) -> Tensor:
            weight = self._linears[layer].weight
            return tensor.to(weight.device, weight.dtype)

        layers = {}
        for layer, exported in self._exported.items():
            if exported in tensors.layers:
                down, up = tensors.layers[exported]
                layers[layer] = (like_weight(layer, down), like_weight(layer, up))
        return Adapter(name, tensors.scaling, layers)

    def add(self, adapter: Adapter) -> None:
        """Make an adapter available to new requests. It replaces an earlier adapter of the same name."""
        self._loaded[adapter.name] = adapter
        self._hook(adapter)

    def zero_adapter(self, spec: AdapterSpec) -> Adapter:
        """Return an unnamed adapter of zeros, which a weight sync fills.

        Raises:
            WeightSyncError: `spec` names a layer that the model does not have.
        """
        layout = adapter_layout(spec, self._linears)
        layers = {}
        for layer in spec.layers:
            device = self._linears[layer].weight.device
            down, up = (torch.zeros_like(layout[name], device=device) for name in adapter_names(layer))
            layers[layer] = (down, up)
        return Adapter("", spec.scaling, layers)

    @property
    def synced(self) -> Adapter | None:
        """Adapter of the last weight sync, for requests that name no adapter. None if that sync sent none."""
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
        """Unload an adapter. A name that is not loaded is ignored."""
        self._loaded.pop(name, None)

    @contextmanager
    def applied(self, rows: AdaptedRows) -> Iterator[None]:
        """Apply adapters to the given tokens in forward passes inside the block."""
        self._active = rows
        try:
            yield
        finally:
            self._active = ()

    @contextmanager
    def on_tokens(self, tokens: slice) -> Iterator[None]:
        """Limit `applied` to a slice of the forward pass's tokens, for layers that run on these alone."""
        active = self._active
        self._active = [
            (adapter, indices[(indices >= tokens.start) & (indices < tokens.stop)] - tokens.start)
            for adapter, indices in active
        ]
        try:
            yield
        finally:
            self._active = active

    def _adapt(self, layer: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        tokens, adapted = inputs[0].flatten(0, -2), output.view(-1, output.shape[-1])
        if self._synced is not None and layer in self._synced.layers:
            down, up = self._synced.layers[layer]
            low = tokens @ down.T
            for _, indices in self._active:
                low.index_fill_(0, indices, 0.0)
            adapted.addmm_(low, up.T, alpha=self._synced.scaling)
        for adapter, indices in self._active:
            if layer in adapter.layers:
                down, up = adapter.layers[layer]
                term = (tokens.index_select(0, indices) @ down.T) @ up.T
                adapted.index_add_(0, indices, term, alpha=adapter.scaling)
