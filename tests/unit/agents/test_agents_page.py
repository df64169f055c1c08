"""The code of docs/guides/agents.md runs: its agent, and its remote sandbox."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_train.environments.placeholders import ALLOWED
from skyrl_train.environments.tasks.agent import AgentEnv
from tests.support.agents import agent_generator, agent_prompt, command
from tests.support.async_tests import async_test
from tests.support.doc_pages import snippets

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "agents.md"
AGENT, SANDBOX = snippets("docs/guides/agents.md")
SSH = """#!/bin/sh
for word; do last=$word; done
exec bash -c "$last"
"""
"""A program `ssh` whose remote machine is this one. bash replaces itself by the last command of a script."""


@pytest.fixture
def page_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Save the modules of the page in a folder of PYTHONPATH."""
    (tmp_path / "my_agent.py").write_text(AGENT)
    (tmp_path / "ssh_sandbox.py").write_text(SANDBOX)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("my_agent", "ssh_sandbox"):
        sys.modules.pop(name, None)


@async_test
async def test_page_agent_is_rewarded(page_modules: Path):
    async with agent_generator({"run": "my_agent:run"}, texts=lambda prompt: " 3") as generator:
        group = await generator.rollout(agent_prompt(), 0)
    assert [item.reward for item in group.trajectories] == [1.0]


@async_test
async def test_page_sandbox_runs_an_agent(page_modules: Path, monkeypatch: pytest.MonkeyPatch):
    (page_modules / "bin").mkdir()
    ssh = page_modules / "bin" / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")
    before = set(Path("/tmp").glob("agent-*"))
    settings = command(1) | {
        "sandbox": {"kind": "ssh_sandbox:SSHSandbox", "settings": {"host": "worker-1"}},
        "grader": ["grep", "-q", "#### 3", "answer.txt"],
    }
    async with agent_generator(settings) as generator:
        group = await generator.rollout(agent_prompt(files={"in.txt": "x"}), 0)
    assert [(item.reward, item.detail) for item in group.trajectories] == [(1.0, "")]
    assert set(Path("/tmp").glob("agent-*")) == before
    sandbox = sys.modules["ssh_sandbox"].SSHSandbox("worker-1")
    await sandbox.start()
    await sandbox.upload({"folder/a.txt": b"content"})
    assert await sandbox.download("folder/a.txt") == b"content"
    with pytest.raises(OSError, match="No such file"):
        await sandbox.download("missing")
    result = await sandbox.exec(["sleep", "60"], env={}, timeout_s=0.5, max_output_bytes=1024)
    assert (result.returncode, result.timed_out) == (137, True)
    result = await sandbox.exec(["sh", "-c", "exit 3"], env={}, timeout_s=20, max_output_bytes=1024)
    assert (result.returncode, result.timed_out) == (3, False)
    await sandbox.stop()


def test_page_sandbox_is_short_and_complete():
    assert len(SANDBOX.splitlines()) <= 60
    module = types.ModuleType("ssh_sandbox")
    exec(SANDBOX, vars(module))
    assert {"start", "exec", "upload", "download", "stop"} <= set(vars(module.SSHSandbox))


def test_page_row_is_valid():
    (row,) = re.findall(r"^```json\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    AgentEnv.parse_row(json.loads(row))


def test_page_lists_all_placeholders():
    text = PAGE.read_text()
    assert all(f"`{name}" in text for name in re.findall(r"\{[\w.]+\}", ALLOWED))
