"""A folder of its own for every configuration that names none, and what makes two configurations the same run."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from skyrl_train.config.hydra import CONFIG_FILE, to_config, to_dict
from skyrl_train.config.keys import get_value, replace_value, value_keys
from skyrl_train.config.problems import UnknownKey, raise_problems
from skyrl_train.config.redaction import redact
from skyrl_train.config.schema import Config
from skyrl_train.config.section import freeze
from skyrl_train.errors import ConfigError

FOLDER_KEYS = ("trainer.ckpt_path", "trainer.export_path")
_TRAINING_KEYS = (
    "data",
    "environment",
    "trainer.algorithm",
    "trainer.policy.model",
    "trainer.policy.optimizer_config",
    "trainer.critic.model",
    "trainer.critic.optimizer_config",
    "trainer.ref.model",
    "trainer.reward",
    "trainer.seed",
    "trainer.train_batch_size",
    "trainer.policy_mini_batch_size",
    "trainer.critic_mini_batch_size",
    "trainer.update_epochs_per_batch",
    "trainer.max_prompt_length",
    "trainer.moe_routing_replay",
    "trainer.fully_async.enabled",
    "generator.sampling_params",
    "generator.n_samples_per_prompt",
    "generator.max_turns",
)
"""Sections and keys that decide what is learnt. Others, such as the number of steps, ranks or engines, may change when
a run is resumed, and do not make it another one."""
_LORA_SYNC_KEYS = frozenset({"lora_sync_path", "sync"})
"""LoRA settings for how engines get adapters: these may change when a run is resumed."""


def load_run_config(folder: Path) -> Config:
    """The configuration that a run has left in its folder, frozen. Keys that only its own code knew are left out.

    Raises ConfigError for a folder without one, and for one that cannot be used.
    """
    file = folder / CONFIG_FILE
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} cannot be read ({type(error).__name__}: {error}): it says what was run.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} holds no configuration: it says what was run.")
    content.pop("defaults", None)
    config, problems, _ = to_config(OmegaConf.create(content))
    raise_problems([problem for problem in problems if not isinstance(problem, UnknownKey)])
    return freeze(config)


def set_default_run_folders(config: Config, explicit_keys: Collection[str]) -> Config:
    """The configuration with folders that only it has, in the places of the defaults, if nobody wrote them out.

    PROJECT/NAME-DIGEST: the digest is of what decides what is learnt, so the same command finds its folder again.
    """
    own = (
        Path(_to_path_component(config.trainer.project_name))
        / f"{_to_path_component(config.trainer.run_name)}-{config_digest(config)}"
    )
    changed: Config = config
    for key in FOLDER_KEYS:
        if key not in explicit_keys:
            changed = replace_value(changed, key, os.path.join(get_value(config, key), own))
    return changed


def config_digest(config: Config) -> str:
    """Eight hexadecimal digits of what decides what is learnt."""
    return hashlib.sha256(json.dumps(training_settings(config), sort_keys=True, default=str).encode()).hexdigest()[:8]


def training_settings(config: Config) -> dict[str, Any]:
    """What decides what is learnt and is not as it is by default: a key that a later version adds changes no folder."""
    found = {}
    for name, key in value_keys().items():
        decides = any(f"{name}.".startswith(f"{section}.") for section in _TRAINING_KEYS)
        if decides and (value := _to_json_types(get_value(config, name))) != _to_json_types(key.default):
            found[name] = value
    return found


def run_identity(config: Config) -> dict[str, Any]:
    """What is known, before any data is read, of which run a folder belongs to: plain JSON, without secrets."""
    trainer = config.trainer
    known: dict[str, Any] = {
        "project_name": trainer.project_name,
        "run_name": trainer.run_name,
        "model": trainer.policy.model.path,
    }
    if (lora := trainer.policy.model.lora).rank:
        known["adapters"] = {key: value for key, value in to_dict(lora).items() if key not in _LORA_SYNC_KEYS}
    redacted: dict[str, Any] = redact(known)
    return redacted


def _to_path_component(text: str) -> str:
    """Part of a path, whatever somebody calls a run."""
    return re.sub(r"[^\w.+=@-]+", "_", text).strip(".") or "run"


def _to_json_types(value: Any) -> Any:
    """JSON's own types, so that values are compared whether they are frozen or not."""
    return json.loads(json.dumps(value, default=dict))
