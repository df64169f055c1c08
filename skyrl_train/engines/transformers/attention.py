"""The attention function of the transformers engine, and its attention plan for prompts.

`ModelRunner` passes a plan to the model as the keyword `engine_plan`. The model forwards it to the attention function,
together with the heads' queries, keys and values. The plan for decode steps is `DecodeCache` in cache.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, Cache

from skyrl_train.engines.transformers.recurrent_states import Mix, RecurrentStates, StateRow
from skyrl_train.errors import EngineError
from skyrl_train.models.ragged_attention import Segments, ragged_attention
from skyrl_train.models.sliding_windows import register_window_masks

ATTENTION_NAME = "skyrl_engine"
_IGNORED_KEYWORDS = frozenset(
    {"position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states", "return_dict"}
)
"""Keywords of attention calls that do not change the result here. Any other keyword that is set asks for a feature
that this engine does not have."""


class AttentionPlan(Protocol):
    """A strategy that computes the attention of all tokens of one forward pass."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None, **others: Any
    ) -> Tensor:
        """Compute the attention of the next layer, and store the keys and values of its tokens.

        Args:
            query: [b, H, t, D].
            key: [b, Hk, t, D].
            value: [b, Hk, t, Dv].
            scaling: Factor of the scores.
            window: The number of latest tokens that each token sees, itself included; None for all.
            others: `softcap` and `sinks`; see `ragged_attention`.

        Returns:
            [b, t, H, Dv].
        """


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
    """Compute the attention of one layer with `engine_plan`. Transformers calls this function in every layer.

    Args:
        module: The attention module.
        query: [b, H, t, D].
        key: [b, Hk, t, D].
        value: [b, Hk, t, Dv].
        attention_mask: The layer's window as an int (see models/sliding_windows.py), or None. A tensor is an error.
        scaling: Factor of the scores; None for D ** -0.5.
        dropout: Ignored, because the engine only runs models in eval mode.
        sliding_window: The layer's window, if `attention_mask` does not carry it. None: no window.
        softcap: Limit of the scores, see `ragged_attention`; None for no limit.
        s_aux: Attention sinks, see `ragged_attention`; None if the model has none.
        engine_plan: The plan of this forward pass. The engine passes it in every call; None raises an error.
        others: Further keywords of the model.

    Returns:
        The output [b, t, H, Dv], and None in place of attention weights.

    Raises:
        EngineError: The model does not pass `engine_plan` on, attends to later tokens, or uses a mask tensor or a
            keyword that the engine does not implement.
    """
    unsupported = [
        name for name, x in others.items() if name not in _IGNORED_KEYWORDS and x is not None and x is not False
    ]
    unsupported = [name for name in unsupported if name != "is_causal"]
    if others.get("is_causal", getattr(module, "is_causal", True)) is False:
        unsupported.append("attention to later tokens")
    if isinstance(attention_mask, Tensor):
        unsupported.append("a precomputed mask")
    if engine_plan is None or unsupported:
        reason = f"uses {', '.join(unsupported)}" if unsupported else "does not pass keyword arguments to its attention"
        raise EngineError(
            f"The transformers engine cannot serve {type(module).__name__}: it {reason}. "
            "Use another engine for this model."
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = attention_mask if isinstance(attention_mask, int) else sliding_window
    return engine_plan.attend(query, key, value, scaling, window, softcap=softcap, sinks=s_aux), None


AttentionInterface.register(ATTENTION_NAME, attend)
register_window_masks(ATTENTION_NAME)


class PackedPrompts(Cache):
    """Attention plan of packed sequences, which stores their keys and values, and the states of recurrent layers.

    Each sequence attends only to itself. `lengths` must be sorted, so that sequences of equal length are adjacent and
    share one attention call.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device,
        create_states: Callable[[int], RecurrentStates] | None = None,
    ):
        """Plan a forward pass.

        Args:
            lengths: The number of tokens of each sequence, in their order.
            device: Device of the tokens.
            create_states: Returns empty states of a number of sequences; None to keep no states.
        """
        super().__init__(layers=[])
        offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        self._segments = Segments(offsets, tuple(lengths))
        self.layers_kv: dict[int, tuple[Tensor, Tensor]] = {}
        """(key, value) of each attention layer that has run, [1, Hk, T, D], by the index of the layer."""
        self.states: dict[int, StateRow] = {}
        """The states of recurrent layers, by the index of the sequence's first token; empty if none are kept."""
        self._groups: list[tuple[slice, int, Cache | None]] = []
        """The tokens, the number of sequences and the states of each group of sequences of equal length."""
        self._current = -1
        self._split_by_length(create_states)

    def _split_by_length(self, create_states: Callable[[int], RecurrentStates] | None) -> None:
        start = 0
        for count, length, _ in self._segments.group_equal_lengths():
            cache, stop = None, start + count * length
            if create_states is not None:
                states = create_states(count)
                cache = states.cache
                self.states |= {start + row * length: StateRow(states, row) for row in range(count)}
            self._groups.append((slice(start, stop), count, cache))
            start = stop

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any):  # type: ignore[no-untyped-def]
        """Return the layer's keys and values unchanged, because `attend` stores them.

        Transformers calls this in each layer.

        Raises:
            RuntimeError: The model does not run every layer once, in order.
        """
        if layer_idx <= self._current:
            raise RuntimeError(
                f"The model called attention layer {layer_idx} after layer {self._current}. The transformers engine "
                "supports only models that run every layer once, in order."
            )
        self._current = layer_idx
        return key_states, value_states  # They may be compressed. `attend` receives and stores the expanded ones.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: to transformers the cache is empty, because the caller passes explicit position ids."""
        return 0

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None, **others: Any
    ) -> Tensor:
        self.layers_kv[self._current] = key, value
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        return ragged_attention(q, k, v, self._segments, scaling=scaling, sliding_window=window, **others).unsqueeze(0)

    def mix(self, mix: Mix, hidden_states: Tensor) -> Tensor:
        """Run a recurrent layer on each sequence alone; sequences of equal length share a call, as rows of a batch."""
        outputs = [
            mix(hidden_states[0, tokens].unflatten(0, (count, -1)), cache, tokens).flatten(0, 1)
            for tokens, count, cache in self._groups
        ]
        return torch.cat(outputs).unsqueeze(0)
