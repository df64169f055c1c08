"""SkyRL's registries, and the transfer of a program's registrations to the Ray task in which its run executes."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from skyrl_train.algorithms.registry import (
    advantage_estimators,
    kl_estimators,
    policy_losses,
    reductions,
    sft_losses,
)
from skyrl_train.cluster.driver_store import get_from_driver, is_connected_to_ray, put_for_tasks
from skyrl_train.environments.integrations.skyrl_gym import register as register_environment
from skyrl_train.environments.registry import environments
from skyrl_train.environments.tools.registry import tools
from skyrl_train.errors import ConfigError
from skyrl_train.registry import Registry
from skyrl_train.report.trackers import trackers

_REGISTRIES: Mapping[str, Registry[Any]] = {
    "advantage": advantage_estimators,
    "policy_loss": policy_losses,
    "kl_estimator": kl_estimators,
    "reduction": reductions,
    "sft_loss": sft_losses,
    "environment": environments,
    "tool": tools,
    "tracker": trackers,
}
_REGISTERED = "registered"


class FunctionRegistry:
    """A base class that gives access to a registry through class methods, as in SkyRL."""

    _registry: ClassVar[Registry[Any]]

    @classmethod
    def register(cls, name: str, func: Callable[..., Any]) -> None:
        """Register a function. Tasks of a connected Ray cluster can use it, too.

        Raises:
            ConfigError: The name is taken, or the function cannot be sent to Ray tasks.
        """
        cls._registry.register(str(name))(func)
        _publish_if_in_job()

    @classmethod
    def get(cls, name: str) -> Callable[..., Any]:
        """Return the function of that name.

        Raises:
            ConfigError: The name is unknown.
        """
        function: Callable[..., Any] = cls._registry.get(str(name))
        return function

    @classmethod
    def list_available(cls) -> list[str]:
        """Return the names of all functions, built-in ones included."""
        return cls._registry.names()

    @classmethod
    def unregister(cls, name: str) -> None:
        """Remove the function of that name."""
        cls._registry.unregister(str(name))


class AdvantageEstimatorRegistry(FunctionRegistry):
    """The registry of advantage estimators, the choices of `trainer.algorithm.advantage_estimator`."""

    _registry = advantage_estimators


class PolicyLossRegistry(FunctionRegistry):
    """The registry of policy losses, the choices of `trainer.algorithm.policy_loss_type`."""

    _registry = policy_losses


def register_advantage_estimator(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that registers a function as an advantage estimator.

    The decorator raises ConfigError if the name is taken or the function cannot be sent to Ray tasks.
    """
    return _publishing(advantage_estimators.register(str(name)))


def register_policy_loss(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that registers a function as a policy loss.

    The decorator raises ConfigError if the name is taken or the function cannot be sent to Ray tasks.
    """
    return _publishing(policy_losses.register(str(name)))


def _publishing(add: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        add(function)
        _publish_if_in_job()
        return function

    return register


def _publish_if_in_job() -> None:
    """Publish all registrations if Ray has started; `initialize_ray` publishes earlier ones."""
    if is_connected_to_ray():
        sync_registries()


def sync_registries() -> None:
    """Publish what this program registered, such as losses and environments, so that its Ray tasks can load it.

    The program must be connected to Ray. `initialize_ray` publishes earlier registrations. Later ones are published at
    once by SkyRL's registries and decorators. Call this after registering in another way while Ray is running, such as
    with `skyrl_train.register` or the `skyrl_gym` package.

    Raises:
        ConfigError: A registered function or class cannot be sent to a Ray task.
    """
    _import_gym_registrations()
    put_for_tasks(_REGISTERED, _pack_registrations())


def load_program_registrations() -> None:
    """Register the functions and classes that the program registered which started this Ray task.

    Outside a Ray task, load only environments that were registered with the `skyrl_gym` package.
    """
    _import_gym_registrations()
    packed = get_from_driver(_REGISTERED)
    for kind, name, item in pickle.loads(packed) if packed else ():
        registry = _REGISTRIES[kind]
        if name in registry.user_items():
            continue
        registry.unregister(name)  # the program's item replaces a built-in one
        if isinstance(item, str):
            registry.table[name] = item
        else:
            registry.register(name)(pickle.loads(item))


def _pack_registrations() -> bytes:
    return pickle.dumps(
        [(kind, name, item) for kind, registry in _REGISTRIES.items() for name, item in _packed_items(kind, registry)]
    )


def _packed_items(kind: str, registry: Registry[Any]) -> Iterator[tuple[str, str | bytes]]:
    import cloudpickle

    for name, item in registry.user_items().items():
        try:
            yield name, item if isinstance(item, str) else cloudpickle.dumps(item)
        except Exception as error:
            raise ConfigError(
                f"{kind} {name!r} cannot be sent to the Ray task of the run ({type(error).__name__}: {error}). "
                "Register it in a module that trainer.plugins names."
            ) from error


def _import_gym_registrations() -> None:
    """Register environments that were registered with the `skyrl_gym` package, except its built-in ones."""
    registration = sys.modules.get("skyrl_gym.envs.registration")
    for id, spec in getattr(registration, "registry", {}).items():
        entry = spec.entry_point
        is_builtin = entry.startswith("skyrl_gym.") if isinstance(entry, str) else entry is None
        if not is_builtin and id not in environments.user_items():
            register_environment(id, entry, spec.kwargs)
