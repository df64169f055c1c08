"""Serialization of the user's environments, tools and agents for the processes in which environments run.

Environment processes import the modules of `trainer.plugins` again. Classes and functions that the program itself
registered (in its main file or a notebook) cannot be imported there, so they are sent by value.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Mapping
from typing import Any, NoReturn

from skyrl_train.environments.agent_registry import agents
from skyrl_train.environments.registry import environments
from skyrl_train.environments.tools.registry import tools
from skyrl_train.errors import ConfigError
from skyrl_train.registry import Registry

_KINDS: Mapping[str, Registry[Any]] = {"environment": environments, "tool": tools, "agent": agents}
MAX_PICKLE_BYTES = 4 * 2**20
"""Maximum size of one pickled class or function with the globals it refers to. Every environment process loads it."""


def serialize_user_registrations() -> list[dict[str, str]]:
    """Return all registered environments, tools and agents that are not built in, for `load_user_registrations`.

    Returns:
        One JSON-serializable entry for each item. An item that cannot be sent has the "reason" in its entry.
    """
    return [_packed(kind, name) for kind, registry in _KINDS.items() for name in registry.user_items()]


def serialization_problem(kind: str, name: str) -> str | None:
    """Return why a user's environment, tool or agent cannot be sent to environment processes, or None if it can.

    Args:
        kind: "environment", "tool" or "agent".
        name: Name under which the item is registered. A name that is built in or unknown has no problem.
    """
    return _packed(kind, name).get("reason") if name in _KINDS[kind].user_items() else None


def load_user_registrations(packed: list[dict[str, str]]) -> None:
    """Register environments, tools and agents that another process serialized.

    Those that plugins registered here are kept. An item that cannot be loaded is registered as a factory that raises
    ConfigError.

    Args:
        packed: Result of `serialize_user_registrations`.
    """
    for entry in packed:
        name, registry = entry["name"], _KINDS[entry["kind"]]
        if name in registry.user_items():
            continue
        registry.unregister(name)  # the user's item replaces a built-in one
        if "target" in entry:
            registry.table[name] = entry["target"]
        else:
            registry.register(name)(_unpacked(entry))


def _packed(kind: str, name: str) -> dict[str, str]:
    import cloudpickle  # lazy: most environment processes and commands do not need it

    item = _KINDS[kind].user_items()[name]
    if isinstance(item, str):
        return {"kind": kind, "name": name, "target": item}
    try:
        data = cloudpickle.dumps(item)
    except Exception as error:
        return {"kind": kind, "name": name, "reason": f"{type(error).__name__}: {error}"}
    if len(data) > MAX_PICKLE_BYTES:
        reason = f"with the globals it refers to, it has {len(data)} bytes; at most {MAX_PICKLE_BYTES} can be sent"
        return {"kind": kind, "name": name, "reason": reason}
    return {"kind": kind, "name": name, "pickle": base64.b64encode(data).decode("ascii")}


def _unpacked(entry: Mapping[str, str]) -> Any:
    try:
        if "pickle" in entry:
            return pickle.loads(base64.b64decode(entry["pickle"]))
        reason = entry["reason"]
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    message = (
        f"{entry['kind']} {entry['name']!r} cannot be sent to environment processes ({reason}); register it in a "
        "module that trainer.plugins names."
    )

    def raise_error(**settings: Any) -> NoReturn:
        raise ConfigError(message)

    return raise_error
