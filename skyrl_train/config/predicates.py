"""Decisions that depend on several keys: the models, corrections and resources that a run needs.

Each decision is made here once, for the checks, the plan and the builders of a run. Functions take the sections that
they read.

A function of an algorithm requests a model's output by naming it as an argument: `ref_logprobs`, `values`. For built-in
functions this is known by name, so that no module has to be imported. For a plugin's function it is known once the
function is registered.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, replace
from enum import StrEnum

from skyrl_train.config.algorithm import AlgorithmConfig, OffPolicyCorrectionConfig
from skyrl_train.config.choices import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, SFT_LOSSES
from skyrl_train.config.model import CriticConfig, PolicyConfig, RefConfig
from skyrl_train.config.schema import Config, GeneratorConfig, PlacementConfig, TrainerConfig
from skyrl_train.registry import find_registered

REFERENCE_ESTIMATORS = frozenset({"distillation"})
"""Built-in advantage estimators whose functions take `ref_logprobs`."""
REFERENCE_SFT_LOSSES = frozenset({"minor_sft"})
"""Built-in SFT losses whose functions take `ref_logprobs`."""
CRITIC_ESTIMATORS = frozenset({"gae"})
"""Built-in advantage estimators whose functions take `values`."""
GROUP_ESTIMATORS = frozenset({"grpo", "dr_grpo", "rloo", "reinforce++_baseline", "maxrl", "opo"})
"""Built-in advantage estimators that compare the responses of one prompt with each other."""


class ArgumentUse(StrEnum):
    """Use of an argument by a function."""

    REQUIRED = "required"
    OPTIONAL = "optional"
    ABSENT = "absent"
    UNKNOWN = "unknown"
    """The function is a plugin's that is not registered yet."""


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
    """True if rewards include a KL penalty. A penalty with coefficient 0 does not count."""
    return algorithm.use_kl_in_reward and algorithm.kl_loss_coef != 0


def kl_in_loss(algorithm: AlgorithmConfig) -> bool:
    """True if the loss includes a KL term. A term with coefficient 0 does not count."""
    return algorithm.use_kl_loss and algorithm.kl_loss_coef != 0


def measures_kl(algorithm: AlgorithmConfig) -> bool:
    """True if the loss or the rewards include the KL divergence from the reference."""
    return kl_in_loss(algorithm) or kl_in_reward(algorithm)


def needs_reference(algorithm: AlgorithmConfig) -> bool:
    """True if reinforcement learning reads the reference model's log-probs."""
    return measures_kl(algorithm) or _ref_logprobs_use(algorithm) in (ArgumentUse.REQUIRED, ArgumentUse.OPTIONAL)


def sft_needs_reference(algorithm: AlgorithmConfig) -> bool:
    """True if supervised fine-tuning reads the reference model's log-probs."""
    return _sft_ref_logprobs_use(algorithm) in (ArgumentUse.REQUIRED, ArgumentUse.OPTIONAL)


def may_need_reference(algorithm: AlgorithmConfig) -> bool:
    """True if a run may need a reference model: RL or SFT reads it, or an unregistered plugin's function may."""
    is_unknown = ArgumentUse.UNKNOWN in (_ref_logprobs_use(algorithm), _sft_ref_logprobs_use(algorithm))
    return is_unknown or needs_reference(algorithm) or sft_needs_reference(algorithm)


# -- Critic


def needs_critic(trainer: TrainerConfig) -> bool:
    """True if the advantage estimator requires values, or if it accepts them and a critic is configured."""
    values = _values_use(trainer.algorithm)
    return values is ArgumentUse.REQUIRED or (values is ArgumentUse.OPTIONAL and bool(trainer.critic.model.path))


def lacks_critic(trainer: TrainerConfig) -> bool:
    """True if the advantage estimator requires values and no critic is configured."""
    return _values_use(trainer.algorithm) is ArgumentUse.REQUIRED and not trainer.critic.model.path


def may_need_critic(algorithm: AlgorithmConfig) -> bool:
    """True if the advantage estimator takes values, or is an unregistered plugin's that may take them."""
    return _values_use(algorithm) is not ArgumentUse.ABSENT


# -- Losses and estimators by name


def may_use_loss(algorithm: AlgorithmConfig, *names: str) -> bool:
    """True if the configured policy loss is one of `names`, or is registered by a plugin.

    It is unknown which configuration keys a plugin's loss reads, so it may read those of `names`.
    """
    return algorithm.policy_loss_type in names or algorithm.policy_loss_type not in POLICY_LOSSES


def may_use_estimator(algorithm: AlgorithmConfig, *names: str) -> bool:
    """True if the configured advantage estimator is one of `names` or a plugin's, whose arguments are not known."""
    return algorithm.advantage_estimator in names or algorithm.advantage_estimator not in ADVANTAGE_ESTIMATORS


# -- Off-policy correction


def get_off_policy_correction(algorithm: AlgorithmConfig) -> OffPolicyCorrectionConfig:
    """Return the settings of the off-policy correction, with SkyRL's older keys (`use_tis`) translated."""
    correction = algorithm.off_policy_correction
    if not algorithm.use_tis or correction.tis_ratio_type is not None:
        return correction
    return replace(correction, tis_ratio_type="token", token_tis_ratio_clip_high=algorithm.tis_imp_ratio_cap)


def has_off_policy_correction(algorithm: AlgorithmConfig) -> bool:
    """True if any off-policy correction is turned on."""
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
    """Return the maximum length (tokens) of a sequence: prompt and response together."""
    return generator.max_input_length + generator.sampling_params.max_generate_length


# -- Sampling and evaluation


def max_staleness_steps(trainer: TrainerConfig) -> int:
    """Return the maximum age (steps) of the weights that sample a step's rollouts; 0 in synchronous training."""
    return trainer.fully_async.max_staleness_steps if trainer.fully_async.enabled else 0


def runs_groups_independently(config: Config, *, evaluation: bool = False) -> bool:
    """True if groups are sent to the engines independently, so that no group waits for another.

    Asynchronous training and over-provisioning, which takes the fastest groups of a step, require this. With a rate
    limit a group that may not start yet must not delay the others.

    Args:
        config: The configuration.
        evaluation: True for evaluation rollouts, to which over-provisioning does not apply.
    """
    generator = config.generator
    is_over_provisioned = generator.over_provisioning > 0 and not evaluation
    return config.trainer.fully_async.enabled or is_over_provisioned or generator.rate_limit.enabled


def has_evaluation(trainer: TrainerConfig) -> bool:
    """True if training evaluates on `data.val_data`, before the first step or after some steps."""
    return trainer.eval_before_train or trainer.eval_interval > 0


# -- Components of a run and their slots


@dataclass(frozen=True)
class RunComponents:
    """The parts of a run that an entrypoint uses. Their files and resources must exist."""

    train_data: bool = True
    val_data: bool = True
    learner: bool = True
    engines: bool = True
    rewards: bool = True
    """Environments and, if one is configured, the reward model."""
    tokenizer: bool = True
    """The policy's tokenizer."""


@dataclass(frozen=True)
class SlotCounts:
    """Numbers of dedicated slots per role. A slot is the resources of one rank: a GPU, or a share of CPUs.

    A role that the run does not have, or that is colocated with another role, has 0 slots.
    """

    policy: int
    reference: int
    critic: int
    reward: int
    engines: int
    reference_colocated: bool
    """True if the reference is colocated with the policy."""
    critic_colocated: bool
    """True if the critic is colocated with the policy."""
    reward_colocated: bool
    """True if the reward model is colocated with the policy, or with the engines if there is no policy."""
    engines_colocated: bool
    """True if engines and learner time-share the same slots."""

    @property
    def processes(self) -> int:
        """Number of ranks, replicas and engine ranks, including those that share the slots of another role."""
        num_sharing_roles = self.reference_colocated + self.critic_colocated + self.reward_colocated
        num_dedicated = self.policy + self.reference + self.critic + self.reward + self.engines
        return num_dedicated + num_sharing_roles * (self.policy or self.engines)

    @property
    def total(self) -> int:
        """Number of slots of the run. Slots that roles share are counted once."""
        if self.engines_colocated:
            return max(self.policy, self.engines)
        return self.policy + self.reference + self.critic + self.reward + self.engines


def gpus_per_engine(generator: GeneratorConfig) -> int:
    """Return the number of accelerators of one engine: tensor-parallel size times pipeline-parallel size."""
    return generator.inference_engine_tensor_parallel_size * generator.inference_engine_pipeline_parallel_size


def is_colocated(placement: PlacementConfig, role: str) -> bool:
    """True if the placement colocates a model ("ref", "critic" or "reward") with the policy."""
    return placement.colocate_all or (role == "ref" and placement.colocate_policy_ref)


def num_ranks(placement: PlacementConfig, role: str) -> int:
    """Return the number of ranks of a model that is not colocated.

    Args:
        placement: The placement.
        role: "policy", "ref" or "critic", or "reward" for the number of its replicas.
    """
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
    """Return the numbers of slots of a run.

    Args:
        placement: The placement.
        generator: Settings of the engines.
        with_policy: True if the run has a learner with the policy.
        with_reference: True if the run has a reference.
        with_critic: True if the run has a critic.
        with_reward: True if the run has a reward model.
        with_engines: True if the run starts engines.
    """
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
    """Return the numbers of slots of a run.

    Models that a plugin's algorithm needs are only counted after the plugin has been imported.

    Args:
        config: The configuration.
        components: Parts of the run that the entrypoint uses.
    """
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
    """Return the number of environment hosts of a run: 0 without environments, or if they run on the driver's node."""
    return config.environment.hosts if components.rewards else 0


def environment_host_cpus(config: Config, components: RunComponents) -> float:
    """Return the number of CPUs that all environment hosts of a run reserve together. Ranks cannot use them."""
    return num_environment_hosts(config, components) * config.environment.host_cpus


# -- Weight syncs


def has_colocated_engines(config: Config) -> bool:
    """True if the engines are colocated with the learner, on accelerators or CPUs."""
    return config.trainer.placement.colocate_all and config.generator.run_engines_locally


def shares_gpu_memory(config: Config) -> bool:
    """True if engines and learner time-share the same accelerators."""
    return config.device == "cuda" and has_colocated_engines(config)


class OffloadMode(StrEnum):
    """Memory that colocated engines and models free while the other side works: trainer.placement.colocate_offload."""

    NONE = "none"
    """Nothing moves."""
    KV_CACHE = "kv_cache"
    """Engines free their KV cache while models compute, and all weights stay."""
    ALL = "all"
    """Engines free weights and KV cache, and models move to host memory."""


def offload_mode(config: Config) -> OffloadMode:
    """Return the configured or planned mode of colocated engines and models; ALL if neither chose one."""
    return OffloadMode(config.trainer.placement.colocate_offload or OffloadMode.ALL)


def frees_all_memory(config: Config) -> bool:
    """True if time-shared engines and models free all of their accelerator's memory for each other."""
    return shares_gpu_memory(config) and offload_mode(config) is OffloadMode.ALL


def resolve_weight_sync_route(config: Config, *, is_single_node: bool = True) -> str:
    """Return the weight sync route: the configured one, or for `auto` the fastest route that all engines support.

    `auto` is "ipc" (shared memory) if every engine rank is colocated with a trainer rank, else "broadcast"
    (collectives).

    Args:
        config: The configuration.
        is_single_node: True if all ranks of policy and engines are on one node. It matters on CPUs only.
    """
    generator, placement = config.generator, config.trainer.placement
    if generator.weight_sync_route != "auto":
        return generator.weight_sync_route
    if config.device == "cpu":  # all engines read the memory of rank 0
        can_share = is_single_node and placement.policy_num_nodes == 1
    else:
        can_share = generator.num_inference_engines * gpus_per_engine(generator) <= num_ranks(placement, "policy")
    # The route shares memory through memfd, which only Linux has.
    return "ipc" if has_colocated_engines(config) and can_share and sys.platform == "linux" else "broadcast"


def has_expert_adapters(section: PolicyConfig | RefConfig | CriticConfig) -> bool:
    """True if the model of a section trains LoRA adapters on the experts of a mixture."""
    lora = None if isinstance(section, RefConfig) else section.model.lora
    return lora is not None and lora.rank > 0 and bool(lora.target_parameters)


def prefers_adapter_sync(config: Config) -> bool:
    """True if engines that support it should receive the policy's adapter separately, not merged into the model.

    With `auto` this depends on the engines' dtype. In half precision, merging would round most of the adapter's change
    away. In float32 it does not, and engines are faster with merged weights. Adapters on experts are always merged.
    """
    lora = config.trainer.policy.model.lora
    if has_expert_adapters(config.trainer.policy):
        return False
    is_separate = {"adapter": True, "merged": False, "auto": config.generator.model_dtype != "float32"}
    return lora.rank > 0 and is_separate[lora.sync]


def sync_replaces_all_weights(config: Config) -> bool:
    """True if every sync replaces all weights of an engine that frees its memory, so that it need not keep them.

    A sync that sends only changed tensors or only the adapter does not. Neither does a sync of an engine that reserves
    memory for adapters (`max_lora_rank`), which are not replaced.
    """
    generator = config.generator
    is_partial = generator.weight_sync_only_changed or prefers_adapter_sync(config)
    return frees_all_memory(config) and not is_partial and "max_lora_rank" not in generator.engine_init_kwargs


def sleep_level(config: Config) -> int:
    """Return the level at which engines sleep until a sync: 2 if every sync replaces all weights, else 1.

    At level 2 engines free their weights, too. At level 1 vLLM keeps a copy of them in host memory.
    """
    return 2 if sync_replaces_all_weights(config) else 1
