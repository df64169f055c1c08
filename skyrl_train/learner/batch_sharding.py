"""Division of a batch among the data-parallel ranks of a model, and of each rank's share into micro-batches.

Tensors that do not change within a step are stored once, for all calls.
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
"""Row indices by data-parallel rank and micro-batch: [dp_rank][micro_batch][row]."""
_IDENTITY_FIELDS = ("input_ids", "loss_mask", "offsets", "prompt_lengths", "group_ids", "temperature")
"""Fields that identify a batch: the tokens of its sequences, and everything that determines its division."""
Store = Callable[[Any], Any]
"""Puts a value into the object store for the ranks, and returns a reference to it."""


@dataclass(frozen=True)
class ForwardPlan:
    """A plan for the arguments of `LearnerWorker.forward`, from the shards that are stored for a rank."""

    micro_batches: list[list[tuple[int, int]]]
    """(index of the shard, index in the shard) of the sequences of each micro-batch."""
    num_micro_batches: int
    share_prompts: bool

    def build_arguments(self, *shards: TrainBatch) -> tuple[list[TrainBatch], int, bool]:
        """Return the micro-batches and the other arguments of `LearnerWorker.forward`.

        Args:
            shards: The rank's shard of each mini-batch that is scored.
        """
        micro_batches = [_select_sequences(shards, sequences) for sequences in self.micro_batches]
        return micro_batches, self.num_micro_batches, self.share_prompts


@dataclass(frozen=True)
class UpdatePlan:
    """A plan for the argument of `LearnerWorker.update`, from a stored shard and the tensors computed since then."""

    sizes: list[int]
    """Number of sequences of the shard in each micro-batch, in order."""
    num_micro_batches: int
    num_loss_tokens: int
    share_prompts: bool
    logprob_indices: list[list[int]] | None
    is_last: bool
    """The fields of the rank's `MiniBatch` of these names."""

    def build_arguments(self, shard: TrainBatch, computed: dict[str, NDArray[Any]]) -> tuple[MiniBatch]:
        """Return the mini-batch of the rank.

        Args:
            shard: The rank's sequences of the mini-batch.
            computed: Fields of the batch that were computed after the shard was stored, such as advantages.
        """
        complete, ends = shard.with_arrays(computed), accumulate(self.sizes, initial=0)
        passes = [complete.select(range(start, stop), copy=False) for start, stop in pairwise(ends)]
        options = self.share_prompts, self.logprob_indices, self.is_last
        return (MiniBatch(passes, self.num_micro_batches, self.num_loss_tokens, *options),)


@dataclass(frozen=True)
class StoredCall:
    """The arguments of a call as references; the rank calls `plan.build_arguments(*values)` to get the arguments."""

    values: Sequence[Any]
    """References to values in the object store."""
    plan: ForwardPlan | UpdatePlan


@dataclass(eq=False)
class ShardedMiniBatch:
    """A mini-batch and its division among the data-parallel ranks for its update."""

    rows: list[int]
    """Rows of the batch that form the mini-batch."""
    micro_batches: MicroBatchRows
    """Row indices within the mini-batch."""
    share_prompts: bool
    stored: list[Any] | None = None
    """Per data-parallel rank, a reference to the shard with the rows of its micro-batches in order; None if not stored.
    The shard lacks the tensors that are computed for the update."""

    def rows_of(self, dp_rank: int) -> list[int]:
        """Return the rows in a rank's shard as indices within the mini-batch, in the order of the shard."""
        return [row for rows in self.micro_batches[dp_rank] for row in rows]


class ShardedBatch:
    """A batch that is sharded over the data-parallel ranks, with its tensors in the object store.

    Token ids, loss mask and replayed routing do not change within a step. They are stored once per mini-batch and rank;
    updates send only what was computed since: log-probs, advantages, loss weights. Each row is scored by the rank that
    updates on it.
    """

    def __init__(
        self,
        batch: TrainBatch,
        mini_batches: Sequence[Sequence[int]],
        data_parallel_size: int,
        limits: MicroBatchLimits,
    ):
        """Divide a batch; tensors are stored by the first call that needs them.

        Args:
            batch: The batch of the step.
            mini_batches: The rows of each mini-batch.
            data_parallel_size: Number of data-parallel ranks.
            limits: The limits of the micro-batches of updates.
        """
        self._batch = batch.select_logprob_inputs()
        self._data_parallel_size = data_parallel_size
        self.mini_batches: list[ShardedMiniBatch] = []
        loads = [0] * data_parallel_size
        for rows in mini_batches:
            mini_batch = self._batch.select(rows, copy=False)
            share_prompts = should_share_prompts(mini_batch, limits)
            passes = split_into_micro_batches(mini_batch, data_parallel_size, limits, share_prompts)
            lengths = mini_batch.lengths
            tokens = [int(lengths[list(chain(*rank_passes))].sum()) for rank_passes in passes]
            # Otherwise one rank could get the longest sequences of every mini-batch and delay a forward pass of all.
            busiest_first = sorted(range(data_parallel_size), key=lambda dp_rank: -loads[dp_rank])
            smallest_first = sorted(range(data_parallel_size), key=lambda share: tokens[share])
            assigned = (
                dict(zip(busiest_first, smallest_first, strict=True))
                if self.mini_batches
                else range(data_parallel_size)
            )
            loads = [load + tokens[assigned[dp_rank]] for dp_rank, load in enumerate(loads)]
            micro_batches = [passes[assigned[dp_rank]] for dp_rank in range(data_parallel_size)]
            self.mini_batches.append(ShardedMiniBatch(list(rows), micro_batches, share_prompts))

    def has_tokens_of(self, batch: TrainBatch) -> bool:
        """True if the shards are those of `batch`. Tensors that were added to the batch since do not matter."""
        return all(getattr(self._batch, name) is getattr(batch, name) for name in _IDENTITY_FIELDS)

    def has_routing_of(self, batch: TrainBatch) -> bool:
        """True if the shards have the routing of `batch`, or neither has any."""
        return self._batch.routing is batch.routing

    def forward_calls(
        self, store: Store, limits: MicroBatchLimits, only: ShardedMiniBatch | None = None
    ) -> tuple[MicroBatchRows, list[StoredCall]]:
        """Plan a forward pass, and store the shards that are not stored yet. Blocks while it stores them.

        Args:
            store: Puts a shard into the object store.
            limits: The limits of the micro-batches of the forward pass.
            only: The mini-batch to run; None for the whole batch.

        Returns:
            The rows of the batch, or of the mini-batch, in each micro-batch, and the call of each data-parallel rank.
        """
        mini_batches = self.mini_batches if only is None else [only]
        stored = [self._store_shards(store, mini_batch) for mini_batch in mini_batches]
        batch = self._batch if only is None else self._batch.select(only.rows, copy=False)
        rows = [
            [
                [mini_batch.rows[row] if only is None else row for row in mini_batch.rows_of(dp_rank)]
                for mini_batch in mini_batches
            ]
            for dp_rank in range(self._data_parallel_size)
        ]
        share_prompts = should_share_prompts(batch, limits)
        costs = _Costs(batch, limits, share_prompts)
        passes = [_pack_rows(list(chain(*shards)), costs, limits, share_prompts) for shards in rows]
        count = max(map(len, passes), default=0)
        calls = []
        for dp_rank, rank_passes in enumerate(passes):
            position = {
                row: (shard, index)
                for shard, shard_rows in enumerate(rows[dp_rank])
                for index, row in enumerate(shard_rows)
            }
            plan = ForwardPlan([[position[row] for row in rows] for rows in rank_passes], count, share_prompts)
            calls.append(StoredCall([shards[dp_rank] for shards in stored], plan))
        return passes, calls

    def update_calls(
        self,
        store: Store,
        shards: ShardedMiniBatch,
        mini_batch: TrainBatch,
        logprob_rows: Collection[int] = (),
        *,
        is_last: bool = True,
    ) -> list[StoredCall]:
        """Store the tensors that an update on a mini-batch needs, and return the call of each data-parallel rank.

        Args:
            store: Puts a value into the object store. It blocks.
            shards: The mini-batch.
            mini_batch: The rows of the mini-batch with all fields that the update reads.
            logprob_rows: Rows of the mini-batch whose log-probs the update returns.
            is_last: True for the model's last optimizer step of a training step.
        """
        stored = self._store_shards(store, shards)
        tokens = int(mini_batch.num_loss_tokens.sum())
        count = max(map(len, shards.micro_batches))
        calls = []
        for dp_rank, passes in enumerate(shards.micro_batches):
            computed = mini_batch.to_arrays(shards.rows_of(dp_rank), without=LOGPROB_INPUT_FIELDS)
            indices = (
                [[index for index, row in enumerate(rows) if row in logprob_rows] for rows in passes]
                if logprob_rows
                else None
            )
            sizes = [len(rows) for rows in passes]
            plan = UpdatePlan(sizes, count, tokens, shards.share_prompts, indices, is_last)
            calls.append(StoredCall([stored[dp_rank], store(computed)], plan))
        return calls

    def _store_shards(self, store: Store, mini_batch: ShardedMiniBatch) -> list[Any]:
        if mini_batch.stored is None:
            rows_by_rank = [
                [mini_batch.rows[row] for row in mini_batch.rows_of(dp_rank)]
                for dp_rank in range(self._data_parallel_size)
            ]
            mini_batch.stored = [store(self._batch.select(rows)) for rows in rows_by_rank]
        return mini_batch.stored


def _select_sequences(shards: Sequence[TrainBatch], sequences: Sequence[tuple[int, int]]) -> TrainBatch:
    parts = [
        shards[shard].select([index for _, index in run], copy=False)
        for shard, run in groupby(sequences, key=lambda sequence: sequence[0])
    ]
    return parts[0] if len(parts) == 1 else concat_batches(parts)


# -- ranks and micro-batches -------------------------------------------------------------------------------------------


MIN_SHARED_FRACTION = 1 / 16
"""Prompts are shared if repeated prompts are at least this fraction of a batch's tokens."""


@dataclass(frozen=True)
class MicroBatchLimits:
    """The limits of one micro-batch of one rank."""

    sequences: int | None
    """Maximum number of sequences; ignored if `max_tokens_per_microbatch` is set."""
    max_tokens_per_microbatch: int | None
    """Maximum number of tokens; None for no limit."""
    attention_tokens: int
    """Length at which attention costs as much as the linear layers; used to balance the ranks."""
    share_prompt: bool | None
    """True if a prompt that adjacent sequences share is computed once; None if MIN_SHARED_FRACTION decides."""


def should_share_prompts(batch: TrainBatch, limits: MicroBatchLimits) -> bool:
    """True if equal prompts of adjacent sequences in a micro-batch are computed once."""
    if limits.max_tokens_per_microbatch is None and limits.sequences == 1:
        return False  # regardless of `share_prompt`: a micro-batch of one sequence has nothing to share
    if limits.share_prompt is not None:
        return limits.share_prompt
    repeated = int(batch.shared_prompt_lengths().sum())
    return repeated >= MIN_SHARED_FRACTION * len(batch.input_ids)


def split_into_micro_batches(
    batch: TrainBatch, ranks: int, limits: MicroBatchLimits, share_prompts: bool
) -> MicroBatchRows:
    """Divide the sequences with tokens in the loss among ranks, balanced by cost, and into micro-batches.

    Args:
        batch: The batch. Sequences without tokens in the loss mask are left out.
        ranks: Number of data-parallel ranks.
        limits: The limits of a micro-batch. A sequence that is longer has its own micro-batch.
        share_prompts: True if sequences of the same prompt should be in the same micro-batch where possible.

    Returns:
        Row indices [rank][micro_batch][row], with the most expensive sequences first.
    """
    scored_rows = batch.num_loss_tokens.nonzero().flatten().tolist()
    costs = _Costs(batch, limits, share_prompts)
    return [_pack_rows(rows, costs, limits, share_prompts) for rows in _balance(scored_rows, ranks, costs)]


def _pack_rows(rows: Sequence[int], costs: _Costs, limits: MicroBatchLimits, share_prompts: bool) -> list[list[int]]:
    ordered = [row for unit in costs.units(rows) for row in unit]
    lengths = [costs.lengths[row] for row in ordered]
    repeated = [
        costs.prompts[row]
        if index and share_prompts and costs.groups[row] == costs.groups[ordered[index - 1]]
        else 0
        for index, row in enumerate(ordered)
    ]  # fmt: skip
    return [
        [ordered[index] for index in indices]
        for indices in pack(lengths, costs.sequences, limits.max_tokens_per_microbatch, repeated)
    ]


class _Costs:
    """Estimated costs of sequences, in units of the time that one token takes in the linear layers."""

    def __init__(self, batch: TrainBatch, limits: MicroBatchLimits, share: bool):
        self.lengths: list[int] = batch.lengths.tolist()
        self.sequences = None if limits.max_tokens_per_microbatch else limits.sequences
        self._attention_tokens = limits.attention_tokens
        rows = range(len(batch))
        self.prompts: list[int] = batch.prompt_lengths.tolist()
        # Sequences with the same number share a prompt. group_ids do not show that, as an environment may give each
        # sample its own prompt.
        fresh = batch.shared_prompt_lengths() == 0 if share else torch.ones(len(rows), dtype=torch.bool)
        self.groups: list[int] = fresh.cumsum(0).tolist()

    def units(self, rows: Sequence[int]) -> list[list[int]]:
        """Return units of rows that share a prompt, the most expensive unit and the longest row of each unit first."""
        units: dict[int, list[int]] = {}
        for row in sorted(rows, key=lambda row: (-self.lengths[row], row)):
            units.setdefault(self.groups[row], []).append(row)
        return sorted(units.values(), key=lambda unit: (-self.unit_cost(unit), unit[0]))

    def unit_cost(self, unit: Sequence[int]) -> float:
        """Return the cost of rows that share a prompt, which each micro-batch computes once."""
        prompt = self.prompts[unit[0]] if len(unit) > 1 else 0
        own = (self._token_cost(prompt, self.lengths[row]) for row in unit)
        passes = 1 if self.sequences is None else -(-len(unit) // self.sequences)
        return sum(own) + passes * self._token_cost(0, prompt)

    def _token_cost(self, start: int, stop: int) -> float:
        """Return the cost of tokens [start, stop) of one sequence."""
        return (stop - start) + (stop**2 - start**2) / self._attention_tokens


def _balance(rows: Sequence[int], ranks: int, costs: _Costs) -> list[list[int]]:
    """Return the rows of each rank, with units split into the number of parts that minimizes the largest load."""
    if ranks == 1:
        return [list(rows)]
    units = costs.units(rows)
    best: tuple[float, list[list[int]]] | None = None
    parts = 1
    while best is None or parts <= max(map(len, units), default=0):
        pieces = [unit[index::parts] for unit in units for index in range(min(parts, len(unit)))]
        loads, shards = [(0.0, rank) for rank in range(ranks)], [list[int]() for _ in range(ranks)]
        weighed = [(costs.unit_cost(piece), piece) for piece in pieces]
        for cost, unit in sorted(weighed, key=lambda item: (-item[0], item[1][0])):
            load, lightest = loads[0]
            heapreplace(loads, (load + cost, lightest))
            shards[lightest] += unit
        slowest, _ = max(loads)
        if best is None or slowest < best[0]:
            best = slowest, [sorted(shard) for shard in shards]
        parts *= 2
    return best[1]
