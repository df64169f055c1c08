"""A batch divided among the ranks of a model, and the share of each rank into micro-batches (passes).

What does not change of a batch in a step is stored once, for all calls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from itertools import accumulate, chain, groupby, pairwise
from typing import Any

import torch
from numpy.typing import NDArray

from skyrl_train.data.batch import LOGPROB_INPUT_FIELDS, TrainBatch, concat_batches, pack
from skyrl_train.learner.worker import MiniBatch

MicroBatchRows = list[list[list[int]]]
"""[part][pass][row]"""
_IDENTITY_FIELDS = ("input_ids", "loss_mask", "offsets", "prompt_lengths", "group_ids", "temperature")
"""What tells one batch from another: what is scored, and how it is divided."""
Store = Callable[[Any], Any]
"""Puts a value where the ranks read it, and returns what to call it by."""


@dataclass(frozen=True)
class ForwardPlan:
    """How a rank makes the arguments of `LearnerWorker.score` of the shards that are stored for its part."""

    micro_batches: list[list[tuple[int, int]]]
    """(shard, place in it) of the sequences of each pass."""
    num_micro_batches: int
    share_prompts: bool

    def build_arguments(self, *shards: TrainBatch) -> tuple[list[TrainBatch], int, bool]:
        return [_picked(shards, one) for one in self.micro_batches], self.num_micro_batches, self.share_prompts


@dataclass(frozen=True)
class UpdatePlan:
    """How a rank makes the argument of `LearnerWorker.update` of a stored shard and of what was found since."""

    sizes: list[int]
    """How many sequences of the shard each pass has, in its order."""
    num_micro_batches: int
    num_loss_tokens: int
    share_prompts: bool
    logprob_indices: list[list[int]] | None
    """See MiniBatch."""

    def build_arguments(self, shard: TrainBatch, found: dict[str, NDArray[Any]]) -> tuple[MiniBatch]:
        whole, ends = shard.with_arrays(found), accumulate(self.sizes, initial=0)
        passes = [whole.select(range(start, stop), copy=False) for start, stop in pairwise(ends)]
        return (
            MiniBatch(passes, self.num_micro_batches, self.num_loss_tokens, self.share_prompts, self.logprob_indices),
        )


@dataclass(frozen=True)
class StoredCall:
    """The arguments of a call, as its rank makes them: `plan.arguments(*values)`."""

    values: Sequence[Any]
    """Stored where all ranks read them."""
    plan: Any


@dataclass(eq=False)
class ShardedMiniBatch:
    """A mini-batch as its update divides it among parts."""

    rows: list[int]
    """Of the batch."""
    micro_batches: MicroBatchRows
    """Rows of the mini-batch."""
    share_prompts: bool
    stored: list[Any] | None = None
    """[part] the rows of its passes, one after the other, without what the update is to find out."""

    def rows_of(self, dp_rank: int) -> list[int]:
        """Those of the mini-batch that are stored for a part, in that order."""
        return [row for one in self.micro_batches[dp_rank] for row in one]


class ShardedBatch:
    """From the scores of a step to its last update token ids and mask stay the same, and so does the routing that is
    known beforehand. They are stored once for each mini-batch and part. A score adds nothing to them, and an update
    what has been found since: log-probs, advantages, weights.

    So a row is scored by the part that updates on it.
    """

    def __init__(
        self,
        batch: TrainBatch,
        mini_batches: Sequence[Sequence[int]],
        data_parallel_size: int,
        limits: MicroBatchLimits,
    ):
        """`mini_batches`: rows. `limits`: of the passes of updates."""
        self._batch = batch.select_logprob_inputs()
        self._data_parallel_size = data_parallel_size
        self.mini_batches: list[ShardedMiniBatch] = []
        loads = [0] * data_parallel_size
        for rows in mini_batches:
            mini_batch = self._batch.select(rows, copy=False)
            share = should_share_prompts(mini_batch, limits)
            passes = split_into_micro_batches(mini_batch, data_parallel_size, limits, share)
            lengths = mini_batch.lengths
            tokens = [int(lengths[list(chain(*of_part))].sum()) for of_part in passes]
            # Or the part that has the longest sequences of each mini-batch would hold up a score of all of them.
            busiest_first = sorted(range(data_parallel_size), key=lambda part: -loads[part])
            least_first = sorted(range(data_parallel_size), key=lambda part: tokens[part])
            given = (
                dict(zip(busiest_first, least_first, strict=True)) if self.mini_batches else range(data_parallel_size)
            )
            loads = [load + tokens[given[part]] for part, load in enumerate(loads)]
            divided = [passes[given[part]] for part in range(data_parallel_size)]
            self.mini_batches.append(ShardedMiniBatch(list(rows), divided, share))

    def has_tokens_of(self, batch: TrainBatch) -> bool:
        """Whether they are of this batch, whatever else is known about it by now."""
        return all(getattr(self._batch, name) is getattr(batch, name) for name in _IDENTITY_FIELDS)

    def has_routing_of(self, batch: TrainBatch) -> bool:
        return self._batch.routing is batch.routing

    def forward_calls(
        self, store: Store, limits: MicroBatchLimits, only: ShardedMiniBatch | None = None
    ) -> tuple[MicroBatchRows, list[StoredCall]]:
        """The passes of a score of the batch, or of one mini-batch, as its rows; and each part's arguments."""
        chosen = self.mini_batches if only is None else [only]
        stored = [self._stored(store, one) for one in chosen]
        batch = self._batch if only is None else self._batch.select(only.rows, copy=False)
        rows = [
            [[one.rows[row] if only is None else row for row in one.rows_of(part)] for one in chosen]
            for part in range(self._data_parallel_size)
        ]
        share = should_share_prompts(batch, limits)
        costs = _Costs(batch, limits, share)
        passes = [_packed(list(chain(*shards)), costs, limits, share) for shards in rows]
        count = max(map(len, passes), default=0)
        arguments = []
        for part, of_part in enumerate(passes):
            place = {row: (shard, at) for shard, one in enumerate(rows[part]) for at, row in enumerate(one)}
            plan = ForwardPlan([[place[row] for row in one] for one in of_part], count, share)
            arguments.append(StoredCall([one[part] for one in stored], plan))
        return passes, arguments

    def update_calls(
        self, store: Store, shards: ShardedMiniBatch, mini_batch: TrainBatch, logprob_rows: Collection[int] = ()
    ) -> list[StoredCall]:
        """Each part's arguments of the update on a mini-batch.

        `mini_batch`: its rows, with what the update reads. `wanted`: those of which log-probs are to be returned.
        """
        stored = self._stored(store, shards)
        tokens = int(mini_batch.num_loss_tokens.sum())
        count = max(map(len, shards.micro_batches))
        arguments = []
        for part, passes in enumerate(shards.micro_batches):
            found = mini_batch.to_arrays(shards.rows_of(part), without=LOGPROB_INPUT_FIELDS)
            places = (
                [[place for place, row in enumerate(one) if row in logprob_rows] for one in passes]
                if logprob_rows
                else None
            )
            plan = UpdatePlan([len(one) for one in passes], count, tokens, shards.share_prompts, places)
            arguments.append(StoredCall([stored[part], store(found)], plan))
        return arguments

    def _stored(self, store: Store, shards: ShardedMiniBatch) -> list[Any]:
        if shards.stored is None:
            rows = [[shards.rows[row] for row in shards.rows_of(part)] for part in range(self._data_parallel_size)]
            shards.stored = [store(self._batch.select(of_part)) for of_part in rows]
        return shards.stored


def _picked(shards: Sequence[TrainBatch], places: Sequence[tuple[int, int]]) -> TrainBatch:
    parts = [
        shards[shard].select([place for _, place in run], copy=False)
        for shard, run in groupby(places, key=lambda one: one[0])
    ]
    return parts[0] if len(parts) == 1 else concat_batches(parts)


# -- ranks and micro-batches -------------------------------------------------------------------------------------------


MIN_SHARED_FRACTION = 1 / 16
"""Running repeated prompts once is worth it if they are at least this share of a batch's tokens."""


@dataclass(frozen=True)
class MicroBatchLimits:
    """The limits of one pass of one rank."""

    sequences: int | None
    """None if `max_tokens_per_microbatch` alone decides."""
    max_tokens_per_microbatch: int | None
    """If given, it decides alone."""
    attention_tokens: int
    """Length at which attention costs as much as the linear layers; used to balance the ranks."""
    share_prompt: bool | None
    """Whether a prompt that several sequences share is run once; None: only if it is worth it (LEAST_SHARED)."""


def should_share_prompts(batch: TrainBatch, limits: MicroBatchLimits) -> bool:
    """Whether equal prompts of adjacent sequences in a pass are run once."""
    if limits.max_tokens_per_microbatch is None and limits.sequences == 1:
        return False  # whatever was configured: a pass of one sequence has nothing to share
    if limits.share_prompt is not None:
        return limits.share_prompt
    repeated = int(batch.shared_prompt_lengths().sum())
    return repeated >= MIN_SHARED_FRACTION * len(batch.input_ids)


def split_into_micro_batches(
    batch: TrainBatch, ranks: int, limits: MicroBatchLimits, share: bool
) -> list[list[list[int]]]:
    """[rank][pass][row]: the sequences with tokens to score, balanced over ranks by cost, longest first.

    With `share`, sequences of one prompt are put into the same pass if possible: each pass runs a prompt once.
    """
    wanted = batch.num_loss_tokens.nonzero().flatten().tolist()
    costs = _Costs(batch, limits, share)
    return [_packed(rows, costs, limits, share) for rows in _balanced(wanted, ranks, costs)]


def _packed(rows: Sequence[int], costs: _Costs, limits: MicroBatchLimits, share: bool) -> list[list[int]]:
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

    def __init__(self, batch: TrainBatch, limits: MicroBatchLimits, share: bool):
        self.lengths: list[int] = batch.lengths.tolist()
        self.sequences = None if limits.max_tokens_per_microbatch else limits.sequences
        self._attention_tokens = limits.attention_tokens
        rows = range(len(batch))
        self.prompts: list[int] = batch.prompt_lengths.tolist()
        # Sequences with the same number share a prompt. Not group_ids: an environment may give each sample its own.
        fresh = batch.shared_prompt_lengths() == 0 if share else torch.ones(len(rows), dtype=torch.bool)
        self.groups: list[int] = fresh.cumsum(0).tolist()

    def units(self, rows: Sequence[int]) -> list[list[int]]:
        """Units of rows that share a prompt: the most expensive unit first, in each the longest row first."""
        found: dict[int, list[int]] = {}
        for row in sorted(rows, key=lambda row: (-self.lengths[row], row)):
            found.setdefault(self.groups[row], []).append(row)
        return sorted(found.values(), key=lambda unit: (-self.unit_cost(unit), unit[0]))

    def unit_cost(self, unit: Sequence[int]) -> float:
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
        for cost, unit in sorted(((costs.unit_cost(unit), unit) for unit in cut), key=lambda one: (-one[0], one[1][0])):
            load, lightest = loads[0]
            heapreplace(loads, (load + cost, lightest))
            shards[lightest] += unit
        slowest, _ = max(loads)
        if best is None or slowest < best[0]:
            best = slowest, [sorted(shard) for shard in shards]
        parts *= 2
    return best[1]
