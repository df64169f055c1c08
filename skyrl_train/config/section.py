"""Building blocks of the configuration: dataclasses that can be frozen, read-only mappings, and metadata of keys.

A new key needs only a field such as `lr: float = config_field(1e-6, range=NON_NEGATIVE)` with a string below it that
describes the key. The checks (validate.py, hydra.py) and the documentation loop over all keys and read this metadata. A
key that only has an effect together with other keys also needs a row in sanity_warnings.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, NoReturn, TypeVar

S = TypeVar("S", bound="Section")


class Section:
    """Base class of the configuration dataclasses: mutable while Hydra and the checks run, frozen afterwards.

    Frozen is a state of the object, not of the class, because Hydra must write and nothing after it may. The state
    survives pickling, so a worker's copy is frozen, too. `dataclasses.replace` returns a new object that is not frozen.

    Setting or deleting an attribute of a frozen section raises AttributeError.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("_frozen"):
            raise AttributeError(
                f"{type(self).__name__}.{name} cannot be set: the configuration is frozen. "
                "Use dataclasses.replace to get a changed copy."
            )
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        if self.__dict__.get("_frozen"):
            raise AttributeError(f"{type(self).__name__}.{name} cannot be deleted: the configuration is frozen.")
        object.__delattr__(self, name)


class OpenSection(Section):
    """A section that accepts custom keys of the user. They are stored in its field `own` and readable as attributes."""

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__.get("own") or {}
        if name in own:
            return own[name]
        raise AttributeError(f"{type(self).__name__} has no key {name!r}")


class FrozenMapping(dict[str, Any]):
    """A read-only dict: a free-form mapping (`engine_init_kwargs`, ...) of a frozen configuration.

    Methods that would change it raise TypeError.
    """

    def _raise_frozen(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("The configuration is frozen. Copy the mapping with dict(...) to change it.")

    __setitem__ = __delitem__ = __ior__ = _raise_frozen  # type: ignore[assignment]
    clear = pop = popitem = setdefault = update = _raise_frozen  # type: ignore[assignment]

    def __reduce__(self) -> tuple[type[FrozenMapping], tuple[dict[str, Any]]]:
        return type(self), (dict(self),)


def freeze(section: S) -> S:
    """Freeze a section and everything below it in place, and return it.

    Frozen sections raise AttributeError when they are changed. Lists become tuples, mappings become FrozenMappings.
    Freezing a frozen section has no effect.
    """
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
    """Return a default value that follows another key: `${key}`, which OmegaConf replaces with that key's value.

    The result is typed `Any` because it stands for a value of the field's type.
    """
    return "${" + key + "}"


# -- Metadata of keys


@dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`, including both bounds unless a flag excludes them.

    `number in range` is True if the range contains the number. `str(range)` is a phrase such as "at least 1 and less
    than 2" for messages and the documentation.
    """

    low: float
    high: float = math.inf
    exclusive_low: bool = False
    exclusive_high: bool = False
    allow_zero: bool = False
    """True if the range also contains 0, in addition to the numbers between the bounds."""

    def __contains__(self, value: float) -> bool:
        if self.allow_zero and value == 0:
            return True
        is_above_low = value > self.low if self.exclusive_low else value >= self.low
        return is_above_low and (value < self.high if self.exclusive_high else value <= self.high)

    def __str__(self) -> str:
        low = f"{'0 or ' if self.allow_zero else ''}{'more than' if self.exclusive_low else 'at least'} {self.low:g}"
        high = f" and {'less than' if self.exclusive_high else 'at most'} {self.high:g}"
        return low if self.high == math.inf else low + high


AT_LEAST_ONE = Range(1)
NON_NEGATIVE = Range(0)
POSITIVE = Range(0, exclusive_low=True)
FRACTION = Range(0, 1)
POSITIVE_FRACTION = Range(0, 1, exclusive_low=True)
AT_LEAST_MINUS_ONE = Range(-1)
REPETITION_PENALTY_RANGE = Range(0.01, 100)
TEMPERATURE_RANGE = Range(0.01, allow_zero=True)
"""Sampling temperatures: 0 is greedy. Logits divided by less than 0.01 overflow, and vLLM would use 0.01 instead."""


@dataclass(frozen=True)
class KeyMetadata:
    """The metadata of a configuration key, which the checks and the documentation read."""

    range: Range | None = None
    """Accepted numbers; for a list, of each item. None accepts every number of the type."""
    choices: Collection[Any] | None = None
    """Accepted values; for a list, of each item: the names of a table in choices.py, or a tuple. None accepts all."""
    allows_plugins: bool = False
    """True if modules of `trainer.plugins` can register further choices. These are checked after the import."""
    unavailable_reason: str | Mapping[str, str] = ""
    """Reason why values that are not in `choices` are not supported: one sentence for all, or one for each value."""
    typical_range: Range | None = None
    """Typical numbers, in addition to 0. Other numbers are accepted with a warning. None never warns."""
    aliases: tuple[str, ...] = ()
    """Other names of the key: names in the same section, or dotted names from the root. In a dotted name `{name}` is
    replaced with the field's own name."""
    value_aliases: Mapping[Any, Any] = field(default_factory=dict)
    """Other ways to write a value -> the value. `value_parsing.parse_value` accepts further ones for all keys of a
    type."""
    skyrl_default: Any = ...
    """SkyRL's default if it differs from ours. Recipes write their defaults out, so it never causes a warning."""


NO_METADATA = KeyMetadata()
_METADATA = "skyrl_train"
"""Key of the KeyMetadata in the metadata mapping of a dataclass field."""


def config_field(default: Any = MISSING, *, factory: Any = MISSING, **metadata: Any) -> Any:
    """Return a dataclass field with metadata.

    Args:
        default: Default value of the field.
        factory: Function without arguments that returns the default, for mutable defaults.
        **metadata: Fields of KeyMetadata. `aliases` may be one string instead of a tuple.
    """
    if isinstance(metadata.get("aliases"), str):
        metadata["aliases"] = (metadata["aliases"],)
    return dataclasses.field(default=default, default_factory=factory, metadata={_METADATA: KeyMetadata(**metadata)})


def get_metadata(item: dataclasses.Field[Any]) -> KeyMetadata:
    """Return the metadata of a dataclass field, or empty metadata if it was not made by `config_field`."""
    return item.metadata.get(_METADATA, NO_METADATA)
