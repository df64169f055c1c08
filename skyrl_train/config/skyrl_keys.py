"""SkyRL's keys that this package has no key for, and the translation of Megatron's parallelism.

A key of SkyRL with a counterpart is an alias of it (`section.KeyMetadata.aliases`). Keys of SkyRL-train 0.3 without
effect are part of the schema (`sanity_warnings.IGNORED_KEYS`), because programs written for 0.3 read them.

`trainer.strategy=megatron` runs as fsdp2, which shards models over all ranks of a role. Megatron's tensor parallelism
becomes transformers' tensor-parallel plan, its context parallelism becomes Ulysses, its expert parallelism distributes
experts over ranks of FSDP2, and the ranks of its other kinds become ranks of FSDP2. Gradients do not depend on this.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from skyrl_train.config.keys import get_value, key_aliases, replace_value
from skyrl_train.config.problems import Problem, format_value, one_line
from skyrl_train.config.schema import Config


@dataclass(frozen=True)
class SkyRLKey:
    """A key or section of SkyRL without a counterpart in this package."""

    advice: str
    """Complete sentences: how this package behaves, and which key to use instead."""
    accepted_values: tuple[Any, ...] | None = None
    """Values that mean what this package does anyway; other values are problems, because they would change results. A
    value `${KEY}` stands for the value of that key. None accepts every value, with a note that it has no effect."""


_ROUTER = "The router of the model is used as the model configures it."
_EXPERTS = "Only Megatron reads it."
_CHECKPOINTS = (
    "Every rank writes its shard of a checkpoint. trainer.async_checkpoint writes it while training continues."
)
_DRAFT = "Draft heads are neither trained nor used. This affects speed only."
_ADAPTERS = "Engines serve one adapter, the policy's. They receive it by generator.weight_sync_route."
_ALLOCATOR = "Set PYTORCH_CUDA_ALLOC_CONF in the environment."
_PIECES = "Log-probs and entropies are always computed in chunks, without a tensor of all logits."
_EXAMPLES = "See trainer.console_samples, trainer.console_samples_interval and trainer.keep_rollouts."
_PRECISION = "trainer.bf16=true computes in bfloat16 and reduces gradients in float32. false computes in float32."
_BALANCE = "trainer.algorithm.router_aux_loss_coef is the coefficient of the loss that balances experts."
_KWARGS = "repetition_penalty, min_p, top_k and stop have separate keys."
_SIMULATION = "The trainer always trains. skyrl_train.entrypoints.main_generate samples without training."
_PREFILL = "Every engine both prefills and decodes. This affects speed only."

SKYRL_KEYS = {
    "data.dataloader": SkyRLKey("The driver reads the prompts itself."),
    "trainer.use_expandable_segments": SkyRLKey(_ALLOCATOR),
    "trainer.*.model.lora.max_loras": SkyRLKey(_ADAPTERS),
    "trainer.*.model.lora.max_cpu_loras": SkyRLKey(_ADAPTERS),
    "trainer.critic.model.lora.lora_sync_path": SkyRLKey(_ADAPTERS),
    "trainer.ref.model.lora": SkyRLKey("The reference has no adapters."),
    "trainer.*.model.fake_int4_qat": SkyRLKey("It belongs to fake_int4_qat.enabled=true."),
    "trainer.*.model.fake_int4_qat.enabled": SkyRLKey(
        "Training with simulated INT4 weights is not available.", (False,)
    ),
    "trainer.*.fsdp_config.mixed_precision": SkyRLKey(_PRECISION, (None,)),
    "trainer.*.fsdp_config.mixed_precision.param_dtype": SkyRLKey(_PRECISION, ("bf16",)),
    "trainer.*.fsdp_config.mixed_precision.reduce_dtype": SkyRLKey(_PRECISION, ("fp32",)),
    "trainer.*.fsdp_config.mixed_precision.buffer_dtype": SkyRLKey(_PRECISION, ("fp32",)),
    "trainer.*.fsdp_config.wrap_policy": SkyRLKey(
        "Every layer of the model is sharded separately, whatever its class."
    ),
    "trainer.policy.torch_profiler_config": SkyRLKey("trainer.profile_steps names the steps to profile."),
    "trainer.policy.inference_only_init": SkyRLKey(
        "Use skyrl_train.entrypoints.main_generate, which loads no trainer."
    ),
    "trainer.*.megatron_config.moe_token_dispatcher_type": SkyRLKey(_EXPERTS),
    "trainer.*.megatron_config.moe_grouped_gemm": SkyRLKey(_EXPERTS),
    "trainer.*.megatron_config.moe_per_layer_logging": SkyRLKey(_EXPERTS),
    "trainer.*.megatron_config.moe_router_dtype": SkyRLKey(_ROUTER),
    "trainer.*.megatron_config.moe_router_score_function": SkyRLKey(_ROUTER),
    "trainer.*.megatron_config.moe_router_enable_expert_bias": SkyRLKey(_ROUTER),
    "trainer.*.megatron_config.moe_router_load_balancing_type": SkyRLKey(_BALANCE, ("none", None)),
    "trainer.*.megatron_config.moe_aux_loss_coeff": SkyRLKey(_BALANCE, (0,)),
    "trainer.ref.megatron_config.moe_enable_routing_replay": SkyRLKey("It is that of trainer.policy.megatron_config."),
    "trainer.*.megatron_config.freeze_moe_router": SkyRLKey("Routers are trained with the model.", (False,)),
    "trainer.*.megatron_config.hf_export_config": SkyRLKey("One rank writes an export."),
    "trainer.*.megatron_config.dist_ckpt_optim_fully_reshardable": SkyRLKey(_CHECKPOINTS),
    "trainer.ref.megatron_config.async_dist_ckpt_save": SkyRLKey(_CHECKPOINTS),
    "trainer.*.megatron_config.async_dist_ckpt_strategy": SkyRLKey(_CHECKPOINTS),
    "trainer.*.megatron_config.async_save_prestage_to_cpu": SkyRLKey(_CHECKPOINTS),
    "trainer.*.megatron_config.mtp_num_layers": SkyRLKey(_DRAFT),
    "trainer.*.megatron_config.mtp_loss_weight": SkyRLKey(_DRAFT),
    "trainer.*.megatron_config.mtp_loss_chunk_size": SkyRLKey(_DRAFT),
    "trainer.*.megatron_config.mtp_loss_topk": SkyRLKey(_DRAFT),
    "trainer.ref.megatron_config.lora_config": SkyRLKey("The reference has no adapters."),
    "trainer.ref.megatron_config.ddp_config": SkyRLKey("The reference has no gradients."),
    "trainer.ref.megatron_config.optimizer_config_kwargs": SkyRLKey("The reference has no optimizer."),
    "trainer.ref.megatron_config.empty_cuda_cache": SkyRLKey("The reference has no optimizer."),
    "trainer.mtp": SkyRLKey(_DRAFT),
    "trainer.algorithm.temperature": SkyRLKey(
        "Log-probs always use the temperature of sampling. Set generator.sampling_params.temperature.",
        (None, "${generator.sampling_params.temperature}"),
    ),
    "trainer.algorithm.zero_variance_filter_tol": SkyRLKey(
        "Rewards are equal only if they are the same number.", (0, 1e-6)
    ),
    "trainer.algorithm.dppo.dppo_type": SkyRLKey(
        "Set trainer.algorithm.policy_loss_type=dppo_kl and dppo.kl_threshold.", ("binary_tv",)
    ),
    "trainer.fully_async.simulate_training": SkyRLKey(_SIMULATION, (False,)),
    "trainer.fully_async.simulate_training_step_seconds": SkyRLKey(_SIMULATION),
    "trainer.fully_async.simulate_weight_sync_seconds": SkyRLKey(_SIMULATION),
    "trainer.recompute_old_logprobs_per_minibatch": SkyRLKey("Log-probs do not depend on how a batch is divided."),
    "trainer.enable_ray_gpu_monitor": SkyRLKey("The memory of ranks and engines is logged with the run's metrics."),
    "trainer.tags": SkyRLKey("Set WANDB_TAGS in the environment."),
    "trainer.print_example_interval": SkyRLKey(_EXAMPLES),
    "trainer.log_example_interval": SkyRLKey(_EXAMPLES),
    "trainer.num_logger_eval_samples": SkyRLKey(_EXAMPLES),
    "trainer.num_logger_train_samples": SkyRLKey(_EXAMPLES),
    "trainer.logprobs_chunk_size": SkyRLKey(_PIECES),
    "trainer.vocab_entropy_chunk_size": SkyRLKey(_PIECES),
    "trainer.vocab_entropy_chunk_memory_mb": SkyRLKey(_PIECES),
    "trainer.fused_lm_head_logprob": SkyRLKey(_PIECES),
    "trainer.fused_lm_head_logprob_backend": SkyRLKey(_PIECES),
    "generator.inference_engine.delta_weight_sync": SkyRLKey(
        "generator.weight_sync_only_changed=true sends only changed elements. generator.weight_sync_route=checkpoint "
        "sends them as files."
    ),
    "generator.inference_engine.enable_return_routed_experts": SkyRLKey(
        "Engines return routed experts if trainer.moe_routing_replay=rollout."
    ),
    "generator.inference_engine.offload_kv_for_weight_sync": SkyRLKey(
        "trainer.placement.colocate_offload=kv_cache or all frees the KV cache before a weight sync."
    ),
    "generator.inference_engine.use_expandable_segments": SkyRLKey(_ALLOCATOR),
    "generator.inference_engine.distributed_executor_backend": SkyRLKey(
        "Ray places engines. The ranks of an engine are processes on its node; trainer.placement.nodes_per_engine sets "
        "the number of nodes."
    ),
    "generator.inference_engine.speculative_config": SkyRLKey(
        "Set generator.speculative, whose keys have the same names."
    ),
    "generator.inference_engine.enable_pd": SkyRLKey(_PREFILL),
    "generator.inference_engine.num_prefill": SkyRLKey(_PREFILL),
    "generator.inference_engine.engine_init_kwargs.kv_transfer_config": SkyRLKey(
        f"{_PREFILL} Set a connector for another purpose in generator.engine_init_kwargs.kv_transfer_config."
    ),
    "generator.inference_engine.router_init_kwargs": SkyRLKey("The driver distributes requests to the engines itself."),
    "generator.sampling_params.additional_kwargs": SkyRLKey(_KWARGS, (None, {})),
    "generator.eval_sampling_params.additional_kwargs": SkyRLKey(_KWARGS, (None, {})),
    "generator.use_cache_salt": SkyRLKey("Cached prompts of other weights are never reused."),
    "generator.vision_language_generator": SkyRLKey("Only text models are supported.", (False,)),
    "generator.merge_stepwise_output": SkyRLKey("Turns that continue a sequence are always merged into one sequence."),
}
"""Dotted name -> the key. `*` stands for one part of a name. An entry applies to all keys below its name."""

_ONLY_SPEED = re.compile(
    "recompute|pipeline|offload|overlap|fusion|dispatcher|grouped_gemm|cuda_graph|cp_comm_type|attention_backend|mtp_"
    "|precision_aware|distributed_optimizer"
)
"""Parts of the names of Megatron's settings that affect only memory and speed."""


@functools.cache
def find_skyrl_key(name: str) -> SkyRLKey | None:
    """Return the entry of SKYRL_KEYS for a key or for the innermost section that contains it, or None."""
    if name in key_aliases():
        return None
    parts = name.split(".")
    for end in range(len(parts), 1, -1):
        starred = [parts[0], "*", *parts[2:end]]
        for pattern in (parts[:end], starred):
            if entry := SKYRL_KEYS.get(".".join(pattern)):
                return entry
    return None


def pop_skyrl_keys(content: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Remove the keys of SKYRL_KEYS, and sections that become empty, from nested plain values in place.

    Args:
        content: Nested plain values of a configuration, or of a section.
        prefix: Dotted name of the section with a trailing dot; "" for the root.

    Yields:
        The dotted name and value of each removed key. Keys are only removed while the caller iterates.
    """
    for name in list(content):
        key, value = f"{prefix}{name}", content[name]
        has_keys = isinstance(value, dict) and bool(value)
        if has_keys:
            yield from pop_skyrl_keys(value, f"{key}.")
        if find_skyrl_key(key) is not None and not has_keys:
            yield key, value
        if (has_keys and not value) or (find_skyrl_key(key) is not None and not has_keys):
            del content[name]


def find_skyrl_key_problems(skyrl_keys: Iterable[tuple[str, Any]], config: Config) -> Iterator[Problem]:
    """Yield a problem for each key of SkyRL that would change results and is not supported.

    Args:
        skyrl_keys: Keys and values that `pop_skyrl_keys` removed.
        config: The configuration without them. With `trainer.strategy=megatron` its settings of Megatron are checked,
            too.
    """
    for key, value in skyrl_keys:
        entry = find_skyrl_key(key)
        if entry is None or entry.accepted_values is None:
            continue
        accepted = [_follow_interpolation(item, config) for item in entry.accepted_values]
        if value not in accepted:
            yield Problem(key, value, " or ".join(map(format_value, accepted)), entry.advice)
    if config.trainer.strategy == "megatron":
        yield from _find_pass_through_problems(config)


def _find_pass_through_problems(config: Config) -> Iterator[Problem]:
    """Yield settings that SkyRL passes through to Megatron and that affect more than memory and speed."""
    optimizer = "Only Megatron reads it. Set trainer.policy.optimizer_config."
    for role in ("policy", "ref"):
        section, megatron = f"trainer.{role}.megatron_config", getattr(config.trainer, role).megatron_config
        model = f"Only Megatron reads it. Change the model with trainer.{role}.model_config_kwargs."
        advice_by_mapping = {"model_config_kwargs": model, "transformer_config_kwargs": model}
        if role == "policy":
            advice_by_mapping["optimizer_config_kwargs"] = optimizer
        for name, advice in advice_by_mapping.items():
            for key, value in getattr(megatron, name).items():
                entry = find_skyrl_key(f"{section}.{key}")
                is_accepted = entry is not None and (entry.accepted_values is None or value in entry.accepted_values)
                if not is_accepted and not _ONLY_SPEED.search(key):
                    yield Problem(f"{section}.{name}.{key}", value, "left out with strategy=megatron", advice)


def describe_ignored_skyrl_keys(skyrl_keys: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """Yield one line for each group of SkyRL's keys that have no effect and the same advice.

    Args:
        skyrl_keys: Keys and values that `pop_skyrl_keys` removed.
    """
    by_advice: dict[str, list[str]] = {}
    for key, value in skyrl_keys:
        entry = find_skyrl_key(key)
        if entry is not None and entry.accepted_values is None:
            by_advice.setdefault(entry.advice, []).append(f"{key}={format_value(value)}")
    for advice, keys in by_advice.items():
        yield one_line(f"{', '.join(keys)}: no effect. {advice}")


def _follow_interpolation(value: Any, config: Config) -> Any:
    is_interpolation = isinstance(value, str) and value.startswith("${")
    return get_value(config, value[2:-1]) if is_interpolation else value


# -- Translation of parallelism in recipes


_ROLES = ("policy", "ref")
_SHARDED = ("pipeline_model", "expert_tensor")
"""Megatron's kinds of parallelism whose ranks become ranks of FSDP2."""


def resolve_megatron(config: Config) -> tuple[Config, list[str]]:
    """Translate `trainer.strategy=megatron` and its sizes to fsdp2.

    Returns:
        A changed copy, not frozen, and a note for each change. Other strategies return the configuration unchanged.
    """
    if config.trainer.strategy != "megatron":
        return config, []
    notes = ["trainer.strategy=megatron -> fsdp2: models are sharded over all ranks of a role."]
    config = replace_value(config, "trainer.strategy", "fsdp2")
    for role in _ROLES:
        for kind, key, size, reason in _map_megatron_sizes(config, role):
            megatron_key = f"trainer.{role}.megatron_config.{kind}_parallel_size"
            target = key if size is None else f"{key}={size}"
            notes.append(f"{megatron_key}={get_value(config, megatron_key)} -> {target}{reason}.")
            config = replace_value(config, megatron_key, None if kind == "expert_tensor" and role == "policy" else 1)
            if size is not None:
                config = replace_value(config, key, size)
    return config, notes


def _map_megatron_sizes(config: Config, role: str) -> Iterator[tuple[str, str, int | None, str]]:
    """Yield (Megatron's kind of parallelism, key of this package or a description, its size or None, reason)."""
    section = getattr(config.trainer, role)
    megatron = section.megatron_config
    tensor, context = megatron.tensor_model_parallel_size, megatron.context_parallel_size
    experts = megatron.expert_model_parallel_size
    section_name = f"trainer.{role}"
    sharded = "FSDP2 over those ranks"
    if context > 1 and section.sequence_parallel_size == 1:  # otherwise the size that was set for fsdp2 counts
        yield "context", f"{section_name}.sequence_parallel_size", context, ""
    if experts > 1 and section.expert_parallel_size == 1:
        if config.trainer.policy.use_torch_compile:
            yield "expert_model", sharded, None, ", because trainer.policy.use_torch_compile=true"
        else:
            yield "expert_model", f"{section_name}.expert_parallel_size", experts, ""
    if tensor > 1 and section.tensor_parallel_size == 1:
        obstacle = _find_tensor_parallel_obstacle(config, role, context, experts)
        if obstacle:
            yield "tensor_model", sharded, None, f", because {obstacle}"
        else:
            yield "tensor_model", f"{section_name}.tensor_parallel_size", tensor, ""
    for kind in _SHARDED:
        if (getattr(megatron, f"{kind}_parallel_size") or 1) > 1:
            yield kind, sharded, None, ""


def _find_tensor_parallel_obstacle(config: Config, role: str, context: int, experts: int) -> str:
    section = getattr(config.trainer, role)
    if context > 1 or section.sequence_parallel_size > 1:
        return "sequences are split over the ranks already"
    if experts > 1 or section.expert_parallel_size > 1:
        return "experts are distributed over the ranks already"
    return "trainer.policy.use_torch_compile=true" if config.trainer.policy.use_torch_compile else ""


def resolve_engine_data_parallel(config: Config) -> tuple[Config, list[str]]:
    """Replace data-parallel copies inside an engine with separate engines.

    The run uses the same number of accelerators and samples the same responses.

    Returns:
        A changed copy, not frozen, and a list with one note. Without data parallelism, or with servers, the
        configuration is returned unchanged.
    """
    generator = config.generator
    copies, ranks = generator.inference_engine_data_parallel_size, generator.inference_engine_tensor_parallel_size
    if copies <= 1 or not generator.run_engines_locally:
        return config, []
    engines = generator.num_inference_engines * copies
    note = (
        f"generator.inference_engine_data_parallel_size={copies} -> generator.num_inference_engines={engines}: "
        "each copy is a separate engine"
    )
    changes = {"inference_engine_data_parallel_size": 1, "num_inference_engines": engines}
    if generator.inference_engine_expert_parallel_size == copies * ranks:
        changes["inference_engine_expert_parallel_size"] = ranks
        note += f" with its experts on its {ranks} ranks" if ranks > 1 else " with all experts"
    for key, value in changes.items():
        config = replace_value(config, f"generator.{key}", value)
    return config, [f"{note}."]
