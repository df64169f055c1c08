"""Random faults in tiny runs: each run ends like the undisturbed one or reports why not, and nothing is left behind.

A run starts, is hit, restarts if a fault ended it, and is hit again, until it has taken all of its steps.
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
from tests.chaos.elsewhere import Proxy
from tests.chaos.faults import ENVIRONMENT_CODE, MISCHIEF, Fault, Victim
from tests.support.process_state import is_running

STEPS = 10
PROMPTS = 24
"""Number of prompts per epoch."""
SAVED_EVERY = 3
FAULTS_PER_RUN = 8
"""After this number of faults a run may finish."""
_MASKING_RUNS = 0.4
"""Share of runs that faults with a cost in episodes may hit."""
_SPARED_STARTS = 0.5
"""Share of starts without a fault before the first step. Most faults during start-up end the run."""
WITHIN_S = 240.0
"""Every run ends, or takes its next step, within this time in seconds."""
_SETTLES_S = 3.0
_SURELY_THERE = 10
"""After this number of strikes without a target, the name of the fault's target must have changed."""
_SURELY_MASKS = 10
"""This number of faults that cost episodes cannot all have struck between episodes, or in a step that was repeated."""
_RAY_LOOKS = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "4000",
    "RAY_health_check_failure_threshold": "3",
}
"""A raylet that does not respond counts as lost after 15 s, instead of more than a minute."""
_CLOCKS = ("timing/", "throughput/", "memory/", "engines/", "time")
"""Prefixes of metrics that depend on time, or on which engines have died."""


class Miss(AssertionError):
    """Error raised if a check fails after a fault."""


@dataclass
class Campaign:
    """Runs of one configuration in folders below `root`. `overrides` returns the overrides of a run in a folder."""

    root: Path
    overrides: Callable[[Path], list[str]]
    faults: Sequence[Fault]
    seed: int
    proxy: Proxy | None = None
    """Proxy of the connections to an external engine; None for local engines."""
    exact: bool = True
    """True if a resumed run equals the undisturbed one bit for bit. One that samples ahead depends on time."""
    say: Callable[[str], None] = print
    struck: Counter[str] = field(default_factory=Counter)
    absent: Counter[str] = field(default_factory=Counter)
    """Strikes without a target."""
    masked: int = 0
    """Number of runs in which an episode was masked."""

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        if self.proxy is None:
            self.faults = [fault for fault in self.faults if not fault.needs_proxy]
        self.straight = self.root / "straight"
        """Folder of the undisturbed run. `go` creates it if it is missing."""
        (self.root / "plugins").mkdir(parents=True, exist_ok=True)
        (self.root / "plugins" / "chaos_plugin.py").write_text(ENVIRONMENT_CODE)

    def go(self, seconds: float, faults: int | None = None) -> None:
        """Hit runs until the time is over or that many faults have struck. Raises Miss."""
        if not self.straight.exists():
            self._attempt(self.straight, [])
            if (code := self._code) != 0:
                raise Miss(f"the undisturbed run exited with status {code}: {_tail(self.straight)}")
        number, until = 0, time.monotonic() + seconds
        while time.monotonic() < until and (faults is None or self.struck.total() < faults):
            self._run(self.root / f"run_{number}", until, faults)
            number += 1
        if missing := [name for name, count in self.absent.items() if count >= _SURELY_THERE and not self.struck[name]]:
            raise Miss(f"faults {missing} never found a target")
        masking = sum(self.struck[fault.name] for fault in self.faults if fault.masks)
        if masking >= _SURELY_MASKS and not self.masked:
            raise Miss(f"{masking} faults that should cost episodes masked none")

    def _run(self, folder: Path, until: float, most: int | None) -> None:
        """Run once with faults, from start to end."""
        struck: list[Fault] = []
        masks = self.chance.random() < _MASKING_RUNS  # else the run is compared with the undisturbed one
        faults = [fault for fault in self.faults if masks or not fault.masks] or list(self.faults)
        while True:
            left = FAULTS_PER_RUN - len(struck)
            if most is not None:
                left = min(left, most - self.struck.total())
            self._attempt(folder, struck, faults, left if time.monotonic() < until else 0)
            if self._code == 0:
                break
        assert_each_prompt_once_an_epoch(folder)
        masked = any(_failed_episodes(row) for row in _rows(folder).values())
        excused = any(fault.masks for fault in struck) or (masked and any(fault.can_mask for fault in struck))
        if self.exact and not excused:
            _compare(folder, self.straight)
        self.masked += masked
        shutil.rmtree(folder)

    def _attempt(self, folder: Path, struck: list[Fault], faults: Sequence[Fault] = (), most: int = 0) -> None:
        """Start or resume the run, hit it at most `most` times, and check how it ended. Sets `_code`."""
        folder.mkdir(exist_ok=True)
        env = (
            os.environ
            | _RAY_LOOKS
            | {
                "SKYRL_CHAOS": str(folder / MISCHIEF),
                "RAY_ADDRESS": "local",
                "PYTHONPATH": os.pathsep.join([str(self.root / "plugins"), os.environ.get("PYTHONPATH", "")]),
            }
        )
        before, shared = len(_rows(folder)), _shared_memory()
        with (folder / "log").open("w") as log:
            command = [sys.executable, "-m", "skyrl_train.entrypoints.main_base", *self.overrides(folder)]
            driver = subprocess.Popen(command, stdout=log, stderr=log, env=env)
        victim, known, last = Victim(driver, folder, self.chance, self.proxy), set[psutil.Process](), None
        moved_at, seen, next_at = time.monotonic(), before, self._soon()
        spares_start = self.chance.random() < _SPARED_STARTS
        try:
            while driver.poll() is None:
                time.sleep(0.05)
                known |= set(victim.family())
                now = time.monotonic()
                if len(_rows(folder)) != seen:
                    seen, moved_at = len(_rows(folder)), now
                    next_at = self._soon() if spares_start and next_at < now else next_at
                if now - moved_at > WITHIN_S:
                    raise Miss(f"the run makes no progress after {last and last.name}: {_tail(folder)}")
                if most and now >= next_at and (last is None or not last.ends) and (seen > before or not spares_start):
                    fault = self.chance.choice(faults)
                    next_at = self._soon()
                    if seen == before and fault.needs_start:
                        continue
                    if not fault.strike(victim):
                        self.absent[fault.name] += seen > before
                    else:
                        last = fault
                        struck.append(fault)
                        most -= 1
                        self.struck[fault.name] += 1
                        self.say(f"{sum(self.struck.values()):4} {folder.name} step {seen - 1}: {fault.name}")
                        next_at += fault.settles_s
        finally:
            driver.kill()
            driver.wait()
        self._code = driver.returncode
        self._check_end(folder, last, known, took_steps=seen != before)
        if more := _left_of(_shared_memory() - shared):
            raise Miss(f"shared memory is left after {last and last.name}: {sorted(more)}")

    def _soon(self) -> float:
        return time.monotonic() + self.chance.uniform(0.3, 3.0)

    def _check_end(self, folder: Path, last: Fault | None, known: set[psutil.Process], took_steps: bool) -> None:
        name = last.name if last else "nothing"
        _, left = psutil.wait_procs([one for one in known if one.is_running()], timeout=60)
        left = [one for one in left if is_running(one.pid)]
        if left:
            raise Miss(f"processes are left after {name}: {[(one.pid, one.name()) for one in left]}")
        steps = [row["step"] for row in read_jsonl(folder / "ckpts" / "metrics.jsonl")] if _rows(folder) else []
        if len(set(steps)) != len(steps):
            raise Miss(f"a step is logged twice after {name}: {steps}")
        if self._code == 0:
            return
        says = "" if last is None else last.says if last.ends else "" if took_steps else last.in_start
        if last is None or not (last.ends or says) or self._code not in last.codes:
            raise Miss(f"{name} ended the run with status {self._code}: {_tail(folder)}")
        if not re.search(says, (folder / "log").read_text()[-6000:]):
            raise Miss(f"after {name} the run does not print {says}: {_tail(folder)}")
        if re.search(r"^Traceback|please report it", (folder / "log").read_text()[-6000:], re.MULTILINE):
            raise Miss(f"after {name} the run ends with a traceback: {_tail(folder)}")
        checkpoints = CheckpointStore(folder / "ckpts")
        saved = [
            step
            for step in checkpoints.steps()
            if find_checkpoint_damage(folder / "ckpts" / f"global_step_{step}") is None
        ]
        done = max(steps, default=0)
        # Repeated steps are logged only when they are repeated, and a fault may strike while a checkpoint is written.
        saves = last.saves and took_steps
        least = done if saves else (done // SAVED_EVERY - 1) * SAVED_EVERY
        if max(saved, default=0) < least:
            raise Miss(f"after {name} at step {done} the checkpoints are {saved}: {_tail(folder)}")


def _shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def _left_of(names: set[str]) -> set[str]:
    """Return the files that stay and that no living process has mapped. Other tests on this machine have their own."""
    until = time.monotonic() + _SETTLES_S
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


def _compare(folder: Path, straight: Path) -> None:
    """Raise Miss unless metrics and weights equal those of the undisturbed run bit for bit."""
    found, expected = _rows(folder), _rows(straight)
    if found.keys() != expected.keys():
        raise Miss(f"steps {sorted(found)} are logged instead of {sorted(expected)}")
    for step, row in expected.items():
        names = [name for name in row.keys() | found[step].keys() if not name.startswith(_CLOCKS)]
        differ = {
            name: (row.get(name), found[step].get(name)) for name in names if row.get(name) != found[step].get(name)
        }
        if differ:
            raise Miss(f"step {step} differs (undisturbed, hit): {differ}")
    weights = f"exports/global_step_{STEPS}/policy/model.safetensors"
    ours, theirs = load_file(folder / weights), load_file(straight / weights)
    if not all(bool((ours[name] == tensor).all()) for name, tensor in theirs.items()):
        raise Miss("the weights differ from those of the undisturbed run")


def assert_each_prompt_once_an_epoch(folder: Path) -> None:
    """Raise Miss unless the run has trained on every prompt of an epoch exactly once, in any order.

    This covers the steps that the last checkpoint continues. The dumped batch of a step is that of its last execution.
    It is missing if the disk was full.
    """
    files = (folder / "exports" / "dumped_data").glob("global_step_*_training_input.safetensors")
    trained_on = {int(file.name.split("_")[2]): set(read_batch(file)[1]) for file in files}
    if not trained_on:
        raise Miss("no batch was dumped")
    a_step = len(next(iter(trained_on.values())))
    for epoch in range(-(-STEPS * a_step // PROMPTS)):
        steps = [step for step in range(1, STEPS + 1) if (step - 1) * a_step // PROMPTS == epoch and step in trained_on]
        counted = Counter(uid for step in steps for uid in trained_on[step])
        if len(counted) != len(steps) * a_step:
            raise Miss(f"steps {steps} of one epoch train on prompts more than once: {counted.most_common(3)}")


def _tail(folder: Path) -> str:
    lines = (folder / "log").read_text().splitlines()
    return "\n".join(line for line in lines if not line.startswith(("note:", "  prompt", "  answer", "    ")))[-3000:]
