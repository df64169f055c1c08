from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[4] / "docs" / "torchrl" / "collectors.md"


def test_the_pages_snippets_run(capsys: pytest.CaptureFixture[str]):
    names: dict[str, object] = {}
    for snippet in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(snippet, PAGE.name, "exec"), names)
    assert capsys.readouterr().out == "[1, 1, 1, 1]\nworker None gets {'weight': 1.0}\ndone\n"
