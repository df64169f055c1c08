"""Keys that are read for compatibility and change nothing: warned about when they are set to something else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from skyrl_train.config import reference
from skyrl_train.config.choices import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from skyrl_train.config.keys import leaves, value_at
from skyrl_train.config.problems import show
from skyrl_train.config.reference import kl_in_loss, kl_in_reward
from skyrl_train.config.schema import Config
from skyrl_train.config.unavailable import VALUES

CLIPPING_LOSSES = frozenset({"regular", "dual_clip", "gspo", "gmpo", "rollout_is", "clip_cov"})
"""Those that ask for `eps_low` and `eps_high`, or whose choice of tokens does."""


@dataclass(frozen=True)
class Inert:
    """`keys` (sections stand for all below them) have no effect while `when` holds; `advice` says what has."""

    keys: tuple[str, ...]
    advice: str
    when: Callable[[Config], bool] = lambda config: True


def _loss_is_not(*names: str) -> Callable[[Config], bool]:
    """Nor one of a plugin: what that asks for is not known here."""
    others = POLICY_LOSSES.keys() - set(names)
    return lambda config: config.trainer.algorithm.policy_loss_type in others


def _estimator_is_not(*names: str) -> Callable[[Config], bool]:
    """Nor one of a plugin: what that asks for is not known here."""
    others = ADVANTAGE_ESTIMATORS.keys() - set(names)
    return lambda config: config.trainer.algorithm.advantage_estimator in others


def _environment_is_not(name: str) -> Callable[[Config], bool]:
    return lambda config: config.environment.env_class != name


def _correction_is_off(config: Config) -> bool:
    algorithm = config.trainer.algorithm
    correction = algorithm.off_policy_correction
    thresholds = (
        correction.outlier_token_is_threshold_low,
        correction.outlier_token_is_threshold_high,
        correction.token_mask_eps_low,
        correction.token_mask_eps_high,
    )
    chosen = (correction.tis_ratio_type, correction.sequence_mask_metric, *thresholds)
    return not algorithm.use_tis and all(value is None for value in chosen)


def _correction_is_not(key: str, value: str) -> Callable[[Config], bool]:
    return lambda config: getattr(config.trainer.algorithm.off_policy_correction, key) != value


def _cap_is_not_read(config: Config) -> bool:
    algorithm = config.trainer.algorithm
    return not algorithm.use_tis or algorithm.off_policy_correction.tis_ratio_type is not None


def _kl_is_not_adaptive(config: Config) -> bool:
    algorithm = config.trainer.algorithm
    return algorithm.kl_ctrl.type != "adaptive" or not reference.kl_in_reward(algorithm)


def _nothing_reads_a_reference(config: Config) -> bool:
    sft_reads_it = config.trainer.algorithm.sft.loss_type in reference.SFT_LOSSES
    return _nothing_measures_kl(config) and _estimator_is_not(*reference.ESTIMATORS)(config) and not sft_reads_it


def _nothing_measures_kl(config: Config) -> bool:
    algorithm = config.trainer.algorithm
    return not kl_in_loss(algorithm) and not kl_in_reward(algorithm)


def _goes_out_apart(config: Config) -> bool:
    generator = config.generator
    return generator.over_provisioning > 0 or generator.rate_limit.enabled or config.trainer.fully_async.enabled


def _critic_sits_with_policy(config: Config) -> bool:
    placement = config.trainer.placement
    critic, policy = placement.critic_num_nodes, placement.policy_num_nodes
    same = (critic, placement.critic_num_gpus_per_node) == (policy, placement.policy_num_gpus_per_node)
    return placement.colocate_all and not same and config.trainer.algorithm.advantage_estimator == "gae"


def _reward_model_sits_with_policy(config: Config) -> bool:
    placement = config.trainer.placement
    reward, policy = placement.reward_num_nodes, placement.policy_num_nodes
    same = (reward, placement.reward_num_gpus_per_node) == (policy, placement.policy_num_gpus_per_node)
    return placement.colocate_all and not same


def _reference_sits_with_policy(config: Config) -> bool:
    placement = config.trainer.placement
    ref, policy = placement.ref_num_nodes, placement.policy_num_nodes
    same = (ref, placement.ref_num_gpus_per_node) == (policy, placement.policy_num_gpus_per_node)
    return (placement.colocate_all or placement.colocate_policy_ref) and not same


ROWS = (
    Inert(
        ("trainer.policy.megatron_config", "trainer.ref.megatron_config"),
        "Only Megatron reads it; here trainer.policy.fsdp_config and tensor_parallel_size divide models.",
    ),
    Inert(
        ("trainer.policy.optimizer_config.offload_after_step", "trainer.critic.optimizer_config.offload_after_step"),
        "The whole trainer leaves the accelerator while engines generate, with trainer.placement.colocate_all=true.",
    ),
    Inert(
        ("trainer.policy.fsdp_config", "trainer.ref.fsdp_config", "trainer.critic.fsdp_config"),
        "It belongs to trainer.strategy=fsdp2.",
        lambda config: config.trainer.strategy in ("single", "deepspeed"),
    ),
    Inert(
        tuple(f"trainer.{role}.deepspeed_config" for role in ("policy", "ref", "critic")),
        "It belongs to trainer.strategy=deepspeed.",
        lambda config: config.trainer.strategy != "deepspeed",
    ),
    Inert(("trainer.ref.deepspeed_config.offload_optimizer",), "The reference has no optimizer."),
    Inert(
        tuple(f"trainer.{role}.fsdp_config.cpu_offload" for role in ("policy", "ref", "critic")),
        "On a CPU everything lies in host memory.",
        lambda config: config.device == "cpu",
    ),
    Inert(("trainer.log_path",), "A run's logs and metrics are in its folder, trainer.ckpt_path."),
    Inert(
        ("trainer.flash_attn",),
        "Attention without padding uses PyTorch's own kernels: flash attention wherever they have it.",
    ),
    Inert(
        ("generator.weight_sync_check",),
        "Fingerprints are always checked.",
        lambda config: config.generator.weight_sync_check == "off",
    ),
    Inert(("trainer.use_sample_packing",), "Batches are always packed without padding."),
    Inert(("generator.async_engine",), "Engines always run asynchronously."),
    Inert(
        ("generator.batched",),
        "Engines always batch requests. It belongs to max_turns above 1, without over_provisioning and rate_limit.",
        lambda config: config.generator.max_turns == 1 or _goes_out_apart(config),
    ),
    Inert(
        (
            "generator.enable_prefix_caching",
            "generator.max_num_batched_tokens",
            "generator.enable_chunked_prefill",
            "generator.enforce_eager",
            "generator.gpu_memory_utilization",
        ),
        "The transformers engine has nothing of the kind.",
        lambda config: config.generator.backend == "transformers",
    ),
    Inert(
        ("generator.enforce_eager", "generator.enable_chunked_prefill", "generator.gpu_memory_utilization"),
        "On a CPU vLLM compiles nothing, reads a prompt in one piece and has a cache of the size that it needs.",
        lambda config: config.generator.backend == "vllm" and config.device == "cpu",
    ),
    Inert(
        (
            "generator.num_inference_engines",
            "generator.max_num_seqs",
            "generator.engine_init_kwargs",
            "generator.inference_engine_tensor_parallel_size",
            "generator.inference_engine_pipeline_parallel_size",
            "generator.inference_engine_expert_parallel_size",
            "generator.inference_engine_data_parallel_size",
        ),
        "With generator.run_engines_locally=false whoever starts a server says that to it.",
        lambda config: not config.generator.run_engines_locally,
    ),
    Inert(("generator.fully_sharded_loras",), "Say it to vLLM: generator.engine_init_kwargs.fully_sharded_loras."),
    Inert(("generator.vllm_v1_disable_multiproc",), "vLLM's scheduler always runs in the engine's own process."),
    Inert(("generator.enable_ray_prometheus_stats",), "Engines' metrics are logged with the run's, under engines/."),
    Inert(
        ("generator.weight_sync_folder",),
        "It belongs to generator.weight_sync_route=checkpoint and to servers.",
        lambda config: config.generator.weight_sync_route != "checkpoint" and config.generator.run_engines_locally,
    ),
    Inert(
        ("generator.remote_inference_engine_urls", "generator.external_server_urls"),
        "It belongs to generator.run_engines_locally=false.",
        lambda config: config.generator.run_engines_locally,
    ),
    Inert(("generator.override_existing_update_group",), "A server leaves its weight group when a trainer connects."),
    Inert(
        ("generator.http_endpoint_host", "generator.http_endpoint_port", "generator.served_model_name"),
        "It belongs to generator.enable_http_endpoint=true.",
        lambda config: not config.generator.enable_http_endpoint,
    ),
    Inert(
        ("generator.sampling_params.logprobs", "generator.eval_sampling_params.logprobs"),
        "The log-prob of every sampled token is always returned.",
    ),
    Inert(
        ("generator.chat_template.source",),
        "It belongs to generator.chat_template.name_or_path.",
        lambda config: config.generator.chat_template.name_or_path is None,
    ),
    Inert(
        (
            "generator.append_eos_token_after_stop_str_in_multi_turn",
            "generator.use_conversation_multi_turn",
            "generator.step_wise_trajectories",
            "generator.retokenize_chat_history",
        ),
        "It belongs to generator.max_turns above 1.",
        lambda config: config.generator.max_turns == 1,
    ),
    Inert(
        (
            "generator.append_eos_token_after_stop_str_in_multi_turn",
            "generator.step_wise_trajectories",
            "generator.retokenize_chat_history",
        ),
        "It belongs to generator.use_conversation_multi_turn=true: one message has no turns to end, and no history.",
        lambda config: not config.generator.use_conversation_multi_turn,
    ),
    Inert(
        ("generator.rate_limit",),
        "It belongs to generator.rate_limit.enabled=true.",
        lambda config: not config.generator.rate_limit.enabled,
    ),
    Inert(
        ("trainer.policy.model.lora",),
        "It belongs to trainer.policy.model.lora.rank above 0.",
        lambda config: config.trainer.policy.model.lora.rank == 0,
    ),
    Inert(
        ("trainer.policy.model.lora.lora_sync_path", "trainer.critic.model.lora.lora_sync_path"),
        "Engines get them, merged or not, by generator.weight_sync_route.",
    ),
    Inert(("trainer.critic.model.lora.sync",), "Engines get nothing of a critic."),
    Inert(
        ("trainer.critic.model.lora",),
        "It belongs to trainer.critic.model.lora.rank above 0.",
        lambda config: config.trainer.critic.model.lora.rank == 0,
    ),
    Inert(
        (
            "trainer.critic",
            "trainer.critic_mini_batch_size",
            "trainer.placement.critic_num_nodes",
            "trainer.placement.critic_num_gpus_per_node",
            "trainer.algorithm.value_head_prefix",
            "trainer.algorithm.value_clip",
            "trainer.algorithm.lambd",
        ),
        "It belongs to advantage estimators with a critic (gae).",
        _estimator_is_not("gae"),
    ),
    Inert(
        ("trainer.algorithm.gamma",),
        "It belongs to advantage_estimator=gae or reinforce++.",
        _estimator_is_not("gae", "reinforce++"),
    ),
    Inert(
        ("trainer.algorithm.grpo_norm_by_std",), "It belongs to advantage_estimator=grpo.", _estimator_is_not("grpo")
    ),
    Inert(
        ("trainer.algorithm.tis_imp_ratio_cap",),
        "It belongs to use_tis=true alone; off_policy_correction.tis_ratio_type has bounds beside it.",
        _cap_is_not_read,
    ),
    Inert(
        ("trainer.algorithm.off_policy_correction",),
        "It bounds what tis_ratio_type, sequence_mask_metric or a threshold of it turns on.",
        _correction_is_off,
    ),
    Inert(
        ("trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high",),
        "It belongs to off_policy_correction.tis_ratio_type=token; use_tis alone has tis_imp_ratio_cap.",
        _correction_is_not("tis_ratio_type", "token"),
    ),
    Inert(
        ("trainer.algorithm.off_policy_correction.sequence_tis_ratio_clip_high",),
        "It belongs to off_policy_correction.tis_ratio_type=sequence.",
        _correction_is_not("tis_ratio_type", "sequence"),
    ),
    *(
        Inert(
            (
                f"trainer.algorithm.off_policy_correction.{prefix}_mask_low",
                f"trainer.algorithm.off_policy_correction.{prefix}_mask_high",
            ),
            f"It belongs to off_policy_correction.sequence_mask_metric={metric}.",
            _correction_is_not("sequence_mask_metric", metric),
        )
        for prefix, metric in (("geo", "geometric"), ("product", "product"))
    ),
    Inert(
        ("trainer.algorithm.dynamic_sampling",),
        "It belongs to trainer.algorithm.dynamic_sampling.type.",
        lambda config: config.trainer.algorithm.dynamic_sampling.type is None,
    ),
    Inert(
        ("trainer.algorithm.dynamic_sampling.min_replace_ratio",),
        "It belongs to trainer.algorithm.dynamic_sampling.type=replace.",
        lambda config: config.trainer.algorithm.dynamic_sampling.type == "filter",
    ),
    Inert(
        ("trainer.algorithm.overlong_buffer.penalty_factor",),
        "It belongs to trainer.algorithm.overlong_buffer.len above 0.",
        lambda config: config.trainer.algorithm.overlong_buffer.len == 0,
    ),
    Inert(
        ("trainer.algorithm.eps_clip_low", "trainer.algorithm.eps_clip_high"),
        f"It belongs to policy_loss_type={', '.join(sorted(CLIPPING_LOSSES))}.",
        _loss_is_not(*CLIPPING_LOSSES),
    ),
    Inert(("trainer.algorithm.clip_ratio_c",), "It belongs to policy_loss_type=dual_clip.", _loss_is_not("dual_clip")),
    Inert(("trainer.algorithm.sapo",), "It belongs to policy_loss_type=sapo.", _loss_is_not("sapo")),
    Inert(("trainer.algorithm.clip_cov",), "It belongs to policy_loss_type=clip_cov.", _loss_is_not("clip_cov")),
    Inert(("trainer.algorithm.kl_cov",), "It belongs to policy_loss_type=kl_cov.", _loss_is_not("kl_cov")),
    Inert(
        ("trainer.algorithm.dppo",),
        "It belongs to policy_loss_type=dppo_tv or dppo_kl.",
        _loss_is_not("dppo_tv", "dppo_kl"),
    ),
    Inert(("trainer.algorithm.cispo",), "It belongs to policy_loss_type=cispo.", _loss_is_not("cispo")),
    Inert(
        ("trainer.algorithm.kl_loss_coef",),
        "It belongs to trainer.algorithm.use_kl_loss=true or use_kl_in_reward=true.",
        lambda config: not config.trainer.algorithm.use_kl_loss and not config.trainer.algorithm.use_kl_in_reward,
    ),
    Inert(
        ("trainer.algorithm.kl_estimator_type",),
        "It belongs to trainer.algorithm.use_kl_loss=true or use_kl_in_reward=true, with kl_loss_coef above 0.",
        _nothing_measures_kl,
    ),
    Inert(
        ("trainer.algorithm.kl_ctrl",),
        "It belongs to kl_ctrl.type=adaptive with use_kl_in_reward=true.",
        _kl_is_not_adaptive,
    ),
    Inert(
        ("trainer.algorithm.entropy_loss_coef",),
        "It belongs to trainer.algorithm.use_entropy_loss=true.",
        lambda config: not config.trainer.algorithm.use_entropy_loss,
    ),
    Inert(
        ("trainer.algorithm.max_seq_len",),
        "It belongs to loss_reduction=seq_mean_token_sum_norm.",
        lambda config: config.trainer.algorithm.loss_reduction != "seq_mean_token_sum_norm",
    ),
    Inert(
        ("trainer.fully_async",),
        "It belongs to trainer.fully_async.enabled=true.",
        lambda config: not config.trainer.fully_async.enabled,
    ),
    Inert(
        ("trainer.resume_path",),
        "It belongs to trainer.resume_mode=from_path.",
        lambda config: config.trainer.resume_mode != "from_path",
    ),
    Inert(
        ("trainer.placement.ref_num_nodes", "trainer.placement.ref_num_gpus_per_node"),
        "The reference has the policy's ranks: set trainer.placement.colocate_policy_ref and colocate_all to false.",
        _reference_sits_with_policy,
    ),
    Inert(
        ("trainer.placement.critic_num_nodes", "trainer.placement.critic_num_gpus_per_node"),
        "The critic has the policy's ranks: set trainer.placement.colocate_all to false.",
        _critic_sits_with_policy,
    ),
    Inert(
        (
            "trainer.reward.coef",
            "trainer.reward.model_config_kwargs",
            "trainer.placement.reward_num_nodes",
            "trainer.placement.reward_num_gpus_per_node",
        ),
        "It belongs to trainer.reward.model.path.",
        lambda config: config.trainer.reward.model.path is None,
    ),
    Inert(
        ("trainer.placement.reward_num_nodes", "trainer.placement.reward_num_gpus_per_node"),
        "In training the reward model has the policy's slots: set trainer.placement.colocate_all to false.",
        _reward_model_sits_with_policy,
    ),
    Inert(
        ("trainer.update_ref_every_epoch", "trainer.ref"),
        "There is no reference: set trainer.algorithm.use_kl_loss or use_kl_in_reward, and kl_loss_coef above 0.",
        _nothing_reads_a_reference,
    ),
    *(
        Inert((f"environment.skyrl_gym.{name}",), f"It belongs to env_class={name}.", _environment_is_not(name))
        for name in ("gsm8k", "gsm8k_multi_turn", "multiply", "math", "countdown")
    ),
    Inert(("environment.skyrl_gym.ifeval",), "It belongs to env_class=ifeval.", _environment_is_not("ifeval")),
    Inert(("environment.skyrl_gym.lcb",), "It belongs to env_class=lcb.", _environment_is_not("lcb")),
    Inert(("environment.skyrl_gym.search",), "It belongs to env_class=search.", _environment_is_not("search")),
    Inert(
        ("environment.skyrl_gym.searchcode",), "It belongs to env_class=searchcode.", _environment_is_not("searchcode")
    ),
    Inert(("environment.skyrl_gym.text2sql",), "It belongs to env_class=text2sql.", _environment_is_not("text2sql")),
    Inert(("environment.skyrl_gym.tool_use",), "It belongs to env_class=tool_use.", _environment_is_not("tool_use")),
    Inert(
        ("environment.skyrl_gym.llm_as_a_judge",),
        "It belongs to env_class=llm_as_a_judge.",
        _environment_is_not("llm_as_a_judge"),
    ),
    *(
        Inert((f"environment.skyrl_gym.{name}",), f"It belongs to env_class={name}.", _environment_is_not(name))
        for name in ("openenv", "reasoning_gym", "verifiers")
    ),
)


def without_effect(config: Config, defaults: Config) -> Iterator[str]:
    """A line for every key that differs from its default and that nothing reads in this configuration.

    Keys that are refused are left to `unavailable`.
    """
    named: set[str] = set()
    for row in ROWS:
        if not row.when(config):
            continue
        for name in leaves():
            below = any(name == key or name.startswith(f"{key}.") for key in row.keys)
            if not below or name in VALUES or name in named:
                continue
            if (value := value_at(config, name)) != _default(config, defaults, name):
                named.add(name)
                yield f"{name}={show(value)} has no effect here. {row.advice}"


def _default(config: Config, defaults: Config, name: str) -> Any:
    """What the key is when nobody sets it: of one that follows another key, what that one is."""
    followed = str(leaves()[name].default).removeprefix("${").removesuffix("}")
    return value_at(config, followed) if followed in leaves() else value_at(defaults, name)
