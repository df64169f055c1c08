"""How transformers' plans name a model's modules and parameters, and what of a parameter a rank has by them."""

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
    """The part of a parameter that a rank has: share `rank` of `size` of each of the `blocks` along `dim`."""

    dim: int
    blocks: int
    size: int
    rank: int

    def extract(self, full: Tensor) -> Tensor:
        """A copy of this rank's part of `whole`."""
        shares = full.unflatten(self.dim, (self.blocks, self.size, -1))
        return shares.select(self.dim + 1, self.rank).flatten(self.dim, self.dim + 1).clone()

    def to_full_rows(self, count: int, chosen: slice) -> slice:
        """Rows `chosen` of this rank's part, as rows of the whole, which has `count` of them and is divided by rows."""
        assert self.dim == 0 and self.blocks == 1, "a part that is not rows"
        mine = range(count)[self.rank * count // self.size : (self.rank + 1) * count // self.size][chosen]
        return slice(mine.start, mine.stop)

    def merge(self, shards: list[Tensor]) -> Tensor:
        """The whole parameter, from the parts of all ranks."""
        blocks = [part.unflatten(self.dim, (self.blocks, -1)) for part in shards]
        return torch.stack(blocks, self.dim + 1).flatten(self.dim, self.dim + 2)


def shard_parameters(
    group: ParallelGroup, path: str, module: nn.Module, dims: Mapping[str, int], blocks: int = 1
) -> dict[str, ParameterShard]:
    """Replace parameters of `module`, which is at `path`, by this rank's parts along `dims`; returns these by name.

    Raises ConfigError for a size that the number of ranks does not divide.
    """
    parts = {}
    for name, dim in dims.items():
        parameter: nn.Parameter = getattr(module, name)
        if parameter.shape[dim] % (blocks * group.size):
            what = "experts" if parameter.ndim > 2 and dim == 0 else "features"
            raise ConfigError(
                f"{group.size_key}={group.size} does not divide {path}.{name}, which has {parameter.shape[dim] // blocks} "
                f"{what}; use a divisor."
            )
        parts[f"{path}.{name}"] = part = ParameterShard(dim, blocks, group.size, group.rank)
        setattr(module, name, nn.Parameter(part.extract(parameter.detach()), parameter.requires_grad))
    return parts


def is_layer_parameter(name: str) -> bool:
    """Whether a name has the number of a layer in it."""
    return to_plan_name(name) != name


def to_plan_name(name: str) -> str:
    """A name as it is written in plans: with "*" for numbers of layers."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def match_plan_styles(path: str, module: nn.Module, styles: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(path, style) of a module and of its own parameters, if the plan has them."""
    own = [path, *(f"{path}.{name}" for name, _ in module.named_parameters(recurse=False))]
    for place in own:
        if style := styles.get(to_plan_name(place)):
            yield place, style
