"""The snippets of docs/torchrl/collectors.md run, and print the outputs of the page."""

from __future__ import annotations

import pytest

from tests.support.doc_pages import snippets

PAGE = "docs/torchrl/collectors.md"


def test_page_snippets_print_documented_outputs(capsys: pytest.CaptureFixture[str]):
    names: dict[str, object] = {}
    for code in snippets(PAGE):
        exec(compile(code, PAGE, "exec"), names)
    assert capsys.readouterr().out == "".join(snippets(PAGE, "text"))
