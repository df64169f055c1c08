"""Expert parallelism: every rank has some experts of each layer, and tokens travel to the ranks that have theirs.

Lepikhin et al., "GShard", arXiv:2006.16668. The ranks have different micro-batches; all other parameters are sharded
over them as they are without. Legend: T tokens of this rank, k experts for each, D hidden size, s ranks, E experts of
each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from skyrl_train.errors import ConfigError
from skyrl_train.models.parallel_group import ParallelGroup
from skyrl_train.models.parameter_shards import ParameterShard, match_plan_styles, shard_parameters
from skyrl_train.models.ragged_attention import deterministic_index_select

_EXPERTS, _BY_EXPERT = "ep_dispatch_experts", "grouped_gemm"


class ExpertParallel(ParallelGroup):
    """The ranks that share out the experts of every layer."""

    def shard_model(self, model: PreTrainedModel) -> dict[str, ParameterShard]:
        """Reduce the experts of `model` to this rank's; returns the part of every parameter of theirs, by name.

        Raises ConfigError for a model without experts or without a plan for them, for a number of experts that the
        number of ranks does not divide, and where transformers is too old.
        """
        if not hasattr(model, "ep_plan"):
            raise ConfigError(
                f"transformers {transformers.__version__} has no plans to share out experts, as 5.19 has: set "
                f"{self.size_key} to 1. SGLang requires 5.12, which its extra installs."
            )
        styles = {name: style for name, style in (model.ep_plan or {}).items() if ".*." in name}
        if _EXPERTS not in styles.values():
            raise ConfigError(
                f"transformers has no plan to share out experts of {type(model).__name__}: set {self.size_key} to 1."
            )
        parts: dict[str, ParameterShard] = {}
        for path, module in model.named_modules():
            for place, style in match_plan_styles(path, module, styles):
                if style == _EXPERTS:
                    self._patch_experts(module)
                elif style == _BY_EXPERT:
                    parts |= shard_parameters(self, path, module, {place.rpartition(".")[2]: 0})
                else:
                    raise ConfigError(
                        f"transformers' plan for experts has {style!r} for {place}, which is not known here (known: "
                        f"{_EXPERTS}, {_BY_EXPERT}): set {self.size_key} to 1."
                    )
        return parts

    def _patch_experts(self, experts: Any) -> None:
        compute: Callable[..., Tensor] = experts.forward
        experts.num_experts //= self.size

        def forward(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            return self._dispatch(compute, experts.num_experts, hidden, chosen, weights)

        experts.forward = forward

    def _dispatch(
        self, compute: Callable[..., Tensor], count: int, hidden: Tensor, routed_experts: Tensor, weights: Tensor
    ) -> Tensor:
        """The weighted sum of the chosen experts' outputs [T, D], of hidden [T, D]; chosen and weights are [T, k].

        `compute` runs this rank's `count` experts: (tokens, experts, weights) -> outputs.
        """
        wanted = routed_experts.flatten()
        order = wanted.argsort(stable=True)  # by owner, and by expert
        sent = wanted.new_zeros(count * self.size).scatter_add_(0, wanted, torch.ones_like(wanted)).view(-1, count)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        there, here = torch.stack([sent.sum(1), received.sum(1)]).tolist()  # the layer's only wait for the device
        tokens = self.all_to_all(deterministic_index_select(hidden, order // routed_experts.shape[1]), there, here)
        of_ranks = torch.arange(count, device=hidden.device).repeat(self.size)
        experts = of_ranks.repeat_interleave(received.flatten(), output_size=sum(here))
        # One token more, which counts for nothing: without any the experts would have no gradient to reduce.
        tokens = torch.cat([tokens, tokens.new_zeros(1, tokens.shape[1])])
        experts = torch.cat([experts, experts.new_zeros(1)])
        outputs = compute(tokens, experts.unsqueeze(1), tokens.new_ones(len(tokens), 1))[:-1]
        outputs = self.all_to_all(outputs, here, there)
        outputs = torch.empty_like(outputs).index_copy(0, order, outputs).unflatten(0, routed_experts.shape)
        return (outputs * weights.unsqueeze(2)).sum(1).to(hidden.dtype)
