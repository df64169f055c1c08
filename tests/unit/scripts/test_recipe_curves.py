"""The script that runs and draws recipes uses the commands of their pages and draws what a run recorded."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.report.jsonl import JsonlTracker
from tests.support.doc_pages import REPOSITORY, commands, commands_of

SCRIPT = runpy.run_path(str(REPOSITORY / "scripts" / "recipe_curves.py"))
NAMES = sorted(SCRIPT["RECIPES"])


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return the function that draws a recipe, with `tmp_path` as the folder of pictures."""
    monkeypatch.setitem(SCRIPT["draw"].__globals__, "IMAGES", tmp_path)
    return SCRIPT["draw"]


@pytest.mark.parametrize("name", NAMES)
def test_recipe_commands_stand_on_a_page(name: str):
    documented = {command.words for command in commands() if command.page.startswith("examples/")}
    for text in SCRIPT["RECIPES"][name].commands:
        (command,) = commands_of("", text)
        assert command.words in documented


def test_folders_below_runs_are_localized(tmp_path: Path):
    words = SCRIPT["localize"]("skyrl-train train --config-dir runs/quickstart/grpo a=runs/b c=1", tmp_path)
    assert words[2:] == [
        *("skyrl_train.entrypoints.cli", "train"),
        *("--config-dir", f"{tmp_path}/quickstart/grpo", f"a={tmp_path}/b", "c=1"),
    ]


def test_recipe_is_drawn_beside_quickstart(tmp_path: Path, draw: Any):
    for folder in ("quickstart/grpo", "lora"):
        (tmp_path / folder).mkdir(parents=True)
        tracker = JsonlTracker(tmp_path / folder)
        for step in range(3):
            tracker.log({"reward/mean": step / 3, "eval/arithmetic/avg_score": step / 4}, step)
    draw("lora", tmp_path)
    assert (tmp_path / "lora.png").read_bytes().startswith(b"\x89PNG")


def test_printed_steps_are_drawn(tmp_path: Path, draw: Any):
    text = "step 1: right 0.25, entropy 1.0\nstep 2: right 0.500, entropy 0.9\n: eval accuracy 0.1 -> 0.6\n"
    (tmp_path / "tensordict_grpo.txt").write_text(text)
    lines = SCRIPT["read_lines"]("tensordict_grpo", tmp_path, None)
    assert lines[1:-1] == [{"step": 1, "reward/mean": 0.25}, {"step": 2, "reward/mean": 0.5}]
    assert [(line["step"], line["eval/arithmetic/avg_score"]) for line in (lines[0], lines[-1])] == [(0, 0.1), (2, 0.6)]
    draw("tensordict_grpo", tmp_path)
    assert (tmp_path / "tensordict_grpo.png").is_file()


def test_run_without_metrics_is_refused(tmp_path: Path, draw: Any):
    JsonlTracker(tmp_path).log({"policy/loss": 1.0}, 1)
    with pytest.raises(SystemExit, match="quickstart: the run has none of these metrics: reward/mean, eval/"):
        draw("quickstart", tmp_path, tmp_path)
