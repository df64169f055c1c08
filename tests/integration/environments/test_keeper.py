"""What an environment's process prints and starts: bounded, and ended with it."""

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

from skyrl_train.data.trajectory import Prompt
from skyrl_train.environments.host import EnvironmentHost
from skyrl_train.environments.prints import AT_FIRST, AT_LAST
from skyrl_train.errors import EnvironmentFailure
from tests.support.others_processes import gone, lives

PLUGINS = Path(__file__).parent / "plugins"


@pytest.fixture(autouse=True)
def plugins_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PLUGINS))


def play(env_class: str, *texts: str, deadline_s: float = 30.0, **extras: Any) -> list[str | float]:
    """The reward of each text, an episode of its own in the same process; or the kind of failure."""

    async def outcome(host: EnvironmentHost, text: str) -> str | float:
        try:
            episode = await host.start(env_class, Prompt("7", [], env_class, extras))
            try:
                return (await episode.step(text)).reward
            finally:
                await episode.close()
        except EnvironmentFailure as failure:
            return failure.kind

    async def main() -> list[str | float]:
        async with EnvironmentHost({}, 1, deadline_s, ("misbehaving_envs",)) as host:
            return [await outcome(host, text) for text in texts]

    return asyncio.run(asyncio.wait_for(main(), 120))


def driver(name: str, *arguments: str, **streams: Any) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen([sys.executable, str(PLUGINS / name), *arguments], env=environment, text=True, **streams)


@pytest.mark.defect("environments-printed-without-a-bound")
def test_an_environment_that_prints_ten_megabytes_shows_the_first_and_the_last_of_it_as_text(
    capfd: pytest.CaptureFixture[str],
):
    assert play("Printing", "prints", "dies") == [1.0, "environment_died"]
    shown = capfd.readouterr().err
    assert len(shown) < AT_FIRST + 2 * AT_LAST
    lines = shown.splitlines()
    name = re.match(r"\(env \d+\) ", lines[0])
    assert name is not None and [line for line in lines if not line.startswith(name[0])] == []
    assert lines[0] == f"{name[0]}\\x1b[31m0 {'.' * 90}"
    assert lines[-1] == f"{name[0]}the last \\x1b[31mword"
    (count,) = re.findall(r"\.\.\. ([\d,]+) bytes more were printed, the last of them:", shown)
    assert 19_000_000 < int(count.replace(",", "")) < 21_000_000


@pytest.mark.defect("environments-printed-without-a-bound")
def test_an_environment_does_not_wait_for_whoever_reads_what_the_run_prints():
    with driver("printing_driver.py", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        fill(process.stderr.fileno())
        assert process.stdout.readline() == "1.0\n"
        assert process.wait(60) == 0


def fill(reader: int) -> None:
    """Write to a pipe until nothing more fits in."""
    writer = os.open(f"/proc/self/fd/{reader}", os.O_WRONLY | os.O_NONBLOCK)
    try:
        while True:
            os.write(writer, b"x" * 4096)
    except BlockingIOError:
        os.close(writer)


@pytest.mark.defect("children-that-left-their-session-stayed")
@pytest.mark.parametrize(("text", "outcome"), [("hangs", "timeout"), ("dies", "environment_died"), ("answers", 1.0)])
def test_what_an_environment_started_ends_with_its_process_in_whatever_session_it_is(
    text: str, outcome: str | float, tmp_path: Path
):
    assert play("Strays", text, deadline_s=5.0, folder=str(tmp_path)) == [outcome]
    assert left(tmp_path) == []


@pytest.mark.defect("children-that-left-their-session-stayed")
def test_what_an_environment_started_ends_with_a_driver_that_was_killed(tmp_path: Path):
    with driver("straying_driver.py", str(tmp_path)) as process:
        until = time.monotonic() + 60
        while not (tmp_path / "pids").exists() and time.monotonic() < until:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    assert left(tmp_path) == []


def left(folder: Path) -> list[int]:
    """Those of two processes that do not end within some seconds."""
    pids = [int(pid) for pid in (folder / "pids").read_text().split()]
    assert len(pids) == 2
    return [pid for pid in pids if not gone(pid)]


@pytest.mark.parametrize("stopped", [signal.SIGSTOP, signal.SIGKILL])
def test_a_keeper_that_is_stopped_or_killed_costs_its_episodes_and_nothing_else(
    stopped: signal.Signals, tmp_path: Path
):
    async def main() -> None:
        async with EnvironmentHost({}, 1, 3.0, ("misbehaving_envs",)) as host:
            episode = await host.start("Misbehaving", Prompt("7", [], "Misbehaving"))
            assert host._workers[0]._process is not None
            worker = psutil.Process(host._workers[0]._process.get_pid()).children()[0]
            step = asyncio.create_task(episode.step("hangs"))
            await asyncio.sleep(0.2)
            host._workers[0]._process.send_signal(stopped)
            with pytest.raises(EnvironmentFailure, match="timeout" if stopped == signal.SIGSTOP else "died"):
                await step
            after = await host.start("Counter", Prompt("7", [], "Counter"))
            assert (await after.step("fine")).reward == 1.0
        assert not lives(worker.pid)

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.defect("environments-printed-without-a-bound")
def test_environments_that_do_not_close_are_said_once_and_as_text(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789abcdef")
    with caplog.at_level(logging.WARNING):
        assert play("BadEnd", *"abcdef") == [1.0] * 6
    assert caplog.text.count("closing BadEnd: OSError: it \\x1b[2J does not close with <HF_TOKEN>") == 1
    assert caplog.text.count("closing") == 1
