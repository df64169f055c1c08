"""The watch server answers only requests with its token, with the contents of the files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from skyrl_train import http_server
from skyrl_train.errors import ConfigError
from skyrl_train.http_server import ConnectionLimits
from skyrl_train.report.rollout_files import write_rollouts
from skyrl_train.report.rollout_views import Query, RolloutViews
from skyrl_train.report.run_reader import RunReader, open_runs, overview
from skyrl_train.report.viewer_page import render_page
from skyrl_train.report.watch_server import MAX_POINTS, WatchServer
from skyrl_train.testing.synthetic_rollouts import synthetic_rollouts
from tests.support.slow_clients import open_connection, read_until_closed
from tests.support.synthetic_run_folders import synthetic_metrics, write_metrics, write_synthetic_run
from tests.support.viewer_page import requires_viewer

pytestmark = requires_viewer


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("runs")
    return [
        write_synthetic_run(root / "a", 3, total=9, name="a", config={"x": 1}),
        write_synthetic_run(root / "b", 5, rollouts=0),
    ]


def watch(
    folders: list[Path], test: Callable[[WatchServer, aiohttp.ClientSession], Awaitable[Any]], suffix: str = ""
) -> Any:
    """Run `test(server, session)`. The session has no token. `suffix` is appended to the page."""

    async def run() -> Any:
        async with WatchServer(folders, render_page() + suffix) as server:
            async with aiohttp.ClientSession(server.url) as session:
                return await asyncio.wait_for(test(server, session), 60)

    return asyncio.run(run())


def answers(folders: list[Path], *paths: str) -> list[Any]:
    """Return the JSON at paths below /api/ for requests with the token."""

    async def ask(server: WatchServer, session: aiohttp.ClientSession) -> list[Any]:
        found = []
        for path in paths:
            async with session.get(f"/api/{path}", headers=bearer(server.token)) as answer:
                assert answer.status == 200, await answer.text()
                assert answer.content_type == "application/json"
                found.append(json.loads(await answer.text()))
        return found

    found: list[Any] = watch(folders, ask)
    return found


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_every_endpoint_returns_file_contents(folders: list[Path]):
    views = RolloutViews(folders[0])
    row = views.rollouts(Query(step=2))["rows"][9]
    params = f"step=2&uid={row['uid']}&sample={row['sample']}"
    runs, metrics, short, diagnosis, rollouts, none, rollout, group = answers(
        folders,
        "runs",
        "metrics?run=0",
        "metrics?run=1",
        "diagnosis?run=1",
        "rollouts?run=0&step_from=2&source=math&order=-tokens&limit=5&text=",
        "rollouts?run=1",
        f"rollout?run=0&{params}",
        f"group?run=0&step=2&uid={row['uid']}",
    )
    assert runs == overview(open_runs(folders)) and len(runs["runs"]) == 2
    assert runs["differing"] == [{"key": "x", "values": ["1", ""]}]
    assert metrics == RunReader(folders[0]).metrics(MAX_POINTS, extra_columns=views.index.quantiles)
    assert short == RunReader(folders[1]).metrics(MAX_POINTS) and "reward/p10" in metrics["columns"]
    assert diagnosis == RunReader(folders[1]).diagnosis()
    assert rollouts == views.rollouts(Query(step_from=2, source="math", order="-tokens", limit=5))
    assert len(rollouts["rows"]) == 5 < rollouts["total"]
    assert none == {"total": 0, "rows": [], "facets": {"steps": [], "sources": [], "statuses": [], "stop_reasons": []}}
    assert rollout == views.rollout(2, row["uid"], row["sample"])
    assert group == views.group(2, row["uid"]) and row in group["rows"]


async def status(session: aiohttp.ClientSession, path: str, headers: Mapping[str, str] | None = None) -> int:
    async with session.get(URL(path, encoded=True), headers=headers, allow_redirects=False) as answer:
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
        return answer.status


def test_requests_without_token_are_refused(folders: list[Path]):
    async def ask(server: WatchServer, session: aiohttp.ClientSession) -> None:
        for path in ("/api/runs", "/api/metrics?run=0", "/nowhere", f"/api/runs?access_token={server.token}"):
            assert await status(session, path) == 401
        for wrong in ("", "x", server.token[:-1], f"{server.token}x", "\u00e9"):
            assert await status(session, "/api/runs", bearer(wrong)) == 401
        assert await status(session, "/api/runs", {"Authorization": f"Basic {server.token}"}) == 401
        assert await status(session, "/api/runs", bearer(server.token)) == 200

    watch(folders, ask)


def test_page_has_no_run_data_and_no_cookie(folders: list[Path]):
    async def ask(server: WatchServer, session: aiohttp.ClientSession) -> None:
        assert server.address == f"{server.url}/#access_token={server.token}"  # browsers do not send the fragment
        async with session.get(server.address) as answer:
            assert answer.status == 200 and answer.content_type == "text/html"
            assert "Set-Cookie" not in answer.headers
            html = await answer.text()
            policy = answer.headers["Content-Security-Policy"]
        assert html == render_page() and server.token not in html
        assert "script-src 'sha256-" in policy and "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy and "*" not in policy
        assert await status(session, "/api/runs") == 401

    watch(folders, ask)


def test_requests_from_other_sites_are_refused(folders: list[Path]):
    async def ask(server: WatchServer, session: aiohttp.ClientSession) -> None:
        known = bearer(server.token)
        for host in (
            "evil.example",
            "127.0.0.1.evil.example",
            "localhost.evil.example:80",
            "10.0.0.1",
            "[::2]",
            "[",
            "@",
        ):
            assert await status(session, "/api/runs", known | {"Host": host}) == 403, host
        for host in ("localhost", "localhost:9000", "127.0.0.1", "[::1]:9000"):  # a tunnel may use another port
            assert await status(session, "/api/runs", known | {"Host": host}) == 200, host
        for site in ("cross-site", "same-site"):
            assert await status(session, "/api/runs", known | {"Sec-Fetch-Site": site}) == 403
        assert await status(session, "/api/runs", known | {"Sec-Fetch-Site": "same-origin"}) == 200
        followed = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}  # the user follows a link
        assert await status(session, "/", followed) == 200
        assert await status(session, "/api/runs", known | followed) == 403
        assert await status(session, "/", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}) == 403

    watch(folders, ask)


@pytest.mark.parametrize(
    "path",
    [
        "/../config.yaml",
        "/api/../../config.yaml",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/api/%2e%2e%2fconfig.yaml",
        "/api/rollouts/../../run.json",
        "/api",
        "/api/",
        "/api/runs/",
        "/page.js",
    ],
)
def test_server_serves_no_other_files(folders: list[Path], path: str):
    async def ask(server: WatchServer, session: aiohttp.ClientSession) -> None:
        assert await status(session, path, bearer(server.token)) == 404

    watch(folders, ask)


def test_server_is_read_only(folders: list[Path]):
    async def ask(server: WatchServer, session: aiohttp.ClientSession) -> None:
        for verb in ("POST", "PUT", "DELETE", "PATCH"):
            async with session.request(verb, "/api/runs", headers=bearer(server.token)) as answer:
                assert answer.status == 405

    watch(folders, ask)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("metrics?run=2", "run='2' is not the id of a run. Choose from 0, 1"),
        ("metrics?run=../b", "run='../b' is not the id of a run"),
        ("rollouts?run=0&step=x", "step='x' is not an integer"),
        ("rollouts?run=0&folder=/etc", "'folder' is not a parameter of rollouts"),
        ("rollout?run=0&uid=1", "step='' is not an integer"),
        ("rollout?run=0&step=1&uid=../../etc&sample=0", "step 1 has no sample 0 of the prompt '../../etc'"),
        ("group?run=1&step=1&uid=1", "step 1 has no rollouts of the prompt '1'"),
    ],
)
def test_invalid_request_is_refused_by_name(folders: list[Path], path: str, message: str):
    async def ask(server: WatchServer, session: aiohttp.ClientSession) -> None:
        async with session.get(f"/api/{path}", headers=bearer(server.token)) as answer:
            assert answer.status == 400 and message in await answer.text()
            assert answer.content_type == "text/plain"

    watch(folders, ask)


def test_unchanged_data_is_not_sent_again(tmp_path: Path):
    folder = write_synthetic_run(tmp_path, 2, total=5)

    async def ask(server: WatchServer, session: aiohttp.ClientSession) -> None:
        async with session.get("/api/metrics?run=0", headers=bearer(server.token)) as answer:
            tag = answer.headers["ETag"]
        known = bearer(server.token) | {"If-None-Match": tag}
        assert await status(session, "/api/metrics?run=0", known) == 304
        write_metrics(folder, [synthetic_metrics(3)], 5, after=2)
        write_rollouts(folder, 3, synthetic_rollouts(8, 3))
        async with session.get("/api/metrics?run=0", headers=known) as answer:
            assert answer.status == 200 and (await answer.json())["steps"] == [1, 2, 3]
        async with session.get("/api/rollouts?run=0&step=3", headers=bearer(server.token)) as answer:
            assert (await answer.json())["total"] == 8
        async with session.get("/api/runs", headers=bearer(server.token)) as answer:
            assert (await answer.json())["runs"][0]["step"] == 3

    watch([folder], ask)


@pytest.mark.fault("F28")
@pytest.mark.defect("watch-exhausts-connections")
def test_half_open_connections_are_closed(folders: list[Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_server, "HEADER_TIMEOUT_S", 0.5)
    monkeypatch.setattr(http_server, "connection_limits", lambda most: ConnectionLimits(connections=8, backlog=8))

    async def ask(server: WatchServer, session: aiohttp.ClientSession) -> None:
        with ExitStack() as clients:
            held = []
            for index in range(20):
                half = b"GET / HTTP/1.1\r\nX: " if index % 2 else b""
                held.append(clients.enter_context(closing(open_connection(server.url, half))))
                await asyncio.sleep(0)
            answered = await asyncio.wait_for(asyncio.gather(*map(read_until_closed, held)), 20)
        assert sum(b" 503 " in answer and b"Retry-After" in answer for answer in answered) == 12
        assert answered.count(b"") == 8
        assert await status(session, "/api/runs", bearer(server.token)) == 200

    watch(folders, ask)


@pytest.mark.defect("watch-exhausts-connections")
def test_unread_response_closes_its_connection(folders: list[Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_server, "TRANSFER_TIMEOUT_S_PER_MIB", 0.05)
    monkeypatch.setattr(http_server, "connection_limits", lambda most: ConnectionLimits(connections=1, backlog=8))

    async def ask(server: WatchServer, session: aiohttp.ClientSession) -> None:
        request = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with closing(open_connection(server.url, request, receive_bytes=1 << 12)):
            for _ in range(100):  # the only allowed connection becomes free while the client keeps it open
                await asyncio.sleep(0.1)
                async with session.get("/api/runs", headers=bearer(server.token)) as answer:
                    if answer.status == 200:
                        return
        raise AssertionError("the connection was not closed")

    watch(folders, ask, suffix="x" * (32 << 20))  # more than the kernel buffers


def test_port_in_use_is_reported(folders: list[Path]):
    async def ask(server: WatchServer, session: aiohttp.ClientSession) -> None:
        port = URL(server.url).port
        assert port is not None
        with pytest.raises(ConfigError, match=rf"--port {port}: cannot listen at 127\.0\.0\.1:{port}: Address already"):
            async with WatchServer(folders, render_page(), port):
                pass
        with pytest.raises(ConfigError, match="--port 70000"):
            async with WatchServer(folders, render_page(), 70000):
                pass

    watch(folders, ask)
