"""Adapters for losses and estimators written for SkyRL: they take rectangles (B, L) and reduce the loss themselves.

    loss(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None) -> loss, metrics
    estimator(token_level_rewards, response_mask, index, **others) -> (advantages, returns)

They are recognised by their parameters `log_probs` and `token_level_rewards`; metrics are a clip ratio or a dict with
one. A loss's scalar is weighted by the weights of the tokens in its micro-batch. That is exact for any micro-batch size
if the scalar is the mean that `loss_reduction` names (token_mean, sequence_mean); for other functions the update
depends on micro_train_batch_size_per_gpu, as in SkyRL. Prompts, observations and padding have mask 0, and are 0 in
every other rectangle.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skyrl_train.algorithms.registry import TokenAdvantages
from skyrl_train.config.algorithm import AlgorithmConfig


def has_skyrl_signature(function: Callable[..., Any]) -> bool:
    """Whether a registered function has the signature of SkyRL's losses or estimators."""
    return not inspect.signature(function).parameters.keys().isdisjoint({"log_probs", "token_level_rewards"})


@dataclass(frozen=True)
class SkyRLPolicyLoss:
    """A SkyRL-style loss as a PolicyLoss."""

    function: Callable[..., Any]
    config: AlgorithmConfig

    def __call__(
        self,
        logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        old_logprobs: Tensor,
        sequence_ids: Tensor,
        rollout_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The function's scalar on every token that counts; the weights then sum to the micro-batch's share of it."""
        if not mask.any():  # the function would take a mean over nothing
            zeros = torch.where(mask, logprobs, 0.0)
            return zeros, zeros.detach()
        rectangle = _PaddedLayout(sequence_ids, mask)
        loss, metrics = _call(
            self.function,
            log_probs=rectangle.pad(logprobs),
            old_log_probs=rectangle.pad(old_logprobs),
            advantages=rectangle.pad(advantages),
            config=self.config,
            loss_mask=rectangle.pad(torch.ones_like(logprobs)),
            rollout_logprobs=None if rollout_logprobs is None else rectangle.pad(rollout_logprobs),
        )
        clipped = metrics.get("clip_ratio", 0.0) if isinstance(metrics, dict) else metrics
        share = float(torch.as_tensor(clipped).detach())
        return torch.where(mask, loss.to(logprobs.dtype), 0.0), mask.to(logprobs.dtype) * share


@dataclass(frozen=True)
class SkyRLAdvantageEstimator:
    """A SkyRL-style estimator as an AdvantageEstimator. It does not see failed samples, which have no reward."""

    function: Callable[..., Any]
    config: AlgorithmConfig

    def __call__(
        self,
        rewards: Tensor,
        group_ids: Tensor,
        valid: Tensor,
        *,
        token_rewards: Tensor,
        mask: Tensor,
        sequence_ids: Tensor,
        values: Tensor | None = None,
    ) -> TokenAdvantages:
        if not valid.any():
            return TokenAdvantages(torch.zeros_like(token_rewards), torch.zeros_like(token_rewards))
        rectangle = _PaddedLayout(sequence_ids, mask)
        of_tokens = rectangle.pad(token_rewards)
        silent = torch.bincount(sequence_ids[mask], minlength=len(rewards)) == 0
        of_tokens[silent, -1] = rewards[silent].to(of_tokens.dtype)  # masked in the loss, but still part of its group
        results = _call(
            self.function,
            token_level_rewards=of_tokens[valid],
            response_mask=rectangle.pad(torch.ones_like(token_rewards))[valid],
            index=np.array([str(group) for group in group_ids[valid].tolist()]),
            values=None if values is None else rectangle.pad(values)[valid],
            config=self.config,
            gamma=self.config.gamma,
            lambd=self.config.lambd,
            grpo_norm_by_std=self.config.grpo_norm_by_std,
        )
        whole = rectangle.pad(torch.zeros_like(token_rewards))
        advantages, returns = (rectangle.unpad(whole.index_put((valid,), result.to(whole.dtype))) for result in results)
        return TokenAdvantages(advantages, returns)


class _PaddedLayout:
    """[T] <-> (B, longest sequence), zeros outside the mask and to the right of a sequence."""

    def __init__(self, sequence_ids: Tensor, mask: Tensor):
        self._mask = mask
        lengths = torch.bincount(sequence_ids)
        starts = lengths.cumsum(0) - lengths
        self._places = sequence_ids, torch.arange(len(sequence_ids), device=sequence_ids.device) - starts[sequence_ids]
        self._shape = len(lengths), int(lengths.max())

    def pad(self, flat: Tensor) -> Tensor:
        return flat.new_zeros(self._shape).index_put(self._places, torch.where(self._mask, flat, 0.0))

    def unpad(self, padded: Tensor) -> Tensor:
        return torch.where(self._mask, padded[self._places], 0.0)


def _call(function: Callable[..., Any], **arguments: Any) -> Any:
    """Call `function` with those arguments that it takes."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return function(**arguments)
    return function(**{name: value for name, value in arguments.items() if name in parameters})
