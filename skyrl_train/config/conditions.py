"""What other keys a key needs to have an effect: `fields.key(needs=...)`. Each condition brings its advice along.

Conditions see the whole configuration, resolved and validated. The dataclasses import this module, so it must not
import them.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from skyrl_train.config.choices import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from skyrl_train.config.fields import Needs
from skyrl_train.config.problems import show
from skyrl_train.config.roles import (
    CRITIC_ESTIMATORS,
    REFERENCE_ESTIMATORS,
    REFERENCE_SFT_LOSSES,
    kl_in_reward,
    measures_kl,
    needs_critic,
)

if TYPE_CHECKING:
    from skyrl_train.config.schema import Config

CLIPPING_LOSSES = frozenset({"regular", "dual_clip", "gspo", "gmpo", "rollout_is", "clip_cov"})
"""Losses that ask for `eps_clip_low` and `eps_clip_high`, or whose choice of tokens does."""


def only_with(key: str, value: Any) -> Needs:
    """Another key has this value."""
    return Needs(lambda config: attrgetter(key)(config) == value, f"It belongs to {key}={show(value)}.")


def unless(key: str, value: Any) -> Needs:
    """Another key has another value."""
    return Needs(lambda config: attrgetter(key)(config) != value, f"{key}={show(value)} does without it.")


def only_if_set(key: str) -> Needs:
    """Another key is not null."""
    return Needs(lambda config: attrgetter(key)(config) is not None, f"It belongs to {key}.")


def only_above(key: str, least: int) -> Needs:
    """Another key is a larger number than this."""
    return Needs(lambda config: attrgetter(key)(config) > least, f"It belongs to {key} above {least}.")


def algorithm_has(key: str, value: str) -> Needs:
    """A key of trainer.algorithm, which the advice calls by its name there, has this value."""
    return Needs(lambda config: attrgetter(key)(config.trainer.algorithm) == value, f"It belongs to {key}={value}.")


def environment_is(name: str) -> Needs:
    return Needs(lambda config: config.environment.env_class == name, f"It belongs to env_class={name}.")


def loss_is(*names: str) -> Needs:
    return Needs(_loss_is(*names), f"It belongs to policy_loss_type={' or '.join(names)}.")


def estimator_is(*names: str) -> Needs:
    return Needs(_estimator_is(*names), f"It belongs to advantage_estimator={' or '.join(names)}.")


def _loss_is(*names: str) -> Callable[[Config], bool]:
    """One of these or of a plugin: nobody here knows what a plugin's loss asks for."""
    others = POLICY_LOSSES.keys() - set(names)
    return lambda config: config.trainer.algorithm.policy_loss_type not in others


def _estimator_is(*names: str) -> Callable[[Config], bool]:
    """One of these or of a plugin: nobody here knows what a plugin's estimator asks for."""
    others = ADVANTAGE_ESTIMATORS.keys() - set(names)
    return lambda config: config.trainer.algorithm.advantage_estimator not in others


CLIPPING_LOSS = Needs(
    _loss_is(*CLIPPING_LOSSES), f"It belongs to policy_loss_type={', '.join(sorted(CLIPPING_LOSSES))}."
)
CRITIC = Needs(_estimator_is(*CRITIC_ESTIMATORS), "It belongs to advantage estimators with a critic (gae).")


def _correction_is_on(config: Config) -> bool:
    algorithm = config.trainer.algorithm
    correction = algorithm.off_policy_correction
    switches = (
        correction.tis_ratio_type,
        correction.sequence_mask_metric,
        correction.outlier_token_is_threshold_low,
        correction.outlier_token_is_threshold_high,
        correction.token_mask_eps_low,
        correction.token_mask_eps_high,
        correction.token_mask_is_threshold_low,
        correction.token_mask_is_threshold_high,
    )
    return algorithm.use_tis or any(switch is not None for switch in switches)


OFF_POLICY_CORRECTION = Needs(
    _correction_is_on, "It bounds what tis_ratio_type, sequence_mask_metric or a threshold of it turns on."
)
TOKEN_RATIO = Needs(
    lambda config: config.trainer.algorithm.off_policy_correction.tis_ratio_type == "token",
    "It belongs to off_policy_correction.tis_ratio_type=token; use_tis alone has tis_imp_ratio_cap.",
)
SEQUENCE_RATIO = algorithm_has("off_policy_correction.tis_ratio_type", "sequence")
GEOMETRIC_MASK = algorithm_has("off_policy_correction.sequence_mask_metric", "geometric")
PRODUCT_MASK = algorithm_has("off_policy_correction.sequence_mask_metric", "product")
USE_TIS_ALONE = Needs(
    lambda config: (
        config.trainer.algorithm.use_tis and config.trainer.algorithm.off_policy_correction.tis_ratio_type is None
    ),
    "It belongs to use_tis=true alone; off_policy_correction.tis_ratio_type has bounds beside it.",
)


def _kl_is_adaptive(config: Config) -> bool:
    algorithm = config.trainer.algorithm
    return algorithm.kl_ctrl.type == "adaptive" and kl_in_reward(algorithm)


def _something_reads_a_reference(config: Config) -> bool:
    algorithm = config.trainer.algorithm
    asks = _estimator_is(*REFERENCE_ESTIMATORS)(config) or algorithm.sft.loss_type in REFERENCE_SFT_LOSSES
    return measures_kl(algorithm) or asks


ADAPTIVE_KL = Needs(_kl_is_adaptive, "It belongs to kl_ctrl.type=adaptive with use_kl_in_reward=true.")
SOME_KL = Needs(
    lambda config: config.trainer.algorithm.use_kl_loss or config.trainer.algorithm.use_kl_in_reward,
    "It belongs to trainer.algorithm.use_kl_loss=true or use_kl_in_reward=true.",
)
MEASURED_KL = Needs(
    lambda config: measures_kl(config.trainer.algorithm),
    "It belongs to trainer.algorithm.use_kl_loss=true or use_kl_in_reward=true, with kl_loss_coef above 0.",
)
REFERENCE = Needs(
    _something_reads_a_reference,
    "There is no reference: set trainer.algorithm.use_kl_loss or use_kl_in_reward, and kl_loss_coef above 0.",
)


def _shape_counts(config: Config, role: str) -> bool:
    """Whether a role's numbers of nodes and ranks are read: it is dedicated, or they are the policy's anyway."""
    placement = config.trainer.placement
    own, policy = (
        (getattr(placement, f"{name}_num_nodes"), getattr(placement, f"{name}_num_gpus_per_node"))
        for name in (role, "policy")
    )
    is_colocated = placement.colocate_all or (role == "ref" and placement.colocate_policy_ref)
    return own == policy or not is_colocated


REFERENCE_APART = Needs(
    lambda config: _shape_counts(config, "ref"),
    "The reference has the policy's ranks: set trainer.placement.colocate_policy_ref and colocate_all to false.",
)
CRITIC_APART = Needs(
    lambda config: not needs_critic(config.trainer) or _shape_counts(config, "critic"),
    "The critic has the policy's ranks: set trainer.placement.colocate_all to false.",
)
REWARD_MODEL = only_if_set("trainer.reward.model.path")
REWARD_MODEL_APART = Needs(
    lambda config: _shape_counts(config, "reward"),
    "In training the reward model has the policy's slots: set trainer.placement.colocate_all to false.",
)

ENGINES_APART = Needs(
    lambda config: not config.trainer.placement.colocate_all and config.generator.run_engines_locally,
    "Engines have the slots of the models, or are elsewhere: set trainer.placement.colocate_all to false.",
)

FSDP = Needs(
    lambda config: config.trainer.strategy not in ("single", "deepspeed"), "It belongs to trainer.strategy=fsdp2."
)
DEEPSPEED = only_with("trainer.strategy", "deepspeed")
ACCELERATOR = Needs(lambda config: config.device != "cpu", "On a CPU everything lies in host memory.")
OPTIMIZER_OF_REFERENCE = Needs(lambda config: False, "The reference has no optimizer.")

LOCAL_ENGINES = Needs(
    lambda config: config.generator.run_engines_locally,
    "With generator.run_engines_locally=false whoever starts a server says that to it.",
)
SERVERS = only_with("generator.run_engines_locally", False)
SHARED_FOLDER = Needs(
    lambda config: config.generator.weight_sync_route == "checkpoint" or not config.generator.run_engines_locally,
    "It belongs to generator.weight_sync_route=checkpoint and to servers.",
)
HTTP_ENDPOINT = only_with("generator.enable_http_endpoint", True)
SERVING_ENGINE = Needs(
    lambda config: config.generator.backend != "transformers", "The transformers engine has nothing of the kind."
)
VLLM_ON_ACCELERATOR = Needs(
    lambda config: config.generator.backend != "vllm" or config.device != "cpu",
    "On a CPU vLLM has a cache of the size that it needs.",
)

SEVERAL_TURNS = only_above("generator.max_turns", 1)
CONVERSATION = Needs(
    lambda config: config.generator.use_conversation_multi_turn,
    "It belongs to generator.use_conversation_multi_turn=true: one message has no turns to end, and no history.",
)


def _can_batch_turns(config: Config) -> bool:
    generator = config.generator
    one_by_one = generator.over_provisioning > 0 or generator.rate_limit.enabled or config.trainer.fully_async.enabled
    return generator.max_turns > 1 and not one_by_one


BATCHED_TURNS = Needs(
    _can_batch_turns,
    "Engines always batch requests. It belongs to max_turns above 1, without over_provisioning and rate_limit.",
)
