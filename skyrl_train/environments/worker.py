"""A worker process of a `WorkerPool`. It holds environments and answers one call at a time.

The wire consists of frames over the worker's original stdin and stdout. A frame is a header of 12 bytes, which holds
the length of the body and the number of the call (big-endian, 4 and 8 bytes), followed by the body in JSON. Calls are
pipelined. A worker answers them one at a time and in order, and writes each answer before it begins the next call.

An environment may fork, and it may write to any descriptor of its process. Only the worker itself may use the wire. A
forked child loses the wire's descriptors, and it exits when it tries to answer. The pool validates every reply.

The parent process of each worker limits its output and kills the processes that it started: process_supervisor.py.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import struct
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from skyrl_train.data.json_values import find_non_json_value, json_default
from skyrl_train.data.messages import Message
from skyrl_train.environments import registry
from skyrl_train.environments.base import validate_messages, validate_step_output
from skyrl_train.environments.process_supervisor import fork_supervised
from skyrl_train.environments.user_registrations import load_user_registrations
from skyrl_train.errors import ConfigError, DataError, EnvironmentFailure

HEADER = struct.Struct("!IQ")
"""Header of a frame: size of the body in bytes, and the number of the call."""
MAX_FRAME_BYTES = 64 * 2**20
"""Maximum size of one message. A larger observation fails its episode."""
MAX_KIND_CHARS = 100
"""Maximum characters of a failure kind, because each kind becomes the name of a metric."""
MAX_DETAIL_CHARS = 500
"""Maximum characters of an error message. The rest is dropped."""
MAX_CONFIG_ERROR_CHARS = 20 * MAX_DETAIL_CHARS
"""Maximum characters of a ConfigError, which may list settings or name a long path."""
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
"""Folder of this package. A source checkout is not in one of the library folders."""


def encode_message(message: Mapping[str, Any], default: Callable[[Any], Any] = json_default) -> bytes:
    """Encode a message as JSON in ASCII, so that lone surrogates are preserved.

    Args:
        message: Message to encode.
        default: Converts values that JSON cannot represent; see `json.dumps`.

    Raises:
        EnvironmentFailure: The encoded message is larger than MAX_FRAME_BYTES (kind "too_large").
        TypeError: The message contains a value that `default` cannot convert.
        ValueError: The message contains a circular reference.
        RecursionError: The message is nested too deeply.
    """
    body = json.dumps(message, default=default).encode("ascii")
    if len(body) > MAX_FRAME_BYTES:
        raise EnvironmentFailure("too_large", f"a message has {len(body)} bytes; at most {MAX_FRAME_BYTES} are allowed")
    return body


def encode_frame(number: int, body: bytes) -> bytes:
    """Return the frame of an encoded message: its header followed by `body`.

    Args:
        number: Number of the call that the message is or answers.
        body: The encoded message; see `encode_message`.
    """
    return HEADER.pack(len(body), number) + body


class _EpisodeServer:
    """A server that answers calls with the environments of this process.

    Args:
        env_configs: Settings of each environment, by name.
        checks: True if environments are checked before their first episode.
    """

    def __init__(self, env_configs: Mapping[str, Any], checks: bool = False):
        self.env_configs = env_configs
        self.environments: dict[int, Any] = {}
        self._checked: set[str] | None = set() if checks else None
        """Names of the environments that were checked here, or None if the driver checks them."""

    def handle_call(self, call: dict[str, Any]) -> bytes:
        """Run a call and return its encoded reply. Any exception, including SystemExit, becomes an error reply."""
        try:
            reply = getattr(self, call.pop("op"))(**call)
            if problem := find_non_json_value(reply, to_jsonable):
                raise EnvironmentFailure("bad_step_output", f"the value that it returned contains {problem}")
            return encode_message(reply, default=to_jsonable)
        except BaseException as error:
            return encode_message(_error_reply(error))

    def start(self, id: int, env_class: str, messages: list[Message], extras: dict[str, Any]) -> dict[str, Any]:
        """Construct an environment, call its `init` and return its opening messages and metadata."""
        try:
            if self._checked is not None and env_class not in self._checked:
                registry.check_environments([env_class], self.env_configs)
                self._checked.add(env_class)
            environment = registry.make(env_class, env_config=self.env_configs.get(env_class), extras=extras)
        except DataError:
            raise  # concerns only this row
        except ConfigError as error:
            raise _EnvironmentUnavailable(*error.args) from error
        self.environments[id] = environment
        opened = environment.init(messages)
        if not isinstance(opened, tuple | list) or len(opened) != 2:
            raise EnvironmentFailure(
                "bad_step_output", f"init returned {type(opened).__name__}, not (messages, metadata)"
            )
        metadata = opened[1] or {}
        if not isinstance(metadata, Mapping):
            detail = f"init returned metadata that is {type(metadata).__name__}, not a dict"
            raise EnvironmentFailure("bad_step_output", detail)
        return {
            "messages": validate_messages(opened[0]),
            "metadata": metadata,
            "replayable": bool(getattr(environment, "replayable", True)),
        }

    def step(self, id: int, text: str) -> dict[str, Any]:
        """Call an environment's `step` and return its validated output."""
        environment = self.environments[id]
        output = validate_step_output(environment.step(text))
        if output.done and hasattr(environment, "get_metrics"):  # a method of SkyRL-Gym
            output.metadata |= environment.get_metrics() or {}
        return asdict(output)

    def close(self, id: int) -> dict[str, Any]:
        """Close and forget an environment."""
        environment = self.environments.pop(id, None)
        if environment is not None:
            environment.close()
        return {}


def to_jsonable(value: Any) -> Any:
    """Convert a value like `json_default`, or to its repr. Metadata is informational and must not fail an episode."""
    try:
        return json_default(value)
    except TypeError:
        return f"{value!r:.{MAX_DETAIL_CHARS}}"


class _EnvironmentUnavailable(ConfigError):
    """An error that prevents every episode of an environment, such as an unknown name or invalid settings."""


def _error_reply(error: BaseException) -> dict[str, Any]:
    """Return an error reply of bounded size for an exception, even if its `__str__` raises."""
    kind, fatal = type(error).__name__, isinstance(error, _EnvironmentUnavailable)
    try:
        if isinstance(error, EnvironmentFailure):
            kind = str(error.kind)
            detail = str(error.detail)[:MAX_DETAIL_CHARS]
        elif isinstance(error, ConfigError):
            kind, detail = "ConfigError", str(error)[:MAX_CONFIG_ERROR_CHARS]
        else:
            detail = format_exception(error)
    except BaseException as unreadable:
        detail = f"its message cannot be read: {type(unreadable).__name__}"
    return {"error": kind[: MAX_KIND_CHARS + 1], "detail": detail, "fatal": fatal}


def format_exception(error: BaseException) -> str:
    """Return an exception's message and source line: the innermost line of the user's code, if there is one.

    Otherwise the line is the innermost one outside of libraries, which is in a built-in environment.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own_frames = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, "<"))]
    user_frames = [frame for frame in own_frames if not frame.filename.startswith(_PACKAGE)]
    shown = (user_frames or own_frames or frames)[-1:]
    location = "".join(f" ({frame.filename}:{frame.lineno} in {frame.name})" for frame in shown)
    return f"{str(error)[:MAX_DETAIL_CHARS]}{location}"


class _Wire:
    """The worker's end of the wire. A process that the worker has forked exits when it tries to use the wire."""

    def __init__(self) -> None:
        """Take over stdin and stdout. Environments that read or print use /dev/null and stderr instead."""
        self._owner = os.getpid()
        self._source, self._sink = os.fdopen(os.dup(0), "rb"), os.dup(1)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(2, 1)
        os.close(null)
        assert isinstance(sys.stdout, io.TextIOWrapper)
        sys.stdout.reconfigure(line_buffering=True)  # a killed process does not flush its buffers
        os.register_at_fork(after_in_child=self._disconnect)

    def _disconnect(self) -> None:
        """Replace the wire's descriptors by /dev/null. The numbers stay in use, so the child cannot reuse them."""
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (self._source.fileno(), self._sink):
            os.dup2(null, descriptor, inheritable=False)
        os.close(null)

    def receive(self) -> tuple[int, dict[str, Any]] | None:
        """Return the next call's number and the call, or None once the pool has closed the wire. Blocks."""
        self._end_fork()
        header = self._source.read(HEADER.size)
        if len(header) < HEADER.size:
            return None
        size, number = HEADER.unpack(header)
        return number, json.loads(self._source.read(size))

    def send(self, number: int, body: bytes) -> None:
        """Send the encoded reply `body` to the call with this number."""
        self._end_fork()
        frame = encode_frame(number, body)
        while frame:
            frame = frame[os.write(self._sink, frame) :]

    def _end_fork(self) -> None:
        """Exit if this process is a fork of the worker. A fork in C calls no handler and may return here."""
        if os.getpid() != self._owner:
            os._exit(1)


def run_worker() -> None:
    """Run a worker process until the pool closes the wire.

    The command-line arguments are the pool's process id and, optionally, the pool's `log_file`.
    """
    fork_supervised(int(sys.argv[1]), *sys.argv[2:])
    wire = _Wire()
    first = wire.receive()
    if first is None:
        return
    number, hello = first
    if hello["pythonpath"] is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = hello["pythonpath"]
    try:
        for plugin in hello["plugins"]:
            importlib.import_module(plugin)
        load_user_registrations(hello["own"])
    except BaseException as error:
        reply = _error_reply(error)
        wire.send(number, encode_message(reply | {"detail": f"{reply['error']}: {reply['detail']}"}))
        return
    wire.send(number, encode_message({}))
    environments = _EpisodeServer(hello["env_configs"], hello["checks"])
    while (received := wire.receive()) is not None:
        number, call = received
        wire.send(number, environments.handle_call(call))
    # skip the interpreter's shutdown, which an environment's threads or exit handlers could block
    os._exit(0)


if __name__ == "__main__":
    run_worker()
