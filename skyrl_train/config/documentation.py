"""What the dataclasses say of every key, for docs/configuration.md and for `--help`."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import textwrap
from collections.abc import Iterator, Sequence

from skyrl_train.config.keys import Key, aliases, all_keys, canonical, find, nearest
from skyrl_train.config.needs import IGNORED
from skyrl_train.config.problems import show
from skyrl_train.config.schema import Config
from skyrl_train.config.section import Section
from skyrl_train.config.skyrl_keys import skyrl_key
from skyrl_train.errors import ConfigError

SPECIFIC = "COMMAND --help SECTION shows all of a section's keys in full, such as --help trainer.algorithm"


@functools.cache
def field_docs(section: type[Section]) -> dict[str, str]:
    """The string under each field, a subclass's own before its base's."""
    docs: dict[str, str] = {}
    for cls in reversed(section.__mro__):
        if not issubclass(cls, Section) or cls is Section:
            continue
        (tree,) = ast.parse(inspect.getsource(cls)).body
        assert isinstance(tree, ast.ClassDef)
        for field, after in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
                docs[field.target.id] = " ".join(ast.literal_eval(after.value).split())
    return docs


def meaning(key: Key) -> str:
    """What the dataclass says of a key that holds a value."""
    section, _, name = key.name.rpartition(".")
    return field_docs(all_keys()[section].hint if section else Config)[name]


def default_text(key: Key) -> str:
    return key.default if isinstance(key.default, str) and key.default else json.dumps(key.default)


def limits(key: Key) -> Iterator[str]:
    """What a key accepts beyond its type, and whether that has an effect."""
    facts = key.facts
    if key.name in IGNORED:
        yield f"Has no effect here. {IGNORED[key.name]}"
    if isinstance(facts.unavailable, str) and facts.unavailable:
        yield f"In this version only {' or '.join(f'`{show(value)}`' for value in facts.choices or ())}."
    elif facts.choices:
        yield f"One of {', '.join(f'`{show(choice)}`' for choice in facts.choices)}."
        if facts.unavailable:
            yield f"Not available in this version: {', '.join(f'`{choice}`' for choice in facts.unavailable)}."


def sections() -> list[Key]:
    return [key for key in all_keys().values() if key.is_section]


def keys_of(section: str) -> list[Key]:
    """The keys of a section that hold a value, "" for those at the root."""
    every = all_keys().values()
    return [key for key in every if not key.is_section and key.name.rpartition(".")[0] == section]


def help_text(topics: Sequence[str], width: int) -> str:
    """What `--help` prints: all keys, a line each; of the sections and keys that are named, all that is known.

    Raises ConfigError for a name that is no key, with the nearest one.
    """
    if not topics:
        return "\n".join([SPECIFIC, *_all_in_short(width)])
    return "\n".join(line for topic in topics for line in _in_full(topic, width))


def _all_in_short(width: int) -> Iterator[str]:
    for name in ("", *(section.name for section in sections())):
        if not (rows := [key for key in keys_of(name) if key.name not in IGNORED]):
            continue
        about = (inspect.getdoc(all_keys()[name].hint) or "").split("\n")[0] if name else ""
        yield ""
        yield _short(f"{name}: {about}", width) if name else "at the root:"
        left = [f"{key.name.rpartition('.')[2]}={_short(default_text(key), 30)}" for key in rows]
        column = min(46, max(map(len, left)))
        for key, text in zip(rows, left, strict=True):
            choices = f"[{'|'.join(show(choice) for choice in key.facts.choices)}] " if key.facts.choices else ""
            yield _short(f"  {text.ljust(column)}  {choices}{meaning(key)}", width)


def _in_full(topic: str, width: int) -> Iterator[str]:
    key = find(topic)
    if key is None and (entry := skyrl_key(topic)) is not None:
        yield f"{topic}: a key of SkyRL's without a counterpart here. {entry.advice}"
        return
    if key is None:
        close = nearest(topic)
        raise ConfigError(f"--help {topic}: no key or section. {f'Did you mean {close}?' if close else SPECIFIC}")
    if not key.is_section:
        yield from _whole(key, width)
        return
    name = canonical(topic)
    yield from ["", f"{name}: {inspect.getdoc(key.hint) or ''}"]
    for one in keys_of(name):
        yield from _whole(one, width)
    for section in sections():
        if section.name.rpartition(".")[0] == name:
            yield from ["", f"{section.name}: {(inspect.getdoc(section.hint) or '').splitlines()[0]}"]


def _whole(key: Key, width: int) -> Iterator[str]:
    yield ""
    yield f"  {key.name}={default_text(key)}{f'  ({key.facts.range})' if key.facts.range else ''}"
    other = [alias for alias, name in aliases().items() if name == key.name]
    words = [meaning(key), *limits(key), *([f"Other names: {', '.join(other)}."] if other else [])]
    yield from textwrap.wrap(" ".join(words), width, initial_indent="      ", subsequent_indent="      ")


def _short(text: str, width: int) -> str:
    """One line; cut at a word, with an ellipsis."""
    return text if len(text) <= width else text[: width - 1].rsplit(" ", 1)[0] + "…"
