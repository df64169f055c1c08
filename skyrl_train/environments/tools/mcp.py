"""The mcp tool: tools of Model Context Protocol (MCP) servers, through the official SDK.

Only the configuration names the servers; neither rows nor models can.
"""

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
"""Time that a server has to start and list its tools when a process uses it for the first time."""
MAX_PAGES = 20
"""Maximum number of pages of a server's list of tools."""
MAX_MESSAGE = 128 * 2**20
"""Maximum bytes of a server's message; a longer one ends the connection. The model sees `max_output` characters."""
CONNECTION_CLOSED = -32000
"""The SDK's error code for a connection that has ended; the next call connects again."""
STOP_TIMEOUT_S = 1.0
"""Time that a program has to exit before it is killed."""
MAX_DESCRIPTION = 2000
"""Maximum characters of the description and schema of one tool that the model sees."""
SERVER_KEYS = ("command", "args", "env", "cwd", "url", "tools", "sha256")


@dataclass(frozen=True, slots=True)
class McpServer:
    """One entry of the setting `servers`: either a program that communicates over stdin and stdout, or a URL."""

    name: str
    tools: tuple[str, ...]
    """Names of the tools that may be called."""
    command: str | None = None
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    """Environment variables that are added to PATH, HOME and a few others; the program inherits no further variables of
    this process."""
    cwd: str | None = None
    url: str | None = None
    sha256: str | None = None
    """The expected `fingerprint` of the server's tools; None accepts the tools that the first connection lists."""

    @staticmethod
    def from_config(name: str, entry: Any) -> McpServer:
        """Parse and check one entry of the setting `servers`.

        Args:
            name: The server's name, which is the entry's key.
            entry: The entry: a mapping with keys of `SERVER_KEYS`.

        Raises:
            ConfigError: The entry has unknown keys, not exactly one of command and url, no list of tools, a URL that is
                not HTTP, or a command that is not on PATH.
        """
        key = f"servers.{name}"
        if not isinstance(entry, Mapping) or (unknown := set(entry) - set(SERVER_KEYS)):
            if not isinstance(entry, Mapping):
                raise ConfigError(f"{key}={entry!r:.200} is not a mapping; allowed keys: {', '.join(SERVER_KEYS)}.")
            raise ConfigError(
                f"{key}: the keys {sorted(unknown)!r:.200} are unknown; allowed keys: {', '.join(SERVER_KEYS)}."
            )
        if (entry.get("command") is None) == (entry.get("url") is None):
            raise ConfigError(f"{key}: set exactly one of command (a program) and url (a streamable HTTP server).")
        if not isinstance(entry.get("tools"), Sequence) or isinstance(entry["tools"], str) or not entry["tools"]:
            raise ConfigError(
                f"{key}.tools={entry.get('tools')!r} is not a list of names; list the tools that may be called."
            )
        url, command = entry.get("url"), entry.get("command")
        if url is not None and not str(url).startswith(("http://", "https://")):
            raise ConfigError(f"{key}.url={url!r} is not an http:// or https:// URL.")
        if command is not None and shutil.which(str(command)) is None:
            raise ConfigError(f"{key}.command={command!r} is not a program on PATH; install it or set its path.")
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
"""The tools of a server: name -> {"description", "parameters"}."""


def fingerprint(listing: ToolListing) -> str:
    """Return the SHA-256 (hex) of the names, descriptions and schemas of an MCP server's tools.

    The order of the tools does not matter. A run compares the result with `servers.NAME.sha256`, to notice that a
    server has changed its tools.
    """
    return hashlib.sha256(json.dumps(listing, sort_keys=True).encode()).hexdigest()


class McpTool(Tool):
    """A tool through which a model calls the allowed tools of the configured servers, as `server.tool`.

    The first use of a server in a process reads its list of tools. Every call reads the list again and is rejected if
    the server's tools, descriptions or schemas have changed.

    Args:
        servers: Name -> entry with the fields of `McpServer`.
        timeout: Maximum seconds of a call.

    Raises:
        ConfigError: The settings are wrong, the MCP SDK is not installed, a server does not list its tools within
            `CONNECT_TIMEOUT_S`, or its tools are not the configured ones.
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
        listed = self.pinned[server][tool]
        text = f"- {full_name}: {listed['description']} Arguments: {json.dumps(listed['parameters'])}"
        return text[:MAX_DESCRIPTION]

    async def call(self, arguments: dict[str, Any]) -> str:
        """Call a tool of an MCP server, which is named as "server.tool", and return its result as text.

        Raises:
            ToolError: The tool is not allowed, fails, or the server has changed its tools since the episode began.
            BadArguments: The arguments do not fit the tool's schema.
        """
        name, _, tool = arguments["tool"].partition(".")
        server = self.servers.get(name)
        if server is None or tool not in server.tools:
            raise ToolError(f"{arguments['tool']!r:.100} is not an allowed tool.")
        if problem := self._arguments[name][tool].find_problem(arguments["arguments"]):
            raise BadArguments(f"{arguments['tool']}: {problem}")
        connection = self._connections.setdefault(name, _Connection(server))
        try:
            client = await connection.client()
            if await read_tool_listing(client) != self.pinned[name]:
                raise ToolError(
                    f"The call was not made: the server {name!r} has changed its tools since the episode began."
                )
            result = await client.call_tool(tool, arguments["arguments"])
        except (ToolError, asyncio.CancelledError):
            raise
        except Exception as error:
            # The connection has ended, or the error has no code because it does not come from the server.
            if getattr(error, "code", CONNECTION_CLOSED) == CONNECTION_CLOSED:
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
    """A connection to a server. One task opens and closes it, as its cancel scopes require; any task may use it."""

    def __init__(self, server: McpServer):
        self._server = server
        self._client: asyncio.Future[Any] | None = None
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def client(self) -> Any:
        """Return the connected client. If a caller is canceled, the connection stays open for the next caller."""
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
                ready.exception()  # marks it as retrieved even if no task waits for it any longer

    async def close(self) -> None:
        self._stop.set()
        if self._task is not None:
            if self._client is not None and not self._client.done():
                self._task.cancel()
            await asyncio.wait([self._task])


@asynccontextmanager
async def connect(server: McpServer) -> AsyncIterator[Any]:
    """Connect to a server, and yield a client of the SDK. After the block, disconnect and end the server's program.

    Raises:
        ConfigError: The MCP SDK is not installed.
    """
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
    """Start a program, and open the streams between it and the SDK, with one JSON message per line.

    This replaces the SDK's own streams, which take time quadratic in the length of a line and wait four seconds for an
    unresponsive server.
    """
    import anyio
    from mcp.client.stdio import get_default_environment
    from mcp.shared.message import SessionMessage
    from mcp.types import jsonrpc_message_adapter

    assert server.command is not None
    command = [server.command, *server.args]
    # With setpriv, the kernel kills a server whose environment process was killed.
    if setpriv := shutil.which("setpriv"):
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
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None and stdout is not None
    incoming_end, incoming = anyio.create_memory_object_stream[Any](0)
    outgoing, outgoing_end = anyio.create_memory_object_stream[Any](0)

    async def read() -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, asyncio.LimitOverrunError, anyio.BrokenResourceError):
            async with incoming_end:  # closing it tells the session that the server has exited
                while True:
                    line = await stdout.readuntil(b"\n")
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
                    stdin.write(item.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                    await stdin.drain()

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
    """Close a program's stdin to make it exit, and kill its processes that still run after `STOP_TIMEOUT_S`.

    Processes that left the program's session are killed, too.
    """
    assert process.stdin is not None
    descendants = _descendants(process)
    process.stdin.close()
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
    finally:
        descendants |= _descendants(process)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        for descendant in descendants:
            with contextlib.suppress(psutil.Error):
                descendant.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
        process._transport.close()  # type: ignore[attr-defined]  # a child that left the group may hold the pipe


def _descendants(process: asyncio.subprocess.Process) -> set[psutil.Process]:
    if process.returncode is not None:  # another process may have this process id by now
        return set()
    with contextlib.suppress(psutil.Error):
        return set(psutil.Process(process.pid).children(recursive=True))
    return set()


async def read_tool_listing(client: Any) -> ToolListing:
    """Read the list of tools of a connected server.

    Raises:
        ToolError: The list has more than `MAX_PAGES` pages.
    """
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
    """Connect to a server and return the sorted names of all of its tools, for callers that allow all of them.

    Args:
        name: The server's name.
        entry: Its entry of the setting `servers`; `tools` may be missing.

    Raises:
        ConfigError: The entry is wrong, or the server does not list its tools within `CONNECT_TIMEOUT_S`.
    """
    return sorted(_first_listing(McpServer.from_config(name, {**entry, "tools": ["all"]})))


_pinning = threading.Lock()


def pinned_tools(server: McpServer) -> ToolListing:
    """Return the tools that a server listed at its first use in this process. Thread-safe.

    The first call connects to the server. Every later connection must list the same tools.

    Raises:
        ConfigError: The server does not list its tools within `CONNECT_TIMEOUT_S`, their fingerprint is not the
            configured one, or it lacks a configured tool.
    """
    with _pinning:  # threads that use the server for the first time must pin the same list
        return _pin(server)


@functools.cache
def _pin(server: McpServer) -> ToolListing:
    listing = _first_listing(server)
    digest = fingerprint(listing)
    if server.sha256 not in (None, digest):
        raise ConfigError(
            f"servers.{server.name}.sha256={server.sha256!r} is not the fingerprint of the server's tools, {digest!r}. "
            "Find out what changed before you write the new fingerprint into the configuration."
        )
    if missing := [tool for tool in server.tools if tool not in listing]:
        raise ConfigError(
            f"servers.{server.name}.tools: the server has no tools {missing}; choose among {sorted(listing)}."
        )
    return listing


def argument_validators(server: McpServer) -> dict[str, ArgumentValidator]:
    """Return a validator of the arguments for each allowed tool of a server, made from the server's own schemas.

    The validators accept arguments that a schema does not name: the server may reject them.

    Raises:
        ConfigError: A schema is invalid, or the server's tools are not the configured ones (see `pinned_tools`).
    """
    validators = {}
    for tool in server.tools:
        try:
            validators[tool] = ArgumentValidator(pinned_tools(server)[tool]["parameters"], reject_unknown=False)
        except SchemaError as error:
            raise ConfigError(
                f"servers.{server.name}.tools: the arguments of {tool!r} have a schema that cannot be used: {error}; "
                "leave the tool out, or fix its server."
            ) from error
    return validators


def _first_listing(server: McpServer) -> ToolListing:
    async def ask() -> ToolListing:
        async with asyncio.timeout(CONNECT_TIMEOUT_S), connect(server) as client:
            return await read_tool_listing(client)

    try:
        with ThreadPoolExecutor(1) as thread:  # the tool's constructor is synchronous; its caller may have a loop
            return thread.submit(asyncio.run, ask()).result()
    except (Exception, BaseExceptionGroup) as error:
        location = server.url or json.dumps([server.command, *server.args])
        raise ConfigError(
            f"servers.{server.name}: {location:.200} did not list its tools: {root_cause(error)}. Check "
            "that the server runs."
        ) from error


def root_cause(error: BaseException) -> str:
    """Return the class and message of an error; for an exception group, those of the first error inside it."""
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
        raise ConfigError("The mcp tool needs the MCP SDK; install it with: pip install 'skyrl-train[mcp]'.") from error
    return mcp
