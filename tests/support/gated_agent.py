"""An agent of the tests of kills. It makes two calls, tells how far it is, and waits before them while a file exists.

It runs as a coroutine, or as a command with the plan as JSON: gated_agent.py MODEL PLAN. The plan is a column of the
row: `folder` of the run, `step` in which the row is due, its `number`, and what to `do`: nothing, "hold" (before each
call while a file hold-CALL exists), "kill" (itself between the calls), or "kill once" (the first of the samples, when
all of them are between the calls).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

SAMPLES = 2
"""Samples of a row."""


class Play:
    """One run of the agent.

    Args:
        base_url: Base URL of the session.
        model: Name of the model.
        plan: The plan of the row.
    """

    def __init__(self, base_url: str, model: str, plan: dict[str, Any]):
        self.base_url, self.model, self.plan = base_url, model, plan
        self.folder = Path(plan["folder"])

    def run(self) -> float:
        """Return the fraction of lower-case letters in both answers."""
        self.mark("started")
        wait_until(self.is_due)
        messages = [{"role": "user", "content": f"say {self.plan['number']}"}]
        self.hold(1)
        first = self.call(messages)
        self.mark("open")
        if self.plan["do"] == "kill":
            self.kill_itself()
        if self.plan["do"] == "kill once":
            self.kill_its_process_once()
        self.hold(2)
        follow_up = [{"role": "assistant", "content": first}, {"role": "user", "content": "again"}]
        text = first + self.call([*messages, *follow_up])
        self.mark("done")
        return sum(c.isascii() and c.islower() for c in text) / max(len(text), 1)

    def is_due(self) -> bool:
        """True if the step before that of the row is logged, so that its weights sample both answers."""
        metrics = self.folder / "ckpts" / "metrics.jsonl"
        return self.plan["step"] == 1 or (
            metrics.is_file() and f'"step": {self.plan["step"] - 1},' in metrics.read_text()
        )

    def hold(self, call: int) -> None:
        if self.plan["do"] == "hold":
            wait_until(lambda: not (self.folder / f"hold-{call}").exists())
            self.mark(f"call-{call}")

    def mark(self, event: str) -> None:
        """Create a file that tells the test where this sample of the row is."""
        session = self.base_url.split("/")[-2]
        (self.folder / f"{event}-{self.plan['step']}-{session}").touch()

    def call(self, messages: list[dict[str, str]]) -> str:
        answer = self.post("v1/chat/completions", {"model": self.model, "messages": messages})
        return str(answer["choices"][0]["message"]["content"])

    def post(self, path: str, body: dict[str, Any]) -> Any:
        url = f"{self.base_url.removesuffix('v1')}{path}"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:
            return json.load(response)

    def kill_itself(self) -> None:
        """Leave a process in a session of its own behind, and kill this process."""
        file = self.folder / f"orphan-{os.getpid()}"
        subprocess.Popen(["setsid", "sh", "-c", f"echo $$ > {file}; exec sleep 600"])
        wait_until(lambda: file.is_file() and bool(file.read_text().strip()))
        os.kill(os.getpid(), signal.SIGKILL)

    def kill_its_process_once(self) -> None:
        """Wait for all samples of the row. Then the first one kills the process in which they run."""
        wait_until(lambda: len(list(self.folder.glob(f"open-{self.plan['step']}-*"))) == SAMPLES)
        with suppress(FileExistsError):
            (self.folder / "killer").touch(exist_ok=False)
            self.kill_itself()
        time.sleep(600)


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.02)


async def run(session: Any, row: dict[str, Any]) -> float:
    return await asyncio.to_thread(Play(session.base_url, session.model, row["plan"]).run)


if __name__ == "__main__":
    play = Play(os.environ["OPENAI_BASE_URL"], sys.argv[1], json.loads(sys.argv[2]))
    play.post("reward", {"reward": play.run()})
