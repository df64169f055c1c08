"""Expert parallelism: every rank holds some experts of each layer, and tokens travel to the ranks that hold theirs.

Lepikhin et al., "GShard", arXiv:2006.16668. The ranks run different micro-batches. All other parameters are sharded
over the ranks as they are without expert parallelism. Legend: T tokens of this rank, k experts for each token, D hidden
size, s ranks, E experts of each rank.
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
from skyrl_train.models.expert_adapters import adapter_names
from skyrl_train.models.parallel_group import ParallelGroup
from skyrl_train.models.parameter_shards import ParameterShard, match_plan_styles, shard_parameters
from skyrl_train.models.ragged_attention import deterministic_index_select

_EXPERTS, _BY_EXPERT = "ep_dispatch_experts", "grouped_gemm"


class ExpertParallel(ParallelGroup):
    """A parallel group whose ranks hold different experts of every layer."""

    def shard_model(self, model: PreTrainedModel) -> dict[str, ParameterShard]:
        """Reduce the experts of `model` to those of this rank.

        Args:
            model: A model whose transformers class has a plan for its experts; it is changed.

        Returns:
            Name of each parameter of the experts -> the shard that this rank holds.

        Raises:
            ConfigError: The model has no experts or no plan for them, the plan has an unsupported style, the number of
                ranks does not divide the number of experts, or transformers is too old.
        """
        if not hasattr(model, "ep_plan"):
            raise ConfigError(
                f"transformers {transformers.__version__} has no expert-parallel plans, which version 5.19 has. Set "
                f"{self.size_key} to 1. (SGLang requires version 5.12, which its extra installs.)"
            )
        styles = {name: style for name, style in (model.ep_plan or {}).items() if ".*." in name}
        if _EXPERTS not in styles.values():
            raise ConfigError(
                f"transformers has no expert-parallel plan for {type(model).__name__}: set {self.size_key} to 1."
            )
        shards: dict[str, ParameterShard] = {}
        for path, module in model.named_modules():
            for plan_path, style in match_plan_styles(path, module, styles):
                if style == _EXPERTS:
                    self._patch_experts(module)
                elif style == _BY_EXPERT:
                    name = plan_path.rpartition(".")[2]
                    names = (name, *(matrix for matrix in adapter_names(name) if hasattr(module, matrix)))
                    shards |= shard_parameters(self, path, module, dict.fromkeys(names, 0))
                else:
                    raise ConfigError(
                        f"transformers' expert-parallel plan has {style!r} for {plan_path}, which is not supported "
                        f"(supported: {_EXPERTS}, {_BY_EXPERT}): set {self.size_key} to 1."
                    )
        return shards

    def _patch_experts(self, experts: Any) -> None:
        compute: Callable[..., Tensor] = experts.forward
        experts.num_experts //= self.size

        def forward(hidden: Tensor, routed_experts: Tensor, weights: Tensor) -> Tensor:
            return self._dispatch(compute, experts.num_experts, hidden, routed_experts, weights)

        experts.forward = forward

    def _dispatch(
        self, compute: Callable[..., Tensor], count: int, hidden: Tensor, routed_experts: Tensor, weights: Tensor
    ) -> Tensor:
        """Return the weighted sum of the routed experts' outputs [T, D], for hidden states [T, D].

        `routed_experts` and `weights` are [T, k]. `compute` runs this rank's `count` experts: (tokens, experts,
        weights) -> outputs.
        """
        expert_ids = routed_experts.flatten()
        order = expert_ids.argsort(stable=True)  # by rank, and within a rank by expert
        sent = (
            expert_ids.new_zeros(count * self.size)
            .scatter_add_(0, expert_ids, torch.ones_like(expert_ids))
            .view(-1, count)
        )
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        num_sent, num_received = torch.stack([sent.sum(1), received.sum(1)]).tolist()  # the layer's only device sync
        tokens = self.all_to_all(
            deterministic_index_select(hidden, order // routed_experts.shape[1]), num_sent, num_received
        )
        expert_of_block = torch.arange(count, device=hidden.device).repeat(self.size)
        experts = expert_of_block.repeat_interleave(received.flatten(), output_size=sum(num_received))
        # A dummy token, whose output is dropped: without any token the experts would have no gradient to reduce.
        tokens = torch.cat([tokens, tokens.new_zeros(1, tokens.shape[1])])
        experts = torch.cat([experts, experts.new_zeros(1)])
        outputs = compute(tokens, experts.unsqueeze(1), tokens.new_ones(len(tokens), 1))[:-1]
        outputs = self.all_to_all(outputs, num_received, num_sent)
        outputs = torch.empty_like(outputs).index_copy(0, order, outputs).unflatten(0, routed_experts.shape)
        return (outputs * weights.unsqueeze(2)).sum(1).to(hidden.dtype)
