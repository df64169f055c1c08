"""The reaper of a driver's Ray, with copies of `sleep` that have the names of Ray's processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from skyrl_train.cluster import ray_reaper

DRIVER = """
import os, signal, subprocess, sys, time
from skyrl_train.cluster.ray_reaper import RayReaper, exit_now
reaper = RayReaper(os.environ.get("FOLDER"))
with reaper.tag_children():
    raylet = subprocess.Popen([sys.argv[1], "60"])
    other = subprocess.Popen(["sleep", "60"])
    print(raylet.pid, other.pid, flush=True)
    if sys.argv[2] == "during start":
        time.sleep(0.5)
        os._exit(1)
    if sys.argv[2] == "asked during start":
        exit_now(143)
if sys.argv[2] == "asked":
    exit_now(143)
if sys.argv[2] == "raylet first":
    raylet.kill()
    while reaper.dead_process() is None:
        time.sleep(0.01)
    assert reaper.dead_process() == f"raylet (process {raylet.pid})"
    time.sleep(0.5)
elif sys.argv[2] == "together":
    raylet.kill()
elif sys.argv[2] == "raylet stopped":
    raylet.send_signal(signal.SIGSTOP)
    time.sleep(0.1)
    reaper.kill_stopped_head(50)
    assert reaper.dead_process() is None
    reaper.kill_stopped_head(50)
    assert raylet.wait() == -signal.SIGKILL
    assert reaper.dead_process() == f"raylet (process {raylet.pid})"
else:
    assert reaper.dead_process() is None
os.kill(os.getpid(), signal.SIGKILL)
"""


pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")


OUTCOMES = {
    "raylet first": (-signal.SIGKILL, "Ray's raylet died"),
    "together": (-signal.SIGKILL, "The run and Ray's raylet ended at the same time"),
    "raylet stopped": (-signal.SIGKILL, ": stopped for 60 s."),
    "driver first": (-signal.SIGKILL, ""),
    "during start": (1, "ended while Ray was starting"),
    "asked during start": (143, ""),
    "asked": (143, ""),
}
"""Exit status of the driver, and text that its reaper prints."""


@pytest.mark.parametrize("order", OUTCOMES)
def test_reaper_kills_processes_and_names_cause(tmp_path: Path, order: str):
    check_all_end(tmp_path, order, tmp_path / "stderr.txt")
    output = (tmp_path / "stderr.txt").read_text()
    assert OUTCOMES[order][1] in output
    assert bool(output) == bool(OUTCOMES[order][1])


@pytest.mark.defect("signal-during-startup-hangs")
@pytest.mark.parametrize("order", ["asked", "asked during start", "driver first"])
def test_ray_folder_is_removed_after_requested_exit(tmp_path: Path, order: str, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "ray"
    folder.mkdir()
    monkeypatch.setenv("FOLDER", str(folder))
    check_all_end(tmp_path, order, tmp_path / "stderr.txt")
    deadline = time.monotonic() + (1 if order == "driver first" else 30)
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert folder.exists() == (order == "driver first"), "the logs of a killed run may explain the failure"


@pytest.mark.defect("stopped-raylet-blocks-shutdown")
def test_hanging_start_is_killed():
    """The driver waits as in Ray's code, so that nothing else can run in it."""
    program = """
import subprocess
from skyrl_train.cluster.ray_reaper import RayReaper
import time
reaper = RayReaper(start_s=2)
with reaper.tag_children():
    first = subprocess.Popen(["sleep", "4"])
    time.sleep(3)  # another run holds the lock
    reaper.start_attempt()
    assert first.wait() == 0, first.returncode
    print(subprocess.Popen(["sleep", "60"]).wait())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, f"{-signal.SIGKILL}\n")
    assert "Ray did not start within 2 s" in done.stderr


@pytest.mark.defect("full-disk-note-ends-startup")
def test_reaper_kills_processes_without_working_stderr(tmp_path: Path):
    check_all_end(tmp_path, "raylet first", Path("/dev/full"))


def check_all_end(folder: Path, order: str, stderr: Path) -> None:
    raylet = shutil.copy(str(shutil.which("sleep")), folder / "raylet")
    with stderr.open("w") as output:
        command = [sys.executable, "-c", DRIVER, str(raylet), order]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output, text=True) as driver:
            assert driver.stdout is not None
            pids = [int(pid) for pid in driver.stdout.readline().split()]
            assert driver.wait(60) == OUTCOMES[order][0]
    deadline = time.monotonic() + 30
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(psutil.pid_exists, pids))


KEEP_SEMAPHORE = """
import multiprocessing, time
lock = multiprocessing.get_context("spawn").Lock()
print(lock._semlock.name, flush=True)
time.sleep(600)
"""


def test_semaphores_of_killed_processes_are_freed():
    tag = f"semaphore-{os.getpid()}"
    with subprocess.Popen(
        [sys.executable, "-c", KEEP_SEMAPHORE],
        env={**os.environ, ray_reaper._TAG_VARIABLE: tag},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        semaphore = Path("/dev/shm") / f"sem.{process.stdout.readline().strip().removeprefix('/')}"
        assert semaphore.exists()
        ray_reaper._TaggedProcesses(tag).kill()
        process.wait(10)
    assert not semaphore.exists()
