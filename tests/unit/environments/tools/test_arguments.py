"""A tool's arguments against its schema: what is refused, how a model is told, and what a hostile schema cannot do."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest

from skyrl_train.environments.tools.arguments import MAX_SCHEMA, Arguments, Unusable
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
def test_what_fits_a_nested_schema_passes(arguments: Any):
    assert Arguments(NESTED).wrong(arguments) is None


@pytest.mark.parametrize(
    ("arguments", "told"),
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
        ({"by": {"field": "year", "tags": ["a", "a"]}}, "must not hold an item twice"),
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
        ({"pair": ["a", 1, 2]}, "the argument 'pair' must be shorter"),
        ({"gone": 1}, "the arguments must leave out what has the value 1."),
        ({"step": 0.7}, "the argument 'step' must be a multiple of 0.5, not 0.7."),
        ({"limits": 3}, "there is no argument 'limits'; there are: filters, by, limit,"),
        ([], "arguments must be an object, not array."),
        (None, "arguments must be an object, not null."),
    ],
)
def test_a_mistake_is_told_with_its_place_what_is_allowed_and_what_was_given(arguments: Any, told: str):
    assert told in str(Arguments(NESTED).wrong(arguments))


@pytest.mark.parametrize(
    ("schema", "closed", "fits"),
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
def test_names_that_a_schema_leaves_open_are_refused_where_it_is_closed(schema: Any, closed: bool, fits: bool):
    assert (Arguments(schema, closed=closed).wrong({"b": 1}) is None) == fits


@pytest.mark.parametrize(
    ("dialect", "good", "bad"),
    [
        ("http://json-schema.org/draft-04/schema#", 1, 0),
        ("http://json-schema.org/draft-07/schema#", 0, 1),
        ("https://json-schema.org/draft/2019-09/schema", 0, 1),
        ("https://json-schema.org/draft/2020-12/schema", 0, 1),
    ],
)
def test_a_schema_is_read_as_its_own_draft(dialect: str, good: int, bad: int):
    bound: dict[str, Any] = {"minimum": 0, "exclusiveMinimum": True} if "04" in dialect else {"exclusiveMaximum": 1}
    check = Arguments({"$schema": dialect, "properties": {"x": bound}})
    assert check.wrong({"x": good}) is None
    assert check.wrong({"x": bad}) is not None


@contextmanager
def listening() -> Iterator[tuple[str, list[str]]]:
    """A server that answers every request with a schema, and the paths that it was asked for."""
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
        {"properties": {"x": {"$ref": "#/elsewhere"}}, "elsewhere": {"$ref": "URL/a"}},
    ],
)
def test_nothing_that_a_schema_refers_to_is_fetched(schema: Any):
    with listening() as (url, asked):
        with pytest.raises(Unusable, match=r"refers to .*nothing is fetched"):
            Arguments(json.loads(json.dumps(schema).replace("URL", url)))
    assert asked == []


@pytest.mark.parametrize(
    "schema",
    [
        {"examples": [{"$schema": "x"}], "default": {"$schema": "x"}, "const": {"$schema": "x"}},
        {"enum": [{"patternProperties": 1}], "properties": {"unevaluatedProperties": {}}},
        {"properties": {"patternProperties": {}, "unevaluatedProperties": {}}},
        {"enum": list(map(str, range(20_000)))},
        {"enum": [None, *map(str, range(20_000))]},
        {
            "oneOf": [{"const": f"c{i}", "title": f"t{i}"} for i in range(820)],
            "examples": [{"a": i} for i in range(2000)],
        },
        {"patternProperties": {"a": {}}, "unevaluatedProperties": False},
        {"$id": "https://example.com/a", "$defs": {"d": {"$anchor": "here"}}, "properties": {"x": {"$ref": "a#here"}}},
        {"$defs": {"d": {"$id": "b", "$anchor": "at"}}, "properties": {"x": {"$ref": "b#at"}, "y": {"$ref": "b"}}},
    ],
)
def test_a_schema_that_only_looks_hostile_is_taken(schema: Any):
    assert Arguments({"properties": {"a": schema}}).wrong({}) is None
    Arguments(schema)


def test_a_list_of_several_kinds_is_not_compared_pair_by_pair():
    enum = {"enum": [None, *range(36_000)]}
    begun = time.process_time()
    Arguments({"$schema": "http://json-schema.org/draft-04/schema#", "properties": {"x": enum}})
    check = Arguments({"properties": {"x": {"uniqueItems": True}}})
    assert check.wrong({"x": [{"a": i} for i in range(20_000)]}) is None
    assert time.process_time() - begun < 5.0


@pytest.mark.parametrize(
    ("items", "twice"),
    [
        ([1, 1.0], True),
        ([1, True, 0, False, "1", None, [1], [True], {}, [], ""], False),
        ([{"a": 1, "b": [2]}, {"b": [2.0], "a": 1}], True),
        ([{"a": 1}, {"a": "1"}, ["a", 1], {"a": None}], False),
        ([None, None], True),
    ],
)
def test_an_item_is_twice_in_a_list_if_json_says_so(items: list[Any], twice: bool):
    assert (Arguments({"properties": {"x": {"uniqueItems": True}}}).wrong({"x": items}) is not None) == twice
    assert Arguments({"properties": {"x": {"uniqueItems": False}}}).wrong({"x": items}) is None


A: dict[str, Any] = {"properties": {"a": {}}}
B = {"properties": {"b": {"type": "integer"}}}
D2019 = "https://json-schema.org/draft/2019-09/schema"


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"$ref": "#/$defs/a", **B}, {"a": 1, "b": 1}, {"c": 1}),
        ({"anyOf": [A, B]}, {"a": 1, "b": 1}, {"a": 1, "b": "x"}),
        ({"if": {"required": ["a"], **A}, "then": B, "else": {"properties": {"c": {}}}}, {"a": 1, "b": 1}, {"b": 1}),
        ({"if": {"required": ["a"], **A}, "then": B, "else": {"properties": {"c": {}}}}, {"c": 1}, {"a": 1, "c": 1}),
        ({"dependentSchemas": {"a": {**A, **{"required": ["b"]}}}, **B}, {"b": 1}, {"a": 1}),
        ({"patternProperties": {"^x-": {}}}, {"x-a": 1}, {"a": 1}),
        ({"allOf": [{"additionalProperties": {"type": "integer"}}]}, {"a": 1}, {"a": "1"}),
        ({"allOf": [{"unevaluatedProperties": True}]}, {"a": 1}, None),
        ({"prefixItems": [True]}, [1], [1, 2]),
        ({"allOf": [{"prefixItems": [True]}, {"prefixItems": [True, True]}]}, [1, 2], [1, 2, 3]),
        ({"prefixItems": [True], "contains": {"type": "string"}}, [1, "2", "3"], [1, "2", 3]),
        ({"$ref": "#/$defs/all"}, [1, 2], None),
        ({"$schema": D2019, "allOf": [{"items": [True]}]}, [1], [1, 2]),
        ({"$schema": D2019, "allOf": [{"items": [True], "additionalItems": True}]}, [1, 2], None),
        ({"$schema": D2019, "prefixItems": [True]}, [], [1]),
        ({"$schema": D2019, "allOf": [{"items": {"type": "integer"}}]}, [1, 2], ["1"]),
    ],
)
def test_what_no_part_of_a_schema_knows_is_refused_where_it_asks_for_that(schema: Any, good: Any, bad: Any):
    dialect = {"$schema": schema.pop("$schema", "https://json-schema.org/draft/2020-12/schema")}
    part = {"unevaluatedItems": False, "unevaluatedProperties": False, **schema}
    check = Arguments({**dialect, "$defs": {"a": A, "all": {"items": True}}, "properties": {"x": part}})
    assert check.wrong({"x": good}) is None
    assert bad is None or check.wrong({"x": bad}) is not None


def test_a_part_that_refers_to_the_whole_knows_what_the_whole_knows():
    whole = {"$schema": D2019, "$recursiveAnchor": True, "properties": {"x": {"$ref": "#/$defs/n"}}}
    part = {"unevaluatedProperties": False, "$recursiveRef": "#", "properties": {"y": {}}}
    check = Arguments({**whole, "$defs": {"n": part}}, closed=False)
    assert check.wrong({"x": {"x": {"y": 1}, "y": 1}}) is None
    assert check.wrong({"x": {"z": 1}}) is not None


@pytest.mark.parametrize("draft", ["04", "06", "07"])
def test_dependencies_on_names_may_stand_beside_those_on_schemas(draft: str):
    dependencies = {"a": {"properties": {"b": {"type": "string"}}}, "b": ["c"], "d": {"required": ["e"]}}
    schema = {"$schema": f"http://json-schema.org/draft-{draft}/schema#", "dependencies": dependencies}
    check = Arguments({"$schema": schema.pop("$schema"), "properties": {"x": schema}})
    assert check.wrong({"x": {"b": 1, "c": 2}}) is None
    assert check.wrong({"x": {"b": 1}}) == "the argument 'x.c' is missing."
    assert check.wrong({"x": {"d": 1}}) == "the argument 'x.e' is missing."


def test_anchors_are_gathered_once():
    anchors = {f"d{i}": {"$anchor": f"n{i}"} for i in range(1500)}
    used = {f"p{i}": {"$ref": f"#n{i}"} for i in range(1500)}
    begun = time.process_time()
    assert Arguments({"$defs": anchors, "properties": used}).wrong(dict.fromkeys(used, 1)) is None
    assert time.process_time() - begun < 5.0


DEEP: Any = {"type": "string"}
for _ in range(5000):
    DEEP = {"not": DEEP}


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"type": "whatever"}, "at type: 'whatever' is not valid"),
        ({"properties": {"x": {"type": 3}}}, "at properties/x/type"),
        ({"properties": []}, "at properties"),
        ({"required": "x"}, "at required"),
        ({"properties": {"x": {"$ref": "#/$defs/none"}}}, "/$defs/none', which is not in it"),
        ({"properties": {"x": {"pattern": "("}}}, "'(', which is no regular expression"),
        ({"properties": {"x": {"pattern": "a" * 2000}}}, "a regular expression of 2000 characters"),
        ({"properties": {"x": {"patternProperties": {"[": {}}}}}, "'[', which is no regular expression"),
        ({"$schema": "https://example.com/mine"}, '$schema="https://example.com/mine" is none of'),
        ({"properties": {"x": {"$schema": "http://json-schema.org/draft-07/schema#"}}}, "$schema of its own"),
        ({"description": "x" * MAX_SCHEMA}, f"at most {MAX_SCHEMA}"),
        ({"$id": "x" * 2000}, "an identifier of 2000 characters; at most 1000"),
        ({"$id": "http://["}, "an identifier or another part that cannot be read: Invalid IPv6 URL"),
        ({"not": {"$schema": "http://json-schema.org/draft-04/schema", "id": 5}}, "$schema of its own"),
        ({"properties": {"x": {"$ref": "\t#/def\tault"}}, "default": {"$schema": "x"}}, "$schema of its own"),
        ({"$ref": "#/%64efault/a", "default": {"a": {"$schema": "x"}}}, "$schema of its own"),
        ({"$ref": "#/allOf/x", "allOf": [{}]}, "it refers to '#/allOf/x', which cannot be read"),
        ({"$ref": "#/a/b", "a": True}, "it refers to '#/a/b', which cannot be read"),
        ({"$ref": "#/allOf", "allOf": [{}]}, "it refers to '#/allOf', which is no schema: [{}]"),
        ({"$ref": "#/default", "default": {"allOf": 5}}, """it has {"allOf": 5}, which cannot be read as a schema"""),
        (
            {"$ref": "#/default", "default": {"pattern": 5}},
            """it has {"pattern": 5}, which cannot be read as a schema""",
        ),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "properties": {"x": {"$ref": 5}}}, "$ref 5, which"),
        ({"properties": {"x": {"type": [None, *range(36_000)]}}}, "at properties/x/type: [None, 0, 1, 2"),
        (DEEP, "cannot be written as JSON"),
        ({"properties": {"x": {"enum": [object()]}}}, "cannot be written as JSON"),
    ],
)
def test_a_schema_that_is_none_is_refused_with_its_place(schema: Any, told: str):
    with pytest.raises(Unusable) as refused:
        Arguments(schema)
    assert told in str(refused.value) and len(str(refused.value)) < 1000


def test_a_schema_that_takes_too_long_to_read_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("skyrl_train.environments.tools.arguments.READ_S", 0.05)
    with pytest.raises(Unusable, match=r"takes too long to read \(more than 0.05 CPU-seconds\); make it smaller"):
        Arguments({"anyOf": [{"title": str(i)} for i in range(2000)]})


DOUBLING = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)} | {"a40": {}}
NEXT = [{"$ref": f"#/$defs/b{i + 1}"} for i in range(40)]
UNEVALUATED: dict[str, Any] = {f"b{i}": {**NEXT[i], "if": True, "then": NEXT[i]} for i in range(40)}
ELEMENTS: dict[str, Any] = {"items": {}, "contains": {}, "propertyNames": {}, "additionalProperties": {}}
HIDDEN = {"$schema": "http://json-schema.org/draft-07/schema", "propertyNames": {"pattern": "^(a|a)*$"}}


@pytest.mark.parametrize(
    ("schema", "value", "told"),
    [
        ({"pattern": "^(a|a)*$"}, "a" * 40 + "!", "take too long"),
        ({"patternProperties": {"^(a|a)*$": {}}}, {"a" * 40 + "!": 1}, "take too long"),
        ({"patternProperties": {"^(a|a)*$": {}}, "additionalProperties": False}, {"a" * 40 + "!": 1}, "take too long"),
        ({"patternProperties": {"^(a|a)*$": {}}, "unevaluatedProperties": False}, {"a" * 40 + "!": 1}, "take too long"),
        ({"propertyNames": {"pattern": "^(a|a)*$"}}, {"a" * 40 + "!": 1}, "take too long"),
        ({"items": {"pattern": "^(a|a)*$"}}, ["a" * 16 + "!"] * 1000, "take too long"),
        ({"$ref": "#/$defs/a0"}, 1, "take too long"),
        ({"$ref": "#/$defs/self"}, 1, "nested too deeply"),
        ({"unevaluatedProperties": False, "$ref": "#/$defs/b0"}, {"a": 1}, "take too long"),
        ({"unevaluatedItems": False, "$ref": "#/$defs/b0"}, [1], "take too long"),
        ({"uniqueItems": True}, [i * (2**61 - 1) for i in range(30_000)], "take too long"),  # all of one hash
        ({"items": {"enum": list(range(5000))}}, [4999] * 50_000, "take too long"),
        ({"multipleOf": 0.3}, 10**4000, "cannot be checked"),
    ],
)
def test_no_schema_and_no_value_keeps_a_check_busy(schema: Any, value: Any, told: str, monkeypatch: pytest.MonkeyPatch):
    definitions = {**DOUBLING, **UNEVALUATED, "b40": {}, "self": {"$ref": "#/$defs/self"}}
    assert told in str(checked_in_time({"$defs": definitions, "properties": {"x": schema}}, {"x": value}, monkeypatch))


@pytest.mark.parametrize("keyword", ELEMENTS)
def test_what_is_done_for_each_element_ends_too(keyword: str, monkeypatch: pytest.MonkeyPatch):
    leaf = {keyword: ELEMENTS[keyword]}
    value: Any = dict.fromkeys(map(str, range(5000)), 0) if "ropert" in keyword else [0] * 5000
    doubling = {f"a{i}": {"anyOf": [{"not": {"$ref": f"#/$defs/a{i + 1}"}}] * 2} for i in range(18)}
    schema = {"$defs": {**DOUBLING, **doubling, "a18": leaf}, "properties": {"x": {"$ref": "#/$defs/a0"}}}
    assert "take too long" in str(checked_in_time(schema, {"x": value}, monkeypatch))


def test_items_that_a_schema_knows_again_and_again_take_no_memory(monkeypatch: pytest.MonkeyPatch):
    part = {"unevaluatedItems": False, "$ref": "#/$defs/b0"}
    schema = {"$defs": {**UNEVALUATED, "b15": {"items": True}, "b40": {}}, "properties": {"x": part}}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "take too long" in str(checked_in_time(schema, {"x": [0] * 5000}, monkeypatch))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 2**10  # KiB


def test_a_schema_of_another_draft_where_none_is_looked_for_is_in_bounds_too(monkeypatch: pytest.MonkeyPatch):
    default = {"dependencies": {"a": ["b"], "x": HIDDEN}}  # of which `referencing` reads none, after a list
    schema = {"$schema": HIDDEN["$schema"], "allOf": [{"$ref": "#/default"}], "default": default}
    assert "take too long" in str(checked_in_time(schema, {"x": 1, "a" * 40 + "!": 1}, monkeypatch))


def checked_in_time(schema: Any, arguments: Any, monkeypatch: pytest.MonkeyPatch) -> str | None:
    monkeypatch.setattr("skyrl_train.environments.tools.arguments.CHECK_S", 0.2)
    check = Arguments(schema)
    begun = time.process_time()
    told = check.wrong(arguments)
    assert time.process_time() - begun < 1.5
    return told


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"x": value}
    return value


@pytest.mark.parametrize(
    "value",
    [
        nested(900),
        {"k" * 10**6: 1},
        {"x": {"y" * 10**6: {"z" * 10**6: 1}}},
        {"s": "v" * 10**6},
        {"n": list(range(10**5))},
        {"x": "\x1b[2J\ud800"},
    ],
)
def test_what_is_told_is_short_whatever_was_given(value: Any):
    schema = {
        "$defs": {"node": {"properties": {"x": {"$ref": "#/$defs/node"}}, "additionalProperties": False}},
        "properties": {"s": {"maxLength": 3}, "n": {"items": {"maximum": 3}}, "x": {"$ref": "#/$defs/node"}},
    }
    told = Arguments(schema).wrong(value)
    assert told is None or len(told) < 800


def test_a_thousand_mistakes_in_a_long_list_do_not_write_it_a_thousand_times():
    """jsonschema writes the whole value into each message, of which one is told: two seconds for this one."""
    schema = {"properties": {"n": {"anyOf": [{"type": "string", "maxLength": most} for most in range(1000)]}}}
    told = Arguments(schema).wrong({"n": list(range(100_000))})
    assert told is not None and told.startswith("the argument 'n' must be of type string")


def test_a_tool_of_a_broken_schema_is_refused_before_a_run_starts():
    class Broken(Echo):
        name = "broken"
        parameters = {"type": "object", "properties": {"x": {"type": "text"}}}  # noqa: RUF012

    tools.register("broken")(Broken)
    try:
        with pytest.raises(ConfigError, match=r"tool 'broken' has parameters .* at properties/x/type: 'text'"):
            check_tool("broken")
    finally:
        tools.forget("broken")


def test_the_library_is_loaded_by_the_first_call():
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


def test_a_box_tells_a_nested_mistake():
    class Search(Echo):
        parameters = NESTED

    result = ToolBox([Search()]).call("echo", {"filters": [{"field": "year", "above": "2000"}]})
    assert result.error == "bad_arguments"
    assert result.text == """echo: the argument 'filters[0].above' must be of type number, not string: "2000"."""
