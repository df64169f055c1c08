"""Descriptions of all keys, read from the source of the dataclasses, for the configuration pages and for `--help`."""

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

SECTION_HELP_HINT = "COMMAND --help SECTION describes all keys of a section in full, such as --help trainer.algorithm"


@functools.cache
def field_docs(section: type[Section]) -> dict[str, str]:
    """Return the description of each field of a section: the string below it in the source, on one line.

    A description in a subclass replaces the one in its base class. The result is cached.
    """
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
    """Return the description of a key that holds a value, on one line. Raises KeyError for a section."""
    section, _, name = key.name.rpartition(".")
    return field_docs(all_keys()[section].type_hint if section else Config)[name]


def default_text(key: Key) -> str:
    """Return a key's default as text: strings unchanged, the empty string and all other values as JSON."""
    return key.default if isinstance(key.default, str) and key.default else json.dumps(key.default)


def describe_constraints(key: Key) -> Iterator[str]:
    """Yield sentences about a key: that it has no effect, its choices, and choices that are not supported."""
    metadata = key.metadata
    if key.name in IGNORED_KEYS:
        yield f"This key has no effect. {IGNORED_KEYS[key.name]}"
    if isinstance(metadata.unavailable_reason, str) and metadata.unavailable_reason:
        supported = " or ".join(f"`{format_value(value)}`" for value in metadata.choices or ())
        yield f"Only {supported} is supported."
    elif metadata.choices:
        yield f"One of {', '.join(f'`{format_value(choice)}`' for choice in metadata.choices)}."
        if metadata.unavailable_reason:
            yield f"Not supported: {', '.join(f'`{choice}`' for choice in metadata.unavailable_reason)}."


def sections() -> list[Key]:
    """Return all sections, in the order of the dataclasses. The root is not one of them."""
    return [key for key in all_keys().values() if key.is_section]


def section_keys(section: str) -> list[Key]:
    """Return the keys that lie directly in a section and hold a value. "" is the root."""
    every = all_keys().values()
    return [key for key in every if not key.is_section and key.name.rpartition(".")[0] == section]


def format_help(topics: Sequence[str], width: int) -> str:
    """Return the text that `--help` prints.

    Args:
        topics: Names of sections and keys that are described in full. Without any, all keys are listed, one per line.
        width: Width of the terminal (characters).

    Raises:
        ConfigError: A topic is neither a key nor a section. The message suggests the most similar key.
    """
    if not topics:
        return "\n".join([SECTION_HELP_HINT, *_format_overview(width)])
    return "\n".join(line for topic in topics for line in _format_topic(topic, width))


def _format_overview(width: int) -> Iterator[str]:
    for name in ("", *(section.name for section in sections())):
        if not (rows := [key for key in section_keys(name) if key.name not in IGNORED_KEYS]):
            continue
        summary = (inspect.getdoc(all_keys()[name].type_hint) or "").split("\n")[0] if name else ""
        yield ""
        yield _shorten(f"{name}: {summary}", width) if name else "at the root:"
        assignments = [f"{key.name.rpartition('.')[2]}={_shorten(default_text(key), 30)}" for key in rows]
        column = min(46, max(map(len, assignments)))
        for key, text in zip(rows, assignments, strict=True):
            choices = (
                f"[{'|'.join(format_value(choice) for choice in key.metadata.choices)}] "
                if key.metadata.choices
                else ""
            )
            yield _shorten(f"  {text.ljust(column)}  {choices}{key_description(key)}", width)


def _format_topic(topic: str, width: int) -> Iterator[str]:
    key = find_key(topic)
    if key is None and (entry := find_skyrl_key(topic)) is not None:
        yield f"{topic}: a key of SkyRL without a counterpart in this package. {entry.advice}"
        return
    if key is None:
        close = suggest_key(topic)
        raise ConfigError(
            f"--help {topic}: not a key or section. {f'Did you mean {close}?' if close else SECTION_HELP_HINT}"
        )
    if not key.is_section:
        yield from _format_key(key, width)
        return
    name = canonical_key(topic)
    yield from ["", f"{name}: {inspect.getdoc(key.type_hint) or ''}"]
    for child in section_keys(name):
        yield from _format_key(child, width)
    for section in sections():
        if section.name.rpartition(".")[0] == name:
            yield from ["", f"{section.name}: {(inspect.getdoc(section.type_hint) or '').splitlines()[0]}"]


def _format_key(key: Key, width: int) -> Iterator[str]:
    yield ""
    yield f"  {key.name}={default_text(key)}{f'  ({key.metadata.range})' if key.metadata.range else ''}"
    aliases = [alias for alias, name in key_aliases().items() if name == key.name]
    sentences = [
        key_description(key),
        *describe_constraints(key),
        *([f"Other names: {', '.join(aliases)}."] if aliases else []),
    ]
    yield from textwrap.wrap(" ".join(sentences), width, initial_indent="      ", subsequent_indent="      ")


def _shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1].rsplit(" ", 1)[0] + "…"
