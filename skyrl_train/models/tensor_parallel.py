"""Tensor parallelism: every rank has a part of each layer's heads and features, by transformers' plan for the model.

Shoeybi et al., "Megatron-LM", arXiv:1909.08053, with one difference. All ranks compute the same hidden states, but each
scores only some of the tokens. So a rank's gradient of a hidden state is one summand of the whole gradient, as with
ranks that have different data. The summands are added up only behind a layer's row-wise product, where a rank's
features need the whole gradient. So gradients of replicated parameters (norms, embeddings, head, routers) are summands,
too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from transformers import PreTrainedModel

from skyrl_train.errors import ConfigError
from skyrl_train.models.layer_sizes import get_layer_sizes
from skyrl_train.models.lora import LORA_A_SUFFIX, LORA_B_SUFFIX, LORA_INFIX
from skyrl_train.models.parallel_group import ParallelGroup
from skyrl_train.models.parameter_shards import ParameterShard, is_layer_parameter, match_plan_styles, shard_parameters

_REPLICATED = "replicated_with_grad_allreduce"
_EXPERTS = "moe_tp_experts"
_MIN_SHARDED_FRACTION = 0.75
"""Least share of the layers' weights that a plan must divide: some plans omit experts."""
_STYLES = ("colwise", "rowwise", "packed_colwise", _EXPERTS, _REPLICATED)


class TensorParallel(ParallelGroup):
    """A parallel group in which each rank has a part of every layer, and runs all tokens through it."""

    def shard_model(self, model: PreTrainedModel) -> dict[str, ParameterShard]:
        """Reduce `model` to this rank's part; returns the part of every parameter that is divided, by name.

        Raises ConfigError for a model without a plan, with an unknown style in its plan, or with sizes that the number
        of ranks does not divide.
        """
        styles = {name: style for name, style in (model.tp_plan or {}).items() if ".*." in name}  # those of layers
        if not styles:
            name = type(model).__name__
            raise ConfigError(f"transformers has no tensor-parallel plan for {name}: set {self.size_key} to 1.")
        self._check_heads(model.config)
        matrices = ((name, p) for name, p in model.named_parameters() if p.ndim > 1 and LORA_INFIX not in name)
        sizes = {name: parameter.numel() for name, parameter in matrices if is_layer_parameter(name)}
        parts: dict[str, ParameterShard] = {}
        for path, module in model.named_modules():
            for place, style in match_plan_styles(path, module, styles):
                parts |= self._apply(style, place, path, module)
        divided = sum(size for name, size in sizes.items() if name in parts) / sum(sizes.values())
        if divided < _MIN_SHARDED_FRACTION:
            raise ConfigError(
                f"transformers' tensor-parallel plan for {type(model).__name__} divides {divided:.0%} of its layers' "
                f"weights; every rank would hold the others whole: set {self.size_key} to 1."
            )
        return parts

    def _apply(self, style: str, place: str, path: str, module: nn.Module) -> dict[str, ParameterShard]:
        """Apply `style` at `place`, the path of `module` or of one of its own parameters; returns the divided parts."""
        base: Any = getattr(module, "base_layer", module)  # in an adapted layer
        is_linear = isinstance(base, nn.Linear)
        if style == _REPLICATED:
            return {}
        if style == _EXPERTS and not is_linear:
            module.register_forward_hook(lambda _module, _args, output: self._all_reduce_both_ways(output))
            return {}
        if style == "rowwise" and is_linear:
            base.forward = lambda features: linear(features, base.weight)
            module.register_forward_hook(
                lambda _module, _args, output: self._with_bias(base, self._all_reduce_both_ways(output))
            )
            return self._shard_linear(path, module, 1)
        if style == "colwise" and is_linear:
            return self._shard_linear(path, module, 0)
        if (
            style in ("rowwise", "packed_colwise") and place != path
        ):  # of experts: [E, 2 x features, D] and [E, D, features]
            dim, blocks = (2, 1) if style == "rowwise" else (1, 2)
            return shard_parameters(self, path, module, {place.rpartition(".")[2]: dim}, blocks)
        raise ConfigError(
            f"transformers' tensor-parallel plan has {style!r} for {place}, which is not known here (known: "
            f"{', '.join(_STYLES)}): set {self.size_key} to 1."
        )

    def _shard_linear(self, path: str, module: nn.Module, dim: int) -> dict[str, ParameterShard]:
        """Divide the rows (`dim` 0) or columns (1) of a linear layer, and of W + s B A those of B or of A with it.

        The other one of both is whole on every rank, and its gradient a summand.
        """
        parts: dict[str, ParameterShard] = {}
        adapted = LORA_A_SUFFIX if dim else LORA_B_SUFFIX
        for name, parameter in [*module.named_parameters()]:
            if name.endswith(adapted[1:]) or (LORA_INFIX not in f".{name}" and (parameter.ndim > 1 or not dim)):
                owner, _, own = name.rpartition(".")
                parts |= shard_parameters(
                    self, f"{path}.{owner}" if owner else path, module.get_submodule(owner), {own: dim}
                )
        return parts

    def _check_heads(self, config: Any) -> None:
        for name in ("num_attention_heads", "num_key_value_heads"):
            for count in get_layer_sizes(config, name):
                if count % self.size:
                    raise ConfigError(
                        f"{self.size_key}={self.size} does not divide the model's {name}, {count}: each rank attends with "
                        "as many of them; use a divisor."
                    )

    @staticmethod
    def _with_bias(base: nn.Linear, product: Tensor) -> Tensor:
        return product if base.bias is None else product + base.bias

    def _all_reduce_both_ways(self, values: Tensor) -> Tensor:
        total: Tensor = _AllReduceBothWays.apply(values, self)  # type: ignore[no-untyped-call]
        return total


class _AllReduceBothWays(torch.autograd.Function):
    """A sum over ranks whose gradients are also summed over ranks: each rank has one summand of both."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: ParallelGroup) -> Tensor:  # type: ignore[override]
        ctx.ranks = ranks
        return ranks.all_reduce(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return ctx.ranks.sum(gradient), None
