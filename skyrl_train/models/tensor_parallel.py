"""Tensor parallelism: every rank has a part of each layer's heads and features, by transformers' plan for the model.

Shoeybi et al., "Megatron-LM", arXiv:1909.08053, with one difference. All ranks compute the same hidden states, and each
scores some of the tokens: what a rank has of a hidden state's gradient is a summand, as with ranks that have different
data. They are added up behind a layer's row-wise product alone, where a rank's features need the whole gradient. So
gradients of everything that ranks hold alike (norms, embeddings, head, routers) are summands too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from transformers import PreTrainedModel

from skyrl_train.errors import ConfigError
from skyrl_train.models.rank_group import RankGroup

_HELD_ALIKE = "replicated_with_grad_allreduce"
_EXPERTS = "moe_tp_experts"
_LEAST_DIVIDED = 0.75
"""Of the weights in layers: some plans leave experts out."""
_STYLES = ("colwise", "rowwise", "packed_colwise", _EXPERTS, _HELD_ALIKE)


@dataclass(frozen=True)
class Part:
    """Which part of a parameter a rank has: of each of `blocks` that lie along `dim`, an equal share."""

    dim: int
    blocks: int
    size: int
    rank: int

    def of(self, whole: Tensor) -> Tensor:
        """This rank's part of it, a copy."""
        shares = whole.unflatten(self.dim, (self.blocks, self.size, -1))
        return shares.select(self.dim + 1, self.rank).flatten(self.dim, self.dim + 1).clone()

    def whole(self, parts: list[Tensor]) -> Tensor:
        """What all ranks' parts were cut from."""
        blocks = [part.unflatten(self.dim, (self.blocks, -1)) for part in parts]
        return torch.stack(blocks, self.dim + 1).flatten(self.dim, self.dim + 2)


class TensorParallel(RankGroup):
    """Each rank has a part of every layer, and runs all tokens through it."""

    def divide(self, model: PreTrainedModel) -> dict[str, Part]:
        """Leave this rank's part of `model`; returns which one, by parameter, of those that are not held whole.

        Raises ConfigError for a model without a plan, with one of a kind that is not known here, or of numbers that the
        ranks do not divide.
        """
        styles = {name: style for name, style in (model.tp_plan or {}).items() if ".*." in name}  # those of layers
        if not styles:
            name = type(model).__name__
            raise ConfigError(f"transformers has no tensor-parallel plan for {name}: set {self.key} to 1.")
        self._check_heads(model.config)
        sizes = {name: p.numel() for name, p in model.named_parameters() if p.ndim > 1 and _of_layer(name)}
        parts: dict[str, Part] = {}
        for path, module in model.named_modules():
            for place, style in _styles_of(path, module, styles):
                parts |= self._apply(style, place, path, module)
        divided = sum(size for name, size in sizes.items() if name in parts) / sum(sizes.values())
        if divided < _LEAST_DIVIDED:
            raise ConfigError(
                f"transformers' tensor-parallel plan for {type(model).__name__} divides {divided:.0%} of its layers' "
                f"weights; every rank would hold the others whole: set {self.key} to 1."
            )
        return parts

    def _apply(self, style: str, place: str, path: str, module: nn.Module) -> dict[str, Part]:
        """What `style` asks for at `place`, which is the path of `module` or of a parameter of its own."""
        is_linear = isinstance(module, nn.Linear)
        if style == _HELD_ALIKE:
            return {}
        if style == _EXPERTS and not is_linear:
            module.register_forward_hook(lambda _module, _args, output: self._summed(output))
            return {}
        if style == "rowwise" and is_linear:
            module.forward = partial(self._rowwise, module)  # type: ignore[method-assign]
            return self._cut(path, module, {"weight": 1})
        if style == "colwise" and is_linear:
            return self._cut(path, module, {name: 0 for name, _ in module.named_parameters()})
        if (
            style in ("rowwise", "packed_colwise") and place != path
        ):  # of experts: [E, 2 x features, D] and [E, D, features]
            dim, blocks = (2, 1) if style == "rowwise" else (1, 2)
            return self._cut(path, module, {place.rpartition(".")[2]: dim}, blocks)
        raise ConfigError(
            f"transformers' tensor-parallel plan has {style!r} for {place}, which is not known here (known: "
            f"{', '.join(_STYLES)}): set {self.key} to 1."
        )

    def _cut(self, path: str, module: nn.Module, dims: dict[str, int], blocks: int = 1) -> dict[str, Part]:
        parts = {}
        for name, dim in dims.items():
            parameter: nn.Parameter = getattr(module, name)
            if parameter.shape[dim] % (blocks * self.size):
                raise ConfigError(
                    f"{self.key}={self.size} does not divide {path}.{name}, which has {parameter.shape[dim] // blocks} "
                    "features; use a divisor."
                )
            parts[f"{path}.{name}"] = part = Part(dim, blocks, self.size, self.rank)
            setattr(module, name, nn.Parameter(part.of(parameter.detach()), parameter.requires_grad))
        return parts

    def _check_heads(self, config: Any) -> None:
        for name in ("num_attention_heads", "num_key_value_heads"):
            count = getattr(config, name, None) or self.size
            if count % self.size:
                raise ConfigError(
                    f"{self.key}={self.size} does not divide the model's {name}, {count}: each rank attends with as "
                    "many of them; use a divisor."
                )

    def _rowwise(self, module: Any, features: Tensor) -> Tensor:
        summed = self._summed(linear(features, module.weight))
        return summed if module.bias is None else summed + module.bias

    def _summed(self, values: Tensor) -> Tensor:
        total: Tensor = _Summed.apply(values, self)  # type: ignore[no-untyped-call]
        return total


def _of_layer(name: str) -> bool:
    return _generic(name) != name


def _generic(name: str) -> str:
    """As plans call it: the numbers of layers are "*"."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _styles_of(path: str, module: nn.Module, styles: dict[str, str]) -> Iterator[tuple[str, str]]:
    """(path, style) of a module and of its own parameters, where the plan names them."""
    own = [path, *(f"{path}.{name}" for name, _ in module.named_parameters(recurse=False))]
    for place in own:
        if style := styles.get(_generic(place)):
            yield place, style


class _Summed(torch.autograd.Function):
    """A sum over ranks, and of its gradients: each rank has a summand of both."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: RankGroup) -> Tensor:  # type: ignore[override]
        ctx.ranks = ranks
        return ranks.sum(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return ctx.ranks.sum(gradient), None
