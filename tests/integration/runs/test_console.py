"""What a run prints, whole, on a terminal and into a file: kept texts in `console`."""

from __future__ import annotations

import json
import logging
import os
import pty
import re
import signal
import subprocess
import termios
import threading
from collections.abc import Callable
from pathlib import Path

import pyte
import pytest

from tests.support.snapshots import assert_matches_snapshot

from .conftest import Run, command

QUIET = ["device=cpu", "trainer.guards.max_cut_fraction=null"]
"""Nothing that depends on the machine, or on what a model without training says."""
KEPT = Path(__file__).parent / "console"
COLUMNS, ROWS = 600, 100  # wide: where lines wrap depends on what the model said
PLUGIN = """
import torch
import skyrl_train as sk
from skyrl_train.environments.base import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_train.environments.registry import register

updates = 0


@sk.register.policy_loss("large")
def large(logprobs, advantages, mask, *, eps_clip_low, eps_clip_high):
    global updates
    updates += 1
    if updates == 4:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return -logprobs * advantages * mask, torch.zeros_like(mask)


class Fails(BaseTextEnv):
    def step(self, action):
        if self.extras["broken"]:
            raise KeyError("no such tool")
        return BaseTextEnvStepOutput(observations=[], reward=float(len(action) % 3), done=True, metadata={})


register("fails", "console_plugin:Fails")
"""


@pytest.fixture
def shown(run: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What a run of this process prints, as if the program had set up no logging."""

    def start(*overrides: str, expect: int) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(logging.getLogger(), "handlers", [])
            done = run("main_base", *overrides, expect=expect)
        return f"{done.stdout}--- stderr\n{done.stderr}"

    return start


@pytest.fixture
def plugin(plugins: Path) -> str:
    (plugins / "console_plugin.py").write_text(PLUGIN)
    return "trainer.plugins=[console_plugin]"


def test_configuration_mistakes_on_console(shown: Callable[..., str], small: Callable[[Path], list[str]], tmp_path: Path):
    wrong = ["trainer.lr=1e-6", "trainer.epochs=0", "generator.backend=vlm", "trainer.policy.model.path=/nowhere/model"]
    assert_matches_snapshot(shown(*small(tmp_path), *wrong, expect=2), tmp_path, KEPT / "mistakes.txt")


@pytest.fixture
def failing(small: Callable[[Path], list[str]], plugin: str, tmp_path: Path) -> list[str]:
    """Overrides of a run in which every other row's episodes fail."""
    data = tmp_path / "rows.jsonl"
    rows = [{"prompt": [{"role": "user", "content": f"say {i}"}], "broken": i % 2 == 0} for i in range(4)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *(one for one in small(tmp_path) if not one.startswith(("environment.env_class", "data."))),
        f"data.train_data=['{data}']",
        "environment.env_class=fails",
        "trainer.eval_before_train=false",
        "trainer.eval_interval=0",
        plugin,
        *QUIET,
    ]


def test_failing_environment_then_out_of_memory_on_console(
    shown: Callable[..., str], failing: list[str], tmp_path: Path
):
    overrides = ["trainer.epochs=5", "trainer.max_failed_fraction=0.9", "trainer.algorithm.policy_loss_type=large"]
    text = shown(*failing, *overrides, expect=1)
    assert_matches_snapshot(text, tmp_path, KEPT / "environment_fails_and_memory_runs_out.txt")


@pytest.mark.on_demand
def test_too_many_failed_episodes_on_console(shown: Callable[..., str], failing: list[str], tmp_path: Path):
    text = shown(*failing, f"trainer.ckpt_path={tmp_path / 'other'}", "trainer.max_failed_fraction=0.2", expect=1)
    assert_matches_snapshot(text, tmp_path, KEPT / "too_many_fail.txt")


@pytest.mark.on_demand
def test_run_on_terminal(small: Callable[[Path], list[str]], tmp_path: Path):
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (ROWS, COLUMNS))
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    overrides = [*small(tmp_path), "trainer.max_steps=2", *QUIET]
    env = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"TERM": "xterm-256color"}
    with subprocess.Popen(command("main_base", overrides), stdin=theirs, stdout=theirs, stderr=theirs, env=env) as run:
        os.close(theirs)
        while data := _read(ours):
            stream.feed(data)
    os.close(ours)
    text = "\n".join(line.rstrip() for line in screen.display).rstrip()
    assert run.returncode == 0, text
    assert_matches_snapshot(text, tmp_path, KEPT / "terminal.txt")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 2**16)
    except OSError:  # nobody writes any more
        return b""


@pytest.mark.on_demand
def test_interrupted_and_resumed_run_on_console(
    shown: Callable[..., str], small: Callable[[Path], list[str]], tmp_path: Path
):
    overrides = [*small(tmp_path), *QUIET, "trainer.epochs=2", "trainer.console_samples_interval=100"]

    metrics, over = tmp_path / "ckpts" / "metrics.jsonl", threading.Event()

    def interrupt() -> None:
        while not over.wait(0.005):
            if metrics.exists() and '"step": 2,' in metrics.read_text():
                signal.raise_signal(signal.SIGINT)
                return

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    try:
        told = shown(*overrides, expect=130)
    finally:
        over.set()
        interrupting.join()
    logs = tmp_path / "ckpts" / "logs"
    before = {path.name: path.read_text() for path in logs.iterdir()}
    for name, text in (("told_to_end", told), ("goes_on", shown(*overrides, expect=0))):
        steps_apart = re.sub(r"(?m)^step \d+: .*\n", "", text)  # which depends on where it was told
        assert_matches_snapshot(steps_apart, tmp_path, KEPT / f"{name}.txt")
    first, driver = logs / "attempt_1", "driver.log"
    assert {path.name for path in first.iterdir()} == {*before} == {path.name for path in logs.iterdir()} - {first.name}
    assert (first / driver).read_text() == before[driver] and " step 12/12 " not in before[driver]
    assert "INFO skyrl_train.report.console: step 12/12 " in (logs / driver).read_text()
    assert (logs / "learner_0.log").read_text().startswith("--- learner 0, process ")
