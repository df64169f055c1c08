"""Training and serving shut down cleanly when their process group receives a signal at any moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.request import Request, urlopen

import psutil
import pytest

from skyrl_train.cluster.addresses import free_address
from tests.support.signal_handlers import default_sighup, handles_signal

from .conftest import command

TOKEN = "token-for-tests"
on_demand = pytest.mark.on_demand


@dataclass(frozen=True)
class Program:
    """A run or a server in a new process group. Its leader may be the command `timeout`."""

    leader: subprocess.Popen[bytes]
    folder: Path

    @property
    def driver(self) -> psutil.Process:
        leader = psutil.Process(self.leader.pid)
        return leader.children()[0] if leader.name() == "timeout" else leader

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def children(self) -> list[str]:
        """Names of all running descendants of the driver."""
        names = []
        for child in self.driver.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                names.append(child.name())
        return names

    @property
    def recorded_steps(self) -> list[int]:
        metrics = self.folder / "ckpts" / "metrics.jsonl"
        return [json.loads(line)["step"] for line in metrics.read_text().splitlines()] if metrics.exists() else []

    def wait_until(self, reached: Callable[[Program], bool]) -> None:
        deadline = time.monotonic() + 200
        while not reached(self):
            assert self.leader.poll() is None and time.monotonic() < deadline, self.log[-4000:]
            time.sleep(0.01)

    def check_end(self, allowed: Sequence[int], send: Callable[[], None], within_s: float = 30) -> None:
        """Call `send`. The program must exit with an `allowed` status within `within_s` and leave no process behind."""
        driver = self.driver
        processes = driver.children(recursive=True)
        send()
        try:
            status = self.leader.wait(within_s)
        except subprocess.TimeoutExpired:
            driver.send_signal(signal.SIGABRT)  # faulthandler prints the stacks of all threads
            psutil.wait_procs([driver], timeout=10)
            pytest.fail(f"the program did not exit within {within_s:g} s:\n{self.log[-12_000:]}")
        assert status in allowed, self.log[-4000:]
        assert status <= 0 or f"ended by {signal.Signals(status - 128).name}" in self.log
        assert "Traceback" not in self.log, self.log[-8000:]
        _, remaining = psutil.wait_procs(processes, timeout=30)
        assert not remaining, f"still running: {[process.cmdline()[:3] for process in remaining]}"


Moments = dict[str, Callable[[Program], bool]]
STARTS: Moments = {
    "imports": lambda program: handles_signal(program.driver.pid, signal.SIGTERM),
    "Ray's start": lambda program: "gcs_server" in program.children,
    "workers' start": lambda program: any(name.startswith("ray::") for name in program.children),
}
TRAINING: Moments = {
    "step": lambda program: max(program.recorded_steps, default=0) >= 1,
    "checkpoint": lambda program: any((program.folder / "ckpts").glob("global_step_*.partial")),
    "evaluation": lambda program: "so far: evaluate" in program.log,
    "closing": lambda program: "steps, in" in program.log,
}
"""Conditions that show that a program has reached a moment."""
SIGNALS = [pytest.param(signal.SIGINT, marks=on_demand, id="SIGINT"), pytest.param(signal.SIGTERM, id="SIGTERM")]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="signals-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextmanager
def started(folder: Path, arguments: Sequence[str]) -> Iterator[Program]:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"TMPDIR": str(folder), "SKYRL_API_KEY": TOKEN, "PYTHONFAULTHANDLER": "1"}
    with (folder / "log").open("w") as log:
        leader = subprocess.Popen(
            arguments, stdout=log, stderr=log, env=environment, start_new_session=True, preexec_fn=default_sighup
        )
    program = Program(leader, folder)
    try:
        yield program
    finally:
        if leader.poll() is None:
            os.killpg(leader.pid, signal.SIGKILL)
            leader.wait()


@pytest.mark.fault("F39")
@pytest.mark.defect("signal-during-startup-hangs")
@pytest.mark.parametrize("moment", ["imports", "Ray's start", pytest.param("workers' start", marks=on_demand)])
@pytest.mark.parametrize("number", SIGNALS)
def test_group_signal_during_start_exits_immediately(
    moment: str, number: signal.Signals, small: Callable[[Path], list[str]], folder: Path
):
    with started(folder, command("main_base", small(folder))) as program:
        program.wait_until(STARTS[moment])
        sent = time.monotonic()
        program.check_end([128 + number], lambda: os.killpg(program.leader.pid, number), within_s=10)
        while (folders := list(folder.glob("ray-*[!k]"))) and time.monotonic() < sent + 30:
            time.sleep(0.05)
        assert not folders, "Ray's folder is deleted with the run"


@on_demand
@pytest.mark.fault("F39")
@pytest.mark.defect("group-signals-kill-ray-first")
@pytest.mark.parametrize("moment", TRAINING)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_group_signal_saves_last_step(
    moment: str, number: signal.Signals, small: Callable[[Path], list[str]], folder: Path
):
    with started(folder, command("main_base", [*small(folder), *training(moment)])) as program:
        program.wait_until(TRAINING[moment])
        late = [0] if moment == "closing" else []  # the interpreter has already removed its handlers
        program.check_end([128 + number, *late], lambda: os.killpg(program.leader.pid, number))
        check_saved(program)


@pytest.mark.fault("F39")
@pytest.mark.defect("group-signals-kill-ray-first")
@pytest.mark.parametrize("number", SIGNALS)
def test_timeout_saves_last_step(number: signal.Signals, small: Callable[[Path], list[str]], folder: Path):
    """When `timeout` receives a signal, it signals its child and then its process group, as when the time is up."""
    timeout = ["timeout", "--preserve-status", "600"]
    with started(folder, [*timeout, *command("main_base", [*small(folder), *training("step")])]) as program:
        program.wait_until(TRAINING["step"])
        program.check_end([128 + number], lambda: program.leader.send_signal(number))
        check_saved(program)


def training(moment: str) -> list[str]:
    """Return overrides that make the moment last long or occur often."""
    if moment == "closing":
        return []
    if moment == "evaluation":
        return [
            "trainer.eval_before_train=false",
            "trainer.eval_interval=1",
            "generator.eval_sampling_params.max_generate_length=4000",
        ]
    return ["trainer.epochs=1000", f"trainer.ckpt_interval={1 if moment == 'checkpoint' else 1000}"]


def check_saved(program: Program) -> None:
    saved = int((program.folder / "ckpts" / "latest_ckpt_global_step.txt").read_text())
    assert saved == max(program.recorded_steps) > 0


@on_demand
@pytest.mark.parametrize("moment", ["Ray's start", "workers' start", "step"])
def test_killed_group_leaves_no_process(moment: str, small: Callable[[Path], list[str]], folder: Path):
    with started(folder, command("main_base", [*small(folder), *training("step")])) as program:
        program.wait_until((STARTS | TRAINING)[moment])
        program.check_end([-signal.SIGKILL], lambda: os.killpg(program.leader.pid, signal.SIGKILL))


SERVING: Moments = {
    "engine's start": lambda program: any(name.startswith("ray::_") for name in program.children),
    "idle": lambda program: "Serving tiny at" in program.log,
}


@pytest.mark.fault("F39")
@pytest.mark.defect("group-signals-kill-ray-first")
@on_demand
@pytest.mark.parametrize("moment", ["imports", "Ray's start", *SERVING, "request"])
@pytest.mark.parametrize("number", SIGNALS)
def test_group_signal_ends_serve(moment: str, number: signal.Signals, tiny_model_path: str, folder: Path):
    _, port = free_address()
    overrides = [
        f"trainer.policy.model.path={tiny_model_path}",
        f"generator.http_endpoint_port={port}",
        "generator.served_model_name=tiny",
    ]
    with started(folder, command("serve", overrides)) as program:
        program.wait_until((STARTS | SERVING).get(moment, SERVING["idle"]))
        request = threading.Thread(target=send_long_request, args=(port,), daemon=True)
        if moment == "request":
            request.start()
            time.sleep(1)
            assert request.is_alive()
        status = 128 + number if moment in STARTS else 0
        program.check_end([status], lambda: os.killpg(program.leader.pid, number))


def send_long_request(port: int) -> None:
    """Send a request that takes longer than the test, and ignore the answer."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 30_000, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    with (
        suppress(OSError),
        urlopen(
            Request(f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), headers), timeout=60
        ) as response,
    ):
        response.read()
