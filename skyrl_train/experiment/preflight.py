"""Checks models, tokenizer, prompts, addresses and tokens before the processes of a run start.

Starts nothing and reads no weights. `config.local_checks` runs before and checks whatever needs no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from skyrl_train.config.local_checks import (
    ENGINE_MODEL_KEY,
    find_missing_resources,
    find_used_draft_model,
    find_write_error,
    list_data_sources,
    list_model_paths,
)
from skyrl_train.config.locations import is_dataset_file, is_uri, list_uris, may_be_hub_name, parse_split
from skyrl_train.config.predicates import RunComponents, max_sequence_length
from skyrl_train.config.problems import Problem, raise_problems
from skyrl_train.config.run_folder import run_identity
from skyrl_train.config.schema import Config
from skyrl_train.data.messages import Prompt
from skyrl_train.engines.sglang.arguments import engine_arguments
from skyrl_train.engines.transformers.model_runner import unsupported_reason
from skyrl_train.engines.vllm import model_support
from skyrl_train.environments.registry import check_environments
from skyrl_train.environments.tasks.agent import NAME as AGENT
from skyrl_train.errors import ConfigError
from skyrl_train.experiment.data import build_prompts, build_sft_examples, build_tokenizer, check_same_tokens
from skyrl_train.experiment.draft_models import check_drafts
from skyrl_train.experiment.environments import check_agent, environment_settings
from skyrl_train.models.composite import get_composite_class_name, is_composite
from skyrl_train.models.expert_parallel import ExpertParallel
from skyrl_train.models.loading import (
    POLICY_PATH_KEY,
    REWARD_PATH_KEY,
    check_causal_lm,
    has_tokenizer,
    is_local_folder,
    load_config,
    load_reward_config,
    load_reward_model,
    load_tokenizer,
)
from skyrl_train.models.logprob_model import check_model_supported
from skyrl_train.models.lora import select_adapted_layers
from skyrl_train.models.parallel_group import make_meta_group
from skyrl_train.models.ragged_model import max_exact_length
from skyrl_train.models.recurrent_layers import check_without_parallelism
from skyrl_train.models.routing import Routers
from skyrl_train.models.sequence_parallel import SequenceParallel
from skyrl_train.models.tensor_parallel import TensorParallel
from skyrl_train.report.prometheus import check_metrics_address
from skyrl_train.storage.hugging_face_hub import hub_model_problem
from skyrl_train.storage.remote_folder import RemoteFolder
from skyrl_train.storage.uris import resolve_local_folder
from skyrl_train.terminal import print_stderr
from skyrl_train.trainer.run_folder import IDENTITY_FILE, check_same_run

SAMPLE_TIMEOUT_S = 1.5
"""Seconds for reading training or validation data up to a prompt that is short enough. All checks take less than 10 s.
"""
REFERENCE_PATH = "trainer.ref.model.path"
CRITIC_PATH = "trainer.critic.model.path"
MAX_SAMPLE_FILE_BYTES = 32 << 20
"""Size up to which a JSON file is read, because it may be a single list."""
CHAT_TEMPLATE = "generator.chat_template.name_or_path"


def check_run(cfg: Config, components: RunComponents) -> None:
    """Check everything that a run needs and that can be known before Ray starts.

    `find_missing_resources` must have passed, and plugins must have been imported: see `plugins.check_plugins`.

    Args:
        cfg: The configuration.
        components: The parts of the configuration that the run uses.

    Raises:
        ConfigError: Lists every problem at once. A single problem keeps its class, such as DataError.
        StorageError: A URI cannot be reached.
    """
    if cfg.trainer.plugins:  # their algorithms may need further models
        raise_problems(find_missing_resources(cfg, components))
    if any(list_uris(cfg)):
        check_uris(cfg, components)
    problems: list[Problem | ConfigError] = []

    def attempt(check: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a check; None if it raises ConfigError, which is collected."""
        try:
            return check(*arguments)
        except ConfigError as error:
            problems.append(error)
            return None

    is_served = components.learner or not components.rewards  # an evaluation has no endpoint
    if components.engines and is_served and cfg.generator.enable_http_endpoint:
        from skyrl_train.experiment.engines import check_endpoint  # imports Ray

        attempt(check_endpoint, cfg)
    if components.learner or components.val_data:  # serving has no metrics
        attempt(check_metrics_address, cfg.trainer.metrics_host, cfg.trainer.metrics_port)
    policy = None
    unreachable: set[str] = set()
    problems_before_models = len(problems)
    with _quiet_transformers():
        for key, path in list_model_paths(cfg, components):
            if may_be_hub_name(path) and (problem := hub_model_problem(key, path)) is not None:
                problems.append(problem)
                unreachable.add(key)
                continue
            model = attempt(checked_model, cfg, components, key, path)
            policy = model if key == POLICY_PATH_KEY else policy
        if len(problems) == problems_before_models:  # Drafts are compared with these models.
            attempt(_check_drafts, cfg, components)
    tokenizer = None
    if components.tokenizer and POLICY_PATH_KEY not in unreachable:
        tokenizer = attempt(_tokenizer, cfg)
    if tokenizer is not None:
        for key, path in list_model_paths(cfg, components):
            if key in (REFERENCE_PATH, CRITIC_PATH) and key not in unreachable:
                attempt(check_same_tokens, cfg.trainer.policy.model.path, path, key)
    prompts: list[Prompt] = []
    if tokenizer is not None:
        if policy is not None:
            attempt(_check_token_ids, cfg, tokenizer, policy)
        if tokenizer.chat_template is None and (components.learner or components.rewards):
            problems.append(_no_chat_template(cfg))
        else:
            prompts = attempt(_check_sample_rows, cfg, components, tokenizer) or []
    names = {prompt.env_class for prompt in prompts} or {cfg.environment.env_class}
    if components.rewards and not cfg.environment.hosts:  # on hosts, their own processes check
        attempt(check_environments, names, environment_settings(cfg))
    if components.rewards and AGENT in names:
        rows = [(each.where or f"row {each.uid}", each.env_extras) for each in prompts if each.env_class == AGENT]
        attempt(check_agent, cfg, rows)
    if len(problems) == 1 and isinstance(problems[0], ConfigError):
        raise problems[0]
    raise_problems(problems)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Suppress progress bars and checkpoint reports of transformers; errors name the affected tensors."""
    shows_progress, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shows_progress:
            logging.enable_progress_bar()


def _note_composite(cfg: Config, key: str, path: str) -> None:
    """Note on stderr that only the language model of a composite model is used. Raises ConfigError if that is off."""
    class_name = get_composite_class_name(load_config(path, key=key))
    if class_name is None:
        return
    for role, section in (("policy", cfg.trainer.policy), ("ref", cfg.trainer.ref)):
        if section.model.path == path and section.language_model_only is False:
            raise ConfigError(
                f"trainer.{role}.language_model_only=false: {path!r} is a {class_name}, whose other towers cannot be "
                "trained or served. Set the key to null or true to use the language model, or give the path of a "
                "text-only model."
            )
    if key == POLICY_PATH_KEY or path != cfg.trainer.policy.model.path:
        print_stderr(
            f"note: {key}={path!r}: {class_name} is used as a text model (trainer.policy.language_model_only). Only "
            "its language model is loaded and trained; exports contain its other towers unchanged."
        )


def checked_model(cfg: Config, components: RunComponents, key: str, path: str) -> PreTrainedModel | None:
    """Check that the learner or the run's engines can run a model.

    Args:
        cfg: The configuration.
        components: The parts of the configuration that the run uses.
        key: The configuration key of the model.
        path: The model's path or hub name.

    Returns:
        The causal language model on the meta device. None for a reward model, and if only an engine with model classes
            of its own loads it.

    Raises:
        ConfigError: The learner or the run's engines cannot run the model.
    """
    if key == REWARD_PATH_KEY:
        _check_reward_model(path, cfg.trainer.reward.model_config_kwargs)
        return None
    _note_composite(cfg, key, path)
    trainer, generator = cfg.trainer, cfg.generator
    trains = components.learner and key != ENGINE_MODEL_KEY
    is_served = components.engines and generator.run_engines_locally and path == generator.model_name
    backend = generator.backend if is_served and key in (POLICY_PATH_KEY, ENGINE_MODEL_KEY) else None
    try:
        if backend == "sglang":
            _check_sglang(cfg)
        config = load_config(path, key=key)
        if backend == "vllm":
            _check_vllm(cfg, path, config)
        if not trains and backend != "transformers" and not is_composite(config):
            return None  # vLLM and SGLang load it with model classes of their own
        role, rope = key.split(".")[1], trainer if trains else generator
        model = check_causal_lm(
            path,
            key=key,
            model_config_kwargs=getattr(trainer, role).model_config_kwargs if trains else None,
            rope_scaling=rope.rope_scaling,
            rope_theta=rope.rope_theta,
            check_weight_files=trains,
        )
        if backend == "transformers" and (reason := unsupported_reason(model)):
            raise ConfigError(f"generator.backend=transformers {reason}")
        if trains:
            _check_length(cfg, components, model)
            check_trainable(cfg, key, model)
    except ConfigError as error:
        if str(error).startswith(key):
            raise
        raise ConfigError(f"{key}={path!r}: {error}") from error
    return model


def _check_drafts(cfg: Config, components: RunComponents) -> None:
    """Raise ConfigError if the drafts of speculative decoding do not fit the engines' model."""
    if not (components.engines and cfg.generator.run_engines_locally):
        return
    draft = find_used_draft_model(cfg, components)
    if draft is not None and may_be_hub_name(draft[1]) and (problem := hub_model_problem(*draft)) is not None:
        raise_problems([problem])
    check_drafts(cfg)


def check_trainable(cfg: Config, key: str, model: PreTrainedModel) -> None:
    """Check that the learner can run, adapt and parallelize a model. Shards the layers of `model` in place.

    Args:
        cfg: The configuration.
        key: The configuration key of the model's path.
        model: The model on the meta device.

    Raises:
        ConfigError: The learner does not support the model, its adapters, its routers or a parallel size.
    """
    section: Any = getattr(cfg.trainer, key.split(".")[1])
    check_model_supported(model, values=key == CRITIC_PATH)
    if key == POLICY_PATH_KEY:
        replay, coef = cfg.trainer.moe_routing_replay, cfg.trainer.algorithm.router_aux_loss_coef
        Routers(model).check_routers_supported(model, replay, coef)
    if key != REFERENCE_PATH and section.model.lora.rank:
        select_adapted_layers(model, section.model.lora, f"{key.removesuffix('path')}lora")
    keys = {name: key.replace("model.path", f"{name}_parallel_size") for name in ("sequence", "tensor", "expert")}
    if (size := section.sequence_parallel_size) > 1:
        check_without_parallelism(model, keys["sequence"])
        heads = model.config.get_text_config().num_attention_heads
        make_meta_group(SequenceParallel, size, keys["sequence"]).check_heads(heads)
    if (size := section.tensor_parallel_size) > 1:
        check_without_parallelism(model, keys["tensor"])
        make_meta_group(TensorParallel, size, keys["tensor"]).shard_model(model)
    if (size := section.expert_parallel_size) > 1:
        make_meta_group(ExpertParallel, size, keys["expert"]).shard_model(model)


def _check_length(cfg: Config, components: RunComponents, model: PreTrainedModel) -> None:
    """Raise ConfigError if sequences may be longer than the learner can compute exactly."""
    generator, limit = cfg.generator, max_exact_length(model.config.get_text_config())
    if limit is None:
        return
    max_length = max_sequence_length(generator)
    if components.engines and generator.run_engines_locally:
        if generator.backend == "transformers":
            return  # this engine has the same limit
        max_length = min(max_length, generator.engine_init_kwargs.get("max_model_len") or max_length)
    if max_length > limit:
        raise ConfigError(
            f"generator.max_input_length + generator.sampling_params.max_generate_length: sequences may have "
            f"{max_length} tokens, but beyond {limit} this model's RoPE changes for a complete micro-batch (longrope), "
            f"or its attention is divided into chunks (Llama 4). Lower the keys: their sum may be at most {limit}."
        )


def _check_reward_model(path: str, model_config_kwargs: Mapping[str, Any]) -> None:
    if load_tokenizer(path, key=REWARD_PATH_KEY).chat_template is None:
        raise ConfigError(
            f"{REWARD_PATH_KEY}={path!r}: the tokenizer has no chat template. Add the file chat_template.jinja to it."
        )
    if is_local_folder(path):
        load_reward_model(path, dtype=torch.float32, device="meta", model_config_kwargs=model_config_kwargs)
    else:
        load_reward_config(path, model_config_kwargs)


def _check_vllm(cfg: Config, path: str, config: PreTrainedConfig) -> None:
    """Raise ConfigError for a model that vLLM cannot serve exactly."""
    from skyrl_train.experiment.engines import engine_generator_config, engine_kwargs  # imports Ray

    options = engine_kwargs(engine_generator_config(cfg), cfg.device, cfg.generator.backend)
    model_support.check_model(path, config, on_cpu=options["device"] == "cpu", dtype=options["dtype"])


def _check_sglang(cfg: Config) -> None:
    """Raise ConfigError for a model or an argument that SGLang would reject."""
    from skyrl_train.experiment.engines import engine_generator_config, engine_kwargs  # imports Ray

    options = engine_kwargs(engine_generator_config(cfg), cfg.device, cfg.generator.backend)
    model, max_model_len = options.pop("model"), options.pop("max_model_len", None)
    own = {key: options.pop(key) for key in ("name", "device", "dtype", "max_num_seqs", "rope_scaling", "rope_theta")}
    engine_arguments(
        model,
        **own,
        max_model_len=max_model_len or load_config(model).get_text_config().max_position_embeddings,
        max_lora_rank=options.pop("max_lora_rank", 0),
        options=options,
        check_weights=False,
    )


def _tokenizer(cfg: Config) -> Any:
    """Return the policy's tokenizer. Raises ConfigError if it has none: transformers would create an empty one."""
    path = cfg.trainer.policy.model.path
    if not has_tokenizer(path):
        raise ConfigError(
            f"{POLICY_PATH_KEY}={path!r} has no tokenizer. Save the tokenizer of the model that it was made from into "
            "the same folder."
        )
    return build_tokenizer(cfg)


def _no_chat_template(cfg: Config) -> Problem:
    advice = (
        f"The tokenizer of {cfg.trainer.policy.model.path} has none. Name a built-in template, give a file with "
        "generator.chat_template.source=file, or use the instruction-tuned model."
    )
    return Problem(CHAT_TEMPLATE, None, "a chat template", advice)


def _check_token_ids(cfg: Config, tokenizer: Any, model: PreTrainedModel) -> None:
    """Raise ConfigError if text or the chat template can become token ids that the policy has no embedding for.

    A special token that nothing writes, such as one for padding, may have an id beyond the embedding.
    """
    rows = model.get_input_embeddings().weight.shape[0]  # type: ignore[union-attr, index]
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    written = f"{tokenizer.chat_template} {tokenizer.eos_token} {tokenizer.bos_token}"
    beyond = {token: index for token, index in tokenizer.get_vocab().items() if index >= rows}
    emitted = [token for token in beyond if token not in special or token in written]
    if emitted:
        token = max(emitted, key=lambda one: beyond[one])
        raise ConfigError(
            f"{POLICY_PATH_KEY}={cfg.trainer.policy.model.path!r}: its tokenizer can emit ids beyond the model's "
            f"embedding of {rows} rows ({len(emitted)} tokens, such as {token!r} with id {beyond[token]}). Resize "
            "the embedding with model.resize_token_embeddings(len(tokenizer)) and save the model again, or use the "
            "model's original tokenizer."
        )


def _check_sample_rows(cfg: Config, components: RunComponents, tokenizer: Any) -> list[Prompt]:
    """Return the prompts of a sample of the rows. Raises DataError for rows that cannot be used.

    Only reads files whose first rows can be read separately: folders, datasets on the hub and large JSON lists are
    skipped.
    """
    if not components.rewards:
        if components.train_data and _can_read_first_rows(source for _, source in list_data_sources(cfg, components)):
            build_sft_examples(cfg, tokenizer, SAMPLE_TIMEOUT_S)
        return []
    prompts: list[Prompt] = []
    for name in ("train_data", "val_data"):
        key = f"data.{name}"
        sources = [source for one, source in list_data_sources(cfg, components) if one == key]
        if sources and _can_read_first_rows(sources):
            prompts += build_prompts(cfg, tokenizer, sources, key, SAMPLE_TIMEOUT_S).prompts
    return prompts


def _can_read_first_rows(sources: Iterable[str]) -> bool:
    """True if the first rows of all sources can be read without the rest."""
    return all(is_dataset_file(source) and not is_uri(source) and not _is_large_json(source) for source in sources)


def _is_large_json(source: str) -> bool:
    path = os.path.expanduser(source)
    return path.lower().endswith(".json") and os.path.getsize(path) > MAX_SAMPLE_FILE_BYTES


def check_uris(cfg: Config, components: RunComponents) -> None:
    """Check that data, models and the run's folders at URIs can be reached.

    Raises:
        ConfigError: Something does not exist or cannot be written, or trainer.ckpt_path holds another run.
        StorageError: A storage rejected the request or cannot be reached.
    """
    problems = []
    for key, source in list_data_sources(cfg, components):
        if is_uri(source):
            store = RemoteFolder(parse_split(source)[0])
            if store.info() is None and not store.find():
                problems.append(Problem(key, source, "a file or a folder that exists", "Nothing is at this URI."))
    drafts = find_used_draft_model(cfg, components)
    for key, path in [*list_model_paths(cfg, components), *([] if drafts is None else [drafts])]:
        if is_uri(path) and RemoteFolder(path).read("config.json") is None:
            problems.append(Problem(key, path, "a model's folder", "There is no config.json at this URI."))
    for name in ("ckpt_path", "export_path") if components.learner else ():
        path = getattr(cfg.trainer, name)
        if not is_uri(path):
            continue
        if (reason := find_write_error(resolve_local_folder(path))) is not None:
            advice = f"{reason} Set SKYRL_CACHE to a folder that can be written to."
            problems.append(Problem(f"trainer.{name}", path, "a URI whose local copy can be written", advice))
        elif not RemoteFolder(path).has_bucket():
            problems.append(Problem(f"trainer.{name}", path, "a URI in a bucket that exists", "Create the bucket."))
    raise_problems(problems)
    if components.learner and is_uri(cfg.trainer.ckpt_path):
        stored = RemoteFolder(cfg.trainer.ckpt_path).read(IDENTITY_FILE)
        if stored is not None:
            check_same_run(cfg.trainer.ckpt_path, run_identity(cfg), stored)
