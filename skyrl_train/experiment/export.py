"""From a checkpoint to a model that others can use: a folder or a repository, with a card, checked by loading it."""

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
    """What is asked for."""

    checkpoint: str
    """RUN/global_step_N: a folder or an address."""
    to: str
    """A folder, or hub:NAME."""
    adapter: bool = False
    dtype: str = "float32"
    base: str | None = None
    """Where the model is that the run started from; None for trainer.policy.model.path."""
    public: bool = False
    overwrite: bool = False
    verify: bool = True


def export(request: ExportRequest) -> tuple[str, ExportVerification | None]:
    """Write a checkpoint's policy to `asked.to`, whole or not at all; returns where it is, and what was compared.

    Raises ConfigError for what cannot be asked, CheckpointError for a damaged checkpoint and for an export that is not
    the checkpoint's policy, StorageError.
    """
    _check(request)
    name = request.to.removeprefix(HUB_PREFIX)
    with open_run_checkpoint(request.checkpoint, (POLICY_ROLE,)) as found:
        config = load_run_config(found.run)
        if request.adapter and not config.trainer.policy.model.lora.rank:
            raise ConfigError("--adapter: the run has trained the whole model, so there is no adapter: leave it out.")
        if not request.to.startswith(HUB_PREFIX):
            with atomic_folder(request.to, request.overwrite) as folder:
                agreement = _write(request, found, config, folder)
            return str(Path(request.to).absolute()), agreement
        cache_folder().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_folder(), prefix="export-") as temporary:
            agreement = _write(request, found, config, Path(temporary))
            message = f"Step {found.step}"
            url = upload_model(
                Path(temporary), name, public=request.public, overwrite=request.overwrite, message=message
            )
        return url, agreement


def _check(request: ExportRequest) -> None:
    """Raises ConfigError for a target that cannot be written, before anything is read."""
    if request.dtype not in DTYPES:
        raise ConfigError(f"--dtype {request.dtype}: must be one of {', '.join(DTYPES)}.")
    if request.adapter and request.dtype != "float32":
        raise ConfigError(f"--dtype {request.dtype} --adapter: adapters are small, and are written in float32.")
    if request.to.startswith(HUB_PREFIX):
        name = request.to.removeprefix(HUB_PREFIX)
        if not HUB_NAME.fullmatch(name):
            raise ConfigError(f"--to {request.to}: must be hub:OWNER/NAME, with letters, digits, '-', '_' and '.'.")
        check_repo_name_free(name, request.overwrite)
        return
    if request.public:
        raise ConfigError("--public is for hub:NAME; a folder is as public as you make it.")
    if is_uri(request.to):
        raise ConfigError(f"--to {request.to}: must be a folder of this machine or hub:NAME.")
    _check_folder(request.to, request.overwrite)


def _check_folder(to: str, overwrite: bool) -> None:
    """Raises ConfigError for what must not be replaced: only models are, and only if asked."""
    target = Path(to)
    if not target.exists():
        return
    if not target.is_dir():
        raise ConfigError(f"--to {to}: is a file; give the name of a folder.")
    if not any(target.iterdir()):
        return
    if not overwrite:
        raise ConfigError(f"--to {to}: is not empty: give another folder, or --overwrite to replace all of it.")
    if not _is_model(target):
        raise ConfigError(
            f"--to {to} --overwrite: holds no model, so it is not replaced: give another folder, or empty it."
        )


def _is_model(folder: Path) -> bool:
    """Much else has a config.json, too."""
    has_weights = any(path.is_file() for pattern in _WEIGHT_FILES for path in folder.glob(pattern))
    return has_weights and any((folder / file).is_file() for file in _MODEL_FILES)


@contextmanager
def atomic_folder(to: str, overwrite: bool) -> Iterator[Path]:
    """A folder beside `to` that takes its place when all went well, and is deleted otherwise.

    Raises ConfigError in the end if what is there then must not be replaced.
    """
    target = Path(to).resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = target.with_name(f".{target.name}.partial-{uuid.uuid4().hex[:8]}")
    folder.mkdir()
    try:
        yield folder
        _check_folder(to, overwrite)  # an export takes minutes
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


def _write(request: ExportRequest, found: Checkpoint, config: Config, folder: Path) -> ExportVerification | None:
    """Fill a folder: weights, tokenizer, card. Returns what was compared, unless that is not wanted."""
    trainer = config.trainer
    base = request.base or trainer.policy.model.path
    saved = SavedState.of(found)
    with open_policy(found.path, trainer, request.base, saved.base_models.get(POLICY_ROLE)) as policy:
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
        agreement = None
        if request.verify:
            verify_prompt_ids(tokenizer, folder, generator.chat_template_kwargs)
            agreement = (
                verify_adapter(policy, folder, base)
                if request.adapter
                else verify_model(policy, folder, DTYPES[request.dtype])
            )
    rows = [
        {redact(name): value for name, value in row.items() if isinstance(value, (int, float))}
        for row in read_metrics(found.run / METRICS_FILE)
        if row["step"] <= found.step
    ]
    has_curve = write_learning_curve(rows, folder / CURVE_FILE)
    card = _card(request, config, get_auto_class(model_config).__name__, found.step, rows, has_curve, agreement)
    (folder / "README.md").write_text(model_card(card), encoding="utf-8")
    mode = (folder / "README.md").stat().st_mode
    for file in folder.rglob("*"):  # safetensors writes for its owner's eyes only
        if file.is_file():
            file.chmod(mode)
    return agreement


def _card(
    request: ExportRequest,
    config: Config,
    model_class: str,
    step: int,
    rows: list[dict[str, float]],
    has_curve: bool,
    agreement: ExportVerification | None,
) -> Card:
    trainer, lora = config.trainer, config.trainer.policy.model.lora
    signs = {"reward/mean": "rewards", "sft/loss": "demonstrations"}
    learnt_from = next((kind for sign, kind in signs.items() if any(sign in row for row in rows)), "")
    data = {"training": config.data.train_data}
    if learnt_from == "rewards":
        data["evaluation"] = config.data.val_data
    path = trainer.policy.model.path
    return Card(
        run=_public(trainer.run_name),
        base=_public(get_display_name(path)),
        base_is_on_hub=request.base is None and may_be_hub_name(path),  # from where it has just been loaded
        is_adapter=request.adapter,
        model_class=model_class,
        lora=f"rank {lora.rank}, alpha {lora.alpha}" if lora.rank else "",
        dtype=request.dtype,
        step=step,
        trained_on=learnt_from,
        environment=_public(config.environment.env_class),
        data={use: [_public(get_display_name(str(one))) for one in sources] for use, sources in data.items()},
        keys={name: _public(value) for name, value in _listed_keys(config, learnt_from).items()},
        rows=rows,
        has_curve=has_curve,
        checked="" if agreement is None else describe_verification(agreement),
        versions={name: importlib.metadata.version(name) for name in _LIBRARIES if request.adapter or name != "peft"},
    )


def _listed_keys(config: Config, trained_on: str) -> dict[str, Any]:
    """The keys of the algorithm, and those that are not as they are by default."""
    changed = {name: value for name, value in training_settings(config).items() if name.startswith(_LISTED_IF_CHANGED)}
    found = {name: get_value(config, name) for name in _ALWAYS_LISTED} | changed
    order = {name: place for place, name in enumerate(all_keys())}
    names = sorted(found, key=lambda name: order.get(name, len(order)))
    if trained_on == "demonstrations":
        names = [name for name in names if not name.startswith(_REWARDS_ONLY)]
    return {name: found[name] for name in names}


def _public(value: Any) -> Any:
    """A value in words, without secrets of the environment and folders of this machine."""
    return _FOLDERS.sub("", str(redact(value)))


def describe_verification(agreement: ExportVerification) -> str:
    """What was compared, in a sentence."""
    whose = "those of the checkpoint"
    if agreement.base_is_unrecorded:
        whose += "'s adapters and of the base model it was given (the checkpoint does not record which one it had)"
    return (
        f"Loaded again, all {agreement.num_tensors} tensors are {whose}, and log-probs of "
        f"{agreement.num_tokens} tokens differ from its own by {agreement.mean_logprob_diff:.2g} nats in the mean and "
        f"{agreement.max_logprob_diff:.2g} at most."
    )
