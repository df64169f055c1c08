"""Faults that can be injected into a run, and the outcomes that each of them allows."""

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

from tests.chaos.external_engine import Proxy
from tests.support.signal_handlers import handles_signal

MISBEHAVIOR_FILE = "mischief"
"""File in a run's folder whose content tells an environment how to misbehave in its next step."""
DISK_FULL_S = 1.5
"""Time in seconds during which a disk is full."""


@dataclass(frozen=True)
class Victim:
    """A run in progress."""

    driver: subprocess.Popen[bytes]
    folder: Path
    rng: random.Random
    proxy: Proxy | None = None

    def processes(self, pattern: str) -> list[psutil.Process]:
        """Return the run's processes whose name or command line matches, without the driver."""
        return [process for process in self.descendants() if re.search(pattern, _title(process))]

    def descendants(self) -> list[psutil.Process]:
        """Return all processes of the run except the driver."""
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
    """A fault and the outcomes that it allows. A run that the fault ends must report the reason."""

    name: str
    strike: Callable[[Victim], bool]
    """Function that injects the fault. It returns False if it found no target."""
    ends_run: bool = False
    """True if the fault may end the run."""
    exit_codes: tuple[int, ...] = (1,)
    """Allowed exit statuses of a run that the fault ends."""
    message: str = ""
    """Pattern of the message with which the run ends."""
    startup_message: str = ""
    """Pattern of the message with which a fault during start-up ends the run, if a later fault would not end it."""
    saves_checkpoint: bool = False
    """True if the run saves its last complete step when the fault ends it."""
    masks_episodes: bool = False
    """True if the fault costs episodes, so that the run differs from the undisturbed one."""
    may_mask_episodes: bool = False
    """True if the fault costs an episode only when it strikes during a call of an environment, which is rare."""
    needs_proxy: bool = False
    """True if the fault applies only to runs whose engine is behind a proxy."""
    needs_first_step: bool = False
    """True if the fault must wait for the first step after a start, because a run cannot start with a full disk."""
    settle_s: float = 0.0
    """Seconds to wait before the next fault."""


def _send_to_process(pattern: str, number: signal.Signals) -> Callable[[Victim], bool]:
    def strike(victim: Victim) -> bool:
        processes = victim.processes(pattern)
        if not processes:
            return False
        try:
            victim.rng.choice(processes).send_signal(number)
        except psutil.NoSuchProcess:
            return False
        return True

    return strike


def _send_to_driver(*numbers: signal.Signals) -> Callable[[Victim], bool]:
    def strike(victim: Victim) -> bool:
        if not handles_signal(victim.driver.pid, signal.SIGTERM):  # Python has not yet reached our code
            return False
        for number in numbers:
            victim.driver.send_signal(number)
            time.sleep(0.2 if len(numbers) > 1 else 0)
        return True

    return strike


def _full_disk(victim: Victim) -> bool:
    """Prevent the driver and the ranks from writing more than 100 bytes to a file for DISK_FULL_S seconds."""
    limited: list[psutil.Process] = []
    for process in (psutil.Process(victim.driver.pid), *victim.processes(RANK)):
        try:
            process.rlimit(psutil.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
            limited.append(process)
        except psutil.Error:
            continue
    time.sleep(DISK_FULL_S)
    for process in limited:
        try:
            process.rlimit(psutil.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        except psutil.Error:
            continue
    return bool(limited)


def _drop_connections(victim: Victim) -> bool:
    return victim.proxy is not None and victim.proxy.drop()


def _misbehave(kind: str) -> Callable[[Victim], bool]:
    def strike(victim: Victim) -> bool:
        (victim.folder / MISBEHAVIOR_FILE).write_text(kind)
        return True

    return strike


ENGINE = r"ray::_AsyncWorkerActor|skyrl_train\.cluster\.child_process"
RANK, ENVIRONMENT = r"ray::_WorkerActor", r"skyrl_train\.environments\.worker"
KILL, STOP, INT, TERM = signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, signal.SIGTERM
CLUSTER_LOST = (
    "ClusterLost|raylet died|raylet because it is dead|gcs_server died|GCS may have been killed|WorkerDied|EnginesLost"
    "|ended while Ray was starting|ended at the same time"
)

FAULTS = (
    Fault(
        "engine killed", _send_to_process(ENGINE, KILL), startup_message="EngineError: .* died during start", settle_s=3
    ),
    Fault("engine stopped", _send_to_process(ENGINE, STOP), startup_message="DeadlineExceeded: .*start", settle_s=60),
    Fault("rank killed", _send_to_process(RANK, KILL), ends_run=True, message="WorkerDied"),
    Fault("rank stopped", _send_to_process(RANK, STOP), ends_run=True, message="DeadlineExceeded", settle_s=60),
    Fault("environment killed", _send_to_process(ENVIRONMENT, KILL), may_mask_episodes=True),
    Fault("environment stopped", _send_to_process(ENVIRONMENT, STOP), masks_episodes=True, settle_s=6),
    Fault("raylet killed", _send_to_process(r"^raylet", KILL), ends_run=True, message=CLUSTER_LOST),
    Fault(
        "raylet stopped",
        _send_to_process(r"^raylet", STOP),
        ends_run=True,
        message=f"{CLUSTER_LOST}|DeadlineExceeded",
        settle_s=30,
    ),
    Fault("GCS killed", _send_to_process(r"^gcs_server", KILL), ends_run=True, message=CLUSTER_LOST),
    Fault("driver killed", _send_to_driver(KILL), ends_run=True, exit_codes=(-9,)),
    Fault("SIGTERM", _send_to_driver(TERM), ends_run=True, exit_codes=(143,), message="SIGTERM", saves_checkpoint=True),
    Fault("SIGINT", _send_to_driver(INT), ends_run=True, exit_codes=(130,), message="SIGINT", saves_checkpoint=True),
    Fault("SIGINT twice", _send_to_driver(INT, INT), ends_run=True, exit_codes=(130,), message="SIGINT"),
    Fault(
        "connections dropped",
        _drop_connections,
        ends_run=True,
        message="EnginesLost",
        saves_checkpoint=True,
        needs_proxy=True,
    ),
    Fault("disk full", _full_disk, needs_first_step=True, settle_s=1),
    *(
        Fault(f"environment {kind}", _misbehave(kind), masks_episodes=True, settle_s=2)
        for kind in ("raises", "hangs", "lies", "exits")
    ),
    Fault("environment slow", _misbehave("slow")),
)

ENVIRONMENT_CODE = '''
import os, time
from dataclasses import replace
from pathlib import Path
from skyrl_train.environments.registry import register
from skyrl_train.environments.tasks.arithmetic import ArithmeticEnv


class MischievousEnv(ArithmeticEnv):
    """Arithmetic tasks, except for one step after a file asks the environment to misbehave."""

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


def find_faults(names: str | None) -> Iterator[Fault]:
    """Yield the faults whose names contain one of these comma-separated texts. Yield all faults if `names` is None."""
    patterns = [name.strip() for name in names.split(",")] if names else [""]
    return (fault for fault in FAULTS if any(pattern in fault.name for pattern in patterns))
