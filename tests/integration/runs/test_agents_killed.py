"""Kills in the middle of a session: of an agent, of an engine, and of the driver. Gates make them hit there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from skyrl_train.data.dataset import PromptOrder
from skyrl_train.environments.tasks.arithmetic import generate
from skyrl_train.report.rollout_files import RolloutReader
from tests.support import gated_agent
from tests.support.gated_agent import SAMPLES
from tests.support.process_state import is_running

from .conftest import Run, command, engines_of, kill_driver, metrics_of

KEY, SEED = "environment.skyrl_gym.agent", 1
COMMAND = [
    f"{KEY}.command={json.dumps([sys.executable, '-S', gated_agent.__file__, '{model}', '{row.plan}'])}",
    f"{KEY}.sandbox.kind=none",
    f"{KEY}.sandbox.i_know_this_runs_model_code_on_this_machine=true",
]
COROUTINE = [f"{KEY}.run={gated_agent.__name__}:run"]
ASYNCHRONOUS = ["trainer.fully_async.enabled=true", "trainer.placement.colocate_all=false"]
TIMED = (
    *("async/engines_idle", "async/trainer_idle", "async/in_flight", "async/queue"),
    "engines/prefix_cache_hit_rate",  # the engine reuses a prompt only while an equal one waits
)
"""Metrics of runs with agents that depend on a clock."""
Small = Callable[[Path], list[str]]


def overrides_of(small: Small, folder: Path, steps: Sequence[Sequence[str | None]]) -> list[str]:
    """Return the overrides of a run whose steps have two rows each: what their agents do, or None for another one."""
    folder.mkdir()
    order, rows = PromptOrder(2 * len(steps), SEED), generate(2 * len(steps), 2, 9, 0, "train")
    for position, do in enumerate(do for step in steps for do in step):
        number = order.row(position)
        if do is not None:
            plan = {"folder": str(folder), "step": position // 2 + 1, "number": number, "do": do}
            rows[number] = {"prompt": [{"role": "user", "content": "say"}], "env_class": "agent", "plan": plan}
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *(override for override in small(folder) if not override.startswith("data.")),
        f"data.train_data=['{folder / 'rows.jsonl'}']",
        "data.val_data=[]",
        f"trainer.seed={SEED}",
        f"trainer.max_steps={len(steps)}",
        "trainer.train_batch_size=2",
        "trainer.policy_mini_batch_size=2",
        "trainer.eval_before_train=false",
        "trainer.eval_interval=0",
        "trainer.ckpt_interval=1",
        "trainer.keep_rollouts=all",
        f"generator.n_samples_per_prompt={SAMPLES}",
        "generator.max_input_length=200",
    ]


def wait_for(condition: Callable[[], Any], describe: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline, describe()
        time.sleep(0.02)


def count_marks(folder: Path, event: str, step: int) -> int:
    return len(list(folder.glob(f"{event}-{step}-*")))


def orphans_of(folder: Path) -> list[int]:
    """Return the ids of the processes that killed agents left in a session of its own."""
    return [int(text) for file in folder.glob("orphan-*") if (text := file.read_text()).endswith("\n")]


def failures_of(folder: Path, step: int) -> list[str]:
    """Return the failure kinds of a step's episodes, which are counted and not trained on."""
    rows = RolloutReader(folder / "ckpts").table([step]).to_pylist()
    failed = [row for row in rows if row["status"] == "failed"]
    assert not any(any(row["trained"]) for row in failed)
    assert metrics_of(folder)[step]["rollouts/failed"] == len(failed)
    return sorted(row["error"] for row in failed)


@pytest.mark.slow
@pytest.mark.fault("F37")
@pytest.mark.parametrize(
    ("agent", "preset"),
    [
        pytest.param(COMMAND, [], id="command-synchronous"),
        pytest.param(COMMAND, ASYNCHRONOUS, id="command-asynchronous", marks=pytest.mark.on_demand),
        pytest.param(COROUTINE, ASYNCHRONOUS, id="coroutine-asynchronous", marks=pytest.mark.on_demand),
    ],
)
def test_killed_driver_resumes_agents_exactly(
    run: Run, small: Small, agent: list[str], preset: list[str], tmp_path: Path
):
    """Agents of step 2 hold after their first call when the driver is killed. Other commands of it kill themselves."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    failed = SAMPLES if agent is COMMAND else 0  # a coroutine would kill the others of its process, too
    ahead: list[list[str | None]] = [["", ""]] if preset else []  # the sessions of step 3 are open while step 2 runs
    steps: list[list[str | None]] = [["", ""], ["hold", "kill" if failed else ""], *ahead]
    common = [*agent, *preset, f"trainer.hf_save_interval={len(steps)}", "generator.max_num_seqs=1"]
    overrides = [*overrides_of(small, killed, steps), *common]
    (killed / "hold-2").touch()
    with (killed / "killed.log").open("w") as log:
        driver = subprocess.Popen(command("main_base", overrides), stdout=log, stderr=log, env=os.environ)
    try:
        run("main_base", *overrides_of(small, straight, steps), *common)
        latest = killed / "ckpts" / "latest_ckpt_global_step.txt"
        wait_for(
            lambda: (
                latest.is_file()
                and count_marks(killed, "open", 2) == 2 * SAMPLES
                and count_marks(killed, "done", 2) == SAMPLES - failed
                and len(orphans_of(killed)) == failed
                and count_marks(killed, "started", 3) == 2 * SAMPLES * len(ahead)
            ),
            (killed / "killed.log").read_text,
        )
    finally:
        kill_driver(driver)
    assert latest.read_text() == "1"
    (killed / "hold-2").unlink()
    run("main_base", *overrides)
    orphans = orphans_of(straight) + orphans_of(killed)
    assert len(orphans) == 3 * failed and not any(map(is_running, orphans))
    assert failures_of(killed, 2) == ["agent_crashed"] * failed
    assert sorted(metrics_of(killed)) == list(range(len(steps) + 1))
    assert untimed_metrics(killed) == untimed_metrics(straight)
    assert untimed_rollouts(killed) == untimed_rollouts(straight)
    weights = f"exports/global_step_{len(steps)}/policy/model.safetensors"
    resumed, expected = load_file(killed / weights), load_file(straight / weights)
    assert all(bool((resumed[name] == tensor).all()) for name, tensor in expected.items())


def untimed_metrics(folder: Path) -> dict[int, dict[str, Any]]:
    return {
        step: {name: value for name, value in row.items() if name not in TIMED}
        for step, row in metrics_of(folder).items()
    }


def untimed_rollouts(folder: Path) -> list[dict[str, Any]]:
    table = RolloutReader(folder / "ckpts").table().drop_columns(["env_extras"])  # they name the folder
    rows: list[dict[str, Any]] = table.to_pylist()
    for turn in (turn for row in rows for turn in row["turns"]):
        del turn["running_s"], turn["environment_s"]
    return rows


@pytest.mark.slow
@pytest.mark.fault("F29")
def test_sessions_survive_killed_engine_and_worker(run: Run, small: Small, tmp_path: Path):
    """An engine with calls of sessions is killed in step 2, and the process of a row's agents in step 3."""
    folder = tmp_path / "run"
    steps: list[list[str | None]] = [["", ""], ["hold", "hold"], ["kill once", None], ["", ""]]
    overrides = [*overrides_of(small, folder, steps), *COROUTINE, "generator.num_inference_engines=2"]
    for call in (1, 2):
        (folder / f"hold-{call}").touch()
    with ThreadPoolExecutor(1) as pool:
        kill = pool.submit(kill_engine_during_calls, folder)
        run("main_base", *overrides)
        assert kill.result() < 2 * SAMPLES, "no session waited for the engine that was killed"
    rows = metrics_of(folder)
    assert [rows[step]["rollouts/failed"] for step in range(1, 5)] == [0, 0, SAMPLES, 0]
    assert failures_of(folder, 3) == ["agent_crashed"] * SAMPLES
    assert [rows[step]["agent/calls"] for step in (1, 2, 4)] == [2, 2, 2]
    assert rows[4]["engines/restarts"] == 1
    assert all(rows[step]["rollout/logprob_diff_max"] <= 1e-4 for step in range(1, 5))
    (orphan,) = orphans_of(folder)
    assert not is_running(orphan)


def kill_engine_during_calls(folder: Path) -> int:
    """Kill an engine during the second calls of step 2. Return how many of its agents had their answer by then."""
    wait_for(lambda: count_marks(folder, "started", 2) == 2 * SAMPLES)
    engines = engines_of(os.getpid())
    send(signal.SIGSTOP, engines)
    release(folder, 1)
    time.sleep(1.0)  # the requests arrive, so that both engines get sessions
    send(signal.SIGCONT, engines)
    wait_for(lambda: count_marks(folder, "open", 2) == 2 * SAMPLES)
    send(signal.SIGSTOP, engines[:1])
    release(folder, 2)
    wait_for(lambda: count_marks(folder, "done", 2))
    time.sleep(0.5)  # the other engine may answer more
    answered = count_marks(folder, "done", 2)
    send(signal.SIGKILL, engines[:1])
    return answered


def release(folder: Path, call: int) -> None:
    (folder / f"hold-{call}").unlink()
    wait_for(lambda: count_marks(folder, f"call-{call}", 2) == 2 * SAMPLES)


def send(number: signal.Signals, processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        process.send_signal(number)
