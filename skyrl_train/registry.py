"""Names -> implementations of one kind: a table of lazily loaded built-ins, and those that users register."""

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
    """Load the object "package.module:name"."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


class Registry(Generic[T]):
    """The implementations of one kind, by name.

    `table` maps the built-in names to "module:object", which is loaded on first use, so that knowing a name needs no
    import of torch, ray or an engine. `register` adds a user's own; a name is never silently replaced.
    """

    def __init__(self, kind: str, table: Mapping[str, str] | None = None):
        self.kind = kind
        self.table = dict(table or {})
        self._built_in = dict(self.table)
        self.loaded: dict[str, T] = {}
        """Implementations that are registered, and built-in ones that have been loaded, by name."""
        _registries[kind] = self

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator. Raises ConfigError for a name that is taken, or that is not a text.

        A built-in may register itself under its own name, and code that is run again (a notebook's cell) its class.
        """
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{self.kind} {name!r}: a name must be a text, in the decorator's parentheses.")

        def add(item: T) -> T:
            taken = self.loaded.get(name)
            free = self.table.get(name, _origin(item)) == _origin(item) if taken is None else _is_same(item, taken)
            if not free:
                raise ConfigError(f"{self.kind} {name!r} is already registered; choose another name.")
            self.loaded[name] = item
            return item

        return add

    def unregister(self, name: str) -> None:
        """Remove whatever is registered under a name."""
        self.table.pop(name, None)
        self.loaded.pop(name, None)

    def user_items(self) -> dict[str, T | str]:
        """What is not built in, or no longer, by name: the object, or its "module:object" if it is not loaded yet."""
        current: dict[str, T | str] = {**self.table, **self.loaded}
        return {name: item for name, item in current.items() if self._built_in.get(name) not in (item, _origin(item))}

    def names(self) -> list[str]:
        return sorted({*self.table, *self.loaded})

    def get(self, name: str) -> T:
        if name not in self.loaded and name in self.table:
            self.loaded[name] = load_object(self.table[name])
        if name in self.loaded:
            return self.loaded[name]
        raise ConfigError(unknown_name_message(self.kind, name, self.names()))


def find_registered(kind: str, name: str) -> Any:
    """Return what is registered under a name; None if nothing is, or if it is a built-in that is not loaded.

    Imports nothing, so it also answers before the module with the registry of this kind is imported.
    """
    registry = _registries.get(kind)
    if registry is None or (name not in registry.loaded and name in registry._built_in):
        return None
    return registry.get(name) if name in registry.names() else None


def _origin(item: Any) -> str:
    return f"{getattr(item, '__module__', '')}:{getattr(item, '__name__', '')}"


def _is_same(item: Any, other: Any) -> bool:
    """The same object, or one from the same place in the code: a class of that name, a function of that code."""
    code = getattr(item, "__code__", None)
    if getattr(item, "__name__", "<lambda>") == "<lambda>":
        return item is other or (code is not None and code == getattr(other, "__code__", None))
    return _origin(item) == _origin(other)


def unknown_name_message(kind: str, name: str, known: list[str]) -> str:
    """The message for a name that is not in a table: the name, what is allowed, and the nearest match."""
    close = difflib.get_close_matches(str(name), known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"Unknown {kind} {name!r}; known: {', '.join(known)}.{hint}"


def import_plugins(names: Sequence[str]) -> None:
    """Import users' modules, which register their parts. Raises ConfigError for one that cannot be imported."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(
                f"trainer.plugins: {name!r} cannot be imported ({error}); put its folder on PYTHONPATH or install it."
            ) from error
        except ConfigError as error:  # raised by a registration in the module
            raise ConfigError(f"trainer.plugins: {name!r}: {error}") from error
        except Exception as error:  # raised by the module itself
            raise ConfigError(
                f"trainer.plugins: {name!r} cannot be imported: {type(error).__name__}: {error}, in {_place(error)}."
            ) from error


def _place(error: Exception) -> str:
    """File and line of the innermost frame, or of the syntax error."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}, line {frame.lineno}"
