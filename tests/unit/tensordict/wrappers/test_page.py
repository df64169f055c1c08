"""The snippets of docs/torchrl/index.md run, and print the outputs of the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyrl_train.testing.tiny_models import save_tiny_model
from tests.support.doc_pages import snippets

PAGE = "docs/torchrl/index.md"


def test_page_snippets_print_documented_outputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = save_tiny_model(tmp_path / "model")
    capsys.readouterr()  # of libraries that saving a model imports
    for code in snippets(PAGE):
        names: dict[str, object] = {}
        exec(compile(code.replace("Qwen/Qwen2.5-0.5B-Instruct", path), PAGE, "exec"), names)
    printed = (block for block in snippets(PAGE, "text") if not block.startswith("from "))
    assert capsys.readouterr().out == "".join(printed)
