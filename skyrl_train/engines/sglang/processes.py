"""Starts and ends SGLang's processes without side effects on the engine's own process. Imports SGLang lazily.

By itself SGLang takes over signals, event loops, logging and multiprocessing's start method, kills the process that it
runs in if one of its processes fails, and at its end kills all child processes, including those that others started.
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
from transformers import CONFIG_MAPPING, PreTrainedConfig

_STUBS = str(Path(__file__).parent / "stand_ins")
_EXIT_GRACE_S = 5.0
"""How long SGLang's processes may take to end by themselves, in seconds."""
FOLDER_PREFIX = "skyrl-sglang-"
"""Prefix of the names of the engines' folders."""
LOCK_FILE = "lock"
_ONE_STARTS = threading.Lock()
_FOR_CHILDREN = {
    "PYTHONWARNINGS": "ignore",
    "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(64)),
    "TORCHDYNAMO_DISABLE": "1",
}
"""Environment of SGLang's processes on a CPU: no compilation, several ranks on one socket, fewer warnings."""


class SGLangProcesses:
    """SGLang's front end on a thread with an event loop, and the processes behind it."""

    def __init__(self, arguments: Mapping[str, Any], tokenizer: Any, threads: int | None, *, name: str):
        """`arguments`: of SGLang's ServerArgs. Blocks until the model is loaded; raises SGLang's exceptions."""
        self.loop = asyncio.new_event_loop()
        self.manager: Any = None
        """SGLang's TokenizerManager; to be used on `loop` only."""
        self._engine: Any = None
        self._processes: list[BaseProcess] = []
        self._files: _TempFiles
        self._closing = False
        ready: Future[None] = Future()
        start = partial(self._run, dict(arguments), tokenizer, threads, ready)
        # The processes end with the thread that started them, so it must live as long as they do.
        self._thread = threading.Thread(target=start, name=f"engine-{name}", daemon=True)
        self._thread.start()
        ready.result()
        atexit.register(self._exit)

    def watch(self, on_death: Callable[[str], None]) -> None:
        """Call `on_death` on `loop`, with a reason, if a process ends, or has ended, before `close`."""
        for process in self._processes:
            self.loop.call_soon_threadsafe(self.loop.add_reader, process.sentinel, self._ended, process, on_death)

    def kill(self) -> None:
        """Kill the processes at once."""
        _kill(self._processes)

    def close(self) -> None:
        """End the processes, then the thread. Not to be called on `loop`; closing twice is harmless."""
        if self._closing:
            return
        self._closing = True
        self.loop.call_soon_threadsafe(self._ask_to_end)
        deadline = time.monotonic() + _EXIT_GRACE_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        atexit.unregister(self._exit)

    def _exit(self) -> None:
        """Runs at exit of the interpreter, if `close` was not called."""
        self.kill()
        self._files.remove()

    def _run(self, arguments: dict[str, Any], tokenizer: Any, threads: int | None, ready: Future[None]) -> None:
        with _ONE_STARTS:
            before = set(multiprocessing.active_children())
            remove_stale_files()
            self._files = _TempFiles()
            try:
                with _isolated_process_state(arguments["device"] == "cpu", self._files.folder):
                    self._engine = _launch(arguments, tokenizer, threads, self.loop)
                self._files.name(self._engine.port_args.instance_id)
            except BaseException as error:
                _kill(set(multiprocessing.active_children()) - before)
                self._files.remove()
                self.loop.close()
                ready.set_exception(error)
                return
            self._processes = list(set(multiprocessing.active_children()) - before)
        self.manager = self._engine.tokenizer_manager
        self.manager._subprocess_watchdog.stop()
        self.manager.event_loop = self.loop  # otherwise it installs signal handlers and a task that ends the process
        reading = self.loop.create_task(self.manager.handle_loop())
        ready.set_result(None)
        try:
            self.loop.run_forever()
        finally:
            reading.cancel()
            self._clean_up()

    def _ended(self, process: BaseProcess, on_death: Callable[[str], None]) -> None:
        self.loop.remove_reader(process.sentinel)
        if not self._closing:
            process.join()
            on_death(f"its process {process.pid} ended with exit code {process.exitcode}")

    def _ask_to_end(self) -> None:
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
    """An engine's folder, for sockets, and its files in shared memory. A lock in the folder is held while it lives."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix=FOLDER_PREFIX)
        file = Path(self.folder) / "locking"
        self._lock = file.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        file.rename(file.with_name(LOCK_FILE))  # nobody finds it unlocked

    def name(self, instance: str) -> None:
        """Note SGLang's name for this engine, which is part of the names of its files in shared memory."""
        self._lock.write(instance)
        self._lock.flush()

    def remove(self) -> None:
        if not self._lock.closed:
            _remove(Path(self.folder))
            self._lock.close()


def remove_stale_files() -> None:
    """Remove the files of engines whose process was killed, so that it could not clean up.

    Other users can make folders there, too: what theirs hold would choose which of our files are deleted.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        with suppress(OSError):
            if folder.lstat().st_uid != os.getuid():
                continue
            with (folder / LOCK_FILE).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # OSError while it lives
                _remove(folder)


def _remove(folder: Path) -> None:
    with suppress(OSError):
        if instance := (folder / LOCK_FILE).read_text():
            for file in Path("/dev/shm").glob(f"sglang_*{instance}*"):
                file.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _launch(arguments: dict[str, Any], tokenizer: Any, threads: int | None, loop: asyncio.AbstractEventLoop) -> Any:
    """Start SGLang's Engine with our scheduler, on this thread."""
    policy = asyncio.get_event_loop_policy()
    from sglang.srt.entrypoints.engine import Engine

    from skyrl_train.engines.sglang.scheduler import SchedulerSettings, run_scheduler

    class FrontEnd(Engine):
        run_scheduler_process_func = staticmethod(partial(run_scheduler, SchedulerSettings(tokenizer, threads)))

        @classmethod
        def _launch_detokenizer_subprocesses(cls, **ignored: Any) -> tuple[list[Any], list[str]]:
            return [], []  # none: outputs are token ids

    asyncio.set_event_loop_policy(policy)
    asyncio.set_event_loop(loop)
    engine = FrontEnd(**arguments)
    atexit.unregister(engine.shutdown)
    return engine


@contextmanager
def _isolated_process_state(on_cpu: bool, sockets: str) -> Iterator[None]:
    """Restores on exit everything that importing and starting SGLang changes in the whole process."""
    temporary, tempfile.tempdir = tempfile.tempdir, sockets
    root = logging.getLogger()
    path, handlers, level = sys.path[:], root.handlers[:], root.level
    policy, method = asyncio.get_event_loop_policy(), multiprocessing.get_start_method(allow_none=True)
    before = {key: os.environ.get(key) for key in _FOR_CHILDREN}
    # A request may use all of max_model_len, for which SGLang needs some more positions.
    os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    if on_cpu:
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        sys.path.insert(0, _STUBS)
        os.environ.update({key: value for key, value in _FOR_CHILDREN.items() if before[key] is None})
    try:
        with warnings.catch_warnings(), _isolated_transformers_patches():
            warnings.simplefilter("ignore")
            yield
    finally:
        tempfile.tempdir, sys.path[:], root.handlers[:] = temporary, path, handlers
        root.setLevel(level)
        asyncio.set_event_loop_policy(policy)
        multiprocessing.set_start_method(method, force=True)
        for key, value in before.items():
            os.environ.pop(key, None) if value is None else os.environ.update({key: value})


_PATCHED = "standardize_rope_params"
"""The method of transformers' configurations that SGLang replaces by one that skips vision towers."""
_patch: list[Any] = []
"""SGLang's replacement of that method, once SGLang has been imported."""
_registered_by_sglang: dict[str, Any] = {}
"""Model type -> SGLang's class of its configuration."""


@contextmanager
def _isolated_transformers_patches() -> Iterator[None]:
    """Keep SGLang's changes of transformers to the time in which an engine starts: it reads configurations only then.

    Otherwise models that this process makes itself would differ. SGLang makes these changes once, when it is imported.
    """
    registered: Any = CONFIG_MAPPING._extra_content
    before, method = dict(registered), vars(PreTrainedConfig).get(_PATCHED)
    registered.update(_registered_by_sglang)
    if _patch:
        setattr(PreTrainedConfig, _PATCHED, _patch[0])
    try:
        yield
    finally:
        _registered_by_sglang.update((kind, config) for kind, config in registered.items() if kind not in before)
        registered.clear()
        registered.update(before)
        if (now := vars(PreTrainedConfig).get(_PATCHED)) is not method:
            _patch[:] = [now]
            delattr(PreTrainedConfig, _PATCHED) if method is None else setattr(PreTrainedConfig, _PATCHED, method)


def _kill(processes: Iterable[BaseProcess]) -> None:
    """Kill processes and all their descendants; returns when they are gone."""
    with suppress(ValueError):  # closed: gone already
        processes = [process for process in processes if process.is_alive()]
        family: list[psutil.Process] = []
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                family += psutil.Process(process.pid).children(recursive=True)
        for process in processes:
            process.kill()
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        for process in processes:
            process.join(_EXIT_GRACE_S)
        psutil.wait_procs(family, timeout=_EXIT_GRACE_S)
