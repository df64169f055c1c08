"""The leak check that runs after every test can fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
LEAKS = """
import os, socket, subprocess
KEPT = []
def test_tidy(): subprocess.run(["true"])
def test_daemon(): subprocess.run(["sh", "-c", "setsid sleep 60 >/dev/null 2>&1 &"])
def test_port():
    KEPT.append(socket.create_server(("127.0.0.1", 0)))
def test_shared_memory():
    open(f"/dev/shm/leak-of-skyrl-{os.getpid()}", "w").close()
def test_tidy_again(): subprocess.run(["true"])
"""


def test_leak_check_reports_each_leak(tmp_path: Path):
    (tmp_path / "test_leaks.py").write_text(LEAKS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, "-c", str(REPOSITORY / "pyproject.toml"), str(tmp_path)],
        cwd=REPOSITORY,
        env=os.environ | {"SKYRL_TEST_PATIENCE_S": "3"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    for file in Path("/dev/shm").glob("leak-of-skyrl-*"):
        file.unlink()
    assert "5 passed, 3 errors" in result.stdout, result.stdout
    assert "ERROR " + "test_tidy" not in result.stdout
    for what in ("sleep 60", "left listening ports", "left files in /dev/shm"):
        assert what in result.stdout
