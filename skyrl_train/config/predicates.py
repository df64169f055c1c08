"""What a run needs, decided from several keys: models, corrections, slots.

Each decision is made here once, for the checks, the plan and the builders of a run. Predicates take the sections that
they read.

A function of an algorithm asks for what a model computes by naming it as an argument: `ref_logprobs`, `values`. The
built-in functions are known by name, so that nothing has to be imported; those of plugins once they are registered.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, replace
from enum import StrEnum

from skyrl_train.config.algorithm import AlgorithmConfig, OffPolicyCorrectionConfig
from skyrl_train.config.choices import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, SFT_LOSSES
from skyrl_train.config.schema import Config, GeneratorConfig, PlacementConfig, TrainerConfig
from skyrl_train.registry import find_registered

REFERENCE_ESTIMATORS = frozenset({"distillation"})
"""Built-in advantage estimators whose functions ask for `ref_logprobs`."""
REFERENCE_SFT_LOSSES = frozenset({"minor_sft"})
"""Built-in SFT losses whose functions ask for `ref_logprobs`."""
CRITIC_ESTIMATORS = frozenset({"gae"})
"""Built-in advantage estimators whose functions ask for `values`."""
GROUP_ESTIMATORS = frozenset({"grpo", "dr_grpo", "rloo", "reinforce++_baseline", "maxrl", "opo"})
"""Built-in advantage estimators that compare the responses of one prompt with each other."""


class ArgumentUse(StrEnum):
    """How a function takes an argument."""

    REQUIRED = "required"
    OPTIONAL = "optional"
    ABSENT = "absent"
    UNKNOWN = "unknown"
    """A plugin's function that is not registered yet."""


def _ref_logprobs_use(algorithm: AlgorithmConfig) -> ArgumentUse:
    name = algorithm.advantage_estimator
    return _get_argument_use("advantage estimator", name, "ref_logprobs", ADVANTAGE_ESTIMATORS, REFERENCE_ESTIMATORS)


def _sft_ref_logprobs_use(algorithm: AlgorithmConfig) -> ArgumentUse:
    return _get_argument_use("SFT loss", algorithm.sft.loss_type, "ref_logprobs", SFT_LOSSES, REFERENCE_SFT_LOSSES)


def _values_use(algorithm: AlgorithmConfig) -> ArgumentUse:
    name = algorithm.advantage_estimator
    return _get_argument_use("advantage estimator", name, "values", ADVANTAGE_ESTIMATORS, CRITIC_ESTIMATORS)


def _get_argument_use(
    kind: str, name: str, argument: str, table: dict[str, str], readers: frozenset[str]
) -> ArgumentUse:
    function = find_registered(kind, name)
    if function is None:
        if name in table:
            return ArgumentUse.REQUIRED if name in readers else ArgumentUse.ABSENT
        return ArgumentUse.UNKNOWN
    parameter = inspect.signature(function).parameters.get(argument)
    if parameter is None:
        return ArgumentUse.ABSENT
    return ArgumentUse.REQUIRED if parameter.default is parameter.empty else ArgumentUse.OPTIONAL


# -- KL divergence and reference


def kl_in_reward(algorithm: AlgorithmConfig) -> bool:
    """True if rewards include a KL penalty. One with a coefficient of 0 does not count."""
    return algorithm.use_kl_in_reward and algorithm.kl_loss_coef != 0


def kl_in_loss(algorithm: AlgorithmConfig) -> bool:
    """True if the loss has a KL term. One with a coefficient of 0 does not count."""
    return algorithm.use_kl_loss and algorithm.kl_loss_coef != 0


def measures_kl(algorithm: AlgorithmConfig) -> bool:
    """True if anything measures the KL divergence from the reference."""
    return kl_in_loss(algorithm) or kl_in_reward(algorithm)


def needs_reference(algorithm: AlgorithmConfig) -> bool:
    """True if training with rewards reads the reference model's log-probs."""
    return measures_kl(algorithm) or _ref_logprobs_use(algorithm) in (ArgumentUse.REQUIRED, ArgumentUse.OPTIONAL)


def sft_needs_reference(algorithm: AlgorithmConfig) -> bool:
    """True if supervised fine-tuning reads the reference model's log-probs."""
    return _sft_ref_logprobs_use(algorithm) in (ArgumentUse.REQUIRED, ArgumentUse.OPTIONAL)


def may_need_reference(algorithm: AlgorithmConfig) -> bool:
    """True if a run may have a reference model: some kind of training reads it, or a plugin's function may."""
    asked = ArgumentUse.UNKNOWN in (_ref_logprobs_use(algorithm), _sft_ref_logprobs_use(algorithm))
    return asked or needs_reference(algorithm) or sft_needs_reference(algorithm)


# -- Critic


def needs_critic(trainer: TrainerConfig) -> bool:
    """True if the advantage estimator gets values: it requires them, or accepts them and a critic is configured."""
    values = _values_use(trainer.algorithm)
    return values is ArgumentUse.REQUIRED or (values is ArgumentUse.OPTIONAL and bool(trainer.critic.model.path))


def lacks_critic(trainer: TrainerConfig) -> bool:
    """True if the advantage estimator requires values and no critic is configured."""
    return _values_use(trainer.algorithm) is ArgumentUse.REQUIRED and not trainer.critic.model.path


def may_need_critic(algorithm: AlgorithmConfig) -> bool:
    """True if the advantage estimator takes values, or is a plugin's that may."""
    return _values_use(algorithm) is not ArgumentUse.ABSENT


# -- Losses and estimators by name


def may_use_loss(algorithm: AlgorithmConfig, *names: str) -> bool:
    """True for one of these or a plugin's: nobody here knows what a plugin's loss asks for."""
    return algorithm.policy_loss_type in names or algorithm.policy_loss_type not in POLICY_LOSSES


def may_use_estimator(algorithm: AlgorithmConfig, *names: str) -> bool:
    """True for one of these or a plugin's: nobody here knows what a plugin's estimator asks for."""
    return algorithm.advantage_estimator in names or algorithm.advantage_estimator not in ADVANTAGE_ESTIMATORS


# -- Off-policy correction


def get_off_policy_correction(algorithm: AlgorithmConfig) -> OffPolicyCorrectionConfig:
    """The settings of the correction; SkyRL's older keys for token-level truncation (`use_tis`) are translated."""
    correction = algorithm.off_policy_correction
    if not algorithm.use_tis or correction.tis_ratio_type is not None:
        return correction
    return replace(correction, tis_ratio_type="token", token_tis_ratio_clip_high=algorithm.tis_imp_ratio_cap)


def has_off_policy_correction(algorithm: AlgorithmConfig) -> bool:
    """True if any off-policy correction is on."""
    correction = get_off_policy_correction(algorithm)
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
    return any(switch is not None for switch in switches)


# -- Sequences


def max_sequence_length(generator: GeneratorConfig) -> int:
    """The most tokens that a sequence may have."""
    return generator.max_input_length + generator.sampling_params.max_generate_length


# -- Sampling and evaluation


def max_staleness_steps(trainer: TrainerConfig) -> int:
    """How many versions old the weights may be that sample what a step trains on; 0 in synchronous training."""
    return trainer.fully_async.max_staleness_steps if trainer.fully_async.enabled else 0


def runs_groups_independently(config: Config, *, evaluation: bool = False) -> bool:
    """True if groups go to the engines one by one, so that none waits for another.

    Taking the fastest groups of a step requires it. With a rate limit a group that may not begin yet must not hold up
    the others.
    """
    generator = config.generator
    takes_fastest = generator.over_provisioning > 0 and not evaluation
    return config.trainer.fully_async.enabled or takes_fastest or generator.rate_limit.enabled


def has_evaluation(trainer: TrainerConfig) -> bool:
    """True if training evaluates on data.val_data at any time."""
    return trainer.eval_before_train or trainer.eval_interval > 0


# -- Parts of a run and their slots


@dataclass(frozen=True)
class RunComponents:
    """The parts of a configuration that an entrypoint uses, and that must therefore be there."""

    train_data: bool = True
    val_data: bool = True
    learner: bool = True
    engines: bool = True
    rewards: bool = True
    """The reward model, if one is named."""
    tokenizer: bool = True
    """The policy's tokenizer."""


@dataclass(frozen=True)
class SlotCounts:
    """Dedicated slots of each role: 0 for a role that the run does not have, or that is colocated with another."""

    policy: int
    reference: int
    critic: int
    reward: int
    engines: int
    reference_colocated: bool
    """Colocated with the policy."""
    critic_colocated: bool
    reward_colocated: bool
    """Colocated with the policy, or with the engines if there is no policy."""
    engines_colocated: bool
    """Whether engines and learner take turns on the same slots."""

    @property
    def processes(self) -> int:
        """Ranks and replicas, those included that share the policy's slots."""
        sharing = self.reference_colocated + self.critic_colocated + self.reward_colocated
        own = self.policy + self.reference + self.critic + self.reward + self.engines
        return own + sharing * (self.policy or self.engines)

    @property
    def total(self) -> int:
        if self.engines_colocated:
            return max(self.policy, self.engines)
        return self.policy + self.reference + self.critic + self.reward + self.engines


def gpus_per_engine(generator: GeneratorConfig) -> int:
    """Accelerators of one engine: tensor x pipeline parallel."""
    return generator.inference_engine_tensor_parallel_size * generator.inference_engine_pipeline_parallel_size


def is_colocated(placement: PlacementConfig, role: str) -> bool:
    """True if a model of trainer.* ("ref", "critic" or "reward") has the policy's slots."""
    return placement.colocate_all or (role == "ref" and placement.colocate_policy_ref)


def num_ranks(placement: PlacementConfig, role: str) -> int:
    """Ranks of "policy", "ref" or "critic", or replicas of "reward", where they have slots of their own."""
    nodes: int = getattr(placement, f"{role}_num_nodes")
    per_node: int = getattr(placement, f"{role}_num_gpus_per_node")
    return nodes * per_node


def count_slots(
    placement: PlacementConfig,
    generator: GeneratorConfig,
    *,
    with_policy: bool = True,
    with_reference: bool = False,
    with_critic: bool = False,
    with_reward: bool = False,
    with_engines: bool = True,
) -> SlotCounts:
    """The slots of a run with these roles."""
    reference_colocated = with_reference and is_colocated(placement, "ref")
    critic_colocated = with_critic and is_colocated(placement, "critic")
    reward_colocated = with_reward and is_colocated(placement, "reward") and (with_policy or with_engines)
    policy = num_ranks(placement, "policy") if with_policy else 0
    engines = generator.num_inference_engines * gpus_per_engine(generator) if with_engines else 0
    return SlotCounts(
        policy=policy,
        reference=num_ranks(placement, "ref") if with_reference and not reference_colocated else 0,
        critic=num_ranks(placement, "critic") if with_critic and not critic_colocated else 0,
        reward=num_ranks(placement, "reward") if with_reward and not reward_colocated else 0,
        engines=engines,
        reference_colocated=reference_colocated,
        critic_colocated=critic_colocated,
        reward_colocated=reward_colocated,
        engines_colocated=placement.colocate_all and bool(policy) and bool(engines),
    )


def count_run_slots(config: Config, components: RunComponents) -> SlotCounts:
    """Return the slots of the run. What a plugin's algorithm needs counts once the plugin is imported."""
    algorithm = config.trainer.algorithm
    reference = needs_reference(algorithm) if components.engines else sft_needs_reference(algorithm)
    return count_slots(
        config.trainer.placement,
        config.generator,
        with_policy=components.learner,
        with_reference=components.learner and reference,
        with_critic=components.learner and components.engines and needs_critic(config.trainer),
        with_reward=components.rewards and config.trainer.reward.model.path is not None,
        with_engines=components.engines and config.generator.run_engines_locally,
    )


def num_environment_hosts(config: Config, components: RunComponents) -> int:
    """Environment hosts of the run: 0 where it has no environments, or they run beside the driver."""
    return config.environment.hosts if components.rewards else 0


def environment_host_cpus(config: Config, components: RunComponents) -> float:
    """CPUs of the cluster that the run's environment hosts take from its slots."""
    return num_environment_hosts(config, components) * config.environment.host_cpus


# -- Weight syncs


def has_colocated_engines(config: Config) -> bool:
    """True if the engines have the learner's slots, on accelerators or CPUs."""
    return config.trainer.placement.colocate_all and config.generator.run_engines_locally


def shares_gpu_memory(config: Config) -> bool:
    """True if engines and learner take turns on the same accelerators."""
    return config.device == "cuda" and has_colocated_engines(config)


def resolve_weight_sync_route(config: Config, *, is_single_node: bool = True) -> str:
    """The configured route, or for `auto` the fastest one of engines that support all.

    That is "ipc" (shared memory) if each engine is colocated with a trainer rank, else "broadcast" (the network).

    Args:
        one_node: Policy and engines have one node together.
    """
    generator, placement = config.generator, config.trainer.placement
    if generator.weight_sync_route != "auto":
        return generator.weight_sync_route
    if config.device == "cpu":  # all engines read rank 0's memory
        can_share = is_single_node and placement.policy_num_nodes == 1
    else:
        can_share = generator.num_inference_engines * gpus_per_engine(generator) <= num_ranks(placement, "policy")
    # The route shares memory by memfd, which only Linux has.
    return "ipc" if has_colocated_engines(config) and can_share and sys.platform == "linux" else "broadcast"


def prefers_adapter_sync(config: Config) -> bool:
    """True if engines that support it should get the policy's adapter separately instead of merged into the model.

    `auto`: only if merging into the engines' dtype would round most of the adapter away. In float32 it does not, and
    merged weights are served faster.
    """
    lora = config.trainer.policy.model.lora
    wanted = {"adapter": True, "merged": False, "auto": config.generator.model_dtype != "float32"}
    return lora.rank > 0 and wanted[lora.sync]


def sync_replaces_all_weights(config: Config) -> bool:
    """True if every sync replaces all that an engine holds as weights, so that it need not keep them until then.

    It does not where only changes are sent, nor does it replace adapters that an engine has a place for.
    """
    generator = config.generator
    partial = generator.weight_sync_only_changed or prefers_adapter_sync(config)
    return shares_gpu_memory(config) and not partial and "max_lora_rank" not in generator.engine_init_kwargs


def sleep_level(config: Config) -> int:
    """Return how deeply engines sleep until a sync.

    At level 2 they give up their weights, of which vLLM would keep a copy at level 1.
    """
    return 2 if sync_replaces_all_weights(config) else 1
