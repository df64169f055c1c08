"""The complete output of runs on a terminal and into a file, compared with snapshots in `console`."""

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
"""Overrides that avoid output that depends on the machine or on the responses of an untrained model."""
SNAPSHOTS = Path(__file__).parent / "console"
COLUMNS, ROWS = 600, 100  # wide enough for the model's responses, whose length would decide where lines wrap
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
    """Run an entrypoint in this process as if the program had not configured logging, and return its output."""

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


def test_configuration_mistakes_on_console(
    shown: Callable[..., str], small: Callable[[Path], list[str]], tmp_path: Path
):
    mistakes = [
        "trainer.lr=1e-6",
        "trainer.epochs=0",
        "generator.backend=vlm",
        "trainer.policy.model.path=/nowhere/model",
    ]
    assert_matches_snapshot(shown(*small(tmp_path), *mistakes, expect=2), tmp_path, SNAPSHOTS / "mistakes.txt")


@pytest.fixture
def failing(small: Callable[[Path], list[str]], plugin: str, tmp_path: Path) -> list[str]:
    """Overrides of a run in which the episodes of every other row fail."""
    data = tmp_path / "rows.jsonl"
    rows = [{"prompt": [{"role": "user", "content": f"say {i}"}], "broken": i % 2 == 0} for i in range(4)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *(override for override in small(tmp_path) if not override.startswith(("environment.env_class", "data."))),
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
    assert_matches_snapshot(text, tmp_path, SNAPSHOTS / "environment_fails_and_memory_runs_out.txt")


@pytest.mark.on_demand
def test_too_many_failed_episodes_on_console(shown: Callable[..., str], failing: list[str], tmp_path: Path):
    text = shown(*failing, f"trainer.ckpt_path={tmp_path / 'other'}", "trainer.max_failed_fraction=0.2", expect=1)
    assert_matches_snapshot(text, tmp_path, SNAPSHOTS / "too_many_fail.txt")


@pytest.mark.on_demand
def test_run_on_terminal(small: Callable[[Path], list[str]], tmp_path: Path):
    controller, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (ROWS, COLUMNS))
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    overrides = [*small(tmp_path), "trainer.max_steps=2", *QUIET]
    env = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"TERM": "xterm-256color"}
    with subprocess.Popen(
        command("main_base", overrides), stdin=terminal, stdout=terminal, stderr=terminal, env=env
    ) as run:
        os.close(terminal)
        while data := _read(controller):
            stream.feed(data)
    os.close(controller)
    text = "\n".join(line.rstrip() for line in screen.display).rstrip()
    assert run.returncode == 0, text
    assert_matches_snapshot(text, tmp_path, SNAPSHOTS / "terminal.txt")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 2**16)
    except OSError:  # the other side is closed
        return b""


@pytest.mark.on_demand
def test_interrupted_and_resumed_run_on_console(
    shown: Callable[..., str], small: Callable[[Path], list[str]], tmp_path: Path
):
    overrides = [*small(tmp_path), *QUIET, "trainer.epochs=2", "trainer.console_samples_interval=100"]

    metrics, ended = tmp_path / "ckpts" / "metrics.jsonl", threading.Event()

    def interrupt() -> None:
        while not ended.wait(0.005):
            if metrics.exists() and '"step": 2,' in metrics.read_text():
                signal.raise_signal(signal.SIGINT)
                return

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    try:
        interrupted = shown(*overrides, expect=130)
    finally:
        ended.set()
        interrupting.join()
    logs = tmp_path / "ckpts" / "logs"
    before = {path.name: path.read_text() for path in logs.iterdir()}
    for name, text in (("interrupted", interrupted), ("resumed", shown(*overrides, expect=0))):
        without_steps = re.sub(r"(?m)^step \d+: .*\n", "", text)  # they depend on when the signal arrived
        assert_matches_snapshot(without_steps, tmp_path, SNAPSHOTS / f"{name}.txt")
    first, driver = logs / "attempt_1", "driver.log"
    assert {path.name for path in first.iterdir()} == {*before} == {path.name for path in logs.iterdir()} - {first.name}
    assert (first / driver).read_text() == before[driver] and " step 12/12 " not in before[driver]
    assert "INFO skyrl_train.report.console: step 12/12 " in (logs / driver).read_text()
    assert (logs / "learner_0.log").read_text().startswith("--- learner 0, process ")
