"""Samples tokens from logits, with their log-probs: vectorised over rows, with counter-based random numbers."""

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
"""Larger vocabularies are searched block by block: a cumulative sum of all of it would cost more than the head."""
_CACHED = 1 << 18
"""Probabilities processed at a time on a CPU, so that intermediates stay in a core's cache."""
_CANDIDATES = 256
"""How many of the likeliest tokens are searched first for the last one to keep: nearly always enough."""


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One number in [0, 1) per row, determined by (seed, position): float64 [B] from uint64 [B] and int [B].

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
    """The result of one step, all [B]."""

    ids: Tensor
    logprobs: Tensor
    """nats, of the distribution sampled from; 0 for greedy rows."""
    full_logprobs: Tensor
    """nats, of log_softmax(logits / temperature); temperature 1 for greedy rows."""


class RowSampler:
    """Samples one token for each row of a batch, with each row's own parameters.

    They are applied in Hugging Face's order: repetition penalty, forbidden tokens, temperature, top_k, top_p, min_p.
    Tokens tied with the last one kept are kept too, so the distribution does not depend on how ties are broken.
    """

    def __init__(self, params: Sequence[SamplingParams], device: torch.device):
        self._device = device
        temperatures = [p.temperature or 1.0 for p in params]
        self._temperature = None if all(t == 1.0 for t in temperatures) else self._column(temperatures)
        greedy = [p.temperature == 0 for p in params]
        self._all_greedy = all(greedy)
        self._greedy = torch.tensor(greedy, device=device).unsqueeze(1) if any(greedy) else None
        self._truncation = _Truncation(params, device) if any(map(_truncates, params)) else None
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
        target = self._target(logits, scaled, seen, forbidden)
        if self._all_greedy:
            ids = target.argmax(-1, keepdim=True)
            full = scaled.gather(1, ids) - scaled.logsumexp(-1, keepdim=True)
            return Sampled(ids.squeeze(1), torch.zeros_like(full).squeeze(1), full.squeeze(1))
        probabilities = target.softmax(-1)
        # The largest logit less its log-prob: a pass that logsumexp would make again.
        normaliser = target.amax(-1, keepdim=True) - probabilities.amax(-1, keepdim=True).log()
        full_normaliser = normaliser if target is scaled else scaled.logsumexp(-1, keepdim=True)
        if self._truncation is not None:
            normaliser = normaliser + self._truncation.apply(probabilities).log()
        ids = inverse_cdf(probabilities, torch.from_numpy(random).to(self._device).unsqueeze(1))
        if self._greedy is not None:
            ids = torch.where(self._greedy, target.argmax(-1, keepdim=True), ids)
        full = scaled.gather(1, ids) - full_normaliser
        logprobs = target.gather(1, ids) - normaliser
        if self._greedy is not None:
            logprobs = logprobs.masked_fill(self._greedy, 0.0)
        return Sampled(ids.squeeze(1), logprobs.squeeze(1), full.squeeze(1))

    def _target(
        self, logits: Tensor, scaled: Tensor, seen: Sequence[Tensor], forbidden: Sequence[tuple[int, Tensor]]
    ) -> Tensor:
        """The logits to truncate and sample from: `scaled` itself if nothing changes it."""
        if self._penalised is None and not forbidden:
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
        return target


def _truncates(params: SamplingParams) -> bool:
    return params.temperature > 0 and (params.top_p < 1 or params.top_k > 0 or params.min_p > 0)


class _Truncation:
    """Applies top_k, top_p and min_p to the rows that have any of them."""

    def __init__(self, params: Sequence[SamplingParams], device: torch.device):
        rows = [row for row, p in enumerate(params) if _truncates(p)]
        self._rows = torch.tensor(rows, device=device)
        chosen = [params[row] for row in rows]
        limits = [[p.top_k or math.inf, p.top_p if p.top_p < 1 else math.inf, p.min_p] for p in chosen]
        self._limits = torch.tensor(limits, dtype=torch.float64, device=device)
        self._largest_k = max(p.top_k for p in chosen)

    def apply(self, probabilities: Tensor) -> Tensor:
        """Set dropped tokens of [B, V] to 0, in place; returns the remaining mass [B, 1], 1 for other rows."""
        mass = probabilities.new_ones(len(probabilities), 1)
        at_once = len(self._rows)
        if probabilities.device.type == "cpu":
            at_once = max(1, _CACHED // probabilities.shape[1])
        for index, limits in zip(self._rows.split(at_once), self._limits.split(at_once), strict=True):
            rows = probabilities[index]
            smallest = smallest_kept(rows, limits, max(_CANDIDATES, self._largest_k + 1))
            rows.mul_(torch.ge(rows, smallest, out=torch.empty_like(rows)))  # a mask of bools takes three times as long
            probabilities[index], mass[index] = rows, rows.sum(-1, keepdim=True)
        return mass


def smallest_kept(probabilities: Tensor, limits: Tensor, candidates: int) -> Tensor:
    """The smallest probability that each row keeps: [R, 1] from [R, V], whose rows sum to 1 up to rounding.

    `limits` [R, 3] float64: top_k, then top_p of the remaining mass, then min_p; infinity, infinity, 0 are off. The
    last token kept is searched among the `candidates` (at least every finite top_k) likeliest tokens; for rows that
    keep all of those, among 16 times as many. So no row is sorted completely unless it is nearly flat.
    """
    smallest = probabilities.new_empty(len(probabilities), 1)
    left = torch.arange(len(probabilities), device=probabilities.device)
    while len(left):
        rows = probabilities if len(left) == len(probabilities) else probabilities[left]
        top_k, top_p, min_p = limits[left].split(1, dim=1)
        ranked = _largest(rows, candidates)
        count = ranked.shape[1]
        cumulative = ranked.cumsum(-1, dtype=torch.float64)
        total = cumulative[:, -1:]
        first = (count - top_k).clamp_(min=0).long()  # where the top_k begin
        below = torch.where(first > 0, cumulative.gather(1, (first - 1).clamp_(min=0)), 0.0)
        mass = torch.where(top_k.isinf(), rows.sum(-1, keepdim=True), total - below)
        # A token is kept if the tokens above it have less than top_p of the mass.
        first = first.maximum(torch.searchsorted(cumulative, total - top_p * mass, right=True).clamp_(max=count - 1))
        least = min_p * ranked[:, -1:]
        smallest[left] = torch.maximum(ranked.gather(1, first).double(), least).float()
        if count == probabilities.shape[1]:
            break
        more = (first == 0) & (ranked[:, :1] >= least)
        left = left[more.squeeze(1)]
        candidates *= 16
    return smallest


def _largest(values: Tensor, count: int) -> Tensor:
    """The `count` largest values of each row, or all if there are fewer, ascending: [R, V] -> [R, count]."""
    count = min(count, values.shape[1])
    if values.device.type != "cpu":
        return values.topk(count, dim=-1).values.flip(-1)
    array = values.numpy()  # NumPy's kernels carry no indices: many times as fast as topk and sort
    if count < array.shape[1]:
        array = np.partition(array, -count, axis=-1)[:, -count:]
    return torch.from_numpy(np.sort(array, axis=-1))


def inverse_cdf(probabilities: Tensor, random: Tensor) -> Tensor:
    """The first index whose cumulative sum exceeds `random` times the total: int64 [B, 1] from [B, V], float64 [B, 1].

    A token of probability 0 is never returned, as the cumulative sum does not rise there.
    """
    count = probabilities.shape[1]
    if count <= _BLOCK:
        return _search(probabilities, random)
    whole = count - count % _BLOCK
    sums = probabilities[:, :whole].unflatten(1, (-1, _BLOCK)).sum(-1)
    if whole < count:
        sums = torch.cat((sums, probabilities[:, whole:].sum(-1, keepdim=True)), dim=1)
    sums = sums.double()
    cumulative = sums.cumsum(-1)
    wanted = random * cumulative[:, -1:]
    block = torch.searchsorted(cumulative, wanted, right=True).clamp_(max=sums.shape[1] - 1)
    start, mass = cumulative.gather(1, block) - sums.gather(1, block), sums.gather(1, block)
    # The share of the block's mass below the wanted value: rounding may put it slightly outside [0, 1).
    share = ((wanted - start) / mass).clamp_(0.0, 1.0 - 2.0**-52)
    places = block * _BLOCK + torch.arange(_BLOCK, device=block.device)
    inside = probabilities.gather(1, places.clamp(max=count - 1)) * (places < count)
    # If probabilities are not finite, any valid index will do: the log-prob of that token reveals the problem.
    return (block * _BLOCK + _search(inside, share)).clamp_(max=count - 1)


def _search(probabilities: Tensor, random: Tensor) -> Tensor:
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    found = torch.searchsorted(cumulative, random * cumulative[:, -1:], right=True)
    return found.clamp_(max=probabilities.shape[1] - 1)
