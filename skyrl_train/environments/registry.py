"""Environments by name.

    register("mine", "my_package.envs:MyEnv")      then environment.env_class=mine, or a row with that env_class

Call `register` at import of a module named in `trainer.plugins`: plugins are imported in every environment process too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from skyrl_train.config.choices import ENVIRONMENTS
from skyrl_train.environments.base import Settings
from skyrl_train.errors import ConfigError
from skyrl_train.registry import Registry

EnvFactory = Callable[..., Any]
environments: Registry[EnvFactory] = Registry("environment", ENVIRONMENTS)


def register(id: str, entry_point: str | EnvFactory) -> None:
    """Make `id` an environment. `entry_point` is a class, a factory, or "module:Class", which is imported on first use.

    Raises ConfigError when `id` is taken by something else.
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
    """The class or factory called `id`. Raises ConfigError for an unknown name or an entry point that does not load."""
    try:
        return environments.get(id)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"environment {id!r} ({environments.table.get(id)}) does not load: {error}") from error


def make(id: str, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None) -> Any:
    """A new environment `id`, for one episode, in this process."""
    return find(id)(env_config=Settings(env_config or {}), extras=dict(extras or {}))


def check_environments(names: Iterable[str], env_configs: Mapping[str, Any]) -> None:
    """Load the environments of a run and let each one `check` its settings and this machine.

    Raises ConfigError for an unknown name, one that does not load, and one that cannot run here.
    """
    for name in sorted(set(names)):
        check = getattr(find(name), "check", None)
        if check is not None:
            check(Settings(env_configs.get(name) or {}))
