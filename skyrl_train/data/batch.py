"""The ragged training batch: sequences concatenated without padding.

Legend: T tokens of all sequences (prompt and response), B sequences.
Alignment: value i of a token-level tensor belongs to token i. `logprobs[i]` is the log-probability of input_ids[i]
given the preceding tokens of its own sequence; a sequence's first token has none (mask 0, value 0).
"""

from __future__ import annotations

import math
import warnings
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from skyrl_train.data.token_arrays import LogProbs, Span, Tokens, lazy_zeros, trim_memory
from skyrl_train.data.trajectory import OK, Trajectory, TrajectoryGroup

TOKEN_FIELDS = (
    "input_ids",
    "loss_mask",
    "rollout_logprobs",
    "old_logprobs",
    "ref_logprobs",
    "values",
    "advantages",
    "returns",
    "token_rewards",
    "loss_weights",
    "importance_weights",
    "selected",
    "routing",
)
SEQUENCE_FIELDS = (
    "prompt_lengths",
    "group_ids",
    "rewards",
    "temperature",
    "status",
    "min_versions",
    "max_versions",
    "episode_ids",
    "sequence_advantages",
    "sequence_weights",
)
_UPDATE_FIELDS = {
    "policy": {"input_ids", "loss_mask", "rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages"}
    | {"loss_weights", "importance_weights", "selected", "routing"},
    "critic": {"input_ids", "loss_mask", "values", "returns", "loss_weights"},
}
"""The token fields that the updates of a model read."""
LOGPROB_INPUT_FIELDS = ("input_ids", "loss_mask", "routing")
"""Those that a model reads to score tokens."""


@dataclass(frozen=True)
class TrainBatch:
    """Token-level tensors are [T], sequence-level ones [B]; optional tensors are None until they are computed.

    Example: sequences (5 6 | 7 2) and (5 6 | 8): input_ids=[5,6,7,2,5,6,8], loss_mask=[0,0,1,1,0,0,1],
    offsets=[0,4,7], prompt_lengths=[2,2].
    """

    input_ids: Tensor
    """[T] int32; torch indexes with `.long()`."""
    loss_mask: Tensor
    """[T] bool: sampled tokens of sequences that did not fail."""
    offsets: Tensor
    """[B+1] int64: sequence b consists of tokens offsets[b]:offsets[b+1]."""
    prompt_lengths: Tensor
    """[B] int64"""
    group_ids: Tensor
    """[B] int64: equal for the samples of one prompt."""
    rewards: Tensor
    """[B] float32"""
    temperature: Tensor
    """[B] float32: the sampling temperature; log-probs are computed at the same temperature."""
    status: Tensor
    """[B] bool: False for failed sequences, whose loss_mask is all 0."""
    min_versions: Tensor
    """[B] int64: weight version of the oldest sampled token."""
    max_versions: Tensor
    """[B] int64"""
    rollout_logprobs: Tensor | None = None
    """[T] float32 nats: the engine's, at `temperature`, before truncation by top-p or top-k."""
    old_logprobs: Tensor | None = None
    """[T] float32 nats: the trainer's, before this step's first update."""
    ref_logprobs: Tensor | None = None
    """[T] float32 nats"""
    values: Tensor | None = None
    """[T] float32: the critic's value of the state before each token."""
    advantages: Tensor | None = None
    """[T] float32, of an estimator that tells one for each token; see `token_advantages`."""
    returns: Tensor | None = None
    """[T] float32: the critic's targets."""
    token_rewards: Tensor | None = None
    """[T] float32: a turn's reward on the last token sampled in it; sums to `rewards` over a sequence. None if nothing
    reads them."""
    loss_weights: Tensor | None = None
    """[T] float64: a token's weight in the loss of its mini-batch, of a reduction that tells one for each token (see
    algorithms/reductions.py)."""
    importance_weights: Tensor | None = None
    """[T] float32: factor of an off-policy correction on the policy loss."""
    selected: Tensor | None = None
    """[T] bool: tokens that a loss treats differently (see algorithms/token_selection.py)."""
    routing: Tensor | None = None
    """[T, L, k] int16: the experts that a token's hidden state goes to in each layer that has some; -1 where the router
    chooses."""
    episode_ids: Tensor | None = None
    """[B] int64: equal for the sequences of one episode. Such an episode is a single sample: rewards, advantages,
    statistics and reductions count it once. None: every sequence is an episode."""
    sequence_advantages: Tensor | None = None
    """[B] float32: the advantage that all tokens of a sequence have which count."""
    sequence_weights: Tensor | None = None
    """[B] float64: the weight in the loss of its mini-batch that all tokens of a sequence have which count."""

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def lengths(self) -> Tensor:
        """[B] number of tokens of each sequence, including the prompt."""
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def sequence_ids(self) -> Tensor:
        """[T] the sequence to which each token belongs."""
        return torch.repeat_interleave(torch.arange(len(self), device=self.offsets.device), self.lengths)

    @property
    def position_ids(self) -> Tensor:
        """[T] int64, restarting at 0 in every sequence."""
        return torch.arange(len(self.input_ids), device=self.offsets.device) - self.expand_to_tokens(self.offsets[:-1])

    @property
    def num_loss_tokens(self) -> Tensor:
        """[B] int64: how many tokens of each sequence are in the loss mask."""
        mask = self.loss_mask.cpu().numpy()
        counts = [np.count_nonzero(mask[start:stop]) for start, stop in pairwise(self.offsets.tolist())]
        return torch.tensor(counts, dtype=torch.int64, device=self.offsets.device)

    @property
    def token_advantages(self) -> Tensor | None:
        """[T] float32: the advantage of each token, 0 on those that do not count; None before they are known."""
        return self.advantages if self.advantages is not None else self._expand_masked(self.sequence_advantages)

    @property
    def token_weights(self) -> Tensor | None:
        """[T] float64: the weight of each token in the loss of its mini-batch; None before they are known."""
        return self.loss_weights if self.loss_weights is not None else self._expand_masked(self.sequence_weights)

    def _expand_masked(self, per_sequence: Tensor | None) -> Tensor | None:
        """[B] -> [T], 0 on tokens that do not count."""
        return None if per_sequence is None else torch.where(self.loss_mask, self.expand_to_tokens(per_sequence), 0.0)

    @property
    def sequence_to_episode(self) -> Tensor:
        """[B] int64, 0..E-1: the samples of this batch, its sequences or groups of them that belong to one episode."""
        if self.episode_ids is None:
            return torch.arange(len(self), device=self.offsets.device)
        found: Tensor = self.episode_ids.unique(return_inverse=True)[1]
        return found

    @property
    def episodes(self) -> EpisodeIndex:
        """The samples of this batch, and which of its tokens are theirs."""
        sequence_to_episode = self.sequence_to_episode
        count = len(self) if self.episode_ids is None else int(sequence_to_episode.max()) + 1 if len(self) else 0
        return EpisodeIndex(sequence_to_episode, count, self)

    def expand_to_tokens(self, per_sequence: Tensor) -> Tensor:
        """[B] -> [T], each sequence's value on all of its tokens."""
        known = per_sequence.device.type == "cpu" and per_sequence.dtype != torch.bfloat16
        if known and not per_sequence.requires_grad:  # torch makes an index of all tokens
            return torch.from_numpy(np.repeat(per_sequence.numpy(), self.lengths.numpy()))
        return torch.repeat_interleave(per_sequence, self.lengths, output_size=len(self.input_ids))

    def sum_per_sequence(self, per_token: Tensor) -> Tensor:
        """[T] -> [B], summed within sequences."""
        zeros = torch.zeros(len(self), dtype=per_token.dtype, device=per_token.device)
        return zeros.index_add(0, self.sequence_ids, per_token)

    def select(self, rows: Sequence[int] | Tensor, *, copy: bool = True) -> TrainBatch:
        """The given sequences in the given order.

        Without `copy`, tokens of consecutive ones are views, for use in this process: sent to another, a view takes all
        of its batch along.
        """
        rows = torch.as_tensor(rows, dtype=torch.int64)
        lengths = self.offsets[rows + 1] - self.offsets[rows]  # of these alone: each rank's part is made so
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return TrainBatch(offsets=offsets, **self._select_fields(rows, copy))

    def to_arrays(self, rows: Sequence[int], without: Collection[str]) -> dict[str, NDArray[Any]]:
        """What there is of the given sequences in the given order, by field, but for some fields: copies."""
        picked = self._select_fields(torch.as_tensor(rows, dtype=torch.int64), True, without)
        return {name: value.numpy() for name, value in picked.items()}

    def with_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> TrainBatch:
        """The same sequences with what `arrays` has returned for them in another process."""
        return replace(self, **_tensors(arrays))

    def _select_fields(self, rows: Tensor, copy: bool, without: Collection[str] = ()) -> dict[str, Tensor]:
        """By field, those that there are; `offsets` are not these rows' own."""
        stretches = _merge_spans(self.offsets[rows].tolist(), self.offsets[rows + 1].tolist())
        return {
            name: _take_spans(value, stretches, copy) if name in TOKEN_FIELDS else value[rows]
            for name, value in self._tensors().items()
            if name != "offsets" and name not in without
        }

    def with_tokens(self, **tensors: Tensor | None) -> TrainBatch:
        """The same sequences with token-level tensors added or replaced.

        Raises ValueError for another name or length.
        """
        for name, tensor in tensors.items():
            if name not in TOKEN_FIELDS or (tensor is not None and len(tensor) != len(self.input_ids)):
                raise ValueError(f"{name}: must be one of {', '.join(TOKEN_FIELDS)}, for {len(self.input_ids)} tokens.")
        return replace(self, **tensors)  # type: ignore[arg-type]

    def select_logprob_inputs(self) -> TrainBatch:
        """The same sequences without what nobody reads who runs a model over their tokens."""
        return self.with_tokens(**{name: None for name in TOKEN_FIELDS if name not in LOGPROB_INPUT_FIELDS})

    def select_update_inputs(self, role: str) -> TrainBatch:
        """The same sequences without what the updates of that model, "policy" or "critic", do not read."""
        return self.with_tokens(**{name: None for name in TOKEN_FIELDS if name not in _UPDATE_FIELDS[role]})

    def to(self, device: torch.device | str) -> TrainBatch:
        """A copy on that device, also if they are there already: what another process sent may be read-only memory."""
        there = {name: value.to(device, copy=True) for name, value in self._tensors().items()}
        return TrainBatch(**there)

    def __reduce__(self) -> tuple[Any, ...]:
        """As arrays: Ray puts those of a whole batch into shared memory as they are, where a rank reads them."""
        return _of_arrays, ({name: value.numpy() for name, value in self._tensors().items()},)

    def _tensors(self) -> dict[str, Tensor]:
        """By name, those that there are."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}

    def shared_prompt_lengths(self) -> Tensor:
        """[B] length of the prompt that a sequence shares with the sequence before it, or 0 if their prompts differ.

        Prompts whose tokens went to different experts are different ones.
        """
        ends = (self.offsets[:-1] + self.prompt_lengths).tolist()
        places = [slice(start, end) for start, end in zip(self.offsets.tolist(), ends, strict=False)]
        read = [self.input_ids] if self.routing is None else [self.input_ids, self.routing]
        same = [False, *(all(torch.equal(x[one], x[other]) for x in read) for one, other in pairwise(places))]
        return torch.where(torch.tensor(same[: len(self)]), self.prompt_lengths, 0)

    def split_micro_batches(
        self, *, max_sequences: int | None = None, token_budget: int | None = None
    ) -> list[TrainBatch]:
        """Consecutive micro-batches within both bounds; a sequence longer than the budget gets its own micro-batch."""
        return [self.select(rows) for rows in pack(self.lengths.tolist(), max_sequences, token_budget)]

    def partition(self, ranks: int, cost: Tensor | None = None) -> list[list[int]]:
        """Rows of each rank, balanced by `cost` [B] (default: tokens): the most expensive first, to the lightest rank.

        If there are fewer sequences than ranks, some ranks get none.
        """
        weights = (self.lengths if cost is None else cost).tolist()
        load = [0.0] * ranks
        rows: list[list[int]] = [[] for _ in range(ranks)]
        for row in sorted(range(len(self)), key=lambda r: (-weights[r], r)):
            lightest = load.index(min(load))
            load[lightest] += weights[row]
            rows[lightest].append(row)
        return [sorted(of_rank) for of_rank in rows]

    def padded(self, per_token: Tensor, fill: float = 0.0) -> Tensor:
        """[T] -> (B, longest sequence), right-padded with `fill`, for code that needs a rectangle."""
        width = int(self.lengths.max()) if len(self) else 0
        rectangle = per_token.new_full((len(self), width), fill)
        rectangle[self.sequence_ids, self.position_ids] = per_token
        return rectangle


def _of_arrays(arrays: Mapping[str, NDArray[Any]]) -> TrainBatch:
    return TrainBatch(**_tensors(arrays))


def _tensors(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nobody writes to a batch
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


@dataclass(frozen=True)
class EpisodeIndex:
    """Maps the B sequences and T tokens of a batch to its E samples."""

    sequence_to_episode: Tensor
    """[B] int64, 0..E-1"""
    num_episodes: int
    batch: TrainBatch

    @cached_property
    def token_to_episode(self) -> Tensor:
        """[T] int64, 0..E-1"""
        return self.batch.expand_to_tokens(self.sequence_to_episode)

    @property
    def num_loss_tokens(self) -> Tensor:
        """[E] int64: how many tokens of each sample are in the loss mask."""
        return self.sequence_to_episode.new_zeros(self.num_episodes).index_add(
            0, self.sequence_to_episode, self.batch.num_loss_tokens
        )

    def first_per_episode(self, per_sequence: Tensor) -> Tensor:
        """[B] -> [E], for a value that all sequences of an episode share."""
        result = per_sequence.new_zeros(self.num_episodes)
        return result.index_copy(0, self.sequence_to_episode, per_sequence)

    def sum_per_episode(self, per_token: Tensor) -> Tensor:
        """[T] -> [E], summed within samples."""
        zeros = torch.zeros(self.num_episodes, dtype=per_token.dtype, device=per_token.device)
        return zeros.index_add(0, self.token_to_episode, per_token)


_ROUNDING = 1e-9
"""Relative difference between a reward and the sum of its parts."""
TRIM_MEMORY_TOKENS = 1_000_000
"""Tokens of a batch for which it is worth to give back the memory that they had before."""
MAX_ATTENDED_RATIO = 4
"""Bounds the keys and values of attention, which are kept for all tokens of a row, including shared ones."""


def pack(
    lengths: Sequence[int],
    max_sequences: int | None,
    token_budget: int | None,
    shared_prompt_lengths: Sequence[int] | None = None,
) -> list[list[int]]:
    """Pack consecutive rows into bins, each bounded by a number of sequences and a number of tokens.

    Args:
        repeated: Number of tokens that each row saves if the row before it is in the same bin. With it, the full
            lengths in a bin may sum to MAX_REACH times the budget.
    """
    bins: list[list[int]] = []
    used = whole = 0
    for row, length in enumerate(lengths):
        more = length - shared_prompt_lengths[row] if shared_prompt_lengths else length
        full = not bins or (max_sequences is not None and len(bins[-1]) >= max_sequences)
        if token_budget is not None:
            full = full or used + more > token_budget or whole + length > MAX_ATTENDED_RATIO * token_budget
        if full:
            bins.append([])
            used, whole, more = 0, 0, length
        bins[-1].append(row)
        used, whole = used + more, whole + length
    return bins


def concat_batches(batches: Sequence[TrainBatch]) -> TrainBatch:
    """Concatenate batches. Raises ValueError for an optional tensor that is neither in all of them nor in none."""
    joined: dict[str, Tensor | None] = {}
    for name in (*TOKEN_FIELDS, *SEQUENCE_FIELDS):
        values = [getattr(batch, name) for batch in batches]
        if len({value is None for value in values}) != 1:
            raise ValueError(f"{name} is in some of the batches only: give it to all of them or to none.")
        joined[name] = None if values[0] is None else torch.cat(values)
    lengths = torch.cat([batch.lengths for batch in batches])
    joined["offsets"] = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return TrainBatch(**joined)  # type: ignore[arg-type]


def _take_spans(tokens: Tensor, stretches: Sequence[Span], copy: bool) -> Tensor:
    parts = [tokens[start:stop] for start, stop in stretches] or [tokens[:0]]
    return parts[0] if len(parts) == 1 and not copy else torch.cat(parts)


def _merge_spans(starts: Sequence[int], stops: Sequence[int]) -> list[Span]:
    """The tokens of rows that start and stop there; those of consecutive rows are one stretch."""
    found: list[Span] = []
    for start, stop in zip(starts, stops, strict=True):
        if found and found[-1][1] == start:
            start, _ = found.pop()
        found.append((start, stop))
    return found


def collate(groups: Sequence[TrajectoryGroup], *, token_rewards: bool = True) -> TrainBatch:
    """Collate groups into one ragged batch on the CPU, in group order; group_ids number the groups.

    Without `token_rewards` the batch has none: 4 bytes a token that most estimators do not read.

    Failed trajectories keep their place with an all-zero loss mask, so that row counts and groups do not change. An
    episode with restarts becomes several adjacent rows with the same `episode_ids` and the whole reward in each.

    Tokens are held once: trajectories of one sequence have views of the batch's tensors afterwards, and all of them
    of its `routing`. A trajectory whose log-probs are not known (`logprobs` is empty) leaves the batch without
    `rollout_logprobs`.
    """
    trajectories = [(index, item) for index, group in enumerate(groups) for item in group.trajectories]
    rows = [
        _Row(index, episode, item, *one)
        for episode, (index, item) in enumerate(trajectories)
        for one in item.sequences()
    ]
    if not rows:
        raise ValueError("a batch needs at least one trajectory")
    offsets = np.concatenate(([0], np.cumsum([row.length for row in rows])))
    known = all(len(item.logprobs) == len(item.response_ids) for _, item in trajectories)
    total = int(offsets[-1])
    ids, mask = lazy_zeros(total, np.int32), lazy_zeros(total, np.bool_)
    logprobs = lazy_zeros(total, np.float32) if known else None
    rewards = lazy_zeros(total, np.float32) if token_rewards else None
    for row, begin in zip(rows, offsets.tolist(), strict=False):
        row.write(begin, ids, mask, logprobs, rewards)
    if total > TRIM_MEMORY_TOKENS:
        trim_memory()
    items = [row.item for row in rows]
    return TrainBatch(
        input_ids=torch.from_numpy(ids),
        loss_mask=torch.from_numpy(mask),
        offsets=torch.from_numpy(offsets),
        prompt_lengths=torch.tensor([len(row.prompt_ids) for row in rows], dtype=torch.int64),
        group_ids=torch.tensor([row.group for row in rows], dtype=torch.int64),
        rewards=torch.tensor([item.reward for item in items], dtype=torch.float32),
        temperature=torch.tensor([item.temperature for item in items], dtype=torch.float32),
        status=torch.tensor([item.status == OK for item in items], dtype=torch.bool),
        min_versions=torch.tensor([item.min_version for item in items], dtype=torch.int64),
        max_versions=torch.tensor([item.max_version for item in items], dtype=torch.int64),
        rollout_logprobs=None if logprobs is None else torch.from_numpy(logprobs),
        token_rewards=None if rewards is None else torch.from_numpy(rewards),
        episode_ids=torch.tensor([row.episode for row in rows]) if len(rows) > len(trajectories) else None,
        routing=_collate_routing(trajectories, offsets.tolist()),
    )


class _Row(NamedTuple):
    """One sequence of a trajectory: response tokens [start, stop) after this prompt."""

    group: int
    episode: int
    item: Trajectory
    prompt_ids: Tokens
    start: int
    stop: int

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + self.stop - self.start

    def write(
        self,
        begin: int,
        ids: Tokens,
        mask: NDArray[np.bool_],
        logprobs: LogProbs | None,
        rewards: NDArray[np.float32] | None,
    ) -> None:
        """Write what it has of each token to these arrays, from `begin` on."""
        item, start, stop = self.item, self.start, self.stop
        sampled = max((other for _, other in item.loss_spans), default=0)
        if len(item.logprobs) not in (0, len(item.response_ids)) or sampled > len(item.response_ids):
            raise ValueError(
                f"prompt {item.prompt.uid}: token fields differ in length: {len(item.response_ids)} response_ids, "
                f"{len(item.logprobs)} logprobs, loss_spans up to {sampled}."
            )
        response, end = begin + len(self.prompt_ids), begin + self.length
        ids[begin:response], ids[response:end] = self.prompt_ids, item.response_ids[start:stop]
        if logprobs is not None:
            logprobs[response:end] = item.logprobs[start:stop]
        if item.status == OK:
            for one, other in item.loss_spans:
                first, last = max(one, start), min(other, stop)
                if first < last:
                    mask[response + first - start : response + last - start] = True
            if rewards is not None:
                for place, reward in rewards_by_token(item).items():
                    if start <= place < stop:
                        rewards[response + place - start] = reward
        if not item.restarts:
            item.prompt_ids, item.response_ids = ids[begin:response], ids[response:end]
            if logprobs is not None:
                item.logprobs = logprobs[response:end]


def _collate_routing(trajectories: Sequence[tuple[int, Trajectory]], offsets: Sequence[int]) -> Tensor | None:
    """TrainBatch.routing of sequences with these offsets; None if no engine told."""
    known = next((one for _, item in trajectories for one in item.routing if len(one)), None)
    if known is None:
        return None
    shape = known.shape[1:]
    routing = lazy_zeros(offsets[-1] * math.prod(shape), np.int16).reshape(-1, *shape)
    row = 0
    for _, item in trajectories:
        count = 1 + len(item.restarts)
        for number, (start, stop) in enumerate(pairwise(offsets[row : row + count + 1])):
            end = start
            if number < len(item.routing):
                told = item.routing[number][: stop - start]
                end += len(told)
                routing[start:end] = told
                item.routing[number] = routing[start:end]  # what an engine told is let go of row by row
            routing[end:stop] = -1
        row += count
    return torch.from_numpy(routing)


def token_rewards(item: Trajectory) -> list[float]:
    """[L] `rewards_by_token`, 0 on all other tokens."""
    places = rewards_by_token(item)
    return [places.get(index, 0.0) for index in range(len(item.response_ids))]


def rewards_by_token(item: Trajectory) -> dict[int, float]:
    """Each turn's reward on the last token sampled up to its end; any remaining reward on the very last one.

    A trajectory that says which tokens its rewards belong to has them there, or on the last one sampled before.
    """
    rewards: dict[int, float] = {}
    if not item.loss_spans:
        return rewards
    starts = [start for start, _ in item.loss_spans]
    places = (
        [(turn.stop, turn.reward) for turn in item.turns]
        if item.token_rewards is None
        else [(index + 1, reward) for index, reward in enumerate(item.token_rewards) if reward]
    )
    rest = item.reward
    for stop, reward in places:
        span = bisect_left(starts, stop) - 1
        if span >= 0:
            place = min(stop, item.loss_spans[span][1]) - 1
            rewards[place] = rewards.get(place, 0.0) + reward
            rest -= reward
    if item.token_rewards is None or abs(rest) > _ROUNDING * abs(item.reward):
        place = item.loss_spans[-1][1] - 1
        rewards[place] = rewards.get(place, 0.0) + rest
    return rewards


@dataclass(frozen=True, slots=True)
class SFTExample:
    """One conversation as L tokens."""

    input_ids: list[int]
    """[L]"""
    loss_mask: list[bool]
    """[L], True on the assistant's tokens, including the token that ends its turn."""


def collate_sft_examples(rows: Sequence[SFTExample]) -> TrainBatch:
    """Concatenate demonstrations; each is a separate group, with temperature 1 and no rewards."""
    count = len(rows)
    lengths = torch.tensor([len(row.input_ids) for row in rows])
    first = [row.loss_mask.index(True) if any(row.loss_mask) else len(row.loss_mask) for row in rows]
    zeros = torch.zeros(count, dtype=torch.int64)
    return TrainBatch(
        input_ids=torch.tensor([token for row in rows for token in row.input_ids], dtype=torch.int32),
        loss_mask=torch.tensor([learn for row in rows for learn in row.loss_mask], dtype=torch.bool),
        offsets=torch.cat([zeros[:1], lengths.cumsum(0)]),
        prompt_lengths=torch.tensor(first),
        group_ids=torch.arange(count),
        rewards=torch.zeros(count),
        temperature=torch.ones(count),
        status=torch.ones(count, dtype=torch.bool),
        min_versions=zeros,
        max_versions=zeros,
    )
