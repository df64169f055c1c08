from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[3]
generator = runpy.run_path(str(ROOT / "scripts" / "generate_engine_docs.py"))


def test_the_table_is_what_the_engines_say():
    page = (ROOT / "docs" / "engines.md").read_text()
    assert page == generator["render"](page), "run: python scripts/generate_engine_docs.py"
