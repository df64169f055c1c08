"""An engine that dies during a run: the run continues, or saves its last step and stops with the first cause."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.support.snapshots import assert_matches_snapshot

from .conftest import command, engines_of, metrics_of

ADAPTER_ONLY = ["trainer.policy.model.lora.rank=8", "trainer.policy.model.lora.sync=adapter"]


@dataclass
class Run:
    code: int
    output: str
    engine_ended: bool
    """True if the engine process ended while the run continued."""


def run_and_signal_engine(overrides: list[str], folder: Path, signal_sent: signal.Signals) -> Run:
    """Start a run, send a signal to one engine after the first step, and return the result of the run."""
    metrics, log = folder / "ckpts" / "metrics.jsonl", folder / "run.log"
    deadline = time.monotonic() + 480
    with log.open("w") as output:
        driver = subprocess.Popen(command("main_base", overrides), stdout=output, stderr=output, env=os.environ)
    engine: psutil.Process | None = None
    engine_ended = False
    try:
        while driver.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
            if engine is None and metrics.exists() and re.search(r'"step": 1,', metrics.read_text()):
                engine = next(iter(engines_of(driver.pid)), None)
                if engine is not None:
                    engine.send_signal(signal_sent)
            if engine is not None and not engine_ended:
                engine_ended = not engine.is_running() and driver.poll() is None
        assert engine is not None, log.read_text()[-4000:]
        return Run(driver.wait(timeout=max(1.0, deadline - time.monotonic())), log.read_text(), engine_ended)
    finally:
        driver.kill()


def assert_complete(folder: Path, *, steps: int) -> None:
    """Assert that all steps were taken, one engine was restarted, and no rollout failed or has stale weights."""
    rows = metrics_of(folder)
    assert set(rows) == set(range(steps + 1))
    assert rows[steps]["engines/restarts"] == 1
    for step in range(1, steps + 1):
        values = rows[step]
        assert values["rollouts/failed"] == 0
        assert values["weights/version"] == step
        assert values["rollout/logprob_diff_max"] <= 1e-4


@pytest.mark.slow
@pytest.mark.fault("F29")
@pytest.mark.parametrize(
    ("engines", "adapters"),
    [
        pytest.param(1, [], id="1", marks=pytest.mark.on_demand),
        pytest.param(2, [], id="2", marks=pytest.mark.on_demand),
        pytest.param(2, ADAPTER_ONLY, id="2-adapters"),
    ],
)
def test_killed_engine_restarts_with_current_weights(
    small: Callable[[Path], list[str]], tmp_path: Path, engines: int, adapters: list[str]
):
    overrides = [
        *small(tmp_path),
        *adapters,
        "trainer.max_steps=6",
        f"generator.num_inference_engines={engines}",
        "generator.weight_sync_check=probe",
        "trainer.eval_before_train=false",
    ]
    run = run_and_signal_engine(overrides, tmp_path, signal.SIGKILL)
    assert run.code == 0, run.output[-4000:]
    assert_complete(tmp_path, steps=6)


@pytest.mark.on_demand
@pytest.mark.slow
@pytest.mark.fault("F29")
def test_hung_engine_is_replaced_at_its_deadline(small: Callable[[Path], list[str]], tmp_path: Path):
    overrides = [
        *small(tmp_path),
        "trainer.max_steps=3",
        "generator.num_inference_engines=2",
        "trainer.timeouts.rollout_s=8",
        "trainer.timeouts.weight_sync_s=15",
        "trainer.eval_before_train=false",
    ]
    run = run_and_signal_engine(overrides, tmp_path, signal.SIGSTOP)
    assert run.code == 0, run.output[-4000:]
    assert run.engine_ended, "the hung engine kept its GPU until the end of the run"
    assert_complete(tmp_path, steps=3)


@pytest.mark.on_demand
@pytest.mark.slow
@pytest.mark.fault("F29")
def test_run_without_restarts_saves_and_stops(small: Callable[[Path], list[str]], tmp_path: Path):
    overrides = [*small(tmp_path), "trainer.max_steps=60", "trainer.epochs=20", "generator.max_engine_restarts=0"]
    overrides += ["device=cpu", "trainer.guards.max_cut_fraction=null"]
    run = run_and_signal_engine([*overrides, "trainer.ckpt_interval=50"], tmp_path, signal.SIGKILL)
    assert run.code == 1
    assert "restarts that generator.max_engine_restarts allows are used up" in run.output
    assert_matches_snapshot(run.output, tmp_path, Path(__file__).parent / "console" / "engine_dies.txt")
    saved = (tmp_path / "ckpts" / "latest_ckpt_global_step.txt").read_text()
    assert int(saved) >= 1
