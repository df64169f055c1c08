"""Tensor parallelism: every rank holds a part of each layer's heads and features, by transformers' plan for the model.

Shoeybi et al., "Megatron-LM", arXiv:1909.08053, with one difference. All ranks compute the same hidden states, but each
computes log-probs of only some of the tokens. So a rank's gradient of a hidden state is a partial sum of the full
gradient, as with ranks that have different data. The partial sums are added only after a layer's row-wise product,
where a rank's features need the full gradient. So gradients of replicated parameters (norms, embeddings, head, routers)
are partial sums, too.
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
"""Minimum fraction of the layers' weights that a plan must shard: some plans omit experts."""
_STYLES = ("colwise", "rowwise", "packed_colwise", _EXPERTS, _REPLICATED)


class TensorParallel(ParallelGroup):
    """A parallel group in which each rank holds a part of every layer, and runs all tokens through it."""

    def shard_model(self, model: PreTrainedModel) -> dict[str, ParameterShard]:
        """Reduce the layers of `model` to this rank's shards.

        Args:
            model: A model whose transformers class has a tensor-parallel plan; it is changed.

        Returns:
            Name of each sharded parameter -> its shard.

        Raises:
            ConfigError: The model has no plan, the plan has an unsupported style or shards too few weights, or the
                number of ranks does not divide a size.
        """
        styles = {name: style for name, style in (model.tp_plan or {}).items() if ".*." in name}  # only layers
        if not styles:
            name = type(model).__name__
            raise ConfigError(f"transformers has no tensor-parallel plan for {name}: set {self.size_key} to 1.")
        self._check_heads(model.config)
        matrices = ((name, p) for name, p in model.named_parameters() if p.ndim > 1 and LORA_INFIX not in name)
        sizes = {name: parameter.numel() for name, parameter in matrices if is_layer_parameter(name)}
        shards: dict[str, ParameterShard] = {}
        for path, module in model.named_modules():
            for plan_path, style in match_plan_styles(path, module, styles):
                shards |= self._apply(style, plan_path, path, module)
        sharded_fraction = sum(size for name, size in sizes.items() if name in shards) / sum(sizes.values())
        if sharded_fraction < _MIN_SHARDED_FRACTION:
            raise ConfigError(
                f"transformers' tensor-parallel plan for {type(model).__name__} shards only {sharded_fraction:.0%} of "
                f"its layers' weights; every rank would hold the others in full. Set {self.size_key} to 1."
            )
        return shards

    def _apply(self, style: str, plan_path: str, path: str, module: nn.Module) -> dict[str, ParameterShard]:
        """Apply `style` to a module or to one of its direct parameters, and return the resulting shards.

        `path` is that of the module, and `plan_path` that of the module or the parameter.
        """
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
        if style in ("rowwise", "packed_colwise") and plan_path != path:
            # Parameters of experts: [E, 2 x features, D] and [E, D, features].
            dim, blocks = (2, 1) if style == "rowwise" else (1, 2)
            return shard_parameters(self, path, module, {plan_path.rpartition(".")[2]: dim}, blocks)
        raise ConfigError(
            f"transformers' tensor-parallel plan has {style!r} for {plan_path}, which is not supported (supported: "
            f"{', '.join(_STYLES)}): set {self.size_key} to 1."
        )

    def _shard_linear(self, path: str, module: nn.Module, dim: int) -> dict[str, ParameterShard]:
        """Shard the rows (`dim` 0) or columns (1) of a linear layer.

        If the layer is adapted (W + s B A), the rows of B or the columns of A are sharded with it. The other one is
        replicated, and its gradient is a partial sum.
        """
        shards: dict[str, ParameterShard] = {}
        suffix = LORA_A_SUFFIX if dim else LORA_B_SUFFIX
        for name, parameter in [*module.named_parameters()]:
            if name.endswith(suffix[1:]) or (LORA_INFIX not in f".{name}" and (parameter.ndim > 1 or not dim)):
                owner, _, parameter_name = name.rpartition(".")
                shards |= shard_parameters(
                    self, f"{path}.{owner}" if owner else path, module.get_submodule(owner), {parameter_name: dim}
                )
        return shards

    def _check_heads(self, config: Any) -> None:
        for name in ("num_attention_heads", "num_key_value_heads"):
            for count in get_layer_sizes(config, name):
                if count % self.size:
                    raise ConfigError(
                        f"{self.size_key}={self.size} does not divide the model's {name}, {count}. Every rank computes "
                        f"the same number of heads: use a divisor of {count}."
                    )

    @staticmethod
    def _with_bias(base: nn.Linear, product: Tensor) -> Tensor:
        return product if base.bias is None else product + base.bias

    def _all_reduce_both_ways(self, values: Tensor) -> Tensor:
        total: Tensor = _AllReduceBothWays.apply(values, self)  # type: ignore[no-untyped-call]
        return total


class _AllReduceBothWays(torch.autograd.Function):
    """A sum over ranks whose gradients are also summed over ranks: each rank has a partial sum of both."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: ParallelGroup) -> Tensor:  # type: ignore[override]
        ctx.ranks = ranks
        return ranks.all_reduce(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return ctx.ranks.all_reduce(gradient), None
