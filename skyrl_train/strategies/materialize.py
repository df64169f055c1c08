"""Materialize a meta-device model: allocate each rank's shards and read them from the pretrained weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from skyrl_train.strategies.checkpoint_shards import to_local


@torch.no_grad()
def materialize_sharded(root: Any, device: torch.device | str) -> None:
    """Allocate the parameters of a model that `fully_shard` sharded, and read this rank's rows into them.

    Only parameters on the meta device change.

    Args:
        root: A RaggedModel after `fully_shard`; its `read_pretrained` returns the values.
        device: Device of the parameters.
    """
    meta_parameters = list(_meta_parameters(root, root))
    for _, parameter in meta_parameters:
        _replace_value(parameter, torch.empty_like(parameter, device=device))
    root._apply(lambda tensor: tensor)  # fully_shard then registers the memory, and pads it
    for name, parameter in meta_parameters:
        local = to_local(parameter)
        if local.numel():
            local.copy_(root.read_pretrained(name, _rows(parameter)))


def materialize_full(root: Any, module: nn.Module | None = None) -> None:
    """Read the full meta-device parameters of a module to the CPU.

    Parameters that the files hold in the same dtype share the pages of the file until they are changed.

    Args:
        root: A RaggedModel; its `read_pretrained` returns the values.
        module: A submodule of `root`; None for all of it.
    """
    for name, parameter in list(_meta_parameters(root, root if module is None else module)):
        _replace_value(parameter, root.read_pretrained(name).to(parameter.dtype))


def _meta_parameters(root: nn.Module, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name in `root`, parameter) of the parameters of `module` that are on the meta device."""
    module_parameters = {id(parameter) for parameter in module.parameters()}
    return (
        (name, parameter)
        for name, parameter in root.named_parameters()
        if parameter.is_meta and id(parameter) in module_parameters
    )


def _replace_value(parameter: nn.Parameter, value: Tensor) -> None:
    """Replace the value of a parameter, also on another device. It stays the same object, so others stay tied to it."""
    torch.utils.swap_tensors(parameter, nn.Parameter(value, parameter.requires_grad))


def _rows(parameter: nn.Parameter) -> slice:
    if not isinstance(parameter, DTensor):
        return slice(None)
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return slice(offset[0], offset[0] + shape[0])
