"""Keys that are read for compatibility and change nothing: warned about when they are set to something else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from skyrl_train.config.keys import leaves, value_at
from skyrl_train.config.problems import show
from skyrl_train.config.schema import Config
from skyrl_train.config.unavailable import VALUES


@dataclass(frozen=True)
class Inert:
    """`keys` (sections stand for all below them) have no effect while `when` holds; `advice` says what has."""

    keys: tuple[str, ...]
    advice: str
    when: Callable[[Config], bool] = lambda config: True


def _loss_is_not(name: str) -> Callable[[Config], bool]:
    return lambda config: config.trainer.algorithm.policy_loss_type != name


def _environment_is_not(name: str) -> Callable[[Config], bool]:
    return lambda config: config.environment.env_class != name


def _correction_is_off(config: Config) -> bool:
    correction = config.trainer.algorithm.off_policy_correction
    return correction.tis_ratio_type is None and correction.sequence_mask_metric is None


def _kl_is_not_adaptive(config: Config) -> bool:
    algorithm = config.trainer.algorithm
    return algorithm.kl_ctrl.type != "adaptive" or not algorithm.use_kl_in_reward


def _reference_sits_with_policy(config: Config) -> bool:
    placement = config.trainer.placement
    ref, policy = placement.ref_num_nodes, placement.policy_num_nodes
    same = (ref, placement.ref_num_gpus_per_node) == (policy, placement.policy_num_gpus_per_node)
    return (placement.colocate_all or placement.colocate_policy_ref) and not same


ROWS = (
    Inert(
        ("trainer.policy.megatron_config", "trainer.ref.megatron_config"),
        "Only Megatron reads it; trainer.policy.fsdp_config shards models here.",
        lambda config: config.trainer.strategy != "megatron",
    ),
    Inert(
        ("trainer.policy.optimizer_config.offload_after_step",),
        "The whole trainer leaves the accelerator while engines generate, with trainer.placement.colocate_all=true.",
    ),
    Inert(
        ("trainer.policy.fsdp_config", "trainer.ref.fsdp_config"),
        "It belongs to trainer.strategy=fsdp2.",
        lambda config: config.trainer.strategy == "single",
    ),
    Inert(("trainer.log_path",), "A run's logs and metrics are in its folder, trainer.ckpt_path."),
    Inert(
        ("trainer.timeouts.checkpoint_s",), "Saving and loading are calls of the trainer's ranks: timeouts.update_s."
    ),
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
    Inert(("generator.async_engine", "generator.batched"), "Engines always run asynchronously and batch requests."),
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
        ("generator.append_eos_token_after_stop_str_in_multi_turn",),
        "It belongs to generator.max_turns above 1.",
        lambda config: config.generator.max_turns == 1,
    ),
    Inert(
        ("trainer.policy.model.lora",),
        "It belongs to trainer.policy.model.lora.rank above 0.",
        lambda config: config.trainer.policy.model.lora.rank == 0,
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
            "trainer.algorithm.gamma",
        ),
        "It belongs to advantage estimators with a critic (gae).",
        lambda config: config.trainer.algorithm.advantage_estimator != "gae",
    ),
    Inert(
        ("trainer.algorithm.tis_imp_ratio_cap",),
        "Use trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high.",
    ),
    Inert(
        ("trainer.algorithm.off_policy_correction",),
        "It belongs to off_policy_correction.tis_ratio_type or sequence_mask_metric.",
        _correction_is_off,
    ),
    Inert(
        ("trainer.algorithm.dynamic_sampling",),
        "It belongs to trainer.algorithm.dynamic_sampling.type.",
        lambda config: config.trainer.algorithm.dynamic_sampling.type is None,
    ),
    Inert(("trainer.algorithm.clip_ratio_c",), "It belongs to policy_loss_type=dual_clip.", _loss_is_not("dual_clip")),
    Inert(("trainer.algorithm.sapo",), "It belongs to policy_loss_type=sapo.", _loss_is_not("sapo")),
    Inert(("trainer.algorithm.clip_cov",), "It belongs to policy_loss_type=clip_cov.", _loss_is_not("clip_cov")),
    Inert(("trainer.algorithm.kl_cov",), "It belongs to policy_loss_type=kl_cov.", _loss_is_not("kl_cov")),
    Inert(("trainer.algorithm.cispo",), "It belongs to policy_loss_type=cispo.", _loss_is_not("cispo")),
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
    Inert(("environment.skyrl_gym.search",), "It belongs to env_class=search.", _environment_is_not("search")),
    Inert(("environment.skyrl_gym.text2sql",), "It belongs to env_class=text2sql.", _environment_is_not("text2sql")),
    Inert(
        ("environment.skyrl_gym.llm_as_a_judge",),
        "It belongs to env_class=llm_as_a_judge.",
        _environment_is_not("llm_as_a_judge"),
    ),
)


def without_effect(config: Config, defaults: Config) -> Iterator[str]:
    """A line for every key that differs from its default and that nothing reads in this configuration.

    Keys that are refused are left to `unavailable`.
    """
    for row in ROWS:
        if not row.when(config):
            continue
        for name in leaves():
            below = any(name == key or name.startswith(f"{key}.") for key in row.keys)
            value = value_at(config, name)
            if below and name not in VALUES and value != value_at(defaults, name):
                yield f"{name}={show(value)} has no effect here. {row.advice}"
