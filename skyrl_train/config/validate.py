"""Validation of a resolved configuration before anything is started.

Loops over all keys check the metadata of single keys. Separate functions check combinations of keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from skyrl_train.config.choices import CHAT_TEMPLATES, OptimizerName
from skyrl_train.config.drafts import find_draft_problems, uses_v2_on_cpu
from skyrl_train.config.keys import get_value, value_keys
from skyrl_train.config.locations import find_uri_problem, list_uris, redact_uri
from skyrl_train.config.predicates import (
    GROUP_ESTIMATORS,
    has_expert_adapters,
    is_colocated,
    lacks_critic,
    needs_critic,
    needs_reference,
    num_ranks,
)
from skyrl_train.config.problems import Problem, format_value
from skyrl_train.config.redaction import contains_password
from skyrl_train.config.schema import Config, DPPOConfig, TrainerConfig
from skyrl_train.config.section import KeyMetadata
from skyrl_train.config.value_parsing import InvalidValue, convert_value
from skyrl_train.registry import unknown_name_message

PLUGIN_KEYS = frozenset(name for name, key in value_keys().items() if key.metadata.allows_plugins)
"""Keys whose values can be names that modules of `trainer.plugins` register. These are checked after the import."""

SANDBOX_SHUTDOWN_S = 10.0
"""Maximum time (seconds) in which a killed sandbox ends."""

STEP_DEADLINE_ADVICE = "Otherwise episodes fail with a timeout, and their processes are killed."

_PARALLELISM_KINDS = {
    "sequence": "computes a part of every sequence",
    "tensor": "holds a shard of every layer",
    "expert": "holds some experts of every layer",
}
"""Kinds of parallelism -> the work of one rank of a group."""


def validate(config: Config, allow_unregistered_names: bool = False) -> list[Problem]:
    """Return all problems of a resolved configuration (see `local_checks.resolve_device`).

    The checks cover types, ranges, choices and combinations of keys. If a type is wrong, only types are checked.

    Args:
        config: The configuration.
        allow_unregistered_names: True if the keys of PLUGIN_KEYS may have names that are registered later.
    """
    if wrong := list(_find_wrong_types(config)):  # the other checks would compare text with numbers
        return wrong
    return [
        *_find_out_of_range(config),
        *_find_unknown_choices(config, allow_unregistered_names),
        *_find_conflicts(config),
    ]


def _find_wrong_types(config: Config) -> Iterator[Problem]:
    """Yield values of wrong types. Only a configuration that was built in Python can have them."""
    for name, key in value_keys().items():
        value = get_value(config, name)
        try:
            convert_value(value, key.type_hint)
        except InvalidValue as invalid:
            yield Problem(name, value, invalid.allowed, invalid.advice)


def _find_out_of_range(config: Config) -> Iterator[Problem]:
    for name, key in value_keys().items():
        if (allowed := key.metadata.range) is not None:
            for item in _items(get_value(config, name)):
                if _is_number(item) and item not in allowed:
                    yield Problem(name, item, str(allowed))


def _find_unknown_choices(config: Config, allow_unregistered_names: bool) -> Iterator[Problem]:
    for name, key in value_keys().items():
        metadata, value = key.metadata, get_value(config, name)
        if metadata.choices is None or (
            metadata.allows_plugins and (allow_unregistered_names or config.trainer.plugins)
        ):
            continue
        for item in _items(value):
            if item not in metadata.choices:
                known = sorted(map(format_value, metadata.choices))
                allowed = known[0] if len(known) == 1 else f"one of {', '.join(known)}"
                advice = _unknown_choice_advice(metadata, name, item, known)
                if metadata.allows_plugins and not advice:
                    advice = "A name of your own requires trainer.plugins=[the module that registers it]."
                yield Problem(name, value, allowed, advice)


def _unknown_choice_advice(metadata: KeyMetadata, name: str, item: Any, known: list[str]) -> str:
    """Return the reason why a value is not supported, a suggestion, or an empty text."""
    reasons = metadata.unavailable_reason
    if isinstance(reasons, str) and reasons:
        return reasons
    _, _, hint = unknown_name_message(name, item, known).rpartition(". ")
    suggestion = hint if hint.startswith("Did you mean") else ""
    return reasons.get(item, suggestion) if isinstance(reasons, Mapping) else suggestion


def _items(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _find_conflicts(config: Config) -> Iterator[Problem]:
    yield from _algorithm(config)
    yield from _dppo_bounds(config)
    yield from _mini_batch(config.trainer, "policy")
    yield from _group_filters(config)
    yield from _conversations(config)
    trainer, placement = config.trainer, config.trainer.placement
    if trainer.resume_mode == "from_path" and not trainer.resume_path:
        key, value = "trainer.resume_path", trainer.resume_path
        yield Problem(key, value, "a checkpoint folder with trainer.resume_mode=from_path")
    if trainer.gradient_checkpointing == "selective" and trainer.gradient_checkpointing_use_reentrant:
        key = "trainer.gradient_checkpointing_use_reentrant"
        yield Problem(key, True, "false with trainer.gradient_checkpointing=selective")
    yield from _single_rank_strategy("policy", num_ranks(placement, "policy"), trainer.strategy)
    yield from find_role_problems(config)
    yield from _routing(config)
    yield from _router_loss(config)
    yield from _expert_adapters(config)
    yield from _parallel(config)
    yield from _deepspeed(config)
    yield from _optimizers(config)
    yield from _accelerator(config)
    yield from _engine_shape(config)
    yield from _servers(config)
    yield from _ports(config)
    yield from _environment_deadlines(config)
    yield from _environment(config)
    if str(trainer.export_path).rstrip("/") == str(trainer.ckpt_path).rstrip("/"):
        allowed = "another folder than trainer.ckpt_path"
        yield Problem("trainer.export_path", trainer.export_path, allowed, "Both contain folders named global_step_N.")
    yield from _uris(config)


def _uris(config: Config) -> Iterator[Problem]:
    storage_uris = dict(list_uris(config))
    checked_uris = list(storage_uris.values())
    for key, uri in storage_uris.items():
        if (problem := find_uri_problem(uri)) is not None:
            yield Problem(key, redact_uri(uri), *problem)
    for key in value_keys():
        if key in storage_uris or (value := get_value(config, key)) in checked_uris or not contains_password(value):
            continue
        advice = "It would be in every copy of the configuration. Tokens are read from environment variables."
        yield Problem(key, value, "a URL without user name and password", advice)


def _dppo_bounds(config: Config) -> Iterator[Problem]:
    dppo, default = config.trainer.algorithm.dppo, DPPOConfig()
    if dppo.tv_threshold is not None and (dppo.delta_low, dppo.delta_high) != (default.delta_low, default.delta_high):
        advice = "It replaces delta_low and delta_high. Set either it or these two keys."
        yield Problem(
            "trainer.algorithm.dppo.tv_threshold", dppo.tv_threshold, "null with delta_low or delta_high", advice
        )


def _environment_deadlines(config: Config) -> Iterator[Problem]:
    """Yield time limits inside an environment that do not end before the limit of the environment's step."""
    limit = config.trainer.timeouts.environment_step_s
    deadlines = {name: ["timeout"] for name in ("search", "searchcode", "llm_as_a_judge", "math", "openenv")}
    deadlines["searchcode"].append("python_timeout")
    for name in deadlines.get(config.environment.env_class, []):
        key = f"environment.skyrl_gym.{config.environment.env_class}.{name}"
        if (value := get_value(config, key)) >= limit:
            yield Problem(key, value, f"less than trainer.timeouts.environment_step_s={limit:g}", STEP_DEADLINE_ADVICE)
    if config.environment.env_class != "tool_use":
        return
    for tool, settings in config.environment.skyrl_gym.tool_use.tool_settings.items():
        for name in ("wall_s", "timeout"):
            value = settings.get(name) if isinstance(settings, Mapping) else None
            if isinstance(value, int | float) and value >= limit:
                key = f"environment.skyrl_gym.tool_use.tool_settings.{tool}.{name}"
                yield Problem(
                    key, value, f"less than trainer.timeouts.environment_step_s={limit:g}", STEP_DEADLINE_ADVICE
                )


def _deepspeed(config: Config) -> Iterator[Problem]:
    separate_keys = {
        "stage": "zero_stage",
        "offload_optimizer": "offload_optimizer",
        "offload_param": "offload_parameters",
    }
    for role in ("policy", "ref", "critic"):
        section = f"trainer.{role}.deepspeed_config"
        zero = getattr(config.trainer, role).deepspeed_config
        if zero.offload_parameters and zero.zero_stage < 3:
            advice = "Only ZeRO stage 3 shards parameters. In stage 2 every rank computes with the full model."
            yield Problem(f"{section}.offload_parameters", True, f"false with zero_stage={zero.zero_stage}", advice)
        for name in separate_keys.keys() & zero.zero_optimization.keys():
            key, value = f"{section}.zero_optimization.{name}", zero.zero_optimization[name]
            yield Problem(key, value, "not set", f"Set {section}.{separate_keys[name]} instead.")
        if config.trainer.strategy == "deepspeed" and zero.zero_stage == 3 and config.trainer.policy.use_torch_compile:
            advice = "ZeRO stage 3 gathers weights inside a layer, so the layer cannot be compiled."
            yield Problem(f"{section}.zero_stage", 3, "2 with trainer.policy.use_torch_compile=true", advice)


def _optimizers(config: Config) -> Iterator[Problem]:
    for role in ("policy", "critic"):
        section = getattr(config.trainer, role)
        key, name = f"trainer.{role}.optimizer_config.name", section.optimizer_config.name
        if name != OptimizerName.ADAMW and config.trainer.strategy == "deepspeed":
            advice = "ZeRO updates flat ranges of many parameters. Set trainer.strategy=fsdp2 for other optimizers."
            yield Problem(key, name, "adamw with trainer.strategy=deepspeed", advice)
        if name == OptimizerName.MUON and section.model.lora.rank:
            advice = "Muon orthogonalizes the update of a weight, not those of the two matrices of an adapter."
            yield Problem(key, name, f"adamw or adamw_8bit with trainer.{role}.model.lora.rank above 0", advice)
        if name == OptimizerName.MUON and section.fsdp_config.cpu_offload and config.device != "cpu":
            advice = "Muon's matrix products are too slow on a CPU."
            yield Problem(key, name, f"adamw or adamw_8bit with trainer.{role}.fsdp_config.cpu_offload=true", advice)
        if name == OptimizerName.ADAMW_8BIT and section.tensor_parallel_size > 1:
            advice = "Blocks of 8-bit moments cannot be assembled from shards of columns."
            yield Problem(key, name, f"adamw or muon with trainer.{role}.tensor_parallel_size above 1", advice)


def _parallel(config: Config) -> Iterator[Problem]:
    placement = config.trainer.placement
    ranks = {"policy": num_ranks(placement, "policy")}
    for role in ("ref", "critic"):
        ranks[role] = ranks["policy"] if is_colocated(placement, role) else num_ranks(placement, role)
    if config.trainer.strategy == "megatron":
        yield Problem("trainer.strategy", "megatron", "fsdp2", "Set tensor_parallel_size for tensor parallelism.")
    for role, count in ranks.items():
        section = getattr(config.trainer, role)
        for kind, work in _PARALLELISM_KINDS.items():
            key, size = f"{kind}_parallel_size", getattr(section, f"{kind}_parallel_size")
            if size > 1 and count % size:
                allowed = f"a divisor of {count}, the number of ranks of the {role}"
                advice = f"It is the number of consecutive ranks each of which {work}."
                yield Problem(f"trainer.{role}.{key}", size, allowed, advice)
        if section.tensor_parallel_size > 1:
            yield from _tensor_parallel(config, role, count)
        if section.expert_parallel_size > 1:
            yield from _expert_parallel(config, role)


def _expert_adapters(config: Config) -> Iterator[Problem]:
    if has_expert_adapters(config.trainer.policy) and config.trainer.policy.model.lora.sync == "adapter":
        allowed = "auto or merged with trainer.policy.model.lora.target_parameters"
        yield Problem("trainer.policy.model.lora.sync", "adapter", allowed, "Engines take adapters on experts merged.")


def _routing(config: Config) -> Iterator[Problem]:
    key, replay, generator = "trainer.moe_routing_replay", config.trainer.moe_routing_replay, config.generator
    if replay == "rollout" and not generator.run_engines_locally:
        allowed = "null or old_policy, or generator.run_engines_locally=true"
        yield Problem(key, replay, allowed, "Servers do not return the experts of their tokens.")
    elif replay == "rollout" and config.device == "cpu" and not _returns_experts_on_cpu(generator.backend):
        allowed = "null or old_policy, or generator.backend=transformers"
        yield Problem(key, replay, allowed, f"On a CPU {generator.backend} does not return the experts of its tokens.")
    elif replay == "rollout" and generator.backend == "vllm" and not generator.enable_prefix_caching:
        allowed = "null or old_policy, or generator.enable_prefix_caching=true"
        yield Problem(key, replay, allowed, "vLLM returns the experts of tokens only with its prefix cache.")
    elif replay == "rollout" and generator.backend == "sglang" and not generator.enable_chunked_prefill:
        allowed = "null or old_policy, or generator.enable_chunked_prefill=true"
        yield Problem(key, replay, allowed, "SGLang returns the experts of tokens only with chunked prefill.")


def _returns_experts_on_cpu(backend: str) -> bool:
    # vLLM's V2 model runner, which returns them, requires Triton. Only the user can know of a Triton for CPUs.
    return backend == "transformers" or (backend == "vllm" and uses_v2_on_cpu())


def _router_loss(config: Config) -> Iterator[Problem]:
    key, coef = "trainer.algorithm.router_aux_loss_coef", config.trainer.algorithm.router_aux_loss_coef
    for required, is_conflict, reason in (
        (
            "trainer.policy.sequence_parallel_size=1",
            config.trainer.policy.sequence_parallel_size > 1,
            "The loss needs complete sequences on a rank.",
        ),
        ("trainer.strategy=fsdp2", config.trainer.strategy == "deepspeed", "DeepSpeed scales losses itself."),
    ):
        if coef and is_conflict:
            yield Problem(key, coef, f"0, or {required}", reason)


def find_role_problems(config: Config) -> Iterator[Problem]:
    """Yield the problems of the critic, the reference and the reward model: missing paths, ranks and mini-batch sizes.

    The models that a plugin's algorithm needs are only known once it is registered, so call this again after plugins
    have been imported.
    """
    trainer, placement = config.trainer, config.trainer.placement
    if lacks_critic(trainer):
        yield missing_critic_problem(trainer)
    if needs_critic(trainer) and not placement.colocate_all:
        ranks = placement.critic_num_nodes * placement.critic_num_gpus_per_node
        yield from _single_rank_strategy("critic", ranks, trainer.strategy)
    if needs_critic(trainer):
        yield from _mini_batch(trainer, "critic")
    yield from _dedicated_ranks(config)


def missing_critic_problem(trainer: TrainerConfig) -> Problem:
    """Return the problem of an advantage estimator that requires a critic, without one (`predicates.lacks_critic`)."""
    advice = (
        f"advantage_estimator={trainer.algorithm.advantage_estimator} needs a critic, because it takes values. Most "
        "runs use the policy's path."
    )
    return Problem("trainer.critic.model.path", trainer.critic.model.path, "the path of a model", advice)


def _single_rank_strategy(role: str, ranks: int, strategy: str) -> Iterator[Problem]:
    if strategy == "single" and ranks > 1:
        advice = f"The {role} has {ranks} ranks; set {role}_num_gpus_per_node and {role}_num_nodes to 1."
        yield Problem("trainer.strategy", "single", "fsdp2 with more than one rank", advice)


def _dedicated_ranks(config: Config) -> Iterator[Problem]:
    """Yield models that are not colocated and have no ranks."""
    placement, algorithm = config.trainer.placement, config.trainer.algorithm
    dedicated = {
        "ref": not placement.colocate_policy_ref and needs_reference(algorithm),
        "critic": needs_critic(config.trainer),
        "reward": config.trainer.reward.model.path is not None,
    }
    for role in (name for name, is_dedicated in dedicated.items() if is_dedicated and not placement.colocate_all):
        for key in (f"{role}_num_nodes", f"{role}_num_gpus_per_node"):
            if getattr(placement, key) == 0:
                advice = "The model has dedicated GPUs. With trainer.placement.colocate_all=true it uses the policy's."
                yield Problem(f"trainer.placement.{key}", 0, "at least 1", advice)


def _tensor_parallel(config: Config, role: str, count: int) -> Iterator[Problem]:
    trainer, key = config.trainer, f"trainer.{role}.tensor_parallel_size"
    section = getattr(trainer, role)
    size, shard = section.tensor_parallel_size, section.fsdp_config.fsdp_size
    if shard > 0 and (count // size) % shard:
        allowed = f"-1 or a divisor of {count // size} with tensor_parallel_size={size}"
        advice = "FSDP2 shards over the ranks that hold the same tensor-parallel shard."
        yield Problem(f"trainer.{role}.fsdp_config.fsdp_size", shard, allowed, advice)
    for required, is_conflict, reason in (
        (
            "trainer.strategy=fsdp2",
            trainer.strategy not in ("fsdp", "fsdp2"),
            "Other strategies cannot shard tensor-parallel layers.",
        ),
        (
            f"trainer.{role}.sequence_parallel_size=1",
            section.sequence_parallel_size > 1,
            "Tensor and sequence parallelism cannot be combined.",
        ),
        (
            "trainer.policy.use_torch_compile=false",
            trainer.policy.use_torch_compile,
            "Layers that communicate with other ranks cannot be compiled.",
        ),
        (
            f"trainer.{role}.model.lora.target_parameters=null",
            has_expert_adapters(section),
            "Adapters on experts cannot be divided by features; expert_parallel_size divides them by experts.",
        ),
    ):
        if is_conflict:
            yield Problem(key, section.tensor_parallel_size, f"1, or {required}", reason)


def _expert_parallel(config: Config, role: str) -> Iterator[Problem]:
    trainer, key = config.trainer, f"trainer.{role}.expert_parallel_size"
    section = getattr(trainer, role)
    size, shard = section.expert_parallel_size, section.fsdp_config.fsdp_size
    if shard > 0 and shard % size:
        allowed = f"-1 or a multiple of {size} with expert_parallel_size={size}"
        advice = "The ranks of one copy of the model must hold all experts."
        yield Problem(f"trainer.{role}.fsdp_config.fsdp_size", shard, allowed, advice)
    for required, is_conflict, reason in (
        (
            "trainer.strategy=fsdp2",
            trainer.strategy not in ("fsdp", "fsdp2"),
            "Other strategies cannot shard distributed experts.",
        ),
        (
            f"trainer.{role}.tensor_parallel_size=1",
            section.tensor_parallel_size > 1,
            "Expert and tensor parallelism cannot be combined.",
        ),
        (
            "trainer.policy.use_torch_compile=false",
            trainer.policy.use_torch_compile,
            "Layers that communicate with other ranks cannot be compiled.",
        ),
    ):
        if is_conflict:
            yield Problem(key, size, f"1, or {required}", reason)


def _accelerator(config: Config) -> Iterator[Problem]:
    if config.trainer.policy.record_memory and config.device == "cpu":
        advice = (
            "It records an accelerator's allocator. On a CPU the metric memory/learner_peak_rss_gib reports the memory "
            "of a rank."
        )
        yield Problem("trainer.policy.record_memory", True, "false with device=cpu", advice)
    backend = config.generator.weight_sync_backend
    supported = {"cpu": "gloo", "cuda": "nccl"}
    if backend in supported.values() and backend != supported.get(config.device, backend):
        allowed = f"{supported[config.device]} with device={config.device}"
        advice = "Weights are sent over the collectives of the trainer's device."
        yield Problem("generator.weight_sync_backend", backend, allowed, advice)


def _servers(config: Config) -> Iterator[Problem]:
    generator = config.generator
    if generator.external_proxy_url is not None and not generator.external_server_urls:
        advice = "Weights cannot be sent through a router. Set generator.external_server_urls to the servers behind it."
        yield Problem("generator.external_proxy_url", generator.external_proxy_url, "null", advice)
    key = "external_server_urls" if generator.external_server_urls else "remote_inference_engine_urls"
    if generator.run_engines_locally or not isinstance(getattr(generator, key), list | tuple):
        return
    value = getattr(generator, key)
    urls = [str(url).rpartition("://")[2].rstrip("/") for url in value]
    if any("@" in url for url in urls) and not contains_password(value):  # _uris reports passwords
        redacted = ["***@" + url.rpartition("@")[2] if "@" in url else url for url in urls]
        advice = "Tokens of servers are read from SKYRL_API_KEY."
        yield Problem(f"generator.{key}", redacted, "URLs without user name and password", advice)
    elif not urls or "" in urls:
        yield Problem(f"generator.{key}", urls, "host:port of at least one server")
    elif len(set(urls)) < len(urls):
        yield Problem(f"generator.{key}", urls, "a list of different servers", "A server has one engine.")


def _ports(config: Config) -> Iterator[Problem]:
    port, generator = config.trainer.metrics_port, config.generator
    if generator.enable_http_endpoint and port == generator.http_endpoint_port:
        advice = "Two servers cannot listen on the same port."
        yield Problem("trainer.metrics_port", port, "another port than generator.http_endpoint_port", advice)


def _environment(config: Config) -> Iterator[Problem]:
    if config.environment.env_class == "lcb":
        lcb, step = config.environment.skyrl_gym.lcb, config.trainer.timeouts.environment_step_s
        if lcb.test_timeout_s > lcb.timeout_s:
            allowed = f"at most environment.skyrl_gym.lcb.timeout_s={lcb.timeout_s:g}"
            yield Problem("environment.skyrl_gym.lcb.test_timeout_s", lcb.test_timeout_s, allowed)
        if lcb.timeout_s + SANDBOX_SHUTDOWN_S > step:
            allowed = f"at most {step - SANDBOX_SHUTDOWN_S:g} with trainer.timeouts.environment_step_s={step:g}"
            advice = (
                f"The sandbox may take {SANDBOX_SHUTDOWN_S:g} s to end. After the limit of a step the environment is "
                "killed, and the episode has no score."
            )
            yield Problem("environment.skyrl_gym.lcb.timeout_s", lcb.timeout_s, allowed, advice)
    if config.environment.env_class == "mini_swe":
        yield from _mini_swe(config)


def _mini_swe(config: Config) -> Iterator[Problem]:
    section, swe = "environment.skyrl_gym.mini_swe", config.environment.skyrl_gym.mini_swe
    if swe.test_timeout_s > swe.grading_timeout_s:
        allowed = f"at most {section}.grading_timeout_s={swe.grading_timeout_s:g}"
        yield Problem(f"{section}.test_timeout_s", swe.test_timeout_s, allowed)
    step, needed = config.trainer.timeouts.environment_step_s, swe.command_timeout_s + swe.grading_timeout_s
    if needed + SANDBOX_SHUTDOWN_S > step:  # the command that submits is graded in the same step
        allowed = (
            f"at least {needed + SANDBOX_SHUTDOWN_S:g} with {section}.command_timeout_s={swe.command_timeout_s:g} and "
            f"{section}.grading_timeout_s={swe.grading_timeout_s:g}"
        )
        advice = (
            f"A sandbox may take {SANDBOX_SHUTDOWN_S:g} s to end. After the limit of a step the environment is killed, "
            "and the episode has no score."
        )
        yield Problem("trainer.timeouts.environment_step_s", step, allowed, advice)


def _engine_shape(config: Config) -> Iterator[Problem]:
    generator = config.generator
    ranks, experts = generator.inference_engine_tensor_parallel_size, generator.inference_engine_expert_parallel_size
    if generator.backend == "vllm" and experts not in (1, ranks):
        advice = "vLLM distributes experts over all ranks of an engine or over none."
        allowed = "1 or generator.inference_engine_tensor_parallel_size"
        yield Problem("generator.inference_engine_expert_parallel_size", experts, allowed, advice)
    if generator.batch_invariant and (config.device == "cpu" or generator.backend == "transformers"):
        allowed = "false on a CPU" if config.device == "cpu" else "false with generator.backend=transformers"
        advice = "Only GPU kernels of vLLM and SGLang support it."
        yield Problem("generator.batch_invariant", True, allowed, advice)
    yield from _nodes_per_engine(config)
    if generator.run_engines_locally:
        yield from find_draft_problems(config)
    if generator.backend != "transformers":
        return
    for kind in ("tensor", "pipeline", "expert"):
        key = f"generator.inference_engine_{kind}_parallel_size"
        if (size := get_value(config, key)) != 1:
            advice = "A transformers engine uses one accelerator. Raise generator.num_inference_engines instead."
            yield Problem(key, size, "1 with generator.backend=transformers", advice)


def _nodes_per_engine(config: Config) -> Iterator[Problem]:
    key, nodes = "trainer.placement.nodes_per_engine", config.trainer.placement.nodes_per_engine
    ranks, backend = config.generator.inference_engine_tensor_parallel_size, config.generator.backend
    for name in ("nnodes", "node_rank", "master_addr", "master_port"):
        if name in (kwargs := config.generator.engine_init_kwargs):
            yield Problem(f"generator.engine_init_kwargs.{name}", kwargs[name], "left out", f"Set {key} instead.")
    if nodes > 1 and backend != "vllm":
        advice = "Only a vLLM engine can span several nodes. Start more engines instead."
        yield Problem(key, nodes, f"1 with generator.backend={backend}", advice)
    elif nodes > 1 and config.device == "cpu" and ranks != nodes:
        advice = "On CPUs vLLM treats two ranks of an engine on one node as ranks on different nodes."
        yield Problem(key, nodes, f"1 or {ranks}, the number of ranks of an engine, with device=cpu", advice)
    elif nodes > 1 and ranks % nodes:
        advice = (
            "Every node must have the same number of ranks of an engine "
            "(generator.inference_engine_tensor_parallel_size)."
        )
        yield Problem(key, nodes, f"a divisor of {ranks}, the number of ranks of an engine", advice)


def _algorithm(config: Config) -> Iterator[Problem]:
    algorithm, generator = config.trainer.algorithm, config.generator
    estimator = algorithm.advantage_estimator
    if estimator in GROUP_ESTIMATORS and generator.n_samples_per_prompt == 1:
        advice = f"In a group of one sample {estimator} has no baseline, so all advantages are 0. The default is 5."
        yield Problem("generator.n_samples_per_prompt", 1, f"at least 2 with advantage_estimator={estimator}", advice)
    if algorithm.use_kl_in_reward and algorithm.use_kl_loss:
        advice = (
            "The KL divergence would be counted twice. Set trainer.algorithm.use_kl_loss=false or this key to false."
        )
        yield Problem("trainer.algorithm.use_kl_in_reward", True, "false while use_kl_loss=true", advice)
    yield from _bounds(config)
    if estimator == "distillation":
        yield from _distillation(config)
    if algorithm.use_kl_in_reward and algorithm.kl_ctrl.type == "adaptive" and algorithm.kl_loss_coef == 0:
        advice = "The controller multiplies it after every step, so 0 would remain 0. 0.001 is typical."
        yield Problem("trainer.algorithm.kl_loss_coef", 0.0, "more than 0 with kl_ctrl.type=adaptive", advice)
    if algorithm.sft.loss_type == "minor_sft" and algorithm.loss_reduction != "sequence_mean":
        key = "trainer.algorithm.loss_reduction"
        advice = "The loss is one value per sequence. Other reductions would count the length of a sequence twice."
        yield Problem(key, algorithm.loss_reduction, "sequence_mean with sft.loss_type=minor_sft", advice)
    if algorithm.loss_reduction == "token_mean_legacy" and generator.step_wise_trajectories:
        key = "trainer.algorithm.loss_reduction"
        advice = "It averages over sequences, but with step_wise_trajectories an episode has several sequences."
        yield Problem(key, algorithm.loss_reduction, "token_mean with step_wise_trajectories=true", advice)
    elif algorithm.loss_reduction == "token_mean_legacy" and config.environment.env_class == "agent":
        key = "trainer.algorithm.loss_reduction"
        advice = "It averages over sequences, but an episode of an agent may have several sequences."
        yield Problem(key, algorithm.loss_reduction, "token_mean with environment.env_class=agent", advice)
    if algorithm.use_tis and algorithm.tis_imp_ratio_cap <= 0:
        key, value = "trainer.algorithm.tis_imp_ratio_cap", algorithm.tis_imp_ratio_cap
        yield Problem(key, value, "more than 0 with use_tis=true", "2.0 is typical.")
    if algorithm.use_tis and algorithm.off_policy_correction.tis_ratio_type == "sequence":
        advice = "use_tis is the older name of tis_ratio_type=token, and its bound does not apply to sequences."
        allowed = "false with off_policy_correction.tis_ratio_type=sequence"
        yield Problem("trainer.algorithm.use_tis", True, allowed, advice)
    if generator.sampling_params.temperature == 0:
        key = "generator.sampling_params.temperature"
        advice = "Greedy samples of a prompt are all equal. Only evaluation can be greedy."
        yield Problem(key, 0.0, "more than 0", advice)
    betas = config.trainer.policy.optimizer_config.adam_betas, config.trainer.critic.optimizer_config.adam_betas
    for role, pair in zip(("policy", "critic"), betas, strict=True):
        if len(pair) != 2:
            yield Problem(f"trainer.{role}.optimizer_config.adam_betas", pair, "two numbers")


def _group_filters(config: Config) -> Iterator[Problem]:
    algorithm, generator, curriculum = config.trainer.algorithm, config.generator, config.data.curriculum
    max_length = generator.sampling_params.max_generate_length
    if algorithm.overlong_buffer.len > max_length:
        allowed = f"at most generator.sampling_params.max_generate_length={max_length}"
        yield Problem("trainer.algorithm.overlong_buffer.len", algorithm.overlong_buffer.len, allowed)
    filters = {
        "dynamic_sampling.type": algorithm.dynamic_sampling.type is not None,
        "zero_variance_filter": algorithm.zero_variance_filter,
    }
    if generator.n_samples_per_prompt == 1 and any(filters.values()):
        names = " and ".join(f"trainer.algorithm.{name}" for name, is_on in filters.items() if is_on)
        advice = "A group of one sample has equal rewards, so the filter would drop every prompt."
        yield Problem("generator.n_samples_per_prompt", 1, f"at least 2 with {names}", advice)
    if algorithm.dynamic_sampling.max_sample_batches == 0:
        key, advice = "trainer.algorithm.dynamic_sampling.max_sample_batches", "A step draws at least one batch."
        yield Problem(key, 0, "at least 1, or -1 for no limit", advice)
    if config.trainer.fully_async.enabled and config.trainer.placement.colocate_all:
        advice = "Colocated engines and trainer time-share accelerators, so they cannot run at the same time."
        yield Problem("trainer.placement.colocate_all", True, "false with trainer.fully_async.enabled", advice)
    if config.trainer.fully_async.sample_full_batch and not algorithm.zero_variance_filter:
        advice = "zero_variance_filter decides which groups are dropped."
        allowed = "false without trainer.algorithm.zero_variance_filter"
        yield Problem("trainer.fully_async.sample_full_batch", True, allowed, advice)
    if generator.over_provisioning and config.trainer.fully_async.enabled:
        advice = (
            "Asynchronous training already hides slow rollouts, and aborting them would change the order of others."
        )
        yield Problem(
            "generator.over_provisioning", generator.over_provisioning, "0 with trainer.fully_async.enabled", advice
        )
    if curriculum.min_pass_rate > curriculum.max_pass_rate:
        allowed = f"at most data.curriculum.max_pass_rate={curriculum.max_pass_rate:g}"
        yield Problem("data.curriculum.min_pass_rate", curriculum.min_pass_rate, allowed)


def _conversations(config: Config) -> Iterator[Problem]:
    generator, template = config.generator, config.generator.chat_template
    name = template.name_or_path
    if template.source == "name" and name is not None and name not in CHAT_TEMPLATES:
        allowed = f"null or one of {', '.join(sorted(CHAT_TEMPLATES))}"
        advice = "To use a template file, set generator.chat_template.source=file."
        yield Problem("generator.chat_template.name_or_path", name, allowed, advice)
    if generator.retokenize_chat_history and not generator.step_wise_trajectories:
        advice = "A re-tokenized history differs from the sampled tokens, so each turn must be a separate sequence."
        allowed = "false, or generator.step_wise_trajectories=true"
        yield Problem("generator.retokenize_chat_history", True, allowed, advice)


def _bounds(config: Config) -> Iterator[Problem]:
    """Yield pairs of bounds that no value lies between."""
    correction = "off_policy_correction"
    for low, high in (
        (f"{correction}.geo_mask_low", f"{correction}.geo_mask_high"),
        (f"{correction}.product_mask_low", f"{correction}.product_mask_high"),
        (f"{correction}.outlier_token_is_threshold_low", f"{correction}.outlier_token_is_threshold_high"),
        ("clip_cov.clip_cov_lb", "clip_cov.clip_cov_ub"),
    ):
        min_value, max_value = (get_value(config, f"trainer.algorithm.{key}") for key in (low, high))
        if min_value is not None and max_value is not None and min_value >= max_value:
            advice = "Only values between the two bounds are used, and there would be none."
            yield Problem(f"trainer.algorithm.{low}", min_value, f"less than {high}={max_value:g}", advice)


def _distillation(config: Config) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.ref.model.path == trainer.policy.model.path:
        advice = "The reference is the teacher. If it is the policy's own initial model, there is nothing to distill."
        allowed = "another model than the policy's with advantage_estimator=distillation"
        yield Problem("trainer.ref.model.path", trainer.ref.model.path, allowed, advice)
    if trainer.update_ref_every_epoch:
        advice = "The reference is the teacher and must not be replaced with the policy."
        yield Problem("trainer.update_ref_every_epoch", True, "false with advantage_estimator=distillation", advice)
    if trainer.algorithm.use_kl_in_reward:
        advice = "Distillation does not read rewards, so a penalty on them would have no effect."
        key = "trainer.algorithm.use_kl_in_reward"
        yield Problem(key, True, "false with advantage_estimator=distillation", advice)


def _mini_batch(trainer: TrainerConfig, role: str) -> Iterator[Problem]:
    name = f"{role}_mini_batch_size"
    if (size := getattr(trainer, name)) > trainer.train_batch_size:
        limit = f"at most trainer.train_batch_size={trainer.train_batch_size}"
        yield Problem(f"trainer.{name}", size, limit, "An update cannot have more prompts than its step.")
