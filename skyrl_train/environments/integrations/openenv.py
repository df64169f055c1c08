"""Environments on a server with OpenEnv's protocol, or with JSON requests `POST /reset` and `POST /step`."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import uuid
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from skyrl_train.data.messages import Message
from skyrl_train.data.reasoning import final_answer
from skyrl_train.environments.base import StepOutput, TextEnv
from skyrl_train.errors import ConfigError, EnvironmentFailure

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")
SCHEMES = ("http", "https", "ws", "wss")
SECTION = "environment.skyrl_gym.openenv"


class OpenEnvEnv(TextEnv):
    """An environment whose episodes run on a server.

    The server receives only the final answer of each turn (`reasoning.final_answer`), because it does not know the
    model's reasoning format. It returns the reward of the turn; a missing reward counts as 0 before the last turn.

    With http(s), the request bodies are `{"episode_id", ...}` to /reset and `{"action", "episode_id"}` to /step. With
    ws(s), every episode is a separate session, as on OpenEnv's servers. Both return `{"observation", "reward",
    "done"}`. The first observation follows the row's messages. A row's column `reset` is a mapping that is also sent
    to /reset. The server and its token come from the configuration only, never from a row. Redirects are not followed.

    `init` and `step` raise EnvironmentFailure of the kinds "timeout", "server" (unreachable, or an error on the
    server), "too_large" and "bad_response".

    Args:
        env_config: The section `environment.skyrl_gym.openenv`.
        extras: The other columns of the row.

    Raises:
        ConfigError: The section names no server, or its token is not set.
    """

    replayable = False

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__(env_config, extras)
        self.max_turns = int(self.extras.get("max_turns") or 0)
        self.turns = 0
        self._server = _connection(self.env_config)
        self._loop = _LoopThread()

    @classmethod
    def parse_row(cls, extras: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row's arguments of /reset.

        Raises:
            ValueError: The row's column `reset` is not a mapping.
        """
        arguments = extras.get("reset") or {}
        if not isinstance(arguments, Mapping):
            raise ValueError(
                f"The row's column reset is {arguments!r:.80}; it must be a mapping of arguments for /reset, or null."
            )
        return dict(arguments)

    @classmethod
    def check(cls, env_config: Mapping[str, Any]) -> None:
        _connection(env_config)

    def init(self, prompt: list[Message]) -> tuple[list[Message], dict[str, Any]]:
        answer = self._call(self._server.reset(self.parse_row(self.extras)))
        return [*prompt, *self._to_messages(answer)], _metadata(answer)

    def step(self, action: str) -> StepOutput:
        self.turns += 1
        answer = self._call(self._server.step(final_answer(action)))
        done = bool(answer.get("done"))
        ended = done or self.turns == self.max_turns
        reward: Any = answer.get("reward")
        if reward is None and not done:
            reward = 0.0
        # The worker checks the type of the reward.
        return StepOutput([] if ended else self._to_messages(answer), reward, ended, _metadata(answer))

    def close(self) -> None:
        try:
            self._loop.run(_with_deadline(self._server.timeout, self._server.close()))
        finally:
            self._loop.close()

    def _call(self, request: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        import aiohttp

        try:
            return self._loop.run(_with_deadline(self._server.timeout, request))
        except TimeoutError as error:
            raise EnvironmentFailure(
                "timeout", f"no response of the server within {self._server.timeout:g} s"
            ) from error
        except aiohttp.ClientError as error:
            raise EnvironmentFailure("server", f"{type(error).__name__}: {error}") from error

    def _to_messages(self, answer: dict[str, Any]) -> list[Message]:
        observation = answer.get("observation")
        key = self.env_config.get("observation_key")
        if key is not None and isinstance(observation, Mapping):
            if key not in observation:
                raise EnvironmentFailure(
                    "bad_response", f"the observation has no key {key!r}, only {sorted(observation)}"
                )
            observation = observation[key]
        if observation is None or observation == "":
            return []
        text = observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)
        return [{"role": "user", "content": text}]


class _LoopThread:
    """An event loop in a thread. It also runs between calls, when a server expects responses to its pings."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop.run_forever, name="openenv", daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()


async def _with_deadline(seconds: float, request: Coroutine[Any, Any, T]) -> T:
    async with asyncio.timeout(seconds):
        return await request


def _metadata(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the response's "info" or "metadata": servers use either name."""
    parts = [answer[name] for name in ("info", "metadata") if isinstance(answer.get(name), Mapping)]
    return {key: value for part in parts for key, value in part.items()}


async def _refuse_redirect(session: Any, context: Any, details: Any) -> None:
    raise EnvironmentFailure(
        "server", f"the server redirects to {details.response.headers.get('Location')!r:.200}, which is not followed"
    )


def _connection(settings: Mapping[str, Any]) -> _HttpConnection | _WebSocketConnection:
    url, variable = settings.get("base_url"), settings.get("token_variable")
    if not url or urlsplit(url).scheme not in SCHEMES or not urlsplit(url).hostname:
        raise ConfigError(
            f"{SECTION}.base_url={url!r} is not a server's URL; set it to one, e.g. http://127.0.0.1:8000 or ws://HOST/ws."
        )
    if variable and not os.environ.get(variable):
        raise ConfigError(f"{SECTION}.token_variable={variable!r}: this environment variable is not set; export it.")
    headers = {"Authorization": f"Bearer {os.environ[variable]}"} if variable else {}
    http = urlsplit(url).scheme in ("http", "https")
    if not http and settings.get("action_key", "message") is None:
        raise ConfigError(f"{SECTION}.action_key=null: OpenEnv's actions are mappings; set it to the key of the text.")
    return (_HttpConnection if http else _WebSocketConnection)(url.rstrip("/"), headers, settings)


class _Connection:
    """The connection of one episode to the server."""

    def __init__(self, url: str, headers: dict[str, str], settings: Mapping[str, Any]):
        self.url = url
        self.headers = headers
        self.timeout = float(settings.get("timeout", 30.0))
        self.max_response_bytes = int(settings.get("max_response_bytes", 2**20))
        self.action_key = settings.get("action_key", "message")
        self._client: aiohttp.ClientSession | None = None

    def client(self) -> aiohttp.ClientSession:
        """Return the HTTP session, which the first call creates inside the running event loop."""
        import aiohttp

        if self._client is None:
            trace = aiohttp.TraceConfig()
            trace.on_request_redirect.append(_refuse_redirect)
            self._client = aiohttp.ClientSession(
                headers=self.headers | {"Accept-Encoding": "identity"},
                auto_decompress=False,  # a compressed response could be larger than its stated size
                timeout=aiohttp.ClientTimeout(total=None),  # `_with_deadline` sets the deadline
                trace_configs=[trace],
            )
        return self._client

    def action(self, text: str) -> Any:
        return text if self.action_key is None else {self.action_key: text}

    def parse(self, data: bytes | str) -> dict[str, Any]:
        try:
            answer = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise EnvironmentFailure("bad_response", f"not JSON: {data[:80]!r}") from error
        if not isinstance(answer, dict):
            raise EnvironmentFailure("bad_response", f"JSON {type(answer).__name__}, not an object: {data[:80]!r}")
        return answer

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()


class _HttpConnection(_Connection):
    """A connection with `POST /reset` and `POST /step`; `episode_id` tells the server which episode is meant."""

    def __init__(self, url: str, headers: dict[str, str], settings: Mapping[str, Any]):
        super().__init__(url, headers, settings)
        self.episode = {"episode_id": uuid.uuid4().hex}

    async def reset(self, arguments: dict[str, Any]) -> dict[str, Any]:
        answer = await self._post("/reset", arguments | self.episode)
        episode_id = answer.get("episode_id")
        if isinstance(episode_id, str):
            self.episode = {"episode_id": episode_id}
        return answer

    async def step(self, text: str) -> dict[str, Any]:
        return await self._post("/step", {"action": self.action(text)} | self.episode)

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        async with self.client().post(self.url + path, json=body) as response:
            data = bytearray()
            async for chunk in response.content.iter_chunked(65536):
                data += chunk
                if len(data) > self.max_response_bytes:
                    raise EnvironmentFailure(
                        "too_large", f"a response of more than {self.max_response_bytes} bytes to {path}"
                    )
            if response.status != 200:
                raise EnvironmentFailure("server", f"status {response.status} of {path}: {bytes(data[:200])!r}")
            return self.parse(bytes(data))


class _WebSocketConnection(_Connection):
    """A connection over a WebSocket, with messages `{"type", "data"}` in both directions.

    It receives all the time, because aiohttp responds to pings only while it receives. A server ends a session that
    does not respond, and a turn of the model can take longer than a server waits.
    """

    _socket: aiohttp.ClientWebSocketResponse | None = None
    _receiver: asyncio.Task[None] | None = None

    async def reset(self, arguments: dict[str, Any]) -> dict[str, Any]:
        self._socket = await self.client().ws_connect(self.url, max_msg_size=self.max_response_bytes, heartbeat=None)
        self._replies: asyncio.Queue[aiohttp.WSMessage] = asyncio.Queue(maxsize=1)
        self._receiver = asyncio.create_task(self._receive(self._socket))
        return await self._ask({"type": "reset", "data": arguments})

    async def step(self, text: str) -> dict[str, Any]:
        return await self._ask({"type": "step", "data": self.action(text)})

    async def _receive(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        import aiohttp

        while True:
            reply = await socket.receive()
            await self._replies.put(reply)
            if reply.type is not aiohttp.WSMsgType.TEXT:
                return

    async def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        import aiohttp

        assert self._socket is not None
        await self._socket.send_json(message)
        reply = await self._replies.get()
        if reply.type is not aiohttp.WSMsgType.TEXT:
            if self._socket.close_code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG:
                raise EnvironmentFailure("too_large", f"a response of more than {self.max_response_bytes} bytes")
            raise EnvironmentFailure("server", f"the session ended ({reply.type.name})")
        answer = self.parse(reply.data)
        data = answer.get("data")
        if answer.get("type") == "error" or not isinstance(data, dict):
            raise EnvironmentFailure("server", f"{answer.get('type')}: {data!r:.200}")
        return data

    async def close(self) -> None:
        if self._socket is not None and not self._socket.closed:
            await self._socket.send_json({"type": "close"})
            await self._socket.close()
        if self._receiver is not None:
            self._receiver.cancel()
        await super().close()
