"""A Ray of our own on a machine that is too busy for the 15 s that Ray gives itself."""

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


def nothing() -> None:
    """What an attempt begins with, where nobody counts them."""


def join(address: str) -> None:
    ray_cluster.Cluster(settings={"address": address}).connect()


def starting(monkeypatch: pytest.MonkeyPatch, errors: list[Exception | None]) -> list[subprocess.Popen[bytes]]:
    """Replaces `ray.init` by one that starts a process and fails as told; returns what it has started."""
    started: list[subprocess.Popen[bytes]] = []

    def init(**_: Any) -> None:
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        error = errors[len(started) - 1]
        if error is not None:
            raise error

    monkeypatch.setattr(ray, "init", init)
    return started


def test_a_start_that_was_too_slow_is_tried_again_without_what_it_left(monkeypatch: pytest.MonkeyPatch):
    started = starting(monkeypatch, [Exception(SLOW), Exception(SLOW), None])
    begun: list[int] = []
    ray_cluster.start_local({}, lambda: begun.append(len(started)))
    assert begun == [0, 1, 2]
    assert [psutil.pid_exists(process.pid) for process in started] == [False, False, True]
    started[-1].kill()
    for process in started:
        process.wait(10)


def test_the_last_failure_is_raised(monkeypatch: pytest.MonkeyPatch):
    started = starting(monkeypatch, [Exception(f"{SLOW} {number}") for number in range(ray_cluster.MAX_START_ATTEMPTS)])
    with pytest.raises(ClusterLost, match=rf"timed out during startup.* {ray_cluster.MAX_START_ATTEMPTS - 1}$"):
        ray_cluster.start_local({}, nothing)
    assert not any(psutil.pid_exists(process.pid) for process in started)
    for process in started:
        process.wait(10)


@pytest.mark.parametrize("own", [signal.SIG_DFL, lambda number, frame: None], ids=["default", "own"])
def test_a_start_that_is_told_to_stop_leaves_nothing_and_the_program_s_handler(
    own: Any, monkeypatch: pytest.MonkeyPatch
):
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
            ray_cluster.start_local({}, nothing)
        assert own is signal.SIG_DFL or signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)
    (process,) = started
    process.wait(10)


@pytest.mark.parametrize(
    ("failure", "raised"),
    [
        (ValueError("no such setting"), ValueError),
        (RaySystemError("Failed to connect to GCS"), ClusterLost),  # it was killed
        (RuntimeError("Failed to start GCS"), ClusterLost),
    ],
)
def test_another_failure_is_not_tried_again(
    failure: Exception, raised: type[Exception], monkeypatch: pytest.MonkeyPatch
):
    started = starting(monkeypatch, [failure, None])
    with pytest.raises(raised, match=str(failure)):
        ray_cluster.start_local({}, nothing)
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
    ray_cluster.start_local({}, nothing)
    assert sessions == [True]
    assert ray_services.ConsolePopen is popen


@pytest.mark.defect("every-user-of-the-machine-could-read-rays-token")
def test_the_token_that_ray_writes_is_its_user_s_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    token = tmp_path / ".ray" / "auth_token"

    def init(**_: Any) -> None:
        token.parent.mkdir()
        token.write_text("a secret")
        token.chmod(0o644)

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(ray, "init", init)
    ray_cluster.start_local({}, nothing)
    assert stat.S_IMODE(token.stat().st_mode) == 0o600


@pytest.mark.parametrize(("nodes", "elsewhere", "single"), [(1, False, True), (2, False, False), (1, True, False)])
def test_a_run_is_on_one_machine_if_all_nodes_and_the_driver_are(
    nodes: int, elsewhere: bool, single: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True}] * nodes + [{"Alive": False}])
    monkeypatch.setattr(ray.util.client.ray, "is_connected", lambda: elsewhere)  # a driver of a ray:// address
    assert ray_cluster.Cluster().is_single_node is single


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
    """Everybody can make a file in /tmp, and hold a lock on it."""
    monkeypatch.setattr(ray_cluster.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ray_cluster, "START_TIMEOUT_S", 60.0)
    me = os.getuid()
    file, other = tmp_path / f"skyrl-train-ray-start-{me}.lock", tmp_path / "other"
    if is_link:
        file.symlink_to(other)
    with nullcontext() if is_link else file.open("w") as held:
        if held is not None:
            fcntl.flock(held, fcntl.LOCK_EX)
        monkeypatch.setattr(ray_cluster.os, "getuid", lambda: me if is_link else me + 1)
        if not is_link:
            file.rename(tmp_path / f"skyrl-train-ray-start-{me + 1}.lock")
        began = time.monotonic()
        with ray_cluster.start_lock():
            assert time.monotonic() - began < 30 and not other.exists()


def test_a_ray_of_our_own_starts_without_a_job_server_even_if_that_is_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ray_cluster.ray_utils, "get_dashboard_dependency_error", lambda: None)
    found: list[ImportError | None] = []
    monkeypatch.setattr(ray, "init", lambda **_: found.append(ray_cluster.ray_utils.get_dashboard_dependency_error()))
    ray_cluster.start_local({}, nothing)
    assert isinstance(found[0], ImportError)
    assert ray_cluster.ray_utils.get_dashboard_dependency_error() is None


UV = ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV


@pytest.mark.parametrize(
    ("address", "variables", "drivers_python", "uv_hook"),
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
def test_a_named_cluster_runs_the_driver_s_python_unless_somebody_chose_another(
    address: str, variables: dict[str, str], drivers_python: bool, uv_hook: bool, monkeypatch: pytest.MonkeyPatch
):
    for name in ("RAY_RUNTIME_ENV_HOOK", "RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_ENABLE_UV_RUN_RUNTIME_ENV"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "executable", "/with a space/python")
    asked: dict[str, Any] = {}
    monkeypatch.setattr(ray, "init", lambda **given: asked.update(given))
    monkeypatch.setattr(ray, "nodes", list)
    checked: list[str] = []

    def wait(*_: Any, **given: Any) -> tuple[list[Any], list[Any]]:  # for a worker on every node
        checked.append(address)
        return [], []

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", lambda workers: workers)
    try:
        join(address)
        assert asked["runtime_env"] == ({"py_executable": "'/with a space/python'"} if drivers_python else {})
        assert ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV is uv_hook
        assert checked == [address] * drivers_python
    finally:
        ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = UV


def test_a_cluster_that_does_not_answer_is_a_mistake_of_the_address_or_the_token(monkeypatch: pytest.MonkeyPatch):
    def init(**_: Any) -> None:
        raise ConnectionError("nobody there")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS=10\.0\.0\.1:1: .*nobody there.*RAY_AUTH_MODE=token"):
        join("10.0.0.1:1")


@pytest.mark.defect("a-client-s-server-died-as-it-was-forked")
@pytest.mark.parametrize("said", ["Starting Ray client server failed. See ...", "Proxy failed to Connect to backend!"])
def test_a_head_whose_server_for_a_client_died_is_asked_again(said: str, monkeypatch: pytest.MonkeyPatch):
    died = ConnectionAbortedError(f"Initialization failure from server: {said}")
    asked: list[str] = []

    def init(address: str, **_: Any) -> None:
        asked.append(address)
        if len(asked) != answers:
            raise died

    monkeypatch.setattr(ray, "init", init)
    for answers in (1, ray_cluster.MAX_START_ATTEMPTS):
        asked.clear()
        join("ray://10.0.0.1:10001")
        assert len(asked) == answers
    answers = ray_cluster.MAX_START_ATTEMPTS + 1
    asked.clear()
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS=ray://.*failed 4 times.*GRPC_ENABLE_FORK_SUPPORT=0"):
        join("ray://10.0.0.1:10001")


@pytest.mark.parametrize("temporary", ["short", "long"])
def test_ray_has_a_folder_in_a_private_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temporary: str):
    """Ray makes its own folder one that every user may write to."""
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    given = tmp_path / ("x" * 30)
    given.mkdir()
    monkeypatch.setattr("tempfile.tempdir", "/tmp" if temporary == "short" else str(given))
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


def test_chosen_place_of_ray_is_kept(monkeypatch: pytest.MonkeyPatch):
    places: list[str | None] = []

    def init(**settings: Any) -> None:
        places.append(settings.get("_temp_dir"))
        raise ValueError("enough")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setenv("RAY_TMPDIR", "/elsewhere")
    with pytest.raises(ValueError, match="enough"):
        ray_cluster.Cluster().connect()
    monkeypatch.delenv("RAY_TMPDIR")
    with pytest.raises(ValueError, match="enough"):
        ray_cluster.Cluster(settings={"_temp_dir": "/elsewhere"}).connect()
    assert places == [None, "/elsewhere"]
