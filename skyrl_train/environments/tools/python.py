"""The python tool: a model's code runs in a sandbox, and the result is what the code prints."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from skyrl_train.environments.tools.base import Tool
from skyrl_train.environments.tools.sandbox import (
    KILL_TIMEOUT_S,
    PYTHON,
    START_TIMEOUT_S,
    Limits,
    Sandbox,
    SandboxResult,
    Session,
)
from skyrl_train.environments.tools.sandbox_monitor import SandboxLimit


class PythonTool(Tool):
    """A tool that runs Python code in a sandbox and returns what the code prints.

    Each call is a separate program; with `persistent`, it is the next block of the episode's session and sees the
    variables of earlier blocks. A block that exceeds a limit or exits ends the session, and the next call starts a new
    one. Processes that a block started end with the block; its threads pause until the next block.

    Args:
        persistent: True to keep variables between calls.
        wall_s: Maximum seconds of wall time of one call; unless `persistent`, also of its processor time.
        memory_mb: Maximum memory of the program, in MiB.
        max_output: Maximum number of characters of the result.
        sandbox: The section `environment.skyrl_gym.sandbox` of the configuration.

    Raises:
        ConfigError: `sandbox` asks for unsafe_local without the key that consents to it, or for an unknown kind.
    """

    name = "python"
    description = "Runs Python code and returns what it prints."
    parameters = {  # noqa: RUF012
        "type": "object",
        "properties": {"code": {"type": "string", "description": "The code; print what you want to see."}},
        "required": ["code"],
    }
    sandboxed = True

    def __init__(
        self,
        persistent: bool = False,
        wall_s: float = 10.0,
        memory_mb: int = 1024,
        max_output: int = 8192,
        sandbox: Mapping[str, Any] | None = None,
    ):
        self.persistent = persistent
        self.max_output = max_output
        self.deadline_s = wall_s + START_TIMEOUT_S + KILL_TIMEOUT_S
        self._sandbox = Sandbox.from_config(sandbox, Limits(wall_s=wall_s, cpu_s=wall_s, memory_mb=memory_mb))
        self._session: Session | None = None

    @classmethod
    def check(cls, **settings: Any) -> None:
        Sandbox.from_config(settings.get("sandbox")).check()

    async def call(self, arguments: dict[str, Any]) -> str:
        return await asyncio.to_thread(self._continue if self.persistent else self._run, arguments["code"])

    async def close(self) -> None:
        if self._session is not None:
            await asyncio.to_thread(self._session.close)

    def _run(self, code: str) -> str:
        source = code.encode("utf-8", "replace")
        return self.rendered(self._sandbox.run({"main.py": source}, [PYTHON, "-I", "-u", "main.py"]))

    def _continue(self, code: str) -> str:
        if self._session is None or not self._session.alive:
            self._session = self._sandbox.session()
        return self.rendered(self._session.execute(code))

    def rendered(self, result: SandboxResult) -> str:
        """Return the text of a result for the model: output, errors, and why the program ended early.

        Subclasses may raise ToolError for runs that they consider failed.
        """
        parts = [text.rstrip("\n") for text in (result.stdout, result.stderr) if text.strip("\n")]
        if result.timed_out:
            parts.append(f"[timed out after {self._sandbox.limits.wall_s:g} s]")
        elif result.killed_by is not None:
            parts.append(f"[stopped: {_describe_limit(result.killed_by, self._sandbox.limits)}]")
        elif result.returncode and not result.stderr:
            parts.append(f"[exit status {result.returncode}]")
        if not parts:
            parts.append("[no output]")
        if self._session is not None and not self._session.alive:
            parts.append("[the Python process has ended: its variables are gone]")
        return "\n".join(parts)


def _describe_limit(killed_by: SandboxLimit, limits: Limits) -> str:
    return {
        SandboxLimit.OUTPUT: f"it printed more than {limits.output} bytes",
        SandboxLimit.MEMORY: f"its processes used more than {limits.memory_mb} MB together",
        SandboxLimit.FILES: f"it made more than {limits.files} files and folders",
    }[killed_by]
