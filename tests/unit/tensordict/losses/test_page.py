"""The snippet of docs/torchrl/losses.md runs, and prints the output of the page."""

from __future__ import annotations

import pytest

from tests.support.doc_pages import snippets

PAGE = "docs/torchrl/losses.md"


def test_page_snippets_print_documented_outputs(capsys: pytest.CaptureFixture[str]):
    names: dict[str, object] = {}
    for code in snippets(PAGE):
        exec(compile(code, PAGE, "exec"), names)
    assert names["weight"].grad.abs().sum() > 0  # type: ignore[attr-defined]
    assert capsys.readouterr().out == "".join(snippets(PAGE, "text"))
