"""Sliding windows, as the masks and modules of transformers specify them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionMaskInterface, PreTrainedModel, masking_utils

_is_packed_forward: ContextVar[bool] = ContextVar("is_packed_forward", default=False)
_find_packed_sequences = masking_utils.find_packed_sequence_indices


def register_window_masks(attn_implementation: str) -> None:
    """Make transformers pass the window of a layer to an attention implementation, in place of a mask.

    Some models (Qwen2-MoE, PhiMoE) specify the windows of their layers only by masks.

    Args:
        attn_implementation: Name of the attention implementation.
    """
    AttentionMaskInterface.register(attn_implementation, _window_mask)


def _window_mask(*, local_size: int | None = None, use_vmap: bool = False, **others: Any) -> int | Tensor | None:
    """Return the window in tokens, None without one, or an empty tensor (an error) for a mask with other rules."""
    # transformers passes this argument only for masks that are not causal.
    is_bidirectional = "allow_is_bidirectional_skip" in others
    return torch.empty(0) if use_vmap or is_bidirectional else local_size


def _find_sequences_unless_known(position_ids: Tensor) -> Tensor | None:
    """Return transformers' guess of the sequences of a row; None in a forward pass whose segments are known.

    The guess reads values, for which the host would wait for a GPU, and `_window_mask` does not use it.
    """
    return None if _is_packed_forward.get() else _find_packed_sequences(position_ids)


masking_utils.find_packed_sequence_indices = _find_sequences_unless_known


@contextmanager
def packed_forward() -> Iterator[None]:
    """Run a model with an attention implementation of `register_window_masks` inside this context."""
    token = _is_packed_forward.set(True)
    try:
        yield
    finally:
        _is_packed_forward.reset(token)


def max_plain_attention_length(config: Any) -> int | None:
    """Return the number of tokens up to which all layers of Llama 4 compute plain causal attention.

    It is the size of a chunk in layers with chunked attention, or the length at which layers without rotary positions
    begin to scale queries, if that is lower. The result is None for other models.
    """
    limits = []
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        limits.append(int(config.attention_chunk_size))
    if getattr(config, "attn_temperature_tuning", False) and not all(config.no_rope_layers):
        limits.append(int(config.floor_scale) - 1)
    return min(limits, default=None)


def disable_query_scaling(model: nn.Module) -> None:
    """Turn off Llama 4's scaling of queries, which is 1 up to `max_plain_attention_length`.

    transformers computes it from a token's index in the row, not from its position, so sequences in one row would be
    wrong.
    """
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False):
            module.attn_temperature_tuning = False  # type: ignore[assignment]


@contextmanager
def shortened_windows(model: PreTrainedModel, size: int) -> Iterator[bool]:
    """Shorten sliding windows of more than `size` tokens to `size` while the context is active.

    A check then needs only short sequences. It yields True if there are such windows.

    Args:
        model: The model; its configurations and modules are changed, and restored at the end.
        size: The window in tokens.
    """
    text: Any = model.config.get_text_config()
    owners: list[Any] = [model.config, text, *model.modules()]
    changed: list[tuple[Any, int]] = []
    for owner in owners:
        window = None if isinstance(owner, nn.Module) and "sliding_window" not in vars(owner) else _window(owner)
        if window is not None and window > size:
            changed.append((owner, window))
            owner.sliding_window = size
    try:
        yield bool(changed)
    finally:
        for owner, window in changed:
            owner.sliding_window = window


def _window(owner: Any) -> int | None:
    window = getattr(owner, "sliding_window", None)
    return window if type(window) is int else None
