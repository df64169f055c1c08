"""Everything that is wrong with a configuration, before anything is started.

What fields say about single keys is checked by loops over all keys; combinations of keys have functions of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from skyrl_train.config.choices import CHAT_TEMPLATES
from skyrl_train.config.keys import get_value, value_keys
from skyrl_train.config.locations import find_uri_problem, list_uris, redact_uri
from skyrl_train.config.predicates import (
    GROUP_ESTIMATORS,
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
"""Keys whose names modules of `trainer.plugins` may register: checked when those are imported."""

SANDBOX_SHUTDOWN_S = 10.0
"""Time (seconds) that a killed sandbox may take to end."""

STEP_DEADLINE_ADVICE = "Episodes would fail as timeouts, and their processes be killed."

_PARALLELISM_KINDS = {
    "sequence": "runs a part of every sequence",
    "tensor": "has a part of every layer",
    "expert": "has some of every layer's experts",
}
"""Kinds of parallelism -> what a rank of its group does."""


def validate(config: Config, allow_unregistered_names: bool = False) -> list[Problem]:
    """Every problem of a resolved configuration (see device.resolve_device), at once; raises nothing.

    `open_to_names`: the keys of OPEN_TO_PLUGINS may have names that are only registered later.
    """
    if wrong := list(_wrong_types(config)):  # the rest would compare text with numbers
        return wrong
    return [*_out_of_range(config), *_not_a_choice(config, allow_unregistered_names), *_combinations(config)]


def _wrong_types(config: Config) -> Iterator[Problem]:
    """Values that do not fit their types, in a configuration that was made in Python and not by `load`."""
    for name, key in value_keys().items():
        value = get_value(config, name)
        try:
            convert_value(value, key.type_hint)
        except InvalidValue as unfit:
            yield Problem(name, value, unfit.allowed, unfit.advice)


def _out_of_range(config: Config) -> Iterator[Problem]:
    for name, key in value_keys().items():
        if (allowed := key.metadata.range) is not None:
            for item in _items(get_value(config, name)):
                if _is_number(item) and item not in allowed:
                    yield Problem(name, item, str(allowed))


def _not_a_choice(config: Config, allow_unregistered_names: bool) -> Iterator[Problem]:
    for name, key in value_keys().items():
        metadata, value = key.metadata, get_value(config, name)
        if metadata.choices is None or (
            metadata.allows_plugins and (allow_unregistered_names or config.trainer.plugins)
        ):
            continue
        for item in _items(value):
            if item not in metadata.choices:
                known = sorted(map(format_value, metadata.choices))
                words = known[0] if len(known) == 1 else f"one of {', '.join(known)}"
                yield Problem(name, value, words, _why_no_choice(metadata, name, item, known))


def _why_no_choice(metadata: KeyMetadata, name: str, item: Any, known: list[str]) -> str:
    """Why this version refuses it, or what was probably meant."""
    if isinstance(metadata.unavailable_reason, str) and metadata.unavailable_reason:
        return metadata.unavailable_reason
    _, _, hint = unknown_name_message(name, item, known).rpartition(". ")
    guess = hint if hint.startswith("Did you mean") else ""
    return metadata.unavailable_reason.get(item, guess) if isinstance(metadata.unavailable_reason, Mapping) else guess


def _items(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _combinations(config: Config) -> Iterator[Problem]:
    yield from _algorithm(config)
    yield from _dppo_bounds(config)
    yield from _mini_batch(config.trainer, "policy")
    yield from _group_filters(config)
    yield from _conversations(config)
    trainer, placement = config.trainer, config.trainer.placement
    if trainer.resume_mode == "from_path" and not trainer.resume_path:
        key, value = "trainer.resume_path", trainer.resume_path
        yield Problem(key, value, "a checkpoint folder with trainer.resume_mode=from_path")
    yield from _single_rank_strategy("policy", num_ranks(placement, "policy"), trainer.strategy)
    yield from find_role_problems(config)
    yield from _routing(config)
    yield from _router_loss(config)
    yield from _parallel(config)
    yield from _deepspeed(config)
    yield from _accelerator(config)
    yield from _engine_shape(config)
    yield from _servers(config)
    yield from _ports(config)
    yield from _environment_deadlines(config)
    yield from _environment(config)
    if str(trainer.export_path).rstrip("/") == str(trainer.ckpt_path).rstrip("/"):
        allowed = "another folder than trainer.ckpt_path"
        yield Problem("trainer.export_path", trainer.export_path, allowed, "Both get folders called global_step_N.")
    yield from _uris(config)


def _uris(config: Config) -> Iterator[Problem]:
    stored = dict(list_uris(config))
    told = list(stored.values())
    for key, address in stored.items():
        if (wrong := find_uri_problem(address)) is not None:
            yield Problem(key, redact_uri(address), *wrong)
    for key in value_keys():
        if key not in stored and (value := get_value(config, key)) not in told and contains_password(value):
            advice = "It would be in every copy of the configuration. Tokens are read from environment variables."
            yield Problem(key, value, "an address without name and password", advice)


def _dppo_bounds(config: Config) -> Iterator[Problem]:
    dppo, default = config.trainer.algorithm.dppo, DPPOConfig()
    if dppo.tv_threshold is not None and (dppo.delta_low, dppo.delta_high) != (default.delta_low, default.delta_high):
        advice = "It stands for delta_low and delta_high at once: give either it or these."
        yield Problem(
            "trainer.algorithm.dppo.tv_threshold", dppo.tv_threshold, "null with delta_low or delta_high", advice
        )


def _environment_deadlines(config: Config) -> Iterator[Problem]:
    """What an environment waits for must give up before its process is killed for waiting."""
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
    own = {"stage": "zero_stage", "offload_optimizer": "offload_optimizer", "offload_param": "offload_parameters"}
    for role in ("policy", "ref", "critic"):
        section = f"trainer.{role}.deepspeed_config"
        zero = getattr(config.trainer, role).deepspeed_config
        if zero.offload_parameters and zero.zero_stage < 3:
            advice = "Every rank computes with the whole model."
            yield Problem(f"{section}.offload_parameters", True, f"false with zero_stage={zero.zero_stage}", advice)
        for name in own.keys() & zero.zero_optimization.keys():
            key, value = f"{section}.zero_optimization.{name}", zero.zero_optimization[name]
            yield Problem(key, value, "not set", f"It has a key of its own: {section}.{own[name]}.")
        if config.trainer.strategy == "deepspeed" and zero.zero_stage == 3 and config.trainer.policy.use_torch_compile:
            advice = "It gathers weights in the middle of a layer, which then cannot be compiled."
            yield Problem(f"{section}.zero_stage", 3, "2 with trainer.policy.use_torch_compile=true", advice)


def _parallel(config: Config) -> Iterator[Problem]:
    placement = config.trainer.placement
    ranks = {"policy": num_ranks(placement, "policy")}
    for role in ("ref", "critic"):
        ranks[role] = ranks["policy"] if is_colocated(placement, role) else num_ranks(placement, role)
    if config.trainer.strategy == "megatron":
        yield Problem("trainer.strategy", "megatron", "fsdp2", "Its tensor parallelism is tensor_parallel_size there.")
    for role, count in ranks.items():
        section = getattr(config.trainer, role)
        for kind, what in _PARALLELISM_KINDS.items():
            key, size = f"{kind}_parallel_size", getattr(section, f"{kind}_parallel_size")
            if size > 1 and count % size:
                advice = f"Each of as many neighbouring ranks {what}."
                yield Problem(f"trainer.{role}.{key}", size, f"a divisor of the {role}'s ranks, {count}", advice)
        if section.tensor_parallel_size > 1:
            yield from _tensor_parallel(config, role, count)
        if section.expert_parallel_size > 1:
            yield from _expert_parallel(config, role)


def _routing(config: Config) -> Iterator[Problem]:
    key, replay, generator = "trainer.moe_routing_replay", config.trainer.moe_routing_replay, config.generator
    if replay is not None and config.trainer.policy.sequence_parallel_size > 1:
        yield Problem(key, replay, "null, or trainer.policy.sequence_parallel_size=1", "A rank has some tokens only.")
    if replay == "rollout" and not (generator.run_engines_locally and generator.backend == "transformers"):
        allowed = "null or old_policy, or generator.backend=transformers with generator.run_engines_locally=true"
        yield Problem(key, replay, allowed, "No other engine tells which experts it used.")


def _router_loss(config: Config) -> Iterator[Problem]:
    key, coef = "trainer.algorithm.router_aux_loss_coef", config.trainer.algorithm.router_aux_loss_coef
    for only, clashes, why in (
        (
            "trainer.policy.sequence_parallel_size=1",
            config.trainer.policy.sequence_parallel_size > 1,
            "It sees sequences.",
        ),
        ("trainer.strategy=fsdp2", config.trainer.strategy == "deepspeed", "DeepSpeed's engine scales losses itself."),
    ):
        if coef and clashes:
            yield Problem(key, coef, f"0, or {only}", why)


def find_role_problems(config: Config) -> Iterator[Problem]:
    """Yield what is wrong with the models that the algorithm needs besides the policy.

    A plugin's algorithm counts once it is registered, so this is called again after plugins are imported.
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
    """What is wrong if `predicates.lacks_critic`."""
    advice = (
        f"advantage_estimator={trainer.algorithm.advantage_estimator} needs a critic: it asks for values. Usual is the "
        "policy's path."
    )
    return Problem("trainer.critic.model.path", trainer.critic.model.path, "the path of a model", advice)


def _single_rank_strategy(role: str, ranks: int, strategy: str) -> Iterator[Problem]:
    if strategy == "single" and ranks > 1:
        advice = f"The {role} has {ranks} ranks; set {role}_num_gpus_per_node and {role}_num_nodes to 1."
        yield Problem("trainer.strategy", "single", "fsdp2 with more than one rank", advice)


def _dedicated_ranks(config: Config) -> Iterator[Problem]:
    """Dedicated roles must have slots."""
    placement, algorithm = config.trainer.placement, config.trainer.algorithm
    apart = {
        "ref": not placement.colocate_policy_ref and needs_reference(algorithm),
        "critic": needs_critic(config.trainer),
        "reward": config.trainer.reward.model.path is not None,
    }
    for role in (name for name, is_there in apart.items() if is_there and not placement.colocate_all):
        for key in (f"{role}_num_nodes", f"{role}_num_gpus_per_node"):
            if getattr(placement, key) == 0:
                advice = "It has slots of its own; trainer.placement.colocate_all=true would put it on the policy's."
                yield Problem(f"trainer.placement.{key}", 0, "at least 1", advice)


def _tensor_parallel(config: Config, role: str, count: int) -> Iterator[Problem]:
    trainer, key = config.trainer, f"trainer.{role}.tensor_parallel_size"
    section = getattr(trainer, role)
    size, shard = section.tensor_parallel_size, section.fsdp_config.fsdp_size
    if shard > 0 and (count // size) % shard:
        allowed = f"-1 or a divisor of {count // size} with tensor_parallel_size={size}"
        yield Problem(f"trainer.{role}.fsdp_config.fsdp_size", shard, allowed, "Ranks with the same part share it out.")
    for only, clashes, why in (
        ("trainer.strategy=fsdp2", trainer.strategy not in ("fsdp", "fsdp2"), "It shards the parts."),
        (f"trainer.{role}.sequence_parallel_size=1", section.sequence_parallel_size > 1, "Share out one of both."),
        ("trainer.policy.use_torch_compile=false", trainer.policy.use_torch_compile, "Layers wait for other ranks."),
    ):
        if clashes:
            yield Problem(key, section.tensor_parallel_size, f"1, or {only}", why)


def _expert_parallel(config: Config, role: str) -> Iterator[Problem]:
    trainer, key = config.trainer, f"trainer.{role}.expert_parallel_size"
    section = getattr(trainer, role)
    size, shard = section.expert_parallel_size, section.fsdp_config.fsdp_size
    if shard > 0 and shard % size:
        allowed = f"-1 or a multiple of {size} with expert_parallel_size={size}"
        yield Problem(f"trainer.{role}.fsdp_config.fsdp_size", shard, allowed, "A copy of the model has all experts.")
    for only, clashes, why in (
        ("trainer.strategy=fsdp2", trainer.strategy not in ("fsdp", "fsdp2"), "It shards the experts."),
        (f"trainer.{role}.tensor_parallel_size=1", section.tensor_parallel_size > 1, "Share out one of both."),
        ("trainer.policy.use_torch_compile=false", trainer.policy.use_torch_compile, "Layers wait for other ranks."),
    ):
        if clashes:
            yield Problem(key, size, f"1, or {only}", why)


def _accelerator(config: Config) -> Iterator[Problem]:
    if config.trainer.policy.record_memory and config.device == "cpu":
        advice = (
            "It is what an accelerator's allocator did; memory/learner_peak_rss_gib says what a rank needed on a CPU."
        )
        yield Problem("trainer.policy.record_memory", True, "false with device=cpu", advice)
    backend = config.generator.weight_sync_backend
    served = {"cpu": "gloo", "cuda": "nccl"}
    if backend in served.values() and backend != served.get(config.device, backend):
        allowed = f"{served[config.device]} with device={config.device}"
        advice = "Weights travel over the trainer's own collectives."
        yield Problem("generator.weight_sync_backend", backend, allowed, advice)


def _servers(config: Config) -> Iterator[Problem]:
    generator = config.generator
    if generator.external_proxy_url is not None and not generator.external_server_urls:
        advice = "A router cannot take weights: name the servers behind it in generator.external_server_urls."
        yield Problem("generator.external_proxy_url", generator.external_proxy_url, "null", advice)
    key = "external_server_urls" if generator.external_server_urls else "remote_inference_engine_urls"
    if generator.run_engines_locally or not isinstance(getattr(generator, key), list | tuple):
        return
    urls = [str(url).rpartition("://")[2].rstrip("/") for url in getattr(generator, key)]
    given = getattr(generator, key)
    if any("@" in url for url in urls) and not contains_password(given):  # else it is a problem already
        shown = ["***@" + url.rpartition("@")[2] if "@" in url else url for url in urls]
        advice = "Tokens of servers are read from SKYRL_API_KEY."
        yield Problem(f"generator.{key}", shown, "addresses without name and password", advice)
    elif not urls or "" in urls:
        yield Problem(f"generator.{key}", urls, "host:port of at least one server")
    elif len(set(urls)) < len(urls):
        yield Problem(f"generator.{key}", urls, "each server once", "A server has one engine.")


def _ports(config: Config) -> Iterator[Problem]:
    port, generator = config.trainer.metrics_port, config.generator
    if generator.enable_http_endpoint and port == generator.http_endpoint_port:
        advice = "They are two servers: each listens at a port of its own."
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
                f"Its sandbox may take {SANDBOX_SHUTDOWN_S:g} s to end; then the step is killed, and nothing is scored."
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
        advice = f"A sandbox may take {SANDBOX_SHUTDOWN_S:g} s to end; then the step is killed, and nothing is scored."
        yield Problem("trainer.timeouts.environment_step_s", step, allowed, advice)


def _engine_shape(config: Config) -> Iterator[Problem]:
    generator = config.generator
    ranks, experts = generator.inference_engine_tensor_parallel_size, generator.inference_engine_expert_parallel_size
    if generator.backend == "vllm" and experts not in (1, ranks):
        advice = "vLLM spreads experts over all ranks of an engine, or over none."
        allowed = "1 or generator.inference_engine_tensor_parallel_size"
        yield Problem("generator.inference_engine_expert_parallel_size", experts, allowed, advice)
    if generator.batch_invariant and (config.device == "cpu" or generator.backend == "transformers"):
        allowed = "false on a CPU" if config.device == "cpu" else "false with generator.backend=transformers"
        advice = "It is a mode of vLLM's and SGLang's kernels for GPUs."
        yield Problem("generator.batch_invariant", True, allowed, advice)
    yield from _nodes_per_engine(config)
    if generator.backend != "transformers":
        return
    for kind in ("tensor", "pipeline", "expert"):
        key = f"generator.inference_engine_{kind}_parallel_size"
        if (size := get_value(config, key)) != 1:
            advice = "One transformers engine has one accelerator: raise generator.num_inference_engines instead."
            yield Problem(key, size, "1 with generator.backend=transformers", advice)


def _nodes_per_engine(config: Config) -> Iterator[Problem]:
    key, nodes = "trainer.placement.nodes_per_engine", config.trainer.placement.nodes_per_engine
    ranks, backend = config.generator.inference_engine_tensor_parallel_size, config.generator.backend
    for name in ("nnodes", "node_rank", "master_addr", "master_port"):
        if name in (kwargs := config.generator.engine_init_kwargs):
            yield Problem(f"generator.engine_init_kwargs.{name}", kwargs[name], "left out", f"Set {key} instead.")
    if nodes > 1 and backend != "vllm":
        advice = "An engine of vLLM can be on several nodes; of another backend start more engines."
        yield Problem(key, nodes, f"1 with generator.backend={backend}", advice)
    elif nodes > 1 and config.device == "cpu" and ranks != nodes:
        advice = "On CPUs vLLM takes two ranks of an engine on one node for ranks of different ones."
        yield Problem(key, nodes, f"1 or {ranks}, the ranks of an engine, with device=cpu", advice)
    elif nodes > 1 and ranks % nodes:
        advice = (
            "Each node has as many ranks of an engine (generator.inference_engine_tensor_parallel_size) as another."
        )
        yield Problem(key, nodes, f"a divisor of {ranks}, the ranks of an engine", advice)


def _algorithm(config: Config) -> Iterator[Problem]:
    algorithm, generator = config.trainer.algorithm, config.generator
    estimator = algorithm.advantage_estimator
    if estimator in GROUP_ESTIMATORS and generator.n_samples_per_prompt == 1:
        advice = f"A group of one has no baseline, so {estimator} learns nothing: raise it (5 is the default)."
        yield Problem("generator.n_samples_per_prompt", 1, f"at least 2 with advantage_estimator={estimator}", advice)
    if algorithm.use_kl_in_reward and algorithm.use_kl_loss:
        advice = "KL would be counted twice: set trainer.algorithm.use_kl_loss=false, or this to false."
        yield Problem("trainer.algorithm.use_kl_in_reward", True, "false while use_kl_loss=true", advice)
    yield from _bounds(config)
    if estimator == "distillation":
        yield from _distillation(config)
    if algorithm.use_kl_in_reward and algorithm.kl_ctrl.type == "adaptive" and algorithm.kl_loss_coef == 0:
        advice = "It is multiplied after every step, and 0 stays 0; 0.001 is usual."
        yield Problem("trainer.algorithm.kl_loss_coef", 0.0, "more than 0 with kl_ctrl.type=adaptive", advice)
    if algorithm.sft.loss_type == "minor_sft" and algorithm.loss_reduction != "sequence_mean":
        key, advice = (
            "trainer.algorithm.loss_reduction",
            "It is one value a sequence: others would count its length twice.",
        )
        yield Problem(key, algorithm.loss_reduction, "sequence_mean with sft.loss_type=minor_sft", advice)
    if algorithm.loss_reduction == "token_mean_legacy" and generator.step_wise_trajectories:
        key, advice = "trainer.algorithm.loss_reduction", "It counts sequences, of which an episode then has several."
        yield Problem(key, algorithm.loss_reduction, "token_mean with step_wise_trajectories=true", advice)
    if algorithm.use_tis and algorithm.tis_imp_ratio_cap <= 0:
        key, value = "trainer.algorithm.tis_imp_ratio_cap", algorithm.tis_imp_ratio_cap
        yield Problem(key, value, "more than 0 with use_tis=true", "2.0 is usual.")
    if algorithm.use_tis and algorithm.off_policy_correction.tis_ratio_type == "sequence":
        advice = "It is the older name of tis_ratio_type=token, and its bound is not a sequence's: set it to false."
        allowed = "false with off_policy_correction.tis_ratio_type=sequence"
        yield Problem("trainer.algorithm.use_tis", True, allowed, advice)
    if generator.sampling_params.temperature == 0:
        key = "generator.sampling_params.temperature"
        yield Problem(key, 0.0, "more than 0", "Greedy samples of a prompt are all the same; evaluation may be greedy.")
    betas = config.trainer.policy.optimizer_config.adam_betas, config.trainer.critic.optimizer_config.adam_betas
    for role, pair in zip(("policy", "critic"), betas, strict=True):
        if len(pair) != 2:
            yield Problem(f"trainer.{role}.optimizer_config.adam_betas", pair, "two numbers")


def _group_filters(config: Config) -> Iterator[Problem]:
    algorithm, generator, curriculum = config.trainer.algorithm, config.generator, config.data.curriculum
    longest = generator.sampling_params.max_generate_length
    if algorithm.overlong_buffer.len > longest:
        allowed = f"at most generator.sampling_params.max_generate_length={longest}"
        yield Problem("trainer.algorithm.overlong_buffer.len", algorithm.overlong_buffer.len, allowed)
    compares = {
        "dynamic_sampling.type": algorithm.dynamic_sampling.type is not None,
        "zero_variance_filter": algorithm.zero_variance_filter,
    }
    if generator.n_samples_per_prompt == 1 and any(compares.values()):
        names = " and ".join(f"trainer.algorithm.{name}" for name, is_on in compares.items() if is_on)
        advice = "The rewards of a group of one are all equal: no prompt would be left to train on."
        yield Problem("generator.n_samples_per_prompt", 1, f"at least 2 with {names}", advice)
    if algorithm.dynamic_sampling.max_sample_batches == 0:
        key, advice = "trainer.algorithm.dynamic_sampling.max_sample_batches", "A step draws at least one batch."
        yield Problem(key, 0, "at least 1, or -1 for no bound", advice)
    if config.trainer.fully_async.enabled and config.trainer.placement.colocate_all:
        advice = "Engines and trainer take turns on the same accelerators: neither works while the other does."
        yield Problem("trainer.placement.colocate_all", True, "false with trainer.fully_async.enabled", advice)
    if config.trainer.fully_async.sample_full_batch and not algorithm.zero_variance_filter:
        advice = "It is the filter that says which groups are left out."
        allowed = "false without trainer.algorithm.zero_variance_filter"
        yield Problem("trainer.fully_async.sample_full_batch", True, allowed, advice)
    if generator.over_provisioning and config.trainer.fully_async.enabled:
        advice = "Running ahead already hides slow rollouts, and cutting them would break the order of the others."
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
        advice = "A template of your own is a file: generator.chat_template.source=file."
        yield Problem("generator.chat_template.name_or_path", name, allowed, advice)
    if generator.retokenize_chat_history and not generator.step_wise_trajectories:
        advice = "What was tokenised anew is not what was sampled, and cannot be trained on with it as one sequence."
        allowed = "false, or generator.step_wise_trajectories=true"
        yield Problem("generator.retokenize_chat_history", True, allowed, advice)


def _bounds(config: Config) -> Iterator[Problem]:
    """Pairs of bounds: the lower one must be below the upper one, or nothing passes."""
    correction = "off_policy_correction"
    for low, high in (
        (f"{correction}.geo_mask_low", f"{correction}.geo_mask_high"),
        (f"{correction}.product_mask_low", f"{correction}.product_mask_high"),
        (f"{correction}.outlier_token_is_threshold_low", f"{correction}.outlier_token_is_threshold_high"),
        ("clip_cov.clip_cov_lb", "clip_cov.clip_cov_ub"),
    ):
        least, most = (get_value(config, f"trainer.algorithm.{key}") for key in (low, high))
        if least is not None and most is not None and least >= most:
            advice = "Between them lies what is kept: nothing would be."
            yield Problem(f"trainer.algorithm.{low}", least, f"less than {high}={most:g}", advice)


def _distillation(config: Config) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.ref.model.path == trainer.policy.model.path:
        advice = "The reference is the teacher: from the policy's own start there is nothing to learn."
        allowed = "another model than the policy's with advantage_estimator=distillation"
        yield Problem("trainer.ref.model.path", trainer.ref.model.path, allowed, advice)
    if trainer.update_ref_every_epoch:
        advice = "The reference is the teacher, and would be replaced by the pupil."
        yield Problem("trainer.update_ref_every_epoch", True, "false with advantage_estimator=distillation", advice)
    if trainer.algorithm.use_kl_in_reward:
        advice = "Rewards are not read, so a penalty on them has no effect: set it to false."
        key = "trainer.algorithm.use_kl_in_reward"
        yield Problem(key, True, "false with advantage_estimator=distillation", advice)


def _mini_batch(trainer: TrainerConfig, role: str) -> Iterator[Problem]:
    name = f"{role}_mini_batch_size"
    if (size := getattr(trainer, name)) > trainer.train_batch_size:
        limit = f"at most trainer.train_batch_size={trainer.train_batch_size}"
        yield Problem(f"trainer.{name}", size, limit, "An update cannot have more prompts than the step.")
