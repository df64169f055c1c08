"""Every key of the configuration, read from the dataclasses: name, type, default, facts; other names; nearest match."""

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
"""Last word of a name -> the key that does this."""


@dataclass(frozen=True)
class Key:
    """One key. `default` may be an interpolation; a section's is None."""

    name: str
    type_hint: Any
    default: Any
    metadata: KeyMetadata = NO_METADATA

    @property
    def is_section(self) -> bool:
        return isinstance(self.type_hint, type) and issubclass(self.type_hint, Section)

    @property
    def is_free_form(self) -> bool:
        """A free-form mapping: what is below it is not checked."""
        return any(typing.get_origin(arm) is dict for arm in union_members(self.type_hint))


def union_members(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union type, or the type itself."""
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def field_types(section: type[Section]) -> dict[str, Any]:
    """Types of a section's fields, in order."""
    kind: Any = section  # to mypy, classes with instances that have no hash have none either
    resolved = _type_hints(kind)
    return {item.name: resolved[item.name] for item in dataclasses.fields(section)}  # type: ignore[arg-type]


@functools.cache
def _type_hints(section: Any) -> dict[str, Any]:
    return typing.get_type_hints(section)


@functools.cache
def all_keys() -> dict[str, Key]:
    """Sections and leaves by dotted name, in the order of the dataclasses."""
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
    """The keys that hold a value."""
    return {name: key for name, key in all_keys().items() if not key.is_section}


@functools.cache
def key_aliases() -> dict[str, str]:
    """Other names of keys that are accepted -> the keys; giving both with different values is an error."""
    found = {}
    for key in value_keys().values():
        section, _, own_name = key.name.rpartition(".")
        for alias in key.metadata.aliases:
            found[alias.format(name=own_name) if "." in alias else f"{section}.{alias}"] = key.name
    return found


@functools.cache
def alias_sections() -> frozenset[str]:
    """Sections that exist only in other names of keys."""
    return frozenset(alias.rpartition(".")[0] for alias in key_aliases()) - all_keys().keys()


def _suggested() -> list[str]:
    """Names that a misspelt one may have been meant to be. Those in `other_sections` are accepted but not suggested."""
    return [*all_keys(), *(alias for alias in key_aliases() if alias.rpartition(".")[0] not in alias_sections())]


def find_key(name: str) -> Key | None:
    """The key of that name, or the free-form mapping it lies in; None if there is none."""
    name = canonical_key(name)
    while name:
        if key := all_keys().get(name):
            return key
        name = name.rpartition(".")[0]
        if (key := all_keys().get(name)) and not key.is_free_form:
            return None
    return None


def suggest_sibling_key(name: str) -> str | None:
    """The known key of the same section whose name is almost this one."""
    section = name.rpartition(".")[0]
    siblings = [key for key in _suggested() if key.rpartition(".")[0] == section]
    return next(iter(difflib.get_close_matches(name, siblings, n=1, cutoff=0.85)), None)


def suggest_key(name: str) -> str | None:
    """The known key that was probably meant.

    Without some of its sections, called what others call it, misspelt in its section, or misspelt anywhere.
    """
    if shortened := _without_sections(name):
        return shortened
    if (leaf := name.rpartition(".")[2]) in KEY_SUGGESTIONS:
        return KEY_SUGGESTIONS[leaf]
    if sibling := suggest_sibling_key(name):
        return sibling
    known = [key for key in _suggested() if not name.startswith(f"{key}.")]
    same_leaf = [key for key in known if key.rpartition(".")[2] == leaf]
    for candidates, cutoff in ((same_leaf, 0.3), (known, 0.75)):
        if close := difflib.get_close_matches(name, candidates, n=1, cutoff=cutoff):
            return close[0]
    by_leaf = {key.rpartition(".")[2]: key for key in reversed(known)}
    close = difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.8)
    return by_leaf[close[0]] if close else None


def _without_sections(name: str) -> str | None:
    """The first key that has all words of the name in their order, the last one last: `trainer.lr`."""
    words = name.split(".")
    for key in value_keys():
        parts = iter(key.split("."))
        if len(words) > 1 and key.rpartition(".")[2] == words[-1] and all(word in parts for word in words):
            return key
    return None


def canonical_key(name: str) -> str:
    """The name itself, or what it becomes if it, or the free-form mapping it lies in, is another name of a key."""
    head = name
    while head:
        if head in key_aliases():
            return key_aliases()[head] + name[len(head) :]
        head = head.rpartition(".")[0]
    return name


def canonical_value(name: str, value: Any) -> Any:
    """The value itself, or the one that it is another spelling of."""
    spellings = value_keys()[name].metadata.spellings if name in value_keys() else {}
    return next((meant for other, meant in spellings.items() if type(other) is type(value) and other == value), value)


def get_value(config: Config, name: str) -> Any:
    """The value of a key in a configuration. The key may also lie in a free-form mapping."""
    value: Any = config
    for part in name.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value


def replace_value(section: Any, name: str, value: Any) -> Any:
    """A copy of a configuration, or of a section of one, with one key changed."""
    first, _, rest = name.partition(".")
    return dataclasses.replace(
        section, **{first: replace_value(getattr(section, first), rest, value) if rest else value}
    )
