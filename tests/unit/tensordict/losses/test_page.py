from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[4] / "docs" / "torchrl" / "losses.md"


def test_the_pages_snippets_run():
    snippets = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {}
    for snippet in snippets:
        exec(compile(snippet, PAGE.name, "exec"), names)
    assert names["weight"].grad.abs().sum() > 0  # type: ignore[attr-defined]
