"""What every part of the configuration is made of: dataclasses that can be frozen, and read-only mappings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NoReturn, TypeVar

S = TypeVar("S", bound="Section")


class Section:
    """Base of the configuration dataclasses: mutable while Hydra and the checks work on them, frozen afterwards.

    Being frozen is a property of the object, not of the class, because Hydra needs to write and nothing after it may.
    It survives pickling, so a worker's copy is frozen too; `dataclasses.replace` gives a new one that is not.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("_frozen"):
            raise AttributeError(f"the configuration is frozen: {type(self).__name__}.{name} cannot be set")
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        if self.__dict__.get("_frozen"):
            raise AttributeError(f"the configuration is frozen: {type(self).__name__}.{name} cannot be deleted")
        object.__delattr__(self, name)


class OpenSection(Section):
    """A section with room for keys of the user's own, in its field `own`: they can be read as its attributes too."""

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__.get("own") or {}
        if name in own:
            return own[name]
        raise AttributeError(f"{type(self).__name__} has no key {name!r}")


class FrozenMapping(dict[str, Any]):
    """A free-form mapping (`engine_init_kwargs`, ...) of a frozen configuration: a dict for readers and `**`."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("the configuration is frozen: copy the mapping with dict(...) to change it")

    __setitem__ = __delitem__ = __ior__ = _refuse  # type: ignore[assignment]
    clear = pop = popitem = setdefault = update = _refuse  # type: ignore[assignment]

    def __reduce__(self) -> tuple[type[FrozenMapping], tuple[dict[str, Any]]]:
        return type(self), (dict(self),)


def freeze(section: S) -> S:
    """The same object, frozen all the way down: sections refuse writes, lists are tuples, mappings are read-only."""
    assert isinstance(section, Section)
    if not section.__dict__.get("_frozen"):
        for item in fields(section):  # type: ignore[arg-type]
            object.__setattr__(section, item.name, _frozen(getattr(section, item.name)))
        object.__setattr__(section, "_frozen", True)
    return section


def _frozen(value: Any) -> Any:
    if isinstance(value, Section):
        return freeze(value)
    if isinstance(value, Mapping):
        return FrozenMapping({key: _frozen(item) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(item) for item in value)
    return value


def interpolation(key: str) -> Any:
    """A default that follows another key until somebody sets it."""
    return "${" + key + "}"
