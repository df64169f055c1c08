"""Logits of a Hugging Face model, to train it or to score with its current weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from skyrl_train.engines.base import Capabilities, Completion, SampleRequest
from skyrl_train.errors import EngineError


class ModuleScorer:
    """The part of an engine's interface that a plain module can provide; the caller can still train the module."""

    def __init__(self, module: Any):
        self.module = module
        self.capabilities = Capabilities(name="module")

    def logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """[B, T, V], rows padded on the left; [b, t] are the logits that predict token t, 0 at a row's first token.

        At least float32, like the trainer's: log-probs in a module's bfloat16 are off by percents.
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
        """See InferenceEngine; one forward per row, without a gradient."""
        found = []
        with torch.inference_mode():
            for row in token_ids:
                logs = (self.logits([row])[0, 1:] / temperature).log_softmax(-1)
                chosen = torch.tensor(row[1:], dtype=torch.int64, device=logs.device)
                found.append(logs.gather(-1, chosen.unsqueeze(-1)).squeeze(-1).tolist())
        return found

    async def generate(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        raise EngineError("a module given with generate=False only scores; make a wrapper with generate=True.")

    async def close(self) -> None:
        """Does nothing: it owns nothing."""
