"""Passes an adapter from weight syncs on to vLLM, which reads adapters only from folders."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from skyrl_train.errors import WeightSyncError
from skyrl_train.models.loading import meta_model
from skyrl_train.models.lora import adapted_linears, exported_linears, peft_name
from skyrl_train.weight_sync.store import adapter_layout, refuse_adapter
from skyrl_train.weight_sync.wire import AdapterSpec


class SyncedAdapter:
    """One rank's copy of the adapter's tensors. The first of a node writes the folder, which all load afterwards."""

    def __init__(self, folder: str, model: str, dtype: torch.dtype, max_rank: int, writes: bool):
        self._folder = Path(folder)
        self._model = model
        self._dtype = dtype
        self._max_rank = max_rank
        self._writes = writes
        self._spec: AdapterSpec | None = None
        self._tensors: dict[str, Tensor] = {}

    @cached_property
    def _described(self) -> PreTrainedModel:
        return meta_model(self._model, self._dtype)

    @cached_property
    def _linears(self) -> dict[str, nn.Linear]:
        return adapted_linears(self._described)

    def layout(self, spec: AdapterSpec | None) -> Mapping[str, Tensor]:
        """Begin a sync with this adapter; returns name -> tensor of its layout. Raises WeightSyncError."""
        self._spec, self._tensors = spec, {}
        if spec is None:
            return {}
        if not self._max_rank:
            refuse_adapter(spec)
        if spec.rank > self._max_rank:
            raise WeightSyncError(
                f"an adapter of rank {spec.rank} is above max_lora_rank={self._max_rank} of this engine: raise it in "
                "generator.engine_init_kwargs, or set trainer.policy.model.lora.sync=merged."
            )
        return adapter_layout(spec, self._linears)

    def take(self, tensors: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Keep copies of the adapter's tensors; returns the other tensors."""
        if self._spec is None:
            return list(tensors)
        ours = set(adapter_layout(self._spec, self._linears))
        self._tensors |= {name: tensor.cpu().clone() for name, tensor in tensors if name in ours}
        return [(name, tensor) for name, tensor in tensors if name not in ours]

    def finish(self) -> None:
        """Write the adapter's folder in peft's format. Raises OSError."""
        if self._spec is None or not self._writes:
            return
        names = exported_linears(self._described)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self._spec.rank,
            "lora_alpha": self._spec.scaling * self._spec.rank,
            "target_modules": [names[layer] for layer in self._spec.layers],
            "bias": "none",
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "adapter_config.json").write_text(json.dumps(config))
        named = {peft_name(name, names): tensor.contiguous() for name, tensor in self._tensors.items()}
        save_file(named, self._folder / "adapter_model.safetensors")
