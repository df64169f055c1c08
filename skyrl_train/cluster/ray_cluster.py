"""A Ray cluster for the duration of a run: the one at RAY_ADDRESS, or one of our own."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import importlib.util
import logging
import os
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import ray
from ray._private import ray_constants, ray_logging, services as ray_services, utils as ray_utils, worker as ray_worker
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from skyrl_train.cluster.actor_logs import log_raylet_output
from skyrl_train.cluster.node_loss import NODE_LOSS_DETECTION_S
from skyrl_train.cluster.ray_reaper import RayReaper, exit_now
from skyrl_train.errors import ClusterLost, ConfigError, RunInterrupted, SkyRLError
from skyrl_train.imports import PRELOAD_ENV, import_without_gc
from skyrl_train.terminal import print_stderr

log = logging.getLogger(__name__)

_OWN_CLUSTER_ENV = {
    # Keep CUDA_VISIBLE_DEVICES as it is for actors without a GPU (Ray's announced future default).
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray runs workers at nice 15. But they do the actual work here: at a lower priority than everything else on the
    # machine, all threads of a matrix product wait for the one that was pre-empted.
    "RAY_worker_niceness": "0",
    # Spinning for a pre-empted thread slowed a step from 1.3 s to 10-44 s on a busy machine; it rarely gains much.
    "OMP_WAIT_POLICY": "PASSIVE",
}
OBJECT_STORE_BYTES = 2 << 30
"""Enough for the token ids and mask of a step, and for what an update adds to a mini-batch of it (with replayed routing
much more: Ray then writes to the disk); Ray's own default is 30 % of memory."""
_OWN_SETTINGS = {
    "include_dashboard": False,
    "object_store_memory": OBJECT_STORE_BYTES,
    "logging_level": logging.WARNING,
}
_PRELOAD, _PRESTART = "RAY_preload_python_modules", "RAY_prestart_worker_first_driver"
_IDLE_WORKERS_VARIABLE = "RAY_num_workers_soft_limit"
"""How many idle workers Ray keeps; by default as many as CPUs are free, which are none once slots are reserved."""
_TOKEN_LOGGER = "ray._private.authentication.authentication_token_setup"
"""Ray's logger that warns at every start that access needs a token."""
_PYTHON_OVERRIDES = ("RAY_RUNTIME_ENV_HOOK", "RAY_JOB_CONFIG_JSON_ENV_VAR")
"""Variables that mean that the workers' Python is chosen elsewhere: by a hook, or by a job submitted to the cluster."""
START_TIMEOUT_S = 60.0
"""How long a start may hold up the start of the next run's Ray."""
MAX_START_ATTEMPTS = 4
"""How often starting Ray is tried. Its node process gives its helpers only 15 s to start (ray-project/ray#65983), which
is too short for a first import on busy cores; the next attempt is faster."""

_SERVER_DIED = ("Starting Ray client server failed", "Proxy failed to Connect to backend")
"""What the head says if its server for one client has died."""


@contextmanager
def import_in_background(module: str) -> Iterator[None]:
    """Import `module` in another thread while inside the block."""
    with ThreadPoolExecutor(1, "importing") as thread:
        imported = thread.submit(import_without_gc, [module])
        yield
        imported.result()


def _override_ray_settings(drivers_python: bool) -> None:
    """Change settings that Ray read from the environment on import, as a user's program may have imported it before us.

    Ray's hook for `uv run` copies the working tree and builds a new environment for the workers, without packages that
    are not in the lock file. It is off if workers run the driver's Python, unless RAY_ENABLE_UV_RUN_RUNTIME_ENV is set.
    Equal log lines of several workers are printed, not counted ("repeated 2x across cluster").
    """
    ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = _asks_for_uv_hook(default=not drivers_python)
    ray_logging.RAY_DEDUP_LOGS = ray_constants.env_bool("RAY_DEDUP_LOGS", False)
    logging.getLogger(_TOKEN_LOGGER).setLevel(logging.ERROR)


def _asks_for_uv_hook(default: bool = False) -> bool:
    return bool(ray_constants.env_bool("RAY_ENABLE_UV_RUN_RUNTIME_ENV", default))


def _live_node_ids() -> list[str]:
    """Ray's ids of them."""
    return [node["NodeID"] for node in ray.nodes() if node["Alive"]]


def _get_sys_prefix() -> str:
    return sys.prefix


def start_local(settings: Mapping[str, Any], begins: Callable[[], None]) -> None:
    """Start Ray on this machine; if it is too slow, try again. `begins` is called before each attempt.

    Raises ClusterLost if it does not start, and ValueError or TypeError as Ray does for settings that it refuses.
    """
    before = psutil.Process().children(recursive=True)
    for attempt in range(1, MAX_START_ATTEMPTS + 1):
        try:
            failure = _start(settings, begins)
        except BaseException:  # told to stop: leave the raylet before it is killed, or it takes this process with it
            _kill_started_processes(before)
            raise
        if failure is None:
            return
        _kill_started_processes(before)
        if isinstance(failure, (ValueError, TypeError, SkyRLError)):
            raise failure
        if "timed out during startup" not in str(failure) or attempt == MAX_START_ATTEMPTS:
            raise ClusterLost(f"Ray did not start: {failure}") from failure
        log.warning("Ray did not start in time; starting it again, %d of %d.", attempt + 1, MAX_START_ATTEMPTS)


def _start(settings: Mapping[str, Any], on_attempt: Callable[[], None]) -> Exception | None:
    """Start Ray; returns its exception if it fails, without frames that would keep the started processes' handles."""
    try:
        with start_lock(), _preserve_sigterm_handler(), _new_session_per_process(), _without_job_server():
            on_attempt()  # not before: other runs may have held the lock for a minute
            ray.init(address="local", **(_OWN_SETTINGS | dict(settings)))
        _keep_token_private()
    except Exception as error:
        return error.with_traceback(None)
    return None


def _connect(address: str, settings: Mapping[str, Any]) -> None:
    """Join a cluster. Raises ConfigError if none answers.

    A process of the head serves this client alone (`ray://`). One in fifteen dies as it is forked
    (ray-project/ray#63202), unless the head was started with GRPC_ENABLE_FORK_SUPPORT=0; then another one is asked for.
    """
    for attempt in range(1, MAX_START_ATTEMPTS + 1):
        try:
            with _preserve_sigterm_handler():
                ray.init(address=address, **settings)
            return
        except ConnectionError as error:
            died = any(one in str(error) for one in _SERVER_DIED)
            if not died or attempt == MAX_START_ATTEMPTS:
                advice = (
                    f"It failed {MAX_START_ATTEMPTS} times: see the logs of Ray on the head, and start it with "
                    "GRPC_ENABLE_FORK_SUPPORT=0."
                    if died
                    else "If it asks for a token, as one does that was started where there is a ~/.ray/auth_token, set "
                    "RAY_AUTH_MODE=token."
                )
                raise ConfigError(f"RAY_ADDRESS={address}: no Ray cluster answers there ({error}). {advice}") from error
        log.warning(
            "The head's server for this Ray client died; asking for another, %d of %d.", attempt + 1, MAX_START_ATTEMPTS
        )


def _keep_token_private() -> None:
    """Ray writes the token that opens its ports so that every user of the machine can read it."""
    with suppress(OSError, RuntimeError):  # there is none, or no home
        (Path.home() / ".ray" / "auth_token").chmod(0o600)


def _kill_started_processes(before: Sequence[psutil.Process]) -> None:
    """Kill the processes of a failed start, which Ray does not do."""
    _disconnect()
    left = [child for child in psutil.Process().children(recursive=True) if child not in before]
    for child in left:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(left, timeout=10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # from Ray's handles to these processes
        gc.collect()


def _create_ray_tmpdir(settings: Mapping[str, Any]) -> str | None:
    """Create a private folder for Ray's own, which every user may write to. None if Ray's place was chosen."""
    if "RAY_TMPDIR" in os.environ or "_temp_dir" in settings or sys.platform != "linux":
        return None
    return tempfile.mkdtemp(prefix="ray-", dir="/tmp" if len(tempfile.gettempdir()) > _MAX_TMPDIR_LENGTH else None)


@contextmanager
def _preserve_sigterm_handler() -> Iterator[None]:
    """A program's own handler of SIGTERM stays, all the time: Ray would set one that raises SystemExit anywhere.

    Raises Stopped if there was none, and Ray's was called.
    """
    sets_handler = ray_utils.set_sigterm_handler
    if signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, None):
        ray_utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    except SystemExit as leaving:
        raise (RunInterrupted(signal.SIGTERM) if leaving.code == signal.SIGTERM else leaving) from None
    finally:
        ray_utils.set_sigterm_handler = sets_handler
        _reinstall_handler()


def _reinstall_handler() -> None:
    """Install Python's handler of SIGTERM again: Ray's native code replaces it on connecting, then removes it."""
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _disconnect() -> None:
    """Disconnect from Ray and end its processes. SIGTERM is handled as before, also while they end."""
    if (node := ray_worker._global_node) is not None:
        kill = node.kill_all_processes

        def kill_with_handler(**options: Any) -> None:
            _reinstall_handler()
            kill(**options)

        node.kill_all_processes = kill_with_handler
    ray.shutdown()
    _reinstall_handler()


@contextmanager
def _patched(module: Any, name: str, value: Any) -> Iterator[None]:
    """A name of a module of Ray's has this value inside."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _new_session_per_process() -> AbstractContextManager[None]:
    """Start each of Ray's processes in a session of its own.

    A signal to the driver's process group must not end them before the driver has saved: `timeout`, schedulers and
    terminals signal the whole group. They still end with the driver: see guard.py.
    """
    return _patched(ray_services, "ConsolePopen", partial(ray_services.ConsolePopen, start_new_session=True))


def _without_job_server() -> AbstractContextManager[None]:
    """Start Ray's agents as without `ray[default]`: nobody submits jobs to a Ray of ours, and it starts 4 s sooner."""
    return _patched(ray_utils, "get_dashboard_dependency_error", lambda: ImportError("not needed here"))


@contextmanager
def _default_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for the length of a start; what the user has set stays."""
    ours = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]


@contextmanager
def start_lock() -> Iterator[None]:
    """Make concurrent runs start Ray one after the other: simultaneous starts take too long. The lock ends with us."""
    path = Path(tempfile.gettempdir()) / f"skyrl-train-ray-start-{os.getuid()}.lock"
    with ExitStack() as held:
        with suppress(OSError):  # another user may have made a file of this name, and may lock it for ever
            lock = held.enter_context(os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "w"))
            deadline = time.monotonic() + START_TIMEOUT_S
            while os.fstat(lock.fileno()).st_uid == os.getuid() and time.monotonic() < deadline:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.1)
        yield


@contextmanager
def _kill_if_stuck(seconds: float, error: BaseException | None) -> Iterator[None]:
    """Kill the Ray that we started if the body takes longer, so that the body has nothing left to wait for.

    From a cluster that was joined this process can only exit: records and checkpoints are written by then.

    Args:
        error: Why the run ends. It is printed with the kill, because Ray may then end this process.
    """
    cause = "" if error is None else f" The run ended with {type(error).__name__}: {error}"

    def kill() -> None:
        if (
            not _reapers
        ):  # a cluster that was joined: its raylet is not ours, and Ray's code waits for it without an end
            print_stderr(f"The cluster's raylet on this node does not answer: left after {seconds:g} s.{cause}")
            exit_now(1)
        log.warning("Ray's processes do not answer: killed after %g s.%s", seconds, cause)
        for guard in list(_reapers):
            guard.kill_processes()

    timer = threading.Timer(seconds, kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _is_failure(error: BaseException | None) -> bool:
    """Whether somebody may want to know why a run ended so; not if it was told to."""
    return isinstance(error, Exception) and not isinstance(error, RunInterrupted)


def _remove_folders(failed: bool) -> None:
    """Remove Ray's folder of this run, but not if its logs may say what failed."""
    while _folders:
        folder = _folders.pop()
        if not failed:
            shutil.rmtree(folder, ignore_errors=True)


_users: weakref.WeakSet[Cluster] = weakref.WeakSet()
"""The Clusters that use this process's connection: the one that made it, and those with actors or slots."""
_reapers: list[RayReaper] = []
"""The guard of our own Ray, if there is one."""
_folders: list[str] = []
"""Its folder for sockets and logs. Ray's own default keeps one of every run there ever was."""
_POLL_INTERVAL_S = 1.0
_DISCONNECT_TIMEOUT_S = 30.0
"""A second is usual. A raylet that is stopped, or hangs, would hold up whoever disconnects from it for ever."""
_MAX_TMPDIR_LENGTH = 28
"""Characters: a socket's path has 107, of which Ray's names and the folder in the private one take 79."""


class Cluster:
    """Connects on enter; on exit kills this run's actors, releases its slots and disconnects.

    If there are several in one process, the last one disconnects; none does if Ray was initialised before them. A
    cluster that we started ourselves ends with its driver, even after kill -9; see guard.py.
    """

    def __init__(
        self,
        plugins: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
        *,
        num_actors: int = 0,
        preload: Sequence[str] = (),
    ):
        """
        Args:
            plugins: Modules that actors import before they create their object.
            settings: Arguments of `ray.init` that override ours; its "address" overrides RAY_ADDRESS.
            workers: How many actors there will be.
            preload: Modules that they need and import early, unless RAY_preload_python_modules names others.
        """
        self._plugins = tuple(plugins)
        self._settings = dict(settings or {})
        self._num_actors = num_actors
        self._preload = tuple(preload)
        self._actors: list[ActorHandle] = []
        self._watchers: set[asyncio.Task[None]] = set()
        self._groups: list[PlacementGroup] = []
        self._logs: Path | None = None
        self._failure: ClusterLost | None = None
        """Remembered when it is left: what goes wrong later follows from it."""

    def __enter__(self) -> Cluster:
        self.connect()
        return self

    def connect(self) -> None:
        """Connect, unless connected. For the main thread: Ray's processes end with the thread that started them."""
        if ray.is_initialized():
            return
        _users.clear()
        settings = dict(self._settings)
        address = settings.pop("address", None) or os.environ.get("RAY_ADDRESS")
        if address and address != "local":
            self._join(address, settings)
        else:
            _override_ray_settings(drivers_python=True)
            os.environ.update({key: os.environ.get(key, value) for key, value in _OWN_CLUSTER_ENV.items()})
            if folder := _create_ray_tmpdir(settings):
                settings["_temp_dir"] = f"{folder}/r"
                _folders.append(folder)
            guard = RayReaper(folder)
            try:
                with _default_environment(self._worker_pool_environment()), guard.tag_children():
                    start_local(settings, guard.start_attempt)
            except BaseException as error:
                guard.kill_processes()
                guard.close()
                _remove_folders(failed=_is_failure(error))
                raise
            _reapers.append(guard)
        _users.add(self)

    def _worker_pool_environment(self) -> dict[str, str]:
        """What Ray starts with the node: a worker for each CPU, or none.

        If most of them will become actors, they import what actors need while the driver does. Otherwise none is
        started early: idle ones only cost memory.
        """
        cpus = psutil.cpu_count() or 1
        if self._preload and cpus <= 2 * self._num_actors:
            return {
                _PRELOAD: "skyrl_train.cluster.preload",
                PRELOAD_ENV: ",".join(self._preload),
                _IDLE_WORKERS_VARIABLE: str(cpus),
            }
        return {_PRESTART: "0"}

    def _join(self, address: str, settings: Mapping[str, Any]) -> None:
        """Connect to an existing cluster. Raises ConfigError if its nodes do not have the driver's Python.

        With a job submitted to the cluster, a user's hook, or a driver outside of the cluster (`ray://`), workers keep
        the Python that they have.
        """
        if address.startswith(("http://", "https://")):
            raise ConfigError(
                f"RAY_ADDRESS={address}: a cluster's job server, to which a run is submitted (`ray job submit "
                "--working-dir . -- python -m skyrl_train.entrypoints.main_base ...`; needs skyrl-train[jobs]). To run "
                "the driver here, name the cluster itself, HOST:6379, from one of its nodes."
            )
        chosen_elsewhere = address.startswith("ray://") or any(os.environ.get(name) for name in _PYTHON_OVERRIDES)
        drivers_python = not chosen_elsewhere and not _asks_for_uv_hook()
        _override_ray_settings(drivers_python)
        env = self._runtime_env()
        if drivers_python:
            env["py_executable"] = shlex.quote(sys.executable)
        given: dict[str, Any] = {"runtime_env": env, "logging_level": logging.WARNING}
        _connect(address, given | dict(settings))
        if drivers_python:
            self._check_nodes(address)

    def _check_nodes(self, address: str) -> None:
        """Start a worker on every node, as Ray would retry forever if one cannot start. Raises ConfigError."""
        asked = {
            ray.remote(_get_sys_prefix)
            .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
            .remote(): node
            for node in _live_node_ids()
        }
        _, silent = ray.wait(list(asked), num_returns=len(asked), timeout=START_TIMEOUT_S)
        living = _live_node_ids()  # one of them may have died meanwhile, which is no question of Python
        try:
            if silent := [one for one in silent if asked[one] in living]:
                raise TimeoutError(f"{len(silent)} of {len(asked)} nodes started no worker in {START_TIMEOUT_S:g} s")
            ray.get([one for one, node in asked.items() if node in living])
        except (TimeoutError, RayError) as error:
            _disconnect()
            raise ConfigError(
                f"RAY_ADDRESS={address}: workers run the driver's Python, {sys.executable}, which must be there "
                f"on every node ({error}). Put it on a shared disk or into the nodes' image, or set "
                "RAY_ENABLE_UV_RUN_RUNTIME_ENV=1 under `uv run`, with which Ray makes an environment on each node."
            ) from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not ray.is_initialized():
            return
        with _kill_if_stuck(_DISCONNECT_TIMEOUT_S, error):
            self._close(error)

    def _close(self, error: BaseException | None) -> None:
        for watch in self._watchers:
            watch.cancel()
        dead = self.failure() is not None
        if not dead:  # or these calls would wait a minute for an answer
            for actor in self._actors:
                ray.kill(actor, no_restart=True)
            for group in self._groups:
                remove_placement_group(group)
        self._actors, self._groups = [], []
        if self not in _users:
            return
        _users.discard(self)
        if _users:
            return
        families = [guard.process_tree() for guard in _reapers]
        if dead:
            for guard in _reapers:
                guard.kill_processes()
        _disconnect()
        for guard, family in zip(_reapers, families, strict=True):
            guard.kill_processes(family)  # agents of a raylet that ended while it started them look for it for a minute
            guard.close()
        _reapers.clear()
        _remove_folders(failed=dead or _is_failure(error))

    def failure(self) -> ClusterLost | None:
        """What to raise if a process of the Ray that we started has died without which it cannot go on."""
        name = next((name for guard in _reapers if (name := guard.dead_process())), None)
        if self._failure is None and name is not None:
            self._failure = ClusterLost(f"Ray's {name} died: no process can be started or found any more.")
        return self._failure

    async def wait_until_lost(self) -> ClusterLost:
        """Returns when there is a `death`; else never."""
        while (death := self.failure()) is None:
            await asyncio.sleep(_POLL_INTERVAL_S)
            for guard in _reapers:
                guard.kill_stopped_head(_POLL_INTERVAL_S)
        return death

    @property
    def is_connected(self) -> bool:
        """Whether this process is connected to Ray, even if not by a Cluster."""
        return bool(ray.is_initialized())

    @property
    def num_cpus(self) -> float:
        """CPUs of the whole cluster, without those of the Ray task that the driver may be."""
        context = ray.get_runtime_context()
        own = context.get_assigned_resources().get("CPU", 0.0) if context.worker.mode == ray.WORKER_MODE else 0.0
        return float(ray.cluster_resources().get("CPU", 0.0)) - own

    @property
    def num_gpus(self) -> float:
        """GPUs of the whole cluster."""
        return float(ray.cluster_resources().get("GPU", 0.0))

    @property
    def num_nodes(self) -> int:
        """Number of living nodes."""
        return sum(bool(node["Alive"]) for node in ray.nodes())

    @property
    def may_autoscale(self) -> bool:
        """Whether nodes may come: not of one that this process has started; another may have an autoscaler."""
        return not _reapers

    @property
    def is_single_node(self) -> bool:
        """Whether the driver and every node are one machine."""
        return self.num_nodes == 1 and not self.is_ray_client

    @property
    def is_ray_client(self) -> bool:
        """Whether the driver is a Ray client (`ray://`), with the cluster elsewhere."""
        return bool(ray.util.client.ray.is_connected())

    @property
    def failure_detection_s(self) -> float:
        """After so long (seconds) Ray knows of an actor's death, or of its node's."""
        return 5.0 if self.is_single_node else NODE_LOSS_DETECTION_S + 5.0

    @property
    def plugins(self) -> tuple[str, ...]:
        return self._plugins

    @contextmanager
    def redirect_actor_logs(self, folder: Path) -> Iterator[None]:
        """Inside, actors that are made print to files in `folder`, one for each."""
        self._logs = folder.absolute()  # workers may have another working directory
        try:
            with log_raylet_output:
                yield
        finally:
            self._logs = None

    def actor_log_path(self, name: str) -> Path | None:
        """Where the actor of that name prints to; None if it is left to Ray, which shows it on the terminal."""
        return None if self._logs is None else self._logs / f"{name.replace(' ', '_')}.log"

    def register_actor(self, actor: ActorHandle) -> None:
        """Register an actor to be killed when the run ends."""
        self._use()
        self._actors.append(actor)

    def register_watcher(self, watch: asyncio.Task[None]) -> None:
        """Register a task that watches an actor, to be cancelled before the actors are killed."""
        self._watchers.add(watch)
        watch.add_done_callback(self._watchers.discard)

    def register_placement_group(self, group: PlacementGroup) -> None:
        """Register a placement group to be removed when the run ends."""
        self._use()
        self._groups.append(group)

    def release_placement_group(self, group: PlacementGroup) -> None:
        """Remove a placement group before the run ends; Ray kills the actors in it."""
        if group in self._groups and self.failure() is None:
            self._groups.remove(group)
            remove_placement_group(group)

    def _use(self) -> None:
        if _users:
            _users.add(self)

    def _runtime_env(self) -> dict[str, Any]:
        """The part of a runtime environment that copies users' modules to nodes that do not share our disk."""
        roots = {name.partition(".")[0] for name in self._plugins}
        found = [importlib.util.find_spec(root) for root in sorted(roots)]
        files = [Path(spec.origin) for spec in found if spec is not None and spec.origin is not None]
        modules = [str(path.parent if path.name == "__init__.py" else path) for path in files]
        return {"py_modules": modules} if modules else {}
