"""Tests of docs/guides/foreign_environments.md: its example runs, and it lists the restricted datasets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from skyrl_train.environments import registry
from skyrl_train.environments.integrations.reasoning_gym import SAFE_ANSWERS_FOR_EVAL, UNSUPPORTED_DATASETS

PAGE = (Path(__file__).parents[4] / "docs" / "guides" / "foreign_environments.md").read_text()


def test_page_example_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry.environments, "loaded", dict(registry.environments.loaded))
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(code, {"__name__": "page"})
    environment = registry.make("echo", {"bonus": 0.5}, {"max_turns": 2})
    first, second = environment.step("a"), environment.step("b")
    assert first["observations"] == [{"role": "user", "content": "a"}]
    assert (second["reward"], second["done"]) == (0.5, True)


def test_page_lists_restricted_datasets():
    assert all(f"`{task}`" in PAGE for task in (*UNSUPPORTED_DATASETS, *SAFE_ANSWERS_FOR_EVAL))
