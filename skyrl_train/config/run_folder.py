"""Default folders of runs, the settings that identify a run, and the saved configuration of a run's folder."""

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
"""Sections and keys that affect training results. Other keys, such as the numbers of steps, ranks and engines, may
change when a run is resumed; they do not make it a different run."""
_LORA_SYNC_KEYS = frozenset({"lora_sync_path", "sync"})
"""LoRA settings that only affect weight syncs. They may change when a run is resumed."""


def load_run_config(folder: Path) -> Config:
    """Return the configuration that a run saved in its folder, frozen. Unknown keys are left out.

    Raises:
        ConfigError: The file is missing, cannot be read, is not a configuration, or has problems other than unknown
            keys.
    """
    file = folder / CONFIG_FILE
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{file} cannot be read ({type(error).__name__}: {error}). It must be the configuration that the run saved."
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} is not a configuration. It must be the configuration that the run saved.")
    content.pop("defaults", None)
    config, problems, _ = to_config(OmegaConf.create(content))
    raise_problems([problem for problem in problems if not isinstance(problem, UnknownKey)])
    return freeze(config)


def set_default_run_folders(config: Config, explicit_keys: Collection[str]) -> Config:
    """Replace default folders of runs with subfolders that belong to the configuration.

    A subfolder is PROJECT/RUN-DIGEST. The digest covers the settings that affect training results, so the same command
    finds its folder again.

    Args:
        config: The configuration. It is not changed.
        explicit_keys: Keys that the user set. Folders among them (FOLDER_KEYS) are kept.

    Returns:
        A copy, not frozen, or `config` itself if the user set both folders.
    """
    subfolder = (
        Path(_to_path_component(config.trainer.project_name))
        / f"{_to_path_component(config.trainer.run_name)}-{config_digest(config)}"
    )
    changed: Config = config
    for key in FOLDER_KEYS:
        if key not in explicit_keys:
            changed = replace_value(changed, key, os.path.join(get_value(config, key), subfolder))
    return changed


def config_digest(config: Config) -> str:
    """Return eight hexadecimal digits of a hash of `training_settings`."""
    return hashlib.sha256(json.dumps(training_settings(config), sort_keys=True, default=str).encode()).hexdigest()[:8]


def training_settings(config: Config) -> dict[str, Any]:
    """Return the settings that affect training results and differ from their defaults, by dotted name.

    Defaults are left out so that keys added by later versions do not change the digest. Values are plain JSON values.
    """
    settings = {}
    for name, key in value_keys().items():
        affects_training = any(f"{name}.".startswith(f"{section}.") for section in _TRAINING_KEYS)
        if affects_training and (value := _to_json_types(get_value(config, name))) != _to_json_types(key.default):
            settings[name] = value
    return settings


def run_identity(config: Config) -> dict[str, Any]:
    """Return the settings that identify a run before its data is read: project, run name, model and adapters.

    The result is plain JSON without secrets. `trainer.run_folder.RunFolder` compares it with that of a folder's run.
    """
    trainer = config.trainer
    identity: dict[str, Any] = {
        "project_name": trainer.project_name,
        "run_name": trainer.run_name,
        "model": trainer.policy.model.path,
    }
    if (lora := trainer.policy.model.lora).rank:
        identity["adapters"] = {
            key: value
            for key, value in to_dict(lora).items()
            # Runs of earlier versions have no target_parameters.
            if key not in _LORA_SYNC_KEYS and (key, value) != ("target_parameters", None)
        }
    redacted: dict[str, Any] = redact(identity)
    return redacted


def _to_path_component(text: str) -> str:
    """Return a valid name of a file for any name of a project or run."""
    return re.sub(r"[^\w.+=@-]+", "_", text).strip(".") or "run"


def _to_json_types(value: Any) -> Any:
    """Return a value with JSON's types, so that frozen and unfrozen values compare equal."""
    return json.loads(json.dumps(value, default=dict))
