"""From logits to tokens and their log-probs: vectorised over rows, random numbers by counter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from skyrl_train.engines.base import SamplingParams

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 512
"""Larger vocabularies are searched block by block: a running sum of all of it would cost more than the head."""


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One number in [0, 1) per row, a function of (seed, position) alone: float64 [B] from uint64 [B] and int [B].

    SplitMix64 (Steele, Lea, Flood 2014) of the mixed seed plus (position + 1) times its increment.
    """
    with np.errstate(over="ignore"):
        bits = _mix(_mix(seeds + _GOLDEN) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(bits: np.ndarray) -> np.ndarray:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Sampled:
    """What one step sampled, all [B]."""

    ids: Tensor
    logprobs: Tensor
    """nats, of the distribution sampled from; 0 where greedy."""
    full_logprobs: Tensor
    """nats, of log_softmax(logits / temperature); temperature 1 where greedy."""


class RowSampler:
    """Samples one token for each row of a batch whose rows keep their own parameters.

    Order, as in Hugging Face: repetition penalty, forbidden tokens, temperature, top_k, top_p, min_p. Tokens tied with
    the last one kept are kept too, so the distribution does not depend on how a sort breaks ties.
    """

    def __init__(self, params: Sequence[SamplingParams], device: torch.device):
        self._device = device
        temperatures = [p.temperature or 1.0 for p in params]
        self._temperature = None if all(t == 1.0 for t in temperatures) else self._column(temperatures)
        greedy = [p.temperature == 0 for p in params]
        self._all_greedy = all(greedy)
        self._greedy = torch.tensor(greedy, device=device) if any(greedy) else None
        truncated = [
            i for i, p in enumerate(params) if p.temperature > 0 and (p.top_p < 1 or p.top_k > 0 or p.min_p > 0)
        ]
        self._truncated = torch.tensor(truncated, device=device) if truncated else None
        if truncated:
            chosen = [params[i] for i in truncated]
            self._largest_k = 0 if any(p.top_k == 0 for p in chosen) else max(p.top_k for p in chosen)
            self._top_k = self._column([float(p.top_k or math.inf) for p in chosen])
            self._top_p = self._column([p.top_p if p.top_p < 1 else math.inf for p in chosen])
            self._log_min_p = self._column([math.log(p.min_p) if p.min_p else -math.inf for p in chosen])
        penalised = [i for i, p in enumerate(params) if p.repetition_penalty != 1]
        self._penalised = torch.tensor(penalised, device=device) if penalised else None
        self._penalty = self._column([params[i].repetition_penalty for i in penalised]) if penalised else None

    def _column(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device).unsqueeze(1)

    def __call__(
        self,
        logits: Tensor,
        random: np.ndarray,
        seen: Sequence[Tensor] = (),
        forbidden: Sequence[tuple[int, Tensor]] = (),
    ) -> Sampled:
        """`logits` [B, V]; `random` float64 [B] in [0, 1).

        `seen` has a bool [V] for each row with a repetition penalty, in row order; `forbidden` gives ids that a row
        must not sample now.
        """
        logits = logits.float()
        scaled = logits if self._temperature is None else logits / self._temperature
        full_normaliser = scaled.logsumexp(-1, keepdim=True)
        target = self._target(logits, scaled, seen, forbidden)
        normaliser = full_normaliser if target is scaled else target.logsumexp(-1, keepdim=True)
        if self._all_greedy:
            ids = target.argmax(-1, keepdim=True)
        else:
            ids = inverse_cdf((target - normaliser).exp_(), torch.from_numpy(random).to(self._device).unsqueeze(1))
            if self._greedy is not None:
                ids = torch.where(self._greedy.unsqueeze(1), target.argmax(-1, keepdim=True), ids)
        full = scaled.gather(1, ids) - full_normaliser
        logprobs = full if target is scaled else target.gather(1, ids) - normaliser
        if self._greedy is not None:
            logprobs = logprobs.masked_fill(self._greedy.unsqueeze(1), 0.0)
        return Sampled(ids.squeeze(1), logprobs.squeeze(1), full.squeeze(1))

    def _target(
        self, logits: Tensor, scaled: Tensor, seen: Sequence[Tensor], forbidden: Sequence[tuple[int, Tensor]]
    ) -> Tensor:
        """Logits of the distribution sampled from: `scaled` itself where nothing changes it."""
        if self._penalised is None and self._truncated is None and not forbidden:
            return scaled
        target = scaled.clone()
        if self._penalised is not None and self._penalty is not None:
            rows = logits[self._penalised]
            changed = torch.where(rows > 0, rows / self._penalty, rows * self._penalty)
            rows = torch.where(torch.stack(list(seen)), changed, rows)
            if self._temperature is not None:
                rows = rows / self._temperature[self._penalised]
            target[self._penalised] = rows
        for row, ids in forbidden:
            target[row, ids] = -math.inf
        if self._truncated is not None:
            target[self._truncated] = self._truncate(target[self._truncated])
        return target

    def _truncate(self, logits: Tensor) -> Tensor:
        """-inf wherever top_k, top_p or min_p drops a token: [R, V] -> [R, V]."""
        count = logits.shape[1]
        if 0 < self._largest_k < count:
            ranked = logits.topk(self._largest_k, dim=-1).values
        else:
            ranked = logits.sort(dim=-1, descending=True).values
        rank = torch.arange(ranked.shape[1], device=logits.device).unsqueeze(0)
        ranked = ranked.masked_fill(rank >= self._top_k, -math.inf)
        probabilities = ranked.softmax(-1)
        before = probabilities.cumsum(-1, dtype=torch.float64) - probabilities
        kept = (before < self._top_p) & (ranked >= ranked[:, :1] + self._log_min_p) & (ranked > -math.inf)
        last = (kept.sum(-1, keepdim=True) - 1).clamp_(min=0)
        return logits.masked_fill(logits < ranked.gather(1, last), -math.inf)


def inverse_cdf(probabilities: Tensor, random: Tensor) -> Tensor:
    """The first index whose running sum exceeds `random` times the total: int64 [B, 1] from [B, V] and float64 [B, 1].

    A token of probability 0 is never returned: the running sum rises only at tokens that have some.
    """
    rows, count = probabilities.shape
    if count <= _BLOCK:
        return _search(probabilities, random)
    padding = -count % _BLOCK
    blocks = torch.nn.functional.pad(probabilities, (0, padding)).view(rows, -1, _BLOCK)
    sums = blocks.sum(-1, dtype=torch.float64)
    cumulative = sums.cumsum(-1)
    wanted = random * cumulative[:, -1:]
    block = torch.searchsorted(cumulative, wanted, right=True).clamp_(max=sums.shape[1] - 1)
    inside = blocks.gather(1, block.unsqueeze(-1).expand(rows, 1, _BLOCK)).squeeze(1)
    start, mass = cumulative.gather(1, block) - sums.gather(1, block), sums.gather(1, block)
    # The share of the block that lies below: rounding may put it a hair outside [0, 1).
    share = ((wanted - start) / mass).clamp_(0.0, 1.0 - 2.0**-52)
    return block * _BLOCK + _search(inside, share)


def _search(probabilities: Tensor, random: Tensor) -> Tensor:
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    found = torch.searchsorted(cumulative, random * cumulative[:, -1:], right=True)
    return found.clamp_(max=probabilities.shape[1] - 1)
