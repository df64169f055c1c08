"""Warnings: keys that have no effect, SkyRL's ignored keys among them, and numbers that hardly any run has.

NEEDS says what must hold for a key to have an effect. Keys and sections that are not named there always have one.
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
    """Keys and sections that have an effect only while `holds` is true of the configuration, resolved and validated."""

    keys: tuple[str, ...]
    """Dotted names; `*` stands for policy, ref and critic. A section shares its need with everything below it."""
    is_met: Callable[[Config], bool]
    advice: str
    """The warning if a key is set anyway."""


def _condition(keys: str, advice: str, is_met: Callable[[Config], bool]) -> EffectCondition:
    names = (name.replace("*", role) for name in keys.split() for role in ("policy", "ref", "critic"))
    return EffectCondition(tuple(dict.fromkeys(names)), is_met, advice)


def _when_equal(keys: str, other: str, value: Any) -> EffectCondition:
    """Another key has this value."""
    return _condition(
        keys, f"It belongs to {other}={format_value(value)}.", lambda config: get_value(config, other) == value
    )


def _when_set(keys: str, other: str) -> EffectCondition:
    """Another key is not null."""
    return _condition(keys, f"It belongs to {other}.", lambda config: get_value(config, other) is not None)


def _when_above(keys: str, other: str, low: int) -> EffectCondition:
    """Another key is a larger number than this."""
    return _condition(keys, f"It belongs to {other} above {low}.", lambda config: get_value(config, other) > low)


def _for_algorithm(keys: str, advice: str, is_met: Callable[[AlgorithmConfig], bool]) -> EffectCondition:
    """Keys of trainer.algorithm, and what must hold for that section."""
    names = " ".join(f"trainer.algorithm.{name}" for name in keys.split())
    return _condition(names, advice, lambda config: is_met(config.trainer.algorithm))


def _for_loss(keys: str, *losses: str) -> EffectCondition:
    advice = f"It belongs to policy_loss_type={' or '.join(losses)}."
    return _for_algorithm(keys, advice, lambda algorithm: may_use_loss(algorithm, *losses))


def _for_estimator(keys: str, *estimators: str) -> EffectCondition:
    advice = f"It belongs to advantage_estimator={' or '.join(estimators)}."
    return _for_algorithm(keys, advice, lambda algorithm: may_use_estimator(algorithm, *estimators))


def _for_environment(name: str) -> EffectCondition:
    advice = f"It belongs to env_class={name}."
    return _condition(f"environment.skyrl_gym.{name}", advice, lambda config: config.environment.env_class == name)


def _shape_counts(placement: PlacementConfig, role: str) -> bool:
    """True if a role's numbers of nodes and ranks are read: it is dedicated, or they are the policy's anyway."""
    own, policy = (
        (getattr(placement, f"{name}_num_nodes"), getattr(placement, f"{name}_num_gpus_per_node"))
        for name in (role, "policy")
    )
    return own == policy or not is_colocated(placement, role)


def _can_batch_turns(config: Config) -> bool:
    return config.generator.max_turns > 1 and not runs_groups_independently(config)


CLIPPING_LOSSES = ("clip_cov", "dual_clip", "gmpo", "gspo", "regular", "rollout_is")
"""Losses that ask for `eps_clip_low` and `eps_clip_high`, or whose choice of tokens does."""

EFFECT_CONDITIONS = (
    # -- trainer.algorithm
    _for_algorithm(
        "kl_ctrl",
        "It belongs to kl_ctrl.type=adaptive with use_kl_in_reward=true.",
        lambda algorithm: algorithm.kl_ctrl.type == "adaptive" and kl_in_reward(algorithm),
    ),
    _for_algorithm(
        "kl_estimator_type",
        "It belongs to trainer.algorithm.use_kl_loss=true or use_kl_in_reward=true, with kl_loss_coef above 0.",
        measures_kl,
    ),
    _for_algorithm(
        "kl_loss_coef",
        "It belongs to trainer.algorithm.use_kl_loss=true or use_kl_in_reward=true.",
        lambda algorithm: algorithm.use_kl_loss or algorithm.use_kl_in_reward,
    ),
    _when_equal("trainer.algorithm.entropy_loss_coef", "trainer.algorithm.use_entropy_loss", True),
    _for_estimator("grpo_norm_by_std", "grpo"),
    _for_estimator("gamma", "gae", "reinforce++"),
    _for_estimator("lambd", "gae"),
    _for_algorithm(
        "eps_clip_low eps_clip_high",
        f"It belongs to policy_loss_type={', '.join(CLIPPING_LOSSES)}.",
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
        "It belongs to loss_reduction=seq_mean_token_sum_norm.",
        lambda algorithm: algorithm.loss_reduction == "seq_mean_token_sum_norm",
    ),
    _for_algorithm(
        "tis_imp_ratio_cap",
        "It belongs to use_tis=true alone; off_policy_correction.tis_ratio_type has bounds beside it.",
        lambda algorithm: algorithm.use_tis and algorithm.off_policy_correction.tis_ratio_type is None,
    ),
    _for_algorithm(
        "off_policy_correction",
        "It bounds what tis_ratio_type, sequence_mask_metric or a threshold of it turns on.",
        has_off_policy_correction,
    ),
    _for_algorithm(
        "off_policy_correction.token_tis_ratio_clip_high",
        "It belongs to off_policy_correction.tis_ratio_type=token; use_tis alone has tis_imp_ratio_cap.",
        lambda algorithm: algorithm.off_policy_correction.tis_ratio_type == "token",
    ),
    _for_algorithm(
        "off_policy_correction.sequence_tis_ratio_clip_high",
        "It belongs to off_policy_correction.tis_ratio_type=sequence.",
        lambda algorithm: algorithm.off_policy_correction.tis_ratio_type == "sequence",
    ),
    _for_algorithm(
        "off_policy_correction.geo_mask_high off_policy_correction.geo_mask_low",
        "It belongs to off_policy_correction.sequence_mask_metric=geometric.",
        lambda algorithm: algorithm.off_policy_correction.sequence_mask_metric == "geometric",
    ),
    _for_algorithm(
        "off_policy_correction.product_mask_high off_policy_correction.product_mask_low",
        "It belongs to off_policy_correction.sequence_mask_metric=product.",
        lambda algorithm: algorithm.off_policy_correction.sequence_mask_metric == "product",
    ),
    _when_set("trainer.algorithm.dynamic_sampling", "trainer.algorithm.dynamic_sampling.type"),
    _when_equal(
        "trainer.algorithm.dynamic_sampling.min_replace_ratio", "trainer.algorithm.dynamic_sampling.type", "replace"
    ),
    _when_above("trainer.algorithm.overlong_buffer.penalty_factor", "trainer.algorithm.overlong_buffer.len", 0),
    # -- models and where they are
    _condition(
        "trainer.ref trainer.update_ref_every_epoch",
        "There is no reference: set trainer.algorithm.use_kl_loss or use_kl_in_reward, and kl_loss_coef above 0.",
        lambda config: may_need_reference(config.trainer.algorithm),
    ),
    _condition(
        "trainer.critic trainer.critic_mini_batch_size trainer.algorithm.value_head_prefix trainer.algorithm.value_clip"
        " trainer.placement.critic_num_nodes trainer.placement.critic_num_gpus_per_node",
        "It belongs to advantage estimators with a critic (gae).",
        lambda config: may_need_critic(config.trainer.algorithm),
    ),
    _when_set(
        "trainer.placement.reward_num_nodes trainer.placement.reward_num_gpus_per_node"
        " trainer.reward.coef trainer.reward.model_config_kwargs",
        "trainer.reward.model.path",
    ),
    _condition(
        "trainer.placement.ref_num_nodes trainer.placement.ref_num_gpus_per_node",
        "The reference has the policy's ranks: set trainer.placement.colocate_policy_ref and colocate_all to false.",
        lambda config: _shape_counts(config.trainer.placement, "ref"),
    ),
    _condition(
        "trainer.placement.critic_num_nodes trainer.placement.critic_num_gpus_per_node",
        "The critic has the policy's ranks: set trainer.placement.colocate_all to false.",
        lambda config: not needs_critic(config.trainer) or _shape_counts(config.trainer.placement, "critic"),
    ),
    _condition(
        "trainer.placement.reward_num_nodes trainer.placement.reward_num_gpus_per_node",
        "In training the reward model has the policy's slots: set trainer.placement.colocate_all to false.",
        lambda config: _shape_counts(config.trainer.placement, "reward"),
    ),
    _condition(
        "trainer.placement.engine_strategy trainer.placement.engine_node_labels",
        "Engines have the slots of the models, or are elsewhere: set trainer.placement.colocate_all to false.",
        lambda config: not config.trainer.placement.colocate_all and config.generator.run_engines_locally,
    ),
    _condition(
        "trainer.*.fsdp_config",
        "It belongs to trainer.strategy=fsdp2.",
        lambda config: config.trainer.strategy not in ("single", "deepspeed"),
    ),
    _condition(
        "trainer.*.fsdp_config.cpu_offload",
        "On a CPU everything lies in host memory.",
        lambda config: config.device != "cpu",
    ),
    _when_equal("trainer.*.deepspeed_config", "trainer.strategy", "deepspeed"),
    _condition(
        "trainer.ref.deepspeed_config.offload_optimizer", "The reference has no optimizer.", lambda config: False
    ),
    _when_above("trainer.policy.model.lora", "trainer.policy.model.lora.rank", 0),
    _when_above("trainer.critic.model.lora", "trainer.critic.model.lora.rank", 0),
    # -- the loop
    _when_equal("trainer.fully_async", "trainer.fully_async.enabled", True),
    _when_equal("trainer.resume_path", "trainer.resume_mode", "from_path"),
    _when_above("trainer.async_checkpoint", "trainer.ckpt_interval", 0),
    _condition(
        "trainer.keep_rollouts_gb",
        "trainer.keep_rollouts=none does without it.",
        lambda config: config.trainer.keep_rollouts != "none",
    ),
    _when_set("trainer.metrics_host", "trainer.metrics_port"),
    # -- engines
    _condition(
        "generator.num_inference_engines generator.inference_engine_tensor_parallel_size"
        " generator.inference_engine_pipeline_parallel_size generator.inference_engine_expert_parallel_size"
        " generator.inference_engine_data_parallel_size generator.batch_invariant generator.engine_init_kwargs"
        " trainer.placement.nodes_per_engine",
        "With generator.run_engines_locally=false whoever starts a server says that to it.",
        lambda config: config.generator.run_engines_locally,
    ),
    _when_equal(
        "generator.external_server_urls generator.remote_inference_engine_urls", "generator.run_engines_locally", False
    ),
    _condition(
        "generator.weight_sync_folder",
        "It belongs to generator.weight_sync_route=checkpoint and to servers.",
        lambda config: config.generator.weight_sync_route == "checkpoint" or not config.generator.run_engines_locally,
    ),
    _condition(
        "generator.enable_prefix_caching generator.enable_chunked_prefill generator.max_num_batched_tokens"
        " generator.gpu_memory_utilization",
        "The transformers engine has nothing of the kind.",
        lambda config: config.generator.backend != "transformers",
    ),
    _condition(
        "generator.gpu_memory_utilization",
        "On a CPU vLLM has a cache of the size that it needs.",
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
        "It belongs to generator.use_conversation_multi_turn=true: one message has no turns to end, and no history.",
        lambda config: config.generator.use_conversation_multi_turn,
    ),
    _condition(
        "generator.batched",
        "Engines always batch requests. It belongs to max_turns above 1, without over_provisioning and rate_limit.",
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
    """What must hold for a key or a section itself; of those that do not, the first one is reported."""
    return tuple(need for need in EFFECT_CONDITIONS if name in need.keys)


_MEGATRON = "Only Megatron reads it; here trainer.policy.fsdp_config and tensor_parallel_size divide models."
_OFFLOAD = "The whole trainer leaves the accelerator while engines generate, with trainer.placement.colocate_all=true."
_LOGPROBS = "The log-prob of every sampled token is always returned."

_TYPED_ESCAPE = re.compile(r"\\([nrt])")

IGNORED_KEYS = {
    "trainer.policy.model.lora.lora_sync_path": "Engines get them, merged or not, by generator.weight_sync_route.",
    "trainer.policy.optimizer_config.offload_after_step": _OFFLOAD,
    "trainer.critic.optimizer_config.offload_after_step": _OFFLOAD,
    "trainer.policy.megatron_config": _MEGATRON,
    "trainer.ref.megatron_config": _MEGATRON,
    "trainer.log_path": "A run's logs and metrics are in its folder, trainer.ckpt_path.",
    "trainer.use_sample_packing": "Batches are always packed without padding.",
    "trainer.flash_attn": (
        "Attention without padding uses FlashAttention-3 where it is installed, else PyTorch's own kernels: flash "
        "attention wherever they have it."
    ),
    "generator.async_engine": "Engines always run asynchronously.",
    "generator.vllm_v1_disable_multiproc": "vLLM's scheduler always runs in the engine's own process.",
    "generator.fully_sharded_loras": "Say it to vLLM: generator.engine_init_kwargs.fully_sharded_loras.",
    "generator.enable_ray_prometheus_stats": "Engines' metrics are logged with the run's, under engines/.",
    "generator.override_existing_update_group": "A server leaves its weight group when a trainer connects.",
    "generator.external_proxy_url": "Requests go to the servers of external_server_urls, without a router.",
    "generator.sampling_params.logprobs": _LOGPROBS,
    "generator.eval_sampling_params.logprobs": _LOGPROBS,
}
"""SkyRL's keys and sections that are accepted and never have an effect -> what does it instead."""


def find_sanity_warnings(config: Config, defaults: Config) -> Iterator[str]:
    """Yield a line for each key that differs from its default if nothing reads it or if its number is unusual."""
    for name, key in value_keys().items():
        value = get_value(config, name)
        if value in (_default(config, defaults, name), key.metadata.skyrl_default):
            continue
        if advice := _why_not_read(config, name):
            yield f"{name}={format_value(value)} has no effect here. {advice}"
        elif (usual := key.metadata.typical_range) is not None and value != 0 and value not in usual:
            yield f"{name}={format_value(value)} is unusual. Most runs use {usual.low:g} to {usual.high:g}; check the number."


def find_stop_string_warnings(config: Config) -> Iterator[str]:
    """Yield a line for each stop string with a typed escape, such as a backslash and an n, which no shell converts."""
    for name in ("sampling_params", "eval_sampling_params"):
        for text in getattr(config.generator, name).stop or []:
            if found := _TYPED_ESCAPE.search(text):
                yield (
                    f"generator.{name}.stop={format_value(text)}: it holds a backslash and the letter {found[1]}, which stay "
                    f"what they are. For a control character quote it as $'generator.{name}.stop=[\"\\{found[1]}\"]'."
                )


def find_evaluation_warnings(config: Config) -> Iterator[str]:
    """Yield a line for each setting with which an evaluation does not measure what it seems to measure."""
    generator, sampling = config.generator, config.generator.eval_sampling_params
    if not config.data.val_data:
        return
    samples = generator.eval_n_samples_per_prompt
    if samples > 1 and sampling.temperature == 0:
        yield (
            f"generator.eval_n_samples_per_prompt={samples} with generator.eval_sampling_params.temperature=0.0: all "
            "samples of a prompt are equal. Set it to 1, or the temperature above 0."
        )
    training, evaluation = generator.sampling_params.stop or [], sampling.stop or []
    if missing := [text for text in training if text not in evaluation]:
        yield (
            f"generator.eval_sampling_params.stop={format_value(sampling.stop)} lacks {format_value(missing)} of "
            "generator.sampling_params.stop: evaluation does not end turns where training does. Add them."
        )


def _why_not_read(config: Config, name: str) -> str | None:
    """The advice of the first reason for which a key has no effect; None if it has one.

    The section that the key is in is asked first, since it knows what the key belongs to; then the key itself, and then
    the sections around it, the outermost last.
    """
    around = list(_sections(name))
    for key in (*around[:1], value_keys()[name], *around[1:]):
        if advice := IGNORED_KEYS.get(key.name):
            return advice
        for condition in get_conditions(key.name):
            if not condition.is_met(config):
                return condition.advice
    return None


def _sections(name: str) -> Iterator[Key]:
    """The sections that a key is in, from the inside."""
    while name := name.rpartition(".")[0]:
        yield all_keys()[name]


def _default(config: Config, defaults: Config, name: str) -> Any:
    """What the key is when nobody sets it: if it follows another key, what that one is."""
    followed = str(value_keys()[name].default).removeprefix("${").removesuffix("}")
    return get_value(config, followed) if followed in value_keys() else get_value(defaults, name)
