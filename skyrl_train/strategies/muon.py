"""Muon for matrices whose rows are sharded over ranks, with the same bits as torch's Muon for full matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import _muon

ADJUST_LR = "match_rms_adamw"
"""Moonshot's scale of an update: its RMS is that of AdamW, so that both use the same learning rate."""


@dataclass(frozen=True)
class RowShards:
    """The shards of one matrix: consecutive rows on each rank of a process group."""

    group: dist.ProcessGroup
    shape: tuple[int, int]
    """Shape of the full matrix."""
    rows: tuple[int, ...]
    """Number of rows on each rank of the group."""
    to_full: Callable[[Tensor], Tensor]
    """Returns the full matrix for all rows of a tensor-parallel shard. It may be a collective."""
    to_shard: Callable[[Tensor], Tensor]
    """Returns all rows of this rank's tensor-parallel shard of the full matrix."""


class ShardedMuon(torch.optim.Muon):
    """Muon whose parameters and momentum are shards, and which orthogonalizes full matrices.

    Each rank orthogonalizes every n-th matrix, n being the number of ranks. Two exchanges of bfloat16 numbers, in which
    torch's Muon computes too, bring the rows to that rank and back.
    """

    def __init__(self, shards: Mapping[nn.Parameter, RowShards], **settings: Any):
        """Store the shards.

        Args:
            shards: Local rows of each matrix -> their place in the full matrix. All ranks have the same order.
            settings: Settings of torch.optim.Muon.
        """
        super().__init__(shards, **settings)
        self._shards = shards

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient. This is a collective.

        Args:
            closure: Must be None.
        """
        assert closure is None, "gradients must have been computed"
        for group in self.param_groups:
            for parameters in self._windows(parameter for parameter in group["params"] if parameter.grad is not None):
                self._update(parameters, group)

    def _windows(self, parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """Yield matrices that are orthogonalized at the same time: one per rank of a group, of similar sizes."""
        by_group: dict[dist.ProcessGroup, list[nn.Parameter]] = {}
        for parameter in parameters:
            by_group.setdefault(self._shards[parameter].group, []).append(parameter)
        for group, members in by_group.items():
            members.sort(key=lambda parameter: self._shards[parameter].shape)
            size = dist.get_world_size(group)
            yield from (members[start : start + size] for start in range(0, len(members), size))

    def _update(self, parameters: list[nn.Parameter], settings: dict[str, Any]) -> None:
        updates = [self._momentum_update(parameter, settings) for parameter in parameters]
        lr, decay = settings["lr"], settings["weight_decay"]
        shards = [self._shards[parameter] for parameter in parameters]
        for parameter, shard, update in zip(parameters, shards, _orthogonalize(updates, shards, settings), strict=True):
            adjusted_lr = _muon._adjust_lr(lr, settings["adjust_lr_fn"], torch.Size(shard.shape))
            parameter.mul_(1 - lr * decay)
            parameter.add_(update, alpha=-adjusted_lr)

    def _momentum_update(self, parameter: nn.Parameter, settings: dict[str, Any]) -> Tensor:
        """Add the gradient to the momentum, and return the local rows of the matrix to orthogonalize."""
        gradient, state, momentum = parameter.grad, self.state[parameter], settings["momentum"]
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        average = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        return (gradient.lerp(average, momentum) if settings["nesterov"] else average).bfloat16()


def _orthogonalize(updates: list[Tensor], shards: list[RowShards], settings: dict[str, Any]) -> list[Tensor]:
    """Return the local rows of orthogonalized matrices.

    Rank r of the group gets all rows of matrix r, if there is one.
    """
    group = shards[0].group
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    counts = [update.numel() for update in updates] + [0] * (size - len(updates))
    own = [0] * size
    if rank < len(updates):
        own = [rows * updates[rank].shape[1] for rows in shards[rank].rows]
    matrix = updates[0].new_empty(sum(own))
    dist.all_to_all_single(matrix, torch.cat([update.flatten() for update in updates]), own, counts, group)
    if rank < len(updates):
        full = shards[rank].to_full(matrix.view(-1, updates[rank].shape[1]))
        full = _muon._zeropower_via_newtonschulz(
            full, settings["ns_coefficients"], settings["ns_steps"], settings["eps"]
        )
        matrix = shards[rank].to_shard(full).flatten()
    local = matrix.new_empty(sum(counts))
    dist.all_to_all_single(local, matrix, counts, own, group)
    parts = local.split(counts[: len(updates)])
    return [part.view_as(update) for part, update in zip(parts, updates, strict=True)]
