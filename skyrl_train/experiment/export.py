"""Exports a checkpoint's policy as a model with a card, to a folder or a hub repository, and verifies the result."""

from __future__ import annotations

import copy
import importlib.metadata
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from skyrl_train.config.keys import all_keys, get_value
from skyrl_train.config.locations import HUB_NAME, get_display_name, is_uri, may_be_hub_name
from skyrl_train.config.redaction import redact
from skyrl_train.config.run_folder import load_run_config, training_settings
from skyrl_train.config.schema import Config
from skyrl_train.errors import ConfigError
from skyrl_train.experiment.data import chat_template_text, load_chat_template
from skyrl_train.learner.checkpoint_policy import (
    POLICY_ROLE,
    ExportVerification,
    open_policy,
    verify_adapter,
    verify_model,
    verify_prompt_ids,
)
from skyrl_train.models.composite import get_auto_class
from skyrl_train.models.export import export_adapter, export_hf
from skyrl_train.models.loading import load_tokenizer, set_config_dtype
from skyrl_train.report.curve import write_learning_curve
from skyrl_train.report.jsonl import METRICS_FILE, read_metrics
from skyrl_train.report.model_card import CURVE_FILE, Card, model_card
from skyrl_train.storage.hugging_face_hub import check_repo_name_free, upload_model
from skyrl_train.storage.uris import cache_folder
from skyrl_train.trainer.checkpoint_manager import SavedState
from skyrl_train.trainer.checkpoints import Checkpoint, open_run_checkpoint

HUB_PREFIX = "hub:"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_LIBRARIES = ("skyrl-train", "torch", "transformers", "peft", "safetensors")
_ALWAYS_LISTED = (
    "trainer.algorithm.advantage_estimator",
    "trainer.algorithm.policy_loss_type",
    "trainer.algorithm.use_kl_loss",
    "trainer.policy.optimizer_config.lr",
    "trainer.train_batch_size",
    "generator.n_samples_per_prompt",
    "generator.sampling_params.temperature",
    "generator.sampling_params.max_generate_length",
)
_LISTED_IF_CHANGED = (
    "trainer.algorithm.",
    "trainer.policy.optimizer_config.",
    "trainer.policy.model.lora.",
    "trainer.policy_mini_batch_size",
    "trainer.update_epochs_per_batch",
    "trainer.max_prompt_length",
    "trainer.seed",
    "trainer.fully_async.enabled",
    "generator.sampling_params.",
    "generator.max_turns",
)
_REWARDS_ONLY = ("trainer.algorithm.", "generator.", "trainer.fully_async.")
_FOLDERS = re.compile(r"(?<![\w.])~?/(?:[^/\s'\"]+/)+")
_MODEL_FILES = ("config.json", "adapter_config.json")
_WEIGHT_FILES = ("*.safetensors", "*.bin")


@dataclass(frozen=True)
class ExportRequest:
    """The arguments of an export."""

    checkpoint: str
    """RUN/global_step_N: a folder or a URI."""
    to: str
    """A folder, or hub:NAME."""
    adapter: bool = False
    dtype: str = "float32"
    base: str | None = None
    """Path or name of the model that the run started from; None for trainer.policy.model.path."""
    public: bool = False
    overwrite: bool = False
    verify: bool = True


def export(request: ExportRequest) -> tuple[str, ExportVerification | None]:
    """Write a checkpoint's policy as a model. A folder appears at its target only when it is complete.

    Loads the written model again and compares it with the checkpoint, unless `request.verify` is False.

    Returns:
        The absolute path or the URL of the model, and the result of the comparison or None.

    Raises:
        ConfigError: The arguments are invalid, or the target exists and must not be replaced.
        CheckpointError: The checkpoint is damaged, or the written model differs from it.
        StorageError: A remote storage or the hub failed.
    """
    _check(request)
    name = request.to.removeprefix(HUB_PREFIX)
    with open_run_checkpoint(request.checkpoint, (POLICY_ROLE,)) as checkpoint:
        config = load_run_config(checkpoint.run)
        if request.adapter and not config.trainer.policy.model.lora.rank:
            raise ConfigError("--adapter: the run trained the full model, so it has no adapter. Leave the flag out.")
        if not request.to.startswith(HUB_PREFIX):
            with atomic_folder(request.to, request.overwrite) as folder:
                verification = _write(request, checkpoint, config, folder)
            return str(Path(request.to).absolute()), verification
        cache_folder().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_folder(), prefix="export-") as temporary:
            verification = _write(request, checkpoint, config, Path(temporary))
            message = f"Step {checkpoint.step}"
            url = upload_model(
                Path(temporary), name, public=request.public, overwrite=request.overwrite, message=message
            )
        return url, verification


def _check(request: ExportRequest) -> None:
    """Raise ConfigError for arguments that cannot be satisfied, before the checkpoint is read."""
    if request.dtype not in DTYPES:
        raise ConfigError(f"--dtype {request.dtype} is not supported. Choose one of: {', '.join(DTYPES)}.")
    if request.adapter and request.dtype != "float32":
        raise ConfigError(
            f"--dtype {request.dtype} --adapter: adapters are always written in float32. Leave --dtype out."
        )
    if request.to.startswith(HUB_PREFIX):
        name = request.to.removeprefix(HUB_PREFIX)
        if not HUB_NAME.fullmatch(name):
            raise ConfigError(f"--to {request.to}: must be hub:OWNER/NAME, with letters, digits, '-', '_' and '.'.")
        check_repo_name_free(name, request.overwrite)
        return
    if request.public:
        raise ConfigError(f"--public --to {request.to}: --public only applies to hub:NAME. Leave it out for a folder.")
    if is_uri(request.to):
        raise ConfigError(
            f"--to {request.to}: exporting to a URI is not supported. Give a folder on this machine or hub:OWNER/NAME."
        )
    _check_folder(request.to, request.overwrite)


def _check_folder(to: str, overwrite: bool) -> None:
    """Raise ConfigError for a target that must not be replaced. Only a model is, and only with --overwrite."""
    target = Path(to)
    if not target.exists():
        return
    if not target.is_dir():
        raise ConfigError(f"--to {to} is a file. Give the name of a folder.")
    if not any(target.iterdir()):
        return
    if not overwrite:
        raise ConfigError(f"--to {to} is not empty. Give another folder, or --overwrite to replace all of it.")
    if not _is_model(target):
        raise ConfigError(
            f"--to {to} --overwrite: the folder holds no model, so it is not replaced. Give another folder or empty it."
        )


def _is_model(folder: Path) -> bool:
    """True if the folder holds weights and a model's configuration. Many other folders hold a config.json."""
    has_weights = any(path.is_file() for pattern in _WEIGHT_FILES for path in folder.glob(pattern))
    return has_weights and any((folder / file).is_file() for file in _MODEL_FILES)


@contextmanager
def atomic_folder(to: str, overwrite: bool) -> Iterator[Path]:
    """Yield a new folder next to `to` that takes its place on success and is deleted on failure.

    Args:
        to: The target folder. Its parents are created.
        overwrite: True to replace a model at the target.

    Raises:
        ConfigError: On exit, if the target has content by then that must not be replaced.
    """
    target = Path(to).resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = target.with_name(f".{target.name}.partial-{uuid.uuid4().hex[:8]}")
    folder.mkdir()
    try:
        yield folder
        _check_folder(to, overwrite)  # again, because an export takes minutes
        if target.exists() and any(target.iterdir()):
            replaced = target.with_name(folder.name.replace(".partial-", ".replaced-"))
            target.rename(replaced)
            try:
                folder.rename(target)
            except BaseException:
                replaced.rename(target)
                raise
            shutil.rmtree(replaced)
        else:
            folder.rename(target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _write(request: ExportRequest, checkpoint: Checkpoint, config: Config, folder: Path) -> ExportVerification | None:
    """Write weights, tokenizer and card to a folder. Returns the result of the comparison; None if it is off."""
    trainer = config.trainer
    base = request.base or trainer.policy.model.path
    saved = SavedState.of(checkpoint)
    with open_policy(checkpoint.path, trainer, request.base, saved.base_models.get(POLICY_ROLE)) as policy:
        generator, model_config = config.generator, copy.deepcopy(policy.config)
        template = saved.chat_template or load_chat_template(generator.chat_template)
        tokenizer = load_tokenizer(base, chat_template=template)
        if saved.chat_template is None and (
            found_template := chat_template_text(tokenizer, generator.chat_template_kwargs)
        ):
            tokenizer.chat_template = found_template
        if request.adapter:
            assert policy.adapters is not None
            policy.adapters.config.base_model_name_or_path = get_display_name(trainer.policy.model.path)
            export_adapter(policy.adapters, policy.adapter(), tokenizer, folder, base=base)
        else:
            set_config_dtype(model_config, DTYPES[request.dtype])
            export_hf(model_config, policy.merged(DTYPES[request.dtype]), tokenizer, folder, base=base)
        verification = None
        if request.verify:
            verify_prompt_ids(tokenizer, folder, generator.chat_template_kwargs)
            verification = (
                verify_adapter(policy, folder, base)
                if request.adapter
                else verify_model(policy, folder, DTYPES[request.dtype])
            )
    rows = [
        {redact(name): value for name, value in row.items() if isinstance(value, (int, float))}
        for row in read_metrics(checkpoint.run / METRICS_FILE)
        if row["step"] <= checkpoint.step
    ]
    has_curve = write_learning_curve(rows, folder / CURVE_FILE)
    card = _card(request, config, get_auto_class(model_config).__name__, checkpoint.step, rows, has_curve, verification)
    (folder / "README.md").write_text(model_card(card), encoding="utf-8")
    mode = (folder / "README.md").stat().st_mode
    for file in folder.rglob("*"):  # safetensors creates files that only their owner can read
        if file.is_file():
            file.chmod(mode)
    return verification


def _card(
    request: ExportRequest,
    config: Config,
    model_class: str,
    step: int,
    rows: list[dict[str, float]],
    has_curve: bool,
    verification: ExportVerification | None,
) -> Card:
    trainer, lora = config.trainer, config.trainer.policy.model.lora
    kinds = {"reward/mean": "rewards", "sft/loss": "demonstrations"}
    trained_on = next((kind for metric, kind in kinds.items() if any(metric in row for row in rows)), "")
    data = {"training": config.data.train_data}
    if trained_on == "rewards":
        data["evaluation"] = config.data.val_data
    path = trainer.policy.model.path
    return Card(
        run=_public(trainer.run_name),
        repository=request.to.removeprefix(HUB_PREFIX) if request.to.startswith(HUB_PREFIX) else "",
        base=_public(get_display_name(path)),
        base_is_on_hub=request.base is None and may_be_hub_name(path),  # the model has just been loaded from there
        is_adapter=request.adapter,
        model_class=model_class,
        lora=f"rank {lora.rank}, alpha {lora.alpha}" if lora.rank else "",
        dtype=request.dtype,
        step=step,
        trained_on=trained_on,
        environment=_public(config.environment.env_class),
        data={use: [_public(get_display_name(str(source))) for source in sources] for use, sources in data.items()},
        keys={name: _public(value) for name, value in _listed_keys(config, trained_on).items()},
        rows=rows,
        has_curve=has_curve,
        checked="" if verification is None else describe_verification(verification),
        versions={name: importlib.metadata.version(name) for name in _LIBRARIES if request.adapter or name != "peft"},
    )


def _listed_keys(config: Config, trained_on: str) -> dict[str, Any]:
    """Return the keys that the card lists: some always, and those of the algorithm that differ from the defaults."""
    changed = {name: value for name, value in training_settings(config).items() if name.startswith(_LISTED_IF_CHANGED)}
    listed = {name: get_value(config, name) for name in _ALWAYS_LISTED} | changed
    order = {name: position for position, name in enumerate(all_keys())}
    names = sorted(listed, key=lambda name: order.get(name, len(order)))
    if trained_on == "demonstrations":
        names = [name for name in names if not name.startswith(_REWARDS_ONLY)]
    return {name: listed[name] for name in names}


def _public(value: Any) -> Any:
    """Return a value as text without secrets of the environment and without folders of this machine."""
    return _FOLDERS.sub("", str(redact(value)))


def describe_verification(verification: ExportVerification) -> str:
    """Return a sentence that says how the exported model, loaded again, compares with the checkpoint.

    It has the number of equal tensors, and the mean and maximum difference of the log-probs in nats.
    """
    source = "the checkpoint's"
    if verification.base_is_unrecorded:
        source = (
            "those of the checkpoint's adapters and of the given base model (the checkpoint does not record its base "
            "model)"
        )
    return (
        f"Loaded again, all {verification.num_tensors} tensors equal {source}, and the log-probs of "
        f"{verification.num_tokens} tokens differ from the checkpoint's by {verification.mean_logprob_diff:.2g} nats "
        f"on average and by at most {verification.max_logprob_diff:.2g} nats."
    )
