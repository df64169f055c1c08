"""The registry of environments.

    register("mine", "my_package.envs:MyEnv")      then environment.env_class=mine, or a row with that env_class

Call `register` when a module listed in `trainer.plugins` is imported: plugins are also imported in every environment
process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from skyrl_train.config.choices import ENVIRONMENTS
from skyrl_train.environments.base import AttrDict
from skyrl_train.errors import ConfigError
from skyrl_train.registry import Registry

EnvFactory = Callable[..., Any]
environments: Registry[EnvFactory] = Registry("environment", ENVIRONMENTS)


def register(id: str, entry_point: str | EnvFactory) -> None:
    """Register an environment as `id`. `entry_point` is a class, a factory, or "module:Class", imported on first use.

    Raises ConfigError if something else is registered as `id`.
    """
    if not isinstance(entry_point, str):
        environments.register(id)(entry_point)
        return
    if entry_point.count(":") != 1:
        raise ConfigError(f"environment {id!r}: entry point {entry_point!r} is not of the form 'package.module:Class'.")
    if id in environments.names() and environments.table.get(id) != entry_point:
        raise ConfigError(f"environment {id!r} is already registered; choose another name.")
    environments.table[id] = entry_point


def find(id: str) -> EnvFactory:
    """Return the class or factory registered as `id`.

    Raises ConfigError for an unknown name or an entry point that cannot be loaded.
    """
    try:
        return environments.get(id)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"environment {id!r} ({environments.table.get(id)}) does not load: {error}") from error


def make(id: str, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None) -> Any:
    """Create environment `id` for one episode, in this process."""
    return find(id)(env_config=AttrDict(env_config or {}), extras=dict(extras or {}))


def check_environments(names: Iterable[str], env_configs: Mapping[str, Any]) -> None:
    """Load the environments of a run and let each `check` its settings and this machine.

    Raises ConfigError for an environment that is unknown, cannot be loaded, or cannot run here.
    """
    for name in sorted(set(names)):
        check = getattr(find(name), "check", None)
        if check is not None:
            check(AttrDict(env_configs.get(name) or {}))


def check_rows(name: str, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Let environment `name` check the extras of its rows: see `TextEnv.check_rows`. Raises DataError."""
    check = getattr(find(name), "check_rows", None)
    if check is not None:
        check(rows)
