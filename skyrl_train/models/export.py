"""Exports: complete Hugging Face folders of a trained model or of its adapter."""

from __future__ import annotations

import copy
import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import (
    GENERATION_CONFIG_NAME,
    IMAGE_PROCESSOR_NAME,
    PROCESSOR_NAME,
    VIDEO_PROCESSOR_NAME,
    cached_file,
)

from skyrl_train.data.control_tokens import find_end_of_turn_token
from skyrl_train.models.composite import get_composite
from skyrl_train.models.loading import (
    build_meta_model,
    contains_tied_pair,
    open_pretrained_weights,
    set_config_dtype,
    to_checkpoint_tensors,
    untie_head,
)
from skyrl_train.models.lora import LoraAdapters
from skyrl_train.models.stop_tokens import get_eos_tokens, load_stop_configs
from skyrl_train.storage.download_cache import local_copy

_log = logging.getLogger(__name__)


def export_hf(
    model_config: PreTrainedConfig,
    tensors: Iterator[tuple[str, Tensor]],
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    base: str | None = None,
    max_shard_bytes: int = 5 << 30,
) -> None:
    """Write weights, config.json, generation_config.json and the tokenizer with its chat template.

    At most one file of tensors is in memory at a time. Tensors are named and split as in published checkpoints, which
    all engines can read: see `to_checkpoint_tensors`. If the configuration ties the head to the embedding, but
    `tensors` contains both, the written config.json does not tie them.

    If the configuration is that of a composite, `tensors` are those of its text model. The composite's other tensors
    are copied bit by bit from `base`, and so are the files of its processor.

    Args:
        model_config: The configuration of the trained model's checkpoint: see `get_checkpoint_config`.
        tensors: (name, full tensor) pairs.
        tokenizer: The tokenizer with the chat template of the training.
        folder: The folder to write.
        base: The folder or hub name of the model that the training started from; None for that of `model_config`.
        max_shard_bytes: Maximum size of one file of weights, in bytes; a larger tensor has its own file.

    Raises:
        OSError: A file cannot be written, for example because the disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = build_meta_model(copy.deepcopy(model_config), torch.float32)
    composite = get_composite(model)
    base = str(model_config.name_or_path) if base is None else base
    all_tensors = tensors if composite is None else chain(tensors, _other_towers(model, base, model_config))
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    files: list[list[str]] = []
    dtypes: set[torch.dtype] = set()
    written: set[str] = set()
    total = 0
    for shard in _shards(all_tensors, max_shard_bytes):
        dtypes |= {tensor.dtype for name, tensor in shard.items() if name in names}
        written |= shard.keys()
        total += sum(tensor.nbytes for tensor in shard.values())
        files.append(save_checkpoint_tensors(model, shard, folder / f"part-{len(files)}.safetensors"))
    rename_shard_files(folder, files, total)
    _save_config(copy.deepcopy(model_config), model, written, dtypes, folder)
    _save_tokenizer_and_generation_config(folder, tokenizer, base)
    if composite is not None:
        _copy_processor(base, folder)


def _other_towers(model: PreTrainedModel, base: str, config: PreTrainedConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield (checkpoint name, tensor) of the tensors of the composite at `base` that are not in its text model."""
    yield from open_pretrained_weights(model, base, config).iter_non_text_tensors()


def _save_config(
    config: PreTrainedConfig, model: PreTrainedModel, written: set[str], dtypes: set[torch.dtype], folder: Path
) -> None:
    """Write config.json for weights with the names `written` and the dtypes `dtypes`. It changes `config`."""
    composite = get_composite(model)
    config.architectures = [type(model if composite is None else composite.model).__name__]
    if len(dtypes) == 1:
        set_config_dtype(config, dtypes.pop())
    if contains_tied_pair(model, written):
        untie_head(config)
    if hasattr(config, "auto_map"):
        del config.auto_map  # it names code of the base model, which is neither used nor exported
    config.save_pretrained(folder)


def export_adapter(
    adapters: LoraAdapters, tensors: dict[str, Tensor], tokenizer: PreTrainedTokenizerBase, folder: Path, *, base: str
) -> None:
    """Write an adapter for peft's `PeftModel.from_pretrained`, with the tokenizer and generation config of `export_hf`.

    Args:
        adapters: The adapters of the trained model.
        tensors: Their tensors by peft's names, as `LoraAdapters.iter_merged` collects them.
        tokenizer: See `export_hf`.
        folder: The folder to write.
        base: See `export_hf`.

    Raises:
        OSError: A file cannot be written, for example because the disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    adapters.config.save_pretrained(folder)
    _save(tensors, folder / "adapter_model.safetensors")
    _save_tokenizer_and_generation_config(folder, tokenizer, base)


def _save_tokenizer_and_generation_config(folder: Path, tokenizer: PreTrainedTokenizerBase, base: str | None) -> None:
    """Write the tokenizer, and the generation config if there is a base model."""
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:  # tokenizers has no type of its own for errors of the file system
        if type(error) is Exception and "os error" in str(error):
            raise OSError(f"{folder}: {error}") from error
        raise
    if base:
        _write_generation_config(base, tokenizer, folder)


def _copy_processor(base: str, folder: Path) -> None:
    """Copy the files with which transformers and engines process images and videos, where they exist."""
    for name in (PROCESSOR_NAME, IMAGE_PROCESSOR_NAME, VIDEO_PROCESSOR_NAME):
        if source := cached_file(local_copy(base, weights=False), name, _raise_exceptions_for_missing_entries=False):
            shutil.copyfile(source, folder / name)


def _write_generation_config(base: str, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Copy the generation config of `base`, and add the chat template's end-of-turn token if it is missing.

    If `base` has no generation config, one is written only for an end-of-turn token that nothing else in the export
    names.
    """
    source = cached_file(
        local_copy(base, weights=False), GENERATION_CONFIG_NAME, _raise_exceptions_for_missing_entries=False
    )
    config = {}
    if source is not None:
        try:
            config = json.loads(Path(source).read_text(encoding="utf-8"))
        except ValueError as error:  # sampling ignores such a file, too: see load_stop_configs
            _log.warning(
                "%s is not valid JSON (%s), so the export does not include it. Correct the file and export again.",
                source,
                error,
            )
            source = None
    named, end = config.get("eos_token_id"), find_end_of_turn_token(tokenizer)
    ends = sorted(get_eos_tokens(*load_stop_configs(base), tokenizer)) if named is None else named
    ends = ends if isinstance(ends, list) else [ends]
    if end is not None and end not in ends:
        extended = json.dumps(config | {"eos_token_id": [*ends, end]}, indent=2)
        (folder / GENERATION_CONFIG_NAME).write_text(extended + "\n", encoding="utf-8")
    elif source is not None:
        shutil.copyfile(source, folder / GENERATION_CONFIG_NAME)


def _shards(tensors: Iterator[tuple[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > max_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.detach().cpu()
        size += tensor.nbytes
    yield shard


def save_checkpoint_tensors(model: PreTrainedModel, tensors: Mapping[str, Tensor], path: Path) -> list[str]:
    """Write the tensors of a model to a safetensors file, as `to_checkpoint_tensors` names and splits them.

    Args:
        model: The model that the tensors belong to; it may be on the meta device.
        tensors: Name in the model -> full tensor.
        path: The file to write.

    Returns:
        The names of the tensors in the file.

    Raises:
        OSError: The file cannot be written.
    """
    named = to_checkpoint_tensors(model, tensors)
    _save(named, path)
    return list(named)


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    try:
        save_file(contiguous, path, metadata={"format": "pt"})
    except SafetensorError as error:  # its own type, also for errors of the file system
        raise OSError(f"{path}: {error}") from error


def rename_shard_files(folder: Path, files: list[list[str]], total: int) -> None:
    """Rename weight files to the names that transformers expects, and write the index of several files.

    The file that was written i-th is `part-{i}.safetensors`. A single file becomes `model.safetensors`.

    Args:
        folder: The folder of the files.
        files: Names of the tensors in each file, in the order in which they were written.
        total: Size of all tensors in bytes.
    """
    if len(files) == 1:
        (folder / "part-0.safetensors").replace(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for index, names in enumerate(files):
        file = f"model-{index + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / f"part-{index}.safetensors").replace(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index_json = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_json, indent=2, sort_keys=True) + "\n")
