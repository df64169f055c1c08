"""Child processes of actors, without Ray."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from skyrl_train.cluster.call_channel import CallChannel
from skyrl_train.cluster.child_process import ChildProcess, ProcessEndedError


class Subject:
    def __init__(self, hangs_at_exit: bool = False, fails: bool = False):
        if hangs_at_exit:
            threading.Thread(target=time.sleep, args=(600,)).start()
        if fails:
            raise ValueError("no such model")

    async def wait(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    def fill(self, size: int, value: int) -> np.ndarray:
        return np.full(size, value, np.uint8)

    def sum(self, *arrays: np.ndarray) -> list[int]:
        return [int(array.sum()) for array in arrays]

    def fork(self) -> int:
        """Fork a process that keeps all open files, and return its id."""
        if (pid := os.fork()) == 0:
            signal.pause()
        return pid

    def show(self, variable: str) -> str | None:
        print(os.environ.get(variable), flush=True)
        return os.environ.get(variable)


@asynccontextmanager
async def started() -> AsyncIterator[ChildProcess]:
    """Start a process, which ends with the block."""
    process = ChildProcess("subject", f"{__name__}:Subject", {}, (), False)
    try:
        yield process
    finally:
        process._process.kill()
        assert process._reading is not None
        await process._reading
        process._socket.close()


@pytest.fixture(autouse=True)
def actor_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep this process, which takes the part of the actor, when the child ends."""
    monkeypatch.setattr("skyrl_train.cluster.child_process._EXIT_DELAY_S", 3600)


def connect(process: ChildProcess) -> CallChannel:
    return CallChannel(process.submit, process.collect)


def test_first_calls_of_channels_may_coincide():
    async def run() -> list[float]:
        async with started() as process:
            channels = connect(process), connect(process)
            calls = [channel.call("wait", (seconds,), {}) for seconds in (0.0, 0.1) for channel in channels]
            return await asyncio.wait_for(asyncio.gather(*calls), 20)

    assert asyncio.run(run()) == [0.0, 0.0, 0.1, 0.1]


def test_large_messages_cross_in_both_directions():
    sizes = [1, 65_535, 65_536, 262_143, 262_144, 262_145, 5_000_000]

    async def run() -> None:
        async with started() as process:
            channels = connect(process), connect(process)
            calls = [channels[index % 2].call("fill", (size, index), {}) for index, size in enumerate(sizes * 3)]
            arrays = await asyncio.wait_for(asyncio.gather(*calls), 20)
            assert [array.size for array in arrays] == sizes * 3
            assert all((array == index).all() for index, array in enumerate(arrays))
            sums = [index * size for index, size in enumerate(sizes * 3)]
            assert await asyncio.wait_for(channels[0].call("sum", tuple(arrays), {}), 20) == sums

    asyncio.run(run())


def test_cancelled_sender_completes_its_message():
    async def run() -> None:
        async with started() as process:
            channel = connect(process)
            await channel.call("wait", (0.0,), {})
            process._process.send_signal(signal.SIGSTOP)
            large = channel.call("sum", (np.ones(10_000_000, np.uint8),), {})
            await asyncio.sleep(0.1)  # a part of the message fills the socket
            assert channel._sending is not None
            channel._sending.cancel()
            await asyncio.sleep(0)
            small = channel.call("sum", (np.ones(3, np.uint8),), {})
            process._process.send_signal(signal.SIGCONT)
            assert await asyncio.wait_for(asyncio.gather(large, small), 20) == [[10_000_000], [3]]

    asyncio.run(run())


def test_death_is_noticed_despite_forked_processes():
    async def run() -> None:
        async with started() as process:
            channel = connect(process)
            forked = await channel.call("fork", (), {})
            waiting = channel.call("wait", (60.0,), {})
            await asyncio.sleep(0.1)
            process._process.kill()
            try:
                with pytest.raises(ProcessEndedError, match="SIGKILL"):
                    await asyncio.wait_for(waiting, 10)
            finally:
                os.kill(forked, signal.SIGKILL)

    asyncio.run(run())


def test_failed_start_does_not_wait_for_threads(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("skyrl_train.cluster.child_process._END_TIMEOUT_S", 0.2)
    with pytest.raises(ValueError, match="no such model"):
        ChildProcess("subject", f"{__name__}:Subject", {"hangs_at_exit": True, "fails": True}, (), False)


def test_death_before_the_first_message_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ProcessEndedError, match="exit code 1"):
        ChildProcess("subject", "more than the connection buffers" * 100_000, {}, (), False)


def test_output_of_child_has_no_secrets(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.setenv("SUBJECT_API_KEY", "sk-0123456789abcdef")
    assert asyncio.run(show("SUBJECT_API_KEY")) == "sk-0123456789abcdef"
    assert capfd.readouterr().out == "<SUBJECT_API_KEY>\n"


def test_child_imports_as_its_actor_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "socket.py").write_text("raise RuntimeError('not the standard library')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.setenv("PYTHONPATH", "/no/such/folder")
    assert asyncio.run(show("PYTHONPATH")) == "/no/such/folder"


async def show(variable: str) -> str | None:
    async with started() as process:
        value: str | None = await connect(process).call("show", (variable,), {})
        return value
