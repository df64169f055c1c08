"""The attention function of the transformers engine and the plan for prompts (for decoding: cache.py).

The model's forward passes a plan on as the keyword `engine_plan`; it arrives here with the heads already computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, Cache

from skyrl_train.errors import EngineError
from skyrl_train.models.ragged_attention import Segments, ragged_attention
from skyrl_train.models.sliding_windows import register_window_masks

ATTENTION_NAME = "skyrl_engine"
_IGNORED_KEYWORDS = frozenset(
    {"position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states", "return_dict"}
)
"""Keywords of attention calls without effect here. Any other keyword that is set is a feature this engine lacks."""


class AttentionPlan(Protocol):
    """Computes attention for the tokens of one forward."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None, **others: Any
    ) -> Tensor:
        """Attention in the next layer, whose keys and values of these tokens are kept: query [b, H, t, D], key
        [b, Hk, t, D], value [b, Hk, t, Dv] -> [b, t, H, Dv]. `others`: softcap and sinks, see ragged_attention."""


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | int | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    engine_plan: AttentionPlan | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in every layer. Raises EngineError for unsupported features.

    An int as mask is the layer's window: see models/sliding_windows.py.
    """
    unknown = [name for name, x in others.items() if name not in _IGNORED_KEYWORDS and x is not None and x is not False]
    unknown = [name for name in unknown if name != "is_causal"]
    if others.get("is_causal", getattr(module, "is_causal", True)) is False:
        unknown.append("attention to later tokens")
    if isinstance(attention_mask, Tensor):
        unknown.append("a ready-made mask")
    if engine_plan is None or unknown:
        what = f"uses {', '.join(unknown)}" if unknown else "does not hand keywords on to its attention"
        raise EngineError(
            f"The transformers engine cannot serve {type(module).__name__}: it {what}. "
            "Use another engine for this model."
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = attention_mask if isinstance(attention_mask, int) else sliding_window
    return engine_plan.attend(query, key, value, scaling, window, softcap=softcap, sinks=s_aux), None


AttentionInterface.register(ATTENTION_NAME, attend)
register_window_masks(ATTENTION_NAME)


class PackedPrompts(Cache):
    """Several sequences packed one after another: attention within each sequence; keys and values are kept.

    `lengths` must be sorted, so that sequences of equal length are adjacent and share one attention call.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device):
        super().__init__(layers=[])
        offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        self._segments = Segments(offsets, tuple(lengths))
        self.layers_kv: list[tuple[Tensor, Tensor]] = []
        """(key, value) of each layer, [1, Hk, T, D]."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any):  # type: ignore[no-untyped-def]
        if layer_idx != len(self.layers_kv):
            raise RuntimeError(f"the model calls layer {layer_idx} after {len(self.layers_kv)} layers: not supported")
        return key_states, value_states  # which may be compressed: `attend` gets those that are attended to

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None, **others: Any
    ) -> Tensor:
        self.layers_kv.append((key, value))
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        return ragged_attention(q, k, v, self._segments, scaling=scaling, sliding_window=window, **others).unsqueeze(0)
