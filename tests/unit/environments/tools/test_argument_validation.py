"""Tests of argument validation: accepted values, messages for the model, and limits on hostile arguments."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest

from skyrl_train.environments.tools.argument_validation import ArgumentValidator, SchemaError
from skyrl_train.environments.tools.base import ToolBox
from skyrl_train.environments.tools.registry import check_tool, tools
from skyrl_train.errors import ConfigError
from tests.unit.environments.tools.test_base import Echo

FILTER = {
    "type": "object",
    "properties": {
        "field": {"type": "string", "enum": ["price", "year"]},
        "above": {"type": "number", "exclusiveMinimum": 0},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2, "uniqueItems": True},
    },
    "required": ["field"],
    "additionalProperties": False,
}
NESTED = {
    "$defs": {"filter": FILTER},
    "type": "object",
    "properties": {
        "filters": {"type": "array", "items": {"$ref": "#/$defs/filter"}, "minItems": 1},
        "by": {"$ref": "#/$defs/filter"},
        "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "order": {"anyOf": [{"const": "up"}, {"enum": ["down", None]}]},
        "where": {"oneOf": [{"type": "string"}, {"$ref": "#/$defs/filter"}]},
        "code": {"type": "string", "pattern": "^[A-Z]{3}$"},
        "size": {"type": "object", "additionalProperties": {"type": "integer"}},
        "any": {"type": "object", "patternProperties": {"^x-": {"type": "integer"}}, "additionalProperties": False},
        "pair": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False},
        "gone": False,
        "step": {"multipleOf": 0.5},
        "pairs": {"minProperties": 2, "maxProperties": 3},
    },
}


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"filters": [{"field": "year", "above": 0.5}, {"field": "price", "tags": ["a", "b"]}], "limit": None},
        {"limit": 3.0, "order": None, "where": "x"},
        {"order": "up", "where": {"field": "year"}, "code": "ABC", "size": {"a": 1}, "any": {"x-a": 1}},
        {"pair": ["a", 1], "step": 1.5},
    ],
)
def test_valid_nested_arguments_are_accepted(arguments: Any):
    assert ArgumentValidator(NESTED).find_problem(arguments) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"filters": {}}, "the argument 'filters' must be of type array, not object: {}."),
        ({"filters": []}, "the argument 'filters' must have at least 1 items, not []."),
        ({"filters": [{"field": "year"}, {}]}, "the argument 'filters[1].field' is missing."),
        (
            {"filters": [{"field": "colour"}]},
            """the argument 'filters[0].field' must be one of ["price", "year"], not "colour".""",
        ),
        ({"by": {"field": "year", "abov": 1}}, "there is no argument 'by.abov'; there are: field, above, tags."),
        ({"by": {"field": "year", "above": 0}}, "the argument 'by.above' must be more than 0, not 0."),
        (
            {"by": {"field": "year", "above": True}},
            "the argument 'by.above' must be of type number, not boolean: true.",
        ),
        (
            {"by": {"field": "year", "above": float("nan")}},
            "the argument 'by.above' must be of type number, not number: NaN.",
        ),
        (
            {"by": {"field": "year", "tags": ["a", "long"]}},
            """the argument 'by.tags[1]' must have at most 3 characters, not "long".""",
        ),
        ({"by": {"field": "year", "tags": ["a", "a"]}}, "must not contain an item twice"),
        (
            {"limit": "3"},
            """the argument 'limit' must be of type integer or null, not string: "3".""",
        ),
        (
            {"order": "left"},
            """the argument 'order' must be one of ["up", "down", null], not "left".""",
        ),
        ({"where": {"field": "size"}}, "the argument 'where.field' must be one of"),
        (
            {"code": "abc"},
            """the argument 'code' must match the regular expression "^[A-Z]{3}$", not "abc".""",
        ),
        (
            {"size": {"a": 1, "b": "2"}},
            """the argument 'size.b' must be of type integer, not string: "2".""",
        ),
        (
            {"any": {"x-a": "1"}},
            """the argument 'any.x-a' must be of type integer, not string: "1".""",
        ),
        ({"any": {"y": 1}}, "there is no argument 'any.y'; there are: none."),
        ({"pair": ["a", 1, 2]}, "the argument 'pair' cannot be accepted: Expected at most 2 items but found 1 extra"),
        ({"gone": 1}, "the arguments cannot be accepted: False schema does not allow 1."),
        ({"step": 0.7}, "the argument 'step' must be a multiple of 0.5, not 0.7."),
        ({"pairs": {"a": 1}}, """the argument 'pairs' must have at least 2 members, not {"a": 1}."""),
        ({"pairs": dict.fromkeys("abcd")}, "the argument 'pairs' must have at most 3 members, not"),
        ({"limits": 3}, "there is no argument 'limits'; there are: filters, by, limit,"),
        ([], "arguments must be an object, not array."),
        (None, "arguments must be an object, not null."),
    ],
)
def test_mistake_is_described_with_place_and_allowed_values(arguments: Any, message: str):
    assert message in str(ArgumentValidator(NESTED).find_problem(arguments))


@pytest.mark.parametrize(
    ("schema", "reject_unknown", "accepted"),
    [
        ({"properties": {"a": {}}}, True, False),
        ({"properties": {"a": {}}}, False, True),
        ({"properties": {"a": {}}, "additionalProperties": False}, False, False),
        ({"properties": {"a": {}}, "additionalProperties": True}, True, True),
        ({"allOf": [{"properties": {"b": {}}}]}, True, True),
        ({"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False}, True, False),
        ({"$ref": "#/$defs/b", "$defs": {"b": {"required": ["c"]}}}, True, False),
    ],
)
def test_unknown_names_are_rejected(schema: Any, reject_unknown: bool, accepted: bool):
    assert (ArgumentValidator(schema, reject_unknown=reject_unknown).find_problem({"b": 1}) is None) == accepted


@pytest.mark.parametrize(
    ("dialect", "good", "bad"),
    [
        ("http://json-schema.org/draft-04/schema#", 1, 0),
        ("http://json-schema.org/draft-07/schema#", 0, 1),
        ("https://json-schema.org/draft/2019-09/schema", 0, 1),
        ("https://json-schema.org/draft/2020-12/schema", 0, 1),
    ],
)
def test_schema_is_read_as_its_own_draft(dialect: str, good: int, bad: int):
    bound: dict[str, Any] = {"minimum": 0, "exclusiveMinimum": True} if "04" in dialect else {"exclusiveMaximum": 1}
    check = ArgumentValidator({"$schema": dialect, "properties": {"x": bound}})
    assert check.find_problem({"x": good}) is None
    assert check.find_problem({"x": bad}) is not None


@contextmanager
def listening() -> Iterator[tuple[str, list[str]]]:
    """Run a server that returns a schema for every request; yield its URL and the list of requested paths."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=[0.01], daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"x": {"$ref": "URL/a"}}},
        {"$id": "URL/", "properties": {"x": {"$ref": "a"}}},
        {"$schema": "http://json-schema.org/draft-07/schema#", "properties": {"x": {"$ref": "URL/a#/b"}}},
        {"$defs": {"x": {"$id": "URL/a", "$ref": "b"}}, "properties": {"x": {"$ref": "URL/a"}}},
        {"properties": {"x": {"$dynamicRef": "URL/a"}}},
        {"properties": {"x": {"$ref": "file:///etc/passwd"}}},
    ],
)
def test_references_are_never_fetched(schema: Any):
    with listening() as (url, asked):
        with pytest.raises(SchemaError, match=r"refers to .*other documents are not fetched"):
            ArgumentValidator(json.loads(json.dumps(schema).replace("URL", url)))
    assert asked == []


@pytest.mark.parametrize(
    "schema",
    [
        {"examples": [{"$schema": "x"}], "default": {"$schema": "x"}, "const": {"$schema": "x"}},
        {"enum": [{"patternProperties": 1}], "properties": {"unevaluatedProperties": {}}},
        {"properties": {"patternProperties": {}, "unevaluatedProperties": {}}},
        {"properties": {"x": {"$schema": "http://json-schema.org/draft-07/schema#"}}},
        {"patternProperties": {r"^\p{L}+$": {}}, "unevaluatedProperties": False},
        {"$id": "https://example.com/a", "$defs": {"d": {"$anchor": "here"}}, "properties": {"x": {"$ref": "a#here"}}},
        {"$defs": {"d": {"$id": "b", "$anchor": "at"}}, "properties": {"x": {"$ref": "b#at"}, "y": {"$ref": "b"}}},
    ],
)
def test_unusual_valid_schema_is_accepted(schema: Any):
    assert ArgumentValidator({"properties": {"a": schema}}).find_problem({}) is None
    ArgumentValidator(schema)


DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DEEP: Any = {}
for _ in range(5000):
    DEEP = {"not": DEEP}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "whatever"}, "at type: 'whatever' is not valid"),
        ({"properties": {"x": {"type": 3}}}, "at properties/x/type"),
        ({"properties": []}, "at properties"),
        ({"required": "x"}, "at required"),
        ({"properties": {"x": {"$ref": "#/$defs/none"}}}, "/$defs/none', which is not in it"),
        ({"properties": {"x": {"pattern": "("}}}, "'(', which is not a valid regular expression"),
        ({"properties": {"x": {"patternProperties": {"[": {}}}}}, "'[', which is not a valid regular expression"),
        ({"$schema": "https://example.com/mine"}, '$schema="https://example.com/mine" is not supported'),
        ({"properties": {"x": {"enum": [object()]}}}, "cannot be written as JSON"),
        (DEEP, "cannot be written as JSON"),
        ({"$schema": DRAFT_4, "properties": {"x": {"$ref": 5}}}, "it refers to 5, which cannot be read"),
        ({"$ref": "#/allOf/x", "allOf": [{}]}, """it refers to "#/allOf/x", which cannot be read"""),
        ({"$ref": "#/allOf", "allOf": [{}]}, """it refers to "#/allOf", which is not a schema but [{}]"""),
    ],
)
def test_invalid_schema_is_refused_with_place(schema: Any, message: str):
    with pytest.raises(SchemaError) as refused:
        ArgumentValidator(schema)
    assert message in str(refused.value) and len(str(refused.value)) < 1000


SLOW: dict[str, Any] = {"patternProperties": {"^(a|a)*$": {}}}
OPERATORS = [
    {"properties": {"op": {"const": op}, "of": {"items": {"$ref": "#/$defs/condition"}}}, "required": ["op", "of"]}
    for op in ("and", "or", "not")
]
CONDITION: Any = {"op": "field"}
for _ in range(30):
    CONDITION = {"op": "not", "of": [CONDITION]}


@pytest.mark.parametrize(
    ("schema", "value", "message"),
    [
        ({"pattern": "^(a|a)*$"}, "a" * 40 + "!", "take too long"),
        (SLOW, {"a" * 40 + "!": 1}, "take too long"),
        ({**SLOW, "additionalProperties": False}, {"a" * 40 + "!": 1}, "take too long"),
        ({"unevaluatedProperties": False, "allOf": [SLOW]}, {"a" * 40 + "!": 1}, "take too long"),
        ({"propertyNames": {"pattern": "^(a|a)*$"}}, {"a" * 40 + "!": 1}, "take too long"),
        ({"items": {"pattern": "^(a|a)*$"}}, ["a" * 16 + "!"] * 1000, "take too long"),
        ({"$ref": "#/$defs/condition"}, CONDITION, "take too long"),
        ({"items": {"enum": list(range(5000))}}, [4999] * 50_000, "take too long"),
        ({"multipleOf": 0.3}, 10**4000, "cannot be checked"),
    ],
)
def test_expensive_check_ends_in_time(schema: Any, value: Any, message: str, monkeypatch: pytest.MonkeyPatch):
    definitions = {"condition": {"anyOf": OPERATORS}}
    assert message in str(
        find_problem_in_time({"$defs": definitions, "properties": {"x": schema}}, {"x": value}, monkeypatch)
    )


def test_nested_schema_keyword_has_the_deadline(monkeypatch: pytest.MonkeyPatch):
    part = {"$schema": "http://json-schema.org/draft-07/schema#", "pattern": "^(a|a)*$"}
    assert "too long" in str(find_problem_in_time({"properties": {"x": part}}, {"x": "a" * 40 + "!"}, monkeypatch))


def find_problem_in_time(schema: Any, arguments: Any, monkeypatch: pytest.MonkeyPatch) -> str | None:
    monkeypatch.setattr("skyrl_train.environments.tools.argument_validation.MAX_CHECK_CPU_S", 0.2)
    check = ArgumentValidator(schema)
    started = time.process_time()
    message = check.find_problem(arguments)
    assert time.process_time() - started < 1.5
    return message


def test_unique_items_are_compared_in_linear_time():
    items: list[Any] = [{"a": i} for i in range(5_000)]  # 10 ms; the library's own check takes 17 s
    check = ArgumentValidator({"properties": {"x": {"uniqueItems": True}}})
    assert check.find_problem({"x": items}) is None
    assert "twice" in str(check.find_problem({"x": [*items, items[0]]}))


@pytest.mark.parametrize(
    ("items", "unique"),
    [
        ([1, 1.0], False),
        ([{"a": 1, "b": [2]}, {"b": [2.0], "a": 1}], False),
        ([None, None], False),
        ([1, True, 0, False, "1", None, [1], [True], {}, [], ""], True),
        ([{"a": 1}, {"a": "1"}, ["a", 1], {"a": None}], True),
    ],
)
def test_unique_items_are_compared_as_json(items: list[Any], unique: bool):
    assert (
        ArgumentValidator({"properties": {"x": {"uniqueItems": True}}}).find_problem({"x": items}) is None
    ) == unique
    assert ArgumentValidator({"properties": {"x": {"uniqueItems": False}}}).find_problem({"x": items}) is None


@pytest.mark.parametrize("draft", ["04", "06", "07"])
def test_dependencies_may_mix_schemas_and_names(draft: str):
    dependencies = {"a": {"properties": {"b": {"type": "string"}}}, "b": ["c"], "d": {"required": ["e"]}}
    part = {"dependencies": dependencies}
    check = ArgumentValidator({"$schema": f"http://json-schema.org/draft-{draft}/schema#", "properties": {"x": part}})
    assert check.find_problem({"x": {"b": 1, "c": 2}}) is None
    assert check.find_problem({"x": {"b": 1}}) == "the argument 'x.c' is missing."
    assert check.find_problem({"x": {"d": 1}}) == "the argument 'x.e' is missing."


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"x": value}
    return value


@pytest.mark.parametrize(
    "value",
    [
        nested(900),
        nested(20_000),
        {"k" * 10**6: 1},
        {"x": {"y" * 10**6: {"z" * 10**6: 1}}},
        {"s": "v" * 10**6},
        {"n": list(range(10**5))},
        {"x": "\x1b[2J\ud800"},
    ],
)
def test_messages_are_short_for_any_arguments(value: Any):
    schema = {
        "$defs": {"node": {"properties": {"x": {"$ref": "#/$defs/node"}}, "additionalProperties": False}},
        "properties": {"s": {"maxLength": 3}, "n": {"items": {"maximum": 3}}, "x": {"$ref": "#/$defs/node"}},
    }
    message = ArgumentValidator(schema).find_problem(value)
    assert message is None or len(message) < 800


def test_tool_with_invalid_schema_is_refused_at_start():
    class Broken(Echo):
        name = "broken"
        parameters = {"type": "object", "properties": {"x": {"type": "text"}}}  # noqa: RUF012

    tools.register("broken")(Broken)
    try:
        with pytest.raises(
            ConfigError, match=r"tool 'broken' are not a usable JSON schema.* at properties/x/type: 'text'"
        ):
            check_tool("broken")
    finally:
        tools.unregister("broken")


def test_schema_library_is_imported_at_first_call():
    code = """
import sys
from skyrl_train.environments.tools.base import ToolBox
from skyrl_train.environments.tools.registry import make_tool
box = ToolBox([make_tool("python")])
assert not {"jsonschema", "referencing", "regex"} & set(sys.modules)
assert box.call("python", {}).error == "bad_arguments"
assert "jsonschema" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_tool_box_describes_nested_mistake():
    class Search(Echo):
        parameters = NESTED

    result = ToolBox([Search()]).call("echo", {"filters": [{"field": "year", "above": "2000"}]})
    assert result.error == "bad_arguments"
    assert result.text == """echo: the argument 'filters[0].above' must be of type number, not string: "2000"."""
