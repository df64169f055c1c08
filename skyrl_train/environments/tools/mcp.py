"""Tools of Model Context Protocol servers, through the official SDK. Only the configuration chooses the servers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import os
import shutil
import signal
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import psutil

from skyrl_train.environments.tools.argument_validation import ArgumentValidator, SchemaError
from skyrl_train.environments.tools.base import BadArguments, Tool, ToolError
from skyrl_train.errors import ConfigError

CONNECT_TIMEOUT_S = 30.0
"""Time for a server to start and list its tools, at the start of an episode."""
MAX_PAGES = 20
MAX_MESSAGE = 128 * 2**20
"""Maximum bytes of a server's message; a longer one ends the connection. The model gets `max_output` characters."""
CONNECTION_CLOSED = -32000
"""The SDK's code for a connection that has ended: the next call connects anew."""
STOP_TIMEOUT_S = 1.0
"""Time for a program to exit before it is killed."""
MAX_DESCRIPTION = 2000
SERVER_KEYS = ("command", "args", "env", "cwd", "url", "tools", "sha256")


@dataclass(frozen=True, slots=True)
class McpServer:
    """One entry of `servers`: either a program that communicates over its stdin and stdout, or a URL."""

    name: str
    tools: tuple[str, ...]
    """The tools that may be called."""
    command: str | None = None
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    """Added to PATH, HOME and the like; a server inherits nothing else of this process's environment."""
    cwd: str | None = None
    url: str | None = None
    sha256: str | None = None
    """The expected `fingerprint`; None accepts the list that the first connection of this process shows."""

    @staticmethod
    def from_config(name: str, entry: Any) -> McpServer:
        """Parse and check an entry of the configuration. Raises ConfigError."""
        key = f"servers.{name}"
        if not isinstance(entry, Mapping) or (strange := set(entry) - set(SERVER_KEYS)):
            what = sorted(strange) if isinstance(entry, Mapping) else entry
            raise ConfigError(f"{key}: {what!r:.200} is unknown; an entry has {', '.join(SERVER_KEYS)}.")
        if (entry.get("command") is None) == (entry.get("url") is None):
            raise ConfigError(f"{key}: needs either command (a program) or url (a streamable HTTP server).")
        if not isinstance(entry.get("tools"), Sequence) or isinstance(entry["tools"], str) or not entry["tools"]:
            raise ConfigError(f"{key}.tools={entry.get('tools')!r}: name the tools that may be called, as a list.")
        url, command = entry.get("url"), entry.get("command")
        if url is not None and not str(url).startswith(("http://", "https://")):
            raise ConfigError(f"{key}.url={url!r} is not an http:// or https:// address.")
        if command is not None and shutil.which(str(command)) is None:
            raise ConfigError(f"{key}.command={command!r} is no program on PATH.")
        return McpServer(
            name,
            tuple(map(str, entry["tools"])),
            command,
            tuple(map(str, entry.get("args") or ())),
            tuple((str(n), str(value)) for n, value in (entry.get("env") or {}).items()),
            entry.get("cwd"),
            url,
            entry.get("sha256"),
        )


ToolListing = dict[str, dict[str, Any]]
"""A server's tools: name -> {"description", "parameters"}."""


def fingerprint(listing: ToolListing) -> str:
    """SHA-256 of the names, descriptions and schemas of a server's tools, independent of their order."""
    return hashlib.sha256(json.dumps(listing, sort_keys=True).encode()).hexdigest()


class McpTool(Tool):
    """Calls `server.tool` of the configured servers; the model can choose only among their allowed tools.

    Settings: `servers` (name -> `Server`'s fields), `timeout` seconds for a call. The list of tools is read when the
    episode begins and again before every call: a tool whose description or schema changed is refused.

    The constructor raises ConfigError for wrong settings, or if a server lists no tools within CONNECT_S.
    """

    name = "mcp"

    def __init__(self, servers: Mapping[str, Any], timeout: float = 30.0):
        _library()
        self.deadline_s = timeout
        self.servers = {name: McpServer.from_config(name, entry) for name, entry in servers.items()}
        self._connections: dict[str, _Connection] = {}
        self.pinned = {name: pinned_tools(server) for name, server in self.servers.items()}
        self._arguments = {name: argument_validators(server) for name, server in self.servers.items()}
        allowed = [f"{name}.{tool}" for name, server in self.servers.items() for tool in server.tools]
        self.description = "Call one of these tools:\n" + "\n".join(map(self._line, allowed))
        self.parameters: dict[str, Any] = {
            "type": "object",
            "properties": {
                "tool": {"type": "string", "enum": allowed},
                "arguments": {"type": "object", "description": "the tool's own arguments"},
            },
            "required": ["tool", "arguments"],
        }

    def _line(self, full_name: str) -> str:
        server, _, tool = full_name.partition(".")
        shown = self.pinned[server][tool]
        text = f"- {full_name}: {shown['description']} Arguments: {json.dumps(shown['parameters'])}"
        return text[:MAX_DESCRIPTION]

    async def call(self, arguments: dict[str, Any]) -> str:
        name, _, tool = arguments["tool"].partition(".")
        server = self.servers.get(name)
        if server is None or tool not in server.tools:
            raise ToolError(f"{arguments['tool']!r:.100} is not an allowed tool.")
        if wrong := self._arguments[name][tool].find_problem(arguments["arguments"]):
            raise BadArguments(f"{arguments['tool']}: {wrong}")
        connection = self._connections.setdefault(name, _Connection(server))
        try:
            client = await connection.client()
            if await read_tool_listing(client) != self.pinned[name]:
                raise ToolError(f"The server {name!r} has changed its tools since the episode began: refused.")
            result = await client.call_tool(tool, arguments["arguments"])
        except (ToolError, asyncio.CancelledError):
            raise
        except Exception as error:
            if (
                getattr(error, "code", CONNECTION_CLOSED) == CONNECTION_CLOSED
            ):  # the connection ended, or the error is not the server's
                self._connections.pop(name, None)
                await connection.close()
            raise ToolError(f"{arguments['tool']} failed: {root_cause(error)}") from error
        text = "\n".join(_text(block) for block in result.content)
        if result.is_error:
            raise ToolError(text or f"{arguments['tool']} failed.")
        return text

    async def close(self) -> None:
        await asyncio.gather(*(connection.close() for connection in self._connections.values()))


class _Connection:
    """A client that one task enters and leaves, as its cancel scopes require, and that any task may call."""

    def __init__(self, server: McpServer):
        self._server = server
        self._client: asyncio.Future[Any] | None = None
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def client(self) -> Any:
        """The connected client. If a caller is cancelled, the connection stays open for the next one."""
        if self._client is None:
            self._client = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._hold(self._client))
        return await asyncio.shield(self._client)

    async def _hold(self, ready: asyncio.Future[Any]) -> None:
        try:
            async with connect(self._server) as client:
                ready.set_result(client)
                await self._stop.wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)
                ready.exception()  # retrieved, whether or not a task still waits for it

    async def close(self) -> None:
        self._stop.set()
        if self._task is not None:
            if self._client is not None and not self._client.done():
                self._task.cancel()
            await asyncio.wait([self._task])


@asynccontextmanager
async def connect(server: McpServer) -> AsyncIterator[Any]:
    """An SDK client of `server` for the duration of the block; the server's process, if any, ends with the block."""
    library = _library()
    if server.url is not None:
        from mcp.client.streamable_http import streamable_http_client

        async with library.Client(
            streamable_http_client(server.url, max_sse_event_size=MAX_MESSAGE), cache=None
        ) as client:
            yield client
        return
    async with library.Client(_stdio_streams(server), cache=None) as client:
        yield client


@asynccontextmanager
async def _stdio_streams(server: McpServer) -> AsyncIterator[Any]:
    """Streams between the SDK and a program, one JSON message a line.

    Replaces the SDK's own: that takes time quadratic in the length of a line, and an unresponsive server blocks it for
    four seconds.
    """
    import anyio
    from mcp.client.stdio import get_default_environment
    from mcp.shared.message import SessionMessage
    from mcp.types import jsonrpc_message_adapter

    assert server.command is not None
    command = [server.command, *server.args]
    if setpriv := shutil.which("setpriv"):  # with it, the kernel ends a server whose episode was killed
        command = [setpriv, "--pdeathsig", "KILL", "--", *command]
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=get_default_environment() | dict(server.env),
        cwd=server.cwd,
        start_new_session=True,
        limit=MAX_MESSAGE,
    )
    sends, receives = process.stdin, process.stdout
    assert sends is not None and receives is not None
    incoming_end, incoming = anyio.create_memory_object_stream[Any](0)
    outgoing, outgoing_end = anyio.create_memory_object_stream[Any](0)

    async def read() -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, asyncio.LimitOverrunError, anyio.BrokenResourceError):
            async with incoming_end:  # closing it tells the session that the server is gone
                while True:
                    line = await receives.readuntil(b"\n")
                    message: Any
                    try:
                        message = SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
                    except ValueError as error:
                        message = error
                    await incoming_end.send(message)

    async def write() -> None:
        with contextlib.suppress(OSError):
            async with outgoing_end:
                async for item in outgoing_end:
                    sends.write(item.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                    await sends.drain()

    tasks = [asyncio.create_task(read()), asyncio.create_task(write())]
    try:
        yield incoming, outgoing
    finally:
        for task in tasks:
            task.cancel()
        for stream in (incoming_end, incoming, outgoing, outgoing_end):
            stream.close()
        await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Close a program's input to make it exit; kill its processes that still run after a second, in any session."""
    assert process.stdin is not None
    family = _descendants(process)
    process.stdin.close()
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
    finally:
        family |= _descendants(process)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        for descendant in family:
            with contextlib.suppress(psutil.Error):
                descendant.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
        process._transport.close()  # type: ignore[attr-defined]  # a child that left the group may hold the pipe


def _descendants(process: asyncio.subprocess.Process) -> set[psutil.Process]:
    if process.returncode is not None:  # its process id may be another's by now
        return set()
    with contextlib.suppress(psutil.Error):
        return set(psutil.Process(process.pid).children(recursive=True))
    return set()


async def read_tool_listing(client: Any) -> ToolListing:
    """All tools of a connected server. Raises ToolError for an endless list."""
    listing: ToolListing = {}
    cursor = None
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            listing[tool.name] = {"description": tool.description or "", "parameters": tool.input_schema}
        cursor = page.next_cursor
        if cursor is None:
            return listing
    raise ToolError(f"the server's list of tools has more than {MAX_PAGES} pages.")


def list_server_tools(name: str, entry: Mapping[str, Any]) -> list[str]:
    """The names of all tools of a server, given its entry without `tools`, for callers that allow all of them."""
    return sorted(_first_listing(McpServer.from_config(name, {**entry, "tools": ["all"]})))


_pinning = threading.Lock()


def pinned_tools(server: McpServer) -> ToolListing:
    """Return the list that `server` showed first in this process; every later connection must show the same.

    Raises ConfigError if it is not as configured.
    """
    with _pinning:  # threads that use the server for the first time pin one list
        return _pin(server)


@functools.cache
def _pin(server: McpServer) -> ToolListing:
    listing = _first_listing(server)
    digest = fingerprint(listing)
    if server.sha256 not in (None, digest):
        raise ConfigError(
            f"servers.{server.name}.sha256={server.sha256!r}: the server's tools have {digest!r}; "
            "look at what changed before you write that into the configuration."
        )
    if missing := [tool for tool in server.tools if tool not in listing]:
        raise ConfigError(f"servers.{server.name}.tools: {missing} are not among {sorted(listing)}.")
    return listing


def argument_validators(server: McpServer) -> dict[str, ArgumentValidator]:
    """The arguments of a server's allowed tools, by its own schemas. Raises ConfigError for one that is none.

    Names that a schema does not know are the server's to refuse.
    """
    found = {}
    for tool in server.tools:
        try:
            found[tool] = ArgumentValidator(pinned_tools(server)[tool]["parameters"], reject_unknown=False)
        except SchemaError as error:
            raise ConfigError(
                f"servers.{server.name}.tools: the arguments of {tool!r} have a schema that cannot be used: {error}; "
                "leave the tool out, or correct its server."
            ) from error
    return found


def _first_listing(server: McpServer) -> ToolListing:
    async def ask() -> ToolListing:
        async with asyncio.timeout(CONNECT_TIMEOUT_S), connect(server) as client:
            return await read_tool_listing(client)

    try:
        with ThreadPoolExecutor(1) as thread:  # the tool's constructor is synchronous; its caller may have a loop
            return thread.submit(asyncio.run, ask()).result()
    except (Exception, BaseExceptionGroup) as error:
        where = server.url or json.dumps([server.command, *server.args])
        raise ConfigError(f"servers.{server.name}: {where:.200} gave no list of tools: {root_cause(error)}") from error


def root_cause(error: BaseException) -> str:
    """The first cause inside the exception groups that task groups raise."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {str(error)[:300]}"


def _text(block: Any) -> str:
    text = getattr(block, "text", None)
    return text if isinstance(text, str) else f"[{getattr(block, 'type', 'something')} left out]"


def _library() -> Any:
    try:
        import mcp
    except ImportError as error:
        raise ConfigError("the mcp tool needs the MCP SDK; install it with: pip install 'skyrl-train[mcp]'.") from error
    return mcp
