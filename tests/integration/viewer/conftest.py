from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.entrypoints import report as report_command
from skyrl_train.environments.tools.browser import PROGRAMS
from tests.support.viewer_page import requires_viewer
from tests.support.viewer_runs import write_run

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, PROGRAMS)), None)
TIMEOUT_MS = 10_000


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(requires_viewer)
            item.add_marker(pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: run scripts/browser_tools"))


@dataclass
class Shown:
    """A page in the browser, with a record of forbidden actions."""

    page: Any
    address: str
    bad: list[str] = field(default_factory=list)
    """Dialogs, windows, script errors, and requests to other servers than the page's own."""

    def open(self, view: str = "") -> Any:
        """Open a view, as a link with this fragment would, and return Playwright's page."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.address}#{view}")
        return self.page


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A Chromium browser. It lives for one module, because other tests cannot start an event loop meanwhile."""
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(
            executable_path=CHROMIUM,
            chromium_sandbox=os.geteuid() != 0,  # the sandbox does not start as root
            args=["--disable-gpu", "--disable-dev-shm-usage"],
        )
        yield running
        running.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs. The first has rollouts of three steps."""
    folder = tmp_path_factory.mktemp("runs")
    first = write_run(folder / "first", "first", steps=40, kept=(1, 2, 3))
    return [first, write_run(folder / "second", "second", steps=30, lr=3e-6, seed=1)]


@pytest.fixture(scope="module")
def report_address(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """URL of a report file of both runs."""
    return reported(runs, tmp_path_factory.mktemp("report"))


def reported(runs: list[Path], folder: Path) -> str:
    """Return the URL of the file that `skyrl-train report` writes."""
    report_command.main([*map(str, runs), "--out", str(folder / "report.html")])
    return (folder / "report.html").as_uri()


@pytest.fixture(scope="module")
def watch_address(runs: list[Path]) -> Iterator[str]:
    with watching(runs) as address:
        yield address


@contextmanager
def watching(runs: list[Path]) -> Iterator[str]:
    """Run `skyrl-train watch` and yield the URL that it prints."""
    command = [sys.executable, "-m", "skyrl_train.entrypoints.watch", *map(str, runs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield next(line.strip() for line in process.stdout if re.match(r"http://\S+token=", line))
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0


@contextmanager
def shown(browser: Any, address: str, **settings: Any) -> Iterator[Shown]:
    """Open a window at an address. Assert at the end that the page did nothing forbidden."""
    context = browser.new_context(viewport={"width": 1200, "height": 800}, **settings)
    context.set_default_timeout(TIMEOUT_MS)
    window = Shown(context.new_page(), address)
    own = "file:" if address.startswith("file:") else address.partition("#")[0]

    def on_dialog(dialog: Any) -> None:
        window.bad.append(f"dialog {dialog.message}")
        dialog.dismiss()

    def on_request(request: Any) -> None:
        if not request.url.startswith((own, "data:,")):
            window.bad.append(request.url)

    context.on("request", on_request)
    context.on("page", lambda other: window.bad.append(f"window {other.url}"))
    window.page.on("dialog", on_dialog)
    window.page.on("pageerror", lambda error: window.bad.append(f"error {error}"))
    window.page.on("console", lambda message: window.bad.append(message.text) if message.type == "error" else None)
    window.page.goto(address)
    window.address = window.page.url.partition("#")[0]  # without the token
    yield window
    context.close()
    assert window.bad == []


@pytest.fixture(scope="module")
def report_window(browser: Any, report_address: str) -> Iterator[Shown]:
    with shown(browser, report_address) as window:
        yield window


@pytest.fixture(scope="module")
def watch_window(browser: Any, watch_address: str) -> Iterator[Shown]:
    with shown(browser, watch_address) as window:
        yield window


@pytest.fixture(scope="module", autouse=True)
def open_shared_windows_first(report_window: Shown, watch_window: Shown) -> None:
    """Open the shared windows before any test, so that they do not count as windows of a test."""


@pytest.fixture(params=["report", "watch"])
def window(request: pytest.FixtureRequest) -> Iterator[Shown]:
    """The page with its data from a report file, and with its data from a server."""
    window: Shown = request.getfixturevalue(f"{request.param}_window")
    window.bad.clear()
    yield window
    assert window.bad == []
