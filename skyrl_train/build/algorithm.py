"""Loss and advantages, from configuration."""

from __future__ import annotations

from skyrl_train.algorithms.kl import AdaptiveKLController, FixedKLController
from skyrl_train.algorithms.registry import advantage_estimators, kl_estimators, policy_losses, reductions
from skyrl_train.config.schema import AlgorithmConfig, Config
from skyrl_train.objectives.policy import PolicyObjective
from skyrl_train.trainer.advantages import AdvantageStep, KLInReward


def build_objective(cfg: Config) -> PolicyObjective:
    """The policy loss with its KL and entropy terms. Raises ConfigError for a name nobody registered."""
    algorithm, generator = cfg.trainer.algorithm, cfg.generator
    return PolicyObjective(
        policy_loss=policy_losses.get(algorithm.policy_loss_type),
        eps_clip_low=algorithm.eps_clip_low,
        eps_clip_high=algorithm.eps_clip_high,
        reduction=reductions.get(algorithm.loss_reduction),
        max_seq_len=algorithm.max_seq_len or generator.max_input_length + generator.sampling_params.max_generate_length,
        kl_estimator=kl_estimators.get(algorithm.kl_estimator_type) if _kl_in_loss(algorithm) else None,
        kl_coef=algorithm.kl_loss_coef,
        entropy_coef=algorithm.entropy_loss_coef if algorithm.use_entropy_loss else None,
    )


def build_advantages(algorithm: AlgorithmConfig) -> AdvantageStep:
    """The advantage estimator, with the KL penalty on rewards where it is asked for."""
    kl = None
    if algorithm.use_kl_in_reward:
        control = algorithm.kl_ctrl
        controller: FixedKLController | AdaptiveKLController = FixedKLController(algorithm.kl_loss_coef)
        if control.type == "adaptive":
            controller = AdaptiveKLController(algorithm.kl_loss_coef, control.kl_target, control.horizon)
        kl = KLInReward(kl_estimators.get(algorithm.kl_estimator_type), controller)
    return AdvantageStep(
        estimator=advantage_estimators.get(algorithm.advantage_estimator),
        norm_by_std=algorithm.grpo_norm_by_std,
        normalise_batch=algorithm.advantage_batch_normalize,
        kl=kl,
    )


def needs_reference(algorithm: AlgorithmConfig) -> bool:
    """Whether anything reads the reference model's log-probs: with a coefficient of 0 nothing does."""
    return algorithm.use_kl_in_reward or _kl_in_loss(algorithm)


def _kl_in_loss(algorithm: AlgorithmConfig) -> bool:
    return algorithm.use_kl_loss and algorithm.kl_loss_coef != 0
