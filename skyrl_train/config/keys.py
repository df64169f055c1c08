"""All keys of the configuration, read from the dataclasses: names, aliases, types, defaults, metadata, suggestions."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from skyrl_train.config.schema import Config
from skyrl_train.config.section import NO_METADATA, KeyMetadata, Section, get_metadata

KEY_SUGGESTIONS = {
    "adam_beta1": "trainer.policy.optimizer_config.adam_betas",
    "batch_size": "trainer.train_batch_size",
    "beta": "trainer.algorithm.kl_loss_coef",
    "checkpoint_dir": "trainer.ckpt_path",
    "clip_eps": "trainer.algorithm.eps_clip_high",
    "clip_range": "trainer.algorithm.eps_clip_high",
    "cliprange": "trainer.algorithm.eps_clip_high",
    "dataset": "data.train_data",
    "dataset_path": "data.train_data",
    "default_local_dir": "trainer.ckpt_path",
    "engine": "generator.backend",
    "entropy_coeff": "trainer.algorithm.entropy_loss_coef",
    "entropy_coef": "trainer.algorithm.entropy_loss_coef",
    "eval_steps": "trainer.eval_interval",
    "eval_dataset": "data.val_data",
    "gradient_accumulation_steps": "trainer.micro_train_batch_size_per_gpu",
    "group_size": "generator.n_samples_per_prompt",
    "inference_backend": "generator.backend",
    "init_kl_coef": "trainer.algorithm.kl_loss_coef",
    "kl_coef": "trainer.algorithm.kl_loss_coef",
    "learning_rate": "trainer.policy.optimizer_config.lr",
    "logging_dir": "trainer.ckpt_path",
    "lora_alpha": "trainer.policy.model.lora.alpha",
    "lora_r": "trainer.policy.model.lora.rank",
    "lora_rank": "trainer.policy.model.lora.rank",
    "max_completion_length": "generator.sampling_params.max_generate_length",
    "max_new_tokens": "generator.sampling_params.max_generate_length",
    "max_response_length": "generator.sampling_params.max_generate_length",
    "max_tokens": "generator.sampling_params.max_generate_length",
    "model": "trainer.policy.model.path",
    "model_name": "trainer.policy.model.path",
    "model_name_or_path": "trainer.policy.model.path",
    "model_path": "trainer.policy.model.path",
    "n_samples": "generator.n_samples_per_prompt",
    "num_engines": "generator.num_inference_engines",
    "num_generations": "generator.n_samples_per_prompt",
    "num_gpus": "trainer.placement.policy_num_gpus_per_node",
    "num_iterations": "trainer.update_epochs_per_batch",
    "num_train_epochs": "trainer.epochs",
    "optim": "trainer.policy.optimizer_config.name",
    "optimizer": "trainer.policy.optimizer_config.name",
    "output_dir": "trainer.ckpt_path",
    "per_device_train_batch_size": "trainer.micro_train_batch_size_per_gpu",
    "ppo_epochs": "trainer.update_epochs_per_batch",
    "ppo_mini_batch_size": "trainer.policy_mini_batch_size",
    "pretrain": "trainer.policy.model.path",
    "prompt_data": "data.train_data",
    "report_to": "trainer.logger",
    "rollout_batch_size": "trainer.train_batch_size",
    "save_freq": "trainer.ckpt_interval",
    "save_steps": "trainer.ckpt_interval",
    "steps": "trainer.max_steps",
    "temperature": "generator.sampling_params.temperature",
    "test_freq": "trainer.eval_interval",
    "total_epochs": "trainer.epochs",
    "train_files": "data.train_data",
    "val_files": "data.val_data",
    "warmup_ratio": "trainer.policy.optimizer_config.num_warmup_steps",
    "warmup_steps": "trainer.policy.optimizer_config.num_warmup_steps",
}
"""Last part of a key's name in other libraries -> the key of this package with that meaning."""


@dataclass(frozen=True)
class Key:
    """A key or section of the configuration."""

    name: str
    """Dotted name, such as "trainer.algorithm.gamma"."""
    type_hint: Any
    """Resolved type hint of the field; for a section, its dataclass."""
    default: Any
    """Default value, which may be an interpolation; None for a section."""
    metadata: KeyMetadata = NO_METADATA

    @property
    def is_section(self) -> bool:
        """True if this is a section, which holds other keys and has no value."""
        return isinstance(self.type_hint, type) and issubclass(self.type_hint, Section)

    @property
    def is_free_form(self) -> bool:
        """True if the value is a free-form mapping, whose keys are not checked."""
        return any(typing.get_origin(arm) is dict for arm in union_members(self.type_hint))


def union_members(hint: Any) -> tuple[Any, ...]:
    """Return the alternatives of a union type such as `int | None`, or the type itself in a tuple of one."""
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def field_types(section: type[Section]) -> dict[str, Any]:
    """Return the resolved types of a section's fields, by field name, in the order of the dataclass."""
    hashable: Any = section  # mypy takes a class for unhashable if its instances are
    resolved = _type_hints(hashable)
    return {item.name: resolved[item.name] for item in dataclasses.fields(section)}  # type: ignore[arg-type]


@functools.cache
def _type_hints(section: Any) -> dict[str, Any]:
    return typing.get_type_hints(section)


@functools.cache
def all_keys() -> dict[str, Key]:
    """Return all sections and value keys by dotted name, in the order of the dataclasses. The result is cached."""
    return {key.name: key for key in _walk("", Config())}


def _walk(prefix: str, section: Section) -> Iterator[Key]:
    types = field_types(type(section))
    for item in dataclasses.fields(section):  # type: ignore[arg-type]
        name, value, metadata = f"{prefix}{item.name}", getattr(section, item.name), get_metadata(item)
        if isinstance(value, Section):
            yield Key(name, type(value), None, metadata)
            yield from _walk(f"{name}.", value)
        else:
            yield Key(name, types[item.name], value, metadata)


@functools.cache
def value_keys() -> dict[str, Key]:
    """Return the keys that hold a value (all keys except sections), by dotted name. The result is cached."""
    return {name: key for name, key in all_keys().items() if not key.is_section}


@functools.cache
def key_aliases() -> dict[str, str]:
    """Return a dict from the dotted name of each alias to the dotted name of its key. The result is cached.

    A configuration that sets both names to different values is an error.
    """
    names = {}
    for key in value_keys().values():
        section, _, own_name = key.name.rpartition(".")
        for alias in key.metadata.aliases:
            names[alias.format(name=own_name) if "." in alias else f"{section}.{alias}"] = key.name
    return names


@functools.cache
def alias_sections() -> frozenset[str]:
    """Return the sections that contain aliases but no keys, such as "generator.inference_engine"."""
    return frozenset(alias.rpartition(".")[0] for alias in key_aliases()) - all_keys().keys()


def _suggestable_names() -> list[str]:
    """Return the names that may be suggested for an unknown key. Aliases in `alias_sections` are left out."""
    return [*all_keys(), *(alias for alias in key_aliases() if alias.rpartition(".")[0] not in alias_sections())]


def find_key(name: str) -> Key | None:
    """Return the key or section with a name or alias, or the free-form mapping that contains it.

    Returns None if the name is unknown.
    """
    name = canonical_key(name)
    while name:
        if key := all_keys().get(name):
            return key
        name = name.rpartition(".")[0]
        if (key := all_keys().get(name)) and not key.is_free_form:
            return None
    return None


def suggest_sibling_key(name: str) -> str | None:
    """Return the known key of the same section whose name is most similar, or None if none is very similar."""
    section = name.rpartition(".")[0]
    siblings = [key for key in _suggestable_names() if key.rpartition(".")[0] == section]
    return next(iter(difflib.get_close_matches(name, siblings, n=1, cutoff=0.85)), None)


def suggest_own_environment_key(name: str) -> str | None:
    """Return where a setting of a user's environment belongs, if `name` places it beside those of built-in ones.

    Returns None for other keys, and if the environment's name looks like a misspelled built-in one.
    """
    section, _, setting = name.partition(".skyrl_gym.")
    if section != "environment" or not setting:
        return None
    own_name = setting.partition(".")[0]
    built_in = [key.split(".")[2] for key in all_keys() if key.startswith("environment.skyrl_gym.")]
    is_misspelled = bool(difflib.get_close_matches(own_name, built_in, n=1, cutoff=0.7))
    return None if is_misspelled else f"environment.skyrl_gym.own.{setting}"


def suggest_key(name: str) -> str | None:
    """Return the known key that an unknown name was probably meant to be, or None if there is no candidate.

    The candidates, in this order: a key with the same words but more sections; the key with that meaning if the name is
    another library's; a misspelled key of the same section; a misspelled key of any section.
    """
    if shortened := _without_sections(name):
        return shortened
    if (leaf := name.rpartition(".")[2]) in KEY_SUGGESTIONS:
        return KEY_SUGGESTIONS[leaf]
    if sibling := suggest_sibling_key(name):
        return sibling
    known = [key for key in _suggestable_names() if not name.startswith(f"{key}.")]
    same_leaf = [key for key in known if key.rpartition(".")[2] == leaf]
    for candidates, cutoff in ((same_leaf, 0.3), (known, 0.75)):
        if close := difflib.get_close_matches(name, candidates, n=1, cutoff=cutoff):
            return close[0]
    by_leaf = {key.rpartition(".")[2]: key for key in reversed(known)}
    close = difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.8)
    return by_leaf[close[0]] if close else None


def _without_sections(name: str) -> str | None:
    """Return the first key that contains all words of the name in order and ends with the last: `trainer.lr`."""
    words = name.split(".")
    for key in value_keys():
        parts = iter(key.split("."))
        if len(words) > 1 and key.rpartition(".")[2] == words[-1] and all(word in parts for word in words):
            return key
    return None


def canonical_key(name: str) -> str:
    """Return a name with its alias, or the alias of the free-form mapping that contains it, replaced with the key.

    Other names, unknown ones included, are returned unchanged.
    """
    head = name
    while head:
        if head in key_aliases():
            return key_aliases()[head] + name[len(head) :]
        head = head.rpartition(".")[0]
    return name


def canonical_value(name: str, value: Any) -> Any:
    """Return the value that a value alias of a key stands for, or `value` itself if it is not an alias.

    Args:
        name: Dotted name of a key. Unknown names have no value aliases.
        value: Value as the user wrote it. An alias must have the same type: True is not 1.
    """
    aliases = value_keys()[name].metadata.value_aliases if name in value_keys() else {}
    return next(
        (canonical for alias, canonical in aliases.items() if type(alias) is type(value) and alias == value), value
    )


def get_value(config: Config, name: str) -> Any:
    """Return the value of a key in a configuration.

    Args:
        config: The configuration.
        name: Dotted name of a key, of a section, or of a key inside a free-form mapping. Aliases are not resolved.

    Raises:
        AttributeError, KeyError: There is no such key.
    """
    value: Any = config
    for part in name.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value


def replace_value(section: Any, name: str, value: Any) -> Any:
    """Return a copy of a configuration, or of a section, with one key changed.

    Args:
        section: A configuration or a section, frozen or not. It is not changed.
        name: Dotted name of the key, relative to `section`. It cannot lie inside a free-form mapping.
        value: New value. It is not checked.

    Returns:
        The copy. It and the sections on the way to the key are not frozen; other sections are shared with `section`.

    Raises:
        AttributeError, TypeError: There is no such key.
    """
    first, _, rest = name.partition(".")
    return dataclasses.replace(
        section, **{first: replace_value(getattr(section, first), rest, value) if rest else value}
    )
