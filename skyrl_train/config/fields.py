"""What a field of the configuration says about its key, besides name, type, default and docstring.

`lr: float = key(1e-6, range=NOT_NEGATIVE)` is all that a new key needs: every check is a loop over all keys that reads
these facts (validate.py, inert.py, hydra.py), and so is the documentation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, field
from typing import TYPE_CHECKING, Any

from skyrl_train.config.ranges import Range

if TYPE_CHECKING:
    from skyrl_train.config.schema import Config


@dataclass(frozen=True)
class Needs:
    """A key has an effect only while `holds` is true of the configuration; `advice` is said if it is set anyway."""

    holds: Callable[[Config], bool]
    advice: str


@dataclass(frozen=True)
class Facts:
    """The metadata of a field. Those of a section can have `needs` alone, which everything below it shares."""

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
    needs: tuple[Needs, ...] = ()
    """What must hold for the key to have an effect; of those that do not, the first one is reported."""
    aliases: tuple[str, ...] = ()
    """Other names: of the same section, or dotted ones from the root, in which `{name}` is the field's own name."""
    spellings: Mapping[Any, Any] = field(default_factory=dict)
    """Other ways to write a value, and the value. `convert.read` has those that apply to a whole type."""
    skyrl_default: Any = ...
    """SkyRL's default, where ours is another one: recipes spell theirs out, which says nothing about the run."""


NO_FACTS = Facts()


def key(default: Any = MISSING, *, factory: Any = MISSING, **facts: Any) -> Any:
    """A dataclass field with Facts. `needs` and `aliases` may be a single one instead of a tuple."""
    for name in ("needs", "aliases"):
        if not isinstance(facts.get(name, ()), tuple):
            facts[name] = (facts[name],)
    return dataclasses.field(default=default, default_factory=factory, metadata={"facts": Facts(**facts)})


def facts_of(item: dataclasses.Field[Any]) -> Facts:
    """The facts of a field; those of a plain one are empty."""
    return item.metadata.get("facts", NO_FACTS)
