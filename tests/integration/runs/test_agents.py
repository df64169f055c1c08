"""Runs whose rollouts are programs that call a chat API, from the command line to the training batch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from skyrl_train.environments.tasks.arithmetic import generate
from skyrl_train.report.rollout_files import RolloutReader
from tests.support.agents import PROGRAM

from .conftest import Run, metrics_of

KEY = "environment.skyrl_gym.agent"
ASK = f"{KEY}.run=tests.support.coroutine_agents:ask"


@pytest.fixture
def mixed(small: Callable[[Path], list[str]], tmp_path: Path) -> list[str]:
    """Overrides of two steps on rows of two environments, of which half are agents with two calls."""
    agents = [
        {"prompt": [{"role": "user", "content": f"say {i}"}], "env_class": "agent", "calls": 2, "returned": i % 3}
        for i in range(4)
    ]
    rows = [*agents, *generate(4, 2, 9, 0, "train")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *(override for override in small(tmp_path) if not override.startswith("data.")),
        f"data.train_data=['{tmp_path / 'rows.jsonl'}']",
        f"data.val_data=['{tmp_path / 'rows.jsonl'}']",
        "generator.max_input_length=200",
        "trainer.max_steps=2",
        "trainer.keep_rollouts=all",
        ASK,
    ]


ASYNCHRONOUS = ["trainer.fully_async.enabled=true", "trainer.placement.colocate_all=false"]


@pytest.mark.parametrize(
    "preset",
    [
        pytest.param([], id="synchronous"),
        pytest.param(ASYNCHRONOUS, id="asynchronous", marks=[pytest.mark.on_demand, pytest.mark.slow]),
    ],
)
def test_agents_train_beside_other_environments(run: Run, mixed: list[str], preset: list[str], tmp_path: Path):
    run("main_base", *mixed, *preset)
    steps = [line for line in metrics_of(tmp_path).values() if "agent/calls" in line]
    assert len(steps) == 2
    assert all(line["agent/calls"] == 2 for line in steps)
    assert all(line["agent/retokenized_messages"] == 0 for line in steps)
    rows = RolloutReader(tmp_path / "ckpts").table().to_pylist()
    assert {row["status"] for row in rows} == {"ok"}
    assert {row["env_class"] for row in rows} == {"agent", "arithmetic"}


def test_command_is_evaluated(run: Run, mixed: list[str], tmp_path: Path):
    command = json.dumps([sys.executable, "-S", PROGRAM, "{model}", "1"])
    settings = [
        f"{KEY}.run=null",
        f"{KEY}.command={command}",
        f"{KEY}.grader=[test, -f, answer.txt]",
        f"{KEY}.sandbox.kind=none",
        f"{KEY}.sandbox.i_know_this_runs_model_code_on_this_machine=true",
    ]
    output = run("main_generate", *mixed, *settings, "generator.eval_n_samples_per_prompt=1").stdout
    assert '"eval/all/num_failed": 0' in output


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{KEY}.run=null"], "agent.command=null: must be set if"),
        (["environment.hosts=1"], "environment.hosts=1: must be 0 with rows of env_class agent"),
        ([f"{KEY}.run=no_module:run"], "agent.run=no_module:run cannot be imported"),
        ([f"{KEY}.reward=no_such_reward"], "no_such_reward"),
        ([f"{KEY}.host=192.0.2.1"], "cannot listen at 192.0.2.1"),
    ],
    ids=str,
)
def test_mistakes_stop_the_run_before_it_starts(run: Run, mixed: list[str], overrides: list[str], message: str):
    assert message in run("main_base", *mixed, *overrides, expect=2).stderr
