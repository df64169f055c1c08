"""Tests with a real local server that implements OpenEnv's protocol over HTTP and WebSockets."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

from skyrl_train.data.messages import Prompt
from skyrl_train.environments.pool import WorkerPool
from skyrl_train.errors import ConfigError, EnvironmentFailure

QUESTION = [{"role": "user", "content": "play"}]
TOKEN = "a secret of the tests"
PING_S = 0.5
"""Seconds between the pings of a session. It ends after half as long without a response."""


class Server:
    """A server that counts the received texts and misbehaves on request, with its own event loop and thread."""

    def __init__(self) -> None:
        self.episodes: dict[str, list[str]] = {}
        self.resets: list[dict[str, Any]] = []
        self.redirected_tokens: list[str] = []
        self.loop = asyncio.new_event_loop()
        self.released = asyncio.Event()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self._start(), self.loop).result(60)

    async def _start(self) -> int:
        app = web.Application()
        app.router.add_post("/reset", self.reset)
        app.router.add_post("/step", self.step)
        app.router.add_get("/ws", self.session)
        for method, path, handler in (
            ("POST", "/loose/reset", self.moved),
            ("GET", "/moved", self.moved),
            ("*", "/elsewhere", self.elsewhere),
        ):
            app.router.add_route(method, path, handler)
        self._runner = web.AppRunner(app, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return self._runner.addresses[0][1]

    def close(self) -> None:
        async def end() -> None:
            self.released.set()
            await self._runner.cleanup()

        asyncio.run_coroutine_threadsafe(end(), self.loop).result(60)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(60)
        self.loop.close()

    async def reset(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response({"error": "who are you?"}, status=401)
        body = await request.json()
        self.resets.append(body)
        self.episodes[body["episode_id"]] = []
        return web.json_response({"observation": {"text": "hello"}, "reward": None, "done": False})

    async def step(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        text = body["action"]["message"]
        return await self.misbehave(request, text) or web.json_response(self.answer(body["episode_id"], text))

    def answer(self, episode: str, text: str) -> dict[str, Any]:
        texts = self.episodes[episode]
        texts.append(text)
        done = text == "done"
        observation = {"text": f"heard {len(texts)}"}
        return {
            "observation": observation,
            "reward": 2.5 if done else None,
            "done": done,
            "info": {"heard": len(texts)},
        }

    async def misbehave(self, request: web.Request, text: str) -> web.StreamResponse | None:
        if text == "hang":
            await self.released.wait()
        if text == "trickle":
            response = web.StreamResponse()
            await response.prepare(request)
            while not self.released.is_set():
                await response.write(b" ")
                await asyncio.sleep(0.05)
        invalid_bodies = {"not json": b"<html>", "list": b"[1]", "deep": b"[" * 100_000, "large": b" " * 10_000}
        return (
            web.Response(body=invalid_bodies[text])
            if text in invalid_bodies
            else web.Response(status=500)
            if text == "500"
            else None
        )

    async def moved(self, request: web.Request) -> web.Response:
        return web.Response(status=307, headers={"Location": f"http://127.0.0.1:{self.port}/elsewhere"})

    async def elsewhere(self, request: web.Request) -> web.Response:
        self.redirected_tokens.append(request.headers.get("Authorization", ""))
        return web.Response()

    async def session(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(heartbeat=PING_S)
        await socket.prepare(request)
        episode = str(id(socket))
        async for frame in socket:
            request_message = json.loads(frame.data)
            if request_message["type"] == "close":
                break
            if request_message["type"] == "reset":
                self.resets.append(request_message["data"])
                self.episodes[episode] = []
                data: dict[str, Any] = {"observation": {"text": "hello"}, "reward": None, "done": False}
            elif request_message["data"]["message"] == "large":
                await socket.send_str(" " * 10_000)
                continue
            elif request_message["data"]["message"] == "500":
                await socket.send_json({"type": "error", "data": {"code": "EXECUTION_ERROR"}})
                continue
            elif request_message["data"]["message"] == "hang":
                await self.released.wait()
                break
            else:
                data = self.answer(episode, request_message["data"]["message"])
            await socket.send_json({"type": "observation", "data": data})
        return socket


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("TEST_ENV_TOKEN", TOKEN)
    server = Server()
    yield server
    server.close()


def play(
    url: str, texts: list[str], extras: dict[str, Any] | None = None, *, pause_s: float = 0.0, **settings: Any
) -> list[Any]:
    """Play an episode; return the first messages, then the output of every step or the kind of its failure."""
    config = {"base_url": url, "token_variable": "TEST_ENV_TOKEN", "observation_key": "text"} | settings

    async def main() -> list[Any]:
        outputs: list[Any] = []
        async with WorkerPool({"openenv": config}, 1, 60.0) as pool:
            try:
                episode = await pool.start("openenv", Prompt("0", QUESTION, "openenv", extras or {}))
                outputs.append(episode.messages)
                for text in texts:
                    await asyncio.sleep(pause_s)
                    outputs.append(await episode.step(text))
            except EnvironmentFailure as failure:
                outputs.append(failure.kind)
        return outputs

    return asyncio.run(asyncio.wait_for(main(), 120))


@pytest.mark.parametrize("address", ["http://127.0.0.1:{}", "ws://127.0.0.1:{}/ws"])
def test_episode_runs_over_network(server: Server, address: str):
    row = {"reset": {"seed": 7}}
    opening, first, last = play(address.format(server.port), ["one", "done"], row)
    assert opening == [*QUESTION, {"role": "user", "content": "hello"}]
    assert (first.reward, first.done, first.observations[0]["content"]) == (0.0, False, "heard 1")
    assert (last.reward, last.done, last.observations, last.metadata) == (2.5, True, [], {"heard": 2})
    assert server.resets[0]["seed"] == 7
    assert [*server.episodes.values()] == [["one", "done"]]


def test_session_survives_a_long_turn(server: Server):
    *_, last = play(f"ws://127.0.0.1:{server.port}/ws", ["done"], pause_s=2 * PING_S)
    assert (getattr(last, "reward", last)) == 2.5


def test_last_turn_ends_episode(server: Server):
    *_, last = play(f"http://127.0.0.1:{server.port}", ["one", "two"], {"max_turns": 2})
    assert (last.reward, last.done) == (0.0, True)


def test_observation_without_key_is_json(server: Server):
    opening, *_ = play(f"http://127.0.0.1:{server.port}", [], observation_key=None)
    assert opening[-1]["content"] == '{"text": "hello"}'


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("hang", "timeout"),
        ("trickle", "timeout"),
        ("large", "too_large"),
        ("not json", "bad_response"),
        ("list", "bad_response"),
        ("deep", "bad_response"),
        ("500", "server"),
    ],
)
def test_http_server_failure_has_kind(server: Server, text: str, kind: str):
    timeout = 1.0 if kind == "timeout" else 60.0
    size = 1_000_000 if text == "deep" else 5000
    *_, last = play(f"http://127.0.0.1:{server.port}", [text], timeout=timeout, max_response_bytes=size)
    assert last == kind


@pytest.mark.parametrize(("text", "kind"), [("hang", "timeout"), ("large", "too_large"), ("500", "server")])
def test_websocket_failure_has_kind(server: Server, text: str, kind: str):
    timeout = 1.0 if kind == "timeout" else 60.0
    *_, last = play(f"ws://127.0.0.1:{server.port}/ws", [text], timeout=timeout, max_response_bytes=5000)
    assert last == kind


def test_missing_server_and_wrong_token_fail(server: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TEST_ENV_TOKEN", "another")
    assert play(f"http://127.0.0.1:{server.port}", []) == ["server"]
    assert play("http://127.0.0.1:1", []) == ["server"]


@pytest.mark.parametrize("address", ["http://127.0.0.1:{}/loose", "ws://127.0.0.1:{}/moved"])
def test_redirects_are_not_followed(server: Server, address: str):
    assert play(address.format(server.port), []) == ["server"]
    assert server.redirected_tokens == []


def test_row_cannot_choose_server_or_token(server: Server):
    row = {"base_url": "http://127.0.0.1:1", "token_variable": "HOME", "reset": {"episode_id": "theirs"}}
    opening, *_ = play(f"http://127.0.0.1:{server.port}", [], row)
    assert opening[-1]["content"] == "hello"
    assert server.resets[0]["episode_id"] != "theirs"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"base_url": None}, r"openenv\.base_url=None"),
        ({"base_url": "file:///etc/passwd"}, r"openenv\.base_url='file:///etc/passwd'"),
        ({"token_variable": "NO_SUCH_VARIABLE_HERE"}, "NO_SUCH_VARIABLE_HERE.*not set; export it"),
        ({"base_url": "ws://x/ws", "action_key": None}, "action_key"),
    ],
)
def test_wrong_settings_stop_the_run(settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TEST_ENV_TOKEN", TOKEN)
    with pytest.raises(ConfigError, match=message):
        play("http://127.0.0.1:1", [], **settings)


@pytest.mark.parametrize("address", ["http://127.0.0.1:{}", "ws://127.0.0.1:{}/ws"])
def test_server_gets_the_answer_without_reasoning(server: Server, address: str):
    play(address.format(server.port), ["<think>done?</think>one", "<think>done", "done"])
    assert [*server.episodes.values()] == [["one", "", "done"]]
