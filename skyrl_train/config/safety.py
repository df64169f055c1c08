"""What a configuration may not contain: code to run, and secrets of the environment.

Hydra and OmegaConf can call any function a value names (`_target_`, resolvers), and a resolved configuration is
printed, saved and sent to trackers. So values may refer to other keys and to a few environment variables, no more.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_train.config.problems import Problem
from skyrl_train.config.secrets import looks_like_credential

if TYPE_CHECKING:
    from skyrl_train.config.schema import Config

ALLOWED_RESOLVERS = frozenset({"oc.env"})
INSTANTIATE_KEYS = frozenset({"_target_", "_partial_", "_recursive_", "_convert_", "_args_"})

FOLDERS_AND_NAMES = frozenset({"HOME", "PWD", "TMPDIR", "SCRATCH", "USER", "LOGNAME", "HOSTNAME"})
FOLDER_SUFFIXES = ("_DIR", "_HOME", "_PATH", "_ROOT", "_FOLDER", "_JOB_ID", "_JOB_NAME")

_RUN_FILES = ("run.json", "metrics.jsonl")
_SERVERS = "environment.skyrl_gym.tool_use.tool_settings.mcp.servers"
_KEY_REFERENCE = re.compile(r"\$\{\.*[A-Za-z_][\w.\[\]-]*\}")
_VARIABLE = re.compile(r"\$\{oc\.env:\s*([A-Za-z_]\w*)\s*(?:,[^${}]*)?\}")


def is_reference(value: Any) -> bool:
    """Whether a value is text that OmegaConf replaces when it resolves."""
    return isinstance(value, str) and "${" in value


def may_be_shown(variable: str) -> bool:
    """Whether an environment variable holds a folder or a name, and no credential."""
    folder = variable in FOLDERS_AND_NAMES or variable.endswith(FOLDER_SUFFIXES)
    return folder and not looks_like_credential(variable)


def unsafe(key: str, value: Any) -> Iterator[Problem]:
    """Problems of a key and everything below it, before anything is resolved."""
    if not INSTANTIATE_KEYS.isdisjoint(key.split(".")):
        yield Problem(key, value, "a key that runs no code", "Remove it: configurations never instantiate objects.")
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from unsafe(f"{key}.{name}" if key else str(name), item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from unsafe(key, item)
    elif isinstance(value, str):
        yield from _unsafe_text(key, value)


def code_of_run(config: Config, folder: str | None, overridden: Collection[str]) -> Iterator[Problem]:
    """Modules and programs that only the configuration in a run's folder names: it may be copied from anywhere.

    Args:
        folder: What `--config-dir` names. A folder that is not a run's is the user's own, and trusted.
        overridden: Keys that the command line sets.
    """
    if folder is None or not _is_run(Path(folder)):
        return
    servers = config.environment.skyrl_gym.tool_use.tool_settings.get("mcp", {}).get("servers", {})
    named: list[tuple[str, Any]] = [("trainer.plugins", list(config.trainer.plugins))] if config.trainer.plugins else []
    named += [
        (f"{_SERVERS}.{name}.command", server["command"])
        for name, server in (servers.items() if isinstance(servers, Mapping) else ())
        if isinstance(server, Mapping) and server.get("command") is not None
    ]
    for key, value in named:
        if key not in overridden:
            yield Problem(
                key,
                value,
                "repeated on the command line",
                f"{folder} is a run's folder, and what its configuration names would be run here. Repeat the key if "
                "you trust it.",
            )


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in _RUN_FILES) or any(folder.glob("global_step_*"))


def foreign_targets(hydra: Any, key: str = "hydra") -> Iterator[Problem]:
    """Code that Hydra's own section would run beyond Hydra and its installed plugins (callbacks, ...)."""
    if isinstance(hydra, Mapping):
        for name, item in hydra.items():
            if name == "_target_" and not str(item).startswith(("hydra.", "hydra_plugins.")):
                yield Problem(f"{key}.{name}", item, "Hydra's own", "Remove it: configurations never run code.")
            yield from foreign_targets(item, f"{key}.{name}")


def _unsafe_text(key: str, text: str) -> Iterator[Problem]:
    if "_target_" in text:
        yield Problem(key, text, "text without '_target_'", "Remove it: configurations never instantiate objects.")
    for variable in _VARIABLE.findall(text):
        if not may_be_shown(variable):
            yield Problem(
                key,
                text,
                "free of secrets",
                f"${{oc.env:{variable}}} would be printed and saved. Use a variable that holds a folder (HOME, *_DIR, "
                "*_PATH, *_HOME); credentials are read from the environment by whoever needs them.",
            )
    if "${" in _VARIABLE.sub("\0", _KEY_REFERENCE.sub("\0", text)):
        yield Problem(key, text, "plain, ${another.key} or ${oc.env:NAME}", "Other resolvers can run code.")
