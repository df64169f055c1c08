"""Sliding windows, as transformers' masks and modules state them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionMaskInterface, PreTrainedModel


def register_window_masks(attention: str) -> None:
    """Make transformers pass our attention function `attention` the window of a layer in the place of a mask.

    Some models (Qwen2-MoE, PhiMoE) state the windows of their layers only by masks.
    """
    AttentionMaskInterface.register(attention, _window_mask)


def _window_mask(*, local_size: int | None = None, use_vmap: bool = False, **_: Any) -> int | Tensor | None:
    """The window, in tokens; None without one. A tensor for a mask with further rules, which attention must refuse."""
    return torch.empty(0) if use_vmap else local_size


@contextmanager
def windows_of(model: PreTrainedModel, size: int) -> Iterator[bool]:
    """Within it windows of more than `size` tokens have `size`, so that a check needs only short sequences.

    Yields whether there are any.
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
