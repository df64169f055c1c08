"""Optimizers by name, and which parameters each of them gets (`optimizer_config.name`)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

import torch
from torch import nn

from skyrl_train.config.choices import OptimizerName
from skyrl_train.config.schema import OptimizerConfig
from skyrl_train.strategies.adamw_8bit import BLOCK_SIZE, MIN_QUANTIZED_NUMEL, make_adamw_8bit
from skyrl_train.strategies.muon import ADJUST_LR, RowShards, ShardedMuon

FLOAT32_BYTES = 4


class ParameterKind(StrEnum):
    """The use of a parameter, on which its optimizer depends."""

    LAYER_MATRIX = "layer matrix"
    EMBEDDING = "embedding"
    OTHER = "other"


def classify_parameters(model: Any) -> dict[int, ParameterKind]:
    """Return the id of each parameter -> its kind.

    Layer matrices are the two-dimensional `weight`s in decoder layers: not biases, norms and convolutions, and not
    stacks of experts, which have three dimensions.

    Args:
        model: The model; see `Strategy.prepare`.
    """
    kinds = {id(parameter): ParameterKind.OTHER for parameter in model.parameters()}
    for layer in model.decoder_layers():
        for module in layer.modules():
            weight = dict(module.named_parameters(recurse=False)).get("weight")
            if weight is not None and weight.ndim == 2:
                kinds[id(weight)] = ParameterKind.LAYER_MATRIX
    embeddings = (module for module in model.modules() if isinstance(module, nn.Embedding))
    return kinds | {id(module.weight): ParameterKind.EMBEDDING for module in embeddings}


def choose_optimizer(name: str, kind: ParameterKind, numel: int) -> OptimizerName:
    """Return the optimizer of one parameter in a run with the optimizer `name`.

    Args:
        name: optimizer_config.name.
        kind: The parameter's kind.
        numel: Number of elements of the full parameter, so that the number of ranks does not matter.
    """
    is_chosen = {
        OptimizerName.ADAMW: True,
        OptimizerName.MUON: kind is ParameterKind.LAYER_MATRIX,
        # bitsandbytes recommends float32 moments for embeddings, and transformers excludes them, too.
        OptimizerName.ADAMW_8BIT: kind is not ParameterKind.EMBEDDING and numel >= MIN_QUANTIZED_NUMEL,
    }
    return OptimizerName(name) if is_chosen[OptimizerName(name)] else OptimizerName.ADAMW


def state_bytes(optimizer: OptimizerName, numel: int) -> int:
    """Return the bytes of the state of one parameter's shard.

    Args:
        optimizer: The parameter's optimizer.
        numel: Number of elements of the shard.
    """
    if optimizer is OptimizerName.MUON:
        return FLOAT32_BYTES * numel
    if optimizer is OptimizerName.ADAMW_8BIT:
        moments = 2 * numel + 2 * FLOAT32_BYTES * math.ceil(numel / BLOCK_SIZE)
    else:
        moments = 2 * FLOAT32_BYTES * numel
    return moments + FLOAT32_BYTES  # the number of steps


class CompositeOptimizer:
    """Optimizers of different parameters, with one `step`, one `state` and one list of parameter groups."""

    def __init__(self, optimizers: Mapping[OptimizerName, torch.optim.Optimizer]):
        """Join optimizers, which from now on share one `state`."""
        self.optimizers = optimizers
        self.state: defaultdict[Any, Any] = defaultdict(dict)
        for optimizer in optimizers.values():
            optimizer.state = self.state
        self.param_groups = [group for optimizer in optimizers.values() for group in optimizer.param_groups]

    def step(self) -> None:
        """Update all parameters that have a gradient."""
        for optimizer in self.optimizers.values():
            optimizer.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()


def build_optimizer(
    settings: OptimizerConfig,
    views: Mapping[str, nn.Parameter],
    chosen: Mapping[str, OptimizerName],
    find_row_shards: Callable[[str], RowShards | None],
) -> torch.optim.Optimizer | CompositeOptimizer:
    """Return the optimizer of one rank: torch's AdamW if it has all parameters, otherwise a composite.

    Args:
        settings: The settings.
        views: Name of a parameter -> a plain tensor with this rank's shard, which is updated.
        chosen: Name of a parameter -> its optimizer.
        find_row_shards: Returns the shards of a matrix with a name; None if this rank holds the full matrix.

    Raises:
        ConfigError: The package of an optimizer is not installed.
    """
    by_optimizer: dict[OptimizerName, dict[str, nn.Parameter]] = {}
    for name, view in views.items():
        # bitsandbytes' kernels fail for a rank without elements.
        if view.numel() or chosen[name] is not OptimizerName.ADAMW_8BIT:
            by_optimizer.setdefault(chosen[name], {})[name] = view
    decay = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    adam: dict[str, Any] = {**decay, "betas": (settings.adam_betas[0], settings.adam_betas[1])}
    optimizers: dict[OptimizerName, torch.optim.Optimizer] = {}
    for optimizer, own in by_optimizer.items():
        if optimizer is OptimizerName.MUON:
            optimizers[optimizer] = _make_muon(own, find_row_shards, momentum=settings.momentum, **decay)
        elif optimizer is OptimizerName.ADAMW_8BIT:
            optimizers[optimizer] = make_adamw_8bit(own.values(), **adam)
        else:
            optimizers[optimizer] = torch.optim.AdamW(own.values(), fused=True, **adam)
    # The strategy must see AdamW itself, whose fused kernels can skip an update on the device.
    return optimizers[OptimizerName.ADAMW] if [*optimizers] == [OptimizerName.ADAMW] else CompositeOptimizer(optimizers)


def _make_muon(
    matrices: Mapping[str, nn.Parameter], find_row_shards: Callable[[str], RowShards | None], **settings: Any
) -> torch.optim.Muon:
    shards = {view: row_shards for name, view in matrices.items() if (row_shards := find_row_shards(name)) is not None}
    if shards:
        return ShardedMuon(shards, adjust_lr_fn=ADJUST_LR, **settings)
    return torch.optim.Muon(matrices.values(), adjust_lr_fn=ADJUST_LR, **settings)
