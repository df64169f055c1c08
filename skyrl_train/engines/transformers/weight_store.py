"""The transformers engine's weight store for a receiver: the model's weights, and a separately synced adapter."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from skyrl_train.engines.transformers.adapters import Adapter
from skyrl_train.engines.transformers.model import ServedModel
from skyrl_train.weight_sync.store import InPlace
from skyrl_train.weight_sync.wire import AdapterSpec, adapter_names


class ServedWeights(InPlace):
    """A WeightStore that overwrites every tensor in place, by name."""

    def __init__(self, served: ServedModel):
        super().__init__(self._all)
        self._served = served
        self._coming: tuple[AdapterSpec, Adapter] | None = None
        """The adapter of the current sync."""
        self._synced: tuple[AdapterSpec, Adapter] | None = None
        """The adapter of the last finished sync."""

    def layout(self, adapter: AdapterSpec | None = None) -> Mapping[str, Tensor]:
        if adapter is None:
            self._coming = None
        elif self._synced is not None and self._synced[0] == adapter:
            self._coming = self._synced
        else:
            self._coming = adapter, self._served.adapters.empty(adapter)
        return self._all()

    def finish(self) -> None:
        self._synced = self._coming
        self._served.adapters.synced = None if self._synced is None else self._synced[1]
        super().finish()

    def _all(self) -> dict[str, Tensor]:
        tensors = self._served.parameters
        if self._coming is not None:
            for layer, pair in self._coming[1].layers.items():
                tensors.update(zip(adapter_names(layer), pair, strict=True))
        return tensors
