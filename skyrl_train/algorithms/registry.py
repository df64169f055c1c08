"""The algorithms that the configuration can name, and how they get their arguments.

Users register their own with a decorator, in a module listed in `trainer.plugins`. An algorithm declares its inputs, in
addition to its positional arguments, as keyword-only parameters. `bind_settings` passes the values of configuration
keys, and the caller passes tensors. Only the signature of a loss shows, for example, that it needs the engine's
log-probs.
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
    """The critic's targets; None from estimators without a critic."""


AdvantageEstimator = Callable[..., Tensor | TokenAdvantages]
"""Maps (rewards, group_ids, valid, *, ...), all [B], to advantages [B] or TokenAdvantages; see advantages.py."""
PolicyLoss = Callable[..., tuple[Tensor, Tensor]]
"""Maps (logprobs, advantages, mask, *, ...), all [T], to (loss [T], was_clipped [T]); see losses.py."""
KLEstimator = Callable[..., Tensor]
"""Maps (logprobs, ref_logprobs, mask, *, ...), all [T], to nats [T]; see kl.py."""
SFTLoss = Callable[..., Tensor]
"""Maps (logprobs, mask, *, ...), all [T], to loss [T]; see sft.py."""
Reduction = Callable[..., Tensor]
"""Maps (mask [T], sequence_ids [T], group_ids [T], *, max_seq_len, micro_train_batch_size_per_gpu) to a weight [T] for
each token; see reductions.py.
"""

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
"""Deprecated parameter names of users' functions, and the configuration keys that they stand for."""


def get_keyword_parameters(function: Callable[..., Any]) -> dict[str, bool]:
    """Return the keyword-only parameters of a function by name, with True for those without default."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default is p.empty for p in parameters if p.kind is p.KEYWORD_ONLY}


def bind_settings(
    function: Callable[..., Any], kind: str, settings: Mapping[str, Any], tensors: frozenset[str]
) -> Callable[..., Any]:
    """Bind the settings that a function declares as keyword-only parameters.

    Args:
        function: A loss, estimator or reduction.
        kind: Name of the function in error messages.
        settings: Values of configuration keys by name. DEPRECATED_KEYWORDS are accepted for them, too.
        tensors: Names of the tensors that the caller passes later, with `select_keyword_arguments`.

    Returns:
        The function with its settings bound.

    Raises:
        ConfigError: A keyword-only parameter without default is neither a setting nor a tensor.
    """
    keywords = get_keyword_parameters(function)
    values = {old: settings[name] for old, name in DEPRECATED_KEYWORDS.items() if name in settings} | dict(settings)
    unknown = [name for name, required in keywords.items() if required and name not in values.keys() | tensors]
    if unknown:
        raise ConfigError(
            f"{kind} requires {', '.join(unknown)}, which is neither a setting nor a tensor. Rename the parameter or "
            f"give it a default. The settings are {', '.join(sorted(settings))}. The tensors are "
            f"{', '.join(sorted(tensors))}."
        )
    return partial(function, **{name: values[name] for name in keywords if name in values})


def select_keyword_arguments(function: Callable[..., Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the subset of `tensors` that a function declares as keyword-only parameters, by name."""
    return {name: tensors[name] for name in get_keyword_parameters(function) if name in tensors}
