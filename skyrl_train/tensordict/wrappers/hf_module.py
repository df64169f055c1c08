"""Logits of a user's Hugging Face model, and a copy of it for an engine that shares its weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from skyrl_train.engines.base import Capabilities
from skyrl_train.errors import ConfigError


class ModuleScorer:
    """A plain module in the place of an engine; the caller can still train the module."""

    def __init__(self, module: Any):
        self.module = module
        self.capabilities = Capabilities(name="module")

    def logits(self, rows: Sequence[Sequence[int]], padded: bool) -> Tensor:
        """Return logits [B, T, V] with rows padded on the left; [b, t] predicts token t; 0 at a row's first token.

        They are at least float32, like the trainer's: log-probs in a module's bfloat16 are off by percents.

        Args:
            rows: Token ids.
            padded: True to read them as one padded rectangle, False to read each in a separate forward.
        """
        length = max(map(len, rows))
        if not padded:
            alone = [self.logits([row], True)[0] for row in rows]
            return torch.stack([pad(one, (0, 0, length - len(one), 0)) for one in alone])
        device = next(self.module.parameters()).device
        ids = torch.tensor([[0] * (length - len(row)) + list(row) for row in rows], device=device)
        mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows], device=device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        out = self.module(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        out = out if out.dtype == torch.float64 else out.float()
        shifted = torch.cat([torch.zeros_like(out[:, :1]), out[:, :-1]], 1)
        return shifted.masked_fill((positions == 0).unsqueeze(-1), 0.0)

    def log_probs(self, rows: Sequence[Sequence[int]], temperature: float, padded: bool) -> list[Tensor]:
        """Return the log-probs [L - 1] of each row's tokens after the first, with a gradient where one is enabled.

        Rows that are read alone need the memory for the logits of one row only, unless a gradient needs them all.
        """
        found = []
        for batch in [rows] if padded else [[row] for row in rows]:
            for row, logits in zip(batch, self.logits(batch, True), strict=True):
                logs = (logits[len(logits) - len(row) + 1 :] / temperature).log_softmax(-1)
                chosen = torch.tensor(row[1:], dtype=torch.int64, device=logs.device)
                found.append(logs.gather(-1, chosen.unsqueeze(-1)).squeeze(-1).cpu())
        return found


def sharing_weights(module: nn.Module) -> Any:
    """Return a copy of a module that shares its tensors, but not its mode, attention, hooks and requires_grad."""
    shared: dict[int, Any] = {id(each): each for each in module.buffers()}
    shared |= {id(each): nn.Parameter(each.detach(), requires_grad=False) for each in module.parameters()}
    return copy.deepcopy(module, shared)


def check_shared(module: nn.Module, own: nn.Module) -> None:
    """Raise ConfigError if a module and its copy no longer share their tensors, so that updates would be missed."""
    for (name, theirs), ours in zip(module.named_parameters(), own.parameters(), strict=True):
        if theirs.data_ptr() != ours.data_ptr():
            raise ConfigError(
                f"The model's {name!r} was moved, cast or assigned after the wrapper was made, which still samples "
                "from the old weights: move and cast a model first, then make its wrapper."
            )
