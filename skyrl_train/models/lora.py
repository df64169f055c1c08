"""Low-rank adapters on a causal language model (LoRA, https://arxiv.org/abs/2106.09685).

A linear layer W x becomes W x + s B (A x) with s = alpha / rank; W is frozen, and B starts at 0. peft adds the adapters
to a model. This module selects the layers, and merges adapters into weights.
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
from skyrl_train.models.sharded_tensor import ShardedTensor

ALL_LINEAR = "all-linear"
BASE_LAYER_INFIX, LORA_INFIX, LORA_A_SUFFIX, LORA_B_SUFFIX = (
    ".base_layer.",
    ".lora_",
    ".lora_A.default.weight",
    ".lora_B.default.weight",
)
"""Parts of peft's names: of a layer's own parameters, of its adapter's, of A [rank, in], and of B [out, rank]."""
_log = logging.getLogger(__name__)
T = TypeVar("T")


def get_adaptable_linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Name -> layer, for the layers that an adapter may change: all linear layers but the head.

    Llama 4's routers derive from linear layers, but return more than the product.
    """
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and module is not head
    }


def get_exported_names(model: PreTrainedModel) -> dict[str, str]:
    """Return the names of `adapted_linears` -> their names in the model that exported adapters are loaded on.

    They differ for the text model of a composite, whose adapters are loaded on the composite.
    """
    composite = get_composite(model)
    return {name: name if composite is None else composite.module_name(name) for name in get_adaptable_linears(model)}


def peft_name(name: str, exported: Mapping[str, str]) -> str:
    """Return peft's name of the tensor "{layer}.lora_A.weight" or "{layer}.lora_B.weight".

    Args:
        name: The tensor's name, with the layer's name in the text model.
        exported: See `exported_linears`.
    """
    layer, adapter, rest = name.partition(LORA_INFIX)
    return f"base_model.model.{exported[layer]}{adapter}{rest}"


def get_peft_defaults() -> dict[str, Any]:
    """The options of a peft configuration and their defaults."""
    from peft import LoraConfig as PeftConfig  # takes a second to import

    return {field.name: field.default for field in fields(PeftConfig)}


def build_peft_config(**options: Any) -> Any:
    """A peft configuration. Raises ValueError or TypeError for options that contradict each other."""
    from peft import LoraConfig as PeftConfig

    return PeftConfig(**options)


def filter_targeted(config: Any, names: Iterable[str]) -> list[str]:
    """Those of the names that a peft configuration targets."""
    from peft.tuners.tuners_utils import check_target_module_exists

    return [name for name in names if check_target_module_exists(config, name)]


def select_adapted_layers(model: PreTrainedModel, settings: LoraConfig, key: str) -> tuple[Any, list[str]]:
    """Return the peft configuration of a model's adapters, and the names of the layers that get one.

    Raises:
        ConfigError: Names `key` for targets that are no linear layers of the model.
    """
    linears = get_adaptable_linears(model)
    targets = _plain(settings.target_modules)
    if targets == ALL_LINEAR:
        targets = sorted({name.rpartition(".")[2] for name in linears})
    config = build_peft_config(
        target_modules=targets,
        exclude_modules=_plain(settings.exclude_modules),
        base_model_name_or_path=model.name_or_path,
        task_type="CAUSAL_LM",
        inference_mode=True,
        **_shape(settings),
    )
    return config, _chosen(model, linears, config, key)


def _shape(settings: LoraConfig) -> dict[str, Any]:
    return {"r": settings.rank, "lora_alpha": settings.alpha}


class LoraAdapters:
    """The adapters of one model, as parameters of its modules; all other parameters of the model are frozen."""

    def __init__(self, model: PreTrainedModel, settings: LoraConfig, key: str):
        """Add adapters to `model`. Raises ConfigError naming `key` for targets that are no linear layers of the model.

        A is drawn from torch's generator, which must have the same seed on all ranks that share a model.
        """
        from peft import inject_adapter_in_model

        self.config, self.layers = select_adapted_layers(model, settings, key)
        self.scaling = settings.alpha / settings.rank
        targets = self.config.target_modules
        if not isinstance(targets, str):  # readers of the file require a layer for every name, so drop excluded ones
            self.config.target_modules = {
                name for name in targets if any(f".{layer}".endswith(f".{name}") for layer in self.layers)
            }
        if settings.target_modules == ALL_LINEAR and (fused := _fused(model)):
            _log.warning("%s.target_modules=all-linear: %s", key, fused)
        self.names = get_exported_names(model)
        """Layer -> its name in exported adapters."""
        if get_composite(model) is not None:  # whose other towers may have layers that match the names, too
            self.config.target_modules = {self.names[layer] for layer in self.layers}
            self.config.exclude_modules = None
        # peft redirects names of experts in models that it knows; in a plain container it uses names as they are.
        start: Any = True if settings.init_method == "kaiming" else settings.init_method
        names = [f"0.{layer}" for layer in self.layers]
        exact = build_peft_config(target_modules=names, init_lora_weights=start, **_shape(settings))
        with _seen_in_host_memory(model):
            inject_adapter_in_model(exact, nn.Sequential(model))

    def iter_merged(
        self, parameters: Iterator[tuple[str, ShardedTensor]], adapters: dict[str, Tensor] | None = None
    ) -> Iterator[tuple[str, ShardedTensor]]:
        """(checkpoint name, tensor) of the model with merged weights W + s B A, in the adapters' dtype.

        `parameters`: (name, this rank's part) of the model, in its order; they are not changed. A rank merges its part
        of W, for which A and B are gathered: a collective of all ranks. `adapters` is filled with A and B under peft's
        names.
        """
        held: dict[str, ShardedTensor] = {}
        for name, tensor in parameters:
            if name.endswith((f"{BASE_LAYER_INFIX}weight", LORA_A_SUFFIX)):
                held[name] = tensor
            elif name.endswith(LORA_B_SUFFIX):
                layer = name.removesuffix(LORA_B_SUFFIX)
                weight = held.pop(f"{layer}{BASE_LAYER_INFIX}weight")
                down, up = held.pop(f"{layer}{LORA_A_SUFFIX}").full_tensor(), tensor.full_tensor()
                if adapters is not None:
                    for end, matrix in (("A", down), ("B", up)):
                        adapters[self.exported_name(f"{layer}.lora_{end}.weight")] = matrix.cpu()
                columns = weight.select_columns(down)
                start = weight.start * columns.shape[1] // down.shape[1]
                yield f"{layer}.weight", weight.map(partial(_merged, up, columns, self.scaling, start))
            else:
                yield name.replace(BASE_LAYER_INFIX, "."), tensor
        assert not held, f"parameters ended before the adapter of {next(iter(held))} came"

    def exported_name(self, name: str) -> str:
        """Return the name that peft gives A or B of a layer, from the name that `separate` yields."""
        return peft_name(name, self.names)

    def iter_unmerged(self, parameters: Iterator[tuple[str, T]]) -> Iterator[tuple[str, T]]:
        """(name, tensor) of `parameters` without merging: the model's under their checkpoint names, and A and B.

        The names of A and B are `{layer}.lora_A.weight` and `{layer}.lora_B.weight`.
        """
        for name, tensor in parameters:
            yield (
                name.replace(BASE_LAYER_INFIX, ".")
                .replace(LORA_A_SUFFIX, ".lora_A.weight")
                .replace(LORA_B_SUFFIX, ".lora_B.weight"),
                tensor,
            )


def load_peft_adapter(model: PreTrainedModel, folder: Path) -> Any:
    """The model with the adapter in a peft folder on it, as peft loads it."""
    from peft import PeftModel

    return PeftModel.from_pretrained(model, str(folder))


def get_adapter_state_dict(model: Any) -> dict[str, Tensor]:
    """A and B of a model that peft has put an adapter on, by peft's names."""
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model, save_embedding_layers=False)  # type: ignore[no-any-return]


def _merged(up: Tensor, down: Tensor, scaling: float, start: int, held: Tensor) -> Tensor:
    """W + s B A for elements of W from `start` on, in their shape: of B only the rows that they lie in are used."""
    columns, count = down.shape[1], held.numel()
    first, last = start // columns, -(-(start + count) // columns)
    inside = slice(start - first * columns, start - first * columns + count)
    rows = held.new_zeros(last - first, columns, dtype=up.dtype)
    rows.view(-1)[inside] = held.reshape(-1)
    return torch.addmm(rows, up[first:last], down, alpha=scaling).view(-1)[inside].view_as(held)


@contextmanager
def _seen_in_host_memory(model: PreTrainedModel) -> Iterator[None]:
    """Within it parameters on the meta device look as if they were on the CPU, where one number is all they have.

    peft moves an adapter to the device of its layer, and on the meta device it would lose its values.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.is_meta]
    for parameter in parameters:
        number = torch.empty(1, dtype=parameter.dtype)
        torch.utils.swap_tensors(parameter, nn.Parameter(number.expand(parameter.shape), parameter.requires_grad))
    yield
    for parameter in parameters:
        nothing = torch.empty_like(parameter, device="meta", memory_format=torch.contiguous_format)
        torch.utils.swap_tensors(parameter, nn.Parameter(nothing, parameter.requires_grad))


def _plain(names: Any) -> Any:
    """A frozen configuration has tuples, but peft expects lists."""
    return list(names) if isinstance(names, tuple) else names


def _chosen(model: PreTrainedModel, linears: dict[str, nn.Linear], config: Any, key: str) -> list[str]:
    """Names of the layers that get an adapter. Raises ConfigError for a name that fits none of them."""
    there = ", ".join(sorted({name.rpartition(".")[2] for name in linears}))
    for option in ("target_modules", "exclude_modules"):
        wanted = getattr(config, option)
        for one in sorted([wanted] if isinstance(wanted, str) else wanted or ()):
            try:
                pattern = re.compile(one if isinstance(wanted, str) else rf"(.*\.)?{re.escape(one)}")
            except re.error as error:
                raise ConfigError(f"{key}.{option}={one!r} is not a regular expression: {error}.") from error
            if not any(pattern.fullmatch(name) for name in linears):
                message = (
                    f"{key}.{option}={one!r}: no linear layer of {type(model).__name__} is called that; they are "
                    f"called {there}. A text is a regular expression for whole names. {_fused(model)}"
                )
                raise ConfigError(message.rstrip())
    modules = dict(model.named_modules())
    if others := filter_targeted(config, (name for name in modules if name not in linears)):
        raise ConfigError(
            f"{key}.target_modules fits {others[0]}, a {type(modules[others[0]]).__name__}: adapters go on linear "
            f"layers, and not on the head; they are called {there}."
        )
    chosen = filter_targeted(config, linears)
    if not chosen:
        if not linears:
            raise ConfigError(
                f"{key}: {type(model).__name__} has no linear layer but its head, so there is none to adapt."
            )
        raise ConfigError(f"{key}.exclude_modules={config.exclude_modules!r} leaves no layer to train.")
    return chosen


def _fused(model: PreTrainedModel) -> str:
    """A note on experts that adapters do not change; empty if there are none."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 2:
            return f"Experts are fused into parameters such as {name}, which adapters do not change: they stay frozen."
    return ""
