"""The distributions from which a sequence's tokens were sampled, with a mask of the positions that count."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchrl.modules.distributions import LLMMaskedCategorical as TorchRLMaskedCategorical


class LLMMaskedCategorical(TorchRLMaskedCategorical):  # type: ignore[misc]
    """TorchRL's distribution, in which positions that do not count add nothing to a loss.

    Their log-prob and entropy are 0, and their samples are `ignore_index`. A position does not count if a mask [B, T]
    leaves it out, or if a mask [B, T, V] allows no token there.
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012 - the name and the type are torch's

    def __init__(self, logits: Tensor, mask: Tensor | None = None, ignore_index: int = -100):
        """Store logits [B, T, V] and a mask [B, T] or [B, T, V]; None means that all positions count."""
        mask = torch.ones_like(logits[..., 0], dtype=torch.bool) if mask is None else mask.to(logits.device)
        super().__init__(logits, mask, ignore_index)
        self.positions = mask if self.position_level_masking else mask.any(-1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-probs [B, T] (nats) of tokens, on the logits' device; 0 at positions that do not count."""
        value = value.to(self.logits.device).masked_fill(~self.positions, self.ignore_index)
        return super().log_prob(value)  # type: ignore[no-any-return]

    def entropy(self) -> Tensor:
        """Return the entropy [B, T] in nats; 0 at positions that do not count."""
        return super().entropy().masked_fill(~self.positions, 0.0)  # type: ignore[no-any-return]

    def sample(self, sample_shape: Any = None) -> Tensor:
        """Return samples [*sample_shape, B, T], with `ignore_index` at positions that do not count."""
        return super().sample(sample_shape).masked_fill(~self.positions, self.ignore_index)  # type: ignore[no-any-return]

    @property
    def mode(self) -> Tensor:
        """Most likely tokens [B, T], with `ignore_index` at positions that do not count."""
        return super().mode.masked_fill(~self.positions, self.ignore_index)  # type: ignore[no-any-return]
