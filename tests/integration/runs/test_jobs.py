"""`ray job submit` of the GSM8K recipe to a cluster with a token, from a separate folder and home."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from skyrl_train.cluster.addresses import free_address
from skyrl_train.testing.tiny_models import save_tiny_model
from tests.support.process_state import wait_for_exit

from .conftest import metrics_of
from .front_door import REPOSITORY

RAY = str(Path(sys.executable).with_name("ray"))
PLUGIN = """
import skyrl_train as sk


@sk.register.environment("of_the_folder")
class OfTheFolder(sk.TextEnv):
    def step(self, action):
        return sk.StepOutput(observations=[], reward=float(len(action) % 2), done=True)
"""
"""A module that is only in the submitted folder, where the driver, ranks, the engine and environment processes find it.
"""
START_TIMEOUT_S = 120


@dataclass(frozen=True)
class JobServer:
    """A cluster's job server, and a client's access to it from another machine."""

    client: dict[str, str]
    """The client's environment with address and token, without files that contain them."""
    raylet: psutil.Process

    def job(self, *arguments: str, **env: str) -> str:
        """Run `ray job` and return its output."""
        with subprocess.Popen(
            [RAY, "job", *arguments],
            env=self.client | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as done:
            return done.communicate(timeout=300)[0]

    def workers(self) -> list[psutil.Process]:
        """Return the processes of ranks and engines."""
        processes = self.raylet.children()
        return [process for process in processes if "WorkerActor" in process.name()]


@pytest.fixture
def job_server(tmp_path: Path) -> Iterator[JobServer]:
    """Start a job server as docs/guides/clusters.md does by hand, on a machine with two CPUs and a separate home."""
    if importlib.util.find_spec("aiohttp_cors") is None:
        pytest.skip("ray[default] is not installed: the extra `jobs`")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {name: os.environ[name] for name in ("SKYRL_TEST_SESSION", "HF_HUB_OFFLINE", "OMP_NUM_THREADS")}
    environment |= {"PATH": path, "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
    for home in ("head", "laptop"):
        (tmp_path / home).mkdir()
    on_head = environment | {"HOME": str(tmp_path / "head")}
    subprocess.run([RAY, "get-auth-token", "--generate"], env=on_head, check=True, capture_output=True, timeout=60)
    port, folder = free_address()[1], tempfile.mkdtemp(prefix="ray-")
    command = [RAY, "start", "--head", "--block", f"--port={free_address()[1]}", f"--dashboard-port={port}"]
    command += ["--num-cpus=2", f"--temp-dir={folder}", "--object-store-memory=200000000"]
    with subprocess.Popen(command, env=on_head, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as head:
        assert head.stdout is not None
        try:
            assert any("Ray runtime started" in line for line in head.stdout), "Ray did not start"
            yield JobServer(
                environment
                | {
                    "HOME": str(tmp_path / "laptop"),
                    "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{port}",
                    "RAY_AUTH_TOKEN": (tmp_path / "head" / ".ray" / "auth_token").read_text(),
                },
                next(process for process in psutil.Process(head.pid).children() if process.name() == "raylet"),
            )
        finally:
            head.terminate()
            head.communicate(timeout=60)
            shutil.rmtree(folder, ignore_errors=True)


def _wait_until(is_met: Callable[[], object], problem: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not is_met():
        assert time.monotonic() < deadline, f"{problem}: {log.read_text()[-6000:]}"
        time.sleep(0.1)


def _steps(folder: Path) -> list[int]:
    metrics = folder / "ckpts" / "metrics.jsonl"
    return [int(step) for step in re.findall(r'"step": (\d+),', metrics.read_text())] if metrics.exists() else []


@pytest.mark.on_demand
@pytest.mark.slow
def test_submitted_job_outlives_client_and_stops_cleanly(job_server: JobServer, gsm8k_recipe: Path, tmp_path: Path):
    (gsm8k_recipe / "of_the_folder.py").write_text(PLUGIN)
    variables = {"RAY_JOB_STOP_WAIT_TIME_S": "600", "PYTHONPATH": str(REPOSITORY)}
    submit = [RAY, "job", "submit", "--submission-id=gsm8k", "--working-dir=."]
    submit += ["--runtime-env-json", json.dumps({"env_vars": variables}), "--"]
    run = ["python", "-m", "skyrl_train.entrypoints.main_base", "--config-dir=.", "--config-name=gsm8k"]
    run += [
        "data.train_data=[train.parquet]",
        "data.val_data=[validation.parquet]",
        f"trainer.policy.model.path={save_tiny_model(tmp_path / 'qwen3', 'qwen3')}",
        f"trainer.ckpt_path={tmp_path / 'ckpts'}",
        f"trainer.export_path={tmp_path / 'exports'}",
        "trainer.plugins=[of_the_folder]",
        "environment.env_class=of_the_folder",
        "trainer.algorithm.use_kl_loss=false",
        "trainer.logger=console",
        "trainer.train_batch_size=4",
        "trainer.policy_mini_batch_size=4",
        "trainer.max_prompt_length=1024",
        "trainer.eval_before_train=false",
        "trainer.eval_interval=0",
        "trainer.ckpt_interval=100000",  # so that only the end of the run saves a checkpoint
        "trainer.epochs=1000",
        "generator.sampling_params.max_generate_length=16",
    ]
    client_log = tmp_path / "client.log"
    with client_log.open("w") as log:
        client = subprocess.Popen(
            [*submit, *run], cwd=gsm8k_recipe, env=job_server.client | {"PYTHONUNBUFFERED": "1"}, stdout=log, stderr=log
        )
    _wait_until(lambda: len(_steps(tmp_path)) >= 2, "no steps", client_log)
    _wait_until(
        lambda: re.search(r"^step +\d+/\d+ ", client_log.read_text(), re.M), "the client shows no steps", client_log
    )
    client.send_signal(signal.SIGINT)
    assert client.wait(30) != 0
    reached = _steps(tmp_path)[-1]
    _wait_until(lambda: _steps(tmp_path)[-1] >= reached + 2, "the run ended with its client", client_log)

    assert "RUNNING" in job_server.job("status", "gsm8k")
    assert "Invalid authentication token" in job_server.job("status", "gsm8k", RAY_AUTH_TOKEN="wrong")

    workers = job_server.workers()
    assert len(workers) >= 2, "a rank and an engine"
    assert "was stopped" in job_server.job("stop", "gsm8k")
    rows, printed = metrics_of(tmp_path), job_server.job("logs", "gsm8k")
    last = max(rows)
    assert (tmp_path / "ckpts" / "latest_ckpt_global_step.txt").read_text() == str(last)
    assert (tmp_path / "ckpts" / f"global_step_{last}" / "manifest.json").is_file()
    assert rows[last]["rollouts/failed"] == 0
    assert "\nended by SIGTERM\n" in printed
    assert f"resume from step {last}" in printed
    assert "warning: `ray job stop`" not in printed
    assert all(wait_for_exit(worker.pid) for worker in workers), "the job's slots are released"
    token = job_server.client["RAY_AUTH_TOKEN"]
    assert token not in printed + job_server.job("list")
    written = [file for file in (tmp_path / "ckpts").rglob("*") if file.is_file()]
    assert [file for file in written if token.encode() in file.read_bytes()] == []
