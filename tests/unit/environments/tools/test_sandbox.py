"""Tests with programs that try to escape from a real sandbox. The tests of code graders cover F23."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from skyrl_train.environments.tools import sandbox as module
from skyrl_train.environments.tools.sandbox import PYTHON, Limits, Sandbox, SandboxResult
from skyrl_train.errors import ConfigError, EnvironmentFailure

GENEROUS_LIMITS = Limits(wall_s=60.0, cpu_s=60.0)
"""Limits for programs that end by themselves, even on a busy machine."""


def run(
    sandbox: Sandbox, code: str, limits: Limits = GENEROUS_LIMITS, stdin: bytes = b"", **files: bytes
) -> SandboxResult:
    return sandbox.run({"main.py": code, **files}, [PYTHON, "-I", "main.py"], stdin, limits)


def find_processes(marker: str) -> list[int]:
    """Return the ids of the processes on this machine whose command line contains `marker`."""
    return [p.pid for p in psutil.process_iter(["cmdline"]) if marker in " ".join(p.info["cmdline"] or ())]


def test_program_gets_files_input_and_separate_streams(sandbox: Sandbox):
    code = "import sys; print(open('data/in.txt').read() + input()); print('oops', file=sys.stderr); sys.exit(3)"
    result = sandbox.run({"main.py": code, "data/in.txt": b"a"}, [PYTHON, "main.py"], b"b\nc", GENEROUS_LIMITS)
    assert result == SandboxResult("ab\n", "oops\n", 3)


def test_undecodable_output_is_replaced(sandbox: Sandbox):
    result = run(sandbox, "import sys; sys.stdout.buffer.write(b'a\\xff\\x00')")
    assert result.stdout == "a\ufffd\0"


@pytest.mark.parametrize("name", ["../x", "/etc/x", "", "a/../../x", "a\0b"])
def test_file_names_must_stay_in_folder(sandbox: Sandbox, name: str):
    with pytest.raises(ValueError, match="does not stay inside"):
        sandbox.run({name: ""}, [PYTHON, "-c", ""])


def test_sandbox_setup_failure_is_environment_failure(sandbox: Sandbox):
    with pytest.raises(EnvironmentFailure) as caught:
        sandbox.run({"big": b"x" * 3_000_000}, [PYTHON, "-c", ""], limits=replace(GENEROUS_LIMITS, file_mb=2))
    assert caught.value.kind == "sandbox"


@pytest.mark.fault("F17")
@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(10**6)", "9**9**9"])
def test_endless_program_is_killed_at_wall_limit(sandbox: Sandbox, code: str):
    result = run(sandbox, code, Limits(wall_s=0.7, cpu_s=600))
    assert (result.timed_out, result.killed_by) == (True, "wall")


@pytest.mark.fault("F17")
def test_busy_program_is_killed_at_cpu_limit(sandbox: Sandbox):
    result = run(sandbox, "while True: pass", replace(GENEROUS_LIMITS, cpu_s=1))
    assert (result.timed_out, result.killed_by) == (True, "cpu")


@pytest.mark.fault("F17")
def test_output_before_timeout_is_kept(sandbox: Sandbox):
    code = "import os, time; print('so far', flush=True); os.close(1); os.close(2); time.sleep(10**6)"
    result = run(sandbox, code, Limits(wall_s=2))
    assert result.timed_out
    assert result.stdout in ("so far\n", "")  # "" where the machine is too busy to come that far


@pytest.mark.fault("F18")
def test_fork_bomb_is_limited(sandbox: Sandbox):
    code = """
import os, time
count = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(1000)
        count += 1
except OSError as error:
    print(count, error.errno)
"""
    result = run(sandbox, code)
    count, errno = map(int, result.stdout.split())
    assert 4 <= count <= 16 and errno == 11
    endless = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    assert run(sandbox, endless, Limits(wall_s=1, cpu_s=600)).killed_by == "wall"
    assert run(sandbox, "print('fine')").stdout == "fine\n"


@pytest.mark.fault("F18")
def test_memory_and_file_sizes_are_limited(sandbox: Sandbox):
    code = """
def attempt(name, action):
    try:
        action()
        print(name, "passed")
    except (MemoryError, OSError) as error:
        print(name, type(error).__name__)

def fill(folder):
    for number in range(100):
        with open(f"{folder}/{number}", "wb") as file:
            file.write(bytes(2**20))

attempt("list", lambda: [0] * (10 * 2**30 // 8))
attempt("one file", lambda: open("/tmp/large", "wb").write(bytes(2**20) * 1024))
attempt("files", lambda: fill("/tmp"))
attempt("root", lambda: open("/x", "w"))
attempt("devices", lambda: open("/dev/x", "w"))
attempt("shared memory", lambda: open("/dev/shm/x", "w"))
attempt("memory files", lambda: __import__("os").memfd_create("x"))
attempt("programs", lambda: open("/usr/bin/python3", "w"))
"""
    lines = dict(line.rsplit(" ", 1) for line in run(sandbox, code).stdout.splitlines())
    assert lines.pop("list") == "MemoryError"
    assert lines.pop("one file") in ("MemoryError", "OSError")
    assert set(lines.values()) <= {"OSError", "PermissionError"} and len(lines) == 6


# Overwrites the machine code in which the first process waits, and wakes that process with the end of an orphan.
INTO_THE_FIRST_PROCESS = """
import os, time
forks_40_times_and_waits = bytes.fromhex("bb28000000 b839000000 0f05 85c0 7404 ffcb 75f1 b822000000 0f05 ebf7")
where = int(open("/proc/1/syscall").read().split()[-1], 16)
with open("/proc/1/mem", "r+b", 0) as memory:
    memory.seek(where)
    memory.write(forks_40_times_and_waits)
if os.fork() == 0:
    os.fork()
    os._exit(0)
time.sleep(0.5)
print(sum(map(str.isdigit, os.listdir("/proc"))), flush=True)
"""


@pytest.mark.fault("F18")
@pytest.mark.defect("sandbox-init-has-no-limits")
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="has machine code of x86-64")
def test_first_process_is_limited_too(sandbox: Sandbox):
    result = run(sandbox, INTO_THE_FIRST_PROCESS, Limits(wall_s=5))  # the program cannot end after this
    assert result.stderr == ""
    assert 8 < int(result.stdout) <= GENEROUS_LIMITS.processes


@pytest.mark.fault("F18")
@pytest.mark.defect("sandbox-memory-sum-unlimited")
@pytest.mark.parametrize(("shared_mb", "own_mb", "killed_by"), [(0, 100, "memory"), (100, 0, None)])
def test_total_memory_limit_counts_shared_memory_once(
    sandbox: Sandbox, shared_mb: int, own_mb: int, killed_by: str | None
):
    code = f"""
import os, time
shared = b"x" * ({shared_mb} << 20)
for _ in range(4):
    if os.fork() == 0:
        own = b"x" * ({own_mb} << 20)
        time.sleep(1000)
time.sleep(1 if shared else 1000)
"""
    assert run(sandbox, code, replace(GENEROUS_LIMITS, memory_mb=256)).killed_by == killed_by


@pytest.mark.fault("F18")
@pytest.mark.defect("unmapped-shared-memory-not-counted")
def test_shared_anonymous_memory_is_denied(sandbox: Sandbox):
    code = """
import mmap, os
for fd in (-1, os.open("/dev/zero", os.O_RDWR)):
    try:
        mmap.mmap(fd, 4096, mmap.MAP_SHARED | (mmap.MAP_ANONYMOUS if fd < 0 else 0))
        print("mapped")
    except OSError:
        print("refused")
print(open("/dev/zero", "rb").read(2), len(mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)))
with open("file", "w+b") as file:
    file.write(b"kept")
    file.flush()
    print(mmap.mmap(file.fileno(), 4)[:])
"""
    assert run(sandbox, code).stdout.splitlines() == ["refused", "refused", "b'\\x00\\x00' 4096", "b'kept'"]


@pytest.mark.fault("F18")
@pytest.mark.defect("sandbox-file-count-unlimited")
def test_number_of_files_is_limited(sandbox: Sandbox):
    code = """
import os
{streams}
for number in range(100_000):
    os.mkdir(f"/tmp/{number}")
"""
    for streams in ("pass", "os.close(1); os.close(2)"):
        assert run(sandbox, code.replace("{streams}", streams)).killed_by == "files"


@pytest.mark.fault("F18")
def test_endless_output_uses_bounded_memory(sandbox: Sandbox):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for stream in ("stdout", "stderr"):
        result = run(sandbox, f"import sys\nwhile True: sys.{stream}.write('x' * 100_000)")
        assert result.killed_by == "output" and not result.timed_out
        assert len(getattr(result, stream)) == GENEROUS_LIMITS.output
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB


@pytest.mark.fault("F19")
@pytest.mark.parametrize("end", ["print('done')", "os._exit(1)", "time.sleep(10**6)"])
def test_no_descendant_survives_a_run(sandbox: Sandbox, end: str):
    marker = f"daemon-{os.getpid()}-{abs(hash(end))}"
    code = f"""
import os, subprocess, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3):
            os.close(fd)
        time.sleep(10**6)
    os._exit(0)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10**6)", "{marker}"], start_new_session=True,
                 stdin=-3, stdout=-3, stderr=-3)
time.sleep(0.2)
{end}
"""
    before = {p.pid for p in psutil.process_iter()}
    result = run(sandbox, code, Limits(wall_s=3, cpu_s=60))
    assert result.timed_out == ("sleep" in end) or result.killed_by == "wall"
    assert find_processes(marker) == []
    left = [p for p in psutil.process_iter(["name", "uids"]) if p.pid not in before and p.info["name"] == "bwrap"]
    assert [p.pid for p in left if is_own_descendant(p)] == []


def is_own_descendant(process: psutil.Process) -> bool:
    """True if `process` is still running and this process started it."""
    with contextlib.suppress(psutil.Error):
        return os.getpid() in {parent.pid for parent in process.parents()}
    return False


@pytest.mark.fault("F19")
def test_sandbox_ends_with_its_parent():
    marker = f"orphan-{os.getpid()}"
    script = f"""
import threading
from skyrl_train.environments.tools.sandbox import Sandbox, Limits
command = ["/usr/bin/python3", "-c", "import time; print('up', flush=True); time.sleep(10**6)", "{marker}"]
Sandbox().run({{}}, command, limits=Limits(wall_s=600))
"""
    if not Path("/usr/bin/bwrap").exists():
        pytest.skip("bubblewrap is not installed: scripts/sandbox_tools installs it")
    starter = subprocess.Popen([sys.executable, "-c", script])
    try:
        deadline = time.monotonic() + 60
        # At least three: the starter, bubblewrap and the program.
        while len(find_processes(marker)) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(find_processes(marker)) >= 3
    finally:
        starter.kill()
        starter.wait()
    deadline = time.monotonic() + 60
    while find_processes(marker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert find_processes(marker) == []


@pytest.mark.fault("F20")
def test_host_data_is_not_readable(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    secret = tmp_path / "secret"
    secret.write_text("planted")
    inherited = os.open(secret, os.O_RDONLY)
    os.set_inheritable(inherited, True)
    monkeypatch.setenv("API_KEY", "planted")
    paths = [str(secret), "/etc/shadow", "/etc/passwd", "/root", "/home", "/var", "/sys", "/run", str(Path(__file__))]
    code = f"""
import json, os
def read(path):
    try:
        return open(path, "rb").read().decode("latin-1")
    except OSError:
        return ""
print(json.dumps(dict(
    there=[path for path in {paths!r} if os.path.exists(path)],
    descriptors=sorted(map(int, os.listdir("/proc/self/fd"))),
    links=[os.readlink(f"/proc/self/fd/{{fd}}") for fd in range(3)],
    environ=sorted(os.environ),
    first=read("/proc/1/environ"),
    processes=[read(f"/proc/{{pid}}/cmdline") for pid in os.listdir("/proc") if pid.isdigit()],
    tmp=os.listdir("/tmp"), uid=os.getuid(), groups=os.getgroups(), name=os.uname().nodename,
    caps=[line.split()[1] for line in open("/proc/self/status") if line.startswith("Cap")],
    no_new=[line.split()[1] for line in open("/proc/self/status") if line.startswith(("NoNewPrivs", "Seccomp:"))],
)))
"""
    try:
        found = json.loads(run(sandbox, code, stdin=b"x").stdout)
    finally:
        os.close(inherited)
    assert found["there"] == []
    assert found["descriptors"] == [0, 1, 2, 3]  # the last one lists them
    assert all("pipe:" in link or "memfd:" in link for link in found["links"])
    assert found["environ"] == ["HOME", "LANG", "PATH", "PWD", "PYTHONDONTWRITEBYTECODE"]
    assert found["first"] == "" and "planted" not in json.dumps(found)
    assert len(found["processes"]) == 2 and "pytest" not in "".join(found["processes"])
    assert found["tmp"] == ["main.py"]
    assert found["uid"] == 1000 and found["name"] == "sandbox" and os.getgid() not in found["groups"]
    assert set(found["caps"]) == {"0" * 16} and found["no_new"] == ["1", "2"]


@pytest.mark.fault("F20")
def test_dangerous_system_calls_are_denied(sandbox: Sandbox):
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    ctypes.set_errno(0)
    libc.syscall(number, *arguments)
    return ctypes.get_errno()
NEWUSER = 0x10000000
print(dict(unshare=call(272, NEWUSER), mount=call(165, 0, 0, 0, 0, 0), ptrace=call(101, 0, 0, 0, 0),
    bpf=call(321, 0, 0, 0), keyctl=call(250, 0, 0), io_uring=call(425, 1, 0), userfaultfd=call(323, 0),
    perf=call(298, 0, 0, 0, 0, 0),
    clone=call(56, NEWUSER | 17, 0, 0, 0, 0), setns=call(308, 0, 0), shmget=call(29, 0, 4096, 0o1600),
    vmsplice=call(278, 1, 0, 0, 0)))
try:
    open("/proc/sys/kernel/core_pattern", "w")
    print("core pattern written")
except OSError:
    pass
"""
    if os.uname().machine != "x86_64":
        code = code[code.index("try:") :]
    output = run(sandbox, code).stdout
    assert "written" not in output
    if os.uname().machine == "x86_64":
        assert set(eval(output).values()) == {1}, output  # EPERM, not the error of the kernel itself


@pytest.mark.fault("F21")
def test_no_network_is_reachable(sandbox: Sandbox):
    name = f"\0skyrl-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(name)
        abstract.listen()
        port = server.getsockname()[1]
        code = f"""
import socket
targets = [(socket.AF_INET, ("127.0.0.1", {port})), (socket.AF_INET, ("169.254.169.254", 80)),
           (socket.AF_INET6, ("::1", {port})), (socket.AF_UNIX, {name!r})]
for family, address in targets:
    try:
        made = socket.socket(family)
        made.settimeout(5)
        made.connect(address)
        print("reached", address)
    except OSError as error:
        print("refused")
for family in (socket.AF_INET, socket.AF_NETLINK, socket.AF_PACKET):
    try:
        socket.socketpair(family)
        print("paired", family)
    except OSError:
        pass
socket.socketpair()  # what asyncio needs
print([line.split(":")[0].strip() for line in open("/proc/net/dev").readlines()[2:]])
"""
        assert run(sandbox, code).stdout.splitlines() == ["refused"] * 4 + ["['lo']"]


@pytest.mark.fault("F21")
def test_namespaces_alone_isolate_network(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch):
    """Namespaces alone block the network, too, so neither layer depends on the other."""
    import pyseccomp

    with open(os.memfd_create("allow"), "w+b") as file:
        pyseccomp.SyscallFilter(defaction=pyseccomp.ALLOW).export_bpf(file)
        file.seek(0)
        everything = file.read()
    monkeypatch.setattr(module, "build_filter", lambda: everything)
    name = f"\0skyrl-open-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(name)
        abstract.listen()
        code = f"""
import socket
for family, address in ((socket.AF_INET, {server.getsockname()!r}), (socket.AF_UNIX, {name!r})):
    made = socket.socket(family)
    made.settimeout(5)
    try:
        made.connect(address)
        print("reached")
    except OSError:
        print("refused")
"""
        assert run(sandbox, code).stdout == "refused\nrefused\n"


@pytest.mark.fault("F22")
def test_missing_bubblewrap_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    for action in (Sandbox().check, lambda: run(Sandbox(), ""), Sandbox().session):
        with pytest.raises(ConfigError, match=r"bwrap is not installed.*apt-get install bubblewrap.*unsafe_local"):
            action()


@pytest.mark.fault("F22")
@pytest.mark.parametrize(
    ("name", "script", "reason"),
    [
        ("bwrap", "echo 'No permissions to create new namespace' >&2; exit 1", "No permissions to create new name"),
        ("bwrap", 'while [ "$1" != -- ]; do shift; done; exec "$@"', "cannot run programs here"),
        (
            "prlimit",
            "echo 'Operation not permitted' >&2; exit 1",
            "prlimit could not set the limits of the sandbox: Operation not permitted",
        ),
        ("prlimit", "exit 0", "open: limits"),
    ],
)
def test_check_rejects_sandbox_without_isolation(monkeypatch: pytest.MonkeyPatch, name: str, script: str, reason: str):
    """The second script is a bubblewrap that only runs the program; the last one is a prlimit that sets no limits."""
    import tempfile

    if name == "prlimit" and not Path("/usr/bin/bwrap").exists():
        pytest.skip("bubblewrap is not installed; scripts/sandbox_tools installs it")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        program = Path(folder, name)
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
        with pytest.raises(ConfigError, match=reason):
            Sandbox().check()


@pytest.mark.fault("F22")
def test_unsafe_local_needs_consent_and_prints_banner(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ConfigError, match="i_know_this_runs_model_code_on_this_machine=true"):
        Sandbox.from_config({"kind": "unsafe_local"})
    with pytest.raises(
        ConfigError, match="kind='docker' is not a known kind of sandbox; choose one of: bubblewrap, unsafe_local"
    ):
        Sandbox.from_config({"kind": "docker"})
    unsafe = Sandbox.from_config({"kind": "unsafe_local", "i_know_this_runs_model_code_on_this_machine": True})
    unsafe.check()
    assert "RUNS ON THIS MACHINE" in capsys.readouterr().err
    assert run(unsafe, "print(open('data').read() + input())", stdin=b"b", data=b"a").stdout == "ab\n"
    assert run(unsafe, "import time; time.sleep(10**6)", Limits(wall_s=0.5)).timed_out
    with unsafe.session(GENEROUS_LIMITS) as session:
        session.execute("x = 1")
        assert session.execute("print(x)").stdout == "1\n"


def test_concurrent_runs_are_independent(sandbox: Sandbox):
    outcomes: dict[int, Any] = {}

    def one(number: int) -> None:
        outcomes[number] = run(sandbox, f"print({number})").stdout

    threads = [threading.Thread(target=one, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == {number: f"{number}\n" for number in range(6)}
