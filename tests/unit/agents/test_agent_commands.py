"""Commands of agents: real processes, their deadlines, their output, and the end of all their children."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.agents.commands import CommandResult, run_command
from tests.support.async_tests import async_test
from tests.support.process_state import is_running, wait_for_exit

SPAWN = "setsid sh -c 'echo $$ > {path}; trap \"\" TERM HUP; while :; do sleep 1; done' & "
"""Starts a grandchild in a session of its own, which ignores SIGTERM."""


async def run(script: str, **options: Any) -> CommandResult:
    settings: dict[str, Any] = {
        "cwd": "/",
        "env": dict(os.environ),
        "timeout_s": 20.0,
        "max_output_bytes": 1024,
    } | options
    return await run_command(["sh", "-c", script], **settings)


async def wait_for_pid(path: Path) -> int:
    while not path.is_file() or not path.read_text().strip():
        await asyncio.sleep(0.01)
    return int(path.read_text())


@async_test
async def test_result_has_exit_code_and_output(tmp_path: Path):
    result = await run("echo out; echo err >&2; pwd; cat; exit 3", cwd=str(tmp_path))
    assert (result.returncode, result.stdout, result.stderr) == (3, f"out\n{tmp_path}\n", "err\n")


@async_test
async def test_signal_becomes_exit_code():
    assert (await run("kill -SEGV $$")).returncode == 139


@async_test
async def test_missing_program_is_127():
    options: dict[str, Any] = {"cwd": "/", "env": {}, "timeout_s": 20, "max_output_bytes": 1024}
    result = await run_command(["no-such-program"], **options)
    assert result.returncode == 127
    assert result.stderr == "no-such-program: No such file or directory\n"


@async_test
async def test_unencodable_argument_is_127():
    options: dict[str, Any] = {"cwd": "/", "env": {}, "timeout_s": 20, "max_output_bytes": 1024}
    result = await run_command(["echo", "\ud800"], **options)
    assert result.returncode == 127
    assert "surrogates not allowed" in result.stderr


@async_test
async def test_environment_is_exactly_the_given_one():
    assert (await run("env | sort", env={"A": "1", "PATH": os.environ["PATH"]})).stdout.startswith("A=1\nPATH=")


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are followed on Linux only")
@async_test
async def test_grandchildren_die_with_the_command(tmp_path: Path):
    result = await run(SPAWN.format(path=tmp_path / "pid") + f"while [ ! -s {tmp_path}/pid ]; do sleep 0.01; done")
    assert result.returncode == 0
    assert not is_running(int((tmp_path / "pid").read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are followed on Linux only")
@async_test
async def test_timeout_kills_grandchildren(tmp_path: Path):
    started = time.monotonic()
    result = await run(SPAWN.format(path=tmp_path / "pid") + "echo begun; sleep 60", timeout_s=1.0)
    assert result.timed_out
    assert result.stdout == "begun\n"
    assert time.monotonic() - started < 10
    assert not is_running(int((tmp_path / "pid").read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are followed on Linux only")
@async_test
async def test_cancellation_leaves_no_process(tmp_path: Path):
    task = asyncio.create_task(run(SPAWN.format(path=tmp_path / "pid") + "sleep 60"))
    pid = await wait_for_pid(tmp_path / "pid")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not is_running(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
@async_test
async def test_killed_driver_leaves_no_process(tmp_path: Path):
    driver = (
        "import asyncio, os; from skyrl_train.agents.commands import run_command; "
        f"asyncio.run(run_command(['sh', '-c', {SPAWN.format(path=tmp_path / 'pid') + 'sleep 60'!r}], cwd='/', "
        "env=dict(os.environ), timeout_s=60, max_output_bytes=1024))"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", driver)
    pid = await wait_for_pid(tmp_path / "pid")
    process.kill()
    await process.wait()
    assert wait_for_exit(pid)


@async_test
async def test_only_the_end_of_output_is_kept():
    result = await run("yes first | head -c 60000; echo last")
    assert result.stdout.endswith("first\nfirst\nlast\n")
    assert len(result.stdout) == len("[...] ") + 1024


@async_test
async def test_endless_output_costs_the_driver_little():
    before = time.process_time()
    assert (await run("yes", timeout_s=1.0)).timed_out
    assert time.process_time() - before < 0.5


@async_test
async def test_null_bytes_are_rejected():
    with pytest.raises(ValueError, match="null byte"):
        await run("a\0b")
