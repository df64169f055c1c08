"""What a configuration may not contain: code to run, and secrets of the environment.

Hydra and OmegaConf can call any function a value names (`_target_`, resolvers), and a resolved configuration is
printed, saved and sent to trackers. So values may refer to other keys and to a few environment variables, no more.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from skyrl_train.config.problems import Problem
from skyrl_train.config.secrets import looks_like_credential

if TYPE_CHECKING:
    from skyrl_train.config.schema import Config

ALLOWED_RESOLVERS = frozenset({"oc.env"})
INSTANTIATE_KEYS = frozenset({"_target_", "_partial_", "_recursive_", "_convert_", "_args_"})

FOLDERS_AND_NAMES = frozenset({"HOME", "PWD", "TMPDIR", "SCRATCH", "USER", "LOGNAME", "HOSTNAME"})
FOLDER_SUFFIXES = ("_DIR", "_HOME", "_PATH", "_ROOT", "_FOLDER", "_JOB_ID", "_JOB_NAME")

_RUN_FILES = ("run.json", "metrics.jsonl")
_GYM = "environment.skyrl_gym"
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


def run_of_preset(directory: str | None, name: str | None) -> Path | None:
    """Return the run's folder that `--config-dir` and `--config-name` read: it may be copied from anywhere.

    None for a folder that is not a run's: it is the user's own, and trusted.
    """
    if directory is None:
        return None
    return next((folder for folder in (Path(directory), Path(directory, name or "").parent) if _is_run(folder)), None)


def hydra_of_run(run: Path, preset: Path) -> Iterator[Problem]:
    """Yield the `hydra` section of a run's configuration, which no run writes: composing it may import packages."""
    try:
        content = yaml.safe_load(preset.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        yield Problem("--config-name", str(preset), "a configuration that a run has written", f"It is not: {error}")
        return
    if isinstance(content, Mapping) and "hydra" in content:
        advice = f"{run} is a run's folder, and no run writes this section. Remove it."
        yield Problem("hydra", content["hydra"], "left out", advice)


def code_of_run(config: Config, run: Path, overridden: Collection[str]) -> Iterator[Problem]:
    """Yield code that only the configuration in a run's folder names, and receivers of credentials.

    Args:
        run: The run's folder.
        overridden: Keys that the command line sets.
    """
    for key, value in _named_by_run(config):
        if value and key not in overridden:
            yield Problem(
                key,
                value,
                "repeated on the command line",
                f"{run} is a run's folder, and what its configuration names would be run here, or would get your "
                "credentials. Repeat the key if you trust it.",
            )


def _named_by_run(config: Config) -> Iterator[tuple[str, Any]]:
    gym = config.environment.skyrl_gym
    yield "trainer.plugins", list(config.trainer.plugins)
    yield f"{_GYM}.verifiers.env_id", gym.verifiers.env_id  # its module is imported
    yield f"{_GYM}.llm_as_a_judge.base_url", gym.llm_as_a_judge.base_url  # which gets OPENAI_API_KEY
    yield f"{_GYM}.openenv.token_variable", gym.openenv.token_variable
    if not config.generator.run_engines_locally:  # servers that get SKYRL_API_KEY
        for name in ("remote_inference_engine_urls", "external_server_urls"):
            yield f"generator.{name}", list(getattr(config.generator, name) or ())
    for name, value in config.generator.engine_init_kwargs.items():  # numbers name no code
        if name == "trust_remote_code" or not isinstance(value, (bool, int, float)):
            yield f"generator.engine_init_kwargs.{name}", value
    tools, key = gym.tool_use.tool_settings, f"{_GYM}.tool_use.tool_settings"
    yield f"{key}.browser.executable", _mapping(tools, "browser").get("executable")
    servers = _mapping(_mapping(tools, "mcp"), "servers")
    for name in servers:
        for part in ("command", "args", "env", "cwd"):
            yield f"{key}.mcp.servers.{name}.{part}", _mapping(servers, name).get(part)


def _mapping(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = content.get(key)
    return value if isinstance(value, Mapping) else {}


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
