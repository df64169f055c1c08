"""The critic's loss: per-token values over the ragged tokens [T]."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, value_clip: float
) -> tuple[Tensor, Tensor]:
    """max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2) / 2, the loss of PPO's reference code.

    All tensors are [T]; gradient flows only through `values`. Returns (loss, was_clipped), 0 outside the mask.
    """
    values, old_values, returns = (torch.where(mask, x, 0.0) for x in (values, old_values, returns))
    bounded = old_values + (values - old_values).clamp(-value_clip, value_clip)
    plain, clipped = (values - returns).square(), (bounded - returns).square()
    return torch.maximum(plain, clipped) / 2, ((clipped > plain) & mask).to(values.dtype)
