"""Validation of a tool call's arguments against the tool's JSON schema, with a description of a mistake for the model.

A model writes the arguments, so every check has a limit of CPU time, which includes its regular expressions. Even an
ordinary recursive schema with `anyOf` can take time that is exponential in the nesting of the arguments.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import cache, lru_cache
from typing import Any

MAX_CHECK_CPU_S = 2.0
"""Maximum CPU-seconds of one check."""
MAX_VALUE_CHARS = 60
"""Maximum characters of a value in a message."""
MAX_LIST_CHARS = 300
"""Maximum characters of a list of allowed values in a message, and of the library's own message."""
OPEN_KEYWORDS = frozenset(
    {"additionalProperties", "unevaluatedProperties", "patternProperties", "dependentSchemas"}
) | {*("allOf", "anyOf", "oneOf", "if", "$ref", "$dynamicRef")}
"""Keywords with which a schema itself, or a schema that it includes, decides about further argument names."""
KEYWORD_MESSAGES = {
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
    "minProperties": "must have at least {} members",
    "maxProperties": "must have at most {} members",
    "anyOf": "must fit one of {}",
    "oneOf": "must fit exactly one of {}",
    "uniqueItems": "must not contain an item twice",
}
"""Requirement of each keyword in words. For other keywords, the library's own message is used."""


class SchemaError(Exception):
    """An error in a JSON schema that makes it unusable; the message says why."""


class ArgumentValidator:
    """A validator of the arguments of a tool.

    Args:
        schema: JSON schema of an object: draft 4, 6, 7, 2019-09 or 2020-12, which is the default.
        reject_unknown: True to reject arguments that the schema does not name, unless the schema itself decides about
            them with one of `OPEN_KEYWORDS`.

    Raises:
        SchemaError: The schema is invalid or refers to another document.
    """

    def __init__(self, schema: Mapping[str, Any], *, reject_unknown: bool = True):
        try:
            text = json.dumps(schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise SchemaError(f"it cannot be written as JSON: {error}") from error
        self._validator = _validator(text, reject_unknown)

    def find_problem(self, arguments: Any) -> str | None:
        """Return a sentence about the most relevant mistake, or None if the arguments match the schema.

        It never raises, whatever the arguments are. Arguments that take more than `MAX_CHECK_CPU_S` CPU-seconds to
        check, or are nested too deeply, count as a mistake.
        """
        from jsonschema.exceptions import best_match

        if not isinstance(arguments, dict):
            return f"arguments must be an object, not {_kind(arguments)}."
        token = _deadline.set(time.thread_time() + MAX_CHECK_CPU_S)
        try:
            error = best_match(self._validator.iter_errors(arguments))
            return None if error is None else _message(error)
        except TimeoutError:
            limit = f"more than {MAX_CHECK_CPU_S:g} CPU-seconds"
            return f"the arguments take too long to check ({limit}); give fewer or shorter ones."
        except RecursionError:
            return "the arguments are nested too deeply."
        except Exception as error:  # the library raises errors of many classes for numbers such as 1e400
            return f"the arguments cannot be checked: {type(error).__name__}: {str(error)[:MAX_VALUE_CHARS]}."
        finally:
            _deadline.reset(token)


# -- schemas ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _validator(text: str, reject_unknown: bool) -> Any:
    from referencing import Registry

    schema = json.loads(text)
    if not isinstance(schema, dict):
        raise SchemaError(f"it must be an object, not {_kind(schema)}")
    validator_class = _validator_class(schema.pop("$schema", "https://json-schema.org/draft/2020-12/schema"))
    for mistake in validator_class(validator_class.META_SCHEMA).iter_errors(schema):
        place = "/".join(map(str, mistake.absolute_path))[:MAX_LIST_CHARS] or "its root"
        raise SchemaError(f"it is not a valid JSON schema: at {place}: {mistake.message[:MAX_LIST_CHARS]}")
    if reject_unknown and not OPEN_KEYWORDS & schema.keys():
        schema["additionalProperties"] = False
    _check_parts(schema, validator_class.META_SCHEMA["$schema"])
    # The default registry would fetch the documents that a schema refers to.
    return validator_class(schema, registry=Registry())


def _check_parts(schema: dict[str, Any], dialect: str) -> None:
    """Raise SchemaError for a reference that cannot be resolved and for an invalid regular expression."""
    import regex
    from referencing import Registry
    from referencing.jsonschema import specification_with

    specification = specification_with(dialect)
    _prepare(schema, specification)
    waiting: list[Any] = [(schema, Registry().resolver_with_root(specification.create_resource(schema)))]
    while waiting:
        node, resolver = waiting.pop()
        if isinstance(node, bool):
            continue
        try:
            for pattern in [*node.get("patternProperties", ()), *([node["pattern"]] if "pattern" in node else ())]:
                regex.compile(pattern)
        except regex.error as error:
            raise SchemaError(
                f"it has {error.pattern!r:.{MAX_LIST_CHARS}}, which is not a valid regular expression: {error}"
            ) from error
        for keyword in {"$ref", "$dynamicRef"} & node.keys():
            _check_reference(node[keyword], resolver)
        for inner in specification.create_resource(node).subresources():
            waiting.append((inner.contents, resolver.in_subresource(inner)))


def _prepare(schema: dict[str, Any], specification: Any) -> None:
    """Rewrite, in place, the parts of a schema that the libraries would otherwise not handle correctly."""
    parts: list[Any] = [schema]
    for node in parts:  # the loop appends to `parts`
        if isinstance(node, bool):
            continue
        # With "$schema", the library would check this part without the keywords of `_validator_class`.
        node.pop("$schema", None)
        # This keyword has no timeouts, so it must come after _pattern_properties, which has them.
        if "unevaluatedProperties" in node:
            node["unevaluatedProperties"] = node.pop("unevaluatedProperties")
        for name, dependency in node.get("dependencies", {}).items():
            # `referencing` treats all dependencies as schemas if the first one is a schema.
            if isinstance(dependency, list):
                node["dependencies"][name] = {"required": dependency}
        parts.extend(specification.subresources_of(node))


def _check_reference(reference: Any, resolver: Any) -> None:
    from referencing.exceptions import Unresolvable

    try:
        target = resolver.lookup(reference).contents
    except Unresolvable as error:
        raise SchemaError(
            f"it refers to {error.ref!r:.{MAX_LIST_CHARS}}, which is not in it, and other documents are not fetched"
        ) from error
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise SchemaError(f"it refers to {_shown(reference)}, which cannot be read: {error}") from error
    if not isinstance(target, dict | bool):
        raise SchemaError(f"it refers to {_shown(reference)}, which is not a schema but {_shown(target)}")


# -- bounded validation ----------------------------------------------------------------------------------------------

_deadline: ContextVar[float] = ContextVar("deadline", default=1e9)
"""CPU time of this thread at which the current check of arguments must end. Checks of schemas have no deadline."""


@cache
def _validator_class(dialect: Any) -> Any:
    """Return the draft's validator class, extended to require finite numbers and to respect the deadline."""
    from jsonschema import validators

    draft: Any = validators.validator_for({"$schema": dialect}, default=None)
    if draft is None:
        raise SchemaError(
            f"$schema={_shown(dialect)} is not supported; use draft-04, 06, 07, 2019-09 or 2020-12 of json-schema.org"
        )
    bounded = {
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "additionalProperties": _additional_properties,
        "uniqueItems": _unique_items,
    }
    keywords = {name: _with_deadline(bounded.get(name, check)) for name, check in draft.VALIDATORS.items()}
    return validators.extend(draft, keywords, type_checker=draft.TYPE_CHECKER.redefine("number", _is_finite))


def _with_deadline(check: Callable[..., Any]) -> Callable[..., Any]:
    def keyword(*args: Any) -> Any:
        _remaining_s()
        return check(*args)

    return keyword


def _remaining_s() -> float:
    remaining = _deadline.get() - time.thread_time()
    if remaining <= 0:
        raise TimeoutError
    return remaining


def _is_finite(checker: Any, value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def _matches(pattern: str, text: str) -> bool:
    import regex

    return regex.search(pattern, text, timeout=_remaining_s()) is not None


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
    from jsonschema.exceptions import ValidationError

    if isinstance(instance, str) and not _matches(pattern, instance):
        yield ValidationError("does not match")


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
    """Compare items by hash, because the library compares objects pair by pair, in quadratic time."""
    from jsonschema.exceptions import ValidationError

    seen = set()
    for item in instance if unique and isinstance(instance, list) else ():
        _remaining_s()
        key = _hashable(item)
        if key in seen:
            yield ValidationError("has non-unique elements")
            return
        seen.add(key)


def _hashable(value: Any) -> Any:
    """Return a key that is equal for values that are equal in JSON: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, list):
        return "array", tuple(map(_hashable, value))
    if isinstance(value, dict):
        return "object", frozenset((name, _hashable(member)) for name, member in value.items())
    return isinstance(value, bool), value


# -- messages --------------------------------------------------------------------------------------------------------


def _message(error: Any) -> str:
    """Return a sentence that names the argument, the allowed values, and the actual value."""
    place, keyword, value, instance = (
        _place(error.absolute_path),
        error.validator,
        error.validator_value,
        error.instance,
    )
    subject = f"the argument {place!r}" if place else "the arguments"
    if keyword == "required":
        missing = next(name for name in value if name not in instance)
        return f"the argument {_place([*error.absolute_path, missing])!r} is missing."
    if keyword == "additionalProperties":
        known = ", ".join(error.schema.get("properties", {})) or "none"
        return f"there is no argument {place!r}; there are: {_short(known, MAX_LIST_CHARS)}."
    if keyword in ("anyOf", "oneOf"):
        keyword, value = _alternatives(error)
    if keyword == "type":
        kinds = " or ".join(value if isinstance(value, list) else [str(value)])
        return f"{subject} must be of type {kinds}, not {_kind(instance)}: {_shown(instance)}."
    if keyword == "enum":
        return f"{subject} must be one of {_shown(value, MAX_LIST_CHARS)}, not {_shown(instance)}."
    if keyword in KEYWORD_MESSAGES:
        return f"{subject} {KEYWORD_MESSAGES[keyword].format(_shown(value, MAX_LIST_CHARS))}, not {_shown(instance)}."
    return f"{subject} cannot be accepted: {_without_middle(error.message, MAX_LIST_CHARS)}."


def _alternatives(error: Any) -> tuple[str, Any]:
    """Return one `type` or `enum` for alternatives that are all types or all values, else the error's own keyword."""
    keywords = {inner.validator for inner in error.context}
    if keywords and not any(inner.path for inner in error.context):
        for keyword, covered in (("type", {"type"}), ("enum", {"const", "enum"})):
            if keywords <= covered:
                lists = [
                    inner.validator_value
                    if inner.validator != "const" and isinstance(inner.validator_value, list)
                    else [inner.validator_value]
                    for inner in error.context
                ]
                return keyword, [value for values in lists for value in values]
    return error.validator, error.validator_value


def _place(path: Iterable[str | int]) -> str:
    """Return a path as text: ["filters", 0, "field"] becomes filters[0].field."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{_short(part, 100)}" for part in path]
    return _without_middle("".join(parts).removeprefix("."), 200)


def _kind(value: Any) -> str:
    """Return the name of a value's type in JSON."""
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    names = (name for kind, name in kinds.items() if isinstance(value, kind))
    return "null" if value is None else next(names, type(value).__name__)


def _shown(value: Any, limit: int = MAX_VALUE_CHARS) -> str:
    return _short(json.dumps(value, ensure_ascii=False), limit)


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _without_middle(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit // 2]}...{text[3 - limit // 2 :]}"
