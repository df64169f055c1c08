"""Shards of parameters in tensor and expert parallelism, by transformers' plans."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from skyrl_train.errors import ConfigError
from skyrl_train.models.parallel_group import ParallelGroup


@dataclass(frozen=True)
class ParameterShard:
    """The shard of a parameter that a rank holds: part `rank` of `size` of each of the `blocks` along `dim`."""

    dim: int
    blocks: int
    size: int
    rank: int

    def extract(self, full: Tensor) -> Tensor:
        """Return a copy of this rank's shard of the full parameter."""
        shares = full.unflatten(self.dim, (self.blocks, self.size, -1))
        return shares.select(self.dim + 1, self.rank).flatten(self.dim, self.dim + 1).clone()

    def to_full_rows(self, count: int, chosen: slice) -> slice:
        """Convert rows of this rank's shard to rows of the full parameter.

        Only for a parameter that is sharded by rows, in one block.

        Args:
            count: Number of rows of the full parameter.
            chosen: Rows of this rank's shard.
        """
        assert self.dim == 0 and self.blocks == 1, "the shard does not consist of consecutive rows"
        rows = range(count)[self.rank * count // self.size : (self.rank + 1) * count // self.size][chosen]
        return slice(rows.start, rows.stop)

    def merge(self, shards: list[Tensor]) -> Tensor:
        """Return the full parameter from the shards of all ranks, in the order of ranks."""
        blocks = [shard.unflatten(self.dim, (self.blocks, -1)) for shard in shards]
        return torch.stack(blocks, self.dim + 1).flatten(self.dim, self.dim + 2)


def shard_parameters(
    group: ParallelGroup, path: str, module: nn.Module, dims: Mapping[str, int], blocks: int = 1
) -> dict[str, ParameterShard]:
    """Replace parameters of a module by this rank's shards.

    Args:
        group: The ranks that hold different shards.
        path: Path of the module in the model.
        module: The module, which is changed.
        dims: Name of each parameter to shard -> the dimension along which it is sharded.
        blocks: Number of equal blocks along the dimension that are sharded separately, such as fused projections.

    Returns:
        Path of each sharded parameter -> its shard.

    Raises:
        ConfigError: The number of ranks does not divide a dimension.
    """
    shards = {}
    for name, dim in dims.items():
        parameter: nn.Parameter = getattr(module, name)
        if parameter.shape[dim] % (blocks * group.size):
            unit = "experts" if parameter.ndim > 2 and dim == 0 else "features"
            raise ConfigError(
                f"{group.size_key}={group.size} does not divide {path}.{name}, which has "
                f"{parameter.shape[dim] // blocks} {unit}. Use a divisor of that number."
            )
        shards[f"{path}.{name}"] = shard = ParameterShard(dim, blocks, group.size, group.rank)
        setattr(module, name, nn.Parameter(shard.extract(parameter.detach()), parameter.requires_grad))
    return shards


def is_layer_parameter(name: str) -> bool:
    """True if a parameter's name contains the number of a layer."""
    return to_plan_name(name) != name


def to_plan_name(name: str) -> str:
    """Return a name as plans contain it: with "*" for numbers of layers."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def match_plan_styles(path: str, module: nn.Module, styles: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (path, style) of a module and of its direct parameters, for those that the plan contains.

    Args:
        path: Path of the module in the model.
        module: The module.
        styles: Name in the plan -> style.
    """
    paths = [path, *(f"{path}.{name}" for name, _ in module.named_parameters(recurse=False))]
    for plan_path in paths:
        if style := styles.get(to_plan_name(plan_path)):
            yield plan_path, style
