"""Start and end of SGLang's processes, without side effects on the engine's own process. Imports SGLang lazily.

On its own, SGLang takes over signals, event loops, logging and multiprocessing's start method. It kills the process
that it runs in if one of its processes fails. When it ends, it kills all child processes, including those that other
code started.
"""

from __future__ import annotations

import asyncio
import atexit
import fcntl
import logging
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedTokenizerBase

_STUBS = str(Path(__file__).parent / "stubs")
_EXIT_GRACE_S = 5.0
"""Seconds that SGLang's processes have to end by themselves before they are killed."""
FOLDER_PREFIX = "skyrl-sglang-"
"""Prefix of the names of the engines' temporary folders."""
LOCK_FILE = "lock"
_start_lock = threading.Lock()
"""Held while an engine starts, because a start changes the state of the whole process."""
_CPU_ENVIRONMENT = {
    "PYTHONWARNINGS": "ignore",
    "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(64)),
    "TORCHDYNAMO_DISABLE": "1",
}
"""Environment of SGLang's processes on a CPU: no compilation, several ranks on one socket, fewer warnings."""


class SGLangProcesses:
    """SGLang's front end, which runs on a thread with an event loop, and SGLang's processes."""

    def __init__(
        self,
        arguments: Mapping[str, Any],
        tokenizer: PreTrainedTokenizerBase,
        stop_tokens: frozenset[int],
        threads: int | None,
        *,
        name: str,
    ):
        """Start SGLang and wait until the model is loaded. SGLang's exceptions propagate.

        Args:
            arguments: Arguments of SGLang's ServerArgs.
            tokenizer: The model's tokenizer.
            stop_tokens: The model's end-of-sequence tokens.
            threads: CPU threads of each process; None for torch's default.
            name: The engine's name, for the name of the thread.
        """
        self.loop = asyncio.new_event_loop()
        """The event loop of the front end, on its own thread."""
        self.manager: Any = None
        """SGLang's TokenizerManager. Only code on `loop` may use it."""
        self._engine: Any = None
        self._processes: list[BaseProcess] = []
        self._files: _TempFiles
        self._closing = False
        ready: Future[None] = Future()
        start = partial(self._run, dict(arguments), (tokenizer, stop_tokens, threads), ready)
        # The processes end with the thread that started them, so it must live as long as they do.
        self._thread = threading.Thread(target=start, name=f"engine-{name}", daemon=True)
        self._thread.start()
        ready.result()
        atexit.register(self._exit)

    @property
    def startup_phases(self) -> dict[str, float]:
        """Seconds that SGLang's first model process spent on phases of its start."""
        times = self._engine._scheduler_init_result.scheduler_infos[0]["startup_time"]
        graphs_s = sum(times["cuda_graph"].values())
        return {"weights": times["load_weight"], "KV cache": times["kv_cache_allocation"], "CUDA graphs": graphs_s}

    def watch(self, on_death: Callable[[str], None]) -> None:
        """Call a function if a process ends, or has ended, before `close`.

        Args:
            on_death: Called on `loop` with the reason, once per process.
        """
        for process in self._processes:
            self.loop.call_soon_threadsafe(self.loop.add_reader, process.sentinel, self._ended, process, on_death)

    def kill(self) -> None:
        """Kill the processes and their descendants, and wait until they have ended."""
        _kill(self._processes)

    def close(self) -> None:
        """End the processes, then the thread. Closing twice is harmless.

        This blocks and must not run on `loop`. Processes that do not end within five seconds are killed.
        """
        if self._closing:
            return
        self._closing = True
        self.loop.call_soon_threadsafe(self._request_shutdown)
        deadline = time.monotonic() + _EXIT_GRACE_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        atexit.unregister(self._exit)

    def _exit(self) -> None:
        # The interpreter exits without a call of `close`.
        self.kill()
        self._files.remove()

    def _run(
        self,
        arguments: dict[str, Any],
        settings: tuple[PreTrainedTokenizerBase, frozenset[int], int | None],
        ready: Future[None],
    ) -> None:
        with _start_lock:
            before = set(multiprocessing.active_children())
            remove_stale_files()
            self._files = _TempFiles()
            try:
                with _isolated_process_state(arguments["device"] == "cpu", self._files.folder):
                    self._engine = _launch(arguments, settings, self.loop)
            except BaseException as error:
                _kill(set(multiprocessing.active_children()) - before)
                self._files.remove()
                self.loop.close()
                ready.set_exception(error)
                return
            self._processes = list(set(multiprocessing.active_children()) - before)
        self.manager = self._engine.tokenizer_manager
        self.manager._subprocess_watchdog.stop()
        # With its own loop, the manager would install signal handlers and a task that ends this process.
        self.manager.event_loop = self.loop
        handle_task = self.loop.create_task(self.manager.handle_loop())
        ready.set_result(None)
        try:
            self.loop.run_forever()
        finally:
            handle_task.cancel()
            self._clean_up()

    def _ended(self, process: BaseProcess, on_death: Callable[[str], None]) -> None:
        self.loop.remove_reader(process.sentinel)
        if not self._closing:
            process.join()
            on_death(f"its process {process.pid} ended with exit code {process.exitcode}")

    def _request_shutdown(self) -> None:
        from sglang.srt.managers.io_struct import ShutdownReq

        self.manager._dispatch_to_scheduler(ShutdownReq())

    def _clean_up(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
        for process in self._processes:
            self.loop.remove_reader(process.sentinel)
            process.close()
        for socket in (self.manager.recv_from_detokenizer, self.manager.send_to_scheduler, self._engine.send_to_rpc):
            socket.context.destroy(linger=0)
        self.loop.close()
        self._files.remove()


class _TempFiles:
    """The folder of an engine's sockets, in which the engine holds a lock."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix=FOLDER_PREFIX)
        file = Path(self.folder) / "locking"
        self._lock = file.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        file.rename(file.with_name(LOCK_FILE))  # The lock file never exists unlocked.

    def remove(self) -> None:
        if not self._lock.closed:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._lock.close()


def remove_stale_files() -> None:
    """Remove the folders of this user's engines whose process was killed before it could clean up."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        with suppress(OSError):
            if folder.lstat().st_uid != os.getuid():
                continue
            with (folder / LOCK_FILE).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # This raises OSError while the engine is alive.
                shutil.rmtree(folder, ignore_errors=True)


def _launch(
    arguments: dict[str, Any],
    settings: tuple[PreTrainedTokenizerBase, frozenset[int], int | None],
    loop: asyncio.AbstractEventLoop,
) -> Any:
    """Start SGLang's Engine on this thread, with our front end and scheduler, and without a detokenizer."""
    policy = asyncio.get_event_loop_policy()
    from sglang.srt.entrypoints.engine import Engine, init_tokenizer_manager

    from skyrl_train.engines.sglang.front_end import FrontEnd
    from skyrl_train.engines.sglang.scheduler import SchedulerSettings, run_scheduler

    class Launcher(Engine):
        init_tokenizer_manager_func = staticmethod(partial(init_tokenizer_manager, TokenizerManagerClass=FrontEnd))
        run_scheduler_process_func = staticmethod(partial(run_scheduler, SchedulerSettings(*settings)))

        @classmethod
        def _launch_detokenizer_subprocesses(cls, **ignored: Any) -> tuple[list[Any], list[str]]:
            return [], []  # Outputs are token ids, so no detokenizer is needed.

    asyncio.set_event_loop_policy(policy)
    asyncio.set_event_loop(loop)
    engine = Launcher(**arguments)
    atexit.unregister(engine.shutdown)
    return engine


@contextmanager
def _isolated_process_state(on_cpu: bool, socket_folder: str) -> Iterator[None]:
    """Set up the process for a start of SGLang, and on exit restore what the import and the start have changed."""
    tempdir, tempfile.tempdir = tempfile.tempdir, socket_folder
    root = logging.getLogger()
    path, handlers, level = sys.path[:], root.handlers[:], root.level
    policy, method = asyncio.get_event_loop_policy(), multiprocessing.get_start_method(allow_none=True)
    before = {key: os.environ.get(key) for key in _CPU_ENVIRONMENT}
    # A request may use all of max_model_len, for which SGLang needs some additional positions.
    os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    if on_cpu:
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        sys.path.insert(0, _STUBS)
        os.environ.update({key: value for key, value in _CPU_ENVIRONMENT.items() if before[key] is None})
    try:
        with warnings.catch_warnings(), _isolated_transformers_patches():
            warnings.simplefilter("ignore")
            yield
    finally:
        tempfile.tempdir, sys.path[:], root.handlers[:] = tempdir, path, handlers
        root.setLevel(level)
        asyncio.set_event_loop_policy(policy)
        multiprocessing.set_start_method(method, force=True)
        for key, value in before.items():
            os.environ.pop(key, None) if value is None else os.environ.update({key: value})


_PATCHED_METHOD = "standardize_rope_params"
"""The method of transformers' configurations that SGLang replaces with one that skips vision towers."""
_patch: list[Any] = []
"""SGLang's replacement of that method, once SGLang has been imported."""
_registered_by_sglang: dict[str, Any] = {}
"""SGLang's configuration classes by model type."""


@contextmanager
def _isolated_transformers_patches() -> Iterator[None]:
    """Apply SGLang's patches of transformers inside the block, and remove them afterwards.

    SGLang patches transformers once, when it is imported, and reads configurations only while an engine starts. Models
    that this process creates itself would differ with the patches.
    """
    registered: Any = CONFIG_MAPPING._extra_content
    before, method = dict(registered), vars(PreTrainedConfig).get(_PATCHED_METHOD)
    registered.update(_registered_by_sglang)
    if _patch:
        setattr(PreTrainedConfig, _PATCHED_METHOD, _patch[0])
    try:
        yield
    finally:
        _registered_by_sglang.update((kind, config) for kind, config in registered.items() if kind not in before)
        registered.clear()
        registered.update(before)
        if (patched := vars(PreTrainedConfig).get(_PATCHED_METHOD)) is not method:
            _patch[:] = [patched]
            if method is None:
                delattr(PreTrainedConfig, _PATCHED_METHOD)
            else:
                setattr(PreTrainedConfig, _PATCHED_METHOD, method)


def _kill(processes: Iterable[BaseProcess]) -> None:
    """Kill processes and all their descendants, and wait until they have ended."""
    with suppress(ValueError):  # A closed process has ended already.
        processes = [process for process in processes if process.is_alive()]
        descendants: list[psutil.Process] = []
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                descendants += psutil.Process(process.pid).children(recursive=True)
        for process in processes:
            process.kill()
        for descendant in descendants:
            with suppress(psutil.NoSuchProcess):
                descendant.kill()
        for process in processes:
            process.join(_EXIT_GRACE_S)
        psutil.wait_procs(descendants, timeout=_EXIT_GRACE_S)
