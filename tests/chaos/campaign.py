"""Inject random faults into tiny runs and check their outcome.

A run resumes after each fault that ends it, until it has completed all of its steps. Each run must end like the
undisturbed one or report why not. It must leave no processes and no shared memory behind.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from safetensors.torch import load_file

from skyrl_train.report.jsonl import read_jsonl
from skyrl_train.trainer.batch_dump import read_batch
from skyrl_train.trainer.checkpoints import CheckpointStore, find_checkpoint_damage
from tests.chaos.external_engine import Proxy
from tests.chaos.faults import ENVIRONMENT_CODE, MISBEHAVIOR_FILE, Fault, Victim
from tests.support.process_state import is_running

STEPS = 10
PROMPTS = 24
"""Number of prompts per epoch."""
CHECKPOINT_INTERVAL = 3
FAULTS_PER_RUN = 8
"""Maximum number of faults per run."""
_MASKING_RUN_SHARE = 0.4
"""Share of runs in which faults may cost episodes."""
_UNDISTURBED_STARTS = 0.5
"""Share of starts without a fault before the first step. Most faults during start-up end the run."""
PROGRESS_TIMEOUT_S = 240.0
"""Maximum time in seconds until a run ends or completes its next step."""
_SETTLE_S = 3.0
"""Seconds within which shared memory must be released after a run."""
_MAX_ABSENT = 10
"""After this number of strikes without a target, the name of the fault's target must have changed."""
_MAX_WITHOUT_MASKED = 10
"""After this number of faults that cost episodes, a masked episode must have been logged."""
_RAY_HEALTH_CHECKS = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "4000",
    "RAY_health_check_failure_threshold": "3",
}
"""Settings by which Ray declares an unresponsive raylet lost after 15 s, instead of more than a minute."""
_TIME_DEPENDENT = ("timing/", "throughput/", "memory/", "engines/", "time")
"""Prefixes of metrics that depend on time, or on dead engines."""
_OF_A_START = {"weights/self_test_gap", "weights/rehearsal_gap"}
"""Metrics of the self-test of weight syncs. A run that resumes before a step was published adds them to its row."""


class InvariantViolation(AssertionError):
    """Error raised if a run violates an invariant after a fault."""


@dataclass
class Campaign:
    """A series of runs of one configuration, in folders below `root`, into which faults are injected."""

    root: Path
    overrides: Callable[[Path], list[str]]
    """Function of a run's folder that returns the overrides of the run."""
    faults: Sequence[Fault]
    seed: int
    proxy: Proxy | None = None
    """Proxy of the connections to an external engine; None for local engines."""
    exact: bool = True
    """True if a resumed run equals the undisturbed one bit for bit. Asynchronous runs depend on time and do not."""
    log: Callable[[str], None] = print
    strikes: Counter[str] = field(default_factory=Counter)
    """Number of strikes by name of the fault."""
    absent: Counter[str] = field(default_factory=Counter)
    """Number of strikes that found no target, by name of the fault."""
    masked: int = 0
    """Number of runs in which an episode was masked."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        if self.proxy is None:
            self.faults = [fault for fault in self.faults if not fault.needs_proxy]
        self.undisturbed = self.root / "undisturbed"
        """Folder of the undisturbed run. `run` creates it if it is missing."""
        (self.root / "plugins").mkdir(parents=True, exist_ok=True)
        (self.root / "plugins" / "chaos_plugin.py").write_text(ENVIRONMENT_CODE)

    def run(self, seconds: float, faults: int | None = None) -> None:
        """Start runs and inject faults into them.

        Args:
            seconds: Time after which no more faults strike. The current run then continues to its end.
            faults: Maximum number of faults; None for no limit.

        Raises:
            InvariantViolation: A run violated an invariant, a fault never found a target, or no episode was masked.
        """
        if not self.undisturbed.exists():
            self._attempt(self.undisturbed, [])
            if (code := self._code) != 0:
                raise InvariantViolation(f"the undisturbed run exited with status {code}: {_tail(self.undisturbed)}")
        number, until = 0, time.monotonic() + seconds
        while time.monotonic() < until and (faults is None or self.strikes.total() < faults):
            self._run_to_end(self.root / f"run_{number}", until, faults)
            number += 1
        if missing := [name for name, count in self.absent.items() if count >= _MAX_ABSENT and not self.strikes[name]]:
            raise InvariantViolation(f"faults {missing} never found a target")
        masking = sum(self.strikes[fault.name] for fault in self.faults if fault.masks_episodes)
        if masking >= _MAX_WITHOUT_MASKED and not self.masked:
            raise InvariantViolation(f"{masking} faults that should cost episodes masked none")

    def _run_to_end(self, folder: Path, until: float, max_faults: int | None) -> None:
        """Start a run, inject faults and resume it until it has completed all of its steps. Delete its folder."""
        strikes: list[Fault] = []
        masks_episodes = self.rng.random() < _MASKING_RUN_SHARE  # else the run is compared with the undisturbed one
        faults = [fault for fault in self.faults if masks_episodes or not fault.masks_episodes] or list(self.faults)
        while True:
            remaining = FAULTS_PER_RUN - len(strikes)
            if max_faults is not None:
                remaining = min(remaining, max_faults - self.strikes.total())
            self._attempt(folder, strikes, faults, remaining if time.monotonic() < until else 0)
            if self._code == 0:
                break
        check_each_prompt_once_per_epoch(folder)
        masked = any(_failed_episodes(row) for row in _rows(folder).values())
        may_differ = any(fault.masks_episodes or (masked and fault.may_mask_episodes) for fault in strikes)
        if self.exact and not may_differ:
            _compare_with_undisturbed(folder, self.undisturbed)
        self.masked += masked
        shutil.rmtree(folder)

    def _attempt(self, folder: Path, strikes: list[Fault], faults: Sequence[Fault] = (), max_faults: int = 0) -> None:
        """Start or resume the run, inject faults, and check the outcome. Set `_code` to the exit status.

        Args:
            folder: Folder of the run.
            strikes: List to which the faults that strike are appended.
            faults: Faults to choose from.
            max_faults: Maximum number of faults.
        """
        folder.mkdir(exist_ok=True)
        env = (
            os.environ
            | _RAY_HEALTH_CHECKS
            | {
                "SKYRL_CHAOS": str(folder / MISBEHAVIOR_FILE),
                "RAY_ADDRESS": "local",
                "PYTHONPATH": os.pathsep.join([str(self.root / "plugins"), os.environ.get("PYTHONPATH", "")]),
            }
        )
        before, shared = len(_rows(folder)), _shared_memory()
        with (folder / "log").open("w") as log:
            command = [sys.executable, "-m", "skyrl_train.entrypoints.main_base", *self.overrides(folder)]
            driver = subprocess.Popen(command, stdout=log, stderr=log, env=env)
        victim, known, last = Victim(driver, folder, self.rng, self.proxy), set[psutil.Process](), None
        progress_at, seen, next_at = time.monotonic(), before, self._soon()
        skip_startup = self.rng.random() < _UNDISTURBED_STARTS
        try:
            while driver.poll() is None:
                time.sleep(0.05)
                known |= set(victim.descendants())
                now = time.monotonic()
                if len(_rows(folder)) != seen:
                    seen, progress_at = len(_rows(folder)), now
                    next_at = self._soon() if skip_startup and next_at < now else next_at
                if now - progress_at > PROGRESS_TIMEOUT_S:
                    raise InvariantViolation(f"the run makes no progress after {last and last.name}: {_tail(folder)}")
                may_strike = (last is None or not last.ends_run) and (seen > before or not skip_startup)
                if max_faults and now >= next_at and may_strike:
                    fault = self.rng.choice(faults)
                    next_at = self._soon()
                    if seen == before and fault.needs_first_step:
                        continue
                    if not fault.strike(victim):
                        self.absent[fault.name] += seen > before
                    else:
                        last = fault
                        strikes.append(fault)
                        max_faults -= 1
                        self.strikes[fault.name] += 1
                        self.log(f"{self.strikes.total():4} {folder.name} step {seen - 1}: {fault.name}")
                        next_at += fault.settle_s
        finally:
            driver.kill()
            driver.wait()
        self._code = driver.returncode
        self._check_outcome(folder, last, known, took_steps=seen != before)
        if leaked := _leaked_files(_shared_memory() - shared):
            raise InvariantViolation(f"shared memory is left after {last and last.name}: {sorted(leaked)}")

    def _soon(self) -> float:
        return time.monotonic() + self.rng.uniform(0.3, 3.0)

    def _check_outcome(self, folder: Path, last: Fault | None, known: set[psutil.Process], took_steps: bool) -> None:
        name = last.name if last else "no fault"
        _, alive = psutil.wait_procs([process for process in known if process.is_running()], timeout=60)
        leaked = [(process.pid, process.name()) for process in alive if is_running(process.pid)]
        if leaked:
            raise InvariantViolation(f"processes are left after {name}: {leaked}")
        steps = [row["step"] for row in read_jsonl(folder / "ckpts" / "metrics.jsonl")] if _rows(folder) else []
        if len(set(steps)) != len(steps):
            raise InvariantViolation(f"a step is logged twice after {name}: {steps}")
        if self._code == 0:
            return
        message = "" if last is None else last.message if last.ends_run else "" if took_steps else last.startup_message
        if last is None or not (last.ends_run or message) or self._code not in last.exit_codes:
            raise InvariantViolation(f"{name} ended the run with status {self._code}: {_tail(folder)}")
        if not re.search(message, (folder / "log").read_text()[-6000:]):
            raise InvariantViolation(f"after {name} the run does not print {message}: {_tail(folder)}")
        if re.search(r"^Traceback|please report it", (folder / "log").read_text()[-6000:], re.MULTILINE):
            raise InvariantViolation(f"after {name} the run ends with a traceback: {_tail(folder)}")
        checkpoints = CheckpointStore(folder / "ckpts")
        saved = [
            step
            for step in checkpoints.steps()
            if find_checkpoint_damage(folder / "ckpts" / f"global_step_{step}") is None
        ]
        done = max(steps, default=0)
        # Unless the fault saves a checkpoint, the last one may be missing: the fault may have struck during its write.
        saves_checkpoint = last.saves_checkpoint and took_steps
        min_saved = done if saves_checkpoint else (done // CHECKPOINT_INTERVAL - 1) * CHECKPOINT_INTERVAL
        if max(saved, default=0) < min_saved:
            raise InvariantViolation(f"after {name} at step {done} the checkpoints are {saved}: {_tail(folder)}")


def _shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def _leaked_files(names: set[str]) -> set[str]:
    """Return the files that still exist after _SETTLE_S and that no process has mapped.

    Mapped files belong to other programs on this machine.
    """
    until = time.monotonic() + _SETTLE_S
    while names and time.monotonic() < until:
        time.sleep(0.1)
        names &= _shared_memory()
        for file in Path("/proc").glob("[0-9]*/maps"):
            with suppress(OSError):
                mapped = file.read_text(errors="replace")
                names = {name for name in names if f"/dev/shm/{name}" not in mapped}
    return names


def _rows(folder: Path) -> dict[int, dict[str, Any]]:
    file = folder / "ckpts" / "metrics.jsonl"
    return {row["step"]: row for row in read_jsonl(file)} if file.exists() else {}


def _failed_episodes(row: dict[str, Any]) -> float:
    """Return the number of failed episodes of a step's rollouts and its evaluation."""
    return sum(value for name, value in row.items() if name == "rollouts/failed" or name.endswith("/num_failed"))


def _compare_with_undisturbed(folder: Path, undisturbed: Path) -> None:
    """Raise InvariantViolation unless metrics and weights equal those of the undisturbed run bit for bit."""
    actual, expected = _rows(folder), _rows(undisturbed)
    if actual.keys() != expected.keys():
        raise InvariantViolation(f"steps {sorted(actual)} are logged instead of {sorted(expected)}")
    for step, row in expected.items():
        compared = (row.keys() | actual[step].keys()) - _OF_A_START
        names = [name for name in compared if not name.startswith(_TIME_DEPENDENT)]
        differences = {
            name: (row.get(name), actual[step].get(name)) for name in names if row.get(name) != actual[step].get(name)
        }
        if differences:
            raise InvariantViolation(f"step {step} differs (undisturbed value, this run's value): {differences}")
    file = f"exports/global_step_{STEPS}/policy/model.safetensors"
    weights, expected_weights = load_file(folder / file), load_file(undisturbed / file)
    if not all(bool((weights[name] == tensor).all()) for name, tensor in expected_weights.items()):
        raise InvariantViolation("the weights differ from those of the undisturbed run")


def check_each_prompt_once_per_epoch(folder: Path) -> None:
    """Raise InvariantViolation if the run has trained on a prompt more than once in an epoch.

    The dumped batch of a step is that of its last execution. It is missing if the disk was full.
    """
    files = (folder / "exports" / "dumped_data").glob("global_step_*_training_input.safetensors")
    trained_on = {int(file.name.split("_")[2]): set(read_batch(file)[1]) for file in files}
    if not trained_on:
        raise InvariantViolation("no batch was dumped")
    prompts_per_step = len(next(iter(trained_on.values())))
    for epoch in range(-(-STEPS * prompts_per_step // PROMPTS)):
        steps = [step for step in sorted(trained_on) if (step - 1) * prompts_per_step // PROMPTS == epoch]
        counts = Counter(uid for step in steps for uid in trained_on[step])
        if len(counts) != len(steps) * prompts_per_step:
            raise InvariantViolation(
                f"steps {steps} of one epoch train on prompts more than once: {counts.most_common(3)}"
            )


def _tail(folder: Path) -> str:
    lines = (folder / "log").read_text().splitlines()
    return "\n".join(line for line in lines if not line.startswith(("note:", "  prompt", "  answer", "    ")))[-3000:]
