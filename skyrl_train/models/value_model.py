"""A critic: a language model's body with a linear head of width 1 that computes values of states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from skyrl_train.models.expert_parallel import ExpertParallel
from skyrl_train.models.model_inputs import ModelInputs
from skyrl_train.models.parallel_group import ParallelGroup
from skyrl_train.models.pretrained_weights import PretrainedWeights
from skyrl_train.models.ragged_model import RaggedModel, get_lm_head, verify_and_shard


class ValueModel(RaggedModel):
    """The critic's root module, which strategies shard: the body of a causal language model, with a value head.

    The value head starts at 0, so that all values are 0 before training, whatever the seed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        head_name: str = "value_head",
        parallel_group: ParallelGroup | None = None,
        pretrained: PretrainedWeights | None = None,
        expert_parallel: ExpertParallel | None = None,
    ):
        """Take the body of `model` and add a value head.

        Args:
            model: A causal language model; its LM head is not used.
            head_name: Name of the value head in checkpoints.
            parallel_group: See RaggedModel.
            pretrained: See RaggedModel.
            expert_parallel: See RaggedModel.

        Raises:
            ConfigError: The model cannot run without padding or in its parallel groups, or has no linear head.
        """
        size = get_lm_head(model).in_features
        body: Any = model.base_model
        super().__init__(body, parallel_group, pretrained, expert_parallel)
        self._prefix = model.base_model_prefix
        self._head_name = head_name
        device = model.device if pretrained is None else "cpu"
        self.value_head = nn.Linear(size, 1, bias=False, dtype=model.dtype, device=device)
        nn.init.zeros_(self.value_head.weight)
        verify_and_shard(self)

    def hf_name(self, name: str) -> str:
        """Return a parameter's name in a checkpoint; the body has the names of the causal language model it was taken
        from.
        """
        module, _, rest = name.partition(".")
        return f"{self._head_name if module == 'value_head' else self._prefix}.{rest}"

    def head_parameters(self) -> list[Tensor]:
        """Parameters that forward reads without running their module."""
        return [self.value_head.weight]

    def forward(self, inputs: ModelInputs, compute_entropy: bool = False) -> tuple[Tensor, None]:
        """Return the values of the states before the target tokens.

        Args:
            inputs: The result of `lay_out`, on the model's device; see `copy_to_device`.
            compute_entropy: Must be False.

        Returns:
            Values [T], at least float32 and 0 outside the loss mask; and None for the entropy.
        """
        assert not compute_entropy, "a critic has no entropy"
        hidden = self.hidden_before_targets(inputs)
        kind = torch.promote_types(hidden.dtype, torch.float32)
        values = (hidden.to(kind) * self.value_head.weight.to(kind)).sum(-1)  # autocast would narrow a matrix product
        return self.scatter_to_tokens(values, inputs), None
