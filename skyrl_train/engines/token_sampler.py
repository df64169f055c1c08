"""Sampling of tokens from logits with their log-probs, and detection of stop strings.

Sampling is vectorized over rows and uses counter-based random numbers. Legend: R rows (one per sampled token), V tokens
of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from skyrl_train.engines.base import SamplingParams

_SPLITMIX_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_MIX_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_PREGENERATED_STEPS = 16
"""Steps for which random numbers are generated together, which saves many small operations in every step."""
_ALIGNMENT = 8
"""Bytes to which arrays are aligned in the buffer in which they are copied to a device."""
_SEARCH_BLOCK = 512
"""Vocabularies larger than this are searched block by block. A full cumulative sum would cost more than the LM head."""
_CPU_CHUNK_ELEMENTS = 1 << 18
"""Number of probabilities processed at a time on a CPU, so that intermediate results stay in a core's cache."""
_REPLACEMENT = "\ufffd"
_CANDIDATES = 256
"""Number of most likely tokens in which truncation first searches for the last token to keep. It nearly always
suffices."""


def random_uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return a uniform random number in [0, 1) for each pair of seed and position.

    The numbers are SplitMix64 (Steele, Lea, Flood 2014) of the mixed seed plus (position + 1) times its increment.

    Args:
        seeds: uint64, with at least one dimension.
        positions: uint64, broadcast with `seeds`.

    Returns:
        float64, in the broadcast shape.
    """
    bits = _mix(_mix(seeds + _SPLITMIX_INCREMENT) + (positions + np.uint64(1)) * _SPLITMIX_INCREMENT)
    return (bits >> np.uint64(12)) * 2.0**-52


def _mix(bits: np.ndarray) -> np.ndarray:
    bits = (bits ^ bits >> np.uint64(30)) * _MIX_FACTORS[0]
    bits = (bits ^ bits >> np.uint64(27)) * _MIX_FACTORS[1]
    return bits ^ bits >> np.uint64(31)  # type: ignore[no-any-return]


def copy_to_device(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """Return tensors on `device` with the dtypes and shapes of these arrays, by the same names.

    An accelerator gets them in one asynchronous copy from pinned memory.
    """
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    packed = pack_arrays(arrays.values(), pinned=device.type == "cuda")
    return dict(zip(arrays, unpack_arrays(packed.to(device, non_blocking=True), arrays.values()), strict=True))


def pack_arrays(arrays: Iterable[np.ndarray], *, pinned: bool = False) -> Tensor:
    """Return a uint8 tensor with the bytes of all arrays, in pinned memory if `pinned`."""
    arrays = list(arrays)
    packed = torch.empty(sum(map(_aligned_bytes, arrays)), dtype=torch.uint8, pin_memory=pinned)
    begin = 0
    for array in arrays:
        packed.numpy()[begin : begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        begin += _aligned_bytes(array)
    return packed


def unpack_arrays(packed: Tensor, arrays: Iterable[np.ndarray]) -> Iterator[Tensor]:
    """Yield views of a tensor from `pack_arrays`, with the dtypes and shapes of these arrays."""
    begin = 0
    for array in arrays:
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        yield packed[begin : begin + array.nbytes].view(dtype).view(array.shape)
        begin += _aligned_bytes(array)


def _aligned_bytes(array: np.ndarray) -> int:
    return -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT


def to_device(values: Sequence[object] | np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return `values` as a tensor on `device`. The copy to an accelerator is asynchronous, from pinned memory."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class RowSamplingParams(NamedTuple):
    """The parameters of one row that a RowSampler uses. Engines extract them once, because batches change every
    step."""

    temperature: float
    top_k: float
    top_p: float
    min_p: float
    repetition_penalty: float

    @classmethod
    def of(cls, params: Any) -> RowSamplingParams:
        """Return the parameters of `params`: SamplingParams of this package or of vLLM, whose names are the same."""
        return cls(params.temperature, params.top_k, params.top_p, params.min_p, params.repetition_penalty)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The result of one sampling step for B rows. Every tensor is [B]."""

    ids: Tensor
    logprobs: Tensor
    """Log-probs in nats under the distribution sampled from; 0 for greedy rows."""
    full_logprobs: Tensor
    """Log-probs in nats under softmax(logits / temperature), with temperature 1 for greedy rows."""
    top_ids: Tensor | None = None
    """The most likely tokens of each row that asked for some, [rows, K], for the largest number that a row asked for;
    None if no row did."""
    top_logprobs: Tensor | None = None
    """Their log-probs, of the same distribution as `full_logprobs`."""


TruncationMask = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function of logits [R, V], top_k int32 [R] (V is off) and top_p [R] (1 is off, applied to the mass that top_k
leaves). It returns the logits with dropped tokens set to -inf, may work in place, and may break ties in any way."""


class RowSampler:
    """A sampler that draws one token for each row per call, with each row's own parameters and random numbers.

    Parameters are applied in Hugging Face's order: repetition penalty, forbidden tokens, temperature, top_k, top_p,
    min_p. Tokens that are tied with the last kept token are kept too, so the distribution does not depend on tie
    breaking.
    """

    def __init__(
        self,
        params: Sequence[SamplingParams | RowSamplingParams],
        seeds: Sequence[int],
        positions: Sequence[int],
        device: torch.device,
        mask: TruncationMask | None = None,
        top_logprobs: Sequence[int] = (),
    ):
        """Create a sampler for a batch of B rows.

        Args:
            params: Sampling parameters of each row.
            seeds: 64-bit seed of each row.
            positions: Number of tokens that each row has sampled already, which selects its next random numbers.
            device: Device of the logits.
            mask: Truncation function that does not wait for the device. Without one, truncation synchronizes with the
                device to find the rows that need more candidates.
            top_logprobs: Number of most likely tokens to return for each row; empty if no row asks for some.
        """
        self._device = device
        self._num_top = max(top_logprobs, default=0)
        self._seeds = np.array([seed % 2**64 for seed in seeds], dtype=np.uint64)
        self._positions = np.array(positions, dtype=np.uint64)
        row_params = [p if isinstance(p, RowSamplingParams) else RowSamplingParams.of(p) for p in params]
        numbers = np.fromiter(chain.from_iterable(row_params), np.float64, 5 * len(row_params))
        temperatures, top_k, top_p, min_p, penalties = numbers.reshape(-1, 5).T
        greedy = temperatures == 0
        self._all_greedy = bool(greedy.all())
        scales = np.where(greedy, 1.0, temperatures)
        truncated = np.flatnonzero(~greedy & ((top_p < 1) | (top_k > 0) | (min_p > 0)))
        limits = np.stack((np.where(top_k > 0, top_k, np.inf), np.where(top_p < 1, top_p, np.inf), min_p), axis=1)
        penalized = np.flatnonzero(penalties != 1)
        arrays = {
            "random": random_uniform(self._seeds, self._positions)[:, None],
            "greedy": greedy[:, None],
            "temperature": scales.astype(np.float32)[:, None],
            "truncated": truncated,
            "limits": limits[truncated],
            "penalized": penalized,
            "penalty": penalties[penalized].astype(np.float32)[:, None],
            "top": np.flatnonzero(top_logprobs),
        }
        is_used = {
            "random": not self._all_greedy,
            "greedy": greedy.any() and not self._all_greedy,
            "temperature": (scales != 1).any(),
            "truncated": len(truncated),
            "limits": len(truncated),
            "penalized": len(penalized),
            "penalty": len(penalized),
            "top": self._num_top and not all(top_logprobs),
        }
        copied = copy_to_device({name: array for name, array in arrays.items() if is_used[name]}, device)
        self._random = self._random_steps(copied.get("random"))
        self._greedy, self._temperature = copied.get("greedy"), copied.get("temperature")
        self._penalized_rows, self._penalty = copied.get("penalized"), copied.get("penalty")
        self._top_rows = copied.get("top")
        self._truncation: _Truncation | None = None
        if len(truncated):
            self._truncation = _Truncation(copied["truncated"], copied["limits"], int(top_k[truncated].max()), mask)

    def _random_steps(self, first: Tensor | None) -> Iterator[Tensor]:
        """Yield random numbers, float64 [B, 1], for `first`, and for the following positions without end.

        In a busy engine most batches last for one step, so only the first numbers are generated in advance.
        """
        if first is not None:
            yield first
        done = 1
        while True:
            positions = self._positions + np.arange(done, done + _PREGENERATED_STEPS, dtype=np.uint64)[:, None]
            numbers = random_uniform(self._seeds, positions)[:, :, None]
            copied = copy_to_device({"random": numbers}, self._device)["random"]
            for step in range(_PREGENERATED_STEPS):  # iterating over the tensor would create all views immediately
                yield copied[step]
            done += _PREGENERATED_STEPS

    def __call__(
        self, logits: Tensor, seen: Tensor | Sequence[Tensor] = (), forbidden: Sequence[tuple[int, Tensor]] = ()
    ) -> SampledTokens:
        """Sample the next token of every row.

        Args:
            logits: [B, V].
            seen: For each row with a repetition penalty, in row order, a bool [V] that marks the tokens to penalize; or
                all of them as one tensor [rows, V].
            forbidden: Pairs of row index and tokens that the row must not sample in this step: ids, or bool [V].
        """
        scaled = self.scale(logits)
        return self.sample(self._target(logits, scaled, seen, forbidden), scaled)

    def scale(self, logits: Tensor) -> Tensor:
        """Return `logits` [B, V] in float32, divided by each row's temperature; `logits` itself if nothing changes.

        The scale of greedy rows is 1. A division converts 16-bit logits on the way, without another pass over them.
        """
        return logits.float() if self._temperature is None else logits / self._temperature

    def sample(self, target: Tensor, scaled: Tensor) -> SampledTokens:
        """Sample a token of every row and advance the random numbers by one step.

        Args:
            target: Scaled logits [B, V] after penalties and forbidden tokens; the same tensor as `scaled` if there are
                none.
            scaled: Result of `scale` for the model's logits [B, V].
        """
        if self._all_greedy:
            ids = target.argmax(-1, keepdim=True)
            full_normalizer = scaled.logsumexp(-1, keepdim=True)
            full = scaled.gather(1, ids) - full_normalizer
            top = self._top(scaled, full_normalizer)
            return SampledTokens(ids.squeeze(1), torch.zeros_like(full).squeeze(1), full.squeeze(1), *top)
        probabilities = target.softmax(-1)
        # The largest logit minus its log-prob equals logsumexp and saves another pass over the logits.
        normalizer = target.amax(-1, keepdim=True) - probabilities.amax(-1, keepdim=True).log()
        full_normalizer = normalizer if target is scaled else scaled.logsumexp(-1, keepdim=True)
        if self._truncation is not None:
            normalizer = normalizer + self._truncation.apply(target, probabilities).log()
        ids = inverse_cdf(probabilities, next(self._random))
        if self._greedy is not None:
            ids = torch.where(self._greedy, target.argmax(-1, keepdim=True), ids)
        full = scaled.gather(1, ids) - full_normalizer
        logprobs = target.gather(1, ids) - normalizer
        if self._greedy is not None:
            logprobs = logprobs.masked_fill(self._greedy, 0.0)
        return SampledTokens(ids.squeeze(1), logprobs.squeeze(1), full.squeeze(1), *self._top(scaled, full_normalizer))

    def _top(self, scaled: Tensor, normalizer: Tensor) -> tuple[Tensor, Tensor] | tuple[()]:
        if not self._num_top:
            return ()
        if self._top_rows is not None:
            scaled, normalizer = scaled[self._top_rows], normalizer[self._top_rows]
        values, ids = scaled.topk(min(self._num_top, scaled.shape[1]))
        return ids, values - normalizer

    def _target(
        self,
        logits: Tensor,
        scaled: Tensor,
        seen: Tensor | Sequence[Tensor],
        forbidden: Sequence[tuple[int, Tensor]],
    ) -> Tensor:
        """Return the logits to truncate and sample from: `scaled` itself if nothing changes it."""
        if self._penalized_rows is None and not forbidden:
            return scaled
        target = scaled.clone()
        if self._penalized_rows is not None and self._penalty is not None:
            rows = logits[self._penalized_rows].float()
            penalized = torch.where(rows > 0, rows / self._penalty, rows * self._penalty)
            rows = torch.where(seen if isinstance(seen, Tensor) else torch.stack(list(seen)), penalized, rows)
            if self._temperature is not None:
                rows = rows / self._temperature[self._penalized_rows]
            target[self._penalized_rows] = rows
        masks = [(row, ids) for row, ids in forbidden if ids.dtype == torch.bool]
        lists = [(row, ids) for row, ids in forbidden if ids.dtype != torch.bool]
        for row, mask in masks:
            target[row, mask] = -math.inf
        if lists:
            at = np.repeat([row for row, _ in lists], [len(ids) for _, ids in lists])
            target[to_device(at, torch.int64, self._device), torch.cat([ids for _, ids in lists])] = -math.inf
        return target


class _Truncation:
    """Truncation by top_k, top_p and min_p for the rows that use any of them."""

    def __init__(self, rows: Tensor, limits: Tensor, largest_k: int, mask: TruncationMask | None):
        """Create the truncation of rows with the indices `rows` [R] and the limits [R, 3] of `min_kept_prob`."""
        self._rows = rows
        self._limits = limits
        self._largest_k = largest_k
        self._mask = mask

    def apply(self, logits: Tensor, probabilities: Tensor) -> Tensor:
        """Set the probabilities of dropped tokens to 0, in place.

        Args:
            logits: [B, V].
            probabilities: Softmax of `logits`, [B, V].

        Returns:
            Remaining mass of each row, [B, 1]; 1 for rows without truncation.
        """
        mass = probabilities.new_ones(len(probabilities), 1)
        chunk_rows = len(self._rows)
        if probabilities.device.type == "cpu":
            chunk_rows = max(1, _CPU_CHUNK_ELEMENTS // probabilities.shape[1])
        for index, limits in zip(self._rows.split(chunk_rows), self._limits.split(chunk_rows), strict=True):
            rows = probabilities[index]
            if self._mask is None:
                threshold = min_kept_prob(rows, limits, max(_CANDIDATES, self._largest_k + 1))
            else:
                threshold = min_kept_prob_from_mask(logits[index], rows, limits, self._mask)
            rows.mul_(torch.ge(rows, threshold, out=torch.empty_like(rows)))  # a bool mask takes three times as long
            probabilities[index], mass[index] = rows, rows.sum(-1, keepdim=True)
        return mass


def mask_by_sorting(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Truncate by sorting every row; a `TruncationMask` that uses torch only and does not wait for the device.

    Args:
        logits: [R, V].
        top_k: int32 [R]; V turns it off.
        top_p: [R], of the mass that top_k leaves; 1 turns it off.

    Returns:
        A copy of `logits` in which dropped tokens are -inf.
    """
    ordered, order = logits.sort(dim=-1, descending=True)
    kept = torch.arange(logits.shape[1], device=logits.device) < top_k.unsqueeze(1)
    probabilities = ordered.masked_fill_(~kept, -math.inf).softmax(-1, dtype=torch.float32)
    kept &= probabilities.cumsum(-1, dtype=torch.float64) - probabilities < top_p.unsqueeze(1)
    return logits.masked_fill_(~torch.empty_like(kept).scatter_(1, order, kept), -math.inf)


def min_kept_prob_from_mask(logits: Tensor, probabilities: Tensor, limits: Tensor, mask: TruncationMask) -> Tensor:
    """Return the smallest probability [R, 1] that each row keeps, computed with a top-k/top-p kernel.

    The kernel may drop tokens that are tied with the last kept token. Comparing with the returned threshold keeps them.

    Args:
        logits: [R, V]; modified if `mask` works in place.
        probabilities: Softmax of `logits`, [R, V].
        limits: As in `min_kept_prob`, [R, 3].
        mask: The kernel.
    """
    top_k, top_p, min_p = limits.unbind(1)
    masked = mask(logits, top_k.clamp(max=logits.shape[1]).int(), top_p.clamp(max=1.0).float())
    dropped = masked == -math.inf
    smallest = masked.copy_(probabilities).masked_fill_(dropped, math.inf).amin(-1, keepdim=True)
    min_p_threshold = min_p.unsqueeze(1) * probabilities.amax(-1, keepdim=True)
    return torch.maximum(smallest.double(), min_p_threshold).float()


def min_kept_prob(probabilities: Tensor, limits: Tensor, candidates: int) -> Tensor:
    """Return the smallest probability that each row keeps after top_k, top_p and min_p.

    The last kept token is searched among the `candidates` most likely tokens, and for rows that keep all of these
    among 16 times as many. So no row is sorted completely unless its distribution is nearly flat.

    Args:
        probabilities: [R, V]; each row sums to 1 up to rounding.
        limits: float64 [R, 3]: top_k, top_p of the mass that top_k leaves, and min_p. Infinity, infinity and 0 turn
            them off.
        candidates: Number of most likely tokens to search first; at least every finite top_k.

    Returns:
        Smallest kept probability, [R, 1].
    """
    threshold = probabilities.new_empty(len(probabilities), 1)
    pending = torch.arange(len(probabilities), device=probabilities.device)
    while len(pending):
        rows = probabilities if len(pending) == len(probabilities) else probabilities[pending]
        top_k, top_p, min_p = limits[pending].split(1, dim=1)
        ranked = _largest(rows, candidates)
        count = ranked.shape[1]
        cumulative = ranked.cumsum(-1, dtype=torch.float64)
        total = cumulative[:, -1:]
        first = (count - top_k).clamp_(min=0).long()  # index of the first of the top_k tokens
        below = torch.where(first > 0, cumulative.gather(1, (first - 1).clamp_(min=0)), 0.0)
        mass = torch.where(top_k.isinf(), rows.sum(-1, keepdim=True), total - below)
        # A token is kept if the tokens above it have less than top_p of the mass.
        first = first.maximum(torch.searchsorted(cumulative, total - top_p * mass, right=True).clamp_(max=count - 1))
        min_p_threshold = min_p * ranked[:, -1:]
        threshold[pending] = torch.maximum(ranked.gather(1, first).double(), min_p_threshold).float()
        if count == probabilities.shape[1]:
            break
        keeps_all_candidates = (first == 0) & (ranked[:, :1] >= min_p_threshold)
        pending = pending[keeps_all_candidates.squeeze(1)]
        candidates *= 16
    return threshold


def _largest(values: Tensor, count: int) -> Tensor:
    """Return the `count` largest values of each row, ascending: [R, V] -> [R, min(count, V)]."""
    count = min(count, values.shape[1])
    if values.device.type != "cpu":
        return values.topk(count, dim=-1).values.flip(-1)
    array = values.numpy()  # NumPy computes no indices and is many times as fast as topk and sort
    if count < array.shape[1]:
        array = np.partition(array, -count, axis=-1)[:, -count:]
    return torch.from_numpy(np.sort(array, axis=-1))


def inverse_cdf(probabilities: Tensor, random: Tensor) -> Tensor:
    """Sample an index of each row by inverting its cumulative distribution.

    The result is the first index whose cumulative sum exceeds `random` times the row's total. An index of probability 0
    is never returned, because the cumulative sum does not rise there.

    Args:
        probabilities: [B, V]; rows need not sum to 1.
        random: Uniform random numbers in [0, 1), float64 [B, 1].

    Returns:
        int64 [B, 1].
    """
    count = probabilities.shape[1]
    if count <= _SEARCH_BLOCK:
        return _search(probabilities, random)
    blocks_end = count - count % _SEARCH_BLOCK
    sums = probabilities[:, :blocks_end].unflatten(1, (-1, _SEARCH_BLOCK)).sum(-1)
    if blocks_end < count:
        sums = torch.cat((sums, probabilities[:, blocks_end:].sum(-1, keepdim=True)), dim=1)
    sums = sums.double()
    cumulative = sums.cumsum(-1)
    target = random * cumulative[:, -1:]
    block = torch.searchsorted(cumulative, target, right=True).clamp_(max=sums.shape[1] - 1)
    start, mass = cumulative.gather(1, block) - sums.gather(1, block), sums.gather(1, block)
    # Share of the block's mass below the target. Rounding may put it slightly outside [0, 1).
    share = ((target - start) / mass).clamp_(0.0, 1.0 - 2.0**-52)
    indices = block * _SEARCH_BLOCK + torch.arange(_SEARCH_BLOCK, device=block.device)
    in_block = probabilities.gather(1, indices.clamp(max=count - 1)) * (indices < count)
    # If probabilities are not finite, any valid index is fine: the log-prob of that token reveals the problem.
    return (block * _SEARCH_BLOCK + _search(in_block, share)).clamp_(max=count - 1)


def _search(probabilities: Tensor, random: Tensor) -> Tensor:
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    index = torch.searchsorted(cumulative, random * cumulative[:, -1:], right=True)
    return index.clamp_(max=probabilities.shape[1] - 1)


class StopStrings:
    """A detector of stop strings, which may span several tokens, at the end of a row's tokens.

    Decoding a row at every step would cost more than the forward pass of a small model. So this class decodes only
    after tokens whose own text contains the last character of a stop string, and after tokens that are parts of
    characters.
    """

    def __init__(self, tokenizer: Any, stops: tuple[str, ...]):
        """Create a detector of `stops`, which must be one or more non-empty strings."""
        self._tokenizer = tokenizer
        self._stops = stops
        # A token is at least one byte of a character, which has at most four. The rest is a margin for empty tokens.
        self.max_tail_tokens = 4 * max(len(stop) for stop in stops) + 4
        # Decoders add and drop blanks between tokens, so any token may add the final blank of a stop string.
        self._last_characters = None if any(stop[-1].isspace() for stop in stops) else {stop[-1] for stop in stops}
        self._may_end: dict[int, bool] = {}

    def may_end_at(self, token: int) -> bool:
        """True if a stop string may end with this token. The check is cheap and has no false negatives."""
        may_end = self._may_end.get(token)
        if may_end is None:
            text = self._decode([token])
            last = self._last_characters
            may_end = last is None or not text or _REPLACEMENT in text or any(c in last for c in text)
            self._may_end[token] = may_end
        return may_end

    def find(self, token_ids: Sequence[int]) -> str | None:
        """Return the stop string that the last of `token_ids` completes, or None.

        If the token completes several stop strings, the one that ends first is returned.
        """
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
