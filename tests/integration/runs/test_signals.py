"""A run that is told to end while it starts."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.handlers import catches

from .conftest import command

MOMENTS: dict[str, Callable[[psutil.Process], bool]] = {
    "imports": lambda driver: catches(driver.pid, signal.SIGTERM),
    "Ray's start": lambda driver: "gcs_server" in children(driver),
    "actors' start": lambda driver: any(name.startswith("ray::") for name in children(driver)),
}
"""How a driver looks at the moment."""


def children(driver: psutil.Process) -> list[str]:
    """Names of the processes that it has started and that are still there."""
    names = []
    for child in driver.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            names.append(child.name())
    return names


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="signals-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.mark.fault("F39")
@pytest.mark.defect("signals-in-a-library")
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.on_demand), signal.SIGTERM])
def test_a_start_that_is_told_to_end_leaves_at_once_and_leaves_nothing(
    moment: str, number: signal.Signals, small: Callable[[Path], list[str]], temporary: Path
):
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment["TMPDIR"] = str(temporary)
    log = temporary / "log"
    with log.open("w") as said:
        driver = subprocess.Popen(
            command("main_base", small(temporary)), stdout=said, stderr=said, env=environment, start_new_session=True
        )
    process, deadline = psutil.Process(driver.pid), time.monotonic() + 120
    while not MOMENTS[moment](process):
        assert driver.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.01)
    family = process.children(recursive=True)
    driver.send_signal(number)
    sent = time.monotonic()
    assert driver.wait(30) == 128 + number, log.read_text()[-4000:]
    assert time.monotonic() - sent < 5
    assert f"ended by {number.name}" in log.read_text()
    assert "Traceback" not in log.read_text()
    _, left = psutil.wait_procs(family, timeout=30)
    assert not left, f"left {[one.cmdline()[:3] for one in left]}"
    while (folders := list(temporary.glob("ray-*[!k]"))) and time.monotonic() < sent + 30:
        time.sleep(0.05)
    assert not folders, "Ray's folder goes with the run"
