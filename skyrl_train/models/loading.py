"""Reads models and tokenizers from Hugging Face folders: only safetensors, never a checkpoint's code."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import cached_file

from skyrl_train.config.locations import is_relative_name, is_uri, strip_file_scheme
from skyrl_train.errors import ConfigError
from skyrl_train.models.composite import build_meta_composite, build_text_model, get_composite, is_composite
from skyrl_train.models.padding_free import set_base_model_prefix
from skyrl_train.models.pretrained_weights import PretrainedWeights, materialize_buffers, tie_equal_weights
from skyrl_train.storage.download_cache import local_copy

POLICY_PATH_KEY = "trainer.policy.model.path"
REWARD_PATH_KEY = "trainer.reward.model.path"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""A folder with a tokenizer has at least one of these files."""


def load_config(
    path: str,
    *,
    key: str = POLICY_PATH_KEY,
    overrides: Mapping[str, Any] | None = None,
    rope_scaling: Mapping[str, Any] | None = None,
    rope_theta: float | None = None,
) -> Any:
    """Return a model's configuration with changes.

    For a composite (a multimodal model) this is the configuration of the full checkpoint. Changes apply to its language
    model.

    Args:
        path: A folder, hub name or URI.
        key: Configuration key of `path`, for messages.
        overrides: New values of existing attributes; None to change none.
        rope_scaling: Values to merge into the rope parameters; None to change none.
        rope_theta: The rope's base frequency; None to leave it unchanged.

    Raises:
        ConfigError: The configuration cannot be loaded or lacks an attribute of `overrides`, or the rope parameters
            shall change and the model does not have exactly one set of them.
    """
    folder = local_copy(path, weights=False)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # configurations validate themselves, and raise many types
        raise _cannot_load(key, path, error) from error
    text_config = config.get_text_config() if is_composite(config) else config
    for name, value in (overrides or {}).items():
        if not hasattr(text_config, name):
            matches = difflib.get_close_matches(name, text_config.to_dict(), n=1)
            hint = f"Did you mean {matches[0]!r}?" if matches else "Remove it."
            kind = type(text_config).__name__
            raise ConfigError(f"model_config_kwargs.{name}={value!r}: {kind} has no such attribute. {hint}")
        setattr(text_config, name, value)
    if rope_scaling or rope_theta is not None:
        _change_rope(text_config, dict(rope_scaling or {}), rope_theta)
    return config


def load_causal_lm(
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    model_config_kwargs: Mapping[str, Any] | None = None,
    rope_scaling: Mapping[str, Any] | None = None,
    rope_theta: float | None = None,
    attn_implementation: str | None = None,
    key: str = POLICY_PATH_KEY,
) -> PreTrainedModel:
    """Load a causal language model in evaluation mode.

    Only the language model of a composite checkpoint is loaded: see composite.py.

    Args:
        path: A folder, hub name or URI.
        dtype: Dtype of the parameters.
        device: Device of the model.
        model_config_kwargs: Changes of the model's configuration; None to keep it. See `overrides` of `load_config`.
        rope_scaling: See `load_config`. None keeps the model's.
        rope_theta: See `load_config`. None keeps the model's.
        attn_implementation: Attention implementation of transformers; None for the best one that the model supports.
        key: Configuration key of `path`, for messages.

    Raises:
        ConfigError: The model cannot be loaded, its weights are not safetensors or require code of the checkpoint, or
            the checkpoint lacks a parameter, which would silently be trained from random values.
    """
    config = load_config(path, key=key, overrides=model_config_kwargs, rope_scaling=rope_scaling, rope_theta=rope_theta)
    if is_composite(config):
        model, pretrained = _open(path, config, dtype, key, attn_implementation)
        tie_equal_weights(model, pretrained)
        materialize_buffers(model, pretrained)
        _materialize_parameters(model, pretrained)
        return model.eval().to(device)  # type: ignore[arg-type]
    model, info = _load(AutoModelForCausalLM, path, config, key, dtype, attn_implementation)
    _check_complete(key, path, info["missing_keys"])
    return model.to(device)  # type: ignore[arg-type]


def open_causal_lm(
    path: str,
    *,
    dtype: torch.dtype,
    model_config_kwargs: Mapping[str, Any] | None = None,
    rope_scaling: Mapping[str, Any] | None = None,
    rope_theta: float | None = None,
    attn_implementation: str | None = None,
    key: str = POLICY_PATH_KEY,
) -> tuple[PreTrainedModel, PretrainedWeights]:
    """Return the model of `load_causal_lm` with its parameters on the meta device, and the weights to read them from.

    Everything else of the model, such as buffers, is on the CPU.

    Args:
        path: A folder, hub name or URI.
        dtype: Dtype of the parameters.
        model_config_kwargs: Changes of the model's configuration; None to keep it. See `overrides` of `load_config`.
        rope_scaling: See `load_config`. None keeps the model's.
        rope_theta: See `load_config`. None keeps the model's.
        attn_implementation: See `load_causal_lm`.
        key: Configuration key of `path`, for messages.

    Raises:
        ConfigError: As `load_causal_lm`, or the weights are quantized, or a parameter cannot be read row by row.
    """
    config = load_config(path, key=key, overrides=model_config_kwargs, rope_scaling=rope_scaling, rope_theta=rope_theta)
    model, pretrained = _open(path, config, dtype, key, attn_implementation)
    tie_equal_weights(model, pretrained)
    materialize_buffers(model, pretrained)
    return model, pretrained


def check_causal_lm(
    path: str,
    *,
    key: str = POLICY_PATH_KEY,
    model_config_kwargs: Mapping[str, Any] | None = None,
    rope_scaling: Mapping[str, Any] | None = None,
    rope_theta: float | None = None,
    check_weight_files: bool = True,
) -> PreTrainedModel:
    """Return the model of `open_causal_lm` on the meta device, after checks that read no weights.

    Args:
        path: A folder, hub name or URI.
        key: Configuration key of `path`, for messages.
        model_config_kwargs: Changes of the model's configuration; None to keep it. See `overrides` of `load_config`.
        rope_scaling: See `load_config`. None keeps the model's.
        rope_theta: See `load_config`. None keeps the model's.
        check_weight_files: Also reject quantized weights, and check the names and shapes in the weight files of a local
            folder, as `open_causal_lm` does. Weight files on the hub or at a URI are never read.

    Raises:
        ConfigError: As `open_causal_lm`, or the architecture is not a causal language model.
    """
    config = load_config(path, key=key, overrides=model_config_kwargs, rope_scaling=rope_scaling, rope_theta=rope_theta)
    if check_weight_files:
        _check_not_quantized(path, config, key)
        if is_local_folder(path):
            return _open(path, config, torch.float32, key, "eager")[0]
    try:
        return build_meta_model(config, torch.float32)
    except ConfigError:
        raise
    except Exception as error:  # as in `_load`
        raise _cannot_load(key, path, error) from error


def is_local_folder(path: str) -> bool:
    """True for a folder on this machine; False for a hub name or a URI of remote storage."""
    return Path(strip_file_scheme(path)).is_dir()


def _open(
    path: str, config: PreTrainedConfig, dtype: torch.dtype, key: str, attn_implementation: str | None
) -> tuple[PreTrainedModel, PretrainedWeights]:
    """Return the model on the meta device and its weights, whose names and shapes match. Raises ConfigError."""
    _check_not_quantized(path, config, key)
    if is_composite(config):
        _, info = _load(AutoModelForImageTextToText, path, config, key, dtype, "eager", "meta")
        if has_untied_head(path):
            untie_head(config)
        model = build_text_model(build_meta_composite(config, dtype), dtype, attn_implementation)
        composite = get_composite(model)
        assert composite is not None
        _check_complete(key, path, set(composite.tensor_names.values()).intersection(info["missing_keys"]))
        with suppress(OSError):  # it is optional
            model.generation_config = GenerationConfig.from_pretrained(local_copy(path, weights=False))
    else:
        model, info = _load(AutoModelForCausalLM, path, config, key, dtype, attn_implementation, "meta")
        _check_complete(key, path, info["missing_keys"])
    try:
        pretrained = open_pretrained_weights(model, path, config)
    except (OSError, SafetensorError) as error:
        raise _cannot_load(key, path, error) from error
    if missing := [name for name, _ in model.named_parameters() if name not in pretrained]:
        raise ConfigError(
            f"{key}={path!r}: {len(missing)} parameters, such as {missing[0]!r}, cannot be read from the checkpoint "
            "row by row, because transformers converts its tensors in an unsupported way. Load the model with "
            f"transformers, save it with save_pretrained, and set {key} to that folder."
        )
    return model, pretrained


def open_pretrained_weights(model: PreTrainedModel, path: str, config: PreTrainedConfig) -> PretrainedWeights:
    """Return the weights of a folder or hub name, for its model on the meta device.

    Args:
        model: The model, on the meta device.
        path: A folder, hub name or URI.
        config: The model's configuration.

    Raises:
        OSError: There are no weights, or a file cannot be read.
        ConfigError: The model names files outside its folder.
    """
    return PretrainedWeights(model, _weight_files(path, config))


def set_config_dtype(config: PreTrainedConfig, dtype: torch.dtype) -> None:
    """Set the dtype in a configuration, and in that of a composite's language model."""
    for section in (config, config.get_text_config()):
        section.dtype = dtype


def _check_not_quantized(path: str, config: PreTrainedConfig, key: str) -> None:
    sections = (config, config.get_text_config())
    if any(getattr(section, "quantization_config", None) is not None for section in sections):
        raise ConfigError(
            f"{key}={path!r}: quantized weights are not supported. Use the checkpoint without quantization."
        )


def load_reward_model(
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    model_config_kwargs: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """Load a sequence classifier with one output, in evaluation mode.

    Args:
        path: A folder, hub name or URI.
        dtype: Dtype of the parameters.
        device: Device of the model. With "meta" everything is checked, but no weights are read.
        model_config_kwargs: Changes of the model's configuration; None to keep it. See `overrides` of `load_config`.

    Raises:
        ConfigError: The model cannot be loaded, has another number of outputs, lacks a tensor, has a head with tensors
            that its class does not have, or is an encoder-decoder.
    """
    config = load_reward_config(path, model_config_kwargs)
    meta = "meta" if str(device) == "meta" else None
    model, info = _load(AutoModelForSequenceClassification, path, config, REWARD_PATH_KEY, dtype, device=meta)
    _check_complete(REWARD_PATH_KEY, path, info["missing_keys"])
    unexpected = sorted(info["unexpected_keys"])
    body = model.base_model_prefix
    if head_tensors := [name for name in unexpected if not name.startswith((f"{body}.", "lm_head."))]:
        raise ConfigError(
            f"{REWARD_PATH_KEY}={path!r}: {type(model).__name__} has no parameter for {head_tensors[0]!r}, so its "
            "scores would differ from those it was trained for. Use a model that transformers supports without "
            "custom code."
        )
    for section in (model.config, model.config.get_text_config()):
        section.use_cache = False
    return model.to(device)  # type: ignore[arg-type]


def load_reward_config(path: str, model_config_kwargs: Mapping[str, Any] | None = None) -> Any:
    """Return the configuration of a reward model.

    Args:
        path: A folder, hub name or URI.
        model_config_kwargs: Changes of the model's configuration; None to keep it. See `overrides` of `load_config`.

    Raises:
        ConfigError: The configuration cannot be loaded, its number of outputs is not 1, or it is an encoder-decoder.
    """
    config = load_config(path, key=REWARD_PATH_KEY, overrides=model_config_kwargs)
    if config.num_labels != 1:
        raise ConfigError(
            f"{REWARD_PATH_KEY}={path!r}: its configuration has num_labels={config.num_labels}; a reward model has one "
            "output. Use a sequence classification model that was trained with num_labels=1."
        )
    if config.is_encoder_decoder:
        raise ConfigError(
            f"{REWARD_PATH_KEY}={path!r}: {type(config).__name__} has an encoder and a decoder, which read two texts. "
            "Use a model with only one of them."
        )
    return config


def get_max_positions(model: PreTrainedModel) -> int | None:
    """Return the maximum number of tokens that a model can read at once; None if there is no limit.

    RoBERTa and its relatives number positions from the one after the padding token's.
    """
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return module.num_embeddings - module.padding_idx - 1
    max_positions: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return max_positions if max_positions and max_positions > 0 else None


def _load(
    kind: Any,
    path: str,
    config: PreTrainedConfig,
    key: str,
    dtype: torch.dtype,
    attn_implementation: str | None = None,
    device: str | None = None,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return the model, and transformers' loading info: tensors that are missing in the checkpoint or unexpected.

    `kind` is the Auto class. `attn_implementation` None means the best one that the model supports. With `device`
    "meta" everything is checked, but no weights are read.
    """
    folder = local_copy(path)
    try:
        model, info = kind.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=attn_implementation,
            device_map=device,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # model classes and files raise many types of errors
        raise _cannot_load(key, path, error) from error
    set_base_model_prefix(model)
    return model, info


def _check_complete(key: str, path: str, missing: Iterable[str]) -> None:
    """Raise ConfigError if the checkpoint lacks tensors."""
    if names := sorted(missing):
        raise ConfigError(
            f"{key}={path!r}: the checkpoint lacks {len(names)} tensors, such as {names[0]!r}. Use a complete one."
        )


def _materialize_parameters(model: PreTrainedModel, pretrained: PretrainedWeights) -> None:
    """Read the values of a meta-device model's parameters, on the CPU."""
    for name, parameter in list(model.named_parameters()):
        materialized = nn.Parameter(pretrained.read(name).to(parameter.dtype, copy=True))
        torch.utils.swap_tensors(parameter, materialized)


def load_meta_model(path: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return the causal language model of a folder or hub name on the meta device.

    Raises ConfigError as `load_config` and `build_meta_model`.
    """
    return build_meta_model(load_config(path), dtype)


def load_meta_model_as_served(path: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model of `load_meta_model`, with an untied head if the weights at `path` have one.

    See `has_untied_head`.
    """
    config = load_config(path)
    if has_untied_head(path):
        untie_head(config)
    return build_meta_model(config, dtype)


def build_meta_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return the causal language model of a configuration on the meta device; for a composite, its language model.

    Raises:
        ConfigError: The composite cannot be used as a text model: see `build_text_model`.
    """
    if is_composite(config):
        return build_text_model(build_meta_composite(config, dtype), dtype)
    # Eager, so that kernels that the configuration may name need not be installed; attention never runs.
    options = {"dtype": dtype, "attn_implementation": "eager"}
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, **options)
    set_base_model_prefix(model)
    return model


def has_untied_head(path: str) -> bool:
    """True if config.json ties the head to the embedding, but the weights of a folder or hub name have different ones.

    transformers then keeps both. Other engines rely on config.json, so they need an override.

    Raises:
        ConfigError: The model's configuration or weights cannot be loaded.
    """
    config = load_config(path)
    if not any(getattr(section, "tie_word_embeddings", False) for section in (config, config.get_text_config())):
        return False
    tied = build_meta_model(config, torch.float32)
    checkpoint_names = list_checkpoint_names(path)
    pairs = _tied_names(tied).items()
    if not contains_tied_pair(
        tied, [name for pair in pairs for name in pair if _checkpoint_name(tied, name) in checkpoint_names]
    ):
        return False
    untie_head(config)
    pretrained = open_pretrained_weights(build_meta_model(config, torch.float32), path, config)
    return any(
        not torch.equal(pretrained.read(name), pretrained.read(source)) for name, source in _tied_names(tied).items()
    )


def contains_tied_pair(model: PreTrainedModel, names: Iterable[str]) -> bool:
    """True if `names` contains both a parameter and another one that the model's configuration ties to it."""
    name_set = set(names)
    return any(name in name_set and source in name_set for name, source in _tied_names(model).items())


def _checkpoint_name(model: PreTrainedModel, name: str) -> str:
    """Return the name in checkpoints of a tensor that is saved without conversion."""
    return next(iter(to_checkpoint_tensors(model, {name: torch.empty(0, device="meta")})))


def _tied_names(model: PreTrainedModel) -> dict[str, str]:
    return getattr(model, "all_tied_weights_keys", {})


def untie_head(config: PreTrainedConfig) -> None:
    """Change a configuration to that of a model whose head is not tied to the embedding."""
    for section in (config, config.get_text_config()):
        section.tie_word_embeddings = False


def to_checkpoint_tensors(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with the names and shapes of published checkpoints.

    Where these differ from transformers' own, experts are split and a composite's text model gets the composite's
    names.

    Args:
        model: The model, which may be on the meta device.
        tensors: Name in the model -> tensor.
    """
    composite = get_composite(model)
    if composite is not None:
        return composite.to_checkpoint_tensors(tensors)
    return revert_weight_conversion(model, dict(tensors))  # type: ignore[no-any-return]


def list_checkpoint_names(path: str) -> set[str]:
    """Return the names of the tensors in the safetensors files of a folder, hub name or URI; empty if it has none.

    Raises:
        ConfigError: The URI is not valid.
        StorageError: The URI cannot be downloaded.
    """
    optional: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False}
    if index := cached_file(local_copy(path, weights=False), "model.safetensors.index.json", **optional):
        return set(json.loads(Path(index).read_text())["weight_map"])
    if file := cached_file(local_copy(path), "model.safetensors", **optional):
        with safe_open(file, framework="pt") as opened:
            return set(opened.keys())
    return set()


def _weight_files(path: str, config: PreTrainedConfig) -> list[str]:
    """Return the safetensors files of a folder or hub name, in the order in which transformers looks for them.

    Raises:
        ConfigError: The model names files outside its folder.
        OSError: There is no such file.
    """
    path = local_copy(path)
    first = getattr(config, "transformers_weights", None) or "model.safetensors"
    _check_inside_folder(path, first)
    file = cached_file(path, first, _raise_exceptions_for_missing_entries=False)
    weights_or_index = Path(file or str(cached_file(path, "model.safetensors.index.json")))
    if weights_or_index.suffix != ".json":
        return [str(weights_or_index)]
    files = set(json.loads(weights_or_index.read_text())["weight_map"].values())
    _check_inside_folder(path, *files)
    return [str(cached_file(path, name)) for name in sorted(files)]


def _check_inside_folder(model: str, *files: str) -> None:
    if outside := [name for name in files if not is_relative_name(str(name))]:
        raise ConfigError(
            f"{model}: its weights are in {outside[0]!r}, which is not a file of the model's folder. Move the file "
            "into the folder, and correct the name in config.json or model.safetensors.index.json."
        )


def has_tokenizer(path: str) -> bool:
    """True if a folder, hub name or URI has files of a tokenizer.

    Raises:
        ConfigError: The URI is not valid.
        StorageError: The URI cannot be downloaded.
    """
    optional: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False}
    path = local_copy(path, weights=False)
    return any(cached_file(path, name, **optional) for name in TOKENIZER_FILES)


def load_tokenizer(
    path: str, *, use_fast: bool = True, key: str = POLICY_PATH_KEY, chat_template: str | None = None
) -> Any:
    """Return the tokenizer of a folder or hub name.

    Args:
        path: A folder, hub name or URI.
        use_fast: Use the fast implementation if there is one.
        key: Configuration key of `path`, for messages.
        chat_template: Replaces the tokenizer's own chat template; None keeps it.

    Raises:
        ConfigError: The tokenizer cannot be loaded.
    """
    folder = local_copy(path, weights=False)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, use_fast=use_fast, trust_remote_code=False)
    except Exception as error:  # tokenizers raises plain Exceptions, and transformers KeyErrors
        raise _cannot_load(key, path, error) from error
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def _cannot_load(key: str, path: str, error: Exception) -> ConfigError:
    reason = str(error).strip().split("\n")[0]
    if is_uri(path) or Path(path).is_dir():
        kind = "sequence classification model" if key == REWARD_PATH_KEY else "causal language model"
        advice = f"The folder must contain config.json, a tokenizer and *.safetensors of a {kind}."
    elif Path(path).is_absolute() or path.startswith("."):
        advice = "There is no such folder. Use an existing one, or a hub name like 'Qwen/Qwen2.5-0.5B-Instruct'."
    else:
        advice = (
            "There is no such folder, and the hub has no such model or does not answer. Check the name, the network "
            "and HF_TOKEN."
        )
    return ConfigError(f"{key}={path!r} cannot be loaded. {advice} ({type(error).__name__}: {reason})")


def _change_rope(config: Any, scaling: dict[str, Any], theta: float | None) -> None:
    """Merge changes into `rope_parameters`; the older key `type` is accepted for `rope_type`. Raises ConfigError."""
    current: Any = getattr(config, "rope_parameters", None)
    is_single_set = isinstance(current, dict) and not any(isinstance(value, dict) for value in current.values())
    if not is_single_set:
        raise ConfigError(
            f"trainer.rope_scaling={scaling or None!r}, trainer.rope_theta={theta!r}: {type(config).__name__} has no "
            "single set of rope parameters to change. Set all of them in model_config_kwargs.rope_parameters."
        )
    if "type" in scaling:
        scaling["rope_type"] = scaling.pop("type")
    config.rope_parameters = {**current, **scaling, **({} if theta is None else {"rope_theta": float(theta)})}
    if config.rope_parameters.get("rope_type") == "yarn":
        config.rope_parameters.setdefault("original_max_position_embeddings", config.max_position_embeddings)
