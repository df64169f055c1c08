"""The snippets of docs/tools.md and docs/web_tools.md run, and print what they say."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from skyrl_train.environments.tools import registry
from skyrl_train.environments.tools.sandbox import Sandbox
from tests.support.doc_pages import snippets

DICE, PYTHON = snippets("docs/tools.md")
(FETCH,) = snippets("docs/web_tools.md")


def test_the_tool_of_the_page_throws_dice(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry.tools, "loaded", dict(registry.tools.loaded))
    names: dict[str, Any] = {"__name__": "page"}
    exec(DICE, names)
    tool = registry.make_tool("dice", {"sides": 1})
    assert asyncio.run(tool.call({"count": 3})) == "3"
    with pytest.raises(names["sk"].ToolError, match="count must be 1 to 100"):
        asyncio.run(tool.call({"count": 0}))


def test_a_call_is_read_from_text_and_answered(sandbox: Sandbox, capsys: pytest.CaptureFixture[str]):
    exec(PYTHON, {})
    assert capsys.readouterr().out.split() == ["42"]


def test_an_address_in_numbers_is_refused(capsys: pytest.CaptureFixture[str]):
    exec(FETCH, {})
    said = capsys.readouterr().out
    assert FETCH.partition("# ... ")[2].splitlines()[0] in said
