"""The distributions from which a sequence's tokens were sampled, with a mask of the positions that count."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributions import Distribution


class LogProbDistribution(Distribution):
    """A distribution that knows only the log-probs (nats) [..., T] of the tokens that were scored."""

    def __init__(self, log_probs: Tensor, mask: Tensor | None = None, tokens: Tensor | None = None):
        """Store log-probs [..., T]; with `tokens` [..., T], `log_prob` rejects other tokens."""
        super().__init__(batch_shape=log_probs.shape[:-1], validate_args=False)
        self.log_probs, self.mask, self.tokens = log_probs, mask, tokens

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-probs, 0 where masked out. Raises ValueError for other tokens or shapes than were scored."""
        if value.shape != self.log_probs.shape:
            raise ValueError(
                f"tokens have shape {tuple(value.shape)}, but the scored tokens have {tuple(self.log_probs.shape)}. "
                "Pass the scored tokens."
            )
        counts = torch.ones_like(value, dtype=torch.bool) if self.mask is None else self.mask
        if self.tokens is not None and not torch.equal(self.tokens[counts], value[counts]):
            raise ValueError(
                "These tokens are not the ones that were scored, so their log-probs are not known. Pass the scored "
                "tokens."
            )
        return self.log_probs.masked_fill(~counts, 0.0)

    def sample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # type: ignore[override]  # noqa: B008
        """Raise NotImplementedError, because the log-probs of given tokens are not a distribution to sample from."""
        raise NotImplementedError("Cannot sample from the log-probs of given tokens. Use get_dist, which has logits.")

    def entropy(self) -> Tensor:
        """Raise NotImplementedError, because the log-probs of given tokens have no entropy."""
        raise NotImplementedError("Log-probs of given tokens have no entropy. Use get_dist where logits exist.")


class LLMMaskedCategorical(Distribution):
    """A categorical distribution at every position of logits [B, T, V].

    mask [B, T]: positions that count; elsewhere log-prob and entropy are 0. mask [B, T, V]: tokens that can be drawn; a
    position without any does not count. Neither does a position whose value is `ignore_index`.
    """

    def __init__(self, logits: Tensor, mask: Tensor | None = None, ignore_index: int = -100):
        if mask is not None and mask.shape not in (logits.shape[:-1], logits.shape):
            raise ValueError(f"mask {tuple(mask.shape)} fits neither [B, T] nor [B, T, V] of {tuple(logits.shape)}.")
        super().__init__(batch_shape=logits.shape[:-1], validate_args=False)
        mask = None if mask is None else mask.to(logits.device)
        self.ignore_index, self.mask = ignore_index, mask
        if mask is not None and mask.shape == logits.shape:
            self.positions = mask.any(-1)
            logits = logits.masked_fill(~mask & self.positions.unsqueeze(-1), float("-inf"))
        else:
            self.positions = torch.ones_like(logits[..., 0], dtype=torch.bool) if mask is None else mask
        self.logits = logits

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-probs [B, T] (nats) of tokens, on the logits' device; 0 at positions that do not count."""
        value = value.to(self.logits.device)
        counts = self.positions & (value != self.ignore_index)
        chosen = self.logits.gather(-1, value.masked_fill(~counts, 0).unsqueeze(-1)).squeeze(-1)
        return torch.where(counts, chosen - self.logits.logsumexp(-1), 0.0)

    def entropy(self) -> Tensor:
        """Return the entropy [B, T] in nats; 0 at positions that do not count."""
        logs = self.logits.log_softmax(-1)
        terms = logs.exp() * logs.masked_fill(~logs.isfinite(), 0.0)  # filled before: 0 * -inf has no gradient
        return torch.where(self.positions, -terms.sum(-1), 0.0)

    def sample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # type: ignore[override]  # noqa: B008
        """Return samples [*sample_shape, B, T], with `ignore_index` at positions that do not count."""
        drawn = torch.distributions.Categorical(logits=self.logits).sample(sample_shape)
        return drawn.masked_fill(~self.positions, self.ignore_index)

    @property
    def mode(self) -> Tensor:
        """Most likely tokens [B, T], with `ignore_index` at positions that do not count."""
        return self.logits.argmax(-1).masked_fill(~self.positions, self.ignore_index)
