from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from skyrl_train.environments.tools.base import ToolBox, ToolResult
from skyrl_train.environments.tools.browser import PROGRAMS, SETTLE_MS, BrowserTool
from skyrl_train.environments.tools.proxy import FilteringProxy
from skyrl_train.environments.tools.url_policy import UrlPolicy
from skyrl_train.errors import ConfigError
from tests.support.web_server import Request, Response, WebServer, web_server

pytest.importorskip("playwright")
needs_chromium = pytest.mark.skipif(
    not any(map(shutil.which, PROGRAMS)), reason="needs Chromium: run scripts/browser_tools"
)
SCRIPTS = Path(__file__).parents[4] / "scripts"


async def send_request(proxy: FilteringProxy, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(request)
    try:
        return await asyncio.wait_for(reader.read(), 30)
    finally:
        writer.close()


def ask_proxy(policy: UrlPolicy, *requests: bytes, max_bytes: int = 2**20) -> list[bytes]:
    async def run() -> list[bytes]:
        async with FilteringProxy(policy, max_bytes) as proxy:
            return [await send_request(proxy, request) for request in requests]

    return asyncio.run(run())


@pytest.mark.fault("F26")
def test_proxy_checks_every_connection():
    async def private(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    with web_server(lambda request: Response(b"inside")) as inside:
        policy = UrlPolicy(["wiki.test"], lookup=private)
        answers = ask_proxy(
            policy,
            f"GET http://{inside.at}/ HTTP/1.1\r\nHost: wiki.test\r\n\r\n".encode(),
            f"CONNECT {inside.at} HTTP/1.1\r\n\r\n".encode(),
            b"GET http://wiki.test/ HTTP/1.1\r\n\r\n",
            b"CONNECT wiki.test:443 HTTP/1.1\r\n\r\n",
            f"GET http://wiki.test@{inside.at}/ HTTP/1.1\r\n\r\n".encode(),
            b"GET / HTTP/1.1\r\nHost: wiki.test\r\n\r\n",
            b"GET file:///etc/passwd HTTP/1.1\r\n\r\n",
            b"CONNECT [::1]:80 HTTP/1.1\r\n\r\n",
            b"nonsense\r\n\r\n",
        )
        assert [answer.split(b"\r\n")[0] for answer in answers] == [b"HTTP/1.1 403 Refused"] * 9
        assert inside.requests == []


def test_proxy_forwards_one_request_per_connection():
    with web_server(lambda request: Response(request.path.encode())) as server:

        async def here(host: str, port: int) -> list[str]:
            return ["127.0.0.1"]

        name = f"own.test:{server.port}"
        second = f"GET http://{name}/second HTTP/1.1\r\n\r\n"
        plain, tunnel = ask_proxy(
            UrlPolicy([], [name], lookup=here),
            f"GET http://{name}/a?b HTTP/1.1\r\nHost: other\r\nProxy-X: 1\r\nX-Own: 2\r\n\r\n{second}".encode(),
            f"CONNECT {name} HTTP/1.1\r\n\r\nGET /t HTTP/1.0\r\n\r\n".encode(),
        )
        assert plain.endswith(b"\r\n\r\n/a?b") and b"Connection: close" in plain
        assert tunnel.startswith(b"HTTP/1.1 200 OK\r\n\r\nHTTP/1.0 200") and tunnel.endswith(b"\r\n\r\n/t")
        first = server.requests[0]
        assert (first.headers["Host"], first.headers["X-Own"]) == (name, "2")
        assert "Proxy-X" not in first.headers
        assert [request.path for request in server.requests] == ["/a?b", "/t"]


def test_proxy_limits_transferred_bytes():
    with web_server(lambda request: Response(bytes(2**22))) as server:
        (answer,) = ask_proxy(
            UrlPolicy([], [server.at]), f"GET {server.url}/ HTTP/1.1\r\n\r\n".encode(), max_bytes=2**20
        )
    assert len(answer) < 2**21


PAGES = {
    "/": "<title>Start</title><h1>Welcome</h1><a href='/two'>Two</a><a href='/new' target='_blank'>New</a>"
    "<form action='/found'><input name='q' placeholder='your name'><button>Go</button></form>",
    "/two": "<title>Two</title>second page",
    "/new": "<title>New</title>in a tab of its own",
    "/loop": "<title>Loop</title><button onclick='for (;;) {}'>Go</button>",
    "/spin": "<title>Spin</title><script>for (;;) {}</script>",
    "/spin-later": "<title>Spin later</title><script>setTimeout(() => { for (;;) {} }, 2000)</script>",
    "/slow": "<title>Slow</title><a href='/late'>Here</a><a href='/late' target='_blank'>New</a>"
    "<a href='/via' target='_blank'>Via</a>"
    "<button onclick='setTimeout(() => { location = \"/late\" }, 20)'>Later</button>",
    "/late": "<title>Late</title>took its time",
    "/trickle": "<title>Trickle</title><a href='/endless'>Here</a><a href='/endless' target='inside'>Inside</a>"
    "<a href='/two' target='_blank' onclick='event.preventDefault()'>Nothing</a><iframe name='inside'></iframe>",
    "/endless": "<title>Endless</title>begun<img src='/never'>",
    "/long": "<p>" + "word " * 100_000,
}


def pages(inside: WebServer | None = None) -> Any:
    def answer(request: Request) -> Response:
        path = request.path
        if path == "/away" and inside:
            return Response(status=302, headers={"Location": f"{inside.url}/"})
        if path == "/spy" and inside:
            script = f"fetch('{inside.url}/x').catch(() => 0).finally(() => document.title = 'tried')"
            page = f"<title>Spy</title><img src='{inside.url}/img'><iframe src='{inside.url}/frame'></iframe>"
            return Response(f"{page}<script>{script}; new WebSocket('ws://{inside.at}/ws')</script>".encode())
        if path == "/via":
            return Response(status=302, headers={"Location": "/late"})
        if path == "/late":
            time.sleep(10 * SETTLE_MS / 1000)
        if path == "/never":
            time.sleep(9)
        if path == "/file":
            return Response(status=302, headers={"Location": "file:///etc/passwd"})
        if path == "/download":
            return Response(b"x", headers={"Content-Disposition": "attachment; filename=x.bin"})
        if path.startswith("/found"):
            return Response(f"<title>Found</title>you asked {path}".encode())
        return Response(PAGES.get(path, "<title>None</title>").encode())

    return answer


@contextmanager
def browser(server: WebServer) -> Iterator[tuple[ToolBox, BrowserTool]]:
    tool = BrowserTool(domains=["wiki.test"], allow_private=[server.at], timeout=120.0)
    box = ToolBox([tool])
    try:
        yield box, tool
    finally:
        box.close()


def browse(box: ToolBox, action: str, **arguments: Any) -> ToolResult:
    return box.call("browser", {"action": action, **arguments})


@needs_chromium
@pytest.mark.parametrize("element", [1, 2, 3, 4], ids=["same tab", "new tab", "redirected new tab", "script"])
def test_click_waits_for_late_document(element: int):
    with web_server(pages()) as server, browser(server) as (box, _):
        browse(box, "goto", url=f"{server.url}/slow")
        assert browse(box, "click", element=element).text.startswith("Late\n")


@needs_chromium
@pytest.mark.parametrize("element", [1, 2, 3], ids=["a document that never ends", "in a frame", "nothing"])
def test_click_on_endless_document_keeps_browser(element: int):
    with web_server(pages()) as server, browser(server) as (box, tool):
        browse(box, "goto", url=f"{server.url}/trickle")
        tool.deadline_s = 10.0  # enough for a click; starting the browser took longer
        context = tool._context
        assert browse(box, "click", element=element).error is None
        assert browse(box, "read").error is None and tool._context is context


@needs_chromium
@pytest.mark.fault("F26")
@pytest.mark.defect("D37")
def test_browser_reads_allowed_pages_only():
    with web_server(lambda request: Response(b"secret")) as inside, web_server(pages(inside)) as server:
        with browser(server) as (box, _):
            start = browse(box, "goto", url=server.url).text
            assert start.startswith(f"Start\n{server.url}/\n\nWelcome")
            assert "[1] a Two" in start and "[3] input your name" in start

            assert browse(box, "click", element=1).text.startswith("Two\n")
            assert browse(box, "back").text.startswith("Start\n")
            assert browse(box, "type", element=3, text="x y").error is None
            assert "you asked /found?q=x+y" in browse(box, "click", element=4).text
            browse(box, "back")
            assert browse(box, "click", element=2).text.startswith("New\n")
            assert browse(box, "back").text.startswith("Start\n")

            assert "no element 99" in browse(box, "click", element=99).text
            assert "needs the argument 'url'" in browse(box, "goto").text

            for url in (
                "file:///etc/passwd",
                "chrome://version",
                inside.url,
                "http://169.254.169.254/",
                "view-source:x",
            ):
                assert browse(box, "goto", url=url).error == "tool_error", url
            for path in ("/away", "/file", "/download"):
                assert browse(box, "goto", url=server.url + path).error == "tool_error", path
                assert browse(box, "goto", url=f"{server.url}/two").text.startswith("Two\n"), path
                assert browse(box, "goto", url=server.url + path).error == "tool_error", path
                assert browse(box, "read").error is None, path
            assert "root:" not in browse(box, "read").text

            assert browse(box, "goto", url=f"{server.url}/spy").error is None
            deadline = time.monotonic() + 60
            while not (text := browse(box, "read").text).startswith("tried\n"):
                assert time.monotonic() < deadline, text
            assert "secret" not in text
            assert "left out" in browse(box, "goto", url=f"{server.url}/long").text
        assert inside.requests == []


@needs_chromium
@pytest.mark.defect("D37")
@pytest.mark.defect("processes-outlive-python-call")
def test_endless_script_ends_browser_but_not_episode():
    with web_server(pages()) as server, browser(server) as (box, tool):
        assert browse(box, "goto", url=f"{server.url}/loop").text.startswith("Loop\n")
        tool.deadline_s = 3.0
        assert browse(box, "click", element=1).error == "timeout"
        waited = time.monotonic() + 60
        while browser_processes():
            assert time.monotonic() < waited
            time.sleep(0.05)
        tool.deadline_s = 120.0
        assert browse(box, "goto", url=f"{server.url}/two").text.startswith("Two\n")


@needs_chromium
@pytest.mark.defect("endless-page-blocks-browser")
def test_stuck_or_crashed_page_is_closed():
    with web_server(pages()) as server, browser(server) as (box, tool):
        browse(box, "goto", url=f"{server.url}/two")
        context = tool._context
        tool.deadline_s = 15.0
        context.set_default_timeout(2000)
        spun = browse(box, "goto", url=f"{server.url}/spin")
        assert spun.error == "tool_error" and "did not answer any more, so it was closed" in spun.text
        context.set_default_timeout(60_000)
        before = browser_cpu_seconds()
        time.sleep(0.5)
        assert browser_cpu_seconds() - before < 0.25
        assert browse(box, "goto", url=f"{server.url}/two").text.startswith("Two\n")

        assert browse(box, "goto", url=f"{server.url}/spin-later").text.startswith("Spin later\n")
        time.sleep(2.2)  # the page has been read before its script starts to spin
        assert browse(box, "goto", url=f"{server.url}/two").text.startswith("Two\n")

        for then, error in (("read", "tool_error"), ("goto", None)):
            assert browse(box, "goto", url=f"{server.url}/two").text.startswith("Two\n")
            kill("--type=renderer")  # like the kernel when memory is short
            time.sleep(0.5)
            assert browse(box, then, url=f"{server.url}/two").error == error
        assert tool._context is context

        tool.deadline_s = 120.0
        kill("--proxy-server")
        time.sleep(0.5)
        assert browse(box, "goto", url=f"{server.url}/two").text.startswith("Two\n")


def browser_processes(mark: str = "") -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            command = " ".join(process.cmdline())
            if "chrom" in command and mark in command and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def kill(mark: str) -> None:
    for process in browser_processes(mark):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def browser_cpu_seconds() -> float:
    """Return the processor seconds of the browser's processes."""
    return sum(sum(process.cpu_times()[:2]) for process in browser_processes())


KILLED = """
import sys
from skyrl_train.environments.tools.base import ToolBox
from skyrl_train.environments.tools.browser import BrowserTool
box = ToolBox([BrowserTool(domains=[], allow_private=[sys.argv[1]], timeout=120.0)])
print(box.call("browser", {"action": "goto", "url": f"http://{sys.argv[1]}/two"}).text.split()[0], flush=True)
sys.stdin.read()
"""


@needs_chromium
def test_browser_ends_when_environment_process_is_killed():
    with web_server(pages()) as server:
        with subprocess.Popen(
            [sys.executable, "-c", KILLED, server.at],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "Two\n"
            children = psutil.Process(process.pid).children(recursive=True)
            assert any("--headless" in " ".join(child.cmdline()) for child in children)
            os.killpg(process.pid, signal.SIGKILL)  # like the pool of environment workers
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []


def test_missing_browser_is_a_config_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"executable='no-such-browser'.*scripts/browser_tools"):
        BrowserTool(["wiki.test"], executable="no-such-browser")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"none of chromium.*scripts/browser_tools"):
        BrowserTool(["wiki.test"])


def test_install_script_reports_unsupported_system(tmp_path: Path):
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "id").write_text("#!/bin/sh\necho 1000\n")
    (tools / "id").chmod(0o755)
    bash = shutil.which("bash") or "bash"
    script = [bash, str(SCRIPTS / "browser_tools")]
    process = subprocess.run(script, env={"PATH": str(tools)}, capture_output=True, text=True)
    assert (process.returncode, "install it with your package manager" in process.stderr) == (0, True)
    (tools / "chromium").write_text("#!/bin/sh\n")
    (tools / "chromium").chmod(0o755)
    process = subprocess.run(script, env={"PATH": str(tools)}, capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")
