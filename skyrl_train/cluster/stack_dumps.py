"""Stack dumps of actor processes, including those that no longer respond to calls."""

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
"""Time in which a running process writes its stacks. It needs no lock for that."""
_CALLED = re.compile(r'File ".*actors\.py", line \d+ in call\b')
_COLLECTIVE = re.compile(r'File ".*torch/distributed/(distributed_c10d|_functional_collectives|c10d_logger)\.py"')


@dataclass(frozen=True)
class ProcessStack:
    """State and stacks of one actor's process."""

    pid: int | None
    """Process id, or None if the process has exited."""
    status: str
    """psutil's status, such as "running", "sleeping" or "stopped", or "gone" if the process has exited."""
    text: str
    """Frames of all threads, innermost first. Empty if the process wrote none."""

    @property
    def call_frames(self) -> str:
        """Frames of the thread that executes a call, or "" if no thread does."""
        return next((thread for thread in self.text.split("\n\n") if _CALLED.search(thread)), "")

    @property
    def is_in_collective(self) -> bool:
        """True if the call waits in a collective of torch.distributed."""
        return bool(_COLLECTIVE.search(self.call_frames))


def dump_stacks_on_signal() -> None:
    """Make this actor's process append its stacks to a file in Ray's session folder on each SIGUSR1."""
    file = _log_folder() / f"stacks-{ray.get_runtime_context().get_actor_id()}-{os.getpid()}.txt"
    faulthandler.register(signal.SIGUSR1, file.open("w"), all_threads=True)


def _log_folder() -> Path:
    node = ray._private.worker._global_node
    assert node is not None, "this runs in a worker"
    return Path(node.get_logs_dir_path())


def _read_stacks(actors: Sequence[str]) -> dict[str, ProcessStack]:
    """Return the stacks of those actors that are on this node, by actor id."""
    signaled = {}
    for actor in actors:
        for file in _log_folder().glob(f"stacks-{actor}-*.txt"):
            pid = int(file.stem.rpartition("-")[2])
            with suppress(ProcessLookupError):
                signaled[actor] = (pid, file, file.stat().st_size)
                os.kill(pid, signal.SIGUSR1)
    deadline = time.monotonic() + _WRITES_WITHIN_S
    while time.monotonic() < deadline and any(file.stat().st_size == size for _, file, size in signaled.values()):
        time.sleep(0.05)
    time.sleep(0.05)  # a dump consists of several writes
    stacks = {}
    for actor, (pid, file, size) in signaled.items():
        with file.open("rb") as opened:
            opened.seek(size)
            text = opened.read().decode(errors="replace").strip()
        try:
            stacks[actor] = ProcessStack(pid, psutil.Process(pid).status(), text)
        except psutil.NoSuchProcess:
            stacks[actor] = ProcessStack(None, "gone", "")
    return stacks


async def collect_stacks(actors: Sequence[str], within_s: float) -> dict[str, ProcessStack]:
    """Return the stacks of actor processes, by actor id.

    Actors are missing if their node does not answer in time, or all of them if Ray does not list its nodes.

    Args:
        actors: Ray's ids of the actors, in hex.
        within_s: Seconds to wait for Ray's list of nodes, and again for the nodes.
    """
    try:
        async with asyncio.timeout(within_s):
            nodes = [node["NodeID"] for node in await asyncio.to_thread(ray.nodes) if node["Alive"]]
    except (TimeoutError, RayError):
        return {}
    futures = []
    for node in nodes:
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        task = ray.remote(_read_stacks).options(num_cpus=0, scheduling_strategy=strategy).remote(list(actors))
        futures.append(asyncio.wrap_future(task.future()))
    done, late = await asyncio.wait(futures, timeout=within_s) if futures else (set(), set())
    for future in late:
        future.cancel()
    return {actor: stack for future in done if not future.exception() for actor, stack in future.result().items()}
