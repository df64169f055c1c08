"""Names -> implementations of one kind: a table of lazily loaded built-ins plus what users register."""

from __future__ import annotations

import difflib
import importlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from skyrl_train.errors import ConfigError

T = TypeVar("T")


def load_object(target: str) -> Any:
    """The object behind "package.module:name"."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


class Registry(Generic[T]):
    """One kind of choice.

    `table` maps the built-in names to "module:object" and is loaded on first use, so that knowing a name costs no
    import of torch, ray or an engine. `register` adds a user's own; a name is never silently replaced.
    """

    def __init__(self, kind: str, table: Mapping[str, str] | None = None):
        self.kind = kind
        self.table = dict(table or {})
        self._items: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator. The built-in of that name may register itself; anybody else's second claim is refused."""

        def add(item: T) -> T:
            origin = f"{getattr(item, '__module__', '')}:{getattr(item, '__name__', '')}"
            taken = self._items.get(name)
            same = taken is not None and origin == f"{taken.__module__}:{getattr(taken, '__name__', '')}"
            if (taken is not None and not same) or (taken is None and self.table.get(name, origin) != origin):
                raise ConfigError(f"{self.kind} {name!r} is already registered; choose another name.")
            self._items[name] = item
            return item

        return add

    def forget(self, name: str) -> None:
        """Free a name, whoever has it."""
        self.table.pop(name, None)
        self._items.pop(name, None)

    def names(self) -> list[str]:
        return sorted({*self.table, *self._items})

    def get(self, name: str) -> T:
        if name not in self._items and name in self.table:
            self._items[name] = load_object(self.table[name])
        if name in self._items:
            return self._items[name]
        raise ConfigError(unknown(self.kind, name, self.names()))


def unknown(kind: str, name: str, known: list[str]) -> str:
    """The message for a name that is not in a table: value got, what is allowed, nearest guess."""
    close = difflib.get_close_matches(str(name), known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"Unknown {kind} {name!r}; known: {', '.join(known)}.{hint}"


def import_plugins(names: Sequence[str]) -> None:
    """Import users' modules, which register what they bring. Raises ConfigError for one that cannot be imported."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(
                f"trainer.plugins: {name!r} cannot be imported ({error}); put its folder on PYTHONPATH or install it."
            ) from error
        except ConfigError as error:  # of what it registers
            raise ConfigError(f"trainer.plugins: {name!r}: {error}") from error
        except Exception as error:  # the module's own
            raise ConfigError(
                f"trainer.plugins: {name!r} cannot be imported: {type(error).__name__}: {error}, in {_place(error)}."
            ) from error


def _place(error: Exception) -> str:
    """File and line of the innermost frame, or of the text that is no Python."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}, line {frame.lineno}"
