"""Tensor parallelism: every rank has a part of each layer's heads and features, by transformers' plan for the model.

Shoeybi et al., "Megatron-LM", arXiv:1909.08053, with one difference. All ranks compute the same hidden states, but each
scores only some of the tokens. So a rank's gradient of a hidden state is one summand of the whole gradient, as with
ranks that have different data. The summands are added up only behind a layer's row-wise product, where a rank's
features need the whole gradient. So gradients of replicated parameters (norms, embeddings, head, routers) are summands,
too.
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
"""Least share of the layers' weights that a plan must divide: some plans omit experts."""
_STYLES = ("colwise", "rowwise", "packed_colwise", _EXPERTS, _HELD_ALIKE)


@dataclass(frozen=True)
class Part:
    """The part of a parameter that a rank has: share `rank` of `size` of each of the `blocks` along `dim`."""

    dim: int
    blocks: int
    size: int
    rank: int

    def of(self, whole: Tensor) -> Tensor:
        """A copy of this rank's part of `whole`."""
        shares = whole.unflatten(self.dim, (self.blocks, self.size, -1))
        return shares.select(self.dim + 1, self.rank).flatten(self.dim, self.dim + 1).clone()

    def whole(self, parts: list[Tensor]) -> Tensor:
        """The whole parameter, from the parts of all ranks."""
        blocks = [part.unflatten(self.dim, (self.blocks, -1)) for part in parts]
        return torch.stack(blocks, self.dim + 1).flatten(self.dim, self.dim + 2)


class TensorParallel(RankGroup):
    """A parallel group in which each rank has a part of every layer, and runs all tokens through it."""

    def divide(self, model: PreTrainedModel) -> dict[str, Part]:
        """Reduce `model` to this rank's part; returns the part of every parameter that is divided, by name.

        Raises ConfigError for a model without a plan, with an unknown style in its plan, or with sizes that the number
        of ranks does not divide.
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
        """Apply `style` at `place`, the path of `module` or of one of its own parameters; returns the divided parts."""
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
    """A name as it is written in plans: with "*" for numbers of layers."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _styles_of(path: str, module: nn.Module, styles: dict[str, str]) -> Iterator[tuple[str, str]]:
    """(path, style) of a module and of its own parameters, if the plan has them."""
    own = [path, *(f"{path}.{name}" for name, _ in module.named_parameters(recurse=False))]
    for place in own:
        if style := styles.get(_generic(place)):
            yield place, style


class _Summed(torch.autograd.Function):
    """A sum over ranks whose gradients are also summed over ranks: each rank has one summand of both."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: RankGroup) -> Tensor:  # type: ignore[override]
        ctx.ranks = ranks
        return ranks.sum(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return ctx.ranks.sum(gradient), None
