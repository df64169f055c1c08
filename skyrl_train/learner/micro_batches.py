"""Which rank runs which sequences, and which of them go through the model together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from skyrl_train.data.batch import TrainBatch, pack

LEAST_SHARED = 1 / 16
"""Share of a batch's tokens that must be repeated prompts for running them once to be worth it."""


@dataclass(frozen=True)
class PassLimits:
    """What one pass of one rank may hold."""

    sequences: int | None
    """None where tokens alone decide."""
    tokens: int | None
    """Decides alone where given."""
    attention_tokens: int
    """Length at which attention costs as much as the linear layers: how ranks are balanced."""
    share_prompt: bool | None
    """Whether prompts that sequences have in common go through the model once; None: where it is worth it."""


def shares_prompts(batch: TrainBatch, limits: PassLimits) -> bool:
    """Whether equal prompts of neighbours in a pass are to be run once."""
    if limits.tokens is None and limits.sequences == 1:
        return False  # whatever was asked for: a pass of one sequence has none beside it
    if limits.share_prompt is not None:
        return limits.share_prompt
    repeated = int(batch.repeated_prompts().sum())
    return repeated >= LEAST_SHARED * len(batch.input_ids)


def micro_batches(batch: TrainBatch, ranks: int, limits: PassLimits, share: bool) -> list[list[list[int]]]:
    """[rank][pass][row]: sequences with something to score, balanced over ranks by cost, longest first.

    With `share` sequences of one prompt stay together where they can: a prompt is run once for each pass it is in.
    """
    wanted = (batch.per_sequence_sum(batch.loss_mask.long()) > 0).nonzero().flatten().tolist()
    sequences = None if limits.tokens else limits.sequences
    costs = _Costs(batch, limits.attention_tokens, share, sequences)
    result = []
    for rows in _balanced(wanted, ranks, costs):
        ordered = [row for unit in costs.units(rows) for row in unit]
        lengths = [costs.lengths[row] for row in ordered]
        repeated = [
            costs.prompts[row] if at and share and costs.groups[row] == costs.groups[ordered[at - 1]] else 0
            for at, row in enumerate(ordered)
        ]
        result.append([[ordered[at] for at in one] for one in pack(lengths, sequences, limits.tokens, repeated)])
    return result


class _Costs:
    """What sequences cost, in the time of a token in the linear layers."""

    def __init__(self, batch: TrainBatch, attention_tokens: int, share: bool, sequences: int | None):
        self.lengths: list[int] = batch.lengths.tolist()
        self._sequences = sequences
        self._attention_tokens = attention_tokens
        rows = range(len(batch))
        self.prompts: list[int] = batch.prompt_lengths.tolist()
        # Sequences of one number have one prompt. Not group_ids: an environment may give each sample its own.
        fresh = batch.repeated_prompts() == 0 if share else torch.ones(len(rows), dtype=torch.bool)
        self.groups: list[int] = fresh.cumsum(0).tolist()

    def units(self, rows: Sequence[int]) -> list[list[int]]:
        """Rows that share a prompt, longest first, in units of which the most expensive comes first."""
        found: dict[int, list[int]] = {}
        for row in sorted(rows, key=lambda row: (-self.lengths[row], row)):
            found.setdefault(self.groups[row], []).append(row)
        return sorted(found.values(), key=lambda unit: (-self.of(unit), unit[0]))

    def of(self, unit: Sequence[int]) -> float:
        """Of rows that share a prompt, which every pass runs once."""
        prompt = self.prompts[unit[0]] if len(unit) > 1 else 0
        own = (self._of_tokens(prompt, self.lengths[row]) for row in unit)
        passes = 1 if self._sequences is None else -(-len(unit) // self._sequences)
        return sum(own) + passes * self._of_tokens(0, prompt)

    def _of_tokens(self, start: int, stop: int) -> float:
        """Tokens start to stop of one sequence."""
        return (stop - start) + (stop**2 - start**2) / self._attention_tokens


def _balanced(rows: Sequence[int], ranks: int, costs: _Costs) -> list[list[int]]:
    """Rows of each rank. Units are cut into as many parts as make the slowest rank fastest."""
    if ranks == 1:
        return [list(rows)]
    units = costs.units(rows)
    best: tuple[float, list[list[int]]] | None = None
    parts = 1
    while best is None or parts <= max(map(len, units), default=0):
        cut = [unit[place::parts] for unit in units for place in range(min(parts, len(unit)))]
        loads, shards = [0.0] * ranks, [[] for _ in range(ranks)]  # type: tuple[list[float], list[list[int]]]
        for unit in sorted(cut, key=lambda unit: (-costs.of(unit), unit[0])):
            lightest = loads.index(min(loads))
            loads[lightest] += costs.of(unit)
            shards[lightest] += unit
        if best is None or max(loads) < best[0]:
            best = max(loads), [sorted(shard) for shard in shards]
        parts *= 2
    return best[1]
