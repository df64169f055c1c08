"""A LoRA adapter as peft writes it: a folder with adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from skyrl_train.errors import EngineError
from skyrl_train.models.lora import build_peft_config, filter_targeted, get_peft_defaults

_PREFIX = "base_model.model."
_SUFFIXES = (".lora_A.weight", ".lora_B.weight")
_SUPPORTED_OPTIONS = frozenset(
    {"r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"}
)
_IGNORED_OPTIONS = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version", "revision"),
        *("task_type", "lora_dropout", "init_lora_weights", "loftq_config", "eva_config", "corda_config"),
        *("lora_ga_config", "runtime_config", "megatron_core", "qalora_group_size"),
    }
)
"""Options about training or the adapter's origin. Any other option that is set would change the result."""


@dataclass(frozen=True, slots=True)
class AdapterTensors:
    """W x becomes W x + scaling · B (A x)."""

    scaling: float
    layers: Mapping[str, tuple[Tensor, Tensor]]
    """Name of a layer in the base model -> its A [r, in] and B [out, r]."""


def read_adapter(path: str, linears: Mapping[str, nn.Linear], *, adapter: str, engine: str) -> AdapterTensors:
    """Read an adapter for a model with these linear layers, which may be on the meta device.

    Raises EngineError naming engine, adapter, and the option or tensor that does not fit.
    """
    try:
        return _read(Path(path), linears)
    except (ValueError, TypeError, OSError, SafetensorError) as error:
        raise EngineError(
            f"Engine {engine!r} cannot serve adapter {adapter!r} from {path}: {error} "
            "It serves LoRA on linear layers, as peft's save_pretrained writes it."
        ) from error


def _read(folder: Path, linears: Mapping[str, nn.Linear]) -> AdapterTensors:
    raw = json.loads((folder / "adapter_config.json").read_text())
    kind = raw.get("peft_type") if isinstance(raw, dict) else None
    if kind != "LORA":
        raise ValueError(f"its peft_type is {kind!r} instead of 'LORA'.")
    known = get_peft_defaults()
    _check_options(raw, known)
    config = build_peft_config(**{option: value for option, value in raw.items() if option in known})
    if config.r < 1:
        raise ValueError(f"its rank is r={config.r}; it must be at least 1.")
    tensors = load_file(folder / "adapter_model.safetensors")
    found = _by_layer(tensors, linears)
    asked = set(filter_targeted(config, linears))
    if absent := sorted(asked - found.keys()):
        raise ValueError(f"target_modules asks for {absent[0]}, for which it has no tensors.")
    if isinstance(config.target_modules, set):
        for target in sorted(config.target_modules):
            if not any(layer == target or layer.endswith(f".{target}") for layer in found):
                raise ValueError(f"target_modules names {target!r}, which no linear layer of the model is called.")
    for layer, pair in found.items():
        _check_matrices(layer, pair, linears[layer], config.r)
    return AdapterTensors(config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r), found)


def _check_options(raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raises ValueError for the first option that would change the result and is not implemented."""
    for option, value in raw.items():
        # None, False, 0, [] and {} all mean that an option is off.
        if value and option not in _SUPPORTED_OPTIONS | _IGNORED_OPTIONS and value != defaults.get(option):
            raise ValueError(f"its option {option}={value!r} is not supported.")


def _by_layer(tensors: Mapping[str, Tensor], linears: Mapping[str, nn.Linear]) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of every layer. Raises ValueError naming a tensor without a linear layer, or without its counterpart."""
    found: dict[str, list[Tensor | None]] = {}
    for key, tensor in tensors.items():
        end = next((index for index, text in enumerate(_SUFFIXES) if key.endswith(text)), None)
        layer = "" if end is None else key.removeprefix(_PREFIX).removesuffix(_SUFFIXES[end])
        if end is None or layer not in linears:
            raise ValueError(f"its tensor {key} belongs to no linear layer of the model (head and embedding apart).")
        found.setdefault(layer, [None, None])[end] = tensor
    pairs = {}
    for layer, (down, up) in found.items():
        if down is None or up is None:
            raise ValueError(f"it lacks the tensor {_PREFIX}{layer}{_SUFFIXES[0] if down is None else _SUFFIXES[1]}.")
        pairs[layer] = (down, up)
    return pairs


def _check_matrices(layer: str, pair: tuple[Tensor, Tensor], linear: nn.Linear, rank: int) -> None:
    expected = ((rank, linear.in_features), (linear.out_features, rank))
    for tensor, shape, end in zip(pair, expected, _SUFFIXES, strict=True):
        if tuple(tensor.shape) != shape:
            raise ValueError(f"its tensor {_PREFIX}{layer}{end} is {list(tensor.shape)} instead of {list(shape)}.")
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"its tensor {_PREFIX}{layer}{end} holds NaN or infinity.")
