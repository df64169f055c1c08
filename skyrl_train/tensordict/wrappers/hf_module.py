"""Logits of a user's Hugging Face model, and a copy of it for an engine that shares its weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from skyrl_train.engines.base import Capabilities, Completion, SampleRequest
from skyrl_train.errors import ConfigError, EngineError
from skyrl_train.models.loading import load_causal_lm
from skyrl_train.weight_sync.protocol import dtype_of


class ModuleScorer:
    """The part of an engine's interface that a plain module can provide; the caller can still train the module."""

    def __init__(self, module: Any):
        self.module = module
        self.capabilities = Capabilities(name="module")

    def logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Return logits [B, T, V] with rows padded on the left; [b, t] predicts token t; 0 at a row's first token.

        They are at least float32, like the trainer's: log-probs in a module's bfloat16 are off by percents.
        """
        device = next(self.module.parameters()).device
        length = max(map(len, rows))
        ids = torch.tensor([[0] * (length - len(row)) + list(row) for row in rows], device=device)
        mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows], device=device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        out = self.module(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        out = out if out.dtype == torch.float64 else out.float()
        shifted = torch.cat([torch.zeros_like(out[:, :1]), out[:, :-1]], 1)
        return shifted.masked_fill((positions == 0).unsqueeze(-1), 0.0)

    async def score(self, token_ids: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """Return the log-probs of each row's tokens after the first, by one forward per row without a gradient."""
        found = []
        with torch.inference_mode():
            for row in token_ids:
                logs = (self.logits([row])[0, 1:] / temperature).log_softmax(-1)
                chosen = torch.tensor(row[1:], dtype=torch.int64, device=logs.device)
                found.append(logs.gather(-1, chosen.unsqueeze(-1)).squeeze(-1).tolist())
        return found

    async def generate(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """Raise EngineError: a module only computes log-probs."""
        raise EngineError(
            "A wrapper with generate=False only computes log-probs. Make one with generate=True to sample."
        )

    async def close(self) -> None:
        """Do nothing: the module belongs to the caller."""


def load_module(
    path: str, device: torch.device | str | None, *, dtype: str | torch.dtype = "float32", **rope: Any
) -> nn.Module:
    """Load a causal language model.

    Args:
        path: Folder or hub name of the model.
        device: Device of the model; None for the CPU.
        dtype: Data type of the parameters.
        **rope: `rope_scaling` and `rope_theta`; see `load_causal_lm`.

    Raises:
        ConfigError: The model cannot be loaded.
    """
    kind = dtype_of(dtype) if isinstance(dtype, str) else dtype
    model: nn.Module = load_causal_lm(path, dtype=kind, device=device or "cpu", key="model", **rope)
    return model


def sharing_weights(module: nn.Module) -> Any:
    """Return a copy of a module that shares its tensors, but not its mode, attention, hooks and requires_grad."""
    shared: dict[int, Any] = {
        id(each): nn.Parameter(each.detach(), requires_grad=False) for each in module.parameters()
    }
    shared |= {id(each): each for each in module.buffers()}
    return copy.deepcopy(module, shared)


def check_shared(module: nn.Module, own: nn.Module) -> None:
    """Raise ConfigError if a module and its copy no longer share their tensors, so that updates would be missed."""
    for (name, theirs), ours in zip(module.named_parameters(), own.parameters(), strict=True):
        if theirs.data_ptr() != ours.data_ptr():
            raise ConfigError(
                f"The model's {name!r} was moved, cast or assigned after the wrapper was made, which still samples "
                "from the old weights: move and cast a model first, then make its wrapper."
            )
