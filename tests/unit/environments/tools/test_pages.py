"""Tests that run the snippets of docs/guides/tools.md and docs/guides/web_tools.md and compare their output."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from skyrl_train.environments.tools import registry
from skyrl_train.environments.tools.sandbox import Sandbox
from tests.support.doc_pages import snippets

DICE, PYTHON = snippets("docs/guides/tools.md")
(FETCH,) = snippets("docs/guides/web_tools.md")


def test_page_example_tool_throws_dice(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry.tools, "loaded", dict(registry.tools.loaded))
    names: dict[str, Any] = {"__name__": "page"}
    exec(DICE, names)
    tool = registry.make_tool("dice", {"sides": 1})
    assert asyncio.run(tool.call({"count": 3})) == "3"
    with pytest.raises(names["sk"].ToolError, match="count must be 1 to 100"):
        asyncio.run(tool.call({"count": 0}))


def test_page_example_parses_and_runs_call(sandbox: Sandbox, capsys: pytest.CaptureFixture[str]):
    exec(PYTHON, {})
    assert capsys.readouterr().out.split() == ["42"]


def test_page_example_rejects_numeric_address(capsys: pytest.CaptureFixture[str]):
    exec(FETCH, {})
    output = capsys.readouterr().out
    assert FETCH.partition("# ... ")[2].splitlines()[0] in output
