"""The snippets of docs/torchrl/environments.md run, and its table names what exists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

PAGE = (Path(__file__).parents[4] / "docs" / "torchrl" / "environments.md").read_text()


def test_the_snippets_of_the_page_run_one_after_the_other():
    found: dict[str, Any] = {}
    for code in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        exec(code, found)
    assert [round(float(value), 3) for value in found["reward"].flatten()] == [1.0, 0.1]
    assert found["root"][0]["history"].prompt.to_chats()[-1]["role"] == "user"


def test_names_are_where_the_page_says():
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| `(\w+)` \|$", PAGE, re.MULTILINE)
    assert len(rows) == 11
    for names, module in rows:
        loaded = importlib.import_module(f"skyrl_train.tensordict.envs.{module}")
        for name in re.findall(r"`(\w+)`", names):
            assert getattr(loaded, name).__module__ == loaded.__name__
