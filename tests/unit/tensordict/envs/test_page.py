"""The snippets of docs/torchrl/environments.md run, and print the outputs of the page."""

from __future__ import annotations

import re

import pytest

import skyrl_train.tensordict
from tests.support.doc_pages import REPOSITORY, snippets

PAGE = "docs/torchrl/environments.md"


def test_page_snippets_print_documented_outputs(capsys: pytest.CaptureFixture[str]):
    names: dict[str, object] = {}
    for code in snippets(PAGE):
        exec(compile(code, PAGE, "exec"), names)
    assert capsys.readouterr().out == "".join(snippets(PAGE, "text"))


def test_page_tables_name_public_classes():
    rows = re.findall(r"^\| ((?:`\w+`(?:\(.*?\)`)?(?:, )?)+) \|", (REPOSITORY / PAGE).read_text(), re.MULTILINE)
    names = {name for row in rows for name in re.findall(r"`([A-Z]\w+|make_\w+)`", row)}
    assert len(names) > 12 and names <= set(vars(skyrl_train.tensordict)["__all__"])
