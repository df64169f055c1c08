"""Checks of this machine: accelerators, default settings for them, and files, packages and resources of a run.

The checks run before torch and Ray are imported. Names that may be on the Hugging Face hub are checked when they are
loaded.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from skyrl_train.config.choices import OptimizerName
from skyrl_train.config.drafts import find_draft_model
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
from skyrl_train.config.predicates import (
    RunComponents,
    count_run_slots,
    environment_host_cpus,
    has_evaluation,
    needs_critic,
)
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
"""Values on a CPU of keys that have their default value."""
GATED_DELTA_NET_MODELS = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
"""Model types, of text configurations, with gated delta nets. On CPUs vLLM computes these in bfloat16 only."""


def is_accelerator_available() -> bool:
    """True if this machine has an NVIDIA device that this process may use. This does not import torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return False
    return any(Path("/dev").glob("nvidia[0-9]*")) or _count_listed_devices() > 0


def count_accelerators() -> int:
    """Return the number of NVIDIA devices that this process may use. This does not import torch.

    CUDA_VISIBLE_DEVICES counts if it is set, even if it names devices that do not exist.
    """
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
        process = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return process.stdout.count("GPU ") if process.returncode == 0 else 0


def resolve_device(
    config: Config, has_accelerator: bool, explicit_keys: Collection[str] = ()
) -> tuple[Config, list[str]]:
    """Resolve `device=auto`, and replace default values that do not suit a CPU.

    A value that equals the default is replaced even if the user set it, because SkyRL's recipes write their defaults
    out. Two keys are exceptions: the engine (`generator.backend`) is kept if the user set it, and
    `generator.model_dtype` is kept for models that vLLM computes in bfloat16 only. Other values are kept.

    Args:
        config: The configuration. It is not changed.
        has_accelerator: True if the run has an accelerator.
        explicit_keys: Keys that the user set.

    Returns:
        The changed copy, not frozen, and a list with one note about all changes, or an empty list.
    """
    device = config.device
    notes, replaced = [], []
    if device == "auto":
        device = "cuda" if has_accelerator else "cpu"
        reason = "an accelerator was found" if has_accelerator else "no accelerator was found"
        notes.append(f"device=auto -> {device}: {reason}")
    changes: dict[str, Any] = {"device": device}
    kept_keys = {"generator.backend"} & set(explicit_keys)
    if kept_keys and config.generator.backend == "vllm" and _read_model_type(config) in GATED_DELTA_NET_MODELS:
        kept_keys.add("generator.model_dtype")
    for key, value in _CPU_DEFAULTS.items() if device == "cpu" else ():
        if key in kept_keys:
            continue
        default = all_keys()[key].default
        if get_value(config, key) == default:
            changes[key] = value
            replaced.append(f"{key}={format_value(value)}")
    if device == "cpu":
        notes.append(f"defaults for a CPU: {', '.join(replaced)}" if replaced else "all keys are kept")
        notes.append("trainer.placement counts shares of CPUs instead of GPUs")
    for key, value in changes.items():
        config = replace_value(config, key, value)
    return config, [f"{'; '.join(notes)}."] if notes else []


def _read_model_type(config: Config) -> str | None:
    """Return the type of the engines' text model, or None if its configuration is not on this machine."""
    name = strip_file_scheme(config.generator.model_name)
    file: Any = Path(name).expanduser() / "config.json"
    if may_be_hub_name(name):
        from huggingface_hub import try_to_load_from_cache

        file = try_to_load_from_cache(name, "config.json")
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
        return str(content.get("text_config", content)["model_type"])
    except (OSError, TypeError, ValueError, KeyError, AttributeError):
        return None  # The checks of models report what is wrong with it.


def find_device_problems(config: Config, has_accelerator: bool) -> Iterator[Problem]:
    """Yield a problem if the configured device does not exist on this machine.

    Nothing is yielded if RAY_ADDRESS names a cluster, whose devices are not known yet.
    """
    if os.environ.get("RAY_ADDRESS", "") not in ("", "local"):
        return
    if config.device == "cuda" and not has_accelerator:
        yield Problem("device", "cuda", "cpu or auto on this machine", "No NVIDIA device was found.")


# -- Files, models, packages, GPUs


INSTALL_COMMANDS = {
    "vllm": "`uv run --extra vllm ...` on GPUs, `scripts/cpu_engines` on CPUs",
    "sglang": "`uv run --extra sglang ...` on GPUs, `scripts/cpu_engines` on CPUs",
}
"""Engines that are separate packages -> how to install them."""
ENGINE_MODEL_KEY = "generator.model_name"
"""Key of the model that engines load, if it is not the policy's."""
TRACKER_PACKAGES = ("mlflow", "tensorboard", "trackio", "wandb")
"""Trackers that require a package of the same name. The extra that installs it has this name, too."""
S3_PACKAGE = "s3fs"
"""Package that reads and writes s3:// URIs."""
MIN_CPUS_PER_SLOT = 0.1
"""Minimum share of a CPU per rank or engine. With less, ranks mostly wait for each other."""


def find_missing_resources(config: Config, components: RunComponents) -> Iterator[Problem]:
    """Yield a problem for everything that a run needs and this machine lacks.

    The checks cover data, models, other files, folders that cannot be written, packages, and, if the run starts its own
    Ray on this machine, GPUs and CPUs.

    Args:
        config: The configuration, with `device` resolved.
        components: Parts of the configuration that the run uses.
    """
    yield from _find_data_problems(config, components)
    yield from _find_model_problems(config, components)
    yield from _find_file_problems(config, components)
    yield from _find_folder_problems(config, components)
    if components.engines and not config.generator.run_engines_locally and not os.environ.get(API_KEY_ENV):
        advice = f"Set the environment variable {API_KEY_ENV} to the token of the servers."
        yield Problem("generator.run_engines_locally", False, f"true without {API_KEY_ENV}", advice)
    for name in [config.trainer.logger] if isinstance(config.trainer.logger, str) else config.trainer.logger:
        if name in TRACKER_PACKAGES and not _is_installed(name):
            advice = f"Install it: `uv run --extra {name} ...`, or remove it from trainer.logger."
            yield Problem("trainer.logger", name, "a tracker that is installed", advice)
    if importlib.util.find_spec(S3_PACKAGE) is None:
        for key, uri in list_uris(config):
            if uri.startswith("s3://"):
                allowed, advice = "a local path while s3fs is not installed", "Install it: `uv run --extra s3 ...`."
                yield Problem(key, uri, allowed, advice)
    backend = config.generator.backend
    local_engines = components.engines and config.generator.run_engines_locally
    if local_engines and backend in INSTALL_COMMANDS and importlib.util.find_spec(backend) is None:
        yield Problem(
            "generator.backend", backend, "an engine that is installed", f"Install it: {INSTALL_COMMANDS[backend]}."
        )
    for role in ("policy", "critic") if components.learner and not _is_installed("bitsandbytes") else ():
        name = getattr(config.trainer, role).optimizer_config.name
        if name == OptimizerName.ADAMW_8BIT and (role == "policy" or needs_critic(config.trainer)):
            advice = "Install it: `uv run --extra bitsandbytes ...`."
            key = f"trainer.{role}.optimizer_config.name"
            yield Problem(key, name, "adamw or muon while bitsandbytes is not installed", advice)
    if _starts_local_ray():  # the nodes of another cluster are not known yet
        yield from _find_slot_problems(config, components)


def _is_installed(package: str) -> bool:
    """True if a package can be imported. A folder of that name, which W&B and MLflow create, does not count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _is_ray_initialized() -> bool:
    """True if the user's program has started Ray. This does not import Ray."""
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def list_data_sources(config: Config, components: RunComponents) -> Iterator[tuple[str, str]]:
    """Yield (key, source) for all data that a run reads. Evaluation data counts if the run evaluates."""
    for name, is_used in (
        ("train_data", components.train_data),
        ("val_data", components.val_data and has_evaluation(config.trainer)),
    ):
        yield from ((f"data.{name}", source) for source in getattr(config.data, name) if is_used)


def _find_data_problems(config: Config, components: RunComponents) -> Iterator[Problem]:
    if components.train_data and not config.data.train_data:
        yield Problem("data.train_data", [], "at least one file or dataset")
    if components.val_data and not components.learner and not any(list_data_sources(config, components)):
        advice = "An evaluation needs data. Also keep trainer.eval_before_train=true or trainer.eval_interval above 0."
        yield Problem("data.val_data", config.data.val_data, "at least one file or dataset", advice)
    for key, source in list_data_sources(config, components):
        path = os.path.expanduser(parse_split(strip_file_scheme(source))[0])
        if os.path.splitext(path)[1].lower() in UNSUPPORTED_SUFFIXES:
            allowed = f"a file that ends in {', '.join(DATASET_SUFFIXES)}"
            advice = "Convert it, for example with datasets.load_dataset('csv', data_files=...) and its to_parquet."
            yield Problem(key, source, allowed, advice)
        elif is_uri(path):
            continue  # checked by the driver when it starts the run
        elif is_dataset_file(path) and not os.path.isfile(path):
            yield Problem(key, source, "a file that exists", _suggest_existing_paths(path))
        elif not os.path.exists(path) and not may_be_hub_name(path):
            yield Problem(key, source, "a file, a folder or a dataset's name on the hub", _suggest_existing_paths(path))


def _suggest_existing_paths(path: str) -> str:
    """Return a sentence about the files that exist in the folder of a missing path."""
    folder = os.path.abspath(os.path.dirname(path))
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))[:6]
    except FileNotFoundError:
        return f"The folder {folder} does not exist."
    except OSError as error:
        return f"{folder} cannot be read: {error.strerror}."
    return f"{folder} contains {', '.join(names)}." if names else f"{folder} is empty."


def list_model_paths(config: Config, components: RunComponents) -> Iterator[tuple[str, str]]:
    """Yield (key, path) for all models that a run loads. A model with the policy's path is left out."""
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
    engine_model = config.generator.model_name
    if components.engines and config.generator.run_engines_locally and engine_model != trainer.policy.model.path:
        yield ENGINE_MODEL_KEY, engine_model


def _find_model_problems(config: Config, components: RunComponents) -> Iterator[Problem]:
    models = [*list_model_paths(config, components)]
    if (drafts := find_used_draft_model(config, components)) is not None:
        models.append(drafts)
    for key, path in models:
        if (problem := _find_model_problem(key, path)) is not None:
            yield problem


def find_used_draft_model(config: Config, components: RunComponents) -> tuple[str, str] | None:
    """Return the key and the path of the draft model or head that a run loads, or None."""
    has_engines = components.engines and config.generator.run_engines_locally
    return find_draft_model(config.generator) if has_engines else None


def _find_model_problem(key: str, value: str) -> Problem | None:
    path = strip_file_scheme(value)
    if is_uri(path):
        return None  # checked by the driver when it starts the run
    if os.path.isdir(path):
        if os.path.isfile(os.path.join(path, "config.json")):
            return None
        return Problem(key, value, "a model's folder", "The folder has no config.json.")
    if path.startswith("~"):
        advice = "The shell does not expand ~ after a =. Write $HOME instead."
        return Problem(key, path, "a path without ~", advice)
    allowed = "a model's folder or its name on the hub"
    return None if may_be_hub_name(path) else Problem(key, path, allowed, _suggest_existing_paths(path))


def _find_file_problems(config: Config, components: RunComponents) -> Iterator[Problem]:
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
    """Yield a warning if a run on this machine has more concurrent ranks and engines than there are CPUs."""
    slots, cpus = count_run_slots(config, components), os.cpu_count() or 1
    if _starts_local_ray() and slots.total > cpus:
        advice = "Use fewer (trainer.placement.policy_num_gpus_per_node, generator.num_inference_engines)"
        if slots.policy and slots.engines and not slots.engines_colocated:
            advice += ", or run them alternately: trainer.placement.colocate_all=true"
        yield (f"{slots.total} ranks and engines run at the same time, but this machine has {cpus} CPUs. {advice}.")


def _starts_local_ray() -> bool:
    """True if the run starts its own Ray, so that it can only use the CPUs and accelerators of this machine."""
    return not _is_ray_initialized() and os.environ.get("RAY_ADDRESS") in (None, "", "local")


def _find_folder_problems(config: Config, components: RunComponents) -> Iterator[Problem]:
    for name in ("ckpt_path", "export_path") if components.learner else ():
        path = getattr(config.trainer, name)
        if not is_uri(strip_file_scheme(path)) and (reason := find_write_error(strip_file_scheme(path))) is not None:
            advice = f"{reason} Choose a folder of yours, or give the user of the run the right to write there."
            yield Problem(f"trainer.{name}", path, "a folder that can be written", advice)


def find_write_error(folder: str | os.PathLike[str]) -> str | None:
    """Return a sentence that says why a folder cannot be created or written, or None if it can.

    This writes a temporary file to the innermost existing folder of the path and deletes it.
    """
    existing = os.path.abspath(folder)
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    try:
        with tempfile.TemporaryFile(dir=existing):
            return None
    except OSError as error:
        return f"{existing} cannot be written: {error.strerror}."


def _find_slot_problems(config: Config, components: RunComponents) -> Iterator[Problem]:
    slots, environment = count_run_slots(config, components), config.environment
    host_cpus = environment_host_cpus(config, components)
    cpus = os.cpu_count() or 1
    if host_cpus >= cpus:
        allowed = f"a number of hosts with less than {cpus} CPUs in total on this machine"
        advice = "Use fewer hosts, lower environment.host_cpus, or name a Ray cluster in RAY_ADDRESS."
        yield Problem("environment.hosts", environment.hosts, allowed, advice)
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
        gpus = count_accelerators()
        fits, available = slots.total <= gpus, f"{gpus} GPU{'s' if gpus != 1 else ''}"
        unit = "GPUs"
    else:
        fits = (slots.total + 1) * MIN_CPUS_PER_SLOT <= cpus - host_cpus
        available = f"{cpus} CPUs" + (f", of which environment.hosts reserve {host_cpus:g}" if host_cpus else "")
        unit = f"shares of at least {MIN_CPUS_PER_SLOT} CPUs"
    if not fits:
        sharing = "colocated" if slots.engines_colocated else "not colocated"
        advice = (
            f"The run needs {slots.total} {unit} with engines and trainer {sharing}; this machine has {available}. Use "
            "fewer ranks or engines, colocate them (trainer.placement.colocate_all=true), or name a larger Ray cluster "
            "in RAY_ADDRESS."
        )
        yield Problem(key, value, f"less on a machine with {available}", advice)
