"""The snippets of docs/get_started/getting_started.md run where its commands have left their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skyrl_train.environments import registry
from skyrl_train.report.jsonl import JsonlTracker
from skyrl_train.trainer.batch_dump import BatchDump
from tests.support.doc_pages import snippets
from tests.support.learner_specs import policy_batch

READ, DRAW, SHOUT = snippets("docs/get_started/getting_started.md")


def test_a_dumped_batch_is_read_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    batch = policy_batch()
    BatchDump(Path("exports/dumped_data")).write(3, batch, ["a"] * len(batch))
    names: dict[str, Any] = {}
    exec(READ, names)
    assert len(names["batch"]) == len(batch) and names["uids"] == ["a"] * len(batch)


def test_the_curve_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("RUN_FOLDER").mkdir()
    JsonlTracker(Path("RUN_FOLDER")).log({"reward/mean": 0.5}, 1)
    exec(DRAW, {})
    assert Path("RUN_FOLDER/reward_curve.png").is_file()


def test_the_environment_of_the_page_rewards_capital_letters(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry.environments, "loaded", dict(registry.environments.loaded))
    exec(SHOUT, {"__name__": "page"})
    environment = registry.make("shout", {}, {})
    assert [environment.step(text).reward for text in ("LOUD", "quiet")] == [1.0, 0.0]
