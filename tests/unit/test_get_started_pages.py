"""The snippets of the README, docs/get_started/quickstart.md and docs/guides/debugging.md run as written."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.entrypoints import cli
from skyrl_train.report.jsonl import JsonlTracker
from skyrl_train.trainer.batch_dump import BatchDump
from tests.support.doc_pages import find_commands, snippets
from tests.support.learner_specs import policy_batch

(REWARD,) = snippets("README.md")
(DRAW,) = snippets("docs/get_started/quickstart.md")
(READ,) = snippets("docs/guides/debugging.md")


def test_dumped_batch_is_read_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    batch = policy_batch()
    BatchDump(Path("exports/dumped_data")).write(3, batch, ["a"] * len(batch))
    names: dict[str, Any] = {}
    exec(READ, names)
    assert len(names["batch"]) == len(batch) and names["uids"] == ["a"] * len(batch)


def test_reward_curve_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("RUN_FOLDER").mkdir()
    JsonlTracker(Path("RUN_FOLDER")).log({"reward/mean": 0.5}, 1)
    exec(DRAW, {})
    assert Path("RUN_FOLDER/reward_curve.png").is_file()


def test_readme_reward_scores_its_completion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (command,) = find_commands("skyrl-train env try right_and_brief")
    (tmp_path / "my_rewards.py").write_text(REWARD)
    monkeypatch.syspath_prepend(str(tmp_path))
    row = {"prompt": [{"role": "user", "content": "48 + 24?"}], "reward_spec": {"ground_truth": "72"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    words = [str(tmp_path / "rows.jsonl") if word.endswith(".parquet") else word for word in command.words]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    (shown,) = (text for text in snippets("README.md", "text") if "reward of the episode" in text)
    assert (caught.value.code, shown in capsys.readouterr().out) == (0, True)
