"""What the dataclasses say of every key, for docs/configuration.md and for `--help`."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import textwrap
from collections.abc import Iterator, Sequence

from skyrl_train.config.keys import Key, all_keys, canonical_key, find_key, key_aliases, suggest_key
from skyrl_train.config.problems import format_value
from skyrl_train.config.sanity_warnings import IGNORED_KEYS
from skyrl_train.config.schema import Config
from skyrl_train.config.section import Section
from skyrl_train.config.skyrl_keys import find_skyrl_key
from skyrl_train.errors import ConfigError

SECTION_HELP_HINT = "COMMAND --help SECTION shows all of a section's keys in full, such as --help trainer.algorithm"


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


def key_description(key: Key) -> str:
    """What the dataclass says of a key that holds a value."""
    section, _, name = key.name.rpartition(".")
    return field_docs(all_keys()[section].type_hint if section else Config)[name]


def default_text(key: Key) -> str:
    return key.default if isinstance(key.default, str) and key.default else json.dumps(key.default)


def describe_constraints(key: Key) -> Iterator[str]:
    """What a key accepts beyond its type, and whether that has an effect."""
    metadata = key.metadata
    if key.name in IGNORED_KEYS:
        yield f"Has no effect here. {IGNORED_KEYS[key.name]}"
    if isinstance(metadata.unavailable, str) and metadata.unavailable:
        yield f"In this version only {' or '.join(f'`{format_value(value)}`' for value in metadata.choices or ())}."
    elif metadata.choices:
        yield f"One of {', '.join(f'`{format_value(choice)}`' for choice in metadata.choices)}."
        if metadata.unavailable:
            yield f"Not available in this version: {', '.join(f'`{choice}`' for choice in metadata.unavailable)}."


def sections() -> list[Key]:
    return [key for key in all_keys().values() if key.is_section]


def section_keys(section: str) -> list[Key]:
    """The keys of a section that hold a value, "" for those at the root."""
    every = all_keys().values()
    return [key for key in every if not key.is_section and key.name.rpartition(".")[0] == section]


def format_help(topics: Sequence[str], width: int) -> str:
    """What `--help` prints: all keys, a line each; of the sections and keys that are named, all that is known.

    Raises ConfigError for a name that is no key, with the nearest one.
    """
    if not topics:
        return "\n".join([SECTION_HELP_HINT, *_format_overview(width)])
    return "\n".join(line for topic in topics for line in _format_topic(topic, width))


def _format_overview(width: int) -> Iterator[str]:
    for name in ("", *(section.name for section in sections())):
        if not (rows := [key for key in section_keys(name) if key.name not in IGNORED_KEYS]):
            continue
        about = (inspect.getdoc(all_keys()[name].type_hint) or "").split("\n")[0] if name else ""
        yield ""
        yield _shorten(f"{name}: {about}", width) if name else "at the root:"
        left = [f"{key.name.rpartition('.')[2]}={_shorten(default_text(key), 30)}" for key in rows]
        column = min(46, max(map(len, left)))
        for key, text in zip(rows, left, strict=True):
            choices = (
                f"[{'|'.join(format_value(choice) for choice in key.metadata.choices)}] "
                if key.metadata.choices
                else ""
            )
            yield _shorten(f"  {text.ljust(column)}  {choices}{key_description(key)}", width)


def _format_topic(topic: str, width: int) -> Iterator[str]:
    key = find_key(topic)
    if key is None and (entry := find_skyrl_key(topic)) is not None:
        yield f"{topic}: a key of SkyRL's without a counterpart here. {entry.advice}"
        return
    if key is None:
        close = suggest_key(topic)
        raise ConfigError(
            f"--help {topic}: no key or section. {f'Did you mean {close}?' if close else SECTION_HELP_HINT}"
        )
    if not key.is_section:
        yield from _format_key(key, width)
        return
    name = canonical_key(topic)
    yield from ["", f"{name}: {inspect.getdoc(key.type_hint) or ''}"]
    for one in section_keys(name):
        yield from _format_key(one, width)
    for section in sections():
        if section.name.rpartition(".")[0] == name:
            yield from ["", f"{section.name}: {(inspect.getdoc(section.type_hint) or '').splitlines()[0]}"]


def _format_key(key: Key, width: int) -> Iterator[str]:
    yield ""
    yield f"  {key.name}={default_text(key)}{f'  ({key.metadata.range})' if key.metadata.range else ''}"
    other = [alias for alias, name in key_aliases().items() if name == key.name]
    words = [
        key_description(key),
        *describe_constraints(key),
        *([f"Other names: {', '.join(other)}."] if other else []),
    ]
    yield from textwrap.wrap(" ".join(words), width, initial_indent="      ", subsequent_indent="      ")


def _shorten(text: str, width: int) -> str:
    """One line; cut at a word, with an ellipsis."""
    return text if len(text) <= width else text[: width - 1].rsplit(" ", 1)[0] + "…"
