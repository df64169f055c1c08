from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config.choices import ENVIRONMENTS
from skyrl_train.environments import registry

PAGE = Path(__file__).parents[3] / "docs" / "concepts" / "environments.md"

ADAPTERS = {"openenv", "reasoning_gym", "verifiers"}
"""Environments of other libraries. Another page describes their rewards."""


def snippets() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def restore_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.environments, "loaded", dict(registry.environments.loaded))


def test_environment_of_page_runs():
    names: dict[str, Any] = {"__name__": "my_envs"}
    exec(snippets()[0], names)
    extras = {"reward_spec": {"ground_truth": "7"}}
    environment = registry.make("guess_the_number", {}, extras)
    messages, _ = environment.init([{"role": "user", "content": "go"}])
    assert [message["role"] for message in messages] == ["system", "user"]
    answers = [environment.step(text).observations[0]["content"] for text in ("3", "9", "seven")]
    assert answers == ["higher", "lower", "a number, please"]
    output = environment.step("7")
    assert (output.reward, output.done, output.metadata) == (1.0, True, {"turns": 4})


def test_dataset_function_of_page_produces_usable_rows():
    names: dict[str, Any] = {"__name__": "script"}
    exec(snippets()[1], names)
    row = names["convert"]("file, row 1", {"hint": "It is odd.", "number": 7}, "train", 0)
    exec(snippets()[0], {"__name__": "my_envs"})
    environment = registry.make(row["env_class"], {}, row)
    environment.init(row["prompt"])
    assert environment.step("7").reward == 1.0


def test_page_lists_every_environment():
    lines = [line for line in snippets()[0].splitlines() if line.strip()]
    assert len(lines) <= 30
    named = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert set(ENVIRONMENTS) - ADAPTERS <= set(named)


def test_the_other_snippets_run(capsys: pytest.CaptureFixture[str]):
    for snippet in snippets()[1:]:
        exec(snippet, {"__name__": "page"})
    assert "####" in capsys.readouterr().out
