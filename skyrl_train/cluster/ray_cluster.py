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
    # Ray runs workers at nice 15, but here they do the actual work. At a lower priority than everything else on the
    # machine, all threads of a matrix product wait for the one that was pre-empted.
    "RAY_worker_niceness": "0",
    # Spinning for a pre-empted thread slowed a step from 1.3 s to 10-44 s on a busy machine; it rarely gains much.
    "OMP_WAIT_POLICY": "PASSIVE",
}
OBJECT_STORE_BYTES = 2 << 30
"""Size of the object store, enough for the token ids and masks of a step and the extra data of a mini-batch's update.
Replayed routing needs much more, which Ray spills to disk. Ray's own default is 30 % of the memory.
"""
_OWN_SETTINGS = {
    "include_dashboard": False,
    "object_store_memory": OBJECT_STORE_BYTES,
    "logging_level": logging.WARNING,
}
_PRELOAD, _PRESTART = "RAY_preload_python_modules", "RAY_prestart_worker_first_driver"
_IDLE_WORKERS_VARIABLE = "RAY_num_workers_soft_limit"
"""Number of idle workers that Ray keeps. By default as many as there are free CPUs: none once slots are reserved."""
_TOKEN_LOGGER = "ray._private.authentication.authentication_token_setup"
"""Ray's logger that warns at every start that access requires a token."""
_PYTHON_OVERRIDES = ("RAY_RUNTIME_ENV_HOOK", "RAY_JOB_CONFIG_JSON_ENV_VAR")
"""Variables that show that the workers' Python is chosen elsewhere: by a hook, or by a job submitted to the cluster."""
START_TIMEOUT_S = 60.0
"""Limit of a start's wait for another run's start of Ray, and of a node's start of a worker."""
MAX_START_ATTEMPTS = 4
"""Maximum number of attempts to start or join Ray. Its node process gives its helpers only 15 s to start
(ray-project/ray#65983), which is too short for a first import on busy cores. The next attempt is faster.
"""

_SERVER_DIED = ("Starting Ray client server failed", "Proxy failed to Connect to backend")
"""Messages of the head when its server process of one client has died."""


@contextmanager
def import_in_background(module: str) -> Iterator[None]:
    """Import a module in another thread during the block. Its end waits for the import, and raises its error."""
    with ThreadPoolExecutor(1, "importing") as thread:
        imported = thread.submit(import_without_gc, [module])
        yield
        imported.result()


def _override_ray_settings(uses_driver_python: bool) -> None:
    """Override settings that Ray read from the environment on import, because a user's program may import it before us.

    Ray's hook for `uv run` copies the working tree and builds a new environment for the workers, without packages that
    are not in the lock file. It is off if workers run the driver's Python, unless RAY_ENABLE_UV_RUN_RUNTIME_ENV is
    set. Equal log lines of several workers are printed, not counted ("repeated 2x across cluster").
    """
    ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = _asks_for_uv_hook(default=not uses_driver_python)
    ray_logging.RAY_DEDUP_LOGS = ray_constants.env_bool("RAY_DEDUP_LOGS", False)
    logging.getLogger(_TOKEN_LOGGER).setLevel(logging.ERROR)


def _asks_for_uv_hook(default: bool = False) -> bool:
    return bool(ray_constants.env_bool("RAY_ENABLE_UV_RUN_RUNTIME_ENV", default))


def _live_node_ids() -> list[str]:
    """Return Ray's ids of the live nodes."""
    return [node["NodeID"] for node in ray.nodes() if node["Alive"]]


def _get_sys_prefix() -> str:
    return sys.prefix


def start_local(settings: Mapping[str, Any], on_attempt: Callable[[], None]) -> None:
    """Start Ray on this machine, with further attempts if it is too slow.

    Args:
        settings: Arguments of `ray.init` that override this module's.
        on_attempt: Called before each attempt; None calls nothing.

    Raises:
        ClusterLost: Ray does not start.
        ValueError: Ray rejects a setting; or TypeError.
        SkyRLError: A signal asked the run to end.
    """
    before = psutil.Process().children(recursive=True)
    for attempt in range(1, MAX_START_ATTEMPTS + 1):
        try:
            failure = _start(settings, on_attempt)
        except BaseException:  # asked to stop: disconnect before the raylet is killed, or it ends this process
            _kill_started_processes(before)
            raise
        if failure is None:
            return
        _kill_started_processes(before)
        if isinstance(failure, (ValueError, TypeError, SkyRLError)):
            raise failure
        if "timed out during startup" not in str(failure) or attempt == MAX_START_ATTEMPTS:
            raise ClusterLost(f"Ray did not start: {failure}") from failure
        log.warning("Ray did not start in time; starting it again, attempt %d of %d.", attempt + 1, MAX_START_ATTEMPTS)


def _start(settings: Mapping[str, Any], on_attempt: Callable[[], None]) -> Exception | None:
    """Start Ray. Return its exception if it fails, without frames that would keep the started processes' handles."""
    try:
        with start_lock(), _preserve_sigterm_handler(), _new_session_per_process(), _without_job_server():
            on_attempt()  # not earlier: other runs may have held the lock for a minute
            ray.init(address="local", **(_OWN_SETTINGS | dict(settings)))
        _keep_token_private()
    except Exception as error:
        return error.with_traceback(None)
    return None


def _connect(address: str, settings: Mapping[str, Any]) -> None:
    """Connect to a running cluster.

    With `ray://`, a process of the head serves only this client. One in fifteen dies as it is forked
    (ray-project/ray#63202), unless the head was started with GRPC_ENABLE_FORK_SUPPORT=0. Another attempt gets a new
    process.

    Raises:
        ConfigError: No cluster answers at the address.
    """
    for attempt in range(1, MAX_START_ATTEMPTS + 1):
        try:
            with _preserve_sigterm_handler():
                ray.init(address=address, **settings)
            return
        except ConnectionError as error:
            died = any(message in str(error) for message in _SERVER_DIED)
            if not died or attempt == MAX_START_ATTEMPTS:
                hint = (
                    f"{MAX_START_ATTEMPTS} attempts failed. See Ray's logs on the head, and start the head with "
                    "GRPC_ENABLE_FORK_SUPPORT=0."
                    if died
                    else "If it requires a token, for example because ~/.ray/auth_token existed when it started, set "
                    "RAY_AUTH_MODE=token."
                )
                raise ConfigError(f"RAY_ADDRESS={address}: no Ray cluster answers there ({error}). {hint}") from error
        log.warning(
            "The head's server for this Ray client died; connecting again, attempt %d of %d.",
            attempt + 1,
            MAX_START_ATTEMPTS,
        )


def _keep_token_private() -> None:
    """Make Ray's access token readable only by its owner. Ray writes it readable by every user of the machine."""
    with suppress(OSError, RuntimeError):  # there is no token or no home folder
        (Path.home() / ".ray" / "auth_token").chmod(0o600)


def _kill_started_processes(before: Sequence[psutil.Process]) -> None:
    """Disconnect and kill the processes of a failed start, which Ray leaves running."""
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
    """Create a private folder for Ray, whose default is open to every user. None if the user chose Ray's folder."""
    if "RAY_TMPDIR" in os.environ or "_temp_dir" in settings or sys.platform != "linux":
        return None
    return tempfile.mkdtemp(prefix="ray-", dir="/tmp" if len(tempfile.gettempdir()) > _MAX_TMPDIR_LENGTH else None)


@contextmanager
def _preserve_sigterm_handler() -> Iterator[None]:
    """Keep the program's handler of SIGTERM: Ray would install one that raises SystemExit anywhere.

    Raises:
        RunInterrupted: There was no handler, and SIGTERM reached Ray's.
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
    """Install Python's handler of SIGTERM again, because Ray's native code replaces it on connecting, then removes
    it.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _disconnect() -> None:
    """Disconnect from Ray and end its processes. SIGTERM is handled as before, even while they end."""
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
    """Set an attribute of one of Ray's modules to another value inside the block."""
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


def _new_session_per_process() -> AbstractContextManager[None]:
    """Start each of Ray's processes in its own session inside the block.

    `timeout`, schedulers and terminals signal the driver's whole process group. Such a signal must not end Ray before
    the driver has saved. The processes still end with the driver: see ray_reaper.py.
    """
    return _patched(ray_services, "ConsolePopen", partial(ray_services.ConsolePopen, start_new_session=True))


def _without_job_server() -> AbstractContextManager[None]:
    """Start Ray's agents without the job server of `ray[default]` inside the block. Nobody submits jobs to our own
    Ray, and it starts 4 s sooner.
    """
    return _patched(ray_utils, "get_dashboard_dependency_error", lambda: ImportError("not needed here"))


@contextmanager
def _default_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the block, except those that the user has set."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextmanager
def start_lock() -> Iterator[None]:
    """Hold a lock with which concurrent runs start Ray one after another: simultaneous starts take too long.

    Proceeds without the lock after a minute, or if the file belongs to another user. The lock ends with the process.
    """
    path = Path(tempfile.gettempdir()) / f"skyrl-train-ray-start-{os.getuid()}.lock"
    with ExitStack() as stack:
        with suppress(OSError):  # another user may have created this file, and may lock it forever
            lock = stack.enter_context(os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "w"))
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
    """Kill our own Ray if the block takes longer than `seconds`, so that the block has nothing left to wait for.

    If the cluster is not ours, this process exits instead: records and checkpoints are written by then.

    Args:
        seconds: Time limit of the block.
        error: Why the run ends. It is printed with the kill, because Ray may then end this process.
    """
    cause = "" if error is None else f" The run ended with {type(error).__name__}: {error}"

    def kill() -> None:
        if not _reapers:  # the raylet of a cluster that we joined is not ours, and Ray's code waits for it forever
            print_stderr(f"The cluster's raylet on this node does not respond: exiting after {seconds:g} s.{cause}")
            exit_now(1)
        log.warning("Ray's processes do not respond: killing them after %g s.%s", seconds, cause)
        for reaper in list(_reapers):
            reaper.kill_processes()

    timer = threading.Timer(seconds, kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _is_failure(error: BaseException | None) -> bool:
    """Return True if `error` is a failure, and not a requested stop."""
    return isinstance(error, Exception) and not isinstance(error, RunInterrupted)


def _remove_folders(failed: bool) -> None:
    """Remove Ray's folder of this run, unless its logs may explain a failure."""
    while _folders:
        folder = _folders.pop()
        if not failed:
            shutil.rmtree(folder, ignore_errors=True)


_users: weakref.WeakSet[Cluster] = weakref.WeakSet()
"""Clusters that use this process's connection: the one that made it, and those with actors or placement groups."""
_reapers: list[RayReaper] = []
"""Reaper of our own Ray, if we started one."""
_folders: list[str] = []
"""Ray's folder for sockets and logs of this run. Ray's default keeps one of every run."""
_POLL_INTERVAL_S = 1.0
_DISCONNECT_TIMEOUT_S = 30.0
"""Limit of a disconnect, which usually takes a second. It would wait forever for a raylet that is stopped or hangs."""
_MAX_TMPDIR_LENGTH = 28
"""Characters. The path of a socket may have 107, of which Ray's names and the name of the private folder take 79."""


class Cluster:
    """A connection to Ray that a run opens on enter and closes on exit.

    On exit it kills this run's actors, removes its placement groups and disconnects. If a process has several, the
    last one disconnects; none does if Ray was initialized before them. A cluster that this class started ends with its
    driver, even after kill -9: see ray_reaper.py.
    """

    def __init__(
        self,
        plugins: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
        *,
        num_actors: int = 0,
        preload: Sequence[str] = (),
    ):
        """Describe the cluster; nothing is started or connected yet.

        Args:
            plugins: Modules that actors import before they create their object.
            settings: Arguments of `ray.init` that override this module's. "address" overrides RAY_ADDRESS.
            num_actors: Number of actors that the run will have.
            preload: Modules that actors import early on our own cluster, if it has at most 2 CPUs per actor.
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
        """Stored when it is first seen, because later errors follow from it."""

    def __enter__(self) -> Cluster:
        self.connect()
        return self

    def connect(self) -> None:
        """Connect to Ray, or start it, unless this process is connected.

        Call it in the main thread: Ray's processes end with the thread that started them.

        Raises:
            ConfigError: RAY_ADDRESS cannot be used, or its nodes do not have the driver's Python.
            ClusterLost: Our own Ray does not start.
            ValueError: Ray rejects one of the settings; or TypeError.
            RunInterrupted: SIGTERM arrived during the start, and the program has no handler for it.
        """
        if ray.is_initialized():
            return
        _users.clear()
        settings = dict(self._settings)
        address = settings.pop("address", None) or os.environ.get("RAY_ADDRESS")
        if address and address != "local":
            self._join(address, settings)
        else:
            _override_ray_settings(uses_driver_python=True)
            os.environ.update({key: os.environ.get(key, value) for key, value in _OWN_CLUSTER_ENV.items()})
            if folder := _create_ray_tmpdir(settings):
                settings["_temp_dir"] = f"{folder}/r"
                _folders.append(folder)
            reaper = RayReaper(folder)
            try:
                with _default_environment(self._worker_pool_environment()), reaper.tag_children():
                    start_local(settings, reaper.start_attempt)
            except BaseException as error:
                reaper.kill_processes()
                reaper.close()
                _remove_folders(failed=_is_failure(error))
                raise
            _reapers.append(reaper)
        _users.add(self)

    def _worker_pool_environment(self) -> dict[str, str]:
        """Return the variables that control which workers Ray starts with the node: one for each CPU, or none.

        If most of them will become actors, they import what actors need while the driver does. Otherwise none is
        started early, because idle workers only cost memory.
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
        """Connect to an existing cluster.

        With a job submitted to the cluster, a user's hook, or a driver outside of the cluster (`ray://`), workers keep
        the Python that they have.

        Raises:
            ConfigError: The address is a job server, no cluster answers, or its nodes do not have the driver's Python.
        """
        if address.startswith(("http://", "https://")):
            raise ConfigError(
                f"RAY_ADDRESS={address}: this is the address of a job server. To submit a run, use `ray job submit "
                "--working-dir . -- python -m skyrl_train.entrypoints.main_base ...` (needs skyrl-train[jobs]). To run "
                "the driver here, on a node of the cluster, set RAY_ADDRESS to the cluster itself, HOST:6379."
            )
        chosen_elsewhere = address.startswith("ray://") or any(os.environ.get(name) for name in _PYTHON_OVERRIDES)
        uses_driver_python = not chosen_elsewhere and not _asks_for_uv_hook()
        _override_ray_settings(uses_driver_python)
        env = self._runtime_env()
        if uses_driver_python:
            env["py_executable"] = shlex.quote(sys.executable)
        arguments: dict[str, Any] = {"runtime_env": env, "logging_level": logging.WARNING}
        _connect(address, arguments | dict(settings))
        if uses_driver_python:
            self._check_nodes(address)

    def _check_nodes(self, address: str) -> None:
        """Start a worker on every node, because Ray would retry forever if a node cannot start any.

        Raises:
            ConfigError: A node starts no worker with the driver's Python. Disconnects first.
        """
        node_by_ref = {
            ray.remote(_get_sys_prefix)
            .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
            .remote(): node
            for node in _live_node_ids()
        }
        _, pending = ray.wait(list(node_by_ref), num_returns=len(node_by_ref), timeout=START_TIMEOUT_S)
        live_nodes = _live_node_ids()  # a node that has died in the meantime does not count
        try:
            if pending := [ref for ref in pending if node_by_ref[ref] in live_nodes]:
                raise TimeoutError(
                    f"{len(pending)} of {len(node_by_ref)} nodes started no worker in {START_TIMEOUT_S:g} s"
                )
            ray.get([ref for ref, node in node_by_ref.items() if node in live_nodes])
        except (TimeoutError, RayError) as error:
            _disconnect()
            raise ConfigError(
                f"RAY_ADDRESS={address}: workers run the driver's Python, {sys.executable}, which must exist "
                f"on every node ({error}). Put it on a shared disk or into the nodes' image, or set "
                "RAY_ENABLE_UV_RUN_RUNTIME_ENV=1 under `uv run`, which makes Ray create an environment on each node."
            ) from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not ray.is_initialized():
            return
        with _kill_if_stuck(_DISCONNECT_TIMEOUT_S, error):
            self._close(error)

    def _close(self, error: BaseException | None) -> None:
        for task in self._watchers:
            task.cancel()
        dead = self.failure() is not None
        if not dead:  # otherwise these calls would wait a minute for an answer
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
        process_trees = [reaper.process_tree() for reaper in _reapers]
        if dead:
            for reaper in _reapers:
                reaper.kill_processes()
        _disconnect()
        for reaper, process_tree in zip(_reapers, process_trees, strict=True):
            reaper.kill_processes(process_tree)  # agents of a raylet that ended as it started them survive for a minute
            reaper.close()
        _reapers.clear()
        _remove_folders(failed=dead or _is_failure(error))

    def failure(self) -> ClusterLost | None:
        """Return the error to raise if an essential Ray process of our own cluster has died, else None."""
        name = next((name for reaper in _reapers if (name := reaper.dead_process())), None)
        if self._failure is None and name is not None:
            self._failure = ClusterLost(f"Ray's {name} died: processes can no longer be started or found.")
        return self._failure

    async def wait_until_lost(self) -> ClusterLost:
        """Wait until `failure` returns an error, and return it. Never returns otherwise.

        Also kills essential Ray processes of our own cluster that have been stopped (SIGSTOP) for a minute.
        """
        while (failure := self.failure()) is None:
            await asyncio.sleep(_POLL_INTERVAL_S)
            for reaper in _reapers:
                reaper.kill_stopped_head(_POLL_INTERVAL_S)
        return failure

    @property
    def is_connected(self) -> bool:
        """True if this process is connected to Ray, even if not by a Cluster."""
        return bool(ray.is_initialized())

    @property
    def num_cpus(self) -> float:
        """CPUs of the whole cluster, without those of the Ray task in which the driver may run."""
        context = ray.get_runtime_context()
        own = context.get_assigned_resources().get("CPU", 0.0) if context.worker.mode == ray.WORKER_MODE else 0.0
        return float(ray.cluster_resources().get("CPU", 0.0)) - own

    @property
    def num_gpus(self) -> float:
        """GPUs of the whole cluster."""
        return float(ray.cluster_resources().get("GPU", 0.0))

    @property
    def num_nodes(self) -> int:
        """Number of live nodes."""
        return sum(bool(node["Alive"]) for node in ray.nodes())

    @property
    def may_autoscale(self) -> bool:
        """True if nodes may be added: another cluster may have an autoscaler, one that this process started has
        none.
        """
        return not _reapers

    @property
    def is_single_node(self) -> bool:
        """True if the driver and all nodes are one machine."""
        return self.num_nodes == 1 and not self.is_ray_client

    @property
    def is_ray_client(self) -> bool:
        """True if the driver is a Ray client (`ray://`) outside of the cluster."""
        return bool(ray.util.client.ray.is_connected())

    @property
    def failure_detection_s(self) -> float:
        """Seconds after which Ray knows of the death of an actor or its node."""
        return 5.0 if self.is_single_node else NODE_LOSS_DETECTION_S + 5.0

    @property
    def plugins(self) -> tuple[str, ...]:
        """Modules that actors import before they create their object."""
        return self._plugins

    @contextmanager
    def redirect_actor_logs(self, folder: Path) -> Iterator[None]:
        """Make actors that are created inside the block write their output to files in `folder`, one per actor.

        The output of Ray's raylets goes to the log instead of the terminal inside the block.
        """
        self._logs = folder.absolute()  # workers may have another working directory
        try:
            with log_raylet_output:
                yield
        finally:
            self._logs = None

    def actor_log_path(self, name: str) -> Path | None:
        """Return the log file of an actor, or None if Ray shows its output on the terminal."""
        return None if self._logs is None else self._logs / f"{name.replace(' ', '_')}.log"

    def register_actor(self, actor: ActorHandle) -> None:
        """Register an actor to be killed when the run ends."""
        self._use()
        self._actors.append(actor)

    def register_watcher(self, task: asyncio.Task[None]) -> None:
        """Register a task that watches an actor, to be cancelled before the actors are killed."""
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)

    def register_placement_group(self, group: PlacementGroup) -> None:
        """Register a placement group to be removed when the run ends."""
        self._use()
        self._groups.append(group)

    def release_placement_group(self, group: PlacementGroup) -> None:
        """Remove a registered placement group before the run ends. Ray kills the actors in it."""
        if group in self._groups and self.failure() is None:
            self._groups.remove(group)
            remove_placement_group(group)

    def _use(self) -> None:
        if _users:
            _users.add(self)

    def _runtime_env(self) -> dict[str, Any]:
        """Return the part of a runtime environment that copies plugins to nodes that do not share the driver's disk."""
        roots = {name.partition(".")[0] for name in self._plugins}
        specs = [importlib.util.find_spec(root) for root in sorted(roots)]
        files = [Path(spec.origin) for spec in specs if spec is not None and spec.origin is not None]
        modules = [str(path.parent if path.name == "__init__.py" else path) for path in files]
        return {"py_modules": modules} if modules else {}
