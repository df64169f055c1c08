"""Sandbox for programs that a model wrote: it isolates them from this machine's files, networks and resources (Linux).

Every run is a separate process tree with these layers of isolation:

- an unprivileged user, because bubblewrap started as root is no security boundary;
- bubblewrap, with new namespaces of every kind, a read-only /usr, a small /tmp and an empty environment;
- limits of each process inside, including bubblewrap's own, and of all processes together (`sandbox_monitor`);
- a seccomp filter (`seccomp_filter`).

No process of a run is alive when `run` returns, and none runs between two blocks of a session.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import random
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Self

from skyrl_train.config.environment import SandboxConfig
from skyrl_train.environments.tools.sandbox_monitor import SandboxLimit, SandboxMonitor
from skyrl_train.environments.tools.sandbox_streams import POLL_INTERVAL_S, CodeBlock, OutputStreams
from skyrl_train.environments.tools.seccomp_filter import build_filter
from skyrl_train.errors import ConfigError, EnvironmentFailure
from skyrl_train.terminal import print_stderr

log = logging.getLogger(__name__)

PYTHON = "/usr/bin/python3"
"""The Python interpreter inside the sandbox. It is the system's, because only /usr is visible there."""
KINDS = ("bubblewrap", "unsafe_local")
KEY = "environment.skyrl_gym.sandbox"
CONSENT = "i_know_this_runs_model_code_on_this_machine"
KILL_TIMEOUT_S = 10.0
"""Time that a killed process tree has to end."""
START_TIMEOUT_S = 60.0
"""Time that bubblewrap has to create a sandbox on a busy machine; it does not count as the program's time."""
TOKEN_BYTES = 16
_SCRATCH_UID = 2_000_000_000
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
_SESSION_PROGRAM = Path(__file__).with_name("session_in_sandbox.py")


@dataclass(frozen=True)
class Limits:
    """Limits of one run. Exceeding a limit kills the run or fails the system call that asks for more."""

    wall_s: float = 10.0
    cpu_s: float = 10.0
    """Processor seconds of one process, rounded up to whole seconds."""
    memory_mb: int = 1024
    """Address space of one process, and memory of all processes together, in MiB."""
    processes: int = 16
    """Number of concurrent processes and threads."""
    file_mb: int = 64
    """Size of one file, and total size of /tmp, in MiB."""
    files: int = 10_000
    """Number of files, folders and links in /tmp."""
    open_files: int = 64
    output: int = 65536
    """Bytes of stdout, and bytes of stderr; a program that writes more to one of them is killed."""


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """The output of a run, and the way it ended."""

    stdout: str
    stderr: str
    returncode: int
    """The exit status; 128 + N if signal N ended the program, -9 if the sandbox killed it."""
    timed_out: bool = False
    """True if the run exceeded the limit on wall time or on processor time."""
    killed_by: SandboxLimit | None = None
    """The limit for which the run was killed; None if it was not killed. MEMORY is the memory of all processes."""


class Sandbox:
    """A sandbox that runs programs isolated from this machine.

    `check` tests that the sandbox works, before a run starts; `run` never falls back to another kind.

    Args:
        limits: Limits of every run; None for the defaults.
        kind: "bubblewrap", or "unsafe_local" to run programs without isolation as the current user, each in its own
            folder. The latter is for trusted code on machines without bubblewrap.

    Raises:
        ConfigError: `kind` is unknown.
    """

    def __init__(self, limits: Limits | None = None, kind: str = "bubblewrap"):
        if kind not in KINDS:
            raise ConfigError(f"{KEY}.kind={kind!r} is not a known kind of sandbox; choose one of: {', '.join(KINDS)}.")
        self.limits = limits or Limits()
        self.kind = kind

    @classmethod
    def from_config(cls, settings: Mapping[str, Any] | None, limits: Limits | None = None) -> Sandbox:
        """Return the sandbox that the section `environment.skyrl_gym.sandbox` describes.

        Args:
            settings: The section; None for its defaults.
            limits: Limits of every run; None for the defaults.

        Raises:
            ConfigError: The kind is unknown, or it is unsafe_local and the key that consents to it is not set.
        """
        config = SandboxConfig(**(settings or {}))
        sandbox = cls(limits, config.kind)
        if sandbox.kind == "unsafe_local" and not config.i_know_this_runs_model_code_on_this_machine:
            raise ConfigError(
                f"{KEY}.kind=unsafe_local runs what a model writes on this machine, with your files and your network. "
                f"Install bubblewrap instead, or set {KEY}.{CONSENT}=true as well."
            )
        return sandbox

    def check(self) -> None:
        """Check the sandbox with a program that tries to break out of it. For unsafe_local, only print a warning.

        Raises:
            ConfigError: The sandbox does not start or does not isolate the program; the message says what to install.
        """
        if self.kind == "unsafe_local":
            print_stderr(_BANNER)
            return
        with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
            os.chmod(folder, 0o755)
            secret = Path(folder, "secret")
            secret.write_text("outside the sandbox")
            port = server.getsockname()[1]
            limits = Limits(wall_s=60.0, files=8)
            probe = [PYTHON, "-I", "-c", _ESCAPE_PROBE, str(secret), str(port), str(limits.processes)]
            try:
                escape = self.run({}, probe, limits=limits)
                many_files = self.run({}, [PYTHON, "-I", "-c", _FILE_LIMIT_PROBE], limits=limits)
            except (EnvironmentFailure, OSError) as error:
                raise ConfigError(_refusal(f"it does not start: {error}")) from error
        if many_files.killed_by != SandboxLimit.FILES:
            raise ConfigError(_refusal("its number of files is not limited"))
        if escape.returncode != 0 or escape.stdout != "closed\n":
            raise ConfigError(
                _refusal(f"a probe inside it ended with {escape.returncode}: {escape.stdout}{escape.stderr}")
            )

    def run(
        self,
        files: Mapping[str, str | bytes],
        command: Sequence[str],
        stdin: bytes = b"",
        limits: Limits | None = None,
    ) -> SandboxResult:
        """Run a command in the sandbox, wait for its end and return its output. Thread-safe.

        Args:
            files: Relative path -> contents; the command starts in the folder that contains these files.
            command: The program and its arguments.
            stdin: Standard input of the program.
            limits: Limits of this run; None for the sandbox's own.

        Raises:
            EnvironmentFailure: The sandbox cannot be created (kind "sandbox").
            ConfigError: A program that the sandbox needs is not installed.
            ValueError: A name in `files` is absolute or leads out of the folder.
        """
        limits = limits or self.limits
        with _SandboxProcess(self.kind, files, command, limits, stdin) as running:
            return running.wait_for_result(time.monotonic() + limits.wall_s)

    def session(self, limits: Limits | None = None) -> Session:
        """Start a Python process that keeps its variables between blocks of code; use it in a `with` statement.

        Args:
            limits: Limits of the process; None for those of the sandbox.

        Raises:
            EnvironmentFailure: The sandbox cannot be created (kind "sandbox").
            ConfigError: A program that the sandbox needs is not installed.
        """
        return Session(self.kind, limits or self.limits)


class Session:
    """A Python process in a sandbox that runs blocks of code one after the other and keeps its variables between them.

    Args:
        kind: Kind of sandbox, as in `Sandbox`.
        limits: Limits of each block; the processor time of the whole session is limited to `CPU_S`.
    """

    CPU_S = 600.0
    """Maximum processor seconds of a whole session."""

    def __init__(self, kind: str, limits: Limits):
        self._limits = limits
        self._done, done = os.pipe()
        self._code, code = -1, -1
        try:
            code, self._code = os.pipe()
            command = [PYTHON, "-I", "-u", _SESSION_PROGRAM.name, str(done)]
            files = {_SESSION_PROGRAM.name: _SESSION_PROGRAM.read_bytes()}
            session_limits = replace(limits, cpu_s=self.CPU_S)
            self._running: _SandboxProcess | None = _SandboxProcess(
                kind, files, command, session_limits, code, inherited_fds=(done,)
            )
        except BaseException:
            self._close_pipes()
            raise
        finally:
            os.close(done)
            if code >= 0:
                os.close(code)

    @property
    def alive(self) -> bool:
        """True until the session is closed, or a block is killed or ends the process, which loses all variables."""
        return self._running is not None

    def execute(self, code: str, wall_s: float | None = None) -> SandboxResult:
        """Run one block of code, wait for its end and return its output.

        Processes that the block started are killed at its end. A block that exceeds a limit or exits the process ends
        the session.

        Args:
            code: Python source; its variables stay for later blocks.
            wall_s: Maximum seconds of this block; None for the session's limit.

        Raises:
            RuntimeError: The session has ended.
            EnvironmentFailure: The sandbox failed (kind "sandbox").
        """
        if self._running is None:
            raise RuntimeError("The session has ended; start a new one.")
        # A new random token marks the end of each block, so that output of earlier blocks cannot end a later one.
        body = code.encode("utf-8", "replace")
        token = secrets.token_bytes(TOKEN_BYTES)
        block = CodeBlock(len(body).to_bytes(8, "big") + token + body, token, self._code, self._done)
        self._running.resume()
        result = self._running.wait_for_result(time.monotonic() + (wall_s or self._limits.wall_s), block)
        if self._running.ended:
            self.close()
        return result

    def close(self) -> None:
        """Kill the process and all processes that it started. Safe to call twice."""
        running, self._running = self._running, None
        if running is not None:
            running.end()
            self._close_pipes()

    def _close_pipes(self) -> None:
        for fd in (self._done, self._code):
            if fd >= 0:
                os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _SandboxProcess:
    """The process tree of one run or session, from its start to `end`."""

    def __init__(
        self,
        kind: str,
        files: Mapping[str, str | bytes],
        command: Sequence[str],
        limits: Limits,
        stdin: bytes | int,
        inherited_fds: Sequence[int] = (),
    ):
        """Start the program; `stdin` is its input, as bytes or as a descriptor, and it inherits `inherited_fds`."""
        self.ended = False
        self._limits = limits
        self._is_isolated = kind == "bubblewrap"
        self._report = b""
        """Bubblewrap's reports about its first process and, at the end, about the program's exit."""
        self._init = -1
        """Pidfd of the first process inside, with which all others end; -1 if that process did not start."""
        self._monitor: SandboxMonitor | None = None
        with ExitStack() as stack, ExitStack() as at_end:
            source = _memory_file(stdin, stack) if isinstance(stdin, bytes) else stdin
            if self._is_isolated:
                self._status, status = os.pipe()
                held, self._release = os.pipe()
                for fd, owner in ((self._status, at_end), (status, stack), (held, stack), (self._release, at_end)):
                    owner.callback(os.close, fd)
                arguments, fds = _bubblewrap(files, command, limits, status, held, stack)
                options: dict[str, Any] = {"cwd": "/", "env": {}, **unprivileged_user()}
            else:
                folder = at_end.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
                arguments, fds = _local(folder, files, command, limits), ()
                options = {"cwd": folder, "env": _ENVIRONMENT | {"HOME": folder}}
            self._process = subprocess.Popen(
                arguments,
                stdin=source,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(*fds, *inherited_fds),
                start_new_session=True,
                **options,
            )
            self._at_end = at_end.pop_all()
        assert self._process.stdout is not None and self._process.stderr is not None
        self._at_end.enter_context(self._process.stdout)
        self._at_end.enter_context(self._process.stderr)
        if self._is_isolated:
            try:
                self._start(options)
            except BaseException:
                self.end()
                raise

    def _start(self, options: Mapping[str, Any]) -> None:
        """Limit the first process inside, whose limits all others inherit, and let it start the program.

        If bubblewrap fails earlier, `wait_for_result` raises with the reason.
        """
        if (pid := self._first_process()) is None:
            return
        try:
            self._init = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        self._at_end.callback(os.close, self._init)
        self._monitor = SandboxMonitor.wait_for(pid, self._init, START_TIMEOUT_S, self._at_end)
        if self._monitor is None:
            return
        limiter = [_installed("prlimit"), "--pid", str(pid), *_prlimit(self._limits)]
        # run as the sandbox's own user, which needs no capability for this
        limited = subprocess.run(limiter, stdin=subprocess.DEVNULL, capture_output=True, text=True, **options)
        if limited.returncode:
            raise EnvironmentFailure(
                "sandbox", f"prlimit could not set the limits of the sandbox: {limited.stderr.strip()}"
            )
        with contextlib.suppress(BrokenPipeError):
            os.write(self._release, b".")

    def _first_process(self) -> int | None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while b"\n" not in self._report:
            if not select.select([self._status], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return None
            if not (piece := os.read(self._status, 4096)):
                return None
            self._report += piece
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return int(json.loads(self._report.partition(b"\n")[0])["child-pid"])
        return None

    def wait_for_result(self, deadline: float, block: CodeBlock | None = None) -> SandboxResult:
        """Read output until the program ends or must be killed, or until `block` is done, and return the result.

        After a block, the program is frozen until `resume`.
        """
        streams = OutputStreams(self._process, self._limits.output)
        killed_by = streams.read(deadline, self._exceeded, block)
        if streams.is_block_done:
            frozen = self._monitor is None or self._monitor.freeze()
            streams.drain()
            if not frozen:
                self.end()
            return SandboxResult(*streams.texts(), 0)
        killed_by = killed_by or self._wait(deadline)
        returncode = self.end()
        stdout, stderr = streams.texts()
        if self._is_isolated and self._monitor is None:
            raise EnvironmentFailure("sandbox", stderr.strip() or "bubblewrap created no sandbox")
        if killed_by is not None:
            return SandboxResult(stdout, stderr, -signal.SIGKILL, killed_by is SandboxLimit.WALL, killed_by)
        if self._is_isolated and b"exit-code" not in self._report:
            raise EnvironmentFailure("sandbox", stderr.strip() or f"bubblewrap ended with {returncode}")
        returncode = 128 - returncode if returncode < 0 else returncode
        if returncode == 128 + signal.SIGXCPU:
            return SandboxResult(stdout, stderr, returncode, True, SandboxLimit.CPU)
        return SandboxResult(stdout, stderr, returncode)

    def resume(self) -> None:
        """Resume a program that was frozen at the end of a block."""
        if self._monitor is not None:
            self._monitor.resume()

    def _exceeded(self) -> SandboxLimit | None:
        """Return the limit that all processes together exceed now, or None."""
        if self._monitor is None:
            return None
        return self._monitor.exceeded_limit(self._limits.memory_mb * 2**20, self._limits.files)

    def _wait(self, deadline: float) -> SandboxLimit | None:
        """Wait for the process's end and return None, or return the limit for which it must be killed."""
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, min(POLL_INTERVAL_S, deadline - time.monotonic())))
                return None
            if time.monotonic() > deadline:
                return SandboxLimit.WALL
            if exceeded := self._exceeded():
                return exceeded

    def end(self) -> int:
        """Kill all remaining processes, wait for their end and return the exit status. Safe to call twice."""
        if self.ended:
            return self._process.returncode
        self.ended = True
        with self._at_end:
            with contextlib.suppress(ProcessLookupError):
                if self._init >= 0:
                    signal.pidfd_send_signal(self._init, signal.SIGKILL)
                elif not self._is_isolated or self._process.poll() is None:
                    os.killpg(self._process.pid, signal.SIGKILL)
            # the kernel kills all other processes of its namespace before the first process ends
            if self._init >= 0 and not select.select([self._init], [], [], KILL_TIMEOUT_S)[0]:
                log.warning("A killed sandbox has not ended within %g s; its processes may still run.", KILL_TIMEOUT_S)
            try:
                self._process.wait(KILL_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            if self._is_isolated:
                os.set_blocking(self._status, False)
                with contextlib.suppress(BlockingIOError):
                    self._report += os.read(self._status, 4096)
        return self._process.returncode

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.end()


def _bubblewrap(
    files: Mapping[str, str | bytes], command: Sequence[str], limits: Limits, status: int, held: int, stack: ExitStack
) -> tuple[list[str], tuple[int, ...]]:
    """Return bubblewrap's command line and the descriptors that it uses.

    Bubblewrap reports on the descriptor `status`, and starts the program only when it can read a byte from `held`.
    """
    program = _installed("bwrap")
    rules = _memory_file(build_filter(), stack)
    fds = [status, held, rules]
    links = [
        ["--symlink", f"usr/{name}", f"/{name}"] for name in ("bin", "lib", "lib64") if Path("/usr", name).exists()
    ]
    copies = []
    for name, content in files.items():
        fds.append(_memory_file(content.encode() if isinstance(content, str) else content, stack))
        copies += ["--perms", "0644", "--file", str(fds[-1]), f"/tmp/{_inner_name(name)}"]
    return [
        program,
        *("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session", "--clearenv"),
        *("--cap-drop", "ALL", "--uid", "1000", "--gid", "1000", "--hostname", "sandbox", "--ro-bind", "/usr", "/usr"),
        *(word for link in links for word in link),
        *(
            "--proc",
            "/proc",
            "--dev",
            "/dev",
            "--dev-bind",
            "/dev/full",
            "/dev/zero",
        ),  # /dev/full reads as endlessly, but cannot be mapped into memory
        *("--size", str(limits.file_mb * 2**20), "--tmpfs", "/tmp", *copies),
        # both are in memory and have no size limit, so they become read-only
        *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"),
        *(word for name, value in _ENVIRONMENT.items() for word in ("--setenv", name, value)),
        *("--seccomp", str(rules), "--json-status-fd", str(status), "--block-fd", str(held), "--"),
        *command,
    ], tuple(fds)


def _installed(name: str) -> str:
    program = shutil.which(name)
    if sys.platform != "linux" or program is None:
        raise ConfigError(_refusal(f"the program {name} is not installed"))
    return program


def _local(folder: str, files: Mapping[str, str | bytes], command: Sequence[str], limits: Limits) -> list[str]:
    for name, content in files.items():
        path = Path(folder, _inner_name(name))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    program = [sys.executable if word == PYTHON else word for word in command]
    limiter = shutil.which("prlimit")
    # --nproc would count all processes of the user, so it is left out
    options = [option for option in _prlimit(limits) if not option.startswith("--nproc")]
    return [limiter, *options, "--", *program] if limiter else program


def _prlimit(limits: Limits) -> list[str]:
    cpu = max(1, -int(-limits.cpu_s // 1))
    return [
        f"--nproc={limits.processes}",
        f"--as={limits.memory_mb * 2**20}",
        f"--cpu={cpu}:{cpu + 1}",
        f"--fsize={limits.file_mb * 2**20}",
        f"--nofile={limits.open_files}",
        "--core=0",
    ]


def _inner_name(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise ValueError(
            f"The file name {name!r} does not stay inside the sandbox's folder; use a relative path without '..'."
        )
    return str(path)


def _memory_file(content: bytes, stack: ExitStack) -> int:
    """Return a read-only descriptor of `content`; `stack` closes it."""
    if not hasattr(os, "memfd_create"):
        file = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        file.write(content)
        file.seek(0)
        return file.fileno()
    fd = os.memfd_create("file", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    stack.callback(os.close, fd)
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(fd, rest) :]
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return fd


def unprivileged_user() -> dict[str, Any]:
    """Return Popen options that turn root into a user that owns nothing.

    Every call draws another user, because the kernel counts processes per user.
    """
    if os.geteuid() != 0:
        return {}
    ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    top = max(int(first) + int(count) for first, _, count in ranges)
    lowest = min(_SCRATCH_UID, top // 2)
    if lowest < 1000:
        raise ConfigError(_refusal("root is the only user here; run as another user"))
    user = random.SystemRandom().randrange(lowest, min(top, lowest + 100_000_000) - 1)
    return {"user": user, "group": user, "extra_groups": []}


def _refusal(reason: str) -> str:
    return (
        f"{KEY}.kind='bubblewrap' cannot run programs here: {reason.strip()[:1000]}. It needs Linux that lets users "
        "create user namespaces, bubblewrap 0.8 or later (Debian, Ubuntu: apt-get install bubblewrap), "
        f"/usr/bin/python3, and pip install 'skyrl-train[sandbox]'. "
        f"Without a sandbox: {KEY}.kind=unsafe_local and {KEY}.{CONSENT}=true."
    )


_ESCAPE_PROBE = """
import os, resource, socket, sys
out = [name for name in (sys.argv[1], "/etc/shadow", "/root", "/home") if os.path.exists(name)]
try:
    socket.create_connection(("127.0.0.1", int(sys.argv[2])), 5)
    out.append("network")
except OSError:
    pass
if os.getuid() == 0 or len(os.listdir("/proc/self/fd")) > 4 or open("/proc/1/environ").read():
    out.append("uid, descriptors or environment")
if resource.getrlimit(resource.RLIMIT_NPROC)[1] != int(sys.argv[3]):
    out.append("limits")
if open("/proc/1/limits").read() != open("/proc/self/limits").read():
    out.append("limits of the first process")
print("open: " + ", ".join(out) if out else "closed")
"""

_FILE_LIMIT_PROBE = """
import os, time
for number in range(100):
    os.mkdir(f"/tmp/{number}")
time.sleep(60)
"""

_BANNER = f"""
!!! {"=" * 100}
!!! {KEY}.kind=unsafe_local: code that the model writes RUNS ON THIS MACHINE
!!! with the rights of this user: its files, its network, its keys. Install bubblewrap to isolate this code.
!!! {"=" * 100}
"""
