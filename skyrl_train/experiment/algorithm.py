"""Loss, advantages and corrections from the configuration. Each function receives the settings that its parameters
name.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from skyrl_train.algorithms import policy_objective as policy, sft
from skyrl_train.algorithms.advantages import (
    ESTIMATOR_TENSORS as ADVANTAGE_TENSORS,
    AdvantageCalculator,
    ComparisonScope,
    KLInReward,
    get_comparison_scope,
)
from skyrl_train.algorithms.corrections import OffPolicyCorrection
from skyrl_train.algorithms.kl import AdaptiveKLController, FixedKLController
from skyrl_train.algorithms.losses import cispo, cispo_rollout, cross_entropy
from skyrl_train.algorithms.policy_objective import PolicyObjective
from skyrl_train.algorithms.registry import (
    KLEstimator,
    advantage_estimators,
    bind_settings,
    get_keyword_parameters,
    kl_estimators,
    policy_losses,
    reductions,
    sft_losses,
)
from skyrl_train.algorithms.sft import SFTObjective
from skyrl_train.algorithms.skyrl_adapters import SkyRLAdvantageEstimator, SkyRLPolicyLoss, has_skyrl_signature
from skyrl_train.algorithms.token_selection import get_token_selector
from skyrl_train.algorithms.value_objective import ValueObjective
from skyrl_train.config.predicates import (
    get_off_policy_correction,
    has_off_policy_correction,
    kl_in_loss,
    kl_in_reward,
    lacks_critic,
    max_sequence_length,
    max_staleness_steps,
    needs_critic,
    needs_reference,
    sft_needs_reference,
)
from skyrl_train.config.schema import AlgorithmConfig, Config, TrainerConfig
from skyrl_train.config.section import Section
from skyrl_train.config.validate import missing_critic_problem
from skyrl_train.errors import ConfigError
from skyrl_train.learner.learner import TokenSelector
from skyrl_train.learner.worker import Objective

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ObjectiveSpec:
    """The loss that a learner trains with, and everything that the loss needs."""

    objective: Objective
    reduction: Callable[..., Tensor]
    """Computes the loss weights of a mini-batch's tokens."""
    token_selector: TokenSelector | None = None
    """Selects the tokens that the loss treats specially."""
    needs_reference: bool = False
    needs_old_logprobs: bool | None = None
    """True or False if it is known whether a step needs old log-probs; None if only the loss reads them. See Learner.
    """
    critic_objective: Objective | None = None
    """The critic's loss; None if the advantages need no values."""


def build_policy_objective_spec(cfg: Config) -> ObjectiveSpec:
    """Return the objective for training with rewards.

    Logs a warning if samples may be stale and nothing corrects for that.

    Raises:
        ConfigError: A name is not registered, a function has a parameter that does not exist, or a required critic is
            not configured.
    """
    algorithm = cfg.trainer.algorithm
    _warn_if_uncorrected(cfg)
    build_advantage_step(algorithm)  # an invalid estimator must raise before engines are started
    objective = build_objective(algorithm)
    return ObjectiveSpec(
        objective=objective,
        reduction=build_reduction(cfg),
        token_selector=build_token_selector(algorithm),
        needs_reference=needs_reference(algorithm),
        needs_old_logprobs=True
        if reads_old_logprobs_before_loss(algorithm)
        else None
        if objective.needs_old_logprobs
        else False,
        critic_objective=build_critic_objective(cfg.trainer),
    )


def _warn_if_uncorrected(cfg: Config) -> None:
    """Warn about stale samples without a correction.

    The policy that sampled them is then not the policy against which the loss computes its ratio.
    """
    algorithm, staleness = cfg.trainer.algorithm, max_staleness_steps(cfg.trainer)
    has_importance_weights = (
        get_off_policy_correction(algorithm).tis_ratio_type is not None
    )  # masks alone leave old tokens as they are
    is_corrected = has_importance_weights or _reads_rollout_logprobs(_policy_loss_of(algorithm))
    if staleness and not is_corrected:
        _log.warning(
            f"trainer.fully_async.max_staleness_steps={staleness} is set without an off-policy correction. Tokens that "
            "older weights sampled are treated as if the current weights had sampled them. Set "
            "trainer.algorithm.off_policy_correction.tis_ratio_type=token."
        )


def build_sft_objective_spec(cfg: Config) -> ObjectiveSpec:
    """Return the objective for supervised fine-tuning. Raises ConfigError as `build_sft_objective` does."""
    objective = build_sft_objective(cfg.trainer.algorithm)
    return ObjectiveSpec(objective, build_reduction(cfg), needs_reference=sft_needs_reference(cfg.trainer.algorithm))


def build_objective(algorithm: AlgorithmConfig) -> PolicyObjective:
    """Return the policy loss with its KL and entropy terms.

    Raises:
        ConfigError: A name is not registered, a function has a parameter that does not exist, or both the loss and
            tis_ratio_type would correct for the engine's log-probs.
    """
    loss = _policy_loss_of(algorithm)
    _check_single_correction(loss, algorithm)
    if has_skyrl_signature(loss):
        _log.warning(
            f"policy_loss_type={algorithm.policy_loss_type} has SkyRL's signature. Its mean over a micro-batch is "
            "weighted by the micro-batch's share of the mini-batch. Unless that mean is the one that loss_reduction "
            "names, the update depends on micro_train_batch_size_per_gpu."
        )
        loss = SkyRLPolicyLoss(loss, algorithm)
    return PolicyObjective(
        policy_loss=bind_settings(
            loss,
            f"policy_loss_type={algorithm.policy_loss_type}",
            algorithm_keywords(algorithm),
            policy.POLICY_LOSS_TENSORS,
        ),
        kl_estimator=_kl_estimator(algorithm) if kl_in_loss(algorithm) else None,
        kl_loss_coef=algorithm.kl_loss_coef,
        entropy_loss_coef=algorithm.entropy_loss_coef if algorithm.use_entropy_loss else None,
        report_mismatch=not has_off_policy_correction(algorithm),
    )


def build_critic_objective(trainer: TrainerConfig) -> ValueObjective | None:
    """Return the critic's loss; None if the run trains no critic.

    A run trains a critic if its advantage estimator requires the argument `values`, or if the argument is optional and
    a critic model is configured.

    Raises:
        ConfigError: The advantage estimator requires values and no critic model is configured.
    """
    if lacks_critic(trainer):
        raise ConfigError(str(missing_critic_problem(trainer)))
    if not needs_critic(trainer):
        return None
    clip = trainer.algorithm.value_clip
    return ValueObjective(math.inf if clip is None else clip)


def _policy_loss_of(algorithm: AlgorithmConfig) -> Callable[..., Any]:
    loss = policy_losses.get(algorithm.policy_loss_type)
    return cispo_rollout if loss is cispo and algorithm.cispo.cispo_anchor == "rollout" else loss


def _reads_rollout_logprobs(loss: Callable[..., Any]) -> bool:
    """True if the loss receives the engine's log-probs."""
    return has_skyrl_signature(loss) or "rollout_logprobs" in get_keyword_parameters(loss)


def _check_single_correction(loss: Callable[..., Any], algorithm: AlgorithmConfig) -> None:
    kind = get_off_policy_correction(algorithm).tis_ratio_type
    if kind is not None and _reads_rollout_logprobs(loss):
        raise ConfigError(
            f"trainer.algorithm.off_policy_correction.tis_ratio_type={kind} must be null with policy_loss_type="
            f"{algorithm.policy_loss_type}: this loss receives the engine's log-probs and corrects for them itself."
        )


def build_sft_objective(algorithm: AlgorithmConfig) -> SFTObjective:
    """Return the loss of supervised fine-tuning.

    Raises:
        ConfigError: sft.loss_type is not registered, or its function has a parameter that does not exist.
    """
    name = algorithm.sft.loss_type
    return SFTObjective(
        bind_settings(
            sft_losses.get(name), f"sft.loss_type={name}", algorithm_keywords(algorithm), sft.SFT_LOSS_TENSORS
        )
    )


def build_reduction(cfg: Config) -> Callable[..., Tensor]:
    """Return the function that computes the loss weights of a mini-batch's tokens.

    Raises:
        ConfigError: loss_reduction is not registered, or its function has a parameter that does not exist.
    """
    algorithm = cfg.trainer.algorithm
    max_seq_len = algorithm.max_seq_len or max_sequence_length(cfg.generator)
    description = f"loss_reduction={algorithm.loss_reduction}"
    micro_batch = cfg.trainer.micro_train_batch_size_per_gpu or 1
    settings = {"max_seq_len": max_seq_len, "micro_train_batch_size_per_gpu": micro_batch}
    return bind_settings(reductions.get(algorithm.loss_reduction), description, settings, frozenset())


def build_token_selector(algorithm: AlgorithmConfig) -> TokenSelector | None:
    """Return the function that selects tokens for the policy loss; None if the loss declares none.

    Raises:
        ConfigError: The loss is unknown, or its selection requests a setting that does not exist.
    """
    selector = get_token_selector(policy_losses.get(algorithm.policy_loss_type))
    description = f"the selection of policy_loss_type={algorithm.policy_loss_type}"
    return (
        None if selector is None else bind_settings(selector, description, algorithm_keywords(algorithm), frozenset())
    )


def build_advantage_step(algorithm: AlgorithmConfig) -> AdvantageCalculator:
    """Return the advantage estimator, with the KL penalty on rewards if it is configured.

    Raises:
        ConfigError: A name is not registered, or a function has a parameter that does not exist.
    """
    kl = None
    if kl_in_reward(algorithm):
        control = algorithm.kl_ctrl
        controller: FixedKLController | AdaptiveKLController = FixedKLController(algorithm.kl_loss_coef)
        if control.type == "adaptive":
            controller = AdaptiveKLController(
                algorithm.kl_loss_coef, kl_target=control.kl_target, horizon=control.horizon
            )
        kl = KLInReward(_kl_estimator(algorithm), controller)
    estimator = advantage_estimators.get(algorithm.advantage_estimator)
    if has_skyrl_signature(estimator):
        estimator = SkyRLAdvantageEstimator(estimator, algorithm)
    description = f"advantage_estimator={algorithm.advantage_estimator}"
    return AdvantageCalculator(
        estimator=bind_settings(estimator, description, algorithm_keywords(algorithm), ADVANTAGE_TENSORS),
        advantage_batch_normalize=algorithm.advantage_batch_normalize,
        kl=kl,
    )


def build_correction_steps(algorithm: AlgorithmConfig) -> list[OffPolicyCorrection]:
    """Return the batch transforms that follow the advantages: the off-policy correction, if it is configured."""
    return [OffPolicyCorrection(get_off_policy_correction(algorithm))] if has_off_policy_correction(algorithm) else []


def algorithm_keywords(algorithm: AlgorithmConfig) -> dict[str, Any]:
    """Return the settings that functions of `algorithms/` may request by parameter name.

    These are the keys of trainer.algorithm and of its losses' sections. `config` is the whole section
    trainer.algorithm.
    """
    losses = (algorithm.sapo, algorithm.clip_cov, algorithm.kl_cov, algorithm.cispo, algorithm.dppo, algorithm.sft)
    keys = {key.name: getattr(section, key.name) for section in (algorithm, *losses) for key in fields(section)}
    return {"config": algorithm, **{name: value for name, value in keys.items() if not isinstance(value, Section)}}


def reads_old_logprobs_before_loss(algorithm: AlgorithmConfig) -> bool:
    """True if anything other than the loss reads the trainer's log-probs from before the update."""
    estimator = advantage_estimators.get(algorithm.advantage_estimator)
    return (
        kl_in_reward(algorithm)
        or has_off_policy_correction(algorithm)
        or "old_logprobs" in get_keyword_parameters(estimator)
    )


def needs_rollout_logprobs(algorithm: AlgorithmConfig) -> bool:
    """True if a correction or the loss requires the engine's log-probs."""
    return has_off_policy_correction(algorithm) or get_keyword_parameters(_policy_loss_of(algorithm)).get(
        "rollout_logprobs", False
    )


def comparison_scope(algorithm: AlgorithmConfig) -> ComparisonScope | None:
    """Return the set of samples among which an update compares rewards.

    None if the update does not depend on rewards.
    """
    if policy_losses.get(algorithm.policy_loss_type) is cross_entropy:
        return None
    return get_comparison_scope(advantage_estimators.get(algorithm.advantage_estimator))


def _kl_estimator(algorithm: AlgorithmConfig) -> KLEstimator:
    name = algorithm.kl_estimator_type
    return bind_settings(
        kl_estimators.get(name), f"kl_estimator_type={name}", algorithm_keywords(algorithm), policy.POLICY_LOSS_TENSORS
    )
