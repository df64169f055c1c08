"""Samples tokens from logits, with their log-probs, and finds stop strings.

Sampling is vectorised over rows, with counter-based random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from skyrl_train.engines.base import SamplingParams

_SPLITMIX_INCREMENT = 0x9E3779B97F4A7C15 - 2**64
_PREGENERATED_STEPS = 16
"""Steps for which random numbers are made at once: one by one, their many small operations would cost a step more."""
_SEARCH_BLOCK = 512
"""Larger vocabularies are searched block by block: a cumulative sum of all of it would cost more than the head."""
_CPU_CHUNK_ELEMENTS = 1 << 18
"""Probabilities processed at a time on a CPU, so that intermediates stay in a core's cache."""
_REPLACEMENT = "\ufffd"
_CANDIDATES = 256
"""How many of the likeliest tokens are searched first for the last one to keep: nearly always enough."""


def random_uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """One number in [0, 1) for each pair of seed and position, on their device: float64 from int64, broadcast.

    SplitMix64 (Steele, Lea, Flood 2014) of the mixed seed plus (position + 1) times its increment. int64 wraps and so
    has the bits of the unsigned numbers.
    """
    bits = _mix(_mix(seeds + _SPLITMIX_INCREMENT) + (positions + 1) * _SPLITMIX_INCREMENT)
    return _shifted(bits, 12).double() * 2.0**-52


def _mix(bits: Tensor) -> Tensor:
    bits = _shifted(bits, 30).bitwise_xor_(bits).mul_(0xBF58476D1CE4E5B9 - 2**64)
    bits = _shifted(bits, 27).bitwise_xor_(bits).mul_(0x94D049BB133111EB - 2**64)
    return _shifted(bits, 31).bitwise_xor_(bits)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Right, with zeros from the left, as a new tensor: int64 itself would repeat its sign."""
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)


def random_uniform_steps(seeds: Tensor, positions: Tensor) -> Iterator[Tensor]:
    """Numbers for `positions`, then for those after them, and so on: float64 [B, 1] each, from int64 [B]."""
    count = 1  # at first: in a busy engine most batches live for one step
    while True:
        ahead = positions + torch.arange(count, device=positions.device).unsqueeze(1)
        columns = random_uniform(seeds, ahead).unsqueeze(2)
        for step in range(count):  # to iterate over the tensor would make all views at once
            yield columns[step]
        positions, count = positions + count, _PREGENERATED_STEPS


def to_device(values: Sequence[object] | np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of these; on an accelerator it is copied when its turn comes, and nobody waits for it."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class RowSamplingParams(NamedTuple):
    """What a RowSampler reads of a row's parameters: read once, where batches change in every step."""

    temperature: float
    top_k: float
    top_p: float
    min_p: float
    repetition_penalty: float

    @classmethod
    def of(cls, params: Any) -> RowSamplingParams:
        """Of SamplingParams, ours or vLLM's, which have the same names."""
        return cls(params.temperature, params.top_k, params.top_p, params.min_p, params.repetition_penalty)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The result of one step, all [B]."""

    ids: Tensor
    logprobs: Tensor
    """nats, of the distribution sampled from; 0 for greedy rows."""
    full_logprobs: Tensor
    """nats, of log_softmax(logits / temperature); temperature 1 for greedy rows."""


TruncationMask = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Sets all but the likeliest to -inf, maybe in place, ties as it likes: of logits [R, V], top_k int32 [R] (V is off),
then top_p [R] of what is left (1 is off)."""


class RowSampler:
    """Samples a token for each row of a batch, call by call, with each row's own parameters and random numbers.

    Parameters are applied in Hugging Face's order: repetition penalty, forbidden tokens, temperature, top_k, top_p,
    min_p. Tokens tied with the last one kept are kept too, so the distribution does not depend on how ties are broken.
    """

    def __init__(
        self,
        params: Sequence[SamplingParams | RowSamplingParams],
        seeds: Sequence[int],
        positions: Sequence[int],
        device: torch.device,
        mask: TruncationMask | None = None,
    ):
        """Seeds have 64 bits.

        `positions`: how many tokens each row has already, and so which of its seed's numbers come next.
        `mask` truncates without waiting for the device; without one the host looks at which rows are done.
        """
        self._device = device
        signed = np.array([seed % 2**64 for seed in seeds], dtype=np.uint64).view(np.int64)
        both = to_device(np.array((signed, positions)), torch.int64, device)
        self._random = random_uniform_steps(both[0], both[1])
        read = [p if isinstance(p, RowSamplingParams) else RowSamplingParams.of(p) for p in params]
        numbers = np.array(read, dtype=np.float64).reshape(len(read), 5)
        temperatures, top_k, top_p, min_p, penalties = numbers.T
        greedy = temperatures == 0
        self._all_greedy = bool(greedy.all())
        self._greedy = to_device(greedy, torch.bool, device).unsqueeze(1) if greedy.any() else None
        scales = np.where(greedy, 1.0, temperatures)
        self._temperature = None if (scales == 1).all() else self._column(scales)
        rows = np.flatnonzero(~greedy & ((top_p < 1) | (top_k > 0) | (min_p > 0)))
        self._truncation = _Truncation(rows, top_k[rows], top_p[rows], min_p[rows], device, mask) if len(rows) else None
        penalised = np.flatnonzero(penalties != 1)
        self._penalised = to_device(penalised, torch.int64, device) if len(penalised) else None
        self._penalty = self._column(penalties[penalised]) if len(penalised) else None

    def _column(self, values: np.ndarray) -> Tensor:
        return to_device(values, torch.float32, self._device).unsqueeze(1)

    def __call__(
        self, logits: Tensor, seen: Sequence[Tensor] = (), forbidden: Sequence[tuple[int, Tensor]] = ()
    ) -> SampledTokens:
        """Sample the next token of every row from `logits` [B, V].

        `seen` has a bool [V] for each row with a repetition penalty, in row order; `forbidden` gives ids that a row
        must not sample now.
        """
        logits = logits.float()
        scaled = self.scale(logits)
        return self.sample(self._target(logits, scaled, seen, forbidden), scaled)

    def scale(self, logits: Tensor) -> Tensor:
        """By each row's temperature; the logits themselves where all are 1."""
        return logits if self._temperature is None else logits / self._temperature

    def sample(self, target: Tensor, scaled: Tensor) -> SampledTokens:
        """Sample from `target` [B, V], which penalties and the like have changed: `scaled` itself if nothing has.

        `scaled` is what `scale` returned of the logits as they were.
        """
        if self._all_greedy:
            ids = target.argmax(-1, keepdim=True)
            full = scaled.gather(1, ids) - scaled.logsumexp(-1, keepdim=True)
            return SampledTokens(ids.squeeze(1), torch.zeros_like(full).squeeze(1), full.squeeze(1))
        probabilities = target.softmax(-1)
        # The largest logit less its log-prob: a pass that logsumexp would make again.
        normaliser = target.amax(-1, keepdim=True) - probabilities.amax(-1, keepdim=True).log()
        full_normaliser = normaliser if target is scaled else scaled.logsumexp(-1, keepdim=True)
        if self._truncation is not None:
            normaliser = normaliser + self._truncation.apply(target, probabilities).log()
        ids = inverse_cdf(probabilities, next(self._random))
        if self._greedy is not None:
            ids = torch.where(self._greedy, target.argmax(-1, keepdim=True), ids)
        full = scaled.gather(1, ids) - full_normaliser
        logprobs = target.gather(1, ids) - normaliser
        if self._greedy is not None:
            logprobs = logprobs.masked_fill(self._greedy, 0.0)
        return SampledTokens(ids.squeeze(1), logprobs.squeeze(1), full.squeeze(1))

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


class _Truncation:
    """Applies top_k, top_p and min_p to the rows that have any of them."""

    def __init__(
        self,
        rows: np.ndarray,
        top_k: np.ndarray,
        top_p: np.ndarray,
        min_p: np.ndarray,
        device: torch.device,
        mask: TruncationMask | None,
    ):
        """`rows`: their indices; the rest, each [R], are theirs."""
        self._rows = to_device(rows, torch.int64, device)
        limits = np.stack((np.where(top_k > 0, top_k, np.inf), np.where(top_p < 1, top_p, np.inf), min_p), axis=1)
        self._limits = to_device(limits, torch.float64, device)
        self._largest_k = int(top_k.max())
        self._mask = mask

    def apply(self, logits: Tensor, probabilities: Tensor) -> Tensor:
        """Set dropped tokens of `probabilities` [B, V], the softmax of `logits`, to 0, in place.

        Returns the remaining mass [B, 1], 1 for other rows.
        """
        mass = probabilities.new_ones(len(probabilities), 1)
        at_once = len(self._rows)
        if probabilities.device.type == "cpu":
            at_once = max(1, _CPU_CHUNK_ELEMENTS // probabilities.shape[1])
        for index, limits in zip(self._rows.split(at_once), self._limits.split(at_once), strict=True):
            rows = probabilities[index]
            if self._mask is None:
                smallest = min_kept_prob(rows, limits, max(_CANDIDATES, self._largest_k + 1))
            else:
                smallest = min_kept_prob_from_mask(logits[index], rows, limits, self._mask)
            rows.mul_(torch.ge(rows, smallest, out=torch.empty_like(rows)))  # a mask of bools takes three times as long
            probabilities[index], mass[index] = rows, rows.sum(-1, keepdim=True)
        return mass


def mask_by_sorting(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """A `Mask` of torch's own operations: it sorts every row, and nothing waits for the device."""
    ordered, order = logits.sort(dim=-1, descending=True)
    kept = torch.arange(logits.shape[1], device=logits.device) < top_k.unsqueeze(1)
    probabilities = ordered.masked_fill_(~kept, -math.inf).softmax(-1, dtype=torch.float32)
    kept &= probabilities.cumsum(-1, dtype=torch.float64) - probabilities < top_p.unsqueeze(1)
    return logits.masked_fill_(~torch.empty_like(kept).scatter_(1, order, kept), -math.inf)


def min_kept_prob_from_mask(logits: Tensor, probabilities: Tensor, limits: Tensor, mask: TruncationMask) -> Tensor:
    """As `smallest_kept`, by a kernel that need not keep all ties: to keep what is no smaller puts them back.

    `mask` may change `logits` [R, V].
    """
    top_k, top_p, min_p = limits.unbind(1)
    masked = mask(logits, top_k.clamp(max=logits.shape[1]).int(), top_p.clamp(max=1.0).float())
    dropped = masked == -math.inf
    smallest = masked.copy_(probabilities).masked_fill_(dropped, math.inf).amin(-1, keepdim=True)
    least = min_p.unsqueeze(1) * probabilities.amax(-1, keepdim=True)
    return torch.maximum(smallest.double(), least).float()


def min_kept_prob(probabilities: Tensor, limits: Tensor, candidates: int) -> Tensor:
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
    if count <= _SEARCH_BLOCK:
        return _search(probabilities, random)
    whole = count - count % _SEARCH_BLOCK
    sums = probabilities[:, :whole].unflatten(1, (-1, _SEARCH_BLOCK)).sum(-1)
    if whole < count:
        sums = torch.cat((sums, probabilities[:, whole:].sum(-1, keepdim=True)), dim=1)
    sums = sums.double()
    cumulative = sums.cumsum(-1)
    wanted = random * cumulative[:, -1:]
    block = torch.searchsorted(cumulative, wanted, right=True).clamp_(max=sums.shape[1] - 1)
    start, mass = cumulative.gather(1, block) - sums.gather(1, block), sums.gather(1, block)
    # The share of the block's mass below the wanted value: rounding may put it slightly outside [0, 1).
    share = ((wanted - start) / mass).clamp_(0.0, 1.0 - 2.0**-52)
    places = block * _SEARCH_BLOCK + torch.arange(_SEARCH_BLOCK, device=block.device)
    inside = probabilities.gather(1, places.clamp(max=count - 1)) * (places < count)
    # If probabilities are not finite, any valid index will do: the log-prob of that token reveals the problem.
    return (block * _SEARCH_BLOCK + _search(inside, share)).clamp_(max=count - 1)


def _search(probabilities: Tensor, random: Tensor) -> Tensor:
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    found = torch.searchsorted(cumulative, random * cumulative[:, -1:], right=True)
    return found.clamp_(max=probabilities.shape[1] - 1)


class StopStrings:
    """Finds out whether the newest token completed one of `stops`, which may span several tokens.

    Decoding a row at every step would cost more than a small model's forward. So this decodes only for tokens whose own
    text contains the last character of a stop string, or that are parts of characters.
    """

    def __init__(self, tokenizer: Any, stops: tuple[str, ...]):
        self._tokenizer = tokenizer
        self._stops = stops
        # A token is at least one byte of a character, which has at most four; plus a margin for tokens without text.
        self.max_tail_tokens = 4 * max(len(stop) for stop in stops) + 4
        # Decoders add and drop blanks between tokens: a final blank of a stop string may come from any token.
        self._last = None if any(stop[-1].isspace() for stop in stops) else {stop[-1] for stop in stops}
        self._may_end: dict[int, bool] = {}

    def may_end_at(self, token: int) -> bool:
        """Whether a stop string may end with this token: cheap, and without false negatives."""
        known = self._may_end.get(token)
        if known is None:
            text = self._decode([token])
            known = self._last is None or not text or _REPLACEMENT in text or any(c in self._last for c in text)
            self._may_end[token] = known
        return known

    def find(self, token_ids: Sequence[int]) -> str | None:
        """The stop string completed by the last of `token_ids` (if several: the one that ends first), else None."""
        if not self.may_end_at(token_ids[-1]):
            return None
        tail = list(token_ids[-self.max_tail_tokens :])
        text, before = self._decode(tail), self._decode(tail[:-1]).rstrip(_REPLACEMENT)
        ends = []
        for order, stop in enumerate(self._stops):
            at = text.find(stop, max(0, len(before) - len(stop) + 1))
            if at >= 0:
                ends.append((at + len(stop), order, stop))
        return min(ends)[2] if ends else None

    def _decode(self, token_ids: list[int]) -> str:
        if not token_ids:
            return ""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
