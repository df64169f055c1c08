"""Assigns sequences to ranks, and to the micro-batches (passes) of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace

import torch

from skyrl_train.data.batch import TrainBatch, pack

LEAST_SHARED = 1 / 16
"""Running repeated prompts once is worth it if they are at least this share of a batch's tokens."""


@dataclass(frozen=True)
class PassLimits:
    """The limits of one pass of one rank."""

    sequences: int | None
    """None if `max_tokens_per_microbatch` alone decides."""
    max_tokens_per_microbatch: int | None
    """If given, it decides alone."""
    attention_tokens: int
    """Length at which attention costs as much as the linear layers; used to balance the ranks."""
    share_prompt: bool | None
    """Whether a prompt that several sequences share is run once; None: only if it is worth it (LEAST_SHARED)."""


def shares_prompts(batch: TrainBatch, limits: PassLimits) -> bool:
    """Whether equal prompts of adjacent sequences in a pass are run once."""
    if limits.max_tokens_per_microbatch is None and limits.sequences == 1:
        return False  # whatever was configured: a pass of one sequence has nothing to share
    if limits.share_prompt is not None:
        return limits.share_prompt
    repeated = int(batch.repeated_prompts().sum())
    return repeated >= LEAST_SHARED * len(batch.input_ids)


def micro_batches(batch: TrainBatch, ranks: int, limits: PassLimits, share: bool) -> list[list[list[int]]]:
    """[rank][pass][row]: the sequences with tokens to score, balanced over ranks by cost, longest first.

    With `share`, sequences of one prompt are put into the same pass if possible: each pass runs a prompt once.
    """
    wanted = batch.loss_tokens.nonzero().flatten().tolist()
    costs = _Costs(batch, limits, share)
    return [_packed(rows, costs, limits, share) for rows in _balanced(wanted, ranks, costs)]


def passes_of(
    batch: TrainBatch, rows_of_rank: Sequence[Sequence[int]], limits: PassLimits, share: bool
) -> list[list[list[int]]]:
    """The same for sequences that have their ranks already."""
    costs = _Costs(batch, limits, share)
    return [_packed(rows, costs, limits, share) for rows in rows_of_rank]


def _packed(rows: Sequence[int], costs: _Costs, limits: PassLimits, share: bool) -> list[list[int]]:
    ordered = [row for unit in costs.units(rows) for row in unit]
    lengths = [costs.lengths[row] for row in ordered]
    repeated = [
        costs.prompts[row] if at and share and costs.groups[row] == costs.groups[ordered[at - 1]] else 0
        for at, row in enumerate(ordered)
    ]
    return [
        [ordered[at] for at in one]
        for one in pack(lengths, costs.sequences, limits.max_tokens_per_microbatch, repeated)
    ]


class _Costs:
    """Costs of sequences; the unit is the time that one token takes in the linear layers."""

    def __init__(self, batch: TrainBatch, limits: PassLimits, share: bool):
        self.lengths: list[int] = batch.lengths.tolist()
        self.sequences = None if limits.max_tokens_per_microbatch else limits.sequences
        self._attention_tokens = limits.attention_tokens
        rows = range(len(batch))
        self.prompts: list[int] = batch.prompt_lengths.tolist()
        # Sequences with the same number share a prompt. Not group_ids: an environment may give each sample its own.
        fresh = batch.repeated_prompts() == 0 if share else torch.ones(len(rows), dtype=torch.bool)
        self.groups: list[int] = fresh.cumsum(0).tolist()

    def units(self, rows: Sequence[int]) -> list[list[int]]:
        """Units of rows that share a prompt: the most expensive unit first, in each the longest row first."""
        found: dict[int, list[int]] = {}
        for row in sorted(rows, key=lambda row: (-self.lengths[row], row)):
            found.setdefault(self.groups[row], []).append(row)
        return sorted(found.values(), key=lambda unit: (-self.of(unit), unit[0]))

    def of(self, unit: Sequence[int]) -> float:
        """The cost of rows that share a prompt, which every pass runs once."""
        prompt = self.prompts[unit[0]] if len(unit) > 1 else 0
        own = (self._of_tokens(prompt, self.lengths[row]) for row in unit)
        passes = 1 if self.sequences is None else -(-len(unit) // self.sequences)
        return sum(own) + passes * self._of_tokens(0, prompt)

    def _of_tokens(self, start: int, stop: int) -> float:
        """The cost of tokens [start, stop) of one sequence."""
        return (stop - start) + (stop**2 - start**2) / self._attention_tokens


def _balanced(rows: Sequence[int], ranks: int, costs: _Costs) -> list[list[int]]:
    """The rows of each rank. Units are split into the number of parts that minimises the slowest rank's cost."""
    if ranks == 1:
        return [list(rows)]
    units = costs.units(rows)
    best: tuple[float, list[list[int]]] | None = None
    parts = 1
    while best is None or parts <= max(map(len, units), default=0):
        cut = [unit[place::parts] for unit in units for place in range(min(parts, len(unit)))]
        loads, shards = [(0.0, rank) for rank in range(ranks)], [list[int]() for _ in range(ranks)]
        for cost, unit in sorted(((costs.of(unit), unit) for unit in cut), key=lambda one: (-one[0], one[1][0])):
            load, lightest = loads[0]
            heapreplace(loads, (load + cost, lightest))
            shards[lightest] += unit
        slowest, _ = max(loads)
        if best is None or slowest < best[0]:
            best = slowest, [sorted(shard) for shard in shards]
        parts *= 2
    return best[1]
