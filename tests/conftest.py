"""Settings of every test: no network, quiet libraries, and a check that it leaves nothing behind."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import hypothesis
import psutil
import pytest
from xdist.scheduler import LoadScopeScheduling

_SESSION = f"SKYRL_TEST_SESSION={uuid.uuid4().hex}"
"""Environment variable of every process that a test starts. It identifies daemons too."""
# Only settings that keep tests off the network and isolated: the package itself sets everything that runs need.
_HF_HOME = tempfile.mkdtemp(prefix="skyrl-test-hf-")
os.environ.update(
    {
        "SKYRL_TEST_SESSION": _SESSION.partition("=")[2],
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": _HF_HOME,
        "WANDB_MODE": "offline",
    }
)
# Ranks and engines share few cores in tests, so spinning threads cost more than they gain. The rounding of sums depends
# on the number of threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Examples are the same in every run that has imported the same modules, because hypothesis also tries their constants.
# They have no deadline: pytest-timeout limits tests on a busy machine.
hypothesis.settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("repeatable")

REPOSITORY = Path(__file__).resolve().parents[1]
_PATIENCE_S = float(os.environ.get("SKYRL_TEST_PATIENCE_S", "30"))
"""Seconds within which the processes of a test must end."""
_ENGINE = re.compile(r"test_conformance_\w+\.py::.*((?:untied-|moe-)?(?:native-)?(?:transformers|vllm|sglang))")
_LASTING = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "wandb-core")
"""Helper processes that a library keeps until the interpreter ends."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests if there is no GPU. Import torch only if there are such tests, because the import is slow."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu:
        import torch

        if not torch.cuda.is_available():
            for item in on_gpu:
                item.add_marker(pytest.mark.skip(reason="needs an accelerator"))


def pytest_collection_finish() -> None:
    """Exclude imported modules from garbage collection, which saves an eighth of the time of small tests."""
    gc.collect()
    gc.freeze()


class _Lanes(LoadScopeScheduling):
    """A scheduler that runs tests with a shared costly fixture (a file, an engine) in one worker process.

    Scopes keep the order of collection (`--no-loadscope-reorder`), so the long ones of tests/integration come first.
    """

    def _split_scope(self, nodeid: str) -> str:
        if engine := _ENGINE.search(nodeid):
            return engine[1]
        return nodeid.split("::", 1)[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> _Lanes:
    return _Lanes(config, log)  # type: ignore[arg-type]


def pytest_sessionfinish() -> None:
    shutil.rmtree(_HF_HOME, ignore_errors=True)
    for name, module in sys.modules.items():
        if name.startswith("swig_runtime_data"):
            # sentencepiece frees its types too late at exit. An additional reference keeps them to the end.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(module.type_pointer_capsule))


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a Hugging Face folder with a random two-layer model and a byte tokenizer. Tests must not write to it."""
    from skyrl_train.testing.tiny_models import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture(scope="session")
def gsm8k_jsonl() -> Path:
    """Return the folder of GSM8K's train.jsonl and test.jsonl: SKYRL_GSM8K, or shared/data/gsm8k beside the clone."""
    folder = Path(os.environ.get("SKYRL_GSM8K", REPOSITORY.parent / "shared" / "data" / "gsm8k"))
    if not (folder / "train.jsonl").is_file():
        pytest.skip(f"no GSM8K in {folder}; set SKYRL_GSM8K to the folder of train.jsonl and test.jsonl")
    return folder


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves processes, listening ports or shared-memory files behind.

    Processes that a fixture of a wider scope started before the test may stay, with their descendants. The costly scan
    of all processes runs only if a child was started.
    """
    children, reaped = _children(), _reaped()
    processes = _marked() if children else set()
    ports, shared = _listening(), _shared_memory()
    yield
    if _children() - children or _reaped() != reaped:
        left = _wait_until_gone(processes)
        assert not left, f"the test left processes behind: {left}"
    if _listening() - ports:
        gc.collect()
        assert _listening() <= ports, f"the test left listening ports: {sorted(_listening() - ports)}"
    left_shared = _wait_until_removed(shared)
    assert not left_shared, f"the test left files in /dev/shm: {sorted(left_shared)}"


def _children() -> set[int]:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # there is no child, which is cheaper to find out than the list
        return set()
    return {child.pid for child in psutil.Process().children()}


def _reaped() -> tuple[int, float]:
    """Return a value that changes whenever a child of this process has been reaped."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_minflt, usage.ru_stime + usage.ru_utime


def _marked() -> set[int]:
    """Return the living processes of this test session, anywhere in the process tree."""
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                environment = Path(f"/proc/{entry}/environ").read_bytes()
            except OSError:
                continue
            if _SESSION.encode() in environment.split(b"\0"):
                found.add(int(entry))
    return found


def _wait_until_gone(before: set[int]) -> list[str]:
    """Return the command lines of processes that do not end, and kill them so that they do not disturb later tests."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        left = [process for pid in _marked() - before if (process := _not_allowed(pid, before))]
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    described = []
    for process in left:
        try:
            described.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    return described


def _not_allowed(pid: int, before: set[int]) -> psutil.Process | None:
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE or before & {parent.pid for parent in process.parents()}:
            return None
        return None if any(name in " ".join(process.cmdline()) for name in _LASTING) else process
    except psutil.NoSuchProcess:
        return None


def _listening() -> set[int]:
    """Return the ports on which this process listens. Ports of other processes close when they end."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor was closed meanwhile, or is not a socket
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(descriptor))) as opened:
                    internet = opened.family in (socket.AF_INET, socket.AF_INET6)
                    if internet and opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        found.add(opened.getsockname()[1])
    return found


def _shared_memory() -> set[str]:
    """Return the files in /dev/shm named after this process; in CI, where nothing else creates any, all known names."""
    if not os.path.isdir("/dev/shm"):
        return set()
    everybody = ("skyrl", "torch_", "psm_") if os.environ.get("CI") else ()
    own = re.compile(rf"(?<!\d){os.getpid()}(?!\d)")
    return {name for name in os.listdir("/dev/shm") if name.startswith(everybody) or own.search(name)}


def _wait_until_removed(before: set[str]) -> set[str]:
    """Return the new files that stay. Processes of another session have mapped the files of another worker."""
    deadline = time.monotonic() + _PATIENCE_S
    while left := _shared_memory() - before:
        left -= _mapped_by_others()
        if not left or time.monotonic() > deadline:
            break
        before = before | (_shared_memory() - left)  # appeared during the wait: not from the finished test
        time.sleep(0.05)
    return left & _shared_memory()


def _mapped_by_others() -> set[str]:
    """Return the names of files in /dev/shm that processes outside this test session have mapped."""
    own = _marked() | {os.getpid()}
    found: set[str] = set()
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if entry.isdigit() and int(entry) not in own:
            try:
                maps = Path(f"/proc/{entry}/maps").read_text(errors="replace")
            except OSError:
                continue
            found.update(re.findall(r"/dev/shm/(\S+)", maps))
    return found
