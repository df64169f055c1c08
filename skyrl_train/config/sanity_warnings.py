"""Warnings about keys without effect, about SkyRL's ignored keys, and about unusual numbers.

EFFECT_CONDITIONS lists the conditions under which keys have an effect. Keys and sections that are not in it always have
an effect, except those in IGNORED_KEYS.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from skyrl_train.config.choices import ENVIRONMENTS
from skyrl_train.config.keys import Key, all_keys, get_value, value_keys
from skyrl_train.config.predicates import (
    has_colocated_engines,
    has_off_policy_correction,
    is_colocated,
    kl_in_reward,
    may_need_critic,
    may_need_reference,
    may_use_estimator,
    may_use_loss,
    measures_kl,
    needs_critic,
    runs_groups_independently,
)
from skyrl_train.config.problems import format_value
from skyrl_train.config.schema import AlgorithmConfig, Config, PlacementConfig


@dataclass(frozen=True)
class EffectCondition:
    """A condition under which some keys and sections have an effect."""

    keys: tuple[str, ...]
    """Dotted names of keys and sections. The condition of a section applies to everything below it."""
    is_met: Callable[[Config], bool]
    """Function that returns True if the keys have an effect. It takes a resolved and validated configuration."""
    advice: str
    """Sentences of the warning if the condition is not met and a key is set."""


def _condition(keys: str, advice: str, is_met: Callable[[Config], bool]) -> EffectCondition:
    """Return a condition of keys, given in one text. `*` stands for policy, ref and critic."""
    names = (name.replace("*", role) for name in keys.split() for role in ("policy", "ref", "critic"))
    return EffectCondition(tuple(dict.fromkeys(names)), is_met, advice)


def _when_equal(keys: str, other: str, value: Any) -> EffectCondition:
    return _condition(
        keys, f"It requires {other}={format_value(value)}.", lambda config: get_value(config, other) == value
    )


def _when_set(keys: str, other: str) -> EffectCondition:
    return _condition(keys, f"It requires {other}.", lambda config: get_value(config, other) is not None)


def _when_above(keys: str, other: str, low: int) -> EffectCondition:
    return _condition(keys, f"It requires {other} above {low}.", lambda config: get_value(config, other) > low)


def _for_algorithm(keys: str, advice: str, is_met: Callable[[AlgorithmConfig], bool]) -> EffectCondition:
    """Return a condition on trainer.algorithm of keys in that section, which are named relative to it."""
    names = " ".join(f"trainer.algorithm.{name}" for name in keys.split())
    return _condition(names, advice, lambda config: is_met(config.trainer.algorithm))


def _for_loss(keys: str, *losses: str) -> EffectCondition:
    advice = f"It requires policy_loss_type={' or '.join(losses)}."
    return _for_algorithm(keys, advice, lambda algorithm: may_use_loss(algorithm, *losses))


def _for_estimator(keys: str, *estimators: str) -> EffectCondition:
    advice = f"It requires advantage_estimator={' or '.join(estimators)}."
    return _for_algorithm(keys, advice, lambda algorithm: may_use_estimator(algorithm, *estimators))


def _for_environment(name: str) -> EffectCondition:
    advice = f"It requires env_class={name}."
    return _condition(f"environment.skyrl_gym.{name}", advice, lambda config: config.environment.env_class == name)


def _has_effective_size(placement: PlacementConfig, role: str) -> bool:
    """True if a role's numbers of nodes and ranks apply: it is not colocated, or they equal the policy's."""
    size, policy_size = (
        (getattr(placement, f"{name}_num_nodes"), getattr(placement, f"{name}_num_gpus_per_node"))
        for name in (role, "policy")
    )
    return size == policy_size or not is_colocated(placement, role)


def _can_batch_turns(config: Config) -> bool:
    return config.generator.max_turns > 1 and not runs_groups_independently(config)


CLIPPING_LOSSES = ("clip_cov", "dual_clip", "gmpo", "gspo", "regular", "rollout_is")
"""Losses that take `eps_clip_low` and `eps_clip_high`, or whose token selection does."""

EFFECT_CONDITIONS = (
    # -- trainer.algorithm
    _for_algorithm(
        "kl_ctrl",
        "It requires kl_ctrl.type=adaptive with use_kl_in_reward=true.",
        lambda algorithm: algorithm.kl_ctrl.type == "adaptive" and kl_in_reward(algorithm),
    ),
    _for_algorithm(
        "kl_estimator_type",
        "It requires trainer.algorithm.use_kl_loss=true or use_kl_in_reward=true, with kl_loss_coef above 0.",
        measures_kl,
    ),
    _for_algorithm(
        "kl_loss_coef",
        "It requires trainer.algorithm.use_kl_loss=true or use_kl_in_reward=true.",
        lambda algorithm: algorithm.use_kl_loss or algorithm.use_kl_in_reward,
    ),
    _when_equal("trainer.algorithm.entropy_loss_coef", "trainer.algorithm.use_entropy_loss", True),
    _for_estimator("grpo_norm_by_std", "grpo"),
    _for_estimator("gamma", "gae", "reinforce++"),
    _for_estimator("lambd", "gae"),
    _for_algorithm(
        "eps_clip_low eps_clip_high",
        f"It requires policy_loss_type={' or '.join(CLIPPING_LOSSES)}.",
        lambda algorithm: may_use_loss(algorithm, *CLIPPING_LOSSES),
    ),
    _for_loss("clip_ratio_c", "dual_clip"),
    _for_loss("sapo", "sapo"),
    _for_loss("clip_cov", "clip_cov"),
    _for_loss("kl_cov", "kl_cov"),
    _for_loss("cispo", "cispo"),
    _for_loss("dppo", "dppo_tv", "dppo_kl"),
    _for_algorithm(
        "max_seq_len",
        "It requires loss_reduction=seq_mean_token_sum_norm.",
        lambda algorithm: algorithm.loss_reduction == "seq_mean_token_sum_norm",
    ),
    _for_algorithm(
        "tis_imp_ratio_cap",
        "It requires use_tis=true with off_policy_correction.tis_ratio_type=null, which has separate bounds.",
        lambda algorithm: algorithm.use_tis and algorithm.off_policy_correction.tis_ratio_type is None,
    ),
    _for_algorithm(
        "off_policy_correction",
        "No correction is on: set tis_ratio_type, sequence_mask_metric or a threshold of this section.",
        has_off_policy_correction,
    ),
    _for_algorithm(
        "off_policy_correction.token_tis_ratio_clip_high",
        "It requires off_policy_correction.tis_ratio_type=token. The bound of use_tis is tis_imp_ratio_cap.",
        lambda algorithm: algorithm.off_policy_correction.tis_ratio_type == "token",
    ),
    _for_algorithm(
        "off_policy_correction.sequence_tis_ratio_clip_high",
        "It requires off_policy_correction.tis_ratio_type=sequence.",
        lambda algorithm: algorithm.off_policy_correction.tis_ratio_type == "sequence",
    ),
    _for_algorithm(
        "off_policy_correction.geo_mask_high off_policy_correction.geo_mask_low",
        "It requires off_policy_correction.sequence_mask_metric=geometric.",
        lambda algorithm: algorithm.off_policy_correction.sequence_mask_metric == "geometric",
    ),
    _for_algorithm(
        "off_policy_correction.product_mask_high off_policy_correction.product_mask_low",
        "It requires off_policy_correction.sequence_mask_metric=product.",
        lambda algorithm: algorithm.off_policy_correction.sequence_mask_metric == "product",
    ),
    _when_set("trainer.algorithm.dynamic_sampling", "trainer.algorithm.dynamic_sampling.type"),
    _when_equal(
        "trainer.algorithm.dynamic_sampling.min_replace_ratio", "trainer.algorithm.dynamic_sampling.type", "replace"
    ),
    _when_above("trainer.algorithm.overlong_buffer.penalty_factor", "trainer.algorithm.overlong_buffer.len", 0),
    # -- models and their placement
    _condition(
        "trainer.ref trainer.update_ref_every_epoch",
        "There is no reference: set trainer.algorithm.use_kl_loss or use_kl_in_reward, and kl_loss_coef above 0.",
        lambda config: may_need_reference(config.trainer.algorithm),
    ),
    _condition(
        "trainer.critic trainer.critic_mini_batch_size trainer.algorithm.value_head_prefix trainer.algorithm.value_clip"
        " trainer.placement.critic_num_nodes trainer.placement.critic_num_gpus_per_node",
        "It requires an advantage estimator with a critic (gae).",
        lambda config: may_need_critic(config.trainer.algorithm),
    ),
    _when_set(
        "trainer.placement.reward_num_nodes trainer.placement.reward_num_gpus_per_node"
        " trainer.reward.coef trainer.reward.model_config_kwargs",
        "trainer.reward.model.path",
    ),
    _condition(
        "trainer.placement.ref_num_nodes trainer.placement.ref_num_gpus_per_node",
        "The reference uses the policy's ranks: set trainer.placement.colocate_policy_ref and colocate_all to false.",
        lambda config: _has_effective_size(config.trainer.placement, "ref"),
    ),
    _condition(
        "trainer.placement.critic_num_nodes trainer.placement.critic_num_gpus_per_node",
        "The critic uses the policy's ranks: set trainer.placement.colocate_all to false.",
        lambda config: not needs_critic(config.trainer) or _has_effective_size(config.trainer.placement, "critic"),
    ),
    _condition(
        "trainer.placement.reward_num_nodes trainer.placement.reward_num_gpus_per_node",
        "In training the reward model uses the policy's GPUs: set trainer.placement.colocate_all to false.",
        lambda config: _has_effective_size(config.trainer.placement, "reward"),
    ),
    _condition(
        "trainer.placement.engine_strategy trainer.placement.engine_node_labels",
        "It requires engines that the run starts on separate GPUs: set trainer.placement.colocate_all to false.",
        lambda config: not config.trainer.placement.colocate_all and config.generator.run_engines_locally,
    ),
    _condition(
        "trainer.placement.colocate_offload",
        "It requires engines that share GPUs with the trainer: trainer.placement.colocate_all=true.",
        has_colocated_engines,
    ),
    _condition(
        "trainer.*.fsdp_config",
        "It requires trainer.strategy=fsdp2.",
        lambda config: config.trainer.strategy not in ("single", "deepspeed"),
    ),
    _condition(
        "trainer.*.fsdp_config.cpu_offload",
        "On a CPU everything is in host memory.",
        lambda config: config.device != "cpu",
    ),
    _when_equal("trainer.*.deepspeed_config", "trainer.strategy", "deepspeed"),
    _condition(
        "trainer.ref.deepspeed_config.offload_optimizer", "The reference has no optimizer.", lambda config: False
    ),
    *(
        _when_equal(f"trainer.{role}.optimizer_config.momentum", f"trainer.{role}.optimizer_config.name", "muon")
        for role in ("policy", "critic")
    ),
    _when_above("trainer.policy.model.lora", "trainer.policy.model.lora.rank", 0),
    _when_above("trainer.critic.model.lora", "trainer.critic.model.lora.rank", 0),
    # -- the training loop
    _when_equal("trainer.fully_async", "trainer.fully_async.enabled", True),
    _when_equal("trainer.resume_path", "trainer.resume_mode", "from_path"),
    _when_above("trainer.async_checkpoint", "trainer.ckpt_interval", 0),
    _condition(
        "trainer.keep_rollouts_gb",
        "trainer.keep_rollouts=none keeps no rollouts.",
        lambda config: config.trainer.keep_rollouts != "none",
    ),
    _when_set("trainer.metrics_host", "trainer.metrics_port"),
    # -- engines
    _condition(
        "generator.num_inference_engines generator.inference_engine_tensor_parallel_size"
        " generator.inference_engine_pipeline_parallel_size generator.inference_engine_expert_parallel_size"
        " generator.inference_engine_data_parallel_size generator.batch_invariant generator.engine_init_kwargs"
        " generator.speculative"
        " trainer.placement.nodes_per_engine",
        "With generator.run_engines_locally=false it must be set where the servers are started.",
        lambda config: config.generator.run_engines_locally,
    ),
    _when_equal(
        "generator.external_server_urls generator.remote_inference_engine_urls", "generator.run_engines_locally", False
    ),
    _condition(
        "generator.speculative.num_speculative_tokens",
        "It requires generator.speculative.method.",
        lambda config: config.generator.speculative.method is not None,
    ),
    _when_equal(
        "generator.speculative.prompt_lookup_min generator.speculative.prompt_lookup_max",
        "generator.speculative.method",
        "ngram",
    ),
    _condition(
        "generator.weight_sync_folder",
        "It requires generator.weight_sync_route=checkpoint or generator.run_engines_locally=false.",
        lambda config: config.generator.weight_sync_route == "checkpoint" or not config.generator.run_engines_locally,
    ),
    _condition(
        "generator.enable_prefix_caching generator.enable_chunked_prefill generator.max_num_batched_tokens"
        " generator.gpu_memory_utilization",
        "The transformers engine does not have this feature.",
        lambda config: config.generator.backend != "transformers",
    ),
    _condition(
        "generator.gpu_memory_utilization",
        "On a CPU vLLM allocates a cache of the size that it needs.",
        lambda config: config.generator.backend != "vllm" or config.device != "cpu",
    ),
    _when_equal(
        "generator.http_endpoint_host generator.http_endpoint_port generator.served_model_name",
        "generator.enable_http_endpoint",
        True,
    ),
    # -- rollouts and environments
    _when_set("generator.chat_template.source", "generator.chat_template.name_or_path"),
    _when_above(
        "generator.use_conversation_multi_turn generator.append_eos_token_after_stop_str_in_multi_turn"
        " generator.retokenize_chat_history generator.step_wise_trajectories",
        "generator.max_turns",
        1,
    ),
    _condition(
        "generator.append_eos_token_after_stop_str_in_multi_turn generator.retokenize_chat_history"
        " generator.step_wise_trajectories",
        "It requires generator.use_conversation_multi_turn=true. A single message has neither turns nor a history.",
        lambda config: config.generator.use_conversation_multi_turn,
    ),
    _condition(
        "generator.batched",
        "Engines always batch requests. The key requires generator.max_turns above 1, and neither fully_async, "
        "over_provisioning nor rate_limit.",
        _can_batch_turns,
    ),
    _when_equal("generator.rate_limit", "generator.rate_limit.enabled", True),
    _when_above(
        "environment.host_cpus environment.host_resources trainer.timeouts.environment_hosts_s", "environment.hosts", 0
    ),
    *(_for_environment(name) for name in ENVIRONMENTS if f"environment.skyrl_gym.{name}" in all_keys()),
)


@cache
def get_conditions(name: str) -> tuple[EffectCondition, ...]:
    """Return the conditions of a key or section itself, without those of the sections around it.

    A key has an effect if all of its conditions are met. The first one that is not met is reported.
    """
    return tuple(condition for condition in EFFECT_CONDITIONS if name in condition.keys)


_MEGATRON = "Only Megatron reads it. trainer.policy.fsdp_config and tensor_parallel_size shard models instead."
_OFFLOAD = "trainer.placement.colocate_offload says what moves to host memory while engines generate."
_LOGPROBS = "The log-prob of every sampled token is always returned."

_TYPED_ESCAPE = re.compile(r"\\([nrt])")

IGNORED_KEYS = {
    "trainer.policy.model.lora.lora_sync_path": "generator.weight_sync_route sends adapters to the engines.",
    "trainer.policy.optimizer_config.offload_after_step": _OFFLOAD,
    "trainer.critic.optimizer_config.offload_after_step": _OFFLOAD,
    "trainer.policy.megatron_config": _MEGATRON,
    "trainer.ref.megatron_config": _MEGATRON,
    "trainer.log_path": "Logs and metrics are written to the run's folder, trainer.ckpt_path.",
    "trainer.use_sample_packing": "Batches are always packed without padding.",
    "trainer.flash_attn": (
        "Attention without padding uses FlashAttention-3 or 4 if one is installed, else PyTorch's kernels, which are "
        "flash attention where PyTorch supports it."
    ),
    "generator.async_engine": "Engines always run asynchronously.",
    "generator.vllm_v1_disable_multiproc": "vLLM's scheduler always runs in the engine's own process.",
    "generator.fully_sharded_loras": "Set generator.engine_init_kwargs.fully_sharded_loras, which vLLM reads.",
    "generator.enable_ray_prometheus_stats": "Metrics of engines are logged with the run's metrics, under engines/.",
    "generator.override_existing_update_group": "A server always leaves its weight group when a trainer connects.",
    "generator.external_proxy_url": "Requests are sent directly to the servers of external_server_urls.",
    "generator.sampling_params.logprobs": _LOGPROBS,
    "generator.eval_sampling_params.logprobs": _LOGPROBS,
}
"""SkyRL's keys and sections that are accepted and never have an effect -> how this package behaves instead."""


def find_sanity_warnings(config: Config, defaults: Config) -> Iterator[str]:
    """Yield a warning for each key that is not at its default and has no effect or an unusual number.

    Args:
        config: The resolved and validated configuration.
        defaults: The default configuration, adapted to the same device.
    """
    for name, key in value_keys().items():
        value = get_value(config, name)
        if value in (_get_default(config, defaults, name), key.metadata.skyrl_default):
            continue
        if advice := _no_effect_advice(config, name):
            yield f"{name}={format_value(value)} has no effect. {advice}"
        elif (typical := key.metadata.typical_range) is not None and value != 0 and value not in typical:
            yield (
                f"{name}={format_value(value)} is unusual. Most runs use {typical.low:g} to {typical.high:g}. Check "
                "the number."
            )


def find_stop_string_warnings(config: Config) -> Iterator[str]:
    """Yield a warning for each stop string with a literal escape sequence such as a backslash and an n.

    Shells do not convert such a sequence to a control character.
    """
    for name in ("sampling_params", "eval_sampling_params"):
        for text in getattr(config.generator, name).stop or []:
            if match := _TYPED_ESCAPE.search(text):
                yield (
                    f"generator.{name}.stop={format_value(text)} contains a backslash and the letter {match[1]}, which "
                    "are not converted to a control character. For the control character write "
                    f"$'generator.{name}.stop=[\"\\{match[1]}\"]'."
                )


def find_evaluation_warnings(config: Config) -> Iterator[str]:
    """Yield a warning for each setting that makes evaluation results misleading.

    These are several samples per prompt with greedy sampling, and stop strings that only training has.
    """
    generator, sampling = config.generator, config.generator.eval_sampling_params
    if not config.data.val_data:
        return
    samples = {"eval_n_samples_per_prompt": generator.eval_n_samples_per_prompt}
    samples |= {
        f"eval_n_samples_by_data_source.{source}": count
        for source, count in generator.eval_n_samples_by_data_source.items()
    }
    several = [f"generator.{key}={count}" for key, count in samples.items() if count > 1]
    if several and sampling.temperature == 0:
        yield (
            f"{several[0]} with generator.eval_sampling_params.temperature=0.0: all "
            "samples of a prompt are equal. Set the number of samples to 1, or the temperature above 0."
        )
    training, evaluation = generator.sampling_params.stop or [], sampling.stop or []
    if missing := [text for text in training if text not in evaluation]:
        yield (
            f"generator.eval_sampling_params.stop={format_value(sampling.stop)} does not contain "
            f"{format_value(missing)} of generator.sampling_params.stop, so evaluation does not end turns where "
            "training does. Add them."
        )


def _no_effect_advice(config: Config, name: str) -> str | None:
    """Return the advice of the first condition that prevents a key's effect, or None if the key has an effect.

    The conditions of the innermost section come first, because they describe what the key belongs to. The key's own
    conditions and those of the outer sections follow.
    """
    outer = list(_enclosing_sections(name))
    for key in (*outer[:1], value_keys()[name], *outer[1:]):
        if advice := IGNORED_KEYS.get(key.name):
            return advice
        for condition in get_conditions(key.name):
            if not condition.is_met(config):
                return condition.advice
    return None


def _enclosing_sections(name: str) -> Iterator[Key]:
    """Yield the sections that contain a key, innermost first."""
    while name := name.rpartition(".")[0]:
        yield all_keys()[name]


def _get_default(config: Config, defaults: Config, name: str) -> Any:
    """Return a key's default. The default of a key that follows another key is the other key's configured value."""
    followed = str(value_keys()[name].default).removeprefix("${").removesuffix("}")
    return get_value(config, followed) if followed in value_keys() else get_value(defaults, name)
