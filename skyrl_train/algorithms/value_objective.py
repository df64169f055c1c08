"""The objective of a critic's update: the clipped value loss of one micro-batch, summed to a scalar."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_train.data.batch import TrainBatch
from skyrl_train.metrics import Metrics


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


@dataclass(frozen=True)
class ValueObjective:
    """loss = sum_t w_t value_loss_t over the tokens in loss_mask, where w are the batch's `token_weights`."""

    value_clip: float
    """Maximum distance of values from those that were used for the advantages; beyond it, the loss is clipped."""

    @property
    def needs_entropy(self) -> bool:
        return False

    def __call__(
        self, batch: TrainBatch, values: Tensor, entropy: Tensor | None, mini_batch_tokens: int, metrics: Metrics
    ) -> Tensor:
        """Return the scalar to backpropagate, to be summed over micro-batches and ranks. values [T] are the critic's.

        Values outside loss_mask are not read. `mini_batch_tokens` is the token count of the whole mini-batch.
        """
        mask, weights = batch.loss_mask, batch.token_weights
        assert batch.values is not None and batch.returns is not None and weights is not None, "set before the update"
        losses, clipped = clipped_value_loss(values, batch.values, batch.returns, mask, value_clip=self.value_clip)
        loss = (losses * weights).sum()
        means = {"critic/clip_ratio": clipped.sum(), "critic/value_mean": torch.where(mask, values, 0.0).sum()}
        numbers = [mask.sum(), loss, *means.values()]
        tokens, total, *sums = torch.stack([number.detach().double() for number in numbers]).tolist()
        if not tokens:
            return loss
        metrics.add_sum("critic/loss", total, weight=tokens / mini_batch_tokens)
        for name, value in zip(means, sums, strict=True):
            metrics.add_sum(name, value, weight=tokens)
        return loss


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float | None:
    """1 - Var(returns - values) / Var(returns) over the tokens that count, all [T]; a constant explains 0.

    None if all returns are equal: there is no variance to explain.
    """
    values, returns = values[mask].double(), returns[mask].double()
    if len(returns) == 0 or bool((returns == returns[0]).all()):
        return None
    return 1.0 - float((returns - values).var(correction=0) / returns.var(correction=0))
