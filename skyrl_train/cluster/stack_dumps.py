"""What the processes of actors are doing, also of those that answer no call any more."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_WRITES_WITHIN_S = 2.0
"""A process that runs has written its stacks by then: no lock has to be free for it."""
_CALLED = re.compile(r'File ".*actors\.py", line \d+ in call\b')
_COLLECTIVE = re.compile(r'File ".*torch/distributed/(distributed_c10d|_functional_collectives|c10d_logger)\.py"')


@dataclass(frozen=True)
class ProcessStack:
    """What one actor's process is doing."""

    pid: int | None
    """None if it is gone."""
    status: str
    """psutil's word for it: "running", "sleeping", "stopped", ..., or "gone"."""
    text: str
    """All threads' frames, innermost first; empty if the process does not run."""

    @property
    def call_frames(self) -> str:
        """The frames of the thread that carries out a call; empty if none does."""
        return next((thread for thread in self.text.split("\n\n") if _CALLED.search(thread)), "")

    @property
    def is_in_collective(self) -> bool:
        """Whether its call waits for other ranks."""
        return bool(_COLLECTIVE.search(self.call_frames))


def dump_stacks_on_signal() -> None:
    """Have this actor's process append its stacks to a file of Ray's session whenever it gets SIGUSR1."""
    file = _logs() / f"stacks-{ray.get_runtime_context().get_actor_id()}-{os.getpid()}.txt"
    faulthandler.register(signal.SIGUSR1, file.open("w"), all_threads=True)


def _logs() -> Path:
    node = ray._private.worker._global_node
    assert node is not None, "this runs in a worker"
    return Path(node.get_logs_dir_path())


def _read(actors: Sequence[str]) -> dict[str, ProcessStack]:
    """Actor id -> what it does, of those on this node."""
    sent = {}
    for actor in actors:
        for file in _logs().glob(f"stacks-{actor}-*.txt"):
            pid = int(file.stem.rpartition("-")[2])
            with suppress(ProcessLookupError):
                sent[actor] = (pid, file, file.stat().st_size)
                os.kill(pid, signal.SIGUSR1)
    until = time.monotonic() + _WRITES_WITHIN_S
    while time.monotonic() < until and any(file.stat().st_size == size for _, file, size in sent.values()):
        time.sleep(0.05)
    time.sleep(0.05)  # a dump consists of several writes
    found = {}
    for actor, (pid, file, size) in sent.items():
        with file.open("rb") as opened:
            opened.seek(size)
            text = opened.read().decode(errors="replace").strip()
        try:
            found[actor] = ProcessStack(pid, psutil.Process(pid).status(), text)
        except psutil.NoSuchProcess:
            found[actor] = ProcessStack(None, "gone", "")
    return found


async def collect_stacks(actors: Sequence[str], within_s: float) -> dict[str, ProcessStack]:
    """Actor id -> what its process does, of those on nodes that tell it in time; empty without an answer of Ray's."""
    try:
        async with asyncio.timeout(within_s):
            nodes = [node["NodeID"] for node in await asyncio.to_thread(ray.nodes) if node["Alive"]]
    except (TimeoutError, RayError):
        return {}
    asked = []
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        task = ray.remote(_read).options(num_cpus=0, scheduling_strategy=there).remote(list(actors))
        asked.append(asyncio.wrap_future(task.future()))
    done, late = await asyncio.wait(asked, timeout=within_s) if asked else (set(), set())
    for one in late:
        one.cancel()
    return {actor: stack for one in done if not one.exception() for actor, stack in one.result().items()}
