"""What a tool is, and the box that holds an episode's tools and lets nothing a model writes get past it."""

from __future__ import annotations

import asyncio
import math
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

from skyrl_train.errors import ConfigError, EnvironmentFailure

CLOSE_S = 5.0
"""For all tools of a box to close."""
GRACE_S = 1.0
"""For a cancelled call to let go of the event loop, before the loop is given up."""
MAX_REASON = 500
"""Characters of an exception's message that the model is told."""
HARMFUL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters other than tab and line feed, which terminals obey; lone surrogates, which no tokenizer takes."""
TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


class ToolError(Exception):
    """A call that cannot be answered; the message is what the model is told."""


class Tool(ABC):
    """Something a model may call in an episode. One object serves one episode, one call at a time.

    `parameters` is the JSON schema of an object. `call` runs on an event loop of the episode's own: what would block it
    goes through `asyncio.to_thread`. Arguments are untrusted; they have the names and types that `parameters` says.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    deadline_s: float = 30.0
    """Of one call, in seconds of wall time."""
    max_output: int = 8192
    """Characters of a result that reach the model; the middle of a longer one is cut out."""
    from_row: tuple[str, ...] = ()
    """Settings that a dataset row may give; all others come from configuration alone."""
    sandboxed: bool = False
    """Made with `sandbox=environment.skyrl_gym.sandbox`, besides its own settings."""

    @classmethod  # noqa: B027 (most tools need nothing)
    def check(cls, **settings: Any) -> None:
        """Called once when a run starts, with what the tool will be made with.

        Raises ConfigError for settings that cannot work, and for what is missing on this machine.
        """

    @abstractmethod
    async def call(self, arguments: dict[str, Any]) -> str:
        """The result, as text for the model. Raises ToolError with what the model should know."""

    async def close(self) -> None:  # noqa: B027 (most tools hold nothing)
        """Release what the tool holds; called once, at the end of the episode."""

    def schema(self) -> dict[str, Any]:
        """The form in which OpenAI's API and chat templates describe a tool."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a call came to: a text for the model in any case."""

    text: str
    error: str | None = None
    """None, "unknown_tool", "bad_arguments", "timeout", "tool_error" (ToolError), or an exception's class name."""


class ToolBox:
    """The tools of one episode, for environments, which are synchronous.

    Calls run on an event loop in a daemon thread, which the first call starts. A tool that blocks this loop past its
    deadline is given up together with the loop; the other tools go on with a new one.
    """

    def __init__(self, tools: Sequence[Tool]):
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            if tool.name in self._tools:
                raise ConfigError(f"two tools are called {tool.name!r}; give one of them another name.")
            self._tools[tool.name] = tool
        self._used: set[str] = set()
        self._stuck: set[str] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def schemas(self) -> list[dict[str, Any]]:
        """Every tool's `schema()`, in the order they were given."""
        return [tool.schema() for tool in self._tools.values()]

    def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """The result of one call. Whatever a model gets wrong, and whatever a tool raises, is a text too.

        Only EnvironmentFailure and ConfigError pass: no model can cause them, and no model should learn from them.
        """
        tool = self._tools.get(name) if isinstance(name, str) else None
        if tool is None:
            known = ", ".join(self._tools) or "none"
            return ToolResult(harmless(f"There is no tool {name!r:.100}; known tools: {known}."), "unknown_tool")
        if wrong := bad_arguments(tool.parameters, arguments):
            return ToolResult(harmless(f"{tool.name}: {wrong}"), "bad_arguments")
        if tool.name in self._stuck:
            return ToolResult(f"{tool.name} timed out before and is not available any more.", "timeout")
        assert not self._closed, "the tool box is closed"
        self._used.add(tool.name)
        return self._within_deadline(tool, arguments)

    def _within_deadline(self, tool: Tool, arguments: dict[str, Any]) -> ToolResult:
        running = self._submit(_outcome(tool, arguments))
        try:
            return running.result(tool.deadline_s)
        except CancelledError:  # by the tool itself, or a library under it
            return ToolResult(f"{tool.name} failed: it was cancelled.", "CancelledError")
        except TimeoutError:
            running.cancel()
        try:
            self._submit(asyncio.sleep(0)).result(GRACE_S)
        except TimeoutError:
            self._stuck.add(tool.name)
            self._give_up_loop()
        return ToolResult(f"{tool.name} timed out after {tool.deadline_s:g} s.", "timeout")

    def close(self) -> None:
        """Close the tools that were used. Errors in that, and tools that hang in it, are passed over."""
        if self._loop is not None and not self._closed:
            tools = [self._tools[name] for name in self._used - self._stuck]
            closing = self._submit(_close_all(tools))
            try:
                closing.result(CLOSE_S)
            except TimeoutError:
                closing.cancel()
            thread = self._thread
            self._give_up_loop()
            assert thread is not None
            thread.join(GRACE_S)
        self._closed = True

    def _submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_serve, args=(self._loop,), name="tools", daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _give_up_loop(self) -> None:
        """It ends when whatever blocks it does; nobody waits for that."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop = self._thread = None


async def _outcome(tool: Tool, arguments: dict[str, Any]) -> ToolResult:
    """A call's result. Exits are caught too: they would end the loop under the other tools."""
    try:
        text = await tool.call(arguments)
        if not isinstance(text, str):
            raise TypeError(f"{tool.name} returned {type(text).__name__}, not text")
        return ToolResult(cut(harmless(text), tool.max_output))
    except ToolError as error:
        return ToolResult(cut(harmless(str(error)), tool.max_output), "tool_error")
    except (asyncio.CancelledError, EnvironmentFailure, ConfigError):
        raise
    except BaseException as error:
        text = f"{tool.name} failed: {type(error).__name__}: {str(error)[:MAX_REASON]}"
        return ToolResult(harmless(text), type(error).__name__)


async def _close_all(tools: Sequence[Tool]) -> None:
    await asyncio.gather(*(tool.close() for tool in tools), return_exceptions=True)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """The thread of a box: the loop until it is stopped, then what is left on it is cancelled."""
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=GRACE_S))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


def harmless(text: str) -> str:
    """`text` with control characters replaced, so that it can be tokenised, logged and shown on a terminal."""
    return HARMFUL.sub("\ufffd", text.replace("\r\n", "\n"))


def cut(text: str, limit: int) -> str:
    """`text` with its middle left out, and said so, where it has more than `limit` characters."""
    if len(text) <= limit:
        return text
    head = limit - limit // 2
    return f"{text[:head]}\n[... {len(text) - limit} characters left out ...]\n{text[len(text) - limit // 2 :]}"


def bad_arguments(parameters: Mapping[str, Any], arguments: Any) -> str | None:
    """What is wrong with a call's arguments by the first level of a JSON schema: names, and types of values."""
    if not isinstance(arguments, dict):
        return f"arguments must be an object, not {type(arguments).__name__}."
    known: Mapping[str, Any] = parameters.get("properties", {})
    if missing := [name for name in parameters.get("required", ()) if name not in arguments]:
        return f"the argument {missing[0]!r} is missing."
    for name, value in arguments.items():
        if name not in known:
            if parameters.get("additionalProperties") is True:
                continue
            return f"there is no argument {name!r:.100}; there are: {', '.join(known) or 'none'}."
        if not _is_of(known[name], value):
            return f"the argument {name!r} must be of type {known[name]['type']}, not {type(value).__name__}."
        if (choices := known[name].get("enum")) and value not in choices:
            return f"the argument {name!r} must be one of {choices}."
    return None


def _is_of(schema: Mapping[str, Any], value: Any) -> bool:
    names = schema.get("type", [])
    types = [kind for name in ([names] if isinstance(names, str) else names) for kind in TYPES.get(name, (object,))]
    if isinstance(value, bool):  # an int to Python, not to JSON
        return not types or bool in types or object in types
    if isinstance(value, float) and not math.isfinite(value):
        return False
    if isinstance(value, float) and float not in types and int in types:  # 3.0 is an integer to JSON schema
        return value.is_integer()
    return not types or isinstance(value, tuple(types))
