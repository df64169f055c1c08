"""Import lines that docs/guides/from_skyrl.md lists for programs written for SkyRL."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "from_skyrl.md"


def test_import_lines_of_docs_page_work():
    lines = re.findall(r"\| `from skyrl\.[^`]+` \| `(from skyrl_train[^`]+)` \|", PAGE.read_text())
    assert len(lines) >= 14
    for line in lines:
        exec(line, {})
