"""Low-rank adapters on a causal language model (LoRA, https://arxiv.org/abs/2106.09685).

A linear layer W x becomes W x + s B (A x) with s = alpha / rank; W is frozen, and B starts at 0. peft adds the adapters
to linear layers, and expert_adapters.py to experts. This module selects both, and merges adapters into weights.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from skyrl_train.config.schema import LoraConfig
from skyrl_train.errors import ConfigError
from skyrl_train.models.composite import get_composite
from skyrl_train.models.expert_adapters import (
    adapter_names,
    add_expert_adapters,
    find_fused_experts,
    get_expert_parameters,
    to_factors,
    to_peft_a,
    to_peft_b,
)
from skyrl_train.models.sharded_tensor import ShardedTensor

ALL_LINEAR = "all-linear"
BASE_LAYER_INFIX, LORA_INFIX, LORA_A_SUFFIX, LORA_B_SUFFIX = (
    ".base_layer.",
    ".lora_",
    ".lora_A.default.weight",
    ".lora_B.default.weight",
)
"""Parts of peft's names: of a layer's own parameters, of adapters, of A [rank, in], and of B [out, rank]."""
_NAMES_OF_SEPARATE_EXPERTS = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""Names that peft takes for those of a mixture's experts or router, wherever they are in the model."""
_REJECTED_BY_PEFT = {"falcon_h1": "out_proj", "nemotron_h": "out_proj"}
"""Model type -> name of the layers on which peft loads no adapter, because a kernel of Mamba2 reads their weights."""
_log = logging.getLogger(__name__)
T = TypeVar("T")


def get_adaptable_linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the layers that a LoRA adapter may change, by name: all linear layers except the head.

    Subclasses of nn.Linear with a forward pass of their own, such as Llama 4's routers, are excluded, and so are layers
    that peft rejects when it loads an adapter.
    """
    head = model.get_output_embeddings()
    rejected = _REJECTED_BY_PEFT.get(model.config.get_text_config().model_type)
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and module is not head
        and name.rpartition(".")[2] != rejected
    }


def get_exported_names(model: PreTrainedModel) -> dict[str, str]:
    """Return the names of `get_adaptable_linears` -> their names in the model that exported adapters are loaded on.

    They differ for the text model of a composite, whose adapters are loaded on the composite.
    """
    composite = get_composite(model)
    return {name: name if composite is None else composite.module_name(name) for name in get_adaptable_linears(model)}


def peft_name(name: str, exported: Mapping[str, str]) -> str:
    """Return peft's name of the tensor "{layer}.lora_A.weight" or "{layer}.lora_B.weight".

    Args:
        name: The tensor's name, with the layer's name in the text model.
        exported: See `get_exported_names`.
    """
    layer, adapter, rest = name.partition(LORA_INFIX)
    return f"base_model.model.{exported[layer]}{adapter}{rest}"


def get_peft_defaults() -> dict[str, Any]:
    """Return the options of a peft configuration with their defaults."""
    from peft import LoraConfig as PeftConfig  # takes a second to import

    return {field.name: field.default for field in fields(PeftConfig)}


def build_peft_config(**options: Any) -> Any:
    """Return a peft LoRA configuration. Raises ValueError or TypeError for options that contradict each other."""
    from peft import LoraConfig as PeftConfig

    return PeftConfig(**options)


def filter_targeted(config: Any, names: Iterable[str]) -> list[str]:
    """Return the names that a peft configuration targets."""
    from peft.tuners.tuners_utils import check_target_module_exists

    return [name for name in names if check_target_module_exists(config, name)]


def select_adapted_layers(
    model: PreTrainedModel, settings: LoraConfig, key: str
) -> tuple[Any, list[str], dict[str, nn.Module]]:
    """Select what gets an adapter.

    Args:
        model: The model, without adapters.
        settings: The LoRA settings.
        key: Configuration key of the settings, for messages.

    Returns:
        The peft configuration of the adapters, the names of the adapted linear layers, and the adapted parameters of
        experts: name -> the module that holds it.

    Raises:
        ConfigError: A target is not a linear layer or a parameter of experts of the model, or nothing is left.
    """
    linears = get_adaptable_linears(model)
    targets = _to_list(settings.target_modules)
    if targets == ALL_LINEAR:
        targets = sorted({name.rpartition(".")[2] for name in linears})
    config = build_peft_config(
        target_modules=targets,
        exclude_modules=_to_list(settings.exclude_modules),
        base_model_name_or_path=model.name_or_path,
        task_type="CAUSAL_LM",
        inference_mode=True,
        **_rank_and_alpha(settings),
    )
    _check_names(model, linears, config, key)
    experts = _select_expert_parameters(model, settings, config, key)
    if experts and not targets:
        return config, [], experts
    return config, _select_layers(model, linears, config, key), experts


def _rank_and_alpha(settings: LoraConfig) -> dict[str, Any]:
    return {"r": settings.rank, "lora_alpha": settings.alpha}


class LoraAdapters:
    """The adapters of one model, as parameters of its modules; all other parameters of the model are frozen."""

    def __init__(self, model: PreTrainedModel, settings: LoraConfig, key: str):
        """Add adapters to `model`.

        A is drawn from torch's generator, which must have the same seed on all ranks that share a model.

        Args:
            model: The model, which is changed.
            settings: The LoRA settings.
            key: Configuration key of the settings, for messages.

        Raises:
            ConfigError: A target is not a linear layer or a parameter of experts of the model, or nothing is left.
        """
        from peft import inject_adapter_in_model

        self.config, self.layers, experts = select_adapted_layers(model, settings, key)
        self.experts = list(experts)
        """Names of the adapted parameters of experts."""
        self.scaling = settings.alpha / settings.rank
        self._is_transposed = {name: bool(module.is_transposed) for name, module in experts.items()}
        self._parameter_of = {matrix: name for name in experts for matrix in adapter_names(name)}
        """Name of A or B of experts -> the name of the parameter that they change."""
        targets = self.config.target_modules
        if not isinstance(targets, str):  # loaders require a layer for every name, so drop names without one
            self.config.target_modules = {
                name for name in targets if any(f".{layer}".endswith(f".{name}") for layer in self.layers)
            }
        if settings.target_modules == ALL_LINEAR and not experts and (note := _note_on_fused_experts(model)):
            _log.warning("%s.target_modules=all-linear: %s", key, note)
        self.names = get_exported_names(model)
        """Layer -> its name in exported adapters."""
        composite = get_composite(model)
        self._expert_names = {
            name: name if composite is None else composite.tensor_names[name] for name in self.experts
        }
        """Adapted parameter of experts -> its name in the model that exported adapters are loaded on."""
        if composite is not None:  # other towers may have layers that match the names, too
            self.config.target_modules = {self.names[layer] for layer in self.layers}
            self.config.exclude_modules = None
        self._set_target_parameters(model, settings)
        # peft redirects names of experts in model classes that it supports; in a plain container it does not.
        init_lora_weights: Any = True if settings.init_method == "kaiming" else settings.init_method
        names = [f"0.{layer}" for layer in self.layers]
        exact = build_peft_config(
            target_modules=names, init_lora_weights=init_lora_weights, **_rank_and_alpha(settings)
        )
        if not self.layers:
            model.requires_grad_(False)
        else:
            with _expanded_on_cpu(model):
                inject_adapter_in_model(exact, nn.Sequential(model))
        for name, module in experts.items():
            parameter = name.rpartition(".")[2]
            add_expert_adapters(module, parameter, settings.rank, self.scaling, settings.init_method)

    def _set_target_parameters(self, model: PreTrainedModel, settings: LoraConfig) -> None:
        """Set the parameters that peft adapts when it loads the exported adapters.

        They are those of experts, and the weights of linear layers whose names peft would take for those of experts, as
        in shared experts and dense layers: see `_NAMES_OF_SEPARATE_EXPERTS`.
        """
        # peft does not apply exclude_modules to parameters.
        needs_full_names = get_composite(model) is not None or settings.exclude_modules
        targets = self._expert_names.values() if needs_full_names else settings.target_parameters or ()
        is_mixture = find_fused_experts(model) is not None
        mistaken = {
            layer for layer in self.layers if is_mixture and layer.rpartition(".")[2] in _NAMES_OF_SEPARATE_EXPERTS
        }
        if mistaken:
            self.config.target_modules = {self.names[layer] for layer in self.layers if layer not in mistaken}
            self.config.exclude_modules = None
        if not self.config.target_modules:
            self.config.target_modules = []
        weights = sorted(f"{self.names[layer]}.weight" for layer in mistaken)
        self.config.target_parameters = [*targets, *weights] or None

    def iter_merged(
        self, parameters: Iterator[tuple[str, ShardedTensor]], adapters: dict[str, Tensor] | None = None
    ) -> Iterator[tuple[str, ShardedTensor]]:
        """Yield (checkpoint name, tensor) of the model with merged weights W + s B A, in the adapters' dtype.

        A rank merges its shard of W, for which A and B are gathered. This is a collective: all ranks must iterate.

        Args:
            parameters: (name, this rank's shard) of the model, in the model's order; they are not changed.
            adapters: Filled with A and B on the CPU, under peft's names; None to skip that.
        """
        pending: dict[str, ShardedTensor] = {}
        for name, tensor in parameters:
            if name.endswith((f"{BASE_LAYER_INFIX}weight", LORA_A_SUFFIX)) or name in self.experts:
                pending[name] = tensor
            elif (parameter := self._parameter_of.get(name)) is not None:
                name_a, name_b = adapter_names(parameter)
                if name == name_a:
                    pending[name] = tensor
                    continue
                weight = pending.pop(parameter)
                lora_a, lora_b = pending.pop(name_a).full_tensor(), tensor.full_tensor()
                if adapters is not None:
                    adapters |= dict([self.to_peft(name_a, lora_a.cpu()), self.to_peft(name_b, lora_b.cpu())])
                factors = to_factors(lora_a, lora_b, self._is_transposed[parameter])
                yield parameter, weight.map(partial(_merge_experts, *factors, self.scaling, weight.start))
            elif name.endswith(LORA_B_SUFFIX):
                layer = name.removesuffix(LORA_B_SUFFIX)
                weight = pending.pop(f"{layer}{BASE_LAYER_INFIX}weight")
                lora_a, lora_b = pending.pop(f"{layer}{LORA_A_SUFFIX}").full_tensor(), tensor.full_tensor()
                if adapters is not None:
                    for letter, matrix in (("A", lora_a), ("B", lora_b)):
                        adapters[peft_name(f"{layer}.lora_{letter}.weight", self.names)] = matrix.cpu()
                lora_a_columns = weight.select_columns(lora_a)
                start = weight.start * lora_a_columns.shape[1] // lora_a.shape[1]
                yield (
                    f"{layer}.weight",
                    weight.map(partial(_merge_elements, lora_b, lora_a_columns, self.scaling, start)),
                )
            else:
                yield name.replace(BASE_LAYER_INFIX, "."), tensor
        assert not pending, f"the parameters lack the adapter of {next(iter(pending))}"

    def to_peft(self, name: str, matrices: Tensor) -> tuple[str, Tensor]:
        """Return A or B as peft's files have it.

        Args:
            name: The name that `iter_unmerged` yields.
            matrices: The values.

        Returns:
            Peft's name and tensor.
        """
        parameter = self._parameter_of.get(name)
        if parameter is None:
            return peft_name(name, self.names), matrices
        owner, _, _ = parameter.rpartition(".")
        siblings = [other for other in self.experts if other.rpartition(".")[0] == owner]
        # peft wraps the module once for each of its parameters. The first one has the innermost wrapper.
        depth = len(siblings) - 1 - siblings.index(parameter)
        exported = self._expert_names[parameter].rpartition(".")[0] + depth * BASE_LAYER_INFIX.rstrip(".")
        is_a = name == adapter_names(parameter)[0]
        return (
            f"base_model.model.{exported}.lora_{'A' if is_a else 'B'}.weight",
            to_peft_a(matrices) if is_a else to_peft_b(matrices),
        )

    def iter_unmerged(self, parameters: Iterator[tuple[str, T]]) -> Iterator[tuple[str, T]]:
        """Yield (name, tensor) of `parameters` without merging: the model's under their checkpoint names, and A and B.

        The names of A and B are `{layer}.lora_A.weight` and `{layer}.lora_B.weight`; those of experts are unchanged.
        """
        for name, tensor in parameters:
            yield (
                name.replace(BASE_LAYER_INFIX, ".")
                .replace(LORA_A_SUFFIX, ".lora_A.weight")
                .replace(LORA_B_SUFFIX, ".lora_B.weight"),
                tensor,
            )


def load_peft_adapter(model: PreTrainedModel, folder: Path) -> Any:
    """Return the model with the adapter of a peft folder on it, as peft loads it."""
    from peft import PeftModel

    return PeftModel.from_pretrained(model, str(folder))


def get_adapter_state_dict(model: Any) -> dict[str, Tensor]:
    """Return A and B of a model on which peft has put an adapter, by peft's names."""
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model, save_embedding_layers=False)  # type: ignore[no-any-return]


def _merge_elements(lora_b: Tensor, lora_a: Tensor, scaling: float, start: int, weight: Tensor) -> Tensor:
    """Return W + s B A for the elements `weight` of W from `start` on, in their shape.

    Only the rows of B that belong to these elements are used.
    """
    columns, count = lora_a.shape[1], weight.numel()
    first, last = start // columns, -(-(start + count) // columns)
    elements = slice(start - first * columns, start - first * columns + count)
    rows = weight.new_zeros(last - first, columns, dtype=lora_b.dtype)
    rows.view(-1)[elements] = weight.reshape(-1)
    return torch.addmm(rows, lora_b[first:last], lora_a, alpha=scaling).view(-1)[elements].view_as(weight)


def _merge_experts(left: Tensor, right: Tensor, scaling: float, start: int, weight: Tensor) -> Tensor:
    """Return W + s (left right) of every expert for the elements `weight` of W from `start` on, in their shape.

    Args:
        left: Matrices [E, rows, rank].
        right: Matrices [E, rank, columns].
        scaling: The factor s.
        start: Index of the first element in the flattened parameter [E, rows, columns].
        weight: The elements.
    """
    merged, elements = torch.empty_like(weight, dtype=left.dtype), weight.reshape(-1)
    size, stop = left.shape[1] * right.shape[2], start + weight.numel()
    for expert in range(start // size, -(-stop // size)):
        first, last = max(start, expert * size), min(stop, (expert + 1) * size)
        part = slice(first - start, last - start)
        merged.view(-1)[part] = _merge_elements(
            left[expert], right[expert], scaling, first - expert * size, elements[part]
        )
    return merged


@contextmanager
def _expanded_on_cpu(model: PreTrainedModel) -> Iterator[None]:
    """Replace meta-device parameters by expanded CPU tensors of one number while the context is active.

    peft moves an adapter to the device of its layer, and on the meta device it would lose its values.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.is_meta]
    for parameter in parameters:
        number = torch.empty(1, dtype=parameter.dtype)
        torch.utils.swap_tensors(parameter, nn.Parameter(number.expand(parameter.shape), parameter.requires_grad))
    yield
    for parameter in parameters:
        meta_tensor = torch.empty_like(parameter, device="meta", memory_format=torch.contiguous_format)
        torch.utils.swap_tensors(parameter, nn.Parameter(meta_tensor, parameter.requires_grad))


def _to_list(names: Any) -> Any:
    """Return a list for a tuple: a frozen configuration has tuples, but peft expects lists."""
    return list(names) if isinstance(names, tuple) else names


def _compile_patterns(config: Any, option: str, key: str) -> dict[str, re.Pattern[str]]:
    """Return target -> pattern of full names, for `target_modules` or `exclude_modules` of a peft configuration."""
    targets, patterns = getattr(config, option), {}
    for target in sorted([targets] if isinstance(targets, str) else targets or ()):
        try:
            patterns[target] = re.compile(target if isinstance(targets, str) else rf"(.*\.)?{re.escape(target)}")
        except re.error as error:
            raise ConfigError(
                f"{key}.{option}={target!r} is not a valid regular expression: {error}. Correct it, or give a list "
                "of names."
            ) from error
    return patterns


def _check_names(model: PreTrainedModel, linears: dict[str, nn.Linear], config: Any, key: str) -> None:
    """Raise ConfigError for a target that matches no layer."""
    available = ", ".join(sorted({name.rpartition(".")[2] for name in linears}))
    experts = {name.rpartition(".")[0] for name in get_expert_parameters(model)}
    for option, names in (("target_modules", set(linears)), ("exclude_modules", experts | set(linears))):
        for target, pattern in _compile_patterns(config, option, key).items():
            if not any(map(pattern.fullmatch, names)):
                message = (
                    f"{key}.{option}={target!r}: no linear layer of {type(model).__name__} has that name. The names "
                    f"are {available}. A string, unlike a list, is a regular expression that must match full names. "
                    f"{_note_on_fused_experts(model)}"
                )
                raise ConfigError(message.rstrip())


def _select_layers(model: PreTrainedModel, linears: dict[str, nn.Linear], config: Any, key: str) -> list[str]:
    """Return the names of the layers that get an adapter. Raises ConfigError if there is none, or a target is none."""
    available = ", ".join(sorted({name.rpartition(".")[2] for name in linears}))
    modules = dict(model.named_modules())
    if others := filter_targeted(config, (name for name in modules if name not in linears)):
        raise ConfigError(
            f"{key}.target_modules matches {others[0]}, a {type(modules[others[0]]).__name__}. Only linear layers "
            f"except the head can have adapters. Their names are {available}."
        )
    layers = filter_targeted(config, linears)
    if not layers:
        if not linears:
            raise ConfigError(
                f"{key}: {type(model).__name__} has no linear layer except its head, so no layer can have an adapter. "
                "Use another model, or train without LoRA."
            )
        raise ConfigError(
            f"{key}.exclude_modules={config.exclude_modules!r} leaves no layer to train. Exclude fewer layers."
        )
    return layers


def _select_expert_parameters(
    model: PreTrainedModel, settings: LoraConfig, config: Any, key: str
) -> dict[str, nn.Module]:
    """Return the parameters of experts that get an adapter, with the modules that hold them."""
    parameters = get_expert_parameters(model)
    selected = set()
    for target in settings.target_parameters or ():
        matches = {name for name in parameters if f".{name}".endswith(f".{target}")}
        if not matches:
            names = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in parameters))
            available = (
                f"The names are {names}."
                if names
                else "It has none that can have adapters: set the key to null, and adapt linear layers by "
                "target_modules."
            )
            raise ConfigError(
                f"{key}.target_parameters={target!r}: no parameter of the experts of {type(model).__name__} has that "
                f"name. {available}"
            )
        selected |= matches
    patterns = _compile_patterns(config, "exclude_modules", key).values()
    kept = {name for name in selected if not any(pattern.fullmatch(name.rpartition(".")[0]) for pattern in patterns)}
    if selected and not kept:
        raise ConfigError(
            f"{key}.exclude_modules={_to_list(settings.exclude_modules)!r} leaves no experts for "
            f"{key}.target_parameters={list(settings.target_parameters or ())}. Exclude fewer modules, or set "
            "target_parameters to null."
        )
    return {name: module for name, module in parameters.items() if name in kept}


def _note_on_fused_experts(model: PreTrainedModel) -> str:
    """Return a note on experts that adapters do not change; empty if there are none."""
    name = find_fused_experts(model)
    if name is None:
        return ""
    unless = " unless target_parameters names them" if get_expert_parameters(model) else ""
    return f"Experts are fused into parameters such as {name}. They stay frozen{unless}."
