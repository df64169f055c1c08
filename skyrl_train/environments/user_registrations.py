"""Environments and tools of the user's program, on their way to the processes in which environments run.

A module of `trainer.plugins` is imported there again. What the program itself registered (its main file, a notebook)
cannot be imported, so it is sent by value.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Mapping
from typing import Any, NoReturn

from skyrl_train.environments.registry import environments
from skyrl_train.environments.tools.registry import tools
from skyrl_train.errors import ConfigError
from skyrl_train.registry import Registry

_KINDS: Mapping[str, Registry[Any]] = {"environment": environments, "tool": tools}
MAX_PICKLE_BYTES = 4 * 2**20
"""Bytes of one class or function with the globals that it refers to; every environment process loads it."""


def serialize_user_registrations() -> list[dict[str, str]]:
    """Everything that is registered and not built in, as JSON: for `register_own` in another process."""
    return [_packed(kind, name) for kind, registry in _KINDS.items() for name in registry.user_items()]


def serialization_problem(kind: str, name: str) -> str | None:
    """What is wrong with an "environment" or "tool" of the user's that cannot be sent; None for all others."""
    return _packed(kind, name).get("reason") if name in _KINDS[kind].user_items() else None


def load_user_registrations(packed: list[dict[str, str]]) -> None:
    """Register what this process does not have from plugins. What cannot be loaded raises ConfigError when used."""
    for entry in packed:
        name, registry = entry["name"], _KINDS[entry["kind"]]
        if name in registry.user_items():
            continue
        registry.unregister(name)  # the user's replaces a built-in one
        if "target" in entry:
            registry.table[name] = entry["target"]
        else:
            registry.register(name)(_unpacked(entry))


def _packed(kind: str, name: str) -> dict[str, str]:
    import cloudpickle  # late: most environment processes and command lines have no use for it

    item = _KINDS[kind].user_items()[name]
    if isinstance(item, str):
        return {"kind": kind, "name": name, "target": item}
    try:
        data = cloudpickle.dumps(item)
    except Exception as error:
        return {"kind": kind, "name": name, "reason": f"{type(error).__name__}: {error}"}
    if len(data) > MAX_PICKLE_BYTES:
        reason = f"with the globals that it refers to it has {len(data)} bytes, and at most {MAX_PICKLE_BYTES} are sent"
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

    def refuse(**settings: Any) -> NoReturn:
        raise ConfigError(message)

    return refuse
