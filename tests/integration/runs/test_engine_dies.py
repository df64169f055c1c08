"""An engine that dies in the middle of a run: the run goes on, or stops with what it learnt and the first cause."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from .conftest import command, metrics_of


def engines_of(driver: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Ray's worker processes that hold an engine: the async actors."""
    found = []
    for process in psutil.Process(driver.pid).children(recursive=True):
        try:
            if "_AsyncShell" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def run_and_kill(overrides: list[str], folder: Path, kills: int, signal_sent: signal.Signals) -> tuple[int, str]:
    """Start a run and send the signal to `kills` engines after the first step; returns exit code and output."""
    metrics, log = folder / "ckpts" / "metrics.jsonl", folder / "run.log"
    deadline = time.monotonic() + 240
    with log.open("w") as output:
        driver = subprocess.Popen(command("main_base", overrides), stdout=output, stderr=output, env=os.environ)
    try:
        hit: set[int] = set()
        while driver.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
            started = metrics.exists() and re.search(r'"step": 1,', metrics.read_text())
            for engine in engines_of(driver) if started and len(hit) < kills else ():
                if engine.pid not in hit and len(hit) < kills:
                    hit.add(engine.pid)
                    engine.send_signal(signal_sent)
        assert len(hit) == kills, log.read_text()[-4000:]
        return driver.wait(timeout=max(1.0, deadline - time.monotonic())), log.read_text()
    finally:
        driver.kill()


@pytest.mark.slow
@pytest.mark.fault("F29")
@pytest.mark.parametrize("engines", [1, 2])
def test_a_killed_engine_comes_back_with_current_weights(
    small: Callable[[Path], list[str]], tmp_path: Path, engines: int
):
    overrides = [
        *small(tmp_path),
        "trainer.max_steps=6",
        f"generator.num_inference_engines={engines}",
        "generator.weight_sync_check=probe",
        "trainer.eval_before_train=false",
    ]
    code, output = run_and_kill(overrides, tmp_path, kills=1, signal_sent=signal.SIGKILL)
    assert code == 0, output[-4000:]
    found = metrics_of(tmp_path)
    assert set(found) == {1, 2, 3, 4, 5, 6}
    assert found[6]["engines/restarts"] == 1
    for values in found.values():
        assert values["rollouts/failed"] == 0
        assert values["rollout/logprob_diff_max"] <= 1e-4


@pytest.mark.slow
@pytest.mark.fault("F29")
def test_without_restarts_the_run_stops_and_keeps_what_it_learnt(small: Callable[[Path], list[str]], tmp_path: Path):
    overrides = [*small(tmp_path), "trainer.max_steps=60", "trainer.epochs=20", "generator.max_engine_restarts=0"]
    code, output = run_and_kill([*overrides, "trainer.ckpt_interval=50"], tmp_path, 1, signal.SIGKILL)
    assert code == 1
    assert "restarts of generator.max_engine_restarts are spent" in output
    assert "died" in output
    saved = (tmp_path / "ckpts" / "latest_ckpt_global_step.txt").read_text()
    assert int(saved) >= 1
