"""The registry of environments.

Example:
    register("mine", "my_package.envs:MyEnv")  # select it with environment.env_class=mine, or in a row's env_class

Call `register` in a module that `trainer.plugins` lists. Every environment process imports these modules too.
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
    """Register an environment.

    Args:
        id: Name of the environment in `environment.env_class` and in dataset rows.
        entry_point: A class, a factory, or a string "package.module:Class", which is imported on first use.

    Raises:
        ConfigError: Another environment is registered as `id`, or the string does not have this form.
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
    """Return the class or factory that is registered as `id`.

    Raises:
        ConfigError: No environment is registered as `id`, or its entry point cannot be loaded.
    """
    try:
        return environments.get(id)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"environment {id!r} ({environments.table.get(id)}) cannot be loaded: {error}") from error


def make(id: str, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None) -> Any:
    """Create an environment for one episode in this process.

    Args:
        id: Name under which the environment is registered.
        env_config: Settings of the environment; None to pass none.
        extras: Columns of the dataset row other than the prompt; None to pass none.

    Raises:
        ConfigError: No environment is registered as `id`, or its entry point cannot be loaded.
    """
    return find(id)(env_config=AttrDict(env_config or {}), extras=dict(extras or {}))


def check_environments(names: Iterable[str], env_configs: Mapping[str, Any]) -> None:
    """Load the environments of a run, and call the `check` of each that has one.

    Args:
        names: Names of the environments.
        env_configs: Settings of each environment, by name.

    Raises:
        ConfigError: An environment is unknown, cannot be loaded, or its `check` rejects the settings or this machine.
    """
    for name in sorted(set(names)):
        check = getattr(find(name), "check", None)
        if check is not None:
            check(AttrDict(env_configs.get(name) or {}))


def check_rows(name: str, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Call the `check_rows` of an environment, if it has one.

    Args:
        name: Name of the environment.
        rows: Pairs of a row's location and its extras; see `TextEnv.check_rows`.

    Raises:
        DataError: A row is unusable.
        ConfigError: The environment is unknown or cannot be loaded.
    """
    check = getattr(find(name), "check_rows", None)
    if check is not None:
        check(rows)
