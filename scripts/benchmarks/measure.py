"""Environment info of a benchmark, and processes that run steps in turn, with the cost of their process trees.

A side is a command that starts any number of processes. Its root process waits at a `StepBarrier` before every step.
The benchmark lets one side through at a time, so other load on the machine affects all sides alike. It reads CPU times
while the side waits before and after a step.
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
"""The environment variable with the file descriptor of the side's end of the pipe."""
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
"""The setting of the framework's own processes: a waiting thread sleeps instead of spinning."""
SAMPLED_EVERY_S = 0.2
"""The interval at which a side's memory is read during a step."""


def environment_info(*packages: str) -> dict[str, Any]:
    """Return the commit, the machine, and the versions of the packages that are measured."""

    def git(*arguments: str) -> str:
        result = subprocess.run(["git", "-C", str(HERE), *arguments], capture_output=True, text=True, check=False)
        return result.stdout.strip()

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
    except importlib.metadata.PackageNotFoundError:  # vLLM's CPU build has another name
        return importlib.metadata.version(f"{name}-cpu")


def format_environment_info(info: Mapping[str, Any]) -> str:
    """Return the environment info as one line of text."""
    versions = ", ".join(f"{name} {version}" for name, version in info["versions"].items())
    return (
        f"commit {info['commit']}; {info['cores']} cores of {info['processor']}, {info['memory_gib']} GiB, load "
        f"{info['load']} before the start; Python {info['python']}, {versions}"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((text.partition(":")[2].strip() for text in lines if text.startswith("model name")), "unknown")


class StepBarrier:
    """A barrier in a side's root process. Call `wait` before the first step, and with its metrics after each step."""

    def __init__(self) -> None:
        self._connection = Connection(int(os.environ[GATE]))

    def wait(self, metrics: Mapping[str, Any] | None = None) -> None:
        """Send the metrics, and block until the benchmark lets this side continue. Exit if the benchmark has ended."""
        try:
            self._connection.send(dict(metrics or {}))
            self._connection.recv()
        except (EOFError, OSError):
            sys.exit("The benchmark has ended.")


@dataclass(frozen=True)
class Step:
    """One step of a side."""

    reported: dict[str, Any]
    """The metrics that the side sent."""
    wall_s: float
    cpu_s: dict[str, float]
    """User and system time by process role. The time of a child that ended counts for the process that reaped it."""

    @property
    def total_cpu_s(self) -> float:
        return sum(self.cpu_s.values())


class BenchmarkProcess:
    """A running command. As a context manager, it ends all processes of the command on exit."""

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
        """The peak of the summed RSS in bytes during watched steps; each process counts shared pages."""
        self.peak: dict[str, int] = {}
        """The peak proportional set size (PSS) in bytes by role; shared pages count once."""
        self._deadline_s = deadline_s
        self._log = folder / f"{name}.log"
        self._connection, child_end = Pipe()
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        variables = {GATE: str(child_end.fileno()), "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env=os.environ | variables | dict(environment or {}),
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[child_end.fileno()],
            )
        child_end.close()  # so that recv raises EOFError when the child ends
        self._root = psutil.Process(self._process.pid)

    def __enter__(self) -> BenchmarkProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()
        tree = self._tree()
        try:
            self._process.wait(60 if error is None else 0)
        except subprocess.TimeoutExpired:
            for process in tree:
                process.kill()
        psutil.wait_procs(tree, timeout=20)

    def start(self) -> dict[str, Any]:
        """Block until the side waits before its first step, and return what it sent."""
        return self._receive()

    def step(self, watch_memory: bool = False) -> Step:
        """Let the side run one step and return its cost.

        Watching memory uses a third of a core and briefly stops the processes whose memory is read.
        """
        before = self._cpu()
        start = time.perf_counter()
        self._connection.send(None)
        metrics = self._receive(watch_memory)
        wall = time.perf_counter() - start
        after = self._cpu()
        used = {role: after[role] - before.get(role, 0.0) for role in after}
        return Step(metrics, wall, used)

    def finish(self) -> None:
        """Let the side continue after its last step, and wait for its end."""
        self._connection.send(None)
        self._process.wait(self._deadline_s)

    def _receive(self, watch_memory: bool = False) -> dict[str, Any]:
        end = time.monotonic() + self._deadline_s
        try:
            while not self._connection.poll(SAMPLED_EVERY_S if watch_memory else self._deadline_s):
                if watch_memory:
                    self._read_memory()
                if time.monotonic() > end:
                    raise TimeoutError(f"{self.name} did not finish a step within {self._deadline_s:g} s")
            return dict(self._connection.recv())
        except (EOFError, TimeoutError) as error:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(20)  # its last output comes after it has closed the pipe
            tail = self._log.read_text(encoding="utf-8", errors="replace")[-4000:]
            raise RuntimeError(f"{self.name} ended too early. The end of its log:\n{tail}") from error

    def _tree(self) -> list[psutil.Process]:
        try:
            return [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _cpu(self) -> dict[str, float]:
        seconds: dict[str, float] = defaultdict(float)
        for process in self._tree():
            try:
                times = process.cpu_times()
                seconds[self._role(process)] += sum(times[:4])  # user, system, and the same of reaped children
            except psutil.Error:
                continue
        return seconds

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
        self.peak = max(self.peak, dict(shared), key=lambda by_role: sum(by_role.values()))


_ROLES = {
    "ray::_AsyncWorkerActor": "engine",
    "cluster.child_process": "engine",
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
"""Part of a command line -> the role of its process; the first match counts."""


def interleave_steps(
    sides: Sequence[BenchmarkProcess], warm_up: int, steps: int, watched: int = 0
) -> dict[str, list[Step]]:
    """Run steps of all sides in turn, one side at a time.

    Args:
        sides: The sides, which have been started as processes.
        warm_up: The number of first steps that are not returned.
        steps: The number of measured steps of each side.
        watched: The number of further steps, which only measure memory, for `BenchmarkProcess.peak`.

    Returns:
        The measured steps by the name of the side.
    """
    for side in sides:
        side.start()
    measured: dict[str, list[Step]] = {side.name: [] for side in sides}
    for number in range(warm_up + steps):
        for side in sides:
            step = side.step()
            print(
                f"  step {number + 1}, {side.name}: {step.wall_s:.2f} s, {step.total_cpu_s:.2f} CPU-s", file=sys.stderr
            )
            if number >= warm_up:
                measured[side.name].append(step)
    for _ in range(watched):
        for side in sides:
            side.step(watch_memory=True)
    for side in sides:
        side.finish()
    return measured


def median(steps: Sequence[Step], name: str) -> float:
    """Return the median of a metric that the side sent; a missing value counts as 0."""
    return statistics.median(float(step.reported.get(name, 0.0)) for step in steps)


def medians_by_role(steps: Sequence[Step]) -> dict[str, float]:
    """Return the median CPU-seconds of a step by role, the largest first, without roles that used none."""
    roles = {role for step in steps for role in step.cpu_s}
    medians = {role: statistics.median(step.cpu_s.get(role, 0.0) for step in steps) for role in roles}
    return {role: seconds for role, seconds in sorted(medians.items(), key=lambda item: -item[1]) if seconds > 0}
