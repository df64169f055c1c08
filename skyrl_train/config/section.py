"""What the configuration is made of: dataclasses that can be frozen, read-only mappings, and facts about keys.

`lr: float = key(1e-6, range=NOT_NEGATIVE)` is all that a new key needs: every check is a loop over all keys that reads
these facts (validate.py, hydra.py), and so is the documentation. A key that has an effect only beside others also has a
row in needs.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields
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


# -- Facts about keys


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`; the ends are in it unless `above` or `below` say otherwise."""

    low: float
    high: float = math.inf
    exclusive_low: bool = False
    exclusive_high: bool = False
    allow_zero: bool = False
    """0 is in it too."""

    def __contains__(self, value: float) -> bool:
        if self.allow_zero and value == 0:
            return True
        left = value > self.low if self.exclusive_low else value >= self.low
        return left and (value < self.high if self.exclusive_high else value <= self.high)

    def __str__(self) -> str:
        left = f"{'0 or ' if self.allow_zero else ''}{'more than' if self.exclusive_low else 'at least'} {self.low:g}"
        right = f" and {'less than' if self.exclusive_high else 'at most'} {self.high:g}"
        return left if self.high == math.inf else left + right


AT_LEAST_ONE = Range(1)
NON_NEGATIVE = Range(0)
POSITIVE = Range(0, exclusive_low=True)
FRACTION = Range(0, 1)
POSITIVE_FRACTION = Range(0, 1, exclusive_low=True)
AT_LEAST_MINUS_ONE = Range(-1)
REPETITION_PENALTY_RANGE = Range(0.01, 100)
TEMPERATURE_RANGE = Range(0.01, allow_zero=True)
"""Of sampling: 0 is greedy. Logits divided by less than 0.01 overflow, and vLLM would use 0.01 instead."""


@dataclass(frozen=True)
class KeyMetadata:
    """The metadata of a field."""

    range: Range | None = None
    """The numbers that are accepted, each item of a list included; None accepts every number of the type."""
    choices: Collection[Any] | None = None
    """The values that are accepted, each item of a list included: names of a table of choices.py, or a tuple."""
    plugins: bool = False
    """Whether modules of `trainer.plugins` can register further choices; those are checked once they are imported."""
    unavailable: str | Mapping[str, str] = ""
    """Why this version refuses values that are not among `choices`: one sentence for all, or one for each name."""
    usual: Range | None = None
    """The numbers that runs have, besides 0; any other is accepted with a warning. None warns about no number."""
    aliases: tuple[str, ...] = ()
    """Other names: of the same section, or dotted ones from the root, in which `{name}` is the field's own name."""
    spellings: Mapping[Any, Any] = field(default_factory=dict)
    """Other ways to write a value, and the value. `convert.read` has those that apply to a whole type."""
    skyrl_default: Any = ...
    """SkyRL's default, where ours is another one: recipes spell theirs out, which says nothing about the run."""


NO_METADATA = KeyMetadata()


def config_field(default: Any = MISSING, *, factory: Any = MISSING, **metadata: Any) -> Any:
    """A dataclass field with Facts. `aliases` may be a single one instead of a tuple."""
    if isinstance(metadata.get("aliases"), str):
        metadata["aliases"] = (metadata["aliases"],)
    return dataclasses.field(default=default, default_factory=factory, metadata={"facts": KeyMetadata(**metadata)})


def get_metadata(item: dataclasses.Field[Any]) -> KeyMetadata:
    """The facts of a field; those of a plain one are empty."""
    return item.metadata.get("facts", NO_METADATA)
