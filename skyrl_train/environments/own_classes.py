"""Environments and tools of the user's program, on their way to the processes in which environments run.

What a module of `trainer.plugins` registers is imported there again. What the program itself registered (its main
file, a notebook) cannot be imported, so it is sent by value.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from skyrl_train.environments.registry import environments
from skyrl_train.environments.tools.registry import tools
from skyrl_train.errors import ConfigError
from skyrl_train.registry import Registry

_KINDS: Mapping[str, Registry[Any]] = {"environment": environments, "tool": tools}


def pack_own() -> list[dict[str, str]]:
    """Everything that was registered beside the built-in names, as JSON; what cannot be pickled is left out."""
    return [packed for kind, registry in _KINDS.items() for name in registry.own() for packed in _packed(kind, name)]


def why_not_sent(name: str) -> str | None:
    """What is wrong with an environment or tool of the user's that cannot be pickled; None if it can be."""
    import cloudpickle  # late, as below: most environment processes and command lines have no use for it

    for registry in _KINDS.values():
        if name in registry.own():
            try:
                cloudpickle.dumps(registry.own()[name])
            except Exception as error:
                return f"{type(error).__name__}: {error}"
    return None


def register_own(packed: list[dict[str, str]]) -> None:
    """The other end: register what plugins have not. What cannot be loaded here raises ConfigError when it is used."""
    for entry in packed:
        registry = _KINDS[entry["kind"]]
        if entry["name"] not in registry.names():
            if "target" in entry:
                registry.table[entry["name"]] = entry["target"]
            else:
                registry.register(entry["name"])(_unpickled(entry))


def _packed(kind: str, name: str) -> Iterator[dict[str, str]]:
    import cloudpickle

    item = _KINDS[kind].own()[name]
    if isinstance(item, str):
        yield {"kind": kind, "name": name, "target": item}
        return
    try:
        data = cloudpickle.dumps(item)
    except Exception:  # of no consequence unless a row names it: see why_not_sent
        return
    yield {"kind": kind, "name": name, "pickle": base64.b64encode(data).decode("ascii")}


def _unpickled(entry: Mapping[str, str]) -> Any:
    try:
        return pickle.loads(base64.b64decode(entry["pickle"]))
    except Exception as error:
        reason = (
            f"{entry['kind']} {entry['name']!r} cannot be loaded in an environment process ({type(error).__name__}: "
            f"{error}); register it in a module that trainer.plugins names."
        )

        def refuse(**settings: Any) -> NoReturn:
            raise ConfigError(reason)

        return refuse
