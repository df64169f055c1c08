"""`device: auto`: which device a run is on, and the settings for it that replace untouched defaults."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from skyrl_train.config.keys import all_keys, value_at, with_value_at
from skyrl_train.config.problems import Problem, show
from skyrl_train.config.schema import Config

_ON_CPU: dict[str, Any] = {
    "generator.backend": "transformers",
    "generator.model_dtype": "float32",  # as the trainer computes
    "generator.weight_sync_backend": "gloo",  # NCCL needs accelerators
    "trainer.bf16": False,  # slow and inexact without accelerators
    "trainer.flash_attn": False,
}
"""The settings of a CPU, for keys whose default nobody has touched."""
_SPOKEN = frozenset({"generator.backend"})
"""Settings of _ON_CPU that are kept if they were written out, even as the default."""


def accelerator_present() -> bool:
    """Whether this machine has an NVIDIA device that this process may use; asked without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return False
    return any(Path("/dev").glob("nvidia[0-9]*")) or _listed_by_driver() > 0


def count_accelerators() -> int:
    """How many NVIDIA devices this process may use, asked without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    files = list(Path("/dev").glob("nvidia[0-9]*"))
    return len(files) or _listed_by_driver()


def _listed_by_driver() -> int:
    program = shutil.which("nvidia-smi")  # containers and WSL have the program without the device files
    if program is None:
        return 0
    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return listed.stdout.count("GPU ") if listed.returncode == 0 else 0


def resolve_device(config: Config, has_accelerator: bool, given: Collection[str] = ()) -> tuple[Config, list[str]]:
    """The configuration with `device` cpu or cuda and its untouched defaults fitted to it; one note of all changes.

    A value that equals the default counts as untouched even when it was written out: SkyRL's recipes spell theirs out.
    The engine is the exception: one that is named in `given`, the keys written out, stays. Other values are kept. The
    result is not frozen.
    """
    device = config.device
    notes, fitted = [], []
    if device == "auto":
        device = "cuda" if has_accelerator else "cpu"
        found = "an accelerator was found" if has_accelerator else "no accelerator was found"
        notes.append(f"device=auto -> {device}: {found}")
    changes: dict[str, Any] = {"device": device}
    for key, value in _ON_CPU.items() if device == "cpu" else ():
        if key in _SPOKEN and key in given:
            continue
        default = all_keys()[key].default
        if value_at(config, key) == default:
            changes[key] = value
            fitted.append(f"{key}={show(value)}")
    if device == "cpu":
        notes.append(f"what is not set fits a CPU ({', '.join(fitted)})" if fitted else "all keys are kept")
        notes.append("placement counts slots of CPU")
    for key, value in changes.items():
        config = with_value_at(config, key, value)
    return config, [f"{'; '.join(notes)}."] if notes else []


def device_problems(config: Config, has_accelerator: bool) -> Iterator[Problem]:
    """A device that this machine does not have; of a cluster of others nobody knows yet what it has, or will have."""
    if os.environ.get("RAY_ADDRESS", "") not in ("", "local"):
        return
    if config.device == "cuda" and not has_accelerator:
        yield Problem("device", "cuda", "cpu or auto here", "No NVIDIA device was found on this machine.")
