"""Loss, advantages and corrections, from configuration: every function gets the arguments that it names."""

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
    """What a learner trains with: its loss, and everything that the loss needs."""

    objective: Objective
    reduction: Callable[..., Tensor]
    """Gives the tokens of a mini-batch their weights."""
    token_selector: TokenSelector | None = None
    """Selects the tokens that the loss treats specially."""
    needs_reference: bool = False
    needs_old_logprobs: bool | None = None
    """See Learner: None if only the loss reads them."""
    critic_objective: Objective | None = None
    """The critic's loss, if the advantages need values."""


def build_policy_objective_spec(cfg: Config) -> ObjectiveSpec:
    """The settings for training with rewards.

    Raises ConfigError for a name that is not registered, or a function with an argument that does not exist.
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
    """Old samples need a correction: the engine's policy is then not the one that a loss takes its ratio against."""
    algorithm, staleness = cfg.trainer.algorithm, max_staleness_steps(cfg.trainer)
    weighs = get_off_policy_correction(algorithm).tis_ratio_type is not None  # masks alone leave old tokens as they are
    corrected = weighs or _reads_rollout_logprobs(_policy_loss_of(algorithm))
    if staleness and not corrected:
        _log.warning(
            f"trainer.fully_async.max_staleness_steps={staleness} without a correction: tokens that "
            "older weights sampled count as if the newest had. Set "
            "trainer.algorithm.off_policy_correction.tis_ratio_type=token."
        )


def build_sft_objective_spec(cfg: Config) -> ObjectiveSpec:
    """The settings for supervised fine-tuning."""
    objective = build_sft_objective(cfg.trainer.algorithm)
    return ObjectiveSpec(objective, build_reduction(cfg), needs_reference=sft_needs_reference(cfg.trainer.algorithm))


def build_objective(algorithm: AlgorithmConfig) -> PolicyObjective:
    """The policy loss with its KL and entropy terms.

    Raises ConfigError for a name that is not registered, or a function with an argument that does not exist.
    """
    loss = _policy_loss_of(algorithm)
    _check_single_correction(loss, algorithm)
    if has_skyrl_signature(loss):
        _log.warning(
            f"policy_loss_type={algorithm.policy_loss_type} has SkyRL's signature: its own mean over a micro-batch is "
            "weighted by the micro-batch's share. Unless it is the mean that loss_reduction names, the update depends "
            "on micro_train_batch_size_per_gpu."
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
    """The critic's loss; None if the advantage estimator has no argument `values`.

    Also None if that argument is optional and no critic model is configured. Raises ConfigError if it is required and
    no critic model is configured.
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
    """Whether it gets the engine's log-probs."""
    return has_skyrl_signature(loss) or "rollout_logprobs" in get_keyword_parameters(loss)


def _check_single_correction(loss: Callable[..., Any], algorithm: AlgorithmConfig) -> None:
    kind = get_off_policy_correction(algorithm).tis_ratio_type
    if kind is not None and _reads_rollout_logprobs(loss):
        raise ConfigError(
            f"trainer.algorithm.off_policy_correction.tis_ratio_type={kind}: must be null with policy_loss_type="
            f"{algorithm.policy_loss_type}, which gets the engine's log-probs and corrects for them itself."
        )


def build_sft_objective(algorithm: AlgorithmConfig) -> SFTObjective:
    """The loss of supervised fine-tuning."""
    name = algorithm.sft.loss_type
    return SFTObjective(
        bind_settings(
            sft_losses.get(name), f"sft.loss_type={name}", algorithm_keywords(algorithm), sft.SFT_LOSS_TENSORS
        )
    )


def build_reduction(cfg: Config) -> Callable[..., Tensor]:
    """The function that gives the tokens of a mini-batch their weights."""
    algorithm = cfg.trainer.algorithm
    longest = algorithm.max_seq_len or max_sequence_length(cfg.generator)
    what = f"loss_reduction={algorithm.loss_reduction}"
    micro_batch = cfg.trainer.micro_train_batch_size_per_gpu or 1
    known = {"max_seq_len": longest, "micro_train_batch_size_per_gpu": micro_batch}
    return bind_settings(reductions.get(algorithm.loss_reduction), what, known, frozenset())


def build_token_selector(algorithm: AlgorithmConfig) -> TokenSelector | None:
    """The function that selects tokens for the policy loss; None if the loss declares none."""
    choose = get_token_selector(policy_losses.get(algorithm.policy_loss_type))
    what = f"the selection of policy_loss_type={algorithm.policy_loss_type}"
    return None if choose is None else bind_settings(choose, what, algorithm_keywords(algorithm), frozenset())


def build_advantage_step(algorithm: AlgorithmConfig) -> AdvantageCalculator:
    """The advantage estimator, with the KL penalty on rewards if it is on."""
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
    what = f"advantage_estimator={algorithm.advantage_estimator}"
    return AdvantageCalculator(
        estimator=bind_settings(estimator, what, algorithm_keywords(algorithm), ADVANTAGE_TENSORS),
        advantage_batch_normalize=algorithm.advantage_batch_normalize,
        kl=kl,
    )


def build_correction_steps(algorithm: AlgorithmConfig) -> list[OffPolicyCorrection]:
    """The steps after the advantages: the off-policy correction, if one is on."""
    return [OffPolicyCorrection(get_off_policy_correction(algorithm))] if has_off_policy_correction(algorithm) else []


def algorithm_keywords(algorithm: AlgorithmConfig) -> dict[str, Any]:
    """What functions of `algorithms/` may ask for by name: the keys of trainer.algorithm and of its losses' sections.

    All of it together is `config`.
    """
    losses = (algorithm.sapo, algorithm.clip_cov, algorithm.kl_cov, algorithm.cispo, algorithm.dppo, algorithm.sft)
    keys = {key.name: getattr(section, key.name) for section in (algorithm, *losses) for key in fields(section)}
    return {"config": algorithm, **{name: value for name, value in keys.items() if not isinstance(value, Section)}}


def reads_old_logprobs_before_loss(algorithm: AlgorithmConfig) -> bool:
    """Whether anything other than the loss reads the trainer's log-probs from before the update."""
    estimator = advantage_estimators.get(algorithm.advantage_estimator)
    return (
        kl_in_reward(algorithm)
        or has_off_policy_correction(algorithm)
        or "old_logprobs" in get_keyword_parameters(estimator)
    )


def needs_rollout_logprobs(algorithm: AlgorithmConfig) -> bool:
    """Whether a correction or the loss cannot do without the engine's log-probs."""
    return has_off_policy_correction(algorithm) or get_keyword_parameters(_policy_loss_of(algorithm)).get(
        "rollout_logprobs", False
    )


def comparison_scope(algorithm: AlgorithmConfig) -> ComparisonScope | None:
    """Among which samples an update compares rewards; None if it learns the same whatever they are."""
    if policy_losses.get(algorithm.policy_loss_type) is cross_entropy:
        return None
    return get_comparison_scope(advantage_estimators.get(algorithm.advantage_estimator))


def _kl_estimator(algorithm: AlgorithmConfig) -> KLEstimator:
    name = algorithm.kl_estimator_type
    return bind_settings(
        kl_estimators.get(name), f"kl_estimator_type={name}", algorithm_keywords(algorithm), policy.POLICY_LOSS_TENSORS
    )
