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
    """Return the clipped value loss of PPO's reference code, and 1 where it was clipped, both [T], 0 outside the mask.

        max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2) / 2

    Args:
        values: Values V [T]; only they have a gradient.
        old_values: The values V_old [T] from which the advantages were computed.
        returns: The targets R [T].
        mask: Loss tokens [T] bool.
        value_clip: Maximum distance of V from V_old.
    """
    values, old_values, returns = (torch.where(mask, x, 0.0) for x in (values, old_values, returns))
    bounded = old_values + (values - old_values).clamp(-value_clip, value_clip)
    unclipped, clipped = (values - returns).square(), (bounded - returns).square()
    return torch.maximum(unclipped, clipped) / 2, ((clipped > unclipped) & mask).to(values.dtype)


@dataclass(frozen=True)
class ValueObjective:
    """The function that a critic's update minimizes.

    loss = sum_t w_t value_loss_t over the loss tokens, where w are the batch's `token_weights`
    """

    value_clip: float
    """Maximum distance of values from those from which the advantages were computed; beyond it, the loss is clipped."""

    @property
    def needs_entropy(self) -> bool:
        """False: a critic has no entropy."""
        return False

    def __call__(
        self, batch: TrainBatch, values: Tensor, entropy: Tensor | None, mini_batch_tokens: int, metrics: Metrics
    ) -> Tensor:
        """Return the scalar to backpropagate for one micro-batch, to be summed over micro-batches and ranks.

        Values outside loss_mask are not read.

        Args:
            batch: A micro-batch with `values`, `returns` and `token_weights`.
            values: The critic's values with gradient [T].
            entropy: Not used.
            mini_batch_tokens: Number of loss tokens of the whole mini-batch.
            metrics: Receives critic/loss, critic/clip_ratio and critic/value_mean.
        """
        mask, weights = batch.loss_mask, batch.token_weights
        assert batch.values is not None and batch.returns is not None and weights is not None, "set before the update"
        losses, clipped = clipped_value_loss(values, batch.values, batch.returns, mask, value_clip=self.value_clip)
        loss = (losses * weights).sum()
        means = {"critic/clip_ratio": clipped.sum(), "critic/value_mean": torch.where(mask, values, 0.0).sum()}
        numbers, names = [mask.sum(), loss, *means.values()], [*means]

        def record(computed: list[float]) -> None:
            tokens, total, *sums = computed
            if not tokens:
                return
            metrics.add_sum("critic/loss", total, weight=tokens / mini_batch_tokens)
            for name, value in zip(names, sums, strict=True):
                metrics.add_sum(name, value, weight=tokens)

        metrics.defer(torch.stack([number.detach().double() for number in numbers]), record)
        return loss


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float | None:
    """Return 1 - Var(returns - values) / Var(returns) over the loss tokens; a constant prediction explains 0.

    Args:
        values: The critic's values [T].
        returns: Their targets [T].
        mask: Loss tokens [T] bool.

    Returns:
        The explained variance; None if there are no loss tokens or all returns are equal, so that there is no variance.
    """
    values, returns = values[mask].double(), returns[mask].double()
    if len(returns) == 0 or bool((returns == returns[0]).all()):
        return None
    return 1.0 - float((returns - values).var(correction=0) / returns.var(correction=0))
