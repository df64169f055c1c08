from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


PAGES = [("generate_engine_docs", "engines"), ("generate_serving_docs", "serving")]


@pytest.mark.parametrize(("script", "page"), PAGES)
def test_the_table_is_what_the_code_says(script: str, page: str):
    generator = runpy.run_path(str(ROOT / "scripts" / f"{script}.py"))
    text = (ROOT / "docs" / f"{page}.md").read_text()
    assert text == generator["render"](text), f"run: python scripts/{script}.py"
