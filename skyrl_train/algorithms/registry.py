"""The algorithms that configuration can name, and how they get what they ask for.

A user's own join by decorator, from a module listed in `trainer.plugins`. What an algorithm needs besides its
positional arguments it names as keywords: `bind` fixes those that configuration gives, the caller passes the tensors.
So a loss that needs the engine's log-probs says so in its signature, and nobody else has to know.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from skyrl_train.algorithms.advantages import TokenAdvantages
from skyrl_train.config.choices import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS, POLICY_LOSSES, REDUCTIONS, SFT_LOSSES
from skyrl_train.errors import ConfigError
from skyrl_train.registry import Registry

AdvantageEstimator = Callable[..., Tensor | TokenAdvantages]
"""(rewards, group_ids, valid, *, ...), all [B], to advantages [B] or TokenAdvantages; see advantages.py."""
PolicyLoss = Callable[..., tuple[Tensor, Tensor]]
"""(logprobs, advantages, mask, *, ...), all [T], to (loss [T], was_clipped [T]); see losses.py."""
KLEstimator = Callable[..., Tensor]
"""(logprobs, ref_logprobs, mask, *, ...), all [T], to nats [T]; see kl.py."""
SFTLoss = Callable[..., Tensor]
"""(logprobs, mask, *, ...), all [T], to loss [T]; see sft.py."""
Reduction = Callable[..., Tensor]
"""(mask [T], sequence_ids [T], group_ids [T], *, max_seq_len) to the weight [T] of every token; see reductions.py."""

advantage_estimators: Registry[AdvantageEstimator] = Registry("advantage estimator", ADVANTAGE_ESTIMATORS)
policy_losses: Registry[PolicyLoss] = Registry("policy loss", POLICY_LOSSES)
kl_estimators: Registry[KLEstimator] = Registry("KL estimator", KL_ESTIMATORS)
reductions: Registry[Reduction] = Registry("loss reduction", REDUCTIONS)
sft_losses: Registry[SFTLoss] = Registry("SFT loss", SFT_LOSSES)


def register_advantage_estimator(name: str) -> Callable[[Any], Any]:
    """Decorator: make a function available as trainer.algorithm.advantage_estimator=NAME.

    Its signature is an AdvantageEstimator's, or that of SkyRL's estimators (see skyrl_style.py).
    """
    return advantage_estimators.register(name)


def register_policy_loss(name: str) -> Callable[[Any], Any]:
    """Decorator: make a function available as trainer.algorithm.policy_loss_type=NAME.

    Its signature is a PolicyLoss's, or that of SkyRL's losses (see skyrl_style.py).
    """
    return policy_losses.register(name)


def register_kl_estimator(name: str) -> Callable[[Any], Any]:
    """Decorator: make a KLEstimator available as trainer.algorithm.kl_estimator_type=NAME."""
    return kl_estimators.register(name)


def register_reduction(name: str) -> Callable[[Any], Any]:
    """Decorator: make a Reduction available as trainer.algorithm.loss_reduction=NAME."""
    return reductions.register(name)


def register_sft_loss(name: str) -> Callable[[Any], Any]:
    """Decorator: make an SFTLoss available as trainer.algorithm.sft.loss_type=NAME."""
    return sft_losses.register(name)


def keywords_of(function: Callable[..., Any]) -> dict[str, bool]:
    """Keyword-only parameters by name, True where the caller must give a value."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default is p.empty for p in parameters if p.kind is p.KEYWORD_ONLY}


def bind(
    function: Callable[..., Any], what: str, settings: Mapping[str, Any], tensors: frozenset[str]
) -> Callable[..., Any]:
    """`function` with the settings that it names filled in, to be called with `asked_for` tensors.

    `what` says in messages whose signature it is. Raises ConfigError for a keyword without default that is neither a
    setting nor one of `tensors`.
    """
    keywords = keywords_of(function)
    unknown = [name for name, required in keywords.items() if required and name not in settings.keys() | tensors]
    if unknown:
        raise ConfigError(
            f"{what} asks for {', '.join(unknown)}, which nobody has; settings are {', '.join(sorted(settings))}; "
            f"tensors are {', '.join(sorted(tensors))}."
        )
    return partial(function, **{name: settings[name] for name in keywords if name in settings})


def asked_for(function: Callable[..., Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `tensors` that a bound function names as keywords."""
    return {name: tensors[name] for name in keywords_of(function) if name in tensors}
