"""The viewer page is built from viewer/; if that fails, the last built page is used."""

from __future__ import annotations

import logging
import os
import re
import time
from pathlib import Path

import psutil
import pytest

from skyrl_train.errors import ConfigError
from skyrl_train.report import viewer_page
from skyrl_train.report.viewer_page import render_page


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with npm and a source file that is newer than any page."""
    folder = tmp_path / "page"
    for name, value in {
        "CHECKOUT": tmp_path,
        "FOLDER": folder,
        "SCRIPT": folder / "page.js",
        "STYLE": folder / "page.css",
    }.items():
        monkeypatch.setattr(viewer_page, name, value)
    newer = tmp_path / "viewer" / "src" / "main.tsx"
    newer.parent.mkdir(parents=True)
    newer.write_text("")
    os.utime(newer, (2e9, 2e9))
    for path in ("scripts/viewer", "bin/npm"):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text('#!/bin/sh\necho ran >> "$0.ran"\necho no network\nexit 1\n')
        (tmp_path / path).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    return tmp_path


def older_page() -> None:
    viewer_page.FOLDER.mkdir(exist_ok=True)
    viewer_page.SCRIPT.write_text("an_older_one()")
    viewer_page.STYLE.write_text("")


@pytest.mark.parametrize(
    ("cause", "message"),
    [
        ("it fails", "scripts/viewer failed: no network"),
        ("it does not begin", "scripts/viewer failed: .*No such file"),
        ("it cannot be locked", r"scripts/viewer failed: .*\.lock"),
        ("no npm", "building it needs npm, which is not on PATH"),
    ],
)
def test_failed_build_falls_back_to_existing_page(
    cause: str, message: str, checkout: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    build = checkout / "scripts" / "viewer"
    if cause == "it does not begin":
        build.write_text("#!/nowhere/sh\n")
    elif cause == "it cannot be locked":
        (viewer_page.FOLDER / ".lock").mkdir(parents=True)  # not writable even for root
    elif cause == "no npm":
        monkeypatch.setenv("PATH", str(checkout))
    with pytest.raises(ConfigError, match=f"is not built: .*{message}"):
        render_page()
    older_page()
    monkeypatch.setattr(viewer_page, "_failed", {})  # simulates another process
    with caplog.at_level(logging.WARNING):
        assert "an_older_one()" in render_page() and "an_older_one()" in render_page()
    (warning,) = [record.getMessage() for record in caplog.records]
    assert re.match(f"The report viewer's page is older than its sources .* could not be rebuilt: .*{message}", warning)
    assert cause != "it fails" or Path(f"{build}.ran").read_text() == "ran\n" * 2, "one build per process"


def test_build_timeout_kills_all_processes(checkout: Path, monkeypatch: pytest.MonkeyPatch):
    (checkout / "scripts" / "viewer").write_text('#!/bin/sh\nsleep 60 &\necho $! > "$0.child"\nwait\n')
    monkeypatch.setattr(viewer_page, "BUILD_TIMEOUT_S", 0.5)
    with pytest.raises(ConfigError, match=r"scripts/viewer failed: it took more than 0\.5 s"):
        render_page()
    child = int((checkout / "scripts" / "viewer.child").read_text())
    until = time.monotonic() + 10
    while _lives(child):
        assert time.monotonic() < until
        time.sleep(0.01)


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
