"""What is done to a run while it runs, and how each may end it."""

from __future__ import annotations

import random
import re
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.chaos.elsewhere import Proxy
from tests.support.handlers import catches

MISCHIEF = "mischief"
"""A file in a run's folder that tells its environments how to misbehave."""
FULL_S = 1.5
"""How long a disk stays full."""


@dataclass(frozen=True)
class Victim:
    """A run under way."""

    driver: subprocess.Popen[bytes]
    folder: Path
    chance: random.Random
    proxy: Proxy | None = None

    def processes(self, pattern: str) -> list[psutil.Process]:
        """Its processes whose name or command line matches, the driver's own excepted."""
        return [one for one in self.family() if re.search(pattern, _title(one))]

    def family(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.driver.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []


def _title(process: psutil.Process) -> str:
    try:
        return f"{process.name()} {' '.join(process.cmdline())}"
    except psutil.Error:
        return ""


@dataclass(frozen=True)
class Fault:
    """`strike` returns whether there was something to hit. A run that it ends must say so, and with its exit status."""

    name: str
    strike: Callable[[Victim], bool]
    ends: bool = False
    """Whether it may end the run; else the run goes on."""
    codes: tuple[int, ...] = (1,)
    says: str = ""
    """A pattern of what a run says that it ends."""
    in_start: str = ""
    """A pattern of what a run says that it ends in its start, where the run would go on later."""
    saves: bool = False
    """Whether the run that it ends saves its last whole step."""
    masks: bool = False
    """Whether it costs episodes, so that the run is not the undisturbed one any more."""
    can_mask: bool = False
    """Whether it costs an episode where it strikes within a call of an environment, which few do."""
    needs_proxy: bool = False
    """True if the fault strikes only runs whose engine is reached through a proxy."""
    needs_start: bool = False
    """Whether it strikes only once a step was taken since the start: nothing starts without a disk."""
    settles_s: float = 0.0
    """How long to wait before the next fault."""


def _hit(pattern: str, number: signal.Signals) -> Callable[[Victim], bool]:
    def strike(victim: Victim) -> bool:
        found = victim.processes(pattern)
        if not found:
            return False
        try:
            victim.chance.choice(found).send_signal(number)
        except psutil.NoSuchProcess:
            return False
        return True

    return strike


def _signal(*numbers: signal.Signals) -> Callable[[Victim], bool]:
    def strike(victim: Victim) -> bool:
        if not catches(victim.driver.pid, signal.SIGTERM):  # it has not come to our first line
            return False
        for number in numbers:
            victim.driver.send_signal(number)
            time.sleep(0.2 if len(numbers) > 1 else 0)
        return True

    return strike


def _full_disk(victim: Victim) -> bool:
    """For a moment nothing of the run can write a file beyond 100 bytes."""
    limited: list[psutil.Process] = []
    for process in (psutil.Process(victim.driver.pid), *victim.processes(RANK)):
        try:
            process.rlimit(psutil.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
            limited.append(process)
        except psutil.Error:
            continue
    time.sleep(FULL_S)
    for process in limited:
        try:
            process.rlimit(psutil.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        except psutil.Error:
            continue
    return bool(limited)


def _drop_connections(victim: Victim) -> bool:
    return victim.proxy is not None and victim.proxy.drop()


def _mischief(kind: str) -> Callable[[Victim], bool]:
    def strike(victim: Victim) -> bool:
        (victim.folder / MISCHIEF).write_text(kind)
        return True

    return strike


ENGINE, RANK, ENVIRONMENT = r"ray::_AsyncShell", r"ray::_Shell", r"skyrl_train\.environments\.worker"
KILL, STOP, INT, TERM = signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, signal.SIGTERM
LOST = (
    "ClusterLost|raylet died|raylet because it is dead|gcs_server died|GCS may have been killed|WorkerDied|EnginesLost"
    "|ended while Ray was starting"
)

FAULTS = (
    Fault("engine killed", _hit(ENGINE, KILL), in_start="EngineError: .* died during start", settles_s=3),
    Fault("engine stopped", _hit(ENGINE, STOP), in_start="DeadlineExceeded: .*start", settles_s=60),
    Fault("rank killed", _hit(RANK, KILL), ends=True, says="WorkerDied"),
    Fault("rank stopped", _hit(RANK, STOP), ends=True, says="DeadlineExceeded", settles_s=60),
    Fault("environment killed", _hit(ENVIRONMENT, KILL), can_mask=True),
    Fault("environment stopped", _hit(ENVIRONMENT, STOP), masks=True, settles_s=6),
    Fault("raylet killed", _hit(r"^raylet", KILL), ends=True, says=LOST),
    Fault(
        "raylet stopped",
        _hit(r"^raylet", STOP),
        ends=True,
        says=f"{LOST}|DeadlineExceeded|Ray's processes do not answer",
        settles_s=30,
    ),
    Fault("GCS killed", _hit(r"^gcs_server", KILL), ends=True, says=LOST),
    Fault("driver killed", _signal(KILL), ends=True, codes=(-9,)),
    Fault("SIGTERM", _signal(TERM), ends=True, codes=(143,), says="SIGTERM", saves=True),
    Fault("SIGINT", _signal(INT), ends=True, codes=(130,), says="SIGINT", saves=True),
    Fault("SIGINT twice", _signal(INT, INT), ends=True, codes=(130,), says="SIGINT"),
    Fault("connections dropped", _drop_connections, ends=True, says="EnginesLost", saves=True, needs_proxy=True),
    Fault("disk full", _full_disk, needs_start=True, settles_s=1),
    *(
        Fault(f"environment {kind}", _mischief(kind), masks=True, settles_s=2)
        for kind in ("raises", "hangs", "lies", "exits")
    ),
    Fault("environment slow", _mischief("slow")),
)

ENVIRONMENT_CODE = '''
import os, time
from dataclasses import replace
from pathlib import Path
from skyrl_train.environments.registry import register
from skyrl_train.environments.tasks.arithmetic import ArithmeticEnv


class MischievousEnv(ArithmeticEnv):
    """Arithmetic, but for one step after a file says how to misbehave."""

    def step(self, action):
        try:
            file = Path(os.environ["SKYRL_CHAOS"])
            kind = file.read_text()
            file.unlink()
        except FileNotFoundError:
            return super().step(action)
        if kind == "raises":
            raise ZeroDivisionError("mischief")
        if kind == "hangs":
            time.sleep(3600)
        if kind == "exits":
            os._exit(3)
        if kind == "slow":
            time.sleep(1)
        result = super().step(action)
        return replace(result, reward=float("nan")) if kind == "lies" else result


register("mischievous", "chaos_plugin:MischievousEnv")
'''


def named(names: str | None) -> Iterator[Fault]:
    """The faults whose names contain one of these, separated by commas; all without."""
    wanted = [one.strip() for one in names.split(",")] if names else [""]
    return (fault for fault in FAULTS if any(one in fault.name for one in wanted))
