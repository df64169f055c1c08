"""SkyRL's registries by their names, and how what a program registered reaches the Ray task that its run is in."""

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

_ALL: Mapping[str, Registry[Any]] = {
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
    """SkyRL's way to a registry: class methods."""

    _registry: ClassVar[Registry[Any]]

    @classmethod
    def register(cls, name: str, func: Callable[..., Any]) -> None:
        """Raises ConfigError for a name that is taken."""
        cls._registry.register(str(name))(func)
        _publish_if_in_job()

    @classmethod
    def get(cls, name: str) -> Callable[..., Any]:
        """Raises ConfigError for an unknown name."""
        found: Callable[..., Any] = cls._registry.get(str(name))
        return found

    @classmethod
    def list_available(cls) -> list[str]:
        return cls._registry.names()

    @classmethod
    def unregister(cls, name: str) -> None:
        cls._registry.unregister(str(name))


class AdvantageEstimatorRegistry(FunctionRegistry):
    """trainer.algorithm.advantage_estimator"""

    _registry = advantage_estimators


class PolicyLossRegistry(FunctionRegistry):
    """trainer.algorithm.policy_loss_type"""

    _registry = policy_losses


def register_advantage_estimator(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator."""
    return _publishing(advantage_estimators.register(str(name)))


def register_policy_loss(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator."""
    return _publishing(policy_losses.register(str(name)))


def _publishing(add: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        add(function)
        _publish_if_in_job()
        return function

    return register


def _publish_if_in_job() -> None:
    """Of what is registered once Ray runs; `initialize_ray` tells of what was before."""
    if is_connected_to_ray():
        sync_registries()


def sync_registries() -> None:
    """Let this program's Ray tasks find what it has registered so far; `initialize_ray` does it too."""
    _import_gym_registrations()
    put_for_tasks(_REGISTERED, _packed())


def load_program_registrations() -> None:
    """In a Ray task: register what the program that started it has registered. Elsewhere this does nothing."""
    _import_gym_registrations()
    packed = get_from_driver(_REGISTERED)
    for kind, name, item in pickle.loads(packed) if packed else ():
        registry = _ALL[kind]
        if name in registry.user_items():
            continue
        registry.unregister(name)  # the program's replaces a built-in one
        if isinstance(item, str):
            registry.table[name] = item
        else:
            registry.register(name)(pickle.loads(item))


def _packed() -> bytes:
    return pickle.dumps([(kind, name, item) for kind, registry in _ALL.items() for name, item in _own(kind, registry)])


def _own(kind: str, registry: Registry[Any]) -> Iterator[tuple[str, str | bytes]]:
    import cloudpickle

    for name, item in registry.user_items().items():
        try:
            yield name, item if isinstance(item, str) else cloudpickle.dumps(item)
        except Exception as error:
            raise ConfigError(
                f"{kind} {name!r} cannot be sent to the Ray task of the run ({type(error).__name__}: {error}): "
                "register it in a module that trainer.plugins names."
            ) from error


def _import_gym_registrations() -> None:
    """Environments that were registered with the `skyrl_gym` package itself, if it is in use; not those it brings."""
    registration = sys.modules.get("skyrl_gym.envs.registration")
    for id, spec in getattr(registration, "registry", {}).items():
        entry = spec.entry_point
        brought = entry.startswith("skyrl_gym.") if isinstance(entry, str) else entry is None
        if not brought and id not in environments.user_items():
            register_environment(id, entry, spec.kwargs)
