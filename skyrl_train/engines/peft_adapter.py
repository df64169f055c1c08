"""Reading of LoRA adapters that peft wrote: a folder with adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
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
    {
        *("r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "target_parameters"),
        *("layers_to_transform", "layers_pattern"),
    }
)
_IGNORED_OPTIONS = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version", "revision"),
        *("task_type", "lora_dropout", "init_lora_weights", "loftq_config", "eva_config", "corda_config"),
        *("lora_ga_config", "runtime_config", "megatron_core", "qalora_group_size"),
    }
)
"""Options about training or the adapter's origin. Every other option that is set would change the outputs."""


@dataclass(frozen=True, slots=True)
class AdapterTensors:
    """The tensors of a LoRA adapter. They change W x to W x + scaling * B (A x)."""

    scaling: float
    layers: Mapping[str, tuple[Tensor, Tensor]]
    """The matrices A [r, in] and B [out, r] by the name of the layer in the base model."""


def read_adapter(path: str, linears: Mapping[str, nn.Linear], *, adapter: str, engine: str) -> AdapterTensors:
    """Read an adapter from a folder and check that it fits the model.

    Args:
        path: Folder with adapter_config.json and adapter_model.safetensors.
        linears: The model's linear layers by name, without head and embedding. They may be on the meta device.
        adapter: Name of the adapter, for error messages.
        engine: Name of the engine, for error messages.

    Raises:
        EngineError: A file cannot be read, an option is not supported, or a tensor does not fit. The message names the
            engine, the adapter, and the option or tensor.
    """
    try:
        return _read(Path(path), linears)
    except (ValueError, TypeError, OSError, SafetensorError) as error:
        raise EngineError(
            f"Engine {engine!r} cannot serve adapter {adapter!r} from {path}: {error} "
            "It supports LoRA adapters on linear layers, written by peft's save_pretrained."
        ) from error


def _read(folder: Path, linears: Mapping[str, nn.Linear]) -> AdapterTensors:
    raw = json.loads((folder / "adapter_config.json").read_text())
    peft_type = raw.get("peft_type") if isinstance(raw, dict) else None
    if peft_type != "LORA":
        raise ValueError(f"its peft_type is {peft_type!r} instead of 'LORA'.")
    known = get_peft_defaults()
    _check_options(raw, known)
    config = build_peft_config(**{option: value for option, value in raw.items() if option in known})
    if config.r < 1:
        raise ValueError(f"its rank is r={config.r}; it must be at least 1.")
    targeted = {*filter_targeted(config, linears), *_layers_of_parameters(config.target_parameters or (), linears)}
    tensors = load_file(folder / "adapter_model.safetensors")
    layers = _pairs_by_layer(tensors, linears)
    if missing := sorted(targeted - layers.keys()):
        raise ValueError(f"its target_modules includes the layer {missing[0]}, but it has no tensors for that layer.")
    if isinstance(config.target_modules, set):
        for target in sorted(config.target_modules):
            if not any(layer == target or layer.endswith(f".{target}") for layer in layers):
                raise ValueError(
                    f"its target_modules names {target!r}, but no linear layer of the model has that name."
                )
    for layer, pair in layers.items():
        _check_matrices(layer, pair, linears[layer], config.r)
    return AdapterTensors(config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r), layers)


def _layers_of_parameters(targets: Iterable[str], linears: Mapping[str, nn.Linear]) -> set[str]:
    """Return the linear layers whose weights an adapter targets as parameters.

    Raises:
        ValueError: A target is another parameter.
    """
    layers = set()
    for target in targets:
        matches = {layer for layer in linears if f".{layer}.weight".endswith(f".{target}")}
        if not matches:
            raise ValueError(
                f"its target_parameters names {target!r}, which is not the weight of a linear layer. Serve a model "
                "that has adapters on experts merged."
            )
        layers |= matches
    return layers


def _check_options(raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise ValueError for the first option that would change the outputs and is not supported."""
    for option, value in raw.items():
        # None, False, 0, [] and {} all mean that an option is off.
        if value and option not in _SUPPORTED_OPTIONS | _IGNORED_OPTIONS and value != defaults.get(option):
            raise ValueError(f"its option {option}={value!r} is not supported.")


def _pairs_by_layer(
    tensors: Mapping[str, Tensor], linears: Mapping[str, nn.Linear]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A and B of every layer.

    Raises:
        ValueError: A tensor belongs to no linear layer, or its counterpart is missing.
    """
    tensors_by_layer: dict[str, list[Tensor | None]] = {}
    for key, tensor in tensors.items():
        end = next((index for index, text in enumerate(_SUFFIXES) if key.endswith(text)), None)
        layer = "" if end is None else key.removeprefix(_PREFIX).removesuffix(_SUFFIXES[end])
        if end is None or layer not in linears:
            raise ValueError(
                f"its tensor {key} belongs to no linear layer of the model; adapters on head and embedding are not "
                "supported."
            )
        tensors_by_layer.setdefault(layer, [None, None])[end] = tensor
    pairs = {}
    for layer, (down, up) in tensors_by_layer.items():
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
