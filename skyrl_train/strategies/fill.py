"""Weights for a scorer whose parameters are on the meta device, once it is known what this rank keeps of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from skyrl_train.strategies.shards import local


@torch.no_grad()
def fill(scorer: Any, device: torch.device | str) -> None:
    """Give a scorer that `fully_shard` divided memory on `device`, and read this rank's rows into it.

    Only for parameters on the meta device; others stay as they are. `scorer.read` is that of RaggedModel.
    """
    waiting = list(_on_meta(scorer, scorer))
    for _, parameter in waiting:
        _become(parameter, torch.empty_like(parameter, device=device))
    scorer._apply(lambda tensor: tensor)  # fully_shard then takes note of the memory, and pads it
    for name, parameter in waiting:
        held = local(parameter)
        if held.numel():
            held.copy_(scorer.read(name, _rows(parameter)))


def fill_whole(scorer: Any, module: nn.Module | None = None) -> None:
    """Read the parameters of `module`, by default all of them, whole to the CPU.

    Those that are saved in their own dtype stay where the file is mapped until they are changed.
    """
    for name, parameter in list(_on_meta(scorer, scorer if module is None else module)):
        _become(parameter, scorer.read(name).to(parameter.dtype))


def _on_meta(scorer: nn.Module, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(name in the scorer, parameter) of the parameters of `module` that are on the meta device."""
    inside = {id(parameter) for parameter in module.parameters()}
    return ((name, one) for name, one in scorer.named_parameters() if one.is_meta and id(one) in inside)


def _become(parameter: nn.Parameter, value: Tensor) -> None:
    """Give a parameter another value on another device; it stays the same object, so others stay tied to it."""
    torch.utils.swap_tensors(parameter, nn.Parameter(value, parameter.requires_grad))


def _rows(parameter: nn.Parameter) -> slice:
    if not isinstance(parameter, DTensor):
        return slice(None)
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return slice(offset[0], offset[0] + shape[0])
