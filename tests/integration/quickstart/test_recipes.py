"""The recipes that start from the quickstart's run work with the commands on their pages, at a small size."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_train.report.jsonl import METRICS_FILE, read_jsonl
from tests.support.doc_pages import REPOSITORY, Command, find_commands

QUICKSTART = REPOSITORY / "examples" / "quickstart" / "quickstart.py"
RECIPES = find_commands(r"skyrl-train train --config-dir runs/quickstart")
EXPORTS = find_commands(r"skyrl-train export runs/quickstart")
SMALL = ["trainer.max_steps=2", "trainer.eval_interval=2", "trainer.ckpt_interval=2"]
BATCH = ["trainer.train_batch_size=4", "trainer.policy_mini_batch_size=4"]


def start(words: list[str]) -> None:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]


def localize(command: Command, runs: Path) -> list[str]:
    """Return the command's arguments with the folder of the small quickstart and its last checkpoint."""
    words = [re.sub(r"(^|=)runs/", rf"\g<1>{runs}/", word) for word in command.words[1:]]
    return ["-m", "skyrl_train.entrypoints.cli", *(word.replace("global_step_40", "global_step_2") for word in words)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a small quickstart and the documented exports; return the folder of the runs."""
    folder = tmp_path_factory.mktemp("runs")
    start([str(QUICKSTART), "--output", str(folder / "quickstart"), "--warm-up-steps", "2", *SMALL, *BATCH])
    for command in EXPORTS:
        start(localize(command, folder))
    return folder


@pytest.mark.on_demand
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("command", RECIPES, ids=lambda command: Path(command.page).parent.name)
def test_recipe_trains_from_quickstart_run(command: Command, runs: Path):
    start([*localize(command, runs), *SMALL])
    (folder,) = (word.removeprefix("trainer.ckpt_path=") for word in command.words if "ckpt_path=" in word)
    lines = read_jsonl(runs / Path(folder).relative_to("runs") / METRICS_FILE)
    assert [line["step"] for line in lines if "policy/grad_norm" in line] == [1, 2]
