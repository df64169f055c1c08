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
from skyrl_train.config.keys import Key, all_keys, leaves, value_at
from skyrl_train.config.predicates import (
    corrects,
    estimator_is,
    is_colocated,
    kl_in_reward,
    loss_is,
    may_read_reference,
    may_read_values,
    measures_kl,
    needs_critic,
    runs_groups_independently,
)
from skyrl_train.config.problems import show
from skyrl_train.config.schema import AlgorithmConfig, Config, PlacementConfig


@dataclass(frozen=True)
class Need:
    """Keys and sections that have an effect only while `holds` is true of the configuration, resolved and validated."""

    keys: tuple[str, ...]
    """Dotted names; `*` stands for policy, ref and critic. A section shares its need with everything below it."""
    holds: Callable[[Config], bool]
    advice: str
    """The warning if a key is set anyway."""


def _need(keys: str, advice: str, holds: Callable[[Config], bool]) -> Need:
    names = (name.replace("*", role) for name in keys.split() for role in ("policy", "ref", "critic"))
    return Need(tuple(dict.fromkeys(names)), holds, advice)


def _with(keys: str, other: str, value: Any) -> Need:
    """Another key has this value."""
    return _need(keys, f"It belongs to {other}={show(value)}.", lambda config: value_at(config, other) == value)


def _if_set(keys: str, other: str) -> Need:
    """Another key is not null."""
    return _need(keys, f"It belongs to {other}.", lambda config: value_at(config, other) is not None)


def _above(keys: str, other: str, low: int) -> Need:
    """Another key is a larger number than this."""
    return _need(keys, f"It belongs to {other} above {low}.", lambda config: value_at(config, other) > low)


def _algorithm(keys: str, advice: str, holds: Callable[[AlgorithmConfig], bool]) -> Need:
    """Keys of trainer.algorithm, and what must hold for that section."""
    names = " ".join(f"trainer.algorithm.{name}" for name in keys.split())
    return _need(names, advice, lambda config: holds(config.trainer.algorithm))


def _of_loss(keys: str, *losses: str) -> Need:
    advice = f"It belongs to policy_loss_type={' or '.join(losses)}."
    return _algorithm(keys, advice, lambda algorithm: loss_is(algorithm, *losses))


def _of_estimator(keys: str, *estimators: str) -> Need:
    advice = f"It belongs to advantage_estimator={' or '.join(estimators)}."
    return _algorithm(keys, advice, lambda algorithm: estimator_is(algorithm, *estimators))


def _of_environment(name: str) -> Need:
    advice = f"It belongs to env_class={name}."
    return _need(f"environment.skyrl_gym.{name}", advice, lambda config: config.environment.env_class == name)


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

NEEDS = (
    # -- trainer.algorithm
    _algorithm(
        "kl_ctrl",
        "It belongs to kl_ctrl.type=adaptive with use_kl_in_reward=true.",
        lambda algorithm: algorithm.kl_ctrl.type == "adaptive" and kl_in_reward(algorithm),
    ),
    _algorithm(
        "kl_estimator_type",
        "It belongs to trainer.algorithm.use_kl_loss=true or use_kl_in_reward=true, with kl_loss_coef above 0.",
        measures_kl,
    ),
    _algorithm(
        "kl_loss_coef",
        "It belongs to trainer.algorithm.use_kl_loss=true or use_kl_in_reward=true.",
        lambda algorithm: algorithm.use_kl_loss or algorithm.use_kl_in_reward,
    ),
    _with("trainer.algorithm.entropy_loss_coef", "trainer.algorithm.use_entropy_loss", True),
    _of_estimator("grpo_norm_by_std", "grpo"),
    _of_estimator("gamma", "gae", "reinforce++"),
    _of_estimator("lambd", "gae"),
    _algorithm(
        "eps_clip_low eps_clip_high",
        f"It belongs to policy_loss_type={', '.join(CLIPPING_LOSSES)}.",
        lambda algorithm: loss_is(algorithm, *CLIPPING_LOSSES),
    ),
    _of_loss("clip_ratio_c", "dual_clip"),
    _of_loss("sapo", "sapo"),
    _of_loss("clip_cov", "clip_cov"),
    _of_loss("kl_cov", "kl_cov"),
    _of_loss("cispo", "cispo"),
    _of_loss("dppo", "dppo_tv", "dppo_kl"),
    _algorithm(
        "max_seq_len",
        "It belongs to loss_reduction=seq_mean_token_sum_norm.",
        lambda algorithm: algorithm.loss_reduction == "seq_mean_token_sum_norm",
    ),
    _algorithm(
        "tis_imp_ratio_cap",
        "It belongs to use_tis=true alone; off_policy_correction.tis_ratio_type has bounds beside it.",
        lambda algorithm: algorithm.use_tis and algorithm.off_policy_correction.tis_ratio_type is None,
    ),
    _algorithm(
        "off_policy_correction",
        "It bounds what tis_ratio_type, sequence_mask_metric or a threshold of it turns on.",
        corrects,
    ),
    _algorithm(
        "off_policy_correction.token_tis_ratio_clip_high",
        "It belongs to off_policy_correction.tis_ratio_type=token; use_tis alone has tis_imp_ratio_cap.",
        lambda algorithm: algorithm.off_policy_correction.tis_ratio_type == "token",
    ),
    _algorithm(
        "off_policy_correction.sequence_tis_ratio_clip_high",
        "It belongs to off_policy_correction.tis_ratio_type=sequence.",
        lambda algorithm: algorithm.off_policy_correction.tis_ratio_type == "sequence",
    ),
    _algorithm(
        "off_policy_correction.geo_mask_high off_policy_correction.geo_mask_low",
        "It belongs to off_policy_correction.sequence_mask_metric=geometric.",
        lambda algorithm: algorithm.off_policy_correction.sequence_mask_metric == "geometric",
    ),
    _algorithm(
        "off_policy_correction.product_mask_high off_policy_correction.product_mask_low",
        "It belongs to off_policy_correction.sequence_mask_metric=product.",
        lambda algorithm: algorithm.off_policy_correction.sequence_mask_metric == "product",
    ),
    _if_set("trainer.algorithm.dynamic_sampling", "trainer.algorithm.dynamic_sampling.type"),
    _with("trainer.algorithm.dynamic_sampling.min_replace_ratio", "trainer.algorithm.dynamic_sampling.type", "replace"),
    _above("trainer.algorithm.overlong_buffer.penalty_factor", "trainer.algorithm.overlong_buffer.len", 0),
    # -- models and where they are
    _need(
        "trainer.ref trainer.update_ref_every_epoch",
        "There is no reference: set trainer.algorithm.use_kl_loss or use_kl_in_reward, and kl_loss_coef above 0.",
        lambda config: may_read_reference(config.trainer.algorithm),
    ),
    _need(
        "trainer.critic trainer.critic_mini_batch_size trainer.algorithm.value_head_prefix trainer.algorithm.value_clip"
        " trainer.placement.critic_num_nodes trainer.placement.critic_num_gpus_per_node",
        "It belongs to advantage estimators with a critic (gae).",
        lambda config: may_read_values(config.trainer.algorithm),
    ),
    _if_set(
        "trainer.placement.reward_num_nodes trainer.placement.reward_num_gpus_per_node"
        " trainer.reward.coef trainer.reward.model_config_kwargs",
        "trainer.reward.model.path",
    ),
    _need(
        "trainer.placement.ref_num_nodes trainer.placement.ref_num_gpus_per_node",
        "The reference has the policy's ranks: set trainer.placement.colocate_policy_ref and colocate_all to false.",
        lambda config: _shape_counts(config.trainer.placement, "ref"),
    ),
    _need(
        "trainer.placement.critic_num_nodes trainer.placement.critic_num_gpus_per_node",
        "The critic has the policy's ranks: set trainer.placement.colocate_all to false.",
        lambda config: not needs_critic(config.trainer) or _shape_counts(config.trainer.placement, "critic"),
    ),
    _need(
        "trainer.placement.reward_num_nodes trainer.placement.reward_num_gpus_per_node",
        "In training the reward model has the policy's slots: set trainer.placement.colocate_all to false.",
        lambda config: _shape_counts(config.trainer.placement, "reward"),
    ),
    _need(
        "trainer.placement.engine_strategy trainer.placement.engine_node_labels",
        "Engines have the slots of the models, or are elsewhere: set trainer.placement.colocate_all to false.",
        lambda config: not config.trainer.placement.colocate_all and config.generator.run_engines_locally,
    ),
    _need(
        "trainer.*.fsdp_config",
        "It belongs to trainer.strategy=fsdp2.",
        lambda config: config.trainer.strategy not in ("single", "deepspeed"),
    ),
    _need(
        "trainer.*.fsdp_config.cpu_offload",
        "On a CPU everything lies in host memory.",
        lambda config: config.device != "cpu",
    ),
    _with("trainer.*.deepspeed_config", "trainer.strategy", "deepspeed"),
    _need("trainer.ref.deepspeed_config.offload_optimizer", "The reference has no optimizer.", lambda config: False),
    _above("trainer.policy.model.lora", "trainer.policy.model.lora.rank", 0),
    _above("trainer.critic.model.lora", "trainer.critic.model.lora.rank", 0),
    # -- the loop
    _with("trainer.fully_async", "trainer.fully_async.enabled", True),
    _with("trainer.resume_path", "trainer.resume_mode", "from_path"),
    _above("trainer.async_checkpoint", "trainer.ckpt_interval", 0),
    _need(
        "trainer.keep_rollouts_gb",
        "trainer.keep_rollouts=none does without it.",
        lambda config: config.trainer.keep_rollouts != "none",
    ),
    _if_set("trainer.metrics_host", "trainer.metrics_port"),
    # -- engines
    _need(
        "generator.num_inference_engines generator.inference_engine_tensor_parallel_size"
        " generator.inference_engine_pipeline_parallel_size generator.inference_engine_expert_parallel_size"
        " generator.inference_engine_data_parallel_size generator.batch_invariant generator.engine_init_kwargs"
        " trainer.placement.nodes_per_engine",
        "With generator.run_engines_locally=false whoever starts a server says that to it.",
        lambda config: config.generator.run_engines_locally,
    ),
    _with(
        "generator.external_server_urls generator.remote_inference_engine_urls", "generator.run_engines_locally", False
    ),
    _need(
        "generator.weight_sync_folder",
        "It belongs to generator.weight_sync_route=checkpoint and to servers.",
        lambda config: config.generator.weight_sync_route == "checkpoint" or not config.generator.run_engines_locally,
    ),
    _need(
        "generator.enable_prefix_caching generator.enable_chunked_prefill generator.max_num_batched_tokens"
        " generator.gpu_memory_utilization",
        "The transformers engine has nothing of the kind.",
        lambda config: config.generator.backend != "transformers",
    ),
    _need(
        "generator.gpu_memory_utilization",
        "On a CPU vLLM has a cache of the size that it needs.",
        lambda config: config.generator.backend != "vllm" or config.device != "cpu",
    ),
    _with(
        "generator.http_endpoint_host generator.http_endpoint_port generator.served_model_name",
        "generator.enable_http_endpoint",
        True,
    ),
    # -- rollouts and environments
    _if_set("generator.chat_template.source", "generator.chat_template.name_or_path"),
    _above(
        "generator.use_conversation_multi_turn generator.append_eos_token_after_stop_str_in_multi_turn"
        " generator.retokenize_chat_history generator.step_wise_trajectories",
        "generator.max_turns",
        1,
    ),
    _need(
        "generator.append_eos_token_after_stop_str_in_multi_turn generator.retokenize_chat_history"
        " generator.step_wise_trajectories",
        "It belongs to generator.use_conversation_multi_turn=true: one message has no turns to end, and no history.",
        lambda config: config.generator.use_conversation_multi_turn,
    ),
    _need(
        "generator.batched",
        "Engines always batch requests. It belongs to max_turns above 1, without over_provisioning and rate_limit.",
        _can_batch_turns,
    ),
    _with("generator.rate_limit", "generator.rate_limit.enabled", True),
    _above(
        "environment.host_cpus environment.host_resources trainer.timeouts.environment_hosts_s", "environment.hosts", 0
    ),
    *(_of_environment(name) for name in ENVIRONMENTS if f"environment.skyrl_gym.{name}" in all_keys()),
)


@cache
def needs_of(name: str) -> tuple[Need, ...]:
    """What must hold for a key or a section itself; of those that do not, the first one is reported."""
    return tuple(need for need in NEEDS if name in need.keys)


_MEGATRON = "Only Megatron reads it; here trainer.policy.fsdp_config and tensor_parallel_size divide models."
_OFFLOAD = "The whole trainer leaves the accelerator while engines generate, with trainer.placement.colocate_all=true."
_LOGPROBS = "The log-prob of every sampled token is always returned."

_TYPED_ESCAPE = re.compile(r"\\([nrt])")

IGNORED = {
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


def warnings(config: Config, defaults: Config) -> Iterator[str]:
    """Yield a line for each key that differs from its default if nothing reads it or if its number is unusual."""
    for name, key in leaves().items():
        value = value_at(config, name)
        if value in (_default(config, defaults, name), key.facts.skyrl_default):
            continue
        if advice := _why_not_read(config, name):
            yield f"{name}={show(value)} has no effect here. {advice}"
        elif (usual := key.facts.usual) is not None and value != 0 and value not in usual:
            yield f"{name}={show(value)} is unusual. Most runs use {usual.low:g} to {usual.high:g}; check the number."


def stop_warnings(config: Config) -> Iterator[str]:
    """Yield a line for each stop string with a typed escape, such as a backslash and an n, which no shell converts."""
    for name in ("sampling_params", "eval_sampling_params"):
        for text in getattr(config.generator, name).stop or []:
            if found := _TYPED_ESCAPE.search(text):
                yield (
                    f"generator.{name}.stop={show(text)}: it holds a backslash and the letter {found[1]}, which stay "
                    f"what they are. For a control character quote it as $'generator.{name}.stop=[\"\\{found[1]}\"]'."
                )


def evaluation_warnings(config: Config) -> Iterator[str]:
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
            f"generator.eval_sampling_params.stop={show(sampling.stop)} lacks {show(missing)} of "
            "generator.sampling_params.stop: evaluation does not end turns where training does. Add them."
        )


def _why_not_read(config: Config, name: str) -> str | None:
    """The advice of the first reason for which a key has no effect; None if it has one.

    The section that the key is in is asked first, since it knows what the key belongs to; then the key itself, and then
    the sections around it, the outermost last.
    """
    around = list(_sections(name))
    for key in (*around[:1], leaves()[name], *around[1:]):
        if advice := IGNORED.get(key.name):
            return advice
        for need in needs_of(key.name):
            if not need.holds(config):
                return need.advice
    return None


def _sections(name: str) -> Iterator[Key]:
    """The sections that a key is in, from the inside."""
    while name := name.rpartition(".")[0]:
        yield all_keys()[name]


def _default(config: Config, defaults: Config, name: str) -> Any:
    """What the key is when nobody sets it: if it follows another key, what that one is."""
    followed = str(leaves()[name].default).removeprefix("${").removesuffix("}")
    return value_at(config, followed) if followed in leaves() else value_at(defaults, name)
