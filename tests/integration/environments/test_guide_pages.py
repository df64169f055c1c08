"""The files of first_reward.md, tool_environment.md and environments.md work; `env try` prints what the pages show.

The evaluation of reward_stays_zero.md runs too. The model is tiny where the pages train. test_quickstart.py has the
model with which first_reward.md begins.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import datasets
import pytest

from skyrl_train.report.jsonl import METRICS_FILE, read_jsonl
from skyrl_train.testing.tiny_models import save_tiny_model
from tests.support.doc_pages import REPOSITORY, Command, fenced_blocks, find_commands, snippets

REWARDS, TOOLS = "docs/guides/first_reward.md", "docs/guides/tool_environment.md"
ENVIRONMENTS = "docs/concepts/environments.md"
FUNCTION, SECOND_FUNCTION = snippets(REWARDS)
(ENVIRONMENT,) = snippets(TOOLS)
SMALL = ["trainer.max_steps=2", "trainer.train_batch_size=4", "trainer.policy_mini_batch_size=4"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the files of the pages and the rows that their programs write."""
    program, main, training = FUNCTION.partition('\n\nif __name__ == "__main__":\n')
    (tmp_path / "my_rewards.py").write_text(program + "\n\n" + SECOND_FUNCTION + main + training)
    (tmp_path / "my_tools.py").write_text(ENVIRONMENT)
    (tmp_path / "my_envs.py").write_text(snippets(ENVIRONMENTS)[0])
    (tmp_path / "guess.jsonl").write_text(snippets(ENVIRONMENTS, "json")[0])
    (tmp_path / "write_rows.py").write_text(program + main + training.partition("    cfg = ")[0])
    run("python write_rows.py", tmp_path)
    run("python my_tools.py", tmp_path)
    return tmp_path


def run(command: str, folder: Path) -> str:
    """Return the output of a command that is run in the folder with the environment of the tests."""
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    env |= {"PATH": programs, "PYTHONPATH": os.pathsep.join([str(folder), str(REPOSITORY)])}
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return done.stdout


def commands_of_page(page: str, start: str) -> list[Command]:
    return [command for command in find_commands(start) if command.page == page]


@pytest.mark.parametrize("page", [REWARDS, TOOLS, ENVIRONMENTS])
def test_env_try_prints_what_page_shows(page: str, folder: Path):
    tried = [text for name, text in fenced_blocks("bash") if name == page and "env try" in text]
    shown = [block for block in snippets(page, "text") if block.startswith("episode 1: ")]
    assert [run(command, folder) for command in tried] == shown


def test_pages_show_rows_of_their_programs(folder: Path):
    for page, name in ((REWARDS, "train.jsonl"), (TOOLS, "shopping.jsonl")):
        (row,) = snippets(page, "json")
        assert re.sub(r",\n *", ", ", row).strip() == (folder / name).read_text().splitlines()[0]


@pytest.mark.on_demand
@pytest.mark.slow
def test_first_reward_program_trains(folder: Path):
    save_tiny_model(folder / "model")
    program = FUNCTION.replace('"trainer.max_steps": 12', '"trainer.max_steps": 2').replace('_size": 32', '_size": 4')
    (folder / "my_rewards.py").write_text(program)
    printed = run("python my_rewards.py", folder)
    assert re.search(r"^2 \d", printed, re.MULTILINE)


@pytest.mark.on_demand
@pytest.mark.slow
@pytest.mark.parametrize(("page", "metric"), [(REWARDS, "environment/shows_work"), (TOOLS, "environment/tool_errors")])
def test_documented_command_trains(page: str, metric: str, folder: Path):
    save_tiny_model(folder / "model")
    (command,) = commands_of_page(page, "skyrl-train train")
    small = [*SMALL, "trainer.policy.model.path=model", "trainer.ckpt_path=run"]
    run(shlex.join([*command.words, *small, "generator.sampling_params.max_generate_length=16"]), folder)
    rows = read_jsonl(folder / "run" / METRICS_FILE)
    assert rows[-1]["step"] == 2 and rows[-1]["rollouts/failed"] == 0
    assert page == TOOLS or metric in rows[-1]


@pytest.mark.on_demand
@pytest.mark.slow
def test_documented_evaluation_measures_pass_rate(folder: Path):
    save_tiny_model(folder / "model")
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()[:4]]
    (folder / "data" / "gsm8k").mkdir(parents=True)
    datasets.Dataset.from_list(rows).to_parquet(folder / "data" / "gsm8k" / "validation.parquet")
    (command,) = find_commands("skyrl-train generate")
    small = ["trainer.policy.model.path=model", "generator.eval_sampling_params.max_generate_length=8"]
    words = " ".join(['"' + word + '"' for word in [*command.words, *small, "trainer.ckpt_path=run"]])
    assert "pass_at_8" in run(f"HOME={folder} && {words}", folder)
