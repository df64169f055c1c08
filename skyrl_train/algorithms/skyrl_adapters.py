"""Adapters for losses and estimators written for SkyRL, which take padded tensors (B, L).

    loss(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None) -> loss, metrics
    estimator(token_level_rewards, response_mask, index, **others) -> (advantages, returns)

They are recognized by their parameters `log_probs` and `token_level_rewards`. A loss reduces itself to a scalar, and
its metrics are a clip ratio or a dict with the key "clip_ratio". The scalar is weighted by the weights of the tokens in
its micro-batch. That is exact for any micro-batch size if the scalar is the mean that `loss_reduction` names
(token_mean, sequence_mean). For other functions the update depends on micro_train_batch_size_per_gpu, as in SkyRL.
Prompts, observations and padding have mask 0, and all other padded tensors are 0 there.
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
    """True if a registered function has the signature of SkyRL's losses or estimators."""
    return not inspect.signature(function).parameters.keys().isdisjoint({"log_probs", "token_level_rewards"})


@dataclass(frozen=True)
class SkyRLPolicyLoss:
    """A PolicyLoss that calls a loss with SkyRL's signature."""

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
        """Return the function's scalar on every loss token [T], and its clip ratio on every loss token [T].

        The weights of the tokens then sum to the micro-batch's share of the loss. The function is not called for a
        micro-batch without loss tokens: both results are 0.

        Args:
            logprobs: The policy's log-probs, nats [T].
            advantages: Advantages [T].
            mask: Loss tokens [T] bool.
            old_logprobs: The trainer's log-probs before the step's first update, nats [T].
            sequence_ids: Sequence of each token [T].
            rollout_logprobs: The engine's log-probs, nats [T], or None.
        """
        if not mask.any():  # the function would divide by 0
            zeros = torch.where(mask, logprobs, 0.0)
            return zeros, zeros.detach()
        layout = _PaddedLayout(sequence_ids, mask)
        loss, metrics = _call(
            self.function,
            log_probs=layout.pad(logprobs),
            old_log_probs=layout.pad(old_logprobs),
            advantages=layout.pad(advantages),
            config=self.config,
            loss_mask=layout.pad(torch.ones_like(logprobs)),
            rollout_logprobs=None if rollout_logprobs is None else layout.pad(rollout_logprobs),
        )
        clip_ratio = metrics.get("clip_ratio", 0.0) if isinstance(metrics, dict) else metrics
        fraction = float(torch.as_tensor(clip_ratio).detach())
        return torch.where(mask, loss.to(logprobs.dtype), 0.0), mask.to(logprobs.dtype) * fraction


@dataclass(frozen=True)
class SkyRLAdvantageEstimator:
    """An AdvantageEstimator that calls an estimator with SkyRL's signature.

    The function gets only valid samples: failed ones have no reward.
    """

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
        """Return the function's advantages and returns, both [T], 0 outside the mask and for failed samples.

        Args:
            rewards: Rewards [B].
            group_ids: Group of each sample [B]; the function gets them as strings (`index`).
            valid: False for failed samples [B].
            token_rewards: Rewards of tokens [T].
            mask: Loss tokens [T] bool.
            sequence_ids: Sequence of each token [T].
            values: The critic's values [T], or None without a critic.
        """
        if not valid.any():
            return TokenAdvantages(torch.zeros_like(token_rewards), torch.zeros_like(token_rewards))
        layout = _PaddedLayout(sequence_ids, mask)
        padded_rewards = layout.pad(token_rewards)
        has_no_tokens = torch.bincount(sequence_ids[mask], minlength=len(rewards)) == 0
        # A response without loss tokens is still part of its group.
        padded_rewards[has_no_tokens, -1] = rewards[has_no_tokens].to(padded_rewards.dtype)
        results = _call(
            self.function,
            token_level_rewards=padded_rewards[valid],
            response_mask=layout.pad(torch.ones_like(token_rewards))[valid],
            index=np.array([str(group) for group in group_ids[valid].tolist()]),
            values=None if values is None else layout.pad(values)[valid],
            config=self.config,
            gamma=self.config.gamma,
            lambd=self.config.lambd,
            grpo_norm_by_std=self.config.grpo_norm_by_std,
        )
        zeros = layout.pad(torch.zeros_like(token_rewards))
        advantages, returns = (layout.unpad(zeros.index_put((valid,), result.to(zeros.dtype))) for result in results)
        return TokenAdvantages(advantages, returns)


class _PaddedLayout:
    """The mapping between tokens [T] and padded tensors (B, longest sequence).

    Padded tensors are 0 outside the mask and to the right of a sequence.
    """

    def __init__(self, sequence_ids: Tensor, mask: Tensor):
        self._mask = mask
        lengths = torch.bincount(sequence_ids)
        starts = lengths.cumsum(0) - lengths
        self._indices = sequence_ids, torch.arange(len(sequence_ids), device=sequence_ids.device) - starts[sequence_ids]
        self._shape = len(lengths), int(lengths.max())

    def pad(self, flat: Tensor) -> Tensor:
        return flat.new_zeros(self._shape).index_put(self._indices, torch.where(self._mask, flat, 0.0))

    def unpad(self, padded: Tensor) -> Tensor:
        return torch.where(self._mask, padded[self._indices], 0.0)


def _call(function: Callable[..., Any], **arguments: Any) -> Any:
    """Call `function` with those of the arguments that it takes."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return function(**arguments)
    return function(**{name: value for name, value in arguments.items() if name in parameters})
