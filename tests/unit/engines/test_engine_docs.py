from __future__ import annotations

import re
import runpy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.engines.base import SampleRequest
from skyrl_train.engines.http.protocol import REMOTE_METHODS

ROOT = Path(__file__).parents[3]


PAGES = [("generate_engine_docs", "concepts/engines"), ("generate_serving_docs", "reference/chat_apis")]


@pytest.mark.parametrize(("script", "page"), PAGES)
def test_table_matches_code(script: str, page: str):
    generator = runpy.run_path(str(ROOT / "scripts" / f"{script}.py"))
    text = (ROOT / "docs" / f"{page}.md").read_text()
    assert text == generator["render"](text), f"run: python scripts/{script}.py"


def test_all_token_level_routes_and_arguments_are_documented():
    text = (ROOT / "docs" / "reference" / "http_api.md").read_text()
    table = text.partition("## Token-level routes\n")[2].partition("\n```")[0]
    documented = {}
    for row in re.findall(r"^\| `.*$", table, re.MULTILINE):
        routes, arguments, result = (cell.strip() for cell in row[1:-1].split("|"))
        verb, groups = routes[1:].partition(" ")[0], [*arguments.split(";"), ""]
        for route, names in zip(re.findall(r"(/\w+)`", routes), groups, strict=False):
            documented[verb, route] = set(re.findall(r"`(\w+)`", names)), "*control*" in result
    request_fields = {field.name for field in fields(SampleRequest)}
    for call in REMOTE_METHODS.values():
        kind: Any = call.arguments
        names = {field.name for field in fields(kind)} | (request_fields if call.method == "generate" else set())
        assert documented.pop((call.verb, call.route)) == (names, call.control), call.route
    assert not documented
