"""Checks models, tokenizer, prompts, addresses and tokens before the processes of a run start.

Nothing is started and no weight is read. `config.machine` checks before this whatever needs no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from skyrl_train.config.machine import ENGINE_MODEL, data_sources, missing, model_paths, why_not_writable
from skyrl_train.config.predicates import Uses, longest_sequence
from skyrl_train.config.problems import Problem, raise_all
from skyrl_train.config.run_folder import identity
from skyrl_train.config.schema import Config
from skyrl_train.config.sources import addresses, is_address, is_file_of_rows, may_be_on_hub, split_of
from skyrl_train.engines.sglang.arguments import engine_arguments
from skyrl_train.engines.transformers.model import refusal
from skyrl_train.engines.vllm.composites import refuse_composite
from skyrl_train.environments.registry import check_environments
from skyrl_train.errors import ConfigError
from skyrl_train.experiment.data import build_demonstrations, build_prompts, build_tokenizer, check_same_tokens
from skyrl_train.experiment.environments import environment_settings
from skyrl_train.messages import to_stderr
from skyrl_train.models.composite import composite_class, is_composite
from skyrl_train.models.expert_parallel import ExpertParallel
from skyrl_train.models.loading import (
    POLICY_PATH,
    REWARD_PATH,
    described_causal_lm,
    has_tokenizer,
    is_folder,
    load_config,
    load_reward_model,
    load_tokenizer,
    reward_config,
)
from skyrl_train.models.lora import adapted_layers
from skyrl_train.models.ragged_model import longest_exact
from skyrl_train.models.rank_group import planned_group
from skyrl_train.models.routing import Routers
from skyrl_train.models.sequence_parallel import SequenceParallel
from skyrl_train.models.tensor_parallel import TensorParallel
from skyrl_train.models.token_scorer import refuse_unscorable
from skyrl_train.report.prometheus import check_metrics_address
from skyrl_train.storage.folder import StoredFolder
from skyrl_train.storage.hub import unreachable_model
from skyrl_train.storage.places import working_folder
from skyrl_train.trainer.run_directory import IDENTITY_FILE, refuse_other_run

SAMPLE_S = 1.5
"""Time for reading training or validation data up to a prompt that is short enough. The check takes less than 10 s."""
REFERENCE_PATH = "trainer.ref.model.path"
CRITIC_PATH = "trainer.critic.model.path"
SAMPLE_BYTES = 32 << 20
"""Size up to which a JSON file, which may be one list, is read."""
CHAT_TEMPLATE = "generator.chat_template.name_or_path"


def check_run(cfg: Config, uses: Uses) -> None:
    """Check everything that a run needs and that can be known before Ray starts.

    `missing` must have passed, and plugins must have been imported: see `plugins.check_plugins`.

    Raises:
        ConfigError: Lists every problem at once; a single one keeps its kind, such as DataError.
        StorageError: An address cannot be reached.
    """
    if cfg.trainer.plugins:  # their algorithms may need further models
        raise_all(missing(cfg, uses))
    if any(addresses(cfg)):
        check_addresses(cfg, uses)
    problems: list[Problem | ConfigError] = []

    def attempt(check: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a check; None if it raises what is wrong, which is kept."""
        try:
            return check(*arguments)
        except ConfigError as error:
            problems.append(error)
            return None

    is_served = uses.learner or not uses.rewards  # an evaluation is not
    if uses.engines and is_served and cfg.generator.enable_http_endpoint:
        from skyrl_train.experiment.engines import check_endpoint  # imports Ray

        attempt(check_endpoint, cfg)
    if uses.learner or uses.val_data:  # serving has no metrics
        attempt(check_metrics_address, cfg.trainer.metrics_host, cfg.trainer.metrics_port)
    policy = None
    unreachable: set[str] = set()
    with _quiet_transformers():
        for key, path in model_paths(cfg, uses):
            if may_be_on_hub(path) and (problem := unreachable_model(key, path)) is not None:
                problems.append(problem)
                unreachable.add(key)
                continue
            model = attempt(checked_model, cfg, uses, key, path)
            policy = model if key == POLICY_PATH else policy
    tokenizer = None
    if uses.tokenizer and POLICY_PATH not in unreachable:
        tokenizer = attempt(_tokenizer, cfg)
    if tokenizer is not None:
        for key, path in model_paths(cfg, uses):
            if key in (REFERENCE_PATH, CRITIC_PATH) and key not in unreachable:
                attempt(check_same_tokens, cfg.trainer.policy.model.path, path, key)
    names = {cfg.environment.env_class}
    if tokenizer is not None:
        if policy is not None:
            attempt(_check_token_ids, cfg, tokenizer, policy)
        if tokenizer.chat_template is None and (uses.learner or uses.rewards):
            problems.append(_no_chat_template(cfg))
        else:
            names = attempt(_sample, cfg, uses, tokenizer) or names
    if uses.rewards and not cfg.environment.hosts:  # on hosts, their own processes check
        attempt(check_environments, names, environment_settings(cfg))
    if len(problems) == 1 and isinstance(problems[0], ConfigError):
        raise problems[0]
    raise_all(problems)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep transformers from showing progress bars and reports of a checkpoint's tensors: errors name these."""
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
    """Say on stderr, once, that only the language model of a composite is used. Raise ConfigError if that is off."""
    kind = composite_class(load_config(path, key=key))
    if kind is None:
        return
    for role, section in (("policy", cfg.trainer.policy), ("ref", cfg.trainer.ref)):
        if section.model.path == path and section.language_model_only is False:
            raise ConfigError(
                f"trainer.{role}.language_model_only=false: {path!r} is a {kind}, whose other towers cannot be trained "
                "or served. Set it to null or true to use its language model, or give the path of a text-only model."
            )
    if key == POLICY_PATH or path != cfg.trainer.policy.model.path:
        to_stderr(
            f"note: {key}={path!r}: {kind} is used as a text model (trainer.policy.language_model_only). Only its "
            "language model is loaded and trained; exports contain its other towers unchanged."
        )


def checked_model(cfg: Config, uses: Uses, key: str, path: str) -> PreTrainedModel | None:
    """Return a causal language model on the meta device; None if nothing here builds it, or for a reward model.

    Raises:
        ConfigError: The learner or the run's engines cannot run the model.
    """
    if key == REWARD_PATH:
        _check_reward_model(path, cfg.trainer.reward.model_config_kwargs)
        return None
    _note_composite(cfg, key, path)
    trainer, generator = cfg.trainer, cfg.generator
    trains = uses.learner and key != ENGINE_MODEL
    is_served = uses.engines and generator.run_engines_locally and path == generator.model_name
    backend = generator.backend if is_served and key in (POLICY_PATH, ENGINE_MODEL) else None
    try:
        if backend == "sglang":
            _check_sglang(cfg)
        config = load_config(path, key=key)
        if backend == "vllm":
            refuse_composite(path, config)
        if not trains and backend != "transformers" and not is_composite(config):
            return None  # other engines have model classes of their own
        role, rope = key.split(".")[1], trainer if trains else generator
        model = described_causal_lm(
            path,
            key=key,
            model_config_kwargs=getattr(trainer, role).model_config_kwargs if trains else None,
            rope_scaling=rope.rope_scaling,
            rope_theta=rope.rope_theta,
            checkpoint=trains,
        )
        if backend == "transformers" and (reason := refusal(model)):
            raise ConfigError(f"generator.backend=transformers {reason}")
        if trains:
            _check_length(cfg, uses, model)
            check_trainable(cfg, key, model)
    except ConfigError as error:
        if str(error).startswith(key):
            raise
        raise ConfigError(f"{key}={path!r}: {error}") from error
    return model


def check_trainable(cfg: Config, key: str, model: PreTrainedModel) -> None:
    """Raise ConfigError for a model that the learner cannot run, adapt or divide. Divides its layers."""
    section: Any = getattr(cfg.trainer, key.split(".")[1])
    refuse_unscorable(model, values=key == CRITIC_PATH)
    if key == POLICY_PATH:
        replay, coef = cfg.trainer.moe_routing_replay, cfg.trainer.algorithm.router_aux_loss_coef
        Routers(model).check_needed(model, replay, coef)
    if key != REFERENCE_PATH and section.model.lora.rank:
        adapted_layers(model, section.model.lora, f"{key.removesuffix('path')}lora")
    keys = {name: key.replace("model.path", f"{name}_parallel_size") for name in ("sequence", "tensor", "expert")}
    if (size := section.sequence_parallel_size) > 1:
        heads = model.config.get_text_config().num_attention_heads
        planned_group(SequenceParallel, size, keys["sequence"]).check_heads(heads)
    if (size := section.tensor_parallel_size) > 1:
        planned_group(TensorParallel, size, keys["tensor"]).divide(model)
    if (size := section.expert_parallel_size) > 1:
        planned_group(ExpertParallel, size, keys["expert"]).divide(model)


def _check_length(cfg: Config, uses: Uses, model: PreTrainedModel) -> None:
    """Raise ConfigError if sequences may be longer than those that the learner computes exactly."""
    generator, limit = cfg.generator, longest_exact(model.config.get_text_config())
    if limit is None:
        return
    longest = longest_sequence(generator)
    if uses.engines and generator.run_engines_locally:
        if generator.backend == "transformers":
            return  # it has the same limit
        longest = min(longest, generator.engine_init_kwargs.get("max_model_len") or longest)
    if longest > limit:
        raise ConfigError(
            f"generator.max_input_length + generator.sampling_params.max_generate_length: sequences may have {longest} "
            f"tokens, but beyond {limit} this model's rope changes for a whole micro-batch (longrope), or its "
            "attention is divided into chunks (Llama 4). Lower them."
        )


def _check_reward_model(path: str, model_config_kwargs: Mapping[str, Any]) -> None:
    if load_tokenizer(path, key=REWARD_PATH).chat_template is None:
        raise ConfigError(f"{REWARD_PATH}={path!r}: its tokenizer has no chat template; add chat_template.jinja to it.")
    if is_folder(path):
        load_reward_model(path, dtype=torch.float32, device="meta", model_config_kwargs=model_config_kwargs)
    else:
        reward_config(path, model_config_kwargs)


def _check_sglang(cfg: Config) -> None:
    """Raise ConfigError for a model or an argument that SGLang would refuse."""
    from skyrl_train.experiment.engines import engine_kwargs, engine_settings  # imports Ray

    options = engine_kwargs(engine_settings(cfg), cfg.device, cfg.generator.backend)
    model, longest = options.pop("model"), options.pop("max_model_len", None)
    own = {key: options.pop(key) for key in ("name", "device", "dtype", "max_num_seqs", "rope_scaling", "rope_theta")}
    engine_arguments(
        model,
        **own,
        max_model_len=longest or load_config(model).get_text_config().max_position_embeddings,
        max_lora_rank=options.pop("max_lora_rank", 0),
        options=options,
        reads_weights=False,
    )


def _tokenizer(cfg: Config) -> Any:
    """Return the policy's tokenizer. Raises ConfigError if there is none: transformers would make an empty one."""
    path = cfg.trainer.policy.model.path
    if not has_tokenizer(path):
        raise ConfigError(
            f"{POLICY_PATH}={path!r} has no tokenizer; save that of the model it was made from into the same folder."
        )
    return build_tokenizer(cfg)


def _no_chat_template(cfg: Config) -> Problem:
    advice = (
        f"The tokenizer of {cfg.trainer.policy.model.path} has none: name one, give the file of the model's own with "
        "generator.chat_template.source=file, or use the instruction-tuned model."
    )
    return Problem(CHAT_TEMPLATE, None, "a chat template", advice)


def _check_token_ids(cfg: Config, tokenizer: Any, model: PreTrainedModel) -> None:
    """Raise ConfigError if text or the chat template can become token ids that the policy has no embedding for.

    A special token that nothing writes, such as one for padding, may be beyond.
    """
    rows = model.get_input_embeddings().weight.shape[0]  # type: ignore[union-attr, index]
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    written = f"{tokenizer.chat_template} {tokenizer.eos_token} {tokenizer.bos_token}"
    beyond = {token: index for token, index in tokenizer.get_vocab().items() if index >= rows}
    emitted = [token for token in beyond if token not in special or token in written]
    if emitted:
        token = max(emitted, key=lambda one: beyond[one])
        raise ConfigError(
            f"{POLICY_PATH}={cfg.trainer.policy.model.path!r}: its tokenizer can emit ids beyond the model's "
            f"embedding of {rows} rows ({len(emitted)} tokens, such as {token!r} with id {beyond[token]}). Resize "
            "the embedding with model.resize_token_embeddings(len(tokenizer)) and save the model again, or use its own "
            "tokenizer."
        )


def _sample(cfg: Config, uses: Uses, tokenizer: Any) -> set[str]:
    """Return the environments of a sample of the rows. Raises DataError for rows that cannot be used.

    Only files are read: folders, datasets on the hub and large JSON lists would have to be read as a whole.
    """
    if not uses.rewards:
        if uses.train_data and _can_sample(source for _, source in data_sources(cfg, uses)):
            build_demonstrations(cfg, tokenizer, SAMPLE_S)
        return set()
    names = set()
    for name in ("train_data", "val_data"):
        key = f"data.{name}"
        sources = [source for one, source in data_sources(cfg, uses) if one == key]
        if sources and _can_sample(sources):
            names |= {prompt.env_class for prompt in build_prompts(cfg, tokenizer, sources, key, SAMPLE_S).prompts}
    return names


def _can_sample(sources: Iterable[str]) -> bool:
    """True if the first rows of all sources can be read without the others."""
    return all(is_file_of_rows(source) and not is_address(source) and not _is_large_json(source) for source in sources)


def _is_large_json(source: str) -> bool:
    path = os.path.expanduser(source)
    return path.lower().endswith(".json") and os.path.getsize(path) > SAMPLE_BYTES


def check_addresses(cfg: Config, uses: Uses) -> None:
    """Look whether data, models and the run's folder can be reached, before anything is started.

    Raises ConfigError for what is not there and for a folder of another run, StorageError for storage that refuses.
    """
    problems = []
    for key, source in data_sources(cfg, uses):
        if is_address(source):
            store = StoredFolder(split_of(source)[0])
            if store.info() is None and not store.find():
                problems.append(Problem(key, source, "a file or a folder that exists", "Nothing is at this address."))
    for key, path in model_paths(cfg, uses):
        if is_address(path) and StoredFolder(path).read("config.json") is None:
            problems.append(Problem(key, path, "a model's folder", "There is no config.json at this address."))
    for name in ("ckpt_path", "export_path") if uses.learner else ():
        path = getattr(cfg.trainer, name)
        if not is_address(path):
            continue
        if (reason := why_not_writable(working_folder(path))) is not None:
            advice = f"{reason} Set SKYRL_CACHE to a folder that can be written."
            problems.append(Problem(f"trainer.{name}", path, "an address whose copy here can be written", advice))
        elif not StoredFolder(path).has_bucket():
            problems.append(Problem(f"trainer.{name}", path, "an address in a bucket that exists", "Make the bucket."))
    raise_all(problems)
    if uses.learner and is_address(cfg.trainer.ckpt_path):
        stored = StoredFolder(cfg.trainer.ckpt_path).read(IDENTITY_FILE)
        if stored is not None:
            refuse_other_run(cfg.trainer.ckpt_path, identity(cfg), stored)
