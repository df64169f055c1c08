"""The reference for engines: a Hugging Face model in float32, with one plain forward pass per sequence."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from skyrl_train.data.token_arrays import Tokens
from skyrl_train.engines.base import SamplingParams
from tests.support.weight_targets import score


class Reference:
    """A copy of a model, in float32 and with eager attention."""

    def __init__(self, model: PreTrainedModel):
        self.model: Any = copy.deepcopy(model).float().eval()
        self.model.set_attn_implementation("eager")

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int] | Tokens, count: int) -> list[int]:
        """Return `count` greedily sampled tokens. End-of-sequence tokens do not end the response."""
        ids = np.asarray(prompt).tolist()
        for _ in range(count):
            ids.append(int(self._logits(ids)[-1].argmax()))
        return ids[len(prompt) :]

    def score(self, token_ids: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """Return the log-probs in nats of all tokens but the first, for each sequence."""
        return score(self.model, token_ids, temperature)

    @torch.no_grad()
    def logprobs(
        self, prompt: Sequence[int] | Tokens, sampled: Sequence[int] | Tokens, sampling: SamplingParams
    ) -> tuple[list[float], list[float]]:
        """Return the log-probs in nats of `sampled`, in the distribution sampled from and before truncation.

        Parameters apply in Hugging Face's order: repetition penalty, temperature, top_k, top_p, min_p.
        """
        sampled = np.asarray(sampled).tolist()
        tokens = torch.tensor([[*np.asarray(prompt).tolist(), *sampled]])
        logits = self._logits(tokens[0].tolist())[len(prompt) - 1 : -1]
        temperature = sampling.temperature or 1.0
        truncated, full = [], []
        for index, (token, row) in enumerate(zip(sampled, logits, strict=True)):
            seen = tokens[:, : len(prompt) + index]
            full.append(float((row / temperature).log_softmax(-1)[token]))
            truncated.append(float(_truncate(seen, row.unsqueeze(0), sampling).log_softmax(-1)[0, token]))
        return ([0.0] * len(full) if sampling.temperature == 0 else truncated), full

    @torch.no_grad()
    def distributions(
        self, prompt: Sequence[int] | Tokens, sampled: Sequence[int] | Tokens, temperature: float
    ) -> np.ndarray:
        """Return the log-probs of all tokens at each position of `sampled`, before truncation: [L, V]."""
        ids = [*np.asarray(prompt).tolist(), *np.asarray(sampled).tolist()]
        logits = self._logits(ids)[len(prompt) - 1 : -1]
        return (logits / (temperature or 1.0)).log_softmax(-1).numpy()  # type: ignore[no-any-return]

    @torch.no_grad()
    def full_logprobs_after(
        self, old: Reference, prompt: Sequence[int] | Tokens, sampled: Sequence[int] | Tokens, change: int
    ) -> list[float]:
        """Return the log-probs (nats, temperature 1) of sampled[change:] after a change of weights.

        Keys, values and states of earlier tokens are those of `old`. At the change, the newest token had been sampled
        but not yet processed.

        Args:
            old: The reference of the old weights.
            prompt: The prompt's tokens.
            sampled: The sampled tokens.
            change: Index of the first token sampled with the new weights.
        """
        ids = torch.tensor([[*np.asarray(prompt).tolist(), *np.asarray(sampled).tolist()]])
        read = len(prompt) + change - 1
        before = old.model(ids[:, :read], use_cache=True)
        logits = self.model(ids[:, read:-1], past_key_values=before.past_key_values, use_cache=True).logits[0]
        return logits.float().log_softmax(-1).gather(-1, ids[0, read + 1 :, None])[:, 0].tolist()  # type: ignore[no-any-return]

    def _logits(self, ids: Sequence[int]) -> Tensor:
        """Return the logits of a sequence, [L, V]."""
        return self.model(torch.tensor([list(ids)]), use_cache=False).logits[0].float()  # type: ignore[no-any-return]


def _truncate(seen: Any, logits: Any, sampling: SamplingParams) -> Tensor:
    """Return logits [1, V] with -inf for tokens that cannot be sampled."""
    if sampling.repetition_penalty != 1:
        logits = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(seen, logits)
    steps = LogitsProcessorList()
    if sampling.top_k:
        steps.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        steps.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        steps.append(MinPLogitsWarper(sampling.min_p))
    return steps(seen, logits / (sampling.temperature or 1.0))  # type: ignore[no-any-return]
