"""Output of environment processes is limited, and processes that they start end with them."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from skyrl_train.data.messages import Prompt
from skyrl_train.environments.pool import WorkerPool
from skyrl_train.environments.process_supervisor import MAX_STDERR_BYTES
from skyrl_train.errors import EnvironmentFailure
from tests.support.process_state import is_running, wait_for_exit

PLUGINS = Path(__file__).parent / "plugins"


@pytest.fixture(autouse=True)
def plugins_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PLUGINS))


def run_episodes(
    env_class: str, *texts: str, deadline_s: float = 30.0, log: Path | None = None, **extras: Any
) -> list[str | float]:
    """Run one episode per text in the same process, and return their rewards or kinds of failure."""

    async def outcome(pool: WorkerPool, text: str) -> str | float:
        try:
            episode = await pool.start(env_class, Prompt("7", [], env_class, extras))
            try:
                return (await episode.step(text)).reward
            finally:
                await episode.close()
        except EnvironmentFailure as failure:
            return failure.kind

    async def main() -> list[str | float]:
        async with WorkerPool({}, 1, deadline_s, ("misbehaving_envs",), log) as pool:
            return [await outcome(pool, text) for text in texts]

    return asyncio.run(asyncio.wait_for(main(), 120))


def driver(name: str, *arguments: str, **streams: Any) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen([sys.executable, str(PLUGINS / name), *arguments], env=environment, text=True, **streams)


@pytest.mark.defect("unbounded-environment-output")
def test_output_on_the_terminal_is_capped(capfd: pytest.CaptureFixture[str]):
    assert run_episodes("Printing", "prints", "dies") == [1.0, "environment_died"]
    shown = capfd.readouterr().err
    assert MAX_STDERR_BYTES < len(shown) < 3 * MAX_STDERR_BYTES
    lines = shown.splitlines()
    name = lines[0].partition(") ")[0]
    assert lines[0] == f"{name}) \\x1b[31m0 {'.' * 90}"
    assert lines[-1] == f"{name}) ... more output is dropped"
    assert all(line.startswith(f"{name}) ") for line in lines)


@pytest.mark.defect("unbounded-environment-output")
def test_output_goes_to_log_file(capfd: pytest.CaptureFixture[str], tmp_path: Path):
    log = tmp_path / "environments.log"
    assert run_episodes("Printing", "prints", "dies", log=log) == [1.0, "environment_died"]
    assert capfd.readouterr().err == f"note: environments print to {log}\n"
    lines = log.read_text().splitlines()
    assert len(lines) == 200_001 and lines[99_999].endswith(f"\\x1b[31m99999 {'.' * 90}")
    assert lines[-1].endswith(") the last \\x1b[31mword")


def test_without_the_log_folder_output_stays_on_stderr(capfd: pytest.CaptureFixture[str], tmp_path: Path):
    assert run_episodes("Chatty", "x", log=tmp_path / "elsewhere" / "environments.log") == [0.5]
    assert "child\n" in capfd.readouterr().err and not list(tmp_path.iterdir())


def test_failure_of_a_dead_process_names_the_log(tmp_path: Path):
    async def main(log: Path) -> None:
        async with WorkerPool({}, 1, 30.0, ("misbehaving_envs",), log) as pool:
            episode = await pool.start("Misbehaving", Prompt("7", [], "Misbehaving"))
            with pytest.raises(EnvironmentFailure, match=re.escape(f"its process ended (environments print to {log})")):
                await episode.step("dies")

    asyncio.run(asyncio.wait_for(main(tmp_path / "environments.log"), 60))


@pytest.mark.defect("unbounded-environment-output")
@pytest.mark.parametrize("logs", [["environments.log"], []], ids=["to a file", "to stderr"])
def test_steps_do_not_wait_for_a_stderr_reader(logs: list[str], tmp_path: Path):
    paths = [str(tmp_path / log) for log in logs]
    with driver("printing_driver.py", *paths, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        fill(process.stderr.fileno())
        assert process.stdout.readline() == "1.0\n"
        assert process.wait(60) == 0


def test_only_asyncio_reaps_supervisors(monkeypatch: pytest.MonkeyPatch):
    """asyncio logs a process that `Popen.poll` has reaped. If no process reads stderr, that line blocks the driver."""
    polled: list[int] = []
    monkeypatch.setattr(subprocess.Popen, "poll", lambda process: polled.append(process.pid))
    assert run_episodes("Printing", "dies") == ["environment_died"]
    assert polled == []


def fill(reader: int) -> None:
    """Write to a pipe until it is full."""
    writer = os.open(f"/proc/self/fd/{reader}", os.O_WRONLY | os.O_NONBLOCK)
    try:
        while True:
            os.write(writer, b"x" * 4096)
    except BlockingIOError:
        os.close(writer)


@pytest.mark.defect("detached-children-outlive-environment")
@pytest.mark.parametrize(
    ("text", "outcome"), [("hangs", "timeout"), ("dies", "environment_died"), ("answers", 1.0), ("interrupts", 1.0)]
)
def test_descendants_in_other_sessions_end_with_the_worker(text: str, outcome: str | float, tmp_path: Path):
    assert run_episodes("Strays", text, deadline_s=5.0, folder=str(tmp_path)) == [outcome]
    assert surviving_processes(tmp_path) == []


@pytest.mark.defect("detached-children-outlive-environment")
def test_descendants_in_other_sessions_end_with_driver(tmp_path: Path):
    with driver("straying_driver.py", str(tmp_path)) as process:
        until = time.monotonic() + 60
        while not (tmp_path / "pids").exists() and time.monotonic() < until:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    assert surviving_processes(tmp_path) == []


def test_worker_ends_if_pool_died_early():
    module = [sys.executable, "-P", "-m", "skyrl_train.environments.worker"]
    with subprocess.Popen([*module, str(os.getpid() + 1)], stdin=subprocess.PIPE, start_new_session=True) as process:
        assert process.wait(60) == 1


def surviving_processes(folder: Path) -> list[int]:
    """Return those of the two processes that do not end within some seconds."""
    pids = [int(pid) for pid in (folder / "pids").read_text().split()]
    assert len(pids) == 2
    return [pid for pid in pids if not wait_for_exit(pid)]


@pytest.mark.parametrize("stopped", [signal.SIGSTOP, signal.SIGKILL])
def test_lost_supervisor_fails_only_its_episodes(stopped: signal.Signals):
    async def main() -> None:
        async with WorkerPool({}, 1, 3.0, ("misbehaving_envs",)) as pool:
            episode = await pool.start("Misbehaving", Prompt("7", [], "Misbehaving"))
            supervisor = pool.workers[0].pid
            assert supervisor is not None
            worker = psutil.Process(supervisor).children()[0]
            step = asyncio.create_task(episode.step("hangs"))
            await asyncio.sleep(0.2)
            os.kill(supervisor, stopped)
            with pytest.raises(EnvironmentFailure, match="timeout" if stopped == signal.SIGSTOP else "died"):
                await step
            after = await pool.start("Counter", Prompt("7", [], "Counter"))
            assert (await after.step("fine")).reward == 1.0
        assert not is_running(worker.pid)

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.defect("unbounded-environment-output")
def test_close_failure_is_logged_once_and_escaped(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789abcdef")
    with caplog.at_level(logging.WARNING):
        assert run_episodes("BadEnd", *"abcdef") == [1.0] * 6
    message = "closing an environment BadEnd failed: OSError: it \\x1b[2J does not close with <HF_TOKEN>"
    assert caplog.text.count(message) == 1
    assert caplog.text.count("closing") == 1
