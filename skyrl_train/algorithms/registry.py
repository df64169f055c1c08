"""The algorithms that the configuration can name, and how they get their arguments.

Users add their own by decorator, in a module listed in `trainer.plugins`. An algorithm declares what it needs besides
its positional arguments as keywords: `bind` fills in those that the configuration gives, and the caller passes the
tensors. So only the signature of a loss says that it needs the engine's log-probs; no other code has to know.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from skyrl_train.config.choices import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS, POLICY_LOSSES, REDUCTIONS, SFT_LOSSES
from skyrl_train.errors import ConfigError
from skyrl_train.registry import Registry


class TokenAdvantages(NamedTuple):
    """Per-token advantages and returns, both [T], 0 outside the mask."""

    advantages: Tensor
    returns: Tensor | None = None
    """The critic's targets."""


AdvantageEstimator = Callable[..., Tensor | TokenAdvantages]
"""(rewards, group_ids, valid, *, ...), all [B], to advantages [B] or TokenAdvantages; see advantages.py."""
PolicyLoss = Callable[..., tuple[Tensor, Tensor]]
"""(logprobs, advantages, mask, *, ...), all [T], to (loss [T], was_clipped [T]); see losses.py."""
KLEstimator = Callable[..., Tensor]
"""(logprobs, ref_logprobs, mask, *, ...), all [T], to nats [T]; see kl.py."""
SFTLoss = Callable[..., Tensor]
"""(logprobs, mask, *, ...), all [T], to loss [T]; see sft.py."""
Reduction = Callable[..., Tensor]
"""(mask [T], sequence_ids [T], group_ids [T], *, max_seq_len, micro_train_batch_size_per_gpu) to the weight [T] of each
token: see reductions.py."""

advantage_estimators: Registry[AdvantageEstimator] = Registry("advantage estimator", ADVANTAGE_ESTIMATORS)
policy_losses: Registry[PolicyLoss] = Registry("policy loss", POLICY_LOSSES)
kl_estimators: Registry[KLEstimator] = Registry("KL estimator", KL_ESTIMATORS)
reductions: Registry[Reduction] = Registry("loss reduction", REDUCTIONS)
sft_losses: Registry[SFTLoss] = Registry("SFT loss", SFT_LOSSES)

DEPRECATED_KEYWORDS = {
    "eps_low": "eps_clip_low",
    "eps_high": "eps_clip_high",
    "norm_by_std": "grpo_norm_by_std",
    "micro_batch_size": "micro_train_batch_size_per_gpu",
}
"""Keywords by which users' functions may still ask for a key."""


def get_keyword_parameters(function: Callable[..., Any]) -> dict[str, bool]:
    """Keyword-only parameters by name -> whether they are required."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default is p.empty for p in parameters if p.kind is p.KEYWORD_ONLY}


def bind_settings(
    function: Callable[..., Any], kind: str, settings: Mapping[str, Any], tensors: frozenset[str]
) -> Callable[..., Any]:
    """Bind the settings that `function` takes as keywords; call the result with the tensors of `asked_for`.

    `what` names the algorithm in error messages. Raises ConfigError for a keyword without default that is neither a
    setting nor one of `tensors`.
    """
    keywords = get_keyword_parameters(function)
    values = {old: settings[name] for old, name in DEPRECATED_KEYWORDS.items() if name in settings} | dict(settings)
    unknown = [name for name, required in keywords.items() if required and name not in values.keys() | tensors]
    if unknown:
        raise ConfigError(
            f"{kind} asks for {', '.join(unknown)}, which nobody has; settings are {', '.join(sorted(settings))}; "
            f"tensors are {', '.join(sorted(tensors))}."
        )
    return partial(function, **{name: values[name] for name in keywords if name in values})


def select_keyword_arguments(function: Callable[..., Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The subset of `tensors` that a bound function takes as keywords."""
    return {name: tensors[name] for name in get_keyword_parameters(function) if name in tensors}
