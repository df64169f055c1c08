"""What a benchmark says of itself, and sides that do steps in turns, each with the cost of its whole process tree.

A side is a command that starts any number of processes. Its root process passes a `Gate` before every step: the
benchmark lets one side through at a time, so that whatever else the machine does hits all of them alike, and reads
processor times while the side stands still at both ends of a step.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
GATE = "BENCHMARK_GATE"
"""In a side's environment: the file descriptor of its end of the pipe."""
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
"""As the framework's own processes have it: a thread that waits for others sleeps, where it would else spin."""
SAMPLED_EVERY_S = 0.2
"""How often a side's memory is read while it computes."""


def environment_info(*packages: str) -> dict[str, Any]:
    """Commit, machine, and versions of what was measured."""

    def git(*arguments: str) -> str:
        found = subprocess.run(["git", "-C", str(HERE), *arguments], capture_output=True, text=True, check=False)
        return found.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return {
        "commit": git("rev-parse", "--short", "HEAD") + (" with changes" if changed else ""),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("torch", "transformers", "ray", *packages)},
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # vLLM's build for CPUs has a name of its own
        return importlib.metadata.version(f"{name}-cpu")


def format_environment_info(found: Mapping[str, Any]) -> str:
    """`about` for people."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return (
        f"commit {found['commit']}; {found['cores']} cores of {found['processor']}, {found['memory_gib']} GiB, load "
        f"{found['load']} before the start; Python {found['python']}, {versions}"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((text.partition(":")[2].strip() for text in lines if text.startswith("model name")), "unknown")


class StepBarrier:
    """In a side's root process: `wait` before the first step, and with what a step was like after each."""

    def __init__(self) -> None:
        self._connection = Connection(int(os.environ[GATE]))

    def wait(self, told: Mapping[str, Any] | None = None) -> None:
        """Until the benchmark lets this side go on. SystemExit, which nobody catches, where the benchmark is gone."""
        try:
            self._connection.send(dict(told or {}))
            self._connection.recv()
        except (EOFError, OSError):
            sys.exit("The benchmark has ended.")


@dataclass(frozen=True)
class Step:
    """One step of a side."""

    reported: dict[str, Any]
    """What the side said of it."""
    wall_s: float
    cpu_s: dict[str, float]
    """User and system time, by the role of the process; children that ended in between are counted to who reaped them.
    """

    @property
    def total_cpu_s(self) -> float:
        return sum(self.cpu_s.values())


class BenchmarkProcess:
    """A command under way. A context manager: nothing of it is left behind."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str] | None = None,
        deadline_s: float = 900.0,
    ):
        self.name = name
        self.peak_rss = 0
        """Bytes in all processes together, at most, in steps that were watched; what they share is counted in each."""
        self.peak: dict[str, int] = {}
        """Bytes at most, by role; what processes share is counted once (Linux's proportional set size)."""
        self._deadline_s = deadline_s
        self._log = folder / f"{name}.log"
        self._here, there = Pipe()
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        given = {GATE: str(there.fileno()), "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env=os.environ | given | dict(environment or {}),
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[there.fileno()],
            )
        there.close()  # so that its end is the end of what can be received
        self._root = psutil.Process(self._process.pid)

    def __enter__(self) -> BenchmarkProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._here.close()
        tree = self._tree()
        try:
            self._process.wait(60 if error is None else 0)
        except subprocess.TimeoutExpired:
            for process in tree:
                process.kill()
        psutil.wait_procs(tree, timeout=20)

    def start(self) -> dict[str, Any]:
        """Until it stands before its first step."""
        return self._received()

    def step(self, watch_memory: bool = False) -> Step:
        """Let it do one. To watch its memory takes a third of a core, and stops the processes that are looked at."""
        before = self._cpu()
        start = time.perf_counter()
        self._here.send(None)
        told = self._received(watch_memory)
        wall = time.perf_counter() - start
        after = self._cpu()
        used = {role: after[role] - before.get(role, 0.0) for role in after}
        return Step(told, wall, used)

    def finish(self) -> None:
        """Let it go on past its last step, and end."""
        self._here.send(None)
        self._process.wait(self._deadline_s)

    def _received(self, watch_memory: bool = False) -> dict[str, Any]:
        end = time.monotonic() + self._deadline_s
        try:
            while not self._here.poll(SAMPLED_EVERY_S if watch_memory else self._deadline_s):
                if watch_memory:
                    self._read_memory()
                if time.monotonic() > end:
                    raise TimeoutError(f"{self.name} did not finish a step within {self._deadline_s:g} s")
            return dict(self._here.recv())
        except (EOFError, TimeoutError) as error:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(20)  # its last words come after it has closed its end
            tail = self._log.read_text(encoding="utf-8", errors="replace")[-4000:]
            raise RuntimeError(f"{self.name} ended too early; the end of what it said:\n{tail}") from error

    def _tree(self) -> list[psutil.Process]:
        try:
            return [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _cpu(self) -> dict[str, float]:
        found: dict[str, float] = defaultdict(float)
        for process in self._tree():
            try:
                times = process.cpu_times()
                found[self._role(process)] += sum(times[:4])  # user, system, and the same of reaped children
            except psutil.Error:
                continue
        return found

    def _role(self, process: psutil.Process) -> str:
        if process == self._root:
            return "driver"
        words = " ".join(process.cmdline())
        return next((role for part, role in _ROLES.items() if part in words), process.name())

    def _read_memory(self) -> None:
        shared: dict[str, int] = defaultdict(int)
        rss = 0
        for process in self._tree():
            with suppress(psutil.Error, OSError):
                rss += int(process.memory_info().rss)
                lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
                pss = next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
                shared[self._role(process)] += pss * 1024
        self.peak_rss = max(self.peak_rss, rss)
        self.peak = max(self.peak, dict(shared), key=lambda found: sum(found.values()))


_ROLES = {
    "ray::_AsyncWorkerActor": "engine",
    "ray::_WorkerActor": "learner",
    "ray::": "idle Ray workers",
    "environments.worker": "environments",
    "cluster.ray_reaper": "reaper",
    "gcs_server": "Ray: gcs",
    "raylet/raylet": "Ray: raylet",
    "log_monitor": "Ray: log monitor",
    "dashboard": "Ray: agents",
    "runtime_env": "Ray: agents",
}
"""Part of a command line -> whose it is; the first that fits."""


def interleave_steps(
    sides: Sequence[BenchmarkProcess], warm_up: int, steps: int, watched: int = 0
) -> dict[str, list[Step]]:
    """`steps` of every side after `warm_up` that do not count, one side at a time.

    After them come `watched` ones, which are not returned: their memory is looked at, for `Side.peak`.
    """
    for side in sides:
        side.start()
    found: dict[str, list[Step]] = {side.name: [] for side in sides}
    for number in range(warm_up + steps):
        for side in sides:
            step = side.step()
            print(
                f"  step {number + 1}, {side.name}: {step.wall_s:.2f} s, {step.total_cpu_s:.2f} CPU-s", file=sys.stderr
            )
            if number >= warm_up:
                found[side.name].append(step)
    for _ in range(watched):
        for side in sides:
            side.step(watch_memory=True)
    for side in sides:
        side.finish()
    return found


def median(steps: Sequence[Step], name: str) -> float:
    """Of what the side told under that name; 0 where it told nothing."""
    return statistics.median(float(step.reported.get(name, 0.0)) for step in steps)


def medians_by_role(steps: Sequence[Step]) -> dict[str, float]:
    """CPU-seconds of a step, the largest first, without those that took none."""
    roles = {role for step in steps for role in step.cpu_s}
    found = {role: statistics.median(step.cpu_s.get(role, 0.0) for step in steps) for role in roles}
    return {role: seconds for role, seconds in sorted(found.items(), key=lambda item: -item[1]) if seconds > 0}
