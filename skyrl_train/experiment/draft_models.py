"""Draft models and heads of speculative decoding: checks of their configuration, and their size for the memory plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from skyrl_train.config.drafts import METHODS_WITH_MODEL, find_draft_model, get_section, get_speculative_config
from skyrl_train.config.schema import Config
from skyrl_train.errors import ConfigError
from skyrl_train.experiment.data import check_same_tokens
from skyrl_train.models.layer_sizes import get_layer_sizes
from skyrl_train.models.loading import check_causal_lm, load_config
from skyrl_train.models.padding_free import count_attention_layers
from skyrl_train.storage.download_cache import local_copy

_OWN_MTP_DEFAULT = frozenset({"longcat_flash", "mimo_v2_flash"})
"""Model types with layers for multi-token prediction that their configuration need not mention."""


@dataclass(frozen=True)
class DraftSize:
    """The size of what drafts, in one rank's numbers without tensor parallelism."""

    weights: int
    """Number of parameters that the policy does not have."""
    cache_per_token: int
    """Numbers per token in the KV cache."""


def check_drafts(cfg: Config) -> None:
    """Check that the drafts of speculative decoding are tokens of the engines' model, as far as files tell.

    Raises:
        ConfigError: The draft model cannot be loaded or has another vocabulary or tokenizer, the head is for another
            model, or the model has no layers for multi-token prediction.
    """
    drafts = get_speculative_config(cfg.generator) or {}
    method, path = drafts.get("method"), cfg.generator.model_name
    policy = load_config(path).get_text_config()
    if method == "mtp":
        _check_mtp_layers(get_section(cfg.generator), drafts, path, policy)
    if method not in METHODS_WITH_MODEL or (found := find_draft_model(cfg.generator)) is None:
        return
    key, draft_path = found
    if method == "draft_model":
        draft = check_causal_lm(draft_path, key=key, check_weight_files=False).config.get_text_config()
        _compare(key, draft_path, "vocab_size", draft.vocab_size, policy.vocab_size, path)
        check_same_tokens(path, draft_path, key)
        return
    head = _read_head(draft_path)
    if not head.get("architectures"):
        raise ConfigError(f"{key}={draft_path!r}: its config.json names no architectures. Choose an EAGLE head.")
    for name, of_head in (
        ("vocab_size", head.get("vocab_size")),
        ("hidden_size", head.get("target_hidden_size", head.get("hidden_size"))),
    ):
        if of_head is not None:
            _compare(key, draft_path, name, of_head, getattr(policy, name), path)


def _check_mtp_layers(section: str, drafts: dict[str, Any], path: str, policy: Any) -> None:
    layers, count = _count_mtp_layers(policy), drafts.get("num_speculative_tokens") or 1
    if not layers and policy.model_type not in _OWN_MTP_DEFAULT:
        raise ConfigError(
            f"{section}.method=mtp: {path!r} ({policy.model_type}) has no layers for multi-token prediction. Choose "
            "another method, such as ngram."
        )
    if layers and count > layers and count % layers:
        raise ConfigError(
            f"{section}.num_speculative_tokens={count}: {path!r} has {layers} layers for multi-token prediction. vLLM "
            f"needs at most {layers}, or a multiple of it."
        )


def _compare(key: str, draft_path: str, name: str, of_draft: int, of_policy: int, path: str) -> None:
    if of_draft != of_policy:
        raise ConfigError(
            f"{key}={draft_path!r}: its {name} is {of_draft}, but that of {path!r} is {of_policy}. Choose a draft "
            "model that was made for this model."
        )


def _read_head(path: str) -> dict[str, Any]:
    """Return the configuration of a head, whose model type transformers need not know, without null values.

    Heads in the format of vLLM's package speculators have the settings of their layer in a section of their own.
    """
    config: dict[str, Any] = PreTrainedConfig.get_config_dict(local_copy(path, weights=False))[0]
    sections = config.get("transformer_layer_config") or {}, config
    return {name: value for section in sections for name, value in section.items() if value is not None}


def _count_mtp_layers(config: PreTrainedConfig) -> int:
    """Return the number of layers for multi-token prediction that a configuration mentions."""
    names = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "num_mtp_modules")
    return max(int(getattr(config, name, None) or 0) for name in names)


def measure_drafts(cfg: Config, layer_numel: int) -> DraftSize:
    """Return the size of the draft model, head or layers of the run's engines. n-grams have none.

    Args:
        cfg: The configuration.
        layer_numel: Number of parameters of the largest layer of the engines' model.

    Raises:
        ConfigError: The draft model cannot be loaded.
    """
    drafts = get_speculative_config(cfg.generator) or {}
    method = drafts.get("method")
    if method == "mtp":
        policy = load_config(cfg.generator.model_name).get_text_config()
        count = max(1, _count_mtp_layers(policy))
        return DraftSize(count * (layer_numel + 2 * policy.hidden_size**2), count * _keys_and_values(policy))
    if method not in METHODS_WITH_MODEL or (found := find_draft_model(cfg.generator)) is None:
        return DraftSize(0, 0)
    key, path = found
    if method == "draft_model":
        model = check_causal_lm(path, key=key, check_weight_files=False)
        config = model.config.get_text_config()
        numel = sum(parameter.numel() for parameter in model.parameters())
        return DraftSize(numel, count_attention_layers(config) * _keys_and_values(config))
    return _measure_head(_read_head(path), is_eagle3=method == "eagle3")


def _keys_and_values(config: Any) -> int:
    """Return the numbers per token that one attention layer keeps in the KV cache."""
    heads = max(get_layer_sizes(config, "num_key_value_heads"), default=config.num_attention_heads)
    head_dim = max(get_layer_sizes(config, "head_dim"), default=config.hidden_size // config.num_attention_heads)
    return int(2 * heads * head_dim)


def _measure_head(head: dict[str, Any], *, is_eagle3: bool) -> DraftSize:
    """Return the size of an EAGLE head, a Llama layer behind a projection. It shares the embedding of the model.

    An EAGLE-3 head has its own vocabulary and reads three hidden states of the model.
    """
    width, heads = head.get("hidden_size", 0), head.get("num_attention_heads", 1)
    key_value_heads = head.get("num_key_value_heads") or heads
    head_dim = head.get("head_dim") or width // heads
    layers = head.get("num_hidden_layers", 1)
    read = 2 * width if is_eagle3 else width
    attention = read * (heads + 2 * key_value_heads) * head_dim + heads * head_dim * width
    layer = attention + 3 * width * head.get("intermediate_size", 4 * width)
    states = 3 * head.get("target_hidden_size", width) if is_eagle3 else 2 * width
    vocabulary = (head.get("draft_vocab_size") or head.get("vocab_size", 0)) if is_eagle3 else 0
    weights = layers * layer + states * width + vocabulary * width
    return DraftSize(weights, layers * 2 * key_value_heads * head_dim)
