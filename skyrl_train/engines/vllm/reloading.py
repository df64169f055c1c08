"""What vLLM's loaders need to load the weights of some models a second time. Imports vLLM: see engine.py.

Between `initialize_layerwise_reload` and its end vLLM's parameters are on the meta device, and only tensors that pass
through a `weight_loader` arrive; what a model's own code copies into a parameter is lost without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from vllm.distributed import get_tensor_model_parallel_rank

from skyrl_train.models.composite import composite_of
from skyrl_train.models.loading import checkpoint_tensors

_BY_EXPERT = ("deepseek_v2", "deepseek_v3", "minimax_m2", "mixtral")
"""Models whose loaders know experts under the names of published checkpoints only: each separately."""
_GPT_OSS = "gpt_oss"
_FUSED = (".experts.gate_up_proj", ".experts.gate_up_proj_bias", ".experts.down_proj", ".experts.down_proj_bias")
_SINKS = ".sinks"


class Reloading:
    """Renames the tensors of one model's syncs, and copies what does not pass through a `weight_loader` itself."""

    def __init__(self, served: Any, model: PreTrainedModel):
        """`served`: vLLM's model. `model`: transformers' on the meta device, whose names tensors have."""
        self._served = served
        self._model = model
        self._kind: str = model.config.model_type
        self._sinks: dict[str, Tensor] = {}

    def named(self, tensors: Sequence[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """The tensors under names that pass through a `weight_loader`; the others are kept for `finish`."""
        if self._kind in _BY_EXPERT or composite_of(self._model) is not None:
            return checkpoint_tensors(self._model, dict(tensors)).items()
        return self._of_gpt_oss(tensors) if self._kind == _GPT_OSS else tensors

    def _of_gpt_oss(self, tensors: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            if name.endswith(_SINKS):
                self._sinks[name.replace(".self_attn.", ".attn.")] = tensor.clone()
            elif name.endswith(_FUSED):
                layer, _, own = name.rpartition(".")
                yield from ((f"{layer}.{expert}.{own}", weights) for expert, weights in enumerate(tensor))
            else:
                yield name, tensor

    @torch.no_grad()
    def finish(self) -> None:
        """Copy what has no `weight_loader`: this rank's sinks of attention, which its kernel reads in place or cast."""
        for name, sinks in self._sinks.items():
            attention = self._served.get_submodule(name.removesuffix(_SINKS))
            rank, count = get_tensor_model_parallel_rank(), len(attention.sinks)
            for held in {id(one): one for one in (attention.sinks, attention.attn.impl.sinks)}.values():
                held.copy_(sinks[rank * count : (rank + 1) * count])
        self._sinks.clear()
