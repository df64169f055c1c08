"""Runs programs that a model wrote, isolated from this machine's files, networks and resources (Linux).

A run is a separate process tree, with these layers: an unprivileged user (bubblewrap started as root is no boundary);
bubblewrap with new namespaces of every kind, a read-only /usr, a small /tmp and an empty environment; limits of each
process, bubblewrap's own inside included, and of all together (`sandbox_monitor`); a seccomp filter (`seccomp_filter`). None of
its processes is alive when `run` returns, and none runs between two blocks of a session.
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
from skyrl_train.environments.tools.sandbox_monitor import SandboxMonitor
from skyrl_train.environments.tools.sandbox_streams import POLL_INTERVAL_S, CodeBlock, OutputStreams
from skyrl_train.environments.tools.seccomp_filter import build_filter
from skyrl_train.errors import ConfigError, EnvironmentFailure
from skyrl_train.terminal import print_stderr

log = logging.getLogger(__name__)

PYTHON = "/usr/bin/python3"
"""The interpreter inside the sandbox: the system's, because only /usr is visible."""
KINDS = ("bubblewrap", "unsafe_local")
KEY = "environment.skyrl_gym.sandbox"
CONSENT = "i_know_this_runs_model_code_on_this_machine"
KILL_TIMEOUT_S = 10.0
"""Time for a killed process tree to end."""
START_TIMEOUT_S = 60.0
"""Time for bubblewrap to make a sandbox on a busy machine; not counted as the program's time."""
TOKEN_BYTES = 16
_SCRATCH_UID = 2_000_000_000
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
_INSIDE = Path(__file__).with_name("session_in_sandbox.py")


@dataclass(frozen=True)
class Limits:
    """Limits of one run; exceeding one kills the run, or fails the system call that asks for more."""

    wall_s: float = 10.0
    cpu_s: float = 10.0
    """Processor time of one process, rounded up to whole seconds."""
    memory_mb: int = 1024
    """Address space of one process, and memory of all of them together."""
    processes: int = 16
    """Concurrent processes, including threads."""
    file_mb: int = 64
    """Size of one file, and total size of /tmp."""
    files: int = 10_000
    """Files, folders and links in /tmp."""
    open_files: int = 64
    output: int = 65536
    """Bytes of stdout and of stderr, each; a program that writes more is killed."""


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """How a run ended."""

    stdout: str
    stderr: str
    returncode: int
    """The exit status; 128 + N if signal N ended the program, -9 if the sandbox killed it."""
    timed_out: bool = False
    """Whether the limit on wall time or on processor time was exceeded."""
    killed_by: str | None = None
    """The limit for which it was killed: "wall", "cpu", "memory" (of all processes), "files" or "output"; else None."""


class Sandbox:
    """Runs programs isolated from this machine.

    `kind` "unsafe_local" instead runs them without isolation as the current user, each in its own folder: for machines
    without bubblewrap and code that is trusted. `check` tests at start that the sandbox works; `run` never falls back
    to another kind.
    """

    def __init__(self, limits: Limits | None = None, kind: str = "bubblewrap"):
        if kind not in KINDS:
            raise ConfigError(f"{KEY}.kind={kind!r} is not one of {', '.join(KINDS)}.")
        self.limits = limits or Limits()
        self.kind = kind

    @classmethod
    def from_config(cls, settings: Mapping[str, Any] | None, limits: Limits | None = None) -> Sandbox:
        """Make the sandbox that `environment.skyrl_gym.sandbox` describes.

        Raises ConfigError for unsafe_local without the second key, which consents to it.
        """
        chosen = SandboxConfig(**(settings or {}))
        sandbox = cls(limits, chosen.kind)
        if sandbox.kind == "unsafe_local" and not chosen.i_know_this_runs_model_code_on_this_machine:
            raise ConfigError(
                f"{KEY}.kind=unsafe_local runs what a model writes on this machine, with your files and your network. "
                f"Install bubblewrap instead, or set {KEY}.{CONSENT}=true as well."
            )
        return sandbox

    def check(self) -> None:
        """Run a program that tries to break out. Raises ConfigError, saying what to install, if the sandbox fails.

        For unsafe_local it only prints a banner.
        """
        if self.kind == "unsafe_local":
            print_stderr(_BANNER)
            return
        with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
            os.chmod(folder, 0o755)
            planted = Path(folder, "planted")
            planted.write_text("here")
            port = server.getsockname()[1]
            limits = Limits(wall_s=60.0, files=8)
            probe = [PYTHON, "-I", "-c", _ESCAPE_PROBE, str(planted), str(port), str(limits.processes)]
            try:
                found = self.run({}, probe, limits=limits)
                crowd = self.run({}, [PYTHON, "-I", "-c", _FILE_LIMIT_PROBE], limits=limits)
            except (EnvironmentFailure, OSError) as error:
                raise ConfigError(_refusal(f"it does not start: {error}")) from error
        if crowd.killed_by != "files":
            raise ConfigError(_refusal("its number of files is not limited"))
        if found.returncode != 0 or found.stdout != "closed\n":
            raise ConfigError(
                _refusal(f"a probe inside it ended with {found.returncode}: {found.stdout}{found.stderr}")
            )

    def run(
        self,
        files: Mapping[str, str | bytes],
        command: Sequence[str],
        stdin: bytes = b"",
        limits: Limits | None = None,
    ) -> SandboxResult:
        """Run `command` in a folder that contains `files` (names relative to it), and wait for its end.

        Thread-safe. Raises EnvironmentFailure("sandbox") if the sandbox itself cannot be created.
        """
        limits = limits or self.limits
        with _SandboxProcess(self.kind, files, command, limits, stdin) as running:
            return running.outcome(time.monotonic() + limits.wall_s)

    def session(self, limits: Limits | None = None) -> Session:
        """A Python process that keeps its variables between blocks of code, for use in a `with` statement."""
        return Session(self.kind, limits or self.limits)


class Session:
    """Runs blocks of code one after the other in one process inside a sandbox."""

    CPU_S = 600.0
    """Processor time of a whole session."""

    def __init__(self, kind: str, limits: Limits):
        self._limits = limits
        self._done, done = os.pipe()
        self._code, code = -1, -1
        try:
            code, self._code = os.pipe()
            command = [PYTHON, "-I", "-u", _INSIDE.name, str(done)]
            inside = {_INSIDE.name: _INSIDE.read_bytes()}
            whole = replace(limits, cpu_s=self.CPU_S)
            self._running: _SandboxProcess | None = _SandboxProcess(kind, inside, command, whole, code, keep=(done,))
        except BaseException:
            self._close_pipes()
            raise
        finally:
            os.close(done)
            if code >= 0:
                os.close(code)

    @property
    def alive(self) -> bool:
        """False once a block was killed or ended the process, which loses all variables."""
        return self._running is not None

    def execute(self, code: str, wall_s: float | None = None) -> SandboxResult:
        """Run one block, for at most `wall_s` or the limit of the session.

        What it started ends with it; if it exceeds a limit or exits the process, so does the session.

        The end of a block is told by a token that is drawn for it: what earlier blocks wrote cannot end a later one.
        """
        if self._running is None:
            raise RuntimeError("the session has ended")
        body = code.encode("utf-8", "replace")
        token = secrets.token_bytes(TOKEN_BYTES)
        block = CodeBlock(len(body).to_bytes(8, "big") + token + body, token, self._code, self._done)
        self._running.resume()
        outcome = self._running.outcome(time.monotonic() + (wall_s or self._limits.wall_s), block)
        if self._running.ended:
            self.close()
        return outcome

    def close(self) -> None:
        """Kill the process and everything that it started. Safe to call twice."""
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
    """One process tree, from its start to `end`."""

    def __init__(
        self,
        kind: str,
        files: Mapping[str, str | bytes],
        command: Sequence[str],
        limits: Limits,
        stdin: bytes | int,
        keep: Sequence[int] = (),
    ):
        """`stdin` is the program's input, as bytes or as a descriptor; `keep` are descriptors that it inherits."""
        self.ended = False
        self._limits = limits
        self._is_isolated = kind == "bubblewrap"
        self._report = b""
        """What bubblewrap reported about its first process and, at the end, about the program's exit."""
        self._init = -1
        """A descriptor of the first process inside, with which all others end; -1 if it did not start."""
        self._view: SandboxMonitor | None = None
        with ExitStack() as stack, ExitStack() as at_end:
            source = _memory_file(stdin, stack) if isinstance(stdin, bytes) else stdin
            if self._is_isolated:
                self._status, status = os.pipe()
                held, self._release = os.pipe()
                for fd, owner in ((self._status, at_end), (status, stack), (held, stack), (self._release, at_end)):
                    owner.callback(os.close, fd)
                arguments, fds = _bubblewrap(files, command, limits, status, held, stack)
                options: dict[str, Any] = {"cwd": "/", "env": {}, **_unprivileged_user()}
            else:
                folder = at_end.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
                arguments, fds = _local(folder, files, command, limits), ()
                options = {"cwd": folder, "env": _ENVIRONMENT | {"HOME": folder}}
            self._process = subprocess.Popen(
                arguments,
                stdin=source,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(*fds, *keep),
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
        """Limit the first process inside, from which all others inherit, and let it start the program.

        If bubblewrap fails before, `outcome` tells why.
        """
        if (pid := self._first_process()) is None:
            return
        try:
            self._init = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        self._at_end.callback(os.close, self._init)
        self._view = SandboxMonitor.wait_for(pid, self._init, START_TIMEOUT_S, self._at_end)
        if self._view is None:
            return
        limiter = [_installed("prlimit"), "--pid", str(pid), *_prlimit(self._limits)]
        # as the sandbox's own user, who needs no capability for it
        limited = subprocess.run(limiter, stdin=subprocess.DEVNULL, capture_output=True, text=True, **options)
        if limited.returncode:
            raise EnvironmentFailure("sandbox", f"no limits could be set: {limited.stderr.strip()}")
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

    def outcome(self, deadline: float, block: CodeBlock | None = None) -> SandboxResult:
        """Read until the program ends or must be killed, or until `block` is done, which leaves it frozen."""
        streams = OutputStreams(self._process, self._limits.output)
        killed_by = streams.read(deadline, self._exceeded, block)
        if streams.is_block_done:
            frozen = self._view is None or self._view.freeze()
            streams.drain()
            if not frozen:
                self.end()
            return SandboxResult(*streams.texts(), 0)
        killed_by = killed_by or self._wait(deadline)
        returncode = self.end()
        stdout, stderr = streams.texts()
        if self._is_isolated and self._view is None:
            raise EnvironmentFailure("sandbox", stderr.strip() or "bubblewrap made no sandbox")
        if killed_by is not None:
            return SandboxResult(stdout, stderr, -signal.SIGKILL, killed_by == "wall", killed_by)
        if self._is_isolated and b"exit-code" not in self._report:
            raise EnvironmentFailure("sandbox", stderr.strip() or f"bubblewrap ended with {returncode}")
        returncode = 128 - returncode if returncode < 0 else returncode
        if returncode == 128 + signal.SIGXCPU:
            return SandboxResult(stdout, stderr, returncode, True, "cpu")
        return SandboxResult(stdout, stderr, returncode)

    def resume(self) -> None:
        """Let a program go on that a finished block left frozen."""
        if self._view is not None:
            self._view.resume()

    def _exceeded(self) -> str | None:
        """The limit on all processes together for which the program must be killed now, if any."""
        if self._view is None:
            return None
        return self._view.exceeded_limit(self._limits.memory_mb * 2**20, self._limits.files)

    def _wait(self, deadline: float) -> str | None:
        """Wait for the process's end: None; or the limit for which it must be killed."""
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, min(POLL_INTERVAL_S, deadline - time.monotonic())))
                return None
            if time.monotonic() > deadline:
                return "wall"
            if exceeded := self._exceeded():
                return exceeded

    def end(self) -> int:
        """Kill all processes that are left, wait for their end and return the exit status. Safe to call twice."""
        if self.ended:
            return self._process.returncode
        self.ended = True
        with self._at_end:
            with contextlib.suppress(ProcessLookupError):
                if self._init >= 0:
                    signal.pidfd_send_signal(self._init, signal.SIGKILL)
                elif not self._is_isolated or self._process.poll() is None:
                    os.killpg(self._process.pid, signal.SIGKILL)
            # when it has ended, so has its namespace: the kernel kills all others first
            if self._init >= 0 and not select.select([self._init], [], [], KILL_TIMEOUT_S)[0]:
                log.warning("a sandbox was killed and has not ended within %g s", KILL_TIMEOUT_S)
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
    """The command line, and the descriptors that it uses: on `status` it reports, on `held` it waits for a byte."""
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
        *("--proc", "/proc", "--dev", "/dev", "--dev-bind", "/dev/full", "/dev/zero"),  # as endless, not to be mapped
        *("--size", str(limits.file_mb * 2**20), "--tmpfs", "/tmp", *copies),
        # both are in memory and have no size limit
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
    # this limit would count all processes of the user, so it is left out
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
        raise ValueError(f"file name {name!r} does not stay inside the sandbox's folder")
    return str(path)


def _memory_file(content: bytes, stack: ExitStack) -> int:
    """A read-only descriptor of `content`, closed with `stack`."""
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


def _unprivileged_user() -> dict[str, Any]:
    """Popen options that turn root into a user who owns nothing; a new user each time, as they count processes."""
    if os.geteuid() != 0:
        return {}
    ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    top = max(int(first) + int(count) for first, _, count in ranges)
    lowest = min(_SCRATCH_UID, top // 2)
    if lowest < 1000:
        raise ConfigError(_refusal("root is the only user here; run as another one"))
    user = random.SystemRandom().randrange(lowest, min(top, lowest + 100_000_000) - 1)
    return {"user": user, "group": user, "extra_groups": []}


def _refusal(reason: str) -> str:
    return (
        f"{KEY}.kind='bubblewrap' cannot run programs here: {reason.strip()[:1000]}. It needs Linux that lets users "
        "make user namespaces, bubblewrap 0.8 or later (Debian, Ubuntu: apt-get install bubblewrap), /usr/bin/python3, "
        f"and pip install 'skyrl-train[sandbox]'. Without a sandbox: {KEY}.kind=unsafe_local and {KEY}.{CONSENT}=true."
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
!!! {KEY}.kind=unsafe_local: what the model writes RUNS ON THIS MACHINE
!!! with the rights of this user: its files, its network, its keys. Install bubblewrap to have it boxed in.
!!! {"=" * 100}
"""
