"""Checks of a configuration from a run's folder, which may have been copied from an untrusted source.

Such a configuration must not name code to run or receivers of credentials.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from skyrl_train.config.problems import Problem
from skyrl_train.config.schema import Config

_RUN_FILES = ("run.json", "metrics.jsonl")
_GYM = "environment.skyrl_gym"


def find_run_folder(preset_folder: str | None, name: str | None) -> Path | None:
    """Return the run's folder that `--config-dir` and `--config-name` read from.

    Args:
        preset_folder: Value of `--config-dir`, or None.
        name: Value of `--config-name`, which may contain subfolders, or None.

    Returns:
        The folder, or None if neither folder was written by a run. Other folders are trusted.
    """
    if preset_folder is None:
        return None
    return next(
        (folder for folder in (Path(preset_folder), Path(preset_folder, name or "").parent) if _is_run(folder)), None
    )


def find_hydra_section(run: Path, preset: Path) -> Iterator[Problem]:
    """Yield a problem if a run's configuration has a section `hydra`. Composing it could import packages.

    Args:
        run: The run's folder, for the message.
        preset: The configuration file. Yields a problem if it cannot be read, and nothing if it does not exist.
    """
    try:
        content = yaml.safe_load(preset.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        allowed = "a configuration that a run has written"
        yield Problem("--config-name", str(preset), allowed, f"The file cannot be read: {error}")
        return
    if isinstance(content, Mapping) and "hydra" in content:
        advice = f"{run} is a run's folder, and no run writes this section. Remove it."
        yield Problem("hydra", content["hydra"], "left out", advice)


def find_untrusted_code(config: Config, run: Path, explicit_keys: Collection[str]) -> Iterator[Problem]:
    """Yield a problem for each key of a run's configuration that names code to run or a receiver of credentials.

    Args:
        config: The configuration.
        run: The run's folder, for the messages.
        explicit_keys: Keys that the command line sets. The user trusts these.
    """
    for key, value in _sensitive_values(config):
        if value and key not in explicit_keys:
            yield Problem(
                key,
                value,
                "repeated on the command line",
                f"{run} is a run's folder. This value of its configuration would run code on this machine or receive "
                "your credentials. Repeat the key on the command line if you trust it.",
            )


def _sensitive_values(config: Config) -> Iterator[tuple[str, Any]]:
    gym = config.environment.skyrl_gym
    yield "trainer.plugins", list(config.trainer.plugins)
    yield f"{_GYM}.verifiers.env_id", gym.verifiers.env_id  # its module is imported
    yield f"{_GYM}.llm_as_a_judge.base_url", gym.llm_as_a_judge.base_url  # it receives OPENAI_API_KEY
    yield f"{_GYM}.openenv.token_variable", gym.openenv.token_variable
    agent, key = gym.agent, f"{_GYM}.agent"
    for name in ("command", "run", "python", "env", "grader"):
        yield f"{key}.{name}", getattr(agent, name)
    yield f"{key}.sandbox.kind", ":" in agent.sandbox.kind and agent.sandbox.kind  # its module is imported
    for name in ("image", "run_args", "paths"):
        yield f"{key}.sandbox.{name}", getattr(agent.sandbox, name)
    if not config.generator.run_engines_locally:  # the servers receive SKYRL_API_KEY
        for name in ("remote_inference_engine_urls", "external_server_urls"):
            yield f"generator.{name}", list(getattr(config.generator, name) or ())
    for name, value in config.generator.engine_init_kwargs.items():  # a number cannot name code
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
