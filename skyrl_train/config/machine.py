"""This machine: its accelerators, the settings that fit them, and what a configuration names that must be there.

Looked at before torch and Ray start. Names that may be on the hub are left to whoever loads them.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from skyrl_train.config.keys import all_keys, value_at, with_value_at
from skyrl_train.config.predicates import Uses, cpus_of_hosts, evaluates, slots_of
from skyrl_train.config.problems import Problem, show
from skyrl_train.config.schema import Config
from skyrl_train.config.sources import (
    OTHER_FILES,
    SUFFIXES,
    addresses,
    is_address,
    is_file_of_rows,
    local_path,
    may_be_on_hub,
    split_of,
)
from skyrl_train.listening import API_KEY

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


# -- Files, models, packages, slots


INSTALL = {
    "vllm": "`uv run --extra vllm ...` on GPUs, `scripts/cpu_engines` on CPUs",
    "sglang": "`uv run --extra sglang ...` on GPUs, `scripts/cpu_engines` on CPUs",
}
"""Engines that are packages of their own -> how to get them."""
ENGINE_MODEL = "generator.model_name"
"""The key of the model that engines load, if it is not the policy's."""
TRACKERS = ("mlflow", "tensorboard", "trackio", "wandb")
"""Trackers that are packages of the same name, and extras of it."""
S3 = "s3fs"
"""The package that reads and writes s3:// addresses."""
LEAST_CPU_SHARE = 0.1
"""Share of a CPU that every slot needs: with less, ranks only wait for each other."""


def missing(config: Config, uses: Uses) -> Iterator[Problem]:
    """Everything that is not here; raises nothing."""
    yield from _data(config, uses)
    yield from _models(config, uses)
    yield from _other_files(config, uses)
    yield from _folders(config, uses)
    if uses.engines and not config.generator.run_engines_locally and not os.environ.get(API_KEY):
        advice = f"Set the environment variable {API_KEY} to the token of the servers."
        yield Problem("generator.run_engines_locally", False, f"true without {API_KEY}", advice)
    for name in [config.trainer.logger] if isinstance(config.trainer.logger, str) else config.trainer.logger:
        if name in TRACKERS and not _is_installed(name):
            advice = f"Install it: `uv run --extra {name} ...`, or leave it out."
            yield Problem("trainer.logger", name, "a tracker that is installed", advice)
    if importlib.util.find_spec(S3) is None:
        for key, address in addresses(config):
            if address.startswith("s3://"):
                allowed, advice = "a path where s3fs is not installed", "Install it: `uv run --extra s3 ...`."
                yield Problem(key, address, allowed, advice)
    backend = config.generator.backend
    local_engines = uses.engines and config.generator.run_engines_locally
    if local_engines and backend in INSTALL and importlib.util.find_spec(backend) is None:
        yield Problem("generator.backend", backend, "an engine that is installed", f"Install it: {INSTALL[backend]}.")
    if _own_machine():  # else nobody knows the nodes yet
        yield from _slots(config, uses)


def _is_installed(package: str) -> bool:
    """Whether it can be imported; a mere folder of that name, as W&B and MLflow leave where they run, is none."""
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None


def _is_connected() -> bool:
    """Whether a program of the user's has started Ray itself; asked without importing it."""
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def data_sources(config: Config, uses: Uses) -> Iterator[tuple[str, str]]:
    """(key, value) of all data that is read."""
    for name, used in (("train_data", uses.train_data), ("val_data", uses.val_data and evaluates(config.trainer))):
        yield from ((f"data.{name}", source) for source in getattr(config.data, name) if used)


def _data(config: Config, uses: Uses) -> Iterator[Problem]:
    if uses.train_data and not config.data.train_data:
        yield Problem("data.train_data", [], "at least one file or dataset")
    if uses.val_data and not uses.learner and not any(data_sources(config, uses)):
        advice = "An evaluation needs data; leave trainer.eval_before_train or trainer.eval_interval on."
        yield Problem("data.val_data", config.data.val_data, "at least one file or dataset", advice)
    for key, source in data_sources(config, uses):
        path = os.path.expanduser(split_of(local_path(source))[0])
        if os.path.splitext(path)[1].lower() in OTHER_FILES:
            allowed = f"a file that ends in {', '.join(SUFFIXES)}"
            advice = "Convert it, for instance with datasets.load_dataset('csv', data_files=...) and its to_parquet."
            yield Problem(key, source, allowed, advice)
        elif is_address(path):
            continue  # looked at by whoever starts the run
        elif is_file_of_rows(path) and not os.path.isfile(path):
            yield Problem(key, source, "a file that exists", _instead(path))
        elif not os.path.exists(path) and not may_be_on_hub(path):
            yield Problem(key, source, "a file, a folder or a dataset's name on the hub", _instead(path))


def _instead(path: str) -> str:
    """What exists, for a path that does not."""
    folder = os.path.abspath(os.path.dirname(path))
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))[:6]
    except FileNotFoundError:
        return f"There is no folder {folder} either."
    except OSError as error:
        return f"{folder} cannot be read: {error.strerror}."
    return f"In {folder} there is {', '.join(names) or 'nothing'}."


def model_paths(config: Config, uses: Uses) -> Iterator[tuple[str, str]]:
    """(key, value) of all models that are loaded."""
    trainer, slots = config.trainer, slots_of(config, uses)
    used = {
        "policy": True,
        "ref": bool(slots.reference or slots.reference_colocated),
        "critic": bool(slots.critic or slots.critic_colocated),
        "reward": uses.rewards,
    }
    for role in (name for name, is_used in used.items() if is_used):
        path = getattr(trainer, role).model.path
        follows = role == "ref" and path == trainer.policy.model.path
        if path is not None and not follows:
            yield f"trainer.{role}.model.path", path
    served = config.generator.model_name
    if uses.engines and config.generator.run_engines_locally and served != trainer.policy.model.path:
        yield ENGINE_MODEL, served


def _models(config: Config, uses: Uses) -> Iterator[Problem]:
    for key, path in model_paths(config, uses):
        if (problem := _model_problem(key, path)) is not None:
            yield problem


def _model_problem(key: str, named: str) -> Problem | None:
    path = local_path(named)
    if is_address(path):
        return None  # looked at by whoever starts the run
    if os.path.isdir(path):
        advice = "It has no config.json, which every model's folder has."
        there = os.path.isfile(os.path.join(path, "config.json"))
        return None if there else Problem(key, named, "a model's folder", advice)
    if path.startswith("~"):
        return Problem(key, path, "written out", "The shell leaves ~ as it is behind a =; write $HOME.")
    allowed = "a model's folder or its name on the hub"
    return None if may_be_on_hub(path) else Problem(key, path, allowed, _instead(path))


def _other_files(config: Config, uses: Uses) -> Iterator[Problem]:
    template, trainer = config.generator.chat_template, config.trainer
    if template.source == "file" and template.name_or_path and not os.path.isfile(template.name_or_path):
        key = "generator.chat_template.name_or_path"
        yield Problem(key, template.name_or_path, "a file with source=file", _instead(template.name_or_path))
    resumes = uses.learner and trainer.resume_mode == "from_path" and trainer.resume_path
    if resumes and not is_address(trainer.resume_path) and not os.path.isdir(str(trainer.resume_path)):
        allowed, advice = "a checkpoint's folder", _instead(str(trainer.resume_path))
        yield Problem("trainer.resume_path", trainer.resume_path, allowed, advice)


def crowding(config: Config, uses: Uses) -> Iterator[str]:
    """Yield a warning if more processes compute at the same time than this machine has CPUs."""
    slots, cpus = slots_of(config, uses), os.cpu_count() or 1
    if _own_machine() and slots.total > cpus:
        yield (
            f"{slots.total} ranks and engines compute at the same time, more than the {cpus} CPUs here can "
            "carry. Ask for fewer (trainer.placement.policy_num_gpus_per_node, generator.num_inference_engines), or "
            "let them take turns: trainer.placement.colocate_all=true."
        )


def _own_machine() -> bool:
    """True if the run starts its own Ray here, so that this machine's CPUs and accelerators are all that it has."""
    return not _is_connected() and os.environ.get("RAY_ADDRESS") in (None, "", "local")


def _folders(config: Config, uses: Uses) -> Iterator[Problem]:
    """Yield the folders of a run that cannot be written."""
    for name in ("ckpt_path", "export_path") if uses.learner else ():
        path = getattr(config.trainer, name)
        if not is_address(local_path(path)) and (reason := why_not_writable(local_path(path))) is not None:
            advice = f"{reason} Choose a folder of yours, or give the user of the run the right to write there."
            yield Problem(f"trainer.{name}", path, "a folder that can be written", advice)


def why_not_writable(folder: str | os.PathLike[str]) -> str | None:
    """Return why a folder cannot be made or written, as a sentence; None if it can. Leaves nothing behind."""
    existing = os.path.abspath(folder)
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    try:
        with tempfile.TemporaryFile(dir=existing):
            return None
    except OSError as error:
        return f"{existing} cannot be written: {error.strerror}."


def _slots(config: Config, uses: Uses) -> Iterator[Problem]:
    slots, environment = slots_of(config, uses), config.environment
    hosts = cpus_of_hosts(config, uses)
    cpus = os.cpu_count() or 1
    if hosts >= cpus:
        advice = "Ask for fewer or smaller ones (environment.host_cpus), or name a Ray cluster in RAY_ADDRESS."
        yield Problem("environment.hosts", environment.hosts, f"hosts of less than {cpus} CPUs together here", advice)
        return
    roles = {
        "trainer.placement.policy_num_gpus_per_node": slots.policy,
        "trainer.placement.ref_num_gpus_per_node": slots.reference,
        "trainer.placement.critic_num_gpus_per_node": slots.critic,
        "trainer.placement.reward_num_gpus_per_node": slots.reward,
        "generator.num_inference_engines": slots.engines,
    }
    key = max(roles, key=lambda name: roles[name])
    section, _, name = key.rpartition(".")
    value = getattr(config.trainer.placement if section != "generator" else config.generator, name)
    if config.device == "cuda":
        there = count_accelerators()
        fits, have = slots.total <= there, f"{there} GPU{'s' if there != 1 else ''}"
    else:
        fits = (slots.total + 1) * LEAST_CPU_SHARE <= cpus - hosts
        have = f"{cpus} CPUs" + (f", of which environment.hosts have {hosts:g}" if hosts else "")
    if not fits:
        shared = "with engines and trainer on the same ones" if slots.time_shared else "engines and trainer apart"
        advice = (
            f"The run needs {slots.total} slots, {shared}; this machine has {have}. Ask for fewer ranks or engines, "
            "colocate them (trainer.placement.colocate_all=true), or name a Ray cluster with more in RAY_ADDRESS."
        )
        yield Problem(key, value, f"less on a machine with {have}", advice)
