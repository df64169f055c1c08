"""A policy with distributions over a module that writes logits, as in TorchRL before its wrappers."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from skyrl_train.errors import ConfigError
from skyrl_train.tensordict.ragged import Key, column
from skyrl_train.tensordict.wrappers.distributions import LLMMaskedCategorical


class CategoricalSequential(TensorDictModuleBase):
    """A policy over a `module` that writes logits [B, T, V], or ragged rows [t, V], under `logits_key`.

    `action_key` holds the tokens, [B, T] or ragged, whose log-probs `log_prob` returns.

    Output rows are padded on the right. The positions that count are given by `mask_key` if present, else by the rows'
    lengths, else by positions with `padding_value` in all logits (never by single logits that equal it).
    """

    def __init__(
        self,
        module: Any,
        *,
        logits_key: Key = "logits",
        action_key: Key = "tokens_response",
        mask_key: Key | None = None,
        padding_value: float = 0.0,
    ):
        super().__init__()
        self.module = module
        self.logits_key, self.action_key, self.mask_key = logits_key, action_key, mask_key
        self.padding_value = padding_value
        self.in_keys = list(getattr(module, "in_keys", []))
        self.out_keys = list(getattr(module, "out_keys", [logits_key]))

    def forward(self, tensordict: TensorDictBase, *args: Any, **options: Any) -> Any:
        return self.module(tensordict, *args, **options)

    def get_dist(self, tensordict: TensorDictBase, *args: Any, **options: Any) -> LLMMaskedCategorical:
        """Return the token distributions of a batch, which is not changed. Raises ConfigError without logits."""
        out = self.module(tensordict.copy(), *args, **options)
        logits = column(out, self.logits_key)
        if logits is None:
            raise ConfigError(f"The module wrote no {self.logits_key!r}. Name its key with logits_key=.")
        mask = None if self.mask_key is None else column(tensordict, self.mask_key)
        values, found = _right(logits)
        if isinstance(logits, Tensor):
            found = (values != self.padding_value).any(-1)
        return LLMMaskedCategorical(values, found if mask is None else _right(mask)[0].bool())

    def log_prob(self, tensordict: TensorDictBase, *args: Any, **options: Any) -> Tensor:
        """Return the log-probs [B, T] (nats) of the action's tokens, 0 at masked positions.

        Raises ConfigError if the action or the logits are missing.
        """
        action = column(tensordict, self.action_key)
        if action is None:
            raise ConfigError(
                f"The tensordict has no tokens at {self.action_key!r}. Pass their key as "
                f"{type(self).__name__}(action_key=...)."
            )
        return self.get_dist(tensordict, *args, **options).log_prob(_right(action)[0])


def _right(rows: Any) -> tuple[Tensor, Tensor]:
    """[B, T, ...] padded on the right with 0, and a mask [B, T] of the real entries."""
    values = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    lengths = torch.tensor([len(row) for row in rows], device=values.device)
    return values, torch.arange(values.shape[1], device=values.device) < lengths.unsqueeze(-1)
