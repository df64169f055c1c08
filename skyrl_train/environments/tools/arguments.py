"""Checks a call's arguments against a tool's JSON schema, whole, in bounded time, with errors that a model can act on.

The schemas of MCP servers are no more to be trusted than what a model writes. Nothing that they refer to is fetched.
Whatever they say, a check ends: each schema that a value is held against looks at the clock first (`_bounded`), what
the library does in between takes about as long as it takes to write the schema and the value, and those of its
keywords that take longer are written here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache, partial
from itertools import islice
from typing import Any, cast

MAX_SCHEMA = 2**18
"""Characters of a schema."""
MAX_TEXT = 1000
"""Characters of a regular expression, and of an identifier, which each one inside is joined with."""
READ_S = 20.0
"""CPU-seconds to read a schema."""
CHECK_S = 2.0
"""CPU-seconds of one check."""
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
    """What takes too long; the message says which part of it does, if it is known."""


class Arguments:
    """The arguments that a tool takes. Raises Unusable for a schema that is none, or that is hostile.

    Args:
        schema: JSON schema of an object: draft 4, 6, 7, 2019-09 or 2020-12, which is the default.
        closed: Whether names that `schema` does not know are refused where it leaves that open.
    """

    def __init__(self, schema: Mapping[str, Any], *, closed: bool = True):
        try:
            text = json.dumps(schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise Unusable(f"it cannot be written as JSON: {error}") from error
        self._validator = _validator(text, closed)

    def wrong(self, arguments: Any) -> str | None:
        """Say what is wrong with a call's arguments, or return None. Raises nothing that a call can cause."""
        from jsonschema.exceptions import best_match

        if not isinstance(arguments, dict):
            return f"arguments must be an object, not {_kind(arguments)}."
        try:
            with _at_most(CHECK_S):
                errors = list(islice(self._validator.iter_errors(_brief(arguments)), MAX_ERRORS))
            outermost = min(errors, key=lambda error: len(error.path), default=None)
            return None if outermost is None else _told(best_match([outermost]))
        except _TooMuch as error:
            limit = f"more than {CHECK_S:g} CPU-seconds{error}"
            return f"the arguments take too long to check ({limit}); give fewer or shorter ones."
        except RecursionError:
            return "the arguments are nested too deeply."
        except Exception as error:  # of the library, for numbers as large as 1e400 and the like
            return f"the arguments cannot be checked: {type(error).__name__}: {str(error)[:SHOWN]}."


# -- schemas ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _validator(text: str, closed: bool) -> Any:
    if len(text) > MAX_SCHEMA:
        raise Unusable(f"it has {len(text)} characters; at most {MAX_SCHEMA} are taken")
    schema = json.loads(text)
    if not isinstance(schema, dict):
        raise Unusable(f"it must be an object, not {_kind(schema)}")
    dialect = _dialect(schema.pop("$schema", None))
    if closed and not NOT_CLOSED & schema.keys():
        schema["additionalProperties"] = False
    try:
        with _at_most(READ_S):
            return _read(schema, dialect)
    except _TooMuch as error:
        limit = f"more than {READ_S:g} CPU-seconds{error}"
        raise Unusable(f"it takes too long to read ({limit}); make it smaller") from error
    except RecursionError as error:
        raise Unusable("it is nested too deeply") from error


def _read(schema: dict[str, Any], dialect: Any) -> Any:
    """The validator of a schema. Raises Unusable, _TooMuch, RecursionError."""
    from referencing import Registry
    from referencing.jsonschema import specification_with

    for error in dialect(dialect.META_SCHEMA).iter_errors(schema):
        place = "/".join(map(str, error.absolute_path))
        raise Unusable(f"it is no JSON schema: at {place[:LISTED] or 'its root'}: {error.message[:LISTED]}")
    specification = specification_with(dialect.META_SCHEMA["$schema"])
    root = specification.create_resource(_brief(schema))
    _prepare(root)
    uri = root.id() or ""
    try:
        # What references may be is gathered once, not by each. This registry fetches nothing.
        resolver = Registry().with_resource(uri, root).crawl().resolver(uri)
    except (AttributeError, TypeError, ValueError, LookupError) as error:
        raise Unusable(f"it has an identifier or another part that cannot be read: {error}") from error
    _look_through(specification, root.contents, resolver)
    return dialect(root.contents, _resolver=resolver)


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


def _prepare(root: Any) -> None:
    """Write dependencies on names as schemas, beside which the library cannot read them. Raises Unusable."""
    waiting = [root]
    while waiting:
        resource = waiting.pop()
        node = resource.contents
        if isinstance(node, dict) and "$schema" in node:
            raise Unusable("a part of it has a $schema of its own")
        if len(resource.id() or "") > MAX_TEXT:
            raise Unusable(f"it has an identifier of {len(resource.id())} characters; at most {MAX_TEXT} are taken")
        if isinstance(node, dict) and isinstance(node.get("dependencies"), dict):
            for name, needed in node["dependencies"].items():
                if isinstance(needed, list):
                    node["dependencies"][name] = {"required": needed}
        waiting.extend(resource.subresources())


def _look_through(specification: Any, schema: dict[str, Any], resolver: Any) -> None:
    """Look up every reference and compile every regular expression of all that serves as a schema. Raises Unusable."""
    waiting, seen = [(schema, resolver)], set()
    while waiting:
        node, resolver = waiting.pop()
        if isinstance(node, bool) or id(node) in seen:
            continue
        seen.add(id(node))
        _left()
        try:
            if "$schema" in node:
                raise Unusable("a part of it has a $schema of its own")
            for pattern in [*node.get("patternProperties", ()), *([node["pattern"]] if "pattern" in node else ())]:
                _compiled(pattern)
            for keyword in ("$ref", "$dynamicRef"):
                if keyword in node:
                    found = _looked_up(keyword, node[keyword], resolver)
                    waiting.append((found.contents, found.resolver))
            for inner in specification.create_resource(node).subresources():
                waiting.append((inner.contents, resolver.in_subresource(inner)))
        except (AttributeError, TypeError, ValueError, LookupError) as error:
            raise Unusable(f"it has {_shown(node)}, which cannot be read as a schema: {error}") from error


def _looked_up(keyword: str, reference: Any, resolver: Any) -> Any:
    """What a reference refers to, as `contents` and their `resolver`. Raises Unusable."""
    from referencing.exceptions import Unresolvable

    if not isinstance(reference, str):
        raise Unusable(f"it has the {keyword} {_shown(reference)}, which is no text")
    shown = repr(str(reference)[:LISTED])
    try:
        found = resolver.lookup(reference)
    except Unresolvable as error:
        raise Unusable(f"it refers to {shown}, which is not in it, and nothing is fetched") from error
    except (AttributeError, TypeError, ValueError, LookupError) as error:
        raise Unusable(f"it refers to {shown}, which cannot be read: {error}") from error
    if not isinstance(found.contents, dict | bool):
        raise Unusable(f"it refers to {shown}, which is no schema: {_shown(found.contents)}")
    return found


# -- bounded work ----------------------------------------------------------------------------------------------------

_until: ContextVar[float] = ContextVar("until")
"""CPU-time of the thread at which what is being done has taken too long."""


@contextmanager
def _at_most(cpu_s: float) -> Iterator[None]:
    token = _until.set(time.thread_time() + cpu_s)
    try:
        yield
    finally:
        _until.reset(token)


def _left() -> float:
    """CPU-seconds that are left. Raises _TooMuch."""
    left = _until.get() - time.thread_time()
    if left <= 0:
        raise _TooMuch
    return left


def _bounded(draft: Any) -> Any:
    """The validator of a draft, with numbers that are finite, which looks at the clock."""
    from jsonschema import validators

    own = {
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "additionalProperties": _additional_properties,
        "uniqueItems": _unique_items,
        "unevaluatedItems": partial(_unevaluated, "unevaluatedItems", list),
        "unevaluatedProperties": partial(_unevaluated, "unevaluatedProperties", dict),
    }
    keywords = {keyword: own.get(keyword, check) for keyword, check in draft.VALIDATORS.items()}
    bounded = validators.extend(draft, keywords, type_checker=draft.TYPE_CHECKER.redefine("number", _is_number))
    descend = bounded.descend

    def timed_descend(validator: Any, *args: Any, **options: Any) -> Any:
        _left()
        return descend(validator, *args, **options)

    def timed_evolve(validator: Any, **changes: Any) -> Any:
        """A validator of the same class, where the library's own would follow a `$schema` out of these bounds."""
        _left()
        return bounded(**{"schema": validator.schema, "_resolver": validator._resolver, **changes})

    bounded.descend, bounded.evolve = timed_descend, timed_evolve
    return bounded


class _Text(str):
    """A text, array or object with a short repr. The library writes whole values into messages, which nobody reads."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "..."


class _Array(list[Any]):
    __slots__ = ()
    __repr__ = _Text.__repr__


class _Object(dict[str, Any]):
    __slots__ = ()
    __repr__ = _Text.__repr__


def _brief(value: Any) -> Any:
    if isinstance(value, str):
        return _Text(value)
    if isinstance(value, list):
        return _Array(map(_brief, value))
    if isinstance(value, dict):
        return _Object((_Text(name), _brief(member)) for name, member in value.items())
    return value


def _is_number(checker: Any, value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> Any:
    """Python's own `re` can be held up for hours by a pattern, and holds up the process; this one has timeouts."""
    import regex

    if len(pattern) > MAX_TEXT:
        raise Unusable(f"it has a regular expression of {len(pattern)} characters; at most {MAX_TEXT} are taken")
    try:
        return regex.compile(str(pattern))
    except (regex.error, OverflowError, RecursionError) as error:
        raise Unusable(f"it has {str(pattern)[:SHOWN]!r}, which is no regular expression: {error}") from error


def _matches(pattern: str, text: str) -> bool:
    """Whether a regular expression is found in a text. Raises _TooMuch."""
    try:
        return _compiled(pattern).search(text, timeout=_left()) is not None
    except TimeoutError as error:
        raise _TooMuch(f", for the regular expression {str(pattern)[:SHOWN]!r}") from error


# -- keywords --------------------------------------------------------------------------------------------------------


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
    from jsonschema.exceptions import ValidationError

    if isinstance(instance, str) and not _matches(pattern, instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: Mapping[str, Any], instance: Any, schema: Any) -> Iterator[Any]:
    for pattern, inner in patterns.items() if isinstance(instance, dict) else ():
        for name, value in instance.items():
            if _matches(pattern, name):
                yield from validator.descend(value, inner, path=name, schema_path=pattern)


def _additional_properties(validator: Any, allowed: Any, instance: Any, schema: Any) -> Iterator[Any]:
    from jsonschema.exceptions import ValidationError

    known, patterns = schema.get("properties", {}), schema.get("patternProperties", ())
    for name, value in instance.items() if isinstance(instance, dict) else ():
        if name in known or any(_matches(pattern, name) for pattern in patterns):
            continue
        if allowed is False:
            yield ValidationError("is unknown", path=[name])
        else:
            yield from validator.descend(value, allowed, path=name)


def _unique_items(validator: Any, unique: bool, instance: Any, schema: Any) -> Iterator[Any]:
    """Unlike the library's own, not pair by pair."""
    from jsonschema.exceptions import ValidationError

    seen = set()
    for item in instance if unique and isinstance(instance, list) else ():
        _left()
        key = _key(item)
        if key in seen:
            yield ValidationError(f"{instance!r} has non-unique elements")
            return
        seen.add(key)


def _key(value: Any) -> Any:
    """What is equal, and has a hash, for values that are equal in JSON: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, list):
        return "array", tuple(map(_key, value))
    if isinstance(value, dict):
        return "object", frozenset((name, _key(member)) for name, member in value.items())
    return isinstance(value, bool), value


def _unevaluated(keyword: str, kind: type, validator: Any, allowed: Any, instance: Any, schema: Any) -> Iterator[Any]:
    """Unlike the library's own, with sets in place of lists of lists, and without Python's `re`."""
    from jsonschema.exceptions import ValidationError

    if isinstance(instance, kind):
        known, others = _known(validator, instance, keyword), validator.evolve(schema=allowed)
        members: Iterable[tuple[Any, Any]] = (
            instance.items() if isinstance(instance, dict) else enumerate(cast("list[Any]", instance))
        )
        if not all(name in known or others.is_valid(value) for name, value in members):
            yield ValidationError(f"{instance!r} has other members")


def _known(validator: Any, instance: Any, asked: str = "") -> set[Any]:
    """The names or indices in an instance of which a schema says something, other than by the keyword that asks."""
    _left()
    if isinstance(validator.schema, bool):
        return set()
    schema = {keyword: value for keyword, value in validator.schema.items() if keyword in validator.VALIDATORS}
    if isinstance(instance, dict):
        rest = {"additionalProperties", "unevaluatedProperties"}
        names, patterns = schema.get("properties", {}), schema.get("patternProperties", ())
        known = {name for name in instance if name in names or any(_matches(pattern, name) for pattern in patterns)}
    else:
        listed = isinstance(schema.get("items"), list)  # in draft 2019-09
        rest = {"additionalItems" if listed else "items", "unevaluatedItems"}
        known = set(range(len(schema.get("items" if listed else "prefixItems", ()))))
        if "contains" in schema:
            contained = validator.evolve(schema=schema["contains"])
            known |= {index for index, item in enumerate(instance) if contained.is_valid(item)}
    if schema.keys() & rest - {asked}:
        return set(instance if isinstance(instance, dict) else range(len(instance)))
    return known.union(*(_known(inner, instance) for inner in _applied(validator, schema, instance)))


def _applied(validator: Any, schema: dict[str, Any], instance: Any) -> Iterator[Any]:
    """The validators of the schemas in a schema, or that it refers to, that hold for the same instance."""
    from referencing.jsonschema import lookup_recursive_ref

    found = [validator._resolver.lookup(schema[keyword]) for keyword in ("$ref", "$dynamicRef") if keyword in schema]
    if "$recursiveRef" in schema:
        found.append(lookup_recursive_ref(validator._resolver))
    for resolved in found:
        yield validator.evolve(schema=resolved.contents, _resolver=resolved.resolver)
    inners = [inner for keyword in ("allOf", "anyOf", "oneOf") for inner in schema.get(keyword, ())]
    if isinstance(instance, dict):
        inners += [inner for name, inner in schema.get("dependentSchemas", {}).items() if name in instance]
    if "if" in schema:
        branch = "then" if validator.evolve(schema=schema["if"]).is_valid(instance) else "else"
        inners += [schema["if"], validator.schema.get(branch, True)]
    yield from filter(lambda inner: inner.is_valid(instance), (validator.evolve(schema=inner) for inner in inners))


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
    names = (name for kind, name in kinds.items() if isinstance(value, kind))
    return "null" if value is None else next(names, type(value).__name__)


def _shown(value: Any, limit: int = SHOWN) -> str:
    return _short(json.dumps(value, ensure_ascii=False), limit)


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
