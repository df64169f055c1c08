"""Reads Hugging Face folders: models and tokenizers. Only safetensors; never a checkpoint's code. See export.py."""

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
"""Files of which a folder with a tokenizer has at least one."""


def load_config(
    path: str,
    *,
    key: str = POLICY_PATH_KEY,
    overrides: Mapping[str, Any] | None = None,
    rope_scaling: Mapping[str, Any] | None = None,
    rope_theta: float | None = None,
) -> Any:
    """The model's configuration with `overrides` (only of existing attributes) and rope changes. Raises ConfigError.

    For a composite this is the configuration of the whole checkpoint; changes apply to its language model.
    """
    folder = local_copy(path, weights=False)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # configurations check themselves, and raise many kinds
        raise _cannot_load(key, path, error) from error
    changed = config.get_text_config() if is_composite(config) else config
    for name, value in (overrides or {}).items():
        if not hasattr(changed, name):
            close = difflib.get_close_matches(name, changed.to_dict(), n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            kind = type(changed).__name__
            raise ConfigError(f"model_config_kwargs.{name}={value!r}: {kind} has no such attribute.{hint}")
        setattr(changed, name, value)
    if rope_scaling or rope_theta is not None:
        _change_rope(changed, dict(rope_scaling or {}), rope_theta)
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
    """Load a causal language model from a folder or a hub name, in `dtype`, in evaluation mode.

    Of a composite checkpoint only the language model is loaded: see composite.py.

    Raises ConfigError naming `key` if there is nothing to load, if weights are not safetensors or need code from the
    checkpoint, or if the checkpoint lacks a parameter (which would silently be trained from random values).
    """
    config = load_config(path, key=key, overrides=model_config_kwargs, rope_scaling=rope_scaling, rope_theta=rope_theta)
    if is_composite(config):
        model, saved = _open(path, config, dtype, key, attn_implementation)
        tie_equal_weights(model, saved)
        materialize_buffers(model, saved)
        _materialize_parameters(model, saved)
        return model.eval().to(device)  # type: ignore[arg-type]
    model, info = _load(AutoModelForCausalLM, path, config, key, dtype, attn_implementation)
    _refuse_absent(key, path, info["missing_keys"])
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
    """The model of `load_causal_lm` with its parameters on the meta device, and the checkpoint that has their values.

    Raises the same errors, and ConfigError for quantized weights and for a parameter that cannot be read row by row.
    Everything else of the model, such as buffers, is on the CPU.
    """
    config = load_config(path, key=key, overrides=model_config_kwargs, rope_scaling=rope_scaling, rope_theta=rope_theta)
    model, saved = _open(path, config, dtype, key, attn_implementation)
    tie_equal_weights(model, saved)
    materialize_buffers(model, saved)
    return model, saved


def check_causal_lm(
    path: str,
    *,
    key: str = POLICY_PATH_KEY,
    model_config_kwargs: Mapping[str, Any] | None = None,
    rope_scaling: Mapping[str, Any] | None = None,
    rope_theta: float | None = None,
    check_weight_files: bool = True,
) -> PreTrainedModel:
    """Return the model of `open_causal_lm` on the meta device without reading a weight.

    Args:
        checkpoint: Also refuse quantized weights, and check the names and shapes in the weight files of a folder, as
            `open_causal_lm` does. Weight files on the hub or at an address are never looked at.

    Raises:
        ConfigError: As `open_causal_lm`, and for an architecture that is no causal language model.
    """
    config = load_config(path, key=key, overrides=model_config_kwargs, rope_scaling=rope_scaling, rope_theta=rope_theta)
    if check_weight_files:
        _refuse_quantized(path, config, key)
        if is_local_folder(path):
            return _open(path, config, torch.float32, key, "eager")[0]
    try:
        return build_meta_model(config, torch.float32)
    except ConfigError:
        raise
    except Exception as error:  # as in `_load`
        raise _cannot_load(key, path, error) from error


def is_local_folder(path: str) -> bool:
    """True for a folder of this machine, False for a name on the hub and for an address of storage."""
    return Path(strip_file_scheme(path)).is_dir()


def _open(
    path: str, config: PreTrainedConfig, dtype: torch.dtype, key: str, attn_implementation: str | None
) -> tuple[PreTrainedModel, PretrainedWeights]:
    """Return the model on the meta device and its checkpoint, whose names and shapes fit. Raises ConfigError."""
    _refuse_quantized(path, config, key)
    if is_composite(config):
        _, info = _load(AutoModelForImageTextToText, path, config, key, dtype, "eager", "meta")
        if has_untied_head(path):
            untie_head(config)
        model = build_text_model(build_meta_composite(config, dtype), dtype, attn_implementation)
        composite = get_composite(model)
        assert composite is not None
        _refuse_absent(key, path, set(composite.tensor_names.values()).intersection(info["missing_keys"]))
        with suppress(OSError):  # it is optional
            model.generation_config = GenerationConfig.from_pretrained(local_copy(path, weights=False))
    else:
        model, info = _load(AutoModelForCausalLM, path, config, key, dtype, attn_implementation, "meta")
        _refuse_absent(key, path, info["missing_keys"])
    try:
        saved = open_pretrained_weights(model, path, config)
    except (OSError, SafetensorError) as error:
        raise _cannot_load(key, path, error) from error
    if lost := [name for name, _ in model.named_parameters() if name not in saved]:
        raise ConfigError(
            f"{key}={path!r}: {len(lost)} parameters, such as {lost[0]!r}, cannot be read from the checkpoint row by "
            "row: transformers makes them of its tensors in a way that is not known here. Save the model with "
            "save_pretrained, and give that folder."
        )
    return model, saved


def open_pretrained_weights(model: PreTrainedModel, path: str, config: PreTrainedConfig) -> PretrainedWeights:
    """Return the weights of a folder or hub name, for its model on the meta device. Raises OSError if it has none."""
    return PretrainedWeights(model, _weight_files(path, config))


def set_config_dtype(config: PreTrainedConfig, dtype: torch.dtype) -> None:
    """Write into a configuration, and that of a composite's language model, the dtype in which it is saved."""
    for part in (config, config.get_text_config()):
        part.dtype = dtype


def _refuse_quantized(path: str, config: PreTrainedConfig, key: str) -> None:
    parts = (config, config.get_text_config())
    if any(getattr(part, "quantization_config", None) is not None for part in parts):
        raise ConfigError(
            f"{key}={path!r}: quantized weights are not trained; give the checkpoint without quantization."
        )


def load_reward_model(
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    model_config_kwargs: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """Load a sequence classifier with one output, in evaluation mode.

    On the device "meta" everything is checked, but no weights are read. Raises ConfigError as `load_causal_lm` does;
    also for another number of outputs, for a head with tensors unknown to its class, and for encoder-decoders.
    """
    config = load_reward_config(path, model_config_kwargs)
    meta = "meta" if str(device) == "meta" else None
    model, info = _load(AutoModelForSequenceClassification, path, config, REWARD_PATH_KEY, dtype, device=meta)
    _refuse_absent(REWARD_PATH_KEY, path, info["missing_keys"])
    unexpected = sorted(info["unexpected_keys"])
    body = model.base_model_prefix
    if head := [name for name in unexpected if not name.startswith((f"{body}.", "lm_head."))]:
        raise ConfigError(
            f"{REWARD_PATH_KEY}={path!r}: {type(model).__name__} has no place for {head[0]!r}, so its scores would be "
            "others than those it was trained to give; use a model that transformers' own class describes."
        )
    for part in (model.config, model.config.get_text_config()):
        part.use_cache = False
    return model.to(device)  # type: ignore[arg-type]


def load_reward_config(path: str, model_config_kwargs: Mapping[str, Any] | None = None) -> Any:
    """Return the configuration of a reward model. Raises ConfigError for one that gives no single score of a text."""
    config = load_config(path, key=REWARD_PATH_KEY, overrides=model_config_kwargs)
    if config.num_labels != 1:
        raise ConfigError(
            f"{REWARD_PATH_KEY}={path!r}: its configuration has num_labels={config.num_labels}; a reward model has one "
            "output: give a sequence classification model that was trained with num_labels=1."
        )
    if config.is_encoder_decoder:
        raise ConfigError(
            f"{REWARD_PATH_KEY}={path!r}: {type(config).__name__} has an encoder and a decoder, which read two texts; give "
            "a model that has one of them."
        )
    return config


def get_max_positions(model: PreTrainedModel) -> int | None:
    """The most tokens that a model can read at once; None if there is no limit.

    RoBERTa and its relatives count positions from the one after the padding token's.
    """
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return module.num_embeddings - module.padding_idx - 1
    longest: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return longest if longest and longest > 0 else None


def _load(
    kind: Any,
    path: str,
    config: PreTrainedConfig,
    key: str,
    dtype: torch.dtype,
    attn_implementation: str | None = None,
    device: str | None = None,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model, and transformers' account of tensors that are missing in the checkpoint or unexpected.

    `kind`: the Auto class. `attention`: None for the best implementation that the model supports. `device`: "meta" to
    check everything, but read no weights.
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
    except Exception as error:  # model classes and files raise many kinds for what they cannot use
        raise _cannot_load(key, path, error) from error
    set_base_model_prefix(model)
    return model, info


def _refuse_absent(key: str, path: str, absent: Iterable[str]) -> None:
    """Raise ConfigError if there are names in `absent`, those of tensors that the checkpoint lacks."""
    if names := sorted(absent):
        raise ConfigError(
            f"{key}={path!r}: the checkpoint lacks {len(names)} tensors, such as {names[0]!r}; use a complete one."
        )


def _materialize_parameters(model: PreTrainedModel, pretrained: PretrainedWeights) -> None:
    """Give the parameters of a model on the meta device their values, on the CPU."""
    for name, parameter in list(model.named_parameters()):
        real = nn.Parameter(pretrained.read(name).to(parameter.dtype, copy=True))
        torch.utils.swap_tensors(parameter, real)


def load_meta_model(path: str, dtype: torch.dtype) -> PreTrainedModel:
    """A causal language model on the meta device: layers, names and shapes, without memory."""
    return build_meta_model(load_config(path), dtype)


def load_meta_model_as_served(path: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model of `meta_model` as the weights at `path` are: see `has_untied_head`."""
    config = load_config(path)
    if has_untied_head(path):
        untie_head(config)
    return build_meta_model(config, dtype)


def build_meta_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return the causal language model of a configuration on the meta device; of a composite its language model."""
    if is_composite(config):
        return build_text_model(build_meta_composite(config, dtype), dtype)
    # It never computes attention, so the kernels that its configuration may name need not be installed.
    options = {"dtype": dtype, "attn_implementation": "eager"}
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, **options)
    set_base_model_prefix(model)
    return model


def meta_parameters(path: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Name -> parameter of a causal language model on the meta device; tied names have the same object."""
    return dict(load_meta_model(path, dtype).named_parameters(remove_duplicate=False))


def has_untied_head(path: str) -> bool:
    """True if config.json ties the head to the embedding, but the weights of a folder or hub name have different ones.

    transformers keeps both then. Other engines go by config.json, so they must be told.
    """
    config = load_config(path)
    if not any(getattr(part, "tie_word_embeddings", False) for part in (config, config.get_text_config())):
        return False
    tied = build_meta_model(config, torch.float32)
    held = list_checkpoint_names(path)
    pairs = _tied_names(tied).items()
    if not contains_tied_pair(tied, [name for pair in pairs for name in pair if _checkpoint_name(tied, name) in held]):
        return False
    untie_head(config)
    saved = open_pretrained_weights(build_meta_model(config, torch.float32), path, config)
    return any(not torch.equal(saved.read(name), saved.read(source)) for name, source in _tied_names(tied).items())


def contains_tied_pair(model: PreTrainedModel, names: Iterable[str]) -> bool:
    """True if `names` contains both a parameter and another one that the model's configuration ties to it."""
    held = set(names)
    return any(name in held and source in held for name, source in _tied_names(model).items())


def _checkpoint_name(model: PreTrainedModel, name: str) -> str:
    """Return the name that a tensor of a model, which is saved as it is, has in checkpoints."""
    return next(iter(to_checkpoint_tensors(model, {name: torch.empty(0, device="meta")})))


def _tied_names(model: PreTrainedModel) -> dict[str, str]:
    return getattr(model, "all_tied_weights_keys", {})


def untie_head(config: PreTrainedConfig) -> None:
    """Change a configuration to that of a model whose head is not the embedding."""
    for part in (config, config.get_text_config()):
        part.tie_word_embeddings = False


def to_checkpoint_tensors(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights named and split as in checkpoints, if transformers differs from them.

    Experts are separate there, and the language model of a composite has the composite's names.
    """
    composite = get_composite(model)
    if composite is not None:
        return composite.to_checkpoint_tensors(tensors)
    return revert_weight_conversion(model, dict(tensors))  # type: ignore[no-any-return]


def list_checkpoint_names(path: str) -> set[str]:
    """Names of the tensors in the safetensors files of a folder or hub name; empty if it has none."""
    absent: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False}
    if index := cached_file(local_copy(path, weights=False), "model.safetensors.index.json", **absent):
        return set(json.loads(Path(index).read_text())["weight_map"])
    if file := cached_file(local_copy(path), "model.safetensors", **absent):
        with safe_open(file, framework="pt") as opened:
            return set(opened.keys())
    return set()


def _weight_files(path: str, config: PreTrainedConfig) -> list[str]:
    """The safetensors files of a folder or hub name, in the order in which transformers looks for them.

    Raises ConfigError for a model that names files outside its folder.
    """
    path = local_copy(path)
    first = getattr(config, "transformers_weights", None) or "model.safetensors"
    _refuse_outside(path, first)
    file = cached_file(path, first, _raise_exceptions_for_missing_entries=False)
    found = Path(file or str(cached_file(path, "model.safetensors.index.json")))
    if found.suffix != ".json":
        return [str(found)]
    files = set(json.loads(found.read_text())["weight_map"].values())
    _refuse_outside(path, *files)
    return [str(cached_file(path, name)) for name in sorted(files)]


def _refuse_outside(model: str, *files: str) -> None:
    if outside := [name for name in files if not is_relative_name(str(name))]:
        raise ConfigError(f"{model}: its weights are in {outside[0]!r}, which is not a file of the model's folder.")


def has_tokenizer(path: str) -> bool:
    """True if a folder or hub name has files of a tokenizer."""
    absent: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False}
    path = local_copy(path, weights=False)
    return any(cached_file(path, name, **absent) for name in TOKENIZER_FILES)


def load_tokenizer(
    path: str, *, use_fast: bool = True, key: str = POLICY_PATH_KEY, chat_template: str | None = None
) -> Any:
    """Return the tokenizer of a folder or hub name, with `chat_template` in place of its own if that is given.

    Raises ConfigError naming `key`.
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
        todo = f"The folder must hold config.json, a tokenizer and *.safetensors of a {kind}."
    elif Path(path).is_absolute() or path.startswith("."):
        todo = "There is no such folder: give one that exists, or a hub name like 'Qwen/Qwen2.5-0.5B-Instruct'."
    else:
        todo = (
            "There is no such folder, and the hub has no such model or does not answer: check name, network, HF_TOKEN."
        )
    return ConfigError(f"{key}={path!r} cannot be loaded. {todo} ({type(error).__name__}: {reason})")


def _change_rope(config: Any, scaling: dict[str, Any], theta: float | None) -> None:
    """Merge into `rope_parameters`; the older spelling `type` is accepted for `rope_type`."""
    current: Any = getattr(config, "rope_parameters", None)
    single = isinstance(current, dict) and not any(isinstance(value, dict) for value in current.values())
    if not single:
        raise ConfigError(
            f"trainer.rope_scaling={scaling or None!r}, trainer.rope_theta={theta!r}: {type(config).__name__} has no "
            "single set of rope parameters to change; set them in model_config_kwargs.rope_parameters."
        )
    if "type" in scaling:
        scaling["rope_type"] = scaling.pop("type")
    config.rope_parameters = {**current, **scaling, **({} if theta is None else {"rope_theta": float(theta)})}
    if config.rope_parameters.get("rope_type") == "yarn":
        config.rope_parameters.setdefault("original_max_position_embeddings", config.max_position_embeddings)
