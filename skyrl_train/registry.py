"""Registries of implementations by name: lazily loaded built-in ones, and those that users register."""

from __future__ import annotations

import difflib
import importlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

from skyrl_train.errors import ConfigError

T = TypeVar("T")

_registries: WeakValueDictionary[str, Registry[Any]] = WeakValueDictionary()
"""The newest registry of each kind."""


def load_object(target: str) -> Any:
    """Import and return the object "package.module:name".

    Raises:
        ImportError: The module cannot be imported.
        AttributeError: The module has no such object.
    """
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


class Registry(Generic[T]):
    """The implementations of one kind, by name.

    Built-in implementations are imported on first use, so that checking a name needs no import of torch, ray or an
    engine. Users add theirs with `register`, which never replaces an implementation silently.
    """

    def __init__(self, kind: str, table: Mapping[str, str] | None = None):
        """Create a registry, which replaces an earlier one of this kind in `find_registered`.

        Args:
            kind: Name of the kind in error messages, such as "environment".
            table: Built-in name -> "module:object".
        """
        self.kind = kind
        self.table = dict(table or {})
        self._built_in = dict(self.table)
        self.loaded: dict[str, T] = {}
        """Implementations by name: those that users registered, and built-in ones that were loaded."""
        _registries[kind] = self

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers an object under `name` and returns it unchanged.

        A built-in implementation may register itself under its own name. Code that runs again, such as a notebook's
        cell, may register its class or function again.

        Raises:
            ConfigError: The name is not a non-empty string, or is taken by another implementation.
        """
        if not isinstance(name, str) or not name:
            raise ConfigError(
                f"{self.kind} {name!r}: the name must be a non-empty string, passed to the decorator in parentheses."
            )

        def add(item: T) -> T:
            existing = self.loaded.get(name)
            is_allowed = (
                self.table.get(name, _origin(item)) == _origin(item) if existing is None else _is_same(item, existing)
            )
            if not is_allowed:
                raise ConfigError(f"{self.kind} {name!r} is already registered; choose another name.")
            self.loaded[name] = item
            return item

        return add

    def unregister(self, name: str) -> None:
        """Remove the implementation of this name, if there is one."""
        self.table.pop(name, None)
        self.loaded.pop(name, None)

    def user_items(self) -> dict[str, T | str]:
        """Return the implementations that users have registered, or replaced in the table, by name.

        Returns:
            Name -> the object, or its "module:object" if it is not loaded yet.
        """
        current: dict[str, T | str] = {**self.table, **self.loaded}
        return {name: item for name, item in current.items() if self._built_in.get(name) not in (item, _origin(item))}

    def names(self) -> list[str]:
        """Return all known names, sorted."""
        return sorted({*self.table, *self.loaded})

    def get(self, name: str) -> T:
        """Return the implementation of this name. A built-in one is imported on first use.

        Raises:
            ConfigError: The name is unknown. The message lists the known names.
        """
        if name not in self.loaded and name in self.table:
            self.loaded[name] = load_object(self.table[name])
        if name in self.loaded:
            return self.loaded[name]
        raise ConfigError(unknown_name_message(self.kind, name, self.names()))


def find_registered(kind: str, name: str) -> Any:
    """Return the implementation that users have registered under a name, or a built-in one that is loaded; else None.

    Imports no module that defines a registry, so it can be called before them.

    Args:
        kind: Kind of the registry, such as "environment".
        name: Name of the implementation.
    """
    registry = _registries.get(kind)
    if registry is None or (name not in registry.loaded and name in registry._built_in):
        return None
    return registry.get(name) if name in registry.names() else None


def _origin(item: Any) -> str:
    return f"{getattr(item, '__module__', '')}:{getattr(item, '__name__', '')}"


def _is_same(item: Any, other: Any) -> bool:
    """Return True for the same object, or for one from the same place in the code: a class of that name, a function of
    that code.
    """
    code = getattr(item, "__code__", None)
    if getattr(item, "__name__", "<lambda>") == "<lambda>":
        return item is other or (code is not None and code == getattr(other, "__code__", None))
    return _origin(item) == _origin(other)


def unknown_name_message(kind: str, name: str, known: list[str]) -> str:
    """Return the message for an unknown name: the name, the known names, and the nearest match if there is one.

    Args:
        kind: What the name refers to, such as "environment".
        name: The unknown name.
        known: Names that are allowed.
    """
    close = difflib.get_close_matches(str(name), known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"Unknown {kind} {name!r}; known: {', '.join(known)}.{hint}"


def import_plugins(names: Sequence[str]) -> None:
    """Import users' modules, which register their implementations.

    Raises:
        ConfigError: A module cannot be imported. The message names it and the cause.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(
                f"trainer.plugins: {name!r} cannot be imported ({error}). Put its folder on PYTHONPATH, or install it."
            ) from error
        except ConfigError as error:  # raised by a registration in the module
            raise ConfigError(f"trainer.plugins: {name!r}: {error}") from error
        except Exception as error:  # raised by the module itself
            raise ConfigError(
                f"trainer.plugins: {name!r} cannot be imported: {type(error).__name__}: {error}, "
                f"in {_error_location(error)}."
            ) from error


def _error_location(error: Exception) -> str:
    """Return file and line of the innermost frame, or of the syntax error."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}, line {frame.lineno}"
