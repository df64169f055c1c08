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

from skyrl_train.config.keys import all_keys, get_value, replace_value
from skyrl_train.config.locations import (
    DATASET_SUFFIXES,
    UNSUPPORTED_SUFFIXES,
    is_dataset_file,
    is_uri,
    list_uris,
    may_be_hub_name,
    parse_split,
    strip_file_scheme,
)
from skyrl_train.config.predicates import RunComponents, count_run_slots, environment_host_cpus, has_evaluation
from skyrl_train.config.problems import Problem, format_value
from skyrl_train.config.schema import Config
from skyrl_train.listeners import API_KEY_ENV

_CPU_DEFAULTS: dict[str, Any] = {
    "generator.backend": "transformers",
    "generator.model_dtype": "float32",  # as the trainer computes
    "generator.weight_sync_backend": "gloo",  # NCCL needs accelerators
    "trainer.bf16": False,  # slow and inexact without accelerators
    "trainer.flash_attn": False,
}
"""The settings of a CPU, for keys whose default nobody has touched."""
_KEPT_IF_EXPLICIT = frozenset({"generator.backend"})
"""Settings of _ON_CPU that are kept if they were written out, even as the default."""


def is_accelerator_available() -> bool:
    """Whether this machine has an NVIDIA device that this process may use; asked without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return False
    return any(Path("/dev").glob("nvidia[0-9]*")) or _count_listed_devices() > 0


def count_accelerators() -> int:
    """How many NVIDIA devices this process may use, asked without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    files = list(Path("/dev").glob("nvidia[0-9]*"))
    return len(files) or _count_listed_devices()


def _count_listed_devices() -> int:
    program = shutil.which("nvidia-smi")  # containers and WSL have the program without the device files
    if program is None:
        return 0
    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return listed.stdout.count("GPU ") if listed.returncode == 0 else 0


def resolve_device(
    config: Config, has_accelerator: bool, explicit_keys: Collection[str] = ()
) -> tuple[Config, list[str]]:
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
    for key, value in _CPU_DEFAULTS.items() if device == "cpu" else ():
        if key in _KEPT_IF_EXPLICIT and key in explicit_keys:
            continue
        default = all_keys()[key].default
        if get_value(config, key) == default:
            changes[key] = value
            fitted.append(f"{key}={format_value(value)}")
    if device == "cpu":
        notes.append(f"what is not set fits a CPU ({', '.join(fitted)})" if fitted else "all keys are kept")
        notes.append("placement counts slots of CPU")
    for key, value in changes.items():
        config = replace_value(config, key, value)
    return config, [f"{'; '.join(notes)}."] if notes else []


def find_device_problems(config: Config, has_accelerator: bool) -> Iterator[Problem]:
    """A device that this machine does not have; of a cluster of others nobody knows yet what it has, or will have."""
    if os.environ.get("RAY_ADDRESS", "") not in ("", "local"):
        return
    if config.device == "cuda" and not has_accelerator:
        yield Problem("device", "cuda", "cpu or auto here", "No NVIDIA device was found on this machine.")


# -- Files, models, packages, slots


INSTALL_COMMANDS = {
    "vllm": "`uv run --extra vllm ...` on GPUs, `scripts/cpu_engines` on CPUs",
    "sglang": "`uv run --extra sglang ...` on GPUs, `scripts/cpu_engines` on CPUs",
}
"""Engines that are packages of their own -> how to get them."""
ENGINE_MODEL_KEY = "generator.model_name"
"""The key of the model that engines load, if it is not the policy's."""
TRACKER_PACKAGES = ("mlflow", "tensorboard", "trackio", "wandb")
"""Trackers that are packages of the same name, and extras of it."""
S3_PACKAGE = "s3fs"
"""The package that reads and writes s3:// addresses."""
MIN_CPUS_PER_SLOT = 0.1
"""Share of a CPU that every slot needs: with less, ranks only wait for each other."""


def find_missing_resources(config: Config, components: RunComponents) -> Iterator[Problem]:
    """Everything that is not here; raises nothing."""
    yield from _data(config, components)
    yield from _models(config, components)
    yield from _other_files(config, components)
    yield from _folders(config, components)
    if components.engines and not config.generator.run_engines_locally and not os.environ.get(API_KEY_ENV):
        advice = f"Set the environment variable {API_KEY_ENV} to the token of the servers."
        yield Problem("generator.run_engines_locally", False, f"true without {API_KEY_ENV}", advice)
    for name in [config.trainer.logger] if isinstance(config.trainer.logger, str) else config.trainer.logger:
        if name in TRACKER_PACKAGES and not _is_installed(name):
            advice = f"Install it: `uv run --extra {name} ...`, or leave it out."
            yield Problem("trainer.logger", name, "a tracker that is installed", advice)
    if importlib.util.find_spec(S3_PACKAGE) is None:
        for key, address in list_uris(config):
            if address.startswith("s3://"):
                allowed, advice = "a path where s3fs is not installed", "Install it: `uv run --extra s3 ...`."
                yield Problem(key, address, allowed, advice)
    backend = config.generator.backend
    local_engines = components.engines and config.generator.run_engines_locally
    if local_engines and backend in INSTALL_COMMANDS and importlib.util.find_spec(backend) is None:
        yield Problem(
            "generator.backend", backend, "an engine that is installed", f"Install it: {INSTALL_COMMANDS[backend]}."
        )
    if _starts_local_ray():  # else nobody knows the nodes yet
        yield from _slots(config, components)


def _is_installed(package: str) -> bool:
    """Whether it can be imported; a mere folder of that name, as W&B and MLflow leave where they run, is none."""
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None


def _is_ray_initialized() -> bool:
    """Whether a program of the user's has started Ray itself; asked without importing it."""
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def list_data_sources(config: Config, components: RunComponents) -> Iterator[tuple[str, str]]:
    """(key, value) of all data that is read."""
    for name, used in (
        ("train_data", components.train_data),
        ("val_data", components.val_data and has_evaluation(config.trainer)),
    ):
        yield from ((f"data.{name}", source) for source in getattr(config.data, name) if used)


def _data(config: Config, components: RunComponents) -> Iterator[Problem]:
    if components.train_data and not config.data.train_data:
        yield Problem("data.train_data", [], "at least one file or dataset")
    if components.val_data and not components.learner and not any(list_data_sources(config, components)):
        advice = "An evaluation needs data; leave trainer.eval_before_train or trainer.eval_interval on."
        yield Problem("data.val_data", config.data.val_data, "at least one file or dataset", advice)
    for key, source in list_data_sources(config, components):
        path = os.path.expanduser(parse_split(strip_file_scheme(source))[0])
        if os.path.splitext(path)[1].lower() in UNSUPPORTED_SUFFIXES:
            allowed = f"a file that ends in {', '.join(DATASET_SUFFIXES)}"
            advice = "Convert it, for instance with datasets.load_dataset('csv', data_files=...) and its to_parquet."
            yield Problem(key, source, allowed, advice)
        elif is_uri(path):
            continue  # looked at by whoever starts the run
        elif is_dataset_file(path) and not os.path.isfile(path):
            yield Problem(key, source, "a file that exists", _suggest_existing_paths(path))
        elif not os.path.exists(path) and not may_be_hub_name(path):
            yield Problem(key, source, "a file, a folder or a dataset's name on the hub", _suggest_existing_paths(path))


def _suggest_existing_paths(path: str) -> str:
    """What exists, for a path that does not."""
    folder = os.path.abspath(os.path.dirname(path))
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))[:6]
    except FileNotFoundError:
        return f"There is no folder {folder} either."
    except OSError as error:
        return f"{folder} cannot be read: {error.strerror}."
    return f"In {folder} there is {', '.join(names) or 'nothing'}."


def list_model_paths(config: Config, components: RunComponents) -> Iterator[tuple[str, str]]:
    """(key, value) of all models that are loaded."""
    trainer, slots = config.trainer, count_run_slots(config, components)
    used = {
        "policy": True,
        "ref": bool(slots.reference or slots.reference_colocated),
        "critic": bool(slots.critic or slots.critic_colocated),
        "reward": components.rewards,
    }
    for role in (name for name, is_used in used.items() if is_used):
        path = getattr(trainer, role).model.path
        follows = role == "ref" and path == trainer.policy.model.path
        if path is not None and not follows:
            yield f"trainer.{role}.model.path", path
    served = config.generator.model_name
    if components.engines and config.generator.run_engines_locally and served != trainer.policy.model.path:
        yield ENGINE_MODEL_KEY, served


def _models(config: Config, components: RunComponents) -> Iterator[Problem]:
    for key, path in list_model_paths(config, components):
        if (problem := _model_problem(key, path)) is not None:
            yield problem


def _model_problem(key: str, named: str) -> Problem | None:
    path = strip_file_scheme(named)
    if is_uri(path):
        return None  # looked at by whoever starts the run
    if os.path.isdir(path):
        advice = "It has no config.json, which every model's folder has."
        there = os.path.isfile(os.path.join(path, "config.json"))
        return None if there else Problem(key, named, "a model's folder", advice)
    if path.startswith("~"):
        return Problem(key, path, "written out", "The shell leaves ~ as it is behind a =; write $HOME.")
    allowed = "a model's folder or its name on the hub"
    return None if may_be_hub_name(path) else Problem(key, path, allowed, _suggest_existing_paths(path))


def _other_files(config: Config, components: RunComponents) -> Iterator[Problem]:
    template, trainer = config.generator.chat_template, config.trainer
    if template.source == "file" and template.name_or_path and not os.path.isfile(template.name_or_path):
        key = "generator.chat_template.name_or_path"
        yield Problem(
            key, template.name_or_path, "a file with source=file", _suggest_existing_paths(template.name_or_path)
        )
    resumes = components.learner and trainer.resume_mode == "from_path" and trainer.resume_path
    if resumes and not is_uri(trainer.resume_path) and not os.path.isdir(str(trainer.resume_path)):
        allowed, advice = "a checkpoint's folder", _suggest_existing_paths(str(trainer.resume_path))
        yield Problem("trainer.resume_path", trainer.resume_path, allowed, advice)


def find_cpu_oversubscription(config: Config, components: RunComponents) -> Iterator[str]:
    """Yield a warning if more processes compute at the same time than this machine has CPUs."""
    slots, cpus = count_run_slots(config, components), os.cpu_count() or 1
    if _starts_local_ray() and slots.total > cpus:
        yield (
            f"{slots.total} ranks and engines compute at the same time, more than the {cpus} CPUs here can "
            "carry. Ask for fewer (trainer.placement.policy_num_gpus_per_node, generator.num_inference_engines), or "
            "let them take turns: trainer.placement.colocate_all=true."
        )


def _starts_local_ray() -> bool:
    """True if the run starts its own Ray here, so that this machine's CPUs and accelerators are all that it has."""
    return not _is_ray_initialized() and os.environ.get("RAY_ADDRESS") in (None, "", "local")


def _folders(config: Config, components: RunComponents) -> Iterator[Problem]:
    """Yield the folders of a run that cannot be written."""
    for name in ("ckpt_path", "export_path") if components.learner else ():
        path = getattr(config.trainer, name)
        if not is_uri(strip_file_scheme(path)) and (reason := find_write_error(strip_file_scheme(path))) is not None:
            advice = f"{reason} Choose a folder of yours, or give the user of the run the right to write there."
            yield Problem(f"trainer.{name}", path, "a folder that can be written", advice)


def find_write_error(folder: str | os.PathLike[str]) -> str | None:
    """Return why a folder cannot be made or written, as a sentence; None if it can. Leaves nothing behind."""
    existing = os.path.abspath(folder)
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    try:
        with tempfile.TemporaryFile(dir=existing):
            return None
    except OSError as error:
        return f"{existing} cannot be written: {error.strerror}."


def _slots(config: Config, components: RunComponents) -> Iterator[Problem]:
    slots, environment = count_run_slots(config, components), config.environment
    hosts = environment_host_cpus(config, components)
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
        fits = (slots.total + 1) * MIN_CPUS_PER_SLOT <= cpus - hosts
        have = f"{cpus} CPUs" + (f", of which environment.hosts have {hosts:g}" if hosts else "")
    if not fits:
        shared = "with engines and trainer on the same ones" if slots.engines_colocated else "engines and trainer apart"
        advice = (
            f"The run needs {slots.total} slots, {shared}; this machine has {have}. Ask for fewer ranks or engines, "
            "colocate them (trainer.placement.colocate_all=true), or name a Ray cluster with more in RAY_ADDRESS."
        )
        yield Problem(key, value, f"less on a machine with {have}", advice)
