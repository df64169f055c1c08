"""Agents that are coroutines, in real worker processes."""

from __future__ import annotations

import asyncio
import os
import sys
import time
import venv
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import skyrl_train as sk
from skyrl_train.agents import coroutines
from skyrl_train.agents.agent_session import AgentSession
from skyrl_train.agents.coroutines import CoroutinePool
from skyrl_train.environments.agent_registry import agents
from skyrl_train.environments.tasks.agent import AgentEnv
from skyrl_train.errors import ConfigError, EnvironmentFailure
from tests.support.async_tests import async_test
from tests.support.process_state import is_running

AGENT = "tests.support.coroutine_agents:run"
SESSION = AgentSession("http://host/sessions/1/v1", "key", "policy")


@asynccontextmanager
async def pool(name: str = AGENT, max_workers: int = 1) -> AsyncIterator[CoroutinePool]:
    opened = CoroutinePool(name, max_workers=max_workers, max_blocked_s=1.0)
    try:
        yield opened
    finally:
        await opened.close()


async def outcome(opened: CoroutinePool, do: str, timeout_s: float = 20.0, **row: Any) -> Any:
    """Return the value of an agent, or the kind of its failure."""
    try:
        return await opened.run(SESSION, {"do": do, **row}, timeout_s)
    except EnvironmentFailure as failure:
        return failure.kind


@async_test
async def test_many_agents_share_one_process():
    async with pool() as opened:
        results = await asyncio.gather(*(outcome(opened, "return", value=index) for index in range(100)))
        assert [result["reward"] for result in results] == list(range(100))
        assert results[0]["url"] == SESSION.base_url
        assert len(opened.workers) == 1


@async_test
async def test_exception_names_its_line():
    async with pool() as opened:
        with pytest.raises(EnvironmentFailure, match=r"ValueError: a mistake \(.*coroutine_agents.py:\d+ in run\)"):
            await opened.run(SESSION, {"do": "raise"}, 20.0)


@async_test
async def test_blocking_agent_is_named_and_killed():
    async with pool() as opened:
        waiting = asyncio.create_task(outcome(opened, "wait"))
        with pytest.raises(EnvironmentFailure, match=r"blocked its event loop for 1 s .*coroutine_agents.py"):
            await opened.run(SESSION, {"do": "block"}, 20.0)
        assert await waiting == "agent_crashed"  # it shared the process
        assert await outcome(opened, "return", value=1) == {"reward": 1, "url": SESSION.base_url}


@async_test
async def test_exit_of_process_is_a_crash():
    async with pool() as opened:
        assert await outcome(opened, "exit") == "agent_crashed"
        assert (await outcome(opened, "return", value=1))["reward"] == 1


@async_test
async def test_timeout_cancels_only_its_agent():
    async with pool() as opened:
        results = await asyncio.gather(outcome(opened, "wait", 0.5), outcome(opened, "wait", 1.0))
        assert results == ["agent_timeout", "agent_timeout"]
        assert len(opened.workers) == 1
        assert not opened.workers[0].is_lost


@async_test
async def test_agent_that_ignores_cancellation_is_killed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(coroutines, "CANCEL_TIMEOUT_S", 0.5)
    async with pool() as opened:
        assert await outcome(opened, "stubborn", 0.5) == "agent_timeout"
        assert not opened.workers or opened.workers[0].is_lost


@async_test
async def test_cancelled_caller_cancels_the_agent():
    async with pool() as opened:
        task = asyncio.create_task(opened.run(SESSION, {"do": "wait"}, 60.0))
        while not (opened.workers and opened.workers[0].started.done()):
            await asyncio.sleep(0.01)
        started = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - started < coroutines.CANCEL_TIMEOUT_S
        assert not opened.workers[0].answers


async def submit(opened: CoroutinePool, do: str, **row: Any) -> asyncio.Task[Any]:
    """Return the task of a call that waits for the start of its process."""
    task = asyncio.create_task(outcome(opened, do, **row))
    await asyncio.sleep(0)
    assert not opened.workers[0].started.done()
    return task


@async_test
async def test_cancellation_during_start_spares_others():
    async with pool() as opened:
        first, second = await submit(opened, "wait"), await submit(opened, "return", value=1)
        first.cancel()
        assert (await second)["reward"] == 1
        assert first.cancelled()


@async_test
async def test_agent_cancelled_before_its_start_answers():
    async with pool() as opened:
        first = await submit(opened, "wait")
        first.cancel()
        await asyncio.wait([first])
        assert (await outcome(opened, "return", value=1))["reward"] == 1
        (worker,) = opened.workers
        assert not worker.answers


@async_test
async def test_pool_closes_while_a_process_starts():
    opened = CoroutinePool(AGENT, max_workers=1)
    task = await submit(opened, "wait")
    await asyncio.sleep(0)
    assert opened.workers[0].pid is None
    await asyncio.wait_for(opened.close(), 20)
    assert await task == "agent_crashed"


@async_test
async def test_row_without_json_form_is_bad_row():
    async with pool() as opened:
        assert await outcome(opened, "return", value=object()) == "bad_row"
        assert not opened.workers


@async_test
async def test_close_kills_all_processes():
    async with pool(max_workers=2) as opened:
        await asyncio.gather(*(outcome(opened, "return", value=1) for _ in range(4)))
        pids = [worker.pid for worker in opened.workers]
    assert len(pids) == 2
    assert not any(is_running(pid) for pid in pids if pid is not None)


@async_test
async def test_registered_agent_is_sent_to_workers():
    @sk.register.agent("closure")
    async def closure(session: AgentSession, row: dict[str, Any]) -> float:
        return row["value"] / 2

    try:
        async with pool("closure") as opened:
            assert await outcome(opened, "", value=3) == 1.5
    finally:
        agents.unregister("closure")


@async_test
async def test_agent_runs_in_another_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    (tmp_path / "elsewhere.py").write_text(
        "import sys\n\nasync def run(session, row):\n"
        "    return {'reward': row['value'], 'prefix': sys.prefix, 'numpy': 'numpy' in sys.modules}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    python = str(tmp_path / "venv" / "bin" / "python")
    AgentEnv.check({"run": "elsewhere:run", "python": python})
    opened = CoroutinePool("elsewhere:run", max_workers=1, python=python)
    try:
        result = await opened.run(SESSION, {"value": 2}, 20.0)
    finally:
        await opened.close()
    assert result == {"reward": 2, "prefix": str(tmp_path / "venv"), "numpy": False}
    with pytest.raises(ConfigError, match=r"python=.* cannot import .*missing:run: .*ConfigError"):
        AgentEnv.check({"run": "missing:run", "python": python})
    with pytest.raises(ConfigError, match="cannot be started: No such file"):
        AgentEnv.check({"run": "elsewhere:run", "python": f"{python}-missing"})
    with pytest.raises(ConfigError, match="must be null unless"):
        AgentEnv.check({"run": "registered", "python": python})


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are followed on Linux only")
@async_test
async def test_children_of_another_interpreter_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    (tmp_path / "spawner.py").write_text(
        "import subprocess\n\nasync def run(session, row):\n"
        "    return subprocess.Popen(['sleep', '60'], start_new_session=True).pid\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    opened = CoroutinePool("spawner:run", max_workers=1, python=str(tmp_path / "venv" / "bin" / "python"))
    try:
        pid = await opened.run(SESSION, {}, 20.0)
        assert is_running(pid)
    finally:
        await opened.close()
    assert not is_running(pid)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:run", "cannot be imported"),
        ("tests.support.coroutine_agents:not_a_coroutine", "not a coroutine function"),
        ("unknown", "Register it with @register.agent"),
    ],
)
@async_test
async def test_unusable_agent_is_config_error(name: str, message: str):
    async with pool(name) as opened:
        with pytest.raises(ConfigError, match=message):
            await opened.run(SESSION, {}, 20.0)
