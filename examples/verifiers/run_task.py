"""Run one task of a verifiers taskset (0.4) as an agent, or write the tasks as rows.

This file runs in an interpreter that has verifiers, not in that of skyrl-train:

VENV/bin/python run_task.py rows my_taskset train.jsonl
VENV/bin/python run_task.py run my_taskset 3           # the command of the environment `agent`, for row 3
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import urllib.request
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from verifiers.v1 import AgentConfig, EvalClientConfig, make_agent
from verifiers.v1.runtimes import SubprocessConfig
from verifiers.v1.utils.loaders import load_taskset, taskset_config_type


def load_tasks(taskset: str) -> Iterable[Any]:
    return load_taskset(taskset_config_type(taskset)(id=taskset))


def write_rows(taskset: str, path: Path, limit: int | None) -> None:
    """Write one row per task. The prompt is only for readers: the harness sends its own."""
    with path.open("w", encoding="utf-8") as file:
        for index, task in enumerate(islice(load_tasks(taskset), limit)):
            prompt = task.data.prompt or ""
            text = prompt if isinstance(prompt, str) else json.dumps([dict(message) for message in prompt])
            row = {"prompt": [{"role": "user", "content": text}], "env_class": "agent", "index": index}
            file.write(json.dumps(row) + "\n")


async def run(taskset: str, index: int, model: str, harness: str) -> Any:
    """Run a task against the session of this process, and return verifiers' trace."""
    (task,) = islice(load_tasks(taskset), index, index + 1)
    client = EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    config = AgentConfig(harness={"id": harness}, runtime=SubprocessConfig(), model=model, client=client)
    return await make_agent(config).run(task)


def report_reward(reward: float) -> None:
    url = os.environ["OPENAI_BASE_URL"].removesuffix("/v1") + "/reward"
    body = json.dumps({"reward": reward}).encode()
    urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"}), timeout=30).close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    rows = commands.add_parser("rows", help="write the tasks of a taskset as rows")
    rows.add_argument("taskset", help="name of an installed taskset")
    rows.add_argument("path", type=Path, help="file to write, .jsonl")
    rows.add_argument("--limit", type=int, help="maximum number of rows")
    task = commands.add_parser("run", help="run one task and report its reward")
    task.add_argument("taskset", help="name of an installed taskset")
    task.add_argument("index", type=int, help="index of the task, from 0")
    task.add_argument("--model", default="policy", help="name of the model in requests")
    task.add_argument("--harness", default="null", help="null (the model and the task's tools) or bash")
    arguments = parser.parse_args()
    if arguments.command == "rows":
        write_rows(arguments.taskset, arguments.path, arguments.limit)
        return
    trace = asyncio.run(run(arguments.taskset, arguments.index, arguments.model, arguments.harness))
    if trace.errors:
        sys.exit(str(trace.errors[-1]))
    report_reward(trace.reward)


if __name__ == "__main__":
    main()
