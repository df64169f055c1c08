"""Weights for a scorer whose parameters are on the meta device, once it is known what this rank keeps of them."""

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
    """Give a scorer that `fully_shard` divided memory on `device`, and read this rank's rows into it.

    Only for parameters on the meta device; others stay as they are. `root.read_pretrained` is that of RaggedModel.
    """
    waiting = list(_meta_parameters(root, root))
    for _, parameter in waiting:
        _replace_value(parameter, torch.empty_like(parameter, device=device))
    root._apply(lambda tensor: tensor)  # fully_shard then takes note of the memory, and pads it
    for name, parameter in waiting:
        held = to_local(parameter)
        if held.numel():
            held.copy_(root.read_pretrained(name, _rows(parameter)))


def materialize_full(root: Any, module: nn.Module | None = None) -> None:
    """Read the parameters of `module`, by default all of them, whole to the CPU.

    Those that are saved in their own dtype stay where the file is mapped until they are changed.
    """
    for name, parameter in list(_meta_parameters(root, root if module is None else module)):
        _replace_value(parameter, root.read_pretrained(name).to(parameter.dtype))


def _meta_parameters(root: nn.Module, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(name in the scorer, parameter) of the parameters of `module` that are on the meta device."""
    inside = {id(parameter) for parameter in module.parameters()}
    return ((name, one) for name, one in root.named_parameters() if one.is_meta and id(one) in inside)


def _replace_value(parameter: nn.Parameter, value: Tensor) -> None:
    """Give a parameter another value on another device; it stays the same object, so others stay tied to it."""
    torch.utils.swap_tensors(parameter, nn.Parameter(value, parameter.requires_grad))


def _rows(parameter: nn.Parameter) -> slice:
    if not isinstance(parameter, DTensor):
        return slice(None)
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return slice(offset[0], offset[0] + shape[0])
