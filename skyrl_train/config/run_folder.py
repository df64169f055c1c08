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

from skyrl_train.config.hydra import CONFIG_FILE, finish, plain
from skyrl_train.config.keys import leaves, value_at, with_value_at
from skyrl_train.config.problems import UnknownKey, raise_all
from skyrl_train.config.schema import Config
from skyrl_train.config.secrets import redact
from skyrl_train.config.section import freeze
from skyrl_train.errors import ConfigError

FOLDERS = ("trainer.ckpt_path", "trainer.export_path")
_DECIDES = (
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
_HOW_SYNCED = frozenset({"lora_sync_path", "sync"})
"""LoRA settings for how engines get adapters: these may change when a run is resumed."""


def config_of_run(folder: Path) -> Config:
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
    config, problems, _ = finish(content)
    raise_all([problem for problem in problems if not isinstance(problem, UnknownKey)])
    return freeze(config)


def with_own_folders(config: Config, given: Collection[str]) -> Config:
    """The configuration with folders that only it has, in the places of the defaults, if nobody wrote them out.

    PROJECT/NAME-DIGEST: the digest is of what decides what is learnt, so the same command finds its folder again.
    """
    own = Path(_as_name(config.trainer.project_name)) / f"{_as_name(config.trainer.run_name)}-{digest(config)}"
    changed: Config = config
    for key in FOLDERS:
        if key not in given:
            changed = with_value_at(changed, key, os.path.join(value_at(config, key), own))
    return changed


def digest(config: Config) -> str:
    """Eight hexadecimal digits of what decides what is learnt."""
    return hashlib.sha256(json.dumps(decisions(config), sort_keys=True, default=str).encode()).hexdigest()[:8]


def decisions(config: Config) -> dict[str, Any]:
    """What decides what is learnt and is not as it is by default: a key that a later version adds changes no folder."""
    found = {}
    for name, key in leaves().items():
        decides = any(f"{name}.".startswith(f"{section}.") for section in _DECIDES)
        if decides and (value := _plain(value_at(config, name))) != _plain(key.default):
            found[name] = value
    return found


def identity(config: Config) -> dict[str, Any]:
    """What is known, before any data is read, of which run a folder belongs to: plain JSON, without secrets."""
    trainer = config.trainer
    known: dict[str, Any] = {
        "project_name": trainer.project_name,
        "run_name": trainer.run_name,
        "model": trainer.policy.model.path,
    }
    if (lora := trainer.policy.model.lora).rank:
        known["adapters"] = {key: value for key, value in plain(lora).items() if key not in _HOW_SYNCED}
    redacted: dict[str, Any] = redact(known)
    return redacted


def _as_name(text: str) -> str:
    """Part of a path, whatever somebody calls a run."""
    return re.sub(r"[^\w.+=@-]+", "_", text).strip(".") or "run"


def _plain(value: Any) -> Any:
    """JSON's own types, so that values are compared whether they are frozen or not."""
    return json.loads(json.dumps(value, default=dict))
