"""Checks a call's arguments against a tool's JSON schema, whole, in bounded time, with errors that a model can act on.

The schemas of MCP servers are no more to be trusted than what a model writes: nothing that they refer to is fetched,
and neither their references nor their regular expressions can keep a check busy.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import cache, lru_cache
from itertools import islice
from typing import Any
from urllib.parse import unquote

MAX_SCHEMA = 2**18
"""Characters of a schema."""
MAX_PATTERN = 1000
"""Characters of a regular expression."""
MAX_STEPS = 200_000
"""Keywords that one check looks at: about a second."""
MAX_COMPARED = 2_000_000
"""Values that are compared with each other while a schema is read: about a second."""
MATCH_S = 1.0
"""Time that all regular expressions of one check have together."""
MAX_ERRORS = 100
"""Errors of one check among which the most telling one is looked for."""
SHOWN = 60
"""Characters of a value that a message shows."""
LISTED = 300
"""Characters of all that is allowed."""
NOT_CLOSED = frozenset({"additionalProperties", "unevaluatedProperties", "patternProperties", "dependentSchemas"}) | {
    *("allOf", "anyOf", "oneOf", "if", "$ref", "$dynamicRef")
}
"""With one of these a schema says itself, or elsewhere, which other names there may be."""
NO_SCHEMAS = frozenset({"const", "default", "enum", "examples"})
"""Keywords of values."""
NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "dependentSchemas", "dependencies"}) | {
    *("$defs", "definitions")
}
"""Keywords of schemas under names that are free."""
PHRASES = {
    "const": "must be {}",
    "minimum": "must be at least {}",
    "maximum": "must be at most {}",
    "exclusiveMinimum": "must be more than {}",
    "exclusiveMaximum": "must be less than {}",
    "multipleOf": "must be a multiple of {}",
    "minLength": "must have at least {} characters",
    "maxLength": "must have at most {} characters",
    "pattern": "must match the regular expression {}",
    "minItems": "must have at least {} items",
    "maxItems": "must have at most {} items",
    "uniqueItems": "must not hold an item twice",
    "items": "must be shorter",
    "additionalItems": "must be shorter",
    "unevaluatedItems": "must not hold items of other kinds",
    "unevaluatedProperties": "must not have other members",
    "minProperties": "must have at least {} members",
    "maxProperties": "must have at most {} members",
    "anyOf": "must fit one of {}",
    "oneOf": "must fit exactly one of {}",
    "not": "must not fit {}",
    "contains": "must hold an item that fits {}",
}


class Unusable(Exception):
    """A schema that arguments cannot be checked with; the message says why."""


class _TooMuch(Exception):
    """A check that takes too long."""


class Arguments:
    """The arguments that a tool takes. Raises Unusable for a schema that is none, or that is hostile.

    Args:
        schema: JSON schema of an object: draft 4, 6, 7, 2019-09 or 2020-12, which is the default.
        closed: Whether names that `schema` does not know are refused where it leaves that open.
    """

    def __init__(self, schema: Mapping[str, Any], *, closed: bool = True):
        try:
            self._validator = _validator(json.dumps(schema), closed)
        except (TypeError, ValueError, RecursionError) as error:
            raise Unusable(f"it cannot be written as JSON: {error}") from error

    def wrong(self, arguments: Any) -> str | None:
        """Say what is wrong with a call's arguments, or return None. Raises nothing that a call can cause."""
        from jsonschema.exceptions import best_match

        if not isinstance(arguments, dict):
            return f"arguments must be an object, not {_kind(arguments)}."
        work = _work.set(_Work())
        try:
            errors = list(islice(self._validator.iter_errors(arguments), MAX_ERRORS))
            outermost = min(errors, key=lambda error: len(error.path), default=None)
            return None if outermost is None else _told(best_match([outermost]))
        except _TooMuch as error:
            return f"the arguments take too long to check ({error}); give fewer or shorter ones."
        except RecursionError:
            return "the arguments are nested too deeply."
        except Exception as error:  # of the library, for numbers as large as 1e400 and the like
            return f"the arguments cannot be checked: {type(error).__name__}: {str(error)[:SHOWN]}."
        finally:
            _work.reset(work)


# -- schemas ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _validator(text: str, closed: bool) -> Any:
    from jsonschema.exceptions import SchemaError
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    if len(text) > MAX_SCHEMA:
        raise Unusable(f"it has {len(text)} characters; at most {MAX_SCHEMA} are taken")
    schema = json.loads(text)
    if not isinstance(schema, dict):
        raise Unusable(f"it must be an object, not {_kind(schema)}")
    dialect = _dialect(schema.pop("$schema", None))
    if closed and not NOT_CLOSED & schema.keys():
        schema["additionalProperties"] = False
    try:
        _refuse_long(schema)
        dialect.check_schema(schema, format_checker=None)
        _refuse_unbounded(schema)
        root, resolver = _rooted(schema, dialect.META_SCHEMA["$schema"])
        _resolve_all(root, resolver)
        # Without a registry of its own a validator would fetch what a schema refers to.
        validator = dialect(schema, registry=Registry(), _resolver=resolver)
    except SchemaError as error:
        place = "/".join(map(str, error.absolute_path))
        raise Unusable(f"it is no JSON schema: at {place[:LISTED] or 'its root'}: {error.message[:LISTED]}") from error
    except Unresolvable as error:
        raise Unusable(f"it refers to {error.ref[:LISTED]!r}, which is not in it, and nothing is fetched") from error
    except RecursionError as error:
        raise Unusable("it is nested too deeply") from error
    return validator


@cache
def _dialects() -> dict[str, Any]:
    import jsonschema

    drafts = (
        jsonschema.Draft4Validator,
        jsonschema.Draft6Validator,
        jsonschema.Draft7Validator,
        jsonschema.Draft201909Validator,
        jsonschema.Draft202012Validator,
    )
    return {draft.META_SCHEMA["$schema"].rstrip("#"): _bounded(draft) for draft in drafts}


def _dialect(name: Any) -> Any:
    known = _dialects()
    if name is None:
        return list(known.values())[-1]
    if not isinstance(name, str) or name.rstrip("#") not in known:
        raise Unusable(f"$schema={_shown(name)} is none of {', '.join(known)}")
    return known[name.rstrip("#")]


def _bounded(draft: Any) -> Any:
    """The validator of a draft, with numbers that are finite, and with every keyword counted as work."""
    from jsonschema import validators

    own = {
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "additionalProperties": _additional_properties,
    }
    counted = {keyword: _counted(keyword, check) for keyword, check in {**draft.VALIDATORS, **own}.items()}
    types = draft.TYPE_CHECKER.redefine("number", _is_number).redefine("boolean", _is_boolean)
    return validators.extend(draft, counted, type_checker=types)


def _refuse_long(schema: Any) -> None:
    """Raise Unusable for lists that take the meta-schema long to find the same value in twice: pair by pair."""
    left = MAX_COMPARED

    def values(value: Any) -> int:
        nonlocal left
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        found = 1 + sum(map(values, inner))
        if isinstance(value, list) and not _sortable(value):
            left -= len(value) * found
            if left < 0:
                raise Unusable(f"it has a list of {len(value)} values of several kinds, or many such lists")
        return found

    values(schema)


def _sortable(values: list[Any]) -> bool:
    kinds = set(map(type, values))
    return kinds <= {int, float} or kinds == {str}


def _refuse_unbounded(schema: Any) -> None:
    """Raise Unusable for what the library would do by itself, without the bounds of `_bounded`."""
    nodes = list(_schemas(schema, everything=any(map(_may_be_none, _references(schema)))))
    if any(isinstance(node.get("$schema"), str) for node in nodes):
        raise Unusable("a part of it has a $schema of its own")
    if any("patternProperties" in node for node in nodes) and any("unevaluatedProperties" in node for node in nodes):
        raise Unusable("it has both patternProperties and unevaluatedProperties")


def _schemas(value: Any, everything: bool) -> Iterator[dict[str, Any]]:
    """The schema and those in it, also under names that no draft knows; or every object in it."""
    if isinstance(value, list):
        for item in value:
            yield from _schemas(item, everything)
    if not isinstance(value, dict):
        return
    yield value
    for keyword, inner in value.items():
        if not everything and keyword in NO_SCHEMAS:
            continue
        named = not everything and keyword in NAMED_SCHEMAS and isinstance(inner, dict)
        for item in inner.values() if named else [inner]:
            yield from _schemas(item, everything)


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (value[keyword] for keyword in ("$ref", "$dynamicRef") if isinstance(value.get(keyword), str))
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _references(item)


def _may_be_none(reference: str) -> bool:
    """Whether it may make a schema of what is none where it stands."""
    path = unquote(reference).split("/")
    return not NO_SCHEMAS.isdisjoint(path) or path[-1] in NAMED_SCHEMAS


def _rooted(schema: Any, dialect: str) -> tuple[Any, Any]:
    """A schema as a resource, and the resolver of its references; what they may be is gathered once, not by each."""
    from referencing import Registry, Specification
    from referencing.jsonschema import specification_with

    root = specification_with(dialect, default=Specification.OPAQUE).create_resource(schema)
    uri = root.id() or ""
    return root, Registry().with_resource(uri, root).crawl().resolver(uri)


def _resolve_all(root: Any, resolver: Any) -> None:
    """Look up every reference and compile every regular expression. Raises Unresolvable, Unusable."""
    waiting = [(root, resolver)]
    while waiting:
        resource, resolver = waiting.pop()
        node = resource.contents
        if isinstance(node, dict):
            for keyword in ("$ref", "$dynamicRef"):
                if keyword in node and not isinstance(node[keyword], str):
                    raise Unusable(f"it has the {keyword} {_shown(node[keyword])}, which is no text")
                if keyword in node:
                    resolver.lookup(node[keyword])
            patterns = [*node.get("patternProperties", ()), *([node["pattern"]] if "pattern" in node else ())]
            for pattern in patterns:
                _compiled(pattern)
        for inner in resource.subresources():
            waiting.append((inner, resolver.in_subresource(inner)))


# -- bounded work ----------------------------------------------------------------------------------------------------


class _Work:
    """What is left of the steps and of the time for regular expressions of one check."""

    def __init__(self) -> None:
        self.steps = MAX_STEPS
        self.match_s = MATCH_S

    def spend(self, steps: int) -> None:
        self.steps -= steps
        if self.steps < 0:
            raise _TooMuch(f"more than {MAX_STEPS} steps")

    def matches(self, pattern: str, text: str) -> bool:
        """Whether a regular expression is found in a text. Raises _TooMuch."""
        begun = time.monotonic()
        try:
            return _compiled(pattern).search(text, timeout=max(self.match_s, 1e-3)) is not None
        except TimeoutError as error:
            raise _TooMuch(f"the regular expression {pattern[:SHOWN]!r}") from error
        finally:
            self.match_s -= time.monotonic() - begun


_work: ContextVar[_Work] = ContextVar("work")


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> Any:
    """Python's own `re` can be held up for hours by a pattern, and holds up the process; this one has timeouts."""
    import regex

    if len(pattern) > MAX_PATTERN:
        raise Unusable(f"it has a regular expression of {len(pattern)} characters; at most {MAX_PATTERN} are taken")
    try:
        return regex.compile(pattern)
    except (regex.error, OverflowError, RecursionError) as error:
        raise Unusable(f"it has {pattern[:SHOWN]!r}, which is no regular expression: {error}") from error


def _counted(keyword: str, check: Callable[..., Any]) -> Callable[..., Any]:
    def counted(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        size = len(value) if isinstance(value, list | dict) else 0
        if keyword == "uniqueItems" and value and isinstance(instance, list):
            size = 0 if _sortable(instance) else len(instance) ** 2  # compared pair by pair
        _work.get().spend(1 + size // 16)
        return check(validator, value, instance, schema)

    return counted


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
    from jsonschema.exceptions import ValidationError

    if isinstance(instance, str) and not _work.get().matches(pattern, instance):
        yield ValidationError("does not match")


def _pattern_properties(validator: Any, patterns: Mapping[str, Any], instance: Any, schema: Any) -> Iterator[Any]:
    for pattern, inner in patterns.items() if isinstance(instance, dict) else ():
        for name, value in instance.items():
            if _work.get().matches(pattern, name):
                yield from validator.descend(value, inner, path=name, schema_path=pattern)


def _additional_properties(validator: Any, allowed: Any, instance: Any, schema: Any) -> Iterator[Any]:
    from jsonschema.exceptions import ValidationError

    known, patterns = schema.get("properties", {}), schema.get("patternProperties", ())
    for name, value in instance.items() if isinstance(instance, dict) else ():
        if name in known or any(_work.get().matches(pattern, name) for pattern in patterns):
            continue
        if allowed is False:
            yield ValidationError("is unknown", path=[name])
        else:
            yield from validator.descend(value, allowed, path=name)


def _is_number(checker: Any, value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def _is_boolean(checker: Any, value: Any) -> bool:
    """Counted: what the library looks for unevaluated members with asks this of each schema, and of no keyword."""
    _work.get().spend(1)
    return isinstance(value, bool)


# -- messages --------------------------------------------------------------------------------------------------------


def _told(error: Any) -> str:
    """A ValidationError as a sentence: which argument, what is allowed, what was given."""
    place, keyword, value, given = _place(error.absolute_path), error.validator, error.validator_value, error.instance
    subject = f"the argument {place!r}" if place else "the arguments"
    if keyword == "required":
        missing = next(name for name in value if name not in given)
        return f"the argument {_place([*error.absolute_path, missing])!r} is missing."
    if keyword == "additionalProperties":
        known = ", ".join(error.schema.get("properties", {})) or "none"
        return f"there is no argument {place!r}; there are: {_short(known, LISTED)}."
    if keyword in ("anyOf", "oneOf") and error.context:
        keyword, value = _alternatives(error)
    if keyword == "type":
        kinds = " or ".join(value if isinstance(value, list) else [str(value)])
        return f"{subject} must be of type {kinds}, not {_kind(given)}: {_shown(given)}."
    if keyword == "enum":
        return f"{subject} must be one of {_shown(value, LISTED)}, not {_shown(given)}."
    if keyword is None:  # the schema `false`, of which the library does not say where it is
        return f"{subject} must leave out what has the value {_shown(given)}."
    phrase = PHRASES.get(keyword, f"does not fit {keyword}={{}}").format(_shown(value, LISTED))
    return f"{subject} {phrase}, not {_shown(given)}."


def _alternatives(error: Any) -> tuple[str, Any]:
    """The keyword and value that say the same as alternatives that are all types, or all values."""
    direct = not any(inner.path for inner in error.context)
    keywords = {inner.validator for inner in error.context}
    values = [inner.validator_value for inner in error.context]
    if direct and keywords == {"type"}:
        return "type", [kind for value in values for kind in (value if isinstance(value, list) else [value])]
    if direct and keywords <= {"const", "enum"}:
        return "enum", [
            one
            for inner, value in zip(error.context, values, strict=True)
            for one in (value if inner.validator == "enum" else [value])
        ]
    return error.validator, error.validator_value


def _place(path: Iterable[str | int]) -> str:
    """["filters", 0, "field"] -> filters[0].field; the middle of a long one is left out."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{_short(part, 100)}" for part in path]
    text = "".join(parts).removeprefix(".")
    return text if len(text) <= 200 else f"{text[:100]}...{text[-97:]}"


def _kind(value: Any) -> str:
    """The name of a value's type in JSON."""
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return "null" if value is None else kinds.get(type(value), type(value).__name__)


def _shown(value: Any, limit: int = SHOWN) -> str:
    return _short(json.dumps(value, ensure_ascii=False), limit)


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
