"""The start of our own Ray on a machine that is too busy for Ray's limit of 15 s, and connections to other clusters."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray._private import ray_constants, services as ray_services
from ray.exceptions import RaySystemError

from skyrl_train.cluster import ray_cluster
from skyrl_train.errors import ClusterLost, ConfigError, RunInterrupted

SLOW = "The current node timed out during startup. This could happen because ..."


def noop() -> None:
    """Do noop before an attempt."""


def join(address: str) -> None:
    ray_cluster.Cluster(settings={"address": address}).connect()


def patch_ray_init(monkeypatch: pytest.MonkeyPatch, errors: list[Exception | None]) -> list[subprocess.Popen[bytes]]:
    """Replace `ray.init` with a function that starts a process and raises the next error. Return the started
    processes.
    """
    started: list[subprocess.Popen[bytes]] = []

    def init(**_: Any) -> None:
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        error = errors[len(started) - 1]
        if error is not None:
            raise error

    monkeypatch.setattr(ray, "init", init)
    return started


def test_slow_start_is_retried_after_cleanup(monkeypatch: pytest.MonkeyPatch):
    started = patch_ray_init(monkeypatch, [Exception(SLOW), Exception(SLOW), None])
    begun: list[int] = []
    ray_cluster.start_local({}, lambda: begun.append(len(started)))
    assert begun == [0, 1, 2]
    assert [psutil.pid_exists(process.pid) for process in started] == [False, False, True]
    started[-1].kill()
    for process in started:
        process.wait(10)


def test_the_last_failure_is_raised(monkeypatch: pytest.MonkeyPatch):
    started = patch_ray_init(
        monkeypatch, [Exception(f"{SLOW} {number}") for number in range(ray_cluster.MAX_START_ATTEMPTS)]
    )
    with pytest.raises(ClusterLost, match=rf"timed out during startup.* {ray_cluster.MAX_START_ATTEMPTS - 1}$"):
        ray_cluster.start_local({}, noop)
    assert not any(psutil.pid_exists(process.pid) for process in started)
    for process in started:
        process.wait(10)


@pytest.mark.parametrize("own", [signal.SIG_DFL, lambda number, frame: None], ids=["default", "own"])
def test_interrupted_start_cleans_up_and_keeps_handler(own: Any, monkeypatch: pytest.MonkeyPatch):
    started: list[subprocess.Popen[bytes]] = []

    def init(**_: Any) -> None:
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        ray._private.utils.set_sigterm_handler(lambda number, frame: sys.exit(number))  # as ray.init does
        signal.raise_signal(signal.SIGTERM)
        raise ValueError("the handler of the program does not end it")

    monkeypatch.setattr(ray, "init", init)
    before = signal.signal(signal.SIGTERM, own)
    try:
        with pytest.raises(RunInterrupted if own is signal.SIG_DFL else ValueError):
            ray_cluster.start_local({}, noop)
        assert own is signal.SIG_DFL or signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)
    (process,) = started
    process.wait(10)


@pytest.mark.parametrize(
    ("failure", "raised"),
    [
        (ValueError("no such setting"), ValueError),
        (RaySystemError("Failed to connect to GCS"), ClusterLost),  # a process was killed
        (RuntimeError("Failed to start GCS"), ClusterLost),
    ],
)
def test_other_failures_are_not_retried(failure: Exception, raised: type[Exception], monkeypatch: pytest.MonkeyPatch):
    started = patch_ray_init(monkeypatch, [failure, None])
    with pytest.raises(raised, match=str(failure)):
        ray_cluster.start_local({}, noop)
    (process,) = started
    process.wait(10)


@pytest.mark.defect("group-signals-kill-ray-first")
def test_ray_processes_start_in_own_sessions(monkeypatch: pytest.MonkeyPatch):
    sessions: list[bool] = []

    def init(**_: Any) -> None:
        process = ray_services.ConsolePopen(["sleep", "60"])  # as Ray starts its processes
        sessions.append(os.getsid(process.pid) == process.pid)
        process.kill()
        process.wait(10)

    popen = ray_services.ConsolePopen
    monkeypatch.setattr(ray, "init", init)
    ray_cluster.start_local({}, noop)
    assert sessions == [True]
    assert ray_services.ConsolePopen is popen


@pytest.mark.defect("ray-token-world-readable")
def test_ray_token_is_private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    token = tmp_path / ".ray" / "auth_token"

    def init(**_: Any) -> None:
        token.parent.mkdir()
        token.write_text("a secret")
        token.chmod(0o644)

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(ray, "init", init)
    ray_cluster.start_local({}, noop)
    assert stat.S_IMODE(token.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("nodes", "is_ray_client", "is_single_node"), [(1, False, True), (2, False, False), (1, True, False)]
)
def test_single_node_requires_driver_on_it(
    nodes: int, is_ray_client: bool, is_single_node: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True}] * nodes + [{"Alive": False}])
    monkeypatch.setattr(ray.util.client.ray, "is_connected", lambda: is_ray_client)  # the driver uses a ray:// address
    assert ray_cluster.Cluster().is_single_node is is_single_node


def test_starts_take_turns():
    code = (
        "from skyrl_train.cluster.ray_cluster import start_lock\nprint('ready', flush=True)\n"
        "with start_lock():\n    print('in', flush=True)\n"
    )
    with ray_cluster.start_lock():
        other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None and other.stdout.readline() == "ready\n"
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(timeout=1)
    assert other.communicate(timeout=300)[0] == "in\n"


@pytest.mark.parametrize("is_link", [False, True])
def test_lock_of_another_user_delays_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_link: bool):
    """Every user can create a file in /tmp and lock it."""
    monkeypatch.setattr(ray_cluster.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ray_cluster, "START_TIMEOUT_S", 60.0)
    me = os.getuid()
    file, other = tmp_path / f"skyrl-train-ray-start-{me}.lock", tmp_path / "other"
    if is_link:
        file.symlink_to(other)
    with nullcontext() if is_link else file.open("w") as locked_file:
        if locked_file is not None:
            fcntl.flock(locked_file, fcntl.LOCK_EX)
        monkeypatch.setattr(ray_cluster.os, "getuid", lambda: me if is_link else me + 1)
        if not is_link:
            file.rename(tmp_path / f"skyrl-train-ray-start-{me + 1}.lock")
        began = time.monotonic()
        with ray_cluster.start_lock():
            assert time.monotonic() - began < 30 and not other.exists()


def test_own_ray_starts_without_job_server(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ray_cluster.ray_utils, "get_dashboard_dependency_error", lambda: None)
    errors: list[ImportError | None] = []
    monkeypatch.setattr(ray, "init", lambda **_: errors.append(ray_cluster.ray_utils.get_dashboard_dependency_error()))
    ray_cluster.start_local({}, noop)
    assert isinstance(errors[0], ImportError)
    assert ray_cluster.ray_utils.get_dashboard_dependency_error() is None


UV = ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV


@pytest.mark.parametrize(
    ("address", "variables", "uses_driver_python", "uv_hook"),
    [
        ("10.0.0.1:6379", {}, True, False),
        ("auto", {}, True, False),
        ("auto", {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "1"}, False, True),
        ("auto", {"RAY_RUNTIME_ENV_HOOK": "my.hook"}, False, True),
        ("auto", {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}, False, True),
        ("auto", {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}, False, False),
        ("ray://10.0.0.1:10001", {}, False, True),
    ],
)
def test_joined_cluster_runs_driver_python_by_default(
    address: str, variables: dict[str, str], uses_driver_python: bool, uv_hook: bool, monkeypatch: pytest.MonkeyPatch
):
    for name in ("RAY_RUNTIME_ENV_HOOK", "RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_ENABLE_UV_RUN_RUNTIME_ENV"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "executable", "/with a space/python")
    settings: dict[str, Any] = {}
    monkeypatch.setattr(ray, "init", lambda **kwargs: settings.update(kwargs))
    monkeypatch.setattr(ray, "nodes", list)
    checked: list[str] = []

    def wait(*_: Any, **__: Any) -> tuple[list[Any], list[Any]]:  # for a worker on every node
        checked.append(address)
        return [], []

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", lambda workers: workers)
    try:
        join(address)
        assert settings["runtime_env"] == ({"py_executable": "'/with a space/python'"} if uses_driver_python else {})
        assert ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV is uv_hook
        assert checked == [address] * uses_driver_python
    finally:
        ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = UV


def test_unreachable_cluster_error_mentions_token(monkeypatch: pytest.MonkeyPatch):
    def init(**_: Any) -> None:
        raise ConnectionError("nobody there")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS=10\.0\.0\.1:1: .*nobody there.*RAY_AUTH_MODE=token"):
        join("10.0.0.1:1")


@pytest.mark.defect("ray-client-server-dies-in-fork")
@pytest.mark.parametrize(
    "message", ["Starting Ray client server failed. See ...", "Proxy failed to Connect to backend!"]
)
def test_dead_client_server_is_retried(message: str, monkeypatch: pytest.MonkeyPatch):
    died = ConnectionAbortedError(f"Initialization failure from server: {message}")
    attempts: list[str] = []

    def init(address: str, **_: Any) -> None:
        attempts.append(address)
        if len(attempts) != successful_attempt:
            raise died

    monkeypatch.setattr(ray, "init", init)
    for successful_attempt in (1, ray_cluster.MAX_START_ATTEMPTS):
        attempts.clear()
        join("ray://10.0.0.1:10001")
        assert len(attempts) == successful_attempt
    successful_attempt = ray_cluster.MAX_START_ATTEMPTS + 1
    attempts.clear()
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS=ray://.*4 attempts failed.*GRPC_ENABLE_FORK_SUPPORT=0"):
        join("ray://10.0.0.1:10001")


@pytest.mark.parametrize("temporary", ["short", "long"])
def test_ray_folder_is_inside_private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temporary: str):
    """Ray itself makes its folder writable by every user."""
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    long_folder = tmp_path / ("x" * 30)
    long_folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", "/tmp" if temporary == "short" else str(long_folder))
    seen: dict[str, str] = {}

    def init(**settings: Any) -> None:
        seen["folder"] = settings["_temp_dir"]
        assert stat.S_IMODE(Path(seen["folder"]).parent.stat().st_mode) == 0o700
        raise ValueError("enough")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ValueError, match="enough"):
        ray_cluster.Cluster().connect()
    folder = Path(seen["folder"])
    assert len(str(folder)) + 62 <= 107, "names of Ray's sockets fit"
    folder.parent.rmdir()


def test_chosen_ray_folder_is_kept(monkeypatch: pytest.MonkeyPatch):
    folders: list[str | None] = []

    def init(**settings: Any) -> None:
        folders.append(settings.get("_temp_dir"))
        raise ValueError("enough")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setenv("RAY_TMPDIR", "/elsewhere")
    with pytest.raises(ValueError, match="enough"):
        ray_cluster.Cluster().connect()
    monkeypatch.delenv("RAY_TMPDIR")
    with pytest.raises(ValueError, match="enough"):
        ray_cluster.Cluster(settings={"_temp_dir": "/elsewhere"}).connect()
    assert folders == [None, "/elsewhere"]
