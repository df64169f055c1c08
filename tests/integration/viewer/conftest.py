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
ANSWER_MS = 10_000


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(requires_viewer)
            item.add_marker(pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: run scripts/browser_tools"))


@dataclass
class Shown:
    """A page in the browser, and what it did that it must not."""

    page: Any
    address: str
    bad: list[str] = field(default_factory=list)
    """Dialogs, windows, errors of its script, and requests to anybody but its own server."""

    def open(self, view: str = "") -> Any:
        """Go to the view behind #, as a link does; returns Playwright's page."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.address}#{view}")
        return self.page


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Of a module: while it is there this thread has an event loop, so that no other test could begin one."""
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(
            executable_path=CHROMIUM,
            chromium_sandbox=os.geteuid() != 0,  # it does not start as root
            args=["--disable-gpu", "--disable-dev-shm-usage"],
        )
        yield running
        running.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs, of which the first kept rollouts of three steps."""
    folder = tmp_path_factory.mktemp("runs")
    first = write_run(folder / "first", "first", steps=40, kept=(1, 2, 3))
    return [first, write_run(folder / "second", "second", steps=30, lr=3e-6, seed=1)]


@pytest.fixture(scope="module")
def report_address(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of both runs, in a file."""
    return reported(runs, tmp_path_factory.mktemp("report"))


def reported(runs: list[Path], folder: Path) -> str:
    """The address of the file that `skyrl-train report` writes."""
    report_command.main([*map(str, runs), "--out", str(folder / "report.html")])
    return (folder / "report.html").as_uri()


@pytest.fixture(scope="module")
def watch_address(runs: list[Path]) -> Iterator[str]:
    with watching(runs) as address:
        yield address


@contextmanager
def watching(runs: list[Path]) -> Iterator[str]:
    """The address that `skyrl-train watch` prints."""
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
    """A window at an address; at the end it must have done nothing that it must not."""
    context = browser.new_context(viewport={"width": 1200, "height": 800}, **settings)
    context.set_default_timeout(ANSWER_MS)
    found = Shown(context.new_page(), address)
    own = "file:" if address.startswith("file:") else address.partition("#")[0]

    def dialog(opened: Any) -> None:
        found.bad.append(f"dialog {opened.message}")
        opened.dismiss()

    context.on("request", lambda asked: None if asked.url.startswith((own, "data:,")) else found.bad.append(asked.url))
    context.on("page", lambda other: found.bad.append(f"window {other.url}"))
    found.page.on("dialog", dialog)
    found.page.on("pageerror", lambda error: found.bad.append(f"error {error}"))
    found.page.on("console", lambda said: found.bad.append(said.text) if said.type == "error" else None)
    found.page.goto(address)
    found.address = found.page.url.partition("#")[0]  # without the token
    yield found
    context.close()
    assert found.bad == []


@pytest.fixture(scope="module")
def report_window(browser: Any, report_address: str) -> Iterator[Shown]:
    with shown(browser, report_address) as found:
        yield found


@pytest.fixture(scope="module")
def watch_window(browser: Any, watch_address: str) -> Iterator[Shown]:
    with shown(browser, watch_address) as found:
        yield found


@pytest.fixture(scope="module", autouse=True)
def opened_before_any_test(report_window: Shown, watch_window: Shown) -> None:
    """What a test opens must be closed at its end."""


@pytest.fixture(params=["report", "watch"])
def window(request: pytest.FixtureRequest) -> Iterator[Shown]:
    """The page, with its data from a file and from a server."""
    found: Shown = request.getfixturevalue(f"{request.param}_window")
    found.bad.clear()
    yield found
    assert found.bad == []
