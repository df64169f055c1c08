"""Every key of the configuration, read from the dataclasses: name, type, default; other names; the nearest match."""

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
from skyrl_train.config.section import Section

ALIASES = {
    "generator.sampling_params.max_new_tokens": "generator.sampling_params.max_generate_length",
    "generator.eval_sampling_params.max_new_tokens": "generator.eval_sampling_params.max_generate_length",
    "generator.tensor_parallel_size": "generator.inference_engine_tensor_parallel_size",
    "generator.max_env_workers": "environment.skyrl_gym.max_env_workers",
    "generator.step_wise_training": "generator.step_wise_trajectories",
    "trainer.algorithm.overlong_buffer_len": "trainer.algorithm.overlong_buffer.len",
    "trainer.algorithm.overlong_buffer_penalty_factor": "trainer.algorithm.overlong_buffer.penalty_factor",
    "trainer.algorithm.cispo.clip_low": "trainer.algorithm.cispo.cispo_eps_clip_low",
    "trainer.algorithm.cispo.clip_high": "trainer.algorithm.cispo.cispo_eps_clip_high",
    "trainer.algorithm.ppo_loss_type": "trainer.algorithm.policy_loss_type",
}
"""Other names of keys that are accepted; giving both with different values is an error."""

_ENGINE = "generator.inference_engine"
ENGINE_ALIASES = {
    f"{_ENGINE}.num_engines": "generator.num_inference_engines",
    f"{_ENGINE}.remote_urls": "generator.remote_inference_engine_urls",
    **{
        f"{_ENGINE}.{kind}_parallel_size": f"{_ENGINE}_{kind}_parallel_size"
        for kind in ("tensor", "pipeline", "expert", "data")
    },
    **{
        f"{_ENGINE}.{name}": f"generator.{name}"
        for name in (
            "async_engine",
            "backend",
            "enable_chunked_prefill",
            "enable_http_endpoint",
            "enable_prefix_caching",
            "enable_ray_prometheus_stats",
            "enforce_eager",
            "engine_init_kwargs",
            "external_proxy_url",
            "external_server_urls",
            "fully_sharded_loras",
            "gpu_memory_utilization",
            "http_endpoint_host",
            "http_endpoint_port",
            "max_num_batched_tokens",
            "max_num_seqs",
            "model_dtype",
            "override_existing_update_group",
            "run_engines_locally",
            "served_model_name",
            "vllm_v1_disable_multiproc",
            "weight_sync_backend",
            "weight_transfer_threshold_cuda_ipc_GB",
        )
    },
}
"""Where SkyRL keeps the engines' keys since 0.4."""
ALL_ALIASES = ALIASES | ENGINE_ALIASES
OTHER_SECTIONS = frozenset({_ENGINE})
"""Sections that there are only under other names of keys."""

_NEVER: dict[Any, Any] = {None: -1}
SPELLINGS: dict[str, dict[Any, Any]] = {
    "trainer.resume_mode": {None: "none", "": "none", "None": "none"},
    "trainer.logger": {None: [], "": [], "none": []},
    "trainer.ckpt_interval": _NEVER,
    "trainer.hf_save_interval": _NEVER,
    "trainer.eval_interval": _NEVER,
    "trainer.max_ckpts_to_keep": _NEVER,
    "trainer.ref.model.path": {None: "${trainer.policy.model.path}"},
    "trainer.algorithm.dynamic_sampling.type": {"none": None},
    "trainer.algorithm.off_policy_correction.tis_ratio_type": {"none": None},
    "trainer.algorithm.off_policy_correction.sequence_mask_metric": {"none": None},
    "generator.max_input_length": {None: "${trainer.max_prompt_length}"},
    "generator.sampling_params.top_k": _NEVER,
    "generator.eval_sampling_params.top_k": _NEVER,
    "generator.override_existing_update_group": {True: "enable", False: "disable"},
}
"""Key -> another way to write a value -> the value. `convert.read` knows those that go for a whole type."""


@dataclass(frozen=True)
class Key:
    """One key. `default` may be an interpolation; a section's is None."""

    name: str
    hint: Any
    default: Any

    @property
    def is_section(self) -> bool:
        return isinstance(self.hint, type) and issubclass(self.hint, Section)

    @property
    def is_free(self) -> bool:
        """A free-form mapping: what is below it is not checked."""
        return any(typing.get_origin(arm) is dict for arm in arms(self.hint))


def arms(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union type, or the type itself."""
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def hints(section: type[Section]) -> dict[str, Any]:
    """Types of a section's fields, in order."""
    resolved = typing.get_type_hints(section)
    return {item.name: resolved[item.name] for item in dataclasses.fields(section)}  # type: ignore[arg-type]


@functools.cache
def all_keys() -> dict[str, Key]:
    """Sections and leaves by dotted name, in the order of the dataclasses."""
    return {key.name: key for key in _walk("", Config())}


def _walk(prefix: str, section: Section) -> Iterator[Key]:
    for name, hint in hints(type(section)).items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield Key(prefix + name, type(value), None)
            yield from _walk(f"{prefix}{name}.", value)
        else:
            yield Key(prefix + name, hint, value)


@functools.cache
def leaves() -> dict[str, Key]:
    """The keys that hold a value."""
    return {name: key for name, key in all_keys().items() if not key.is_section}


def find(name: str) -> Key | None:
    """The key of that name, or the free-form mapping it lies in; None when nothing reads it."""
    name = canonical(name)
    while name:
        if key := all_keys().get(name):
            return key
        name = name.rpartition(".")[0]
        if (key := all_keys().get(name)) and not key.is_free:
            return None
    return None


def misspelt_sibling(name: str) -> str | None:
    """The known key of the same section that the name is almost."""
    section = name.rpartition(".")[0]
    siblings = [key for key in (*all_keys(), *ALIASES) if key.rpartition(".")[0] == section]
    return next(iter(difflib.get_close_matches(name, siblings, n=1, cutoff=0.85)), None)


def nearest(name: str) -> str | None:
    """The known key that was probably meant: misspelt in its section, without its section, or misspelt anywhere."""
    if sibling := misspelt_sibling(name):
        return sibling
    known = [key for key in (*all_keys(), *ALIASES) if not name.startswith(f"{key}.")]
    leaf = name.rpartition(".")[2]
    same_leaf = [key for key in known if key.rpartition(".")[2] == leaf]
    for candidates, cutoff in ((same_leaf, 0.3), (known, 0.75)):
        if close := difflib.get_close_matches(name, candidates, n=1, cutoff=cutoff):
            return close[0]
    by_leaf = {key.rpartition(".")[2]: key for key in reversed(known)}
    close = difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.8)
    return by_leaf[close[0]] if close else None


def canonical(name: str) -> str:
    """The key that is meant by another name of it, or of the free-form mapping it lies in."""
    head = name
    while head:
        if head in ALL_ALIASES:
            return ALL_ALIASES[head] + name[len(head) :]
        head = head.rpartition(".")[0]
    return name


def spelt(name: str, value: Any) -> Any:
    """The value that is meant by another way to write it."""
    other = SPELLINGS.get(name, {})
    return other.get(value, value) if value is None or isinstance(value, str | bool) else value


def value_at(config: Config, name: str) -> Any:
    """The value of a key in a configuration; a key below a free-form mapping too."""
    value: Any = config
    for part in name.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value


def with_value_at(section: Any, name: str, value: Any) -> Any:
    """A configuration, or a section of one, with one key changed; what is given stays as it is."""
    first, _, rest = name.partition(".")
    return dataclasses.replace(
        section, **{first: with_value_at(getattr(section, first), rest, value) if rest else value}
    )
