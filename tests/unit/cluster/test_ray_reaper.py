"""The guard of a driver's Ray, with stand-ins for Ray's processes: copies of `sleep` under their names."""

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

DRIVER = """
import os, signal, subprocess, sys, time
from skyrl_train.cluster.ray_reaper import RayReaper, exit_now
guard = RayReaper(os.environ.get("FOLDER"))
with guard.tag_children():
    raylet = subprocess.Popen([sys.argv[1], "60"])
    other = subprocess.Popen(["sleep", "60"])
    print(raylet.pid, other.pid, flush=True)
    if sys.argv[2] == "in the start":
        time.sleep(0.5)
        os._exit(1)
    if sys.argv[2] == "told in the start":
        exit_now(143)
if sys.argv[2] == "told":
    exit_now(143)
if sys.argv[2] == "raylet first":
    raylet.kill()
    while guard.dead_process() is None:
        time.sleep(0.01)
    assert guard.dead_process() == f"raylet (process {raylet.pid})"
    time.sleep(0.5)
elif sys.argv[2] == "raylet stopped":
    raylet.send_signal(signal.SIGSTOP)
    time.sleep(0.1)
    guard.kill_stopped_head(50)
    assert guard.dead_process() is None
    guard.kill_stopped_head(50)
    assert raylet.wait() == -signal.SIGKILL
    assert guard.dead_process() == f"raylet (process {raylet.pid})"
else:
    assert guard.dead_process() is None
os.kill(os.getpid(), signal.SIGKILL)
"""


pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")


SAYS = {
    "raylet first": (-signal.SIGKILL, "Ray's raylet died"),
    "raylet stopped": (-signal.SIGKILL, ": stopped for 60 s."),
    "driver first": (-signal.SIGKILL, ""),
    "in the start": (1, "ended while Ray was starting"),
    "told in the start": (143, ""),
    "told": (143, ""),
}
"""Exit status of the driver, and what its guard says."""


@pytest.mark.parametrize("order", SAYS)
def test_what_a_driver_started_ends_with_it_and_what_of_ray_s_ended_it_is_named(tmp_path: Path, order: str):
    check_that_all_end(tmp_path, order, tmp_path / "said")
    last_words = (tmp_path / "said").read_text()
    assert SAYS[order][1] in last_words
    assert bool(last_words) == bool(SAYS[order][1])


@pytest.mark.defect("signals-in-a-library")
@pytest.mark.parametrize("order", ["told", "told in the start", "driver first"])
def test_ray_s_folder_goes_with_a_driver_that_was_told_to_end(
    tmp_path: Path, order: str, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "ray"
    folder.mkdir()
    monkeypatch.setenv("FOLDER", str(folder))
    check_that_all_end(tmp_path, order, tmp_path / "said")
    until = time.monotonic() + (1 if order == "driver first" else 30)
    while folder.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert folder.exists() == (order == "driver first"), "logs of one that was killed may say what failed"


@pytest.mark.defect("a-stopped-raylet-holds-up-the-end")
def test_a_start_that_waits_for_its_processes_without_end_has_one():
    """The driver waits as Ray's code does: nothing in it gets to run meanwhile."""
    program = """
import subprocess
from skyrl_train.cluster.ray_reaper import RayReaper
import time
guard = RayReaper(start_s=2)
with guard.tag_children():
    first = subprocess.Popen(["sleep", "4"])
    time.sleep(3)  # another run holds the lock
    guard.begin()
    assert first.wait() == 0, first.returncode
    print(subprocess.Popen(["sleep", "60"]).wait())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, f"{-signal.SIGKILL}\n")
    assert "Ray did not start within 2 s" in done.stderr


@pytest.mark.defect("lines-on-a-full-disk")
def test_what_a_driver_started_ends_with_it_even_if_nothing_can_be_said(tmp_path: Path):
    check_that_all_end(tmp_path, "raylet first", Path("/dev/full"))


def check_that_all_end(folder: Path, order: str, stderr: Path) -> None:
    raylet = shutil.copy(str(shutil.which("sleep")), folder / "raylet")
    with stderr.open("w") as said:
        command = [sys.executable, "-c", DRIVER, str(raylet), order]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True) as driver:
            assert driver.stdout is not None
            wards = [int(pid) for pid in driver.stdout.readline().split()]
            assert driver.wait(60) == SAYS[order][0]
    deadline = time.monotonic() + 30
    while any(map(psutil.pid_exists, wards)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(psutil.pid_exists, wards))
