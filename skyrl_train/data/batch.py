"""The ragged training batch: sequences concatenated without padding.

Shapes: T is the number of tokens of all sequences (prompts and responses), B the number of sequences, E the number of
episodes.

Alignment: value i of a token-level tensor belongs to token i. `logprobs[i]` is the log-probability of input_ids[i]
given the preceding tokens of its sequence. The first token of a sequence has no log-probability (mask 0, value 0).
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
"""Role of a model -> the token fields that its updates read."""
LOGPROB_INPUT_FIELDS = ("input_ids", "loss_mask", "routing")
"""The token fields that a model reads to compute log-probs or values."""


@dataclass(frozen=True)
class TrainBatch:
    """Sequences of tokens with everything that an update reads.

    Token-level tensors have the shape [T], sequence-level tensors [B]. Optional tensors are None until they are
    computed. Log-probs are in nats. The batch is immutable: methods return new batches, which may share tensors.

    Example:
        The sequences (5 6 | 7 2) and (5 6 | 8), with prompts before the bar, are input_ids=[5, 6, 7, 2, 5, 6, 8],
        loss_mask=[0, 0, 1, 1, 0, 0, 1], offsets=[0, 4, 7], prompt_lengths=[2, 2].
    """

    input_ids: Tensor
    """Token ids [T] int32. Convert them with `.long()` to index."""
    loss_mask: Tensor
    """Mask [T] bool of the tokens that are trained on: sampled tokens of sequences that did not fail."""
    offsets: Tensor
    """Offsets [B+1] int64: sequence b consists of the tokens offsets[b]:offsets[b+1]."""
    prompt_lengths: Tensor
    """Number of prompt tokens [B] int64."""
    group_ids: Tensor
    """Group of each sequence [B] int64: equal for the samples of one prompt."""
    rewards: Tensor
    """Rewards [B] float32."""
    temperature: Tensor
    """Sampling temperature [B] float32. Log-probs are computed at the same temperature."""
    status: Tensor
    """True for sequences that did not fail [B] bool. The loss_mask of a failed sequence is all 0."""
    min_versions: Tensor
    """Weight version of the oldest sampled token [B] int64."""
    max_versions: Tensor
    """Weight version of the newest sampled token [B] int64."""
    rollout_logprobs: Tensor | None = None
    """The engine's log-probs [T] float32, at `temperature`, before truncation by top-p or top-k."""
    old_logprobs: Tensor | None = None
    """The trainer's log-probs [T] float32 before the step's first update."""
    ref_logprobs: Tensor | None = None
    """The reference model's log-probs [T] float32."""
    values: Tensor | None = None
    """The critic's value [T] float32 of the state before each token."""
    advantages: Tensor | None = None
    """Advantages [T] float32, from an estimator with one per token; see `token_advantages`."""
    returns: Tensor | None = None
    """The critic's targets [T] float32."""
    token_rewards: Tensor | None = None
    """Rewards of turns [T] float32, on the last token that was sampled in each turn. They sum to `rewards` over a
    sequence. None if nothing reads them."""
    loss_weights: Tensor | None = None
    """Weights [T] float64 in the loss of the mini-batch, from a reduction with one per token (see
    algorithms/reductions.py); see `token_weights`."""
    importance_weights: Tensor | None = None
    """Factors [T] float32 of an off-policy correction on the policy loss."""
    selected: Tensor | None = None
    """Mask [T] bool of tokens that a loss treats differently (see algorithms/token_selection.py)."""
    routing: Tensor | None = None
    """Expert ids [T, layers, k] int16 that a token is routed to in each mixture-of-experts layer; -1 lets the router
    choose."""
    episode_ids: Tensor | None = None
    """Episode of each sequence [B] int64. An episode of several sequences is one sample: rewards, advantages,
    statistics and reductions count it once. None if every sequence is an episode."""
    sequence_advantages: Tensor | None = None
    """Advantages [B] float32, from an estimator with one per sequence; see `token_advantages`."""
    sequence_weights: Tensor | None = None
    """Weights [B] float64 of each token of a sequence in the loss of the mini-batch, from a reduction with one per
    sequence; see `token_weights`."""

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def lengths(self) -> Tensor:
        """Number of tokens [B] of each sequence, including its prompt."""
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def sequence_ids(self) -> Tensor:
        """Index of each token's sequence, [T]."""
        indices = torch.arange(len(self), device=self.offsets.device)
        # Without the size of the output, a GPU would have to report it to the host.
        return torch.repeat_interleave(indices, self.lengths, output_size=len(self.input_ids))

    @property
    def position_ids(self) -> Tensor:
        """Position of each token in its sequence [T] int64, from 0."""
        return torch.arange(len(self.input_ids), device=self.offsets.device) - self.expand_to_tokens(self.offsets[:-1])

    @property
    def num_loss_tokens(self) -> Tensor:
        """Number of tokens of each sequence [B] int64 that are in the loss mask."""
        mask = self.loss_mask.cpu().numpy()
        counts = [np.count_nonzero(mask[start:stop]) for start, stop in pairwise(self.offsets.tolist())]
        return torch.tensor(counts, dtype=torch.int64, device=self.offsets.device)

    @property
    def token_advantages(self) -> Tensor | None:
        """Advantage of each token [T] float32, 0 outside the loss mask; None until it is computed."""
        return self.advantages if self.advantages is not None else self._expand_masked(self.sequence_advantages)

    @property
    def token_weights(self) -> Tensor | None:
        """Weight of each token [T] float64 in the loss of the mini-batch; None until it is computed."""
        return self.loss_weights if self.loss_weights is not None else self._expand_masked(self.sequence_weights)

    def _expand_masked(self, per_sequence: Tensor | None) -> Tensor | None:
        """Expand a tensor [B] to [T], with 0 outside the loss mask."""
        return None if per_sequence is None else torch.where(self.loss_mask, self.expand_to_tokens(per_sequence), 0.0)

    @property
    def sequence_to_episode(self) -> Tensor:
        """Index of the episode of each sequence [B] int64, from 0 to E-1."""
        if self.episode_ids is None:
            return torch.arange(len(self), device=self.offsets.device)
        indices: Tensor = self.episode_ids.unique(return_inverse=True)[1]
        return indices

    @property
    def episodes(self) -> EpisodeIndex:
        """Index of the batch's episodes, with their sequences and tokens."""
        sequence_to_episode = self.sequence_to_episode
        count = len(self) if self.episode_ids is None else int(sequence_to_episode.max()) + 1 if len(self) else 0
        return EpisodeIndex(sequence_to_episode, count, self)

    def expand_to_tokens(self, per_sequence: Tensor) -> Tensor:
        """Return a tensor [T] with each sequence's value on all of its tokens.

        Args:
            per_sequence: Values of the sequences [B].
        """
        is_numpy_compatible = per_sequence.device.type == "cpu" and per_sequence.dtype != torch.bfloat16
        if is_numpy_compatible and not per_sequence.requires_grad:  # torch would allocate an index of all tokens
            return torch.from_numpy(np.repeat(per_sequence.numpy(), self.lengths.numpy()))
        return torch.repeat_interleave(per_sequence, self.lengths, output_size=len(self.input_ids))

    def sum_per_sequence(self, per_token: Tensor) -> Tensor:
        """Return the sums [B] of a token-level tensor [T] over each sequence."""
        zeros = torch.zeros(len(self), dtype=per_token.dtype, device=per_token.device)
        return zeros.index_add(0, self.sequence_ids, per_token)

    def select(self, rows: Sequence[int] | Tensor, *, copy: bool = True) -> TrainBatch:
        """Return a batch of some sequences.

        Args:
            rows: Indices of the sequences, in the order of the result.
            copy: False returns views of the tokens if the sequences are consecutive. Use that within this process only:
                pickling a view sends the complete batch.
        """
        rows = torch.as_tensor(rows, dtype=torch.int64)
        lengths = self.offsets[rows + 1] - self.offsets[rows]
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return TrainBatch(offsets=offsets, **self._select_fields(rows, copy))

    def to_arrays(self, rows: Sequence[int], without: Collection[str]) -> dict[str, NDArray[Any]]:
        """Return copies of the fields of some sequences as arrays by field name, to send them to another process.

        Token-level fields are concatenated, without padding. The receiver needs the same sequences' boundaries from its
        own batch; see `with_arrays`.

        Args:
            rows: Indices of the sequences, in the order of the result.
            without: Names of fields to leave out. `offsets` and fields that are None are always left out.
        """
        selected = self._select_fields(torch.as_tensor(rows, dtype=torch.int64), True, without)
        return {name: value.numpy() for name, value in selected.items()}

    def with_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> TrainBatch:
        """Return a batch of the same sequences with fields that `to_arrays` returned, possibly in another process."""
        return replace(self, **_to_tensors(arrays))

    def _select_fields(self, rows: Tensor, copy: bool, without: Collection[str] = ()) -> dict[str, Tensor]:
        """Return the fields of some sequences, without `offsets` and fields that are None."""
        spans = _merge_spans(self.offsets[rows].tolist(), self.offsets[rows + 1].tolist())
        return {
            name: _take_spans(value, spans, copy) if name in TOKEN_FIELDS else value[rows]
            for name, value in self._tensors().items()
            if name != "offsets" and name not in without
        }

    def with_tokens(self, **tensors: Tensor | None) -> TrainBatch:
        """Return a batch of the same sequences with token-level tensors added, replaced or removed (None).

        Raises:
            ValueError: A name is not in TOKEN_FIELDS, or a tensor does not have T elements.
        """
        for name, tensor in tensors.items():
            if name not in TOKEN_FIELDS or (tensor is not None and len(tensor) != len(self.input_ids)):
                raise ValueError(f"{name}: must be one of {', '.join(TOKEN_FIELDS)}, for {len(self.input_ids)} tokens.")
        return replace(self, **tensors)  # type: ignore[arg-type]

    def select_logprob_inputs(self) -> TrainBatch:
        """Return a batch with only the token fields that computing log-probs or values reads."""
        return self.with_tokens(**{name: None for name in TOKEN_FIELDS if name not in LOGPROB_INPUT_FIELDS})

    def select_update_inputs(self, role: str) -> TrainBatch:
        """Return a batch with only the token fields that updates of a model read.

        Args:
            role: "policy" or "critic".
        """
        return self.with_tokens(**{name: None for name in TOKEN_FIELDS if name not in _UPDATE_FIELDS[role]})

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the tensors as arrays, which Ray stores in shared memory without a copy for each rank."""
        return _from_arrays, ({name: value.numpy() for name, value in self._tensors().items()},)

    def _tensors(self) -> dict[str, Tensor]:
        """Return the fields that are not None, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}

    def shared_prompt_lengths(self) -> Tensor:
        """Return the length [B] of the prompt that each sequence shares with the one before it, or 0 if they differ.

        Prompts whose tokens were routed to different experts differ.
        """
        ends = (self.offsets[:-1] + self.prompt_lengths).tolist()
        prompts = [slice(start, end) for start, end in zip(self.offsets.tolist(), ends, strict=False)]
        inputs = [self.input_ids] if self.routing is None else [self.input_ids, self.routing]
        is_shared = [
            False,
            *(all(torch.equal(x[before], x[prompt]) for x in inputs) for before, prompt in pairwise(prompts)),
        ]
        return torch.where(torch.tensor(is_shared[: len(self)]), self.prompt_lengths, 0)

    def split_micro_batches(
        self, *, max_sequences: int | None = None, token_budget: int | None = None
    ) -> list[TrainBatch]:
        """Split the batch into micro-batches of consecutive sequences.

        Args:
            max_sequences: Maximum number of sequences per micro-batch; None sets no limit.
            token_budget: Maximum number of tokens per micro-batch; None sets no limit. A longer sequence is a separate
                micro-batch.
        """
        return [self.select(rows) for rows in pack(self.lengths.tolist(), max_sequences, token_budget)]

    def partition(self, ranks: int, cost: Tensor | None = None) -> list[list[int]]:
        """Distribute the sequences over ranks so that costs are balanced.

        The most expensive sequence is assigned first, each one to the rank with the lowest cost so far.

        Args:
            ranks: Number of ranks.
            cost: Cost of each sequence [B]; None is its number of tokens.

        Returns:
            The sorted indices of each rank's sequences. With fewer sequences than ranks some ranks have none.
        """
        weights = (self.lengths if cost is None else cost).tolist()
        load = [0.0] * ranks
        rows: list[list[int]] = [[] for _ in range(ranks)]
        for row in sorted(range(len(self)), key=lambda r: (-weights[r], r)):
            lightest = load.index(min(load))
            load[lightest] += weights[row]
            rows[lightest].append(row)
        return [sorted(indices) for indices in rows]

    def padded(self, per_token: Tensor, fill: float = 0.0) -> Tensor:
        """Return a token-level tensor [T] as a padded tensor [B, longest sequence].

        Args:
            per_token: Values of the tokens [T].
            fill: Value of the padding, which is on the right.
        """
        width = int(self.lengths.max()) if len(self) else 0
        result = per_token.new_full((len(self), width), fill)
        result[self.sequence_ids, self.position_ids] = per_token
        return result


def _from_arrays(arrays: Mapping[str, NDArray[Any]]) -> TrainBatch:
    return TrainBatch(**_to_tensors(arrays))


def _to_tensors(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # batches are immutable
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


@dataclass(frozen=True)
class EpisodeIndex:
    """A mapping from the B sequences and T tokens of a batch to its E episodes."""

    sequence_to_episode: Tensor
    """Index of the episode of each sequence [B] int64, from 0 to E-1."""
    num_episodes: int
    batch: TrainBatch

    @cached_property
    def token_to_episode(self) -> Tensor:
        """Index of the episode of each token [T] int64, from 0 to E-1."""
        return self.batch.expand_to_tokens(self.sequence_to_episode)

    @property
    def num_loss_tokens(self) -> Tensor:
        """Number of tokens of each episode [E] int64 that are in the loss mask."""
        return self.sequence_to_episode.new_zeros(self.num_episodes).index_add(
            0, self.sequence_to_episode, self.batch.num_loss_tokens
        )

    def first_per_episode(self, per_sequence: Tensor) -> Tensor:
        """Return the value of each episode [E] from a tensor [B] that is equal for the sequences of an episode."""
        result = per_sequence.new_zeros(self.num_episodes)
        return result.index_copy(0, self.sequence_to_episode, per_sequence)

    def sum_per_episode(self, per_token: Tensor) -> Tensor:
        """Return the sums [E] of a token-level tensor [T] over each episode."""
        zeros = torch.zeros(self.num_episodes, dtype=per_token.dtype, device=per_token.device)
        return zeros.index_add(0, self.token_to_episode, per_token)


_ROUNDING = 1e-9
"""Maximum relative difference between a reward and the sum of its token rewards that counts as rounding."""
TRIM_MEMORY_TOKENS = 1_000_000
"""Minimum number of tokens of a batch for which freed memory is returned to the system."""
MAX_ATTENDED_RATIO = 4
"""Maximum ratio of a bin's tokens, shared prompts included, to its token budget. Attention needs keys and values for
all of these tokens, so the ratio bounds their memory."""


def pack(
    lengths: Sequence[int],
    max_sequences: int | None,
    token_budget: int | None,
    shared_prompt_lengths: Sequence[int] | None = None,
) -> list[list[int]]:
    """Pack consecutive rows into bins, each with limits on its numbers of sequences and tokens.

    Args:
        lengths: Number of tokens of each row.
        max_sequences: Maximum number of rows per bin; None sets no limit.
        token_budget: Maximum number of computed tokens per bin; None sets no limit. A longer row is a separate bin.
        shared_prompt_lengths: Number of tokens that each row does not compute if the row before it is in the same bin.
            The full lengths of a bin then sum to at most MAX_ATTENDED_RATIO times the budget. None: rows share no
            tokens.

    Returns:
        The indices of the rows of each bin.
    """
    bins: list[list[int]] = []
    computed = attended = 0
    for row, length in enumerate(lengths):
        added = length - shared_prompt_lengths[row] if shared_prompt_lengths else length
        is_full = not bins or (max_sequences is not None and len(bins[-1]) >= max_sequences)
        if token_budget is not None:
            is_full = (
                is_full or computed + added > token_budget or attended + length > MAX_ATTENDED_RATIO * token_budget
            )
        if is_full:
            bins.append([])
            computed, attended, added = 0, 0, length
        bins[-1].append(row)
        computed, attended = computed + added, attended + length
    return bins


def concat_batches(batches: Sequence[TrainBatch]) -> TrainBatch:
    """Concatenate batches.

    Raises:
        ValueError: An optional tensor is None in some of the batches only.
    """
    joined: dict[str, Tensor | None] = {}
    for name in (*TOKEN_FIELDS, *SEQUENCE_FIELDS):
        values = [getattr(batch, name) for batch in batches]
        if len({value is None for value in values}) != 1:
            raise ValueError(f"{name} is None in some of the batches only: set it in all of them or in none.")
        joined[name] = None if values[0] is None else torch.cat(values)
    lengths = torch.cat([batch.lengths for batch in batches])
    joined["offsets"] = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return TrainBatch(**joined)  # type: ignore[arg-type]


def _take_spans(tokens: Tensor, spans: Sequence[Span], copy: bool) -> Tensor:
    parts = [tokens[start:stop] for start, stop in spans] or [tokens[:0]]
    return parts[0] if len(parts) == 1 and not copy else torch.cat(parts)


def _merge_spans(starts: Sequence[int], stops: Sequence[int]) -> list[Span]:
    """Return the spans with these starts and stops; adjacent spans are merged."""
    spans: list[Span] = []
    for start, stop in zip(starts, stops, strict=True):
        if spans and spans[-1][1] == start:
            start, _ = spans.pop()
        spans.append((start, stop))
    return spans


def collate(groups: Sequence[TrajectoryGroup], *, token_rewards: bool = True) -> TrainBatch:
    """Collate groups into one ragged batch on the CPU.

    Failed trajectories keep their place with an all-zero loss mask, so that the number of rows and the groups do not
    change. An episode with restarts becomes several adjacent rows with the same `episode_ids`, each with the full
    reward. If any trajectory has no log-probs (`logprobs` is empty), the batch has no `rollout_logprobs`.

    The trajectories are changed to save memory. Afterwards the tokens and log-probs of a trajectory with one sequence,
    and the `routing` of every trajectory, are views of the batch's tensors.

    Args:
        groups: The groups; their order is that of the rows, and `group_ids` are their indices.
        token_rewards: False leaves out `token_rewards`, which need 4 bytes per token and are rarely read.

    Raises:
        ValueError: There are no trajectories, or the token fields of a trajectory differ in length.
    """
    trajectories = [(index, item) for index, group in enumerate(groups) for item in group.trajectories]
    rows = [
        _Row(index, episode, item, *sequence)
        for episode, (index, item) in enumerate(trajectories)
        for sequence in item.sequences()
    ]
    if not rows:
        raise ValueError("A batch needs at least one trajectory.")
    offsets = np.concatenate(([0], np.cumsum([row.length for row in rows])))
    has_logprobs = all(len(item.logprobs) == len(item.response_ids) for _, item in trajectories)
    total = int(offsets[-1])
    ids, mask = lazy_zeros(total, np.int32), lazy_zeros(total, np.bool_)
    logprobs = lazy_zeros(total, np.float32) if has_logprobs else None
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
    """One sequence of a trajectory: its response tokens [start, stop) after `prompt_ids`."""

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
        """Write the token fields of the sequence to the arrays of the batch, starting at index `begin`.

        The fields of a trajectory with one sequence become views of the arrays. Raises ValueError if its token fields
        differ in length.
        """
        item, start, stop = self.item, self.start, self.stop
        last_sampled = max((span_stop for _, span_stop in item.loss_spans), default=0)
        if len(item.logprobs) not in (0, len(item.response_ids)) or last_sampled > len(item.response_ids):
            raise ValueError(
                f"prompt {item.prompt.uid}: token fields differ in length: {len(item.response_ids)} response_ids, "
                f"{len(item.logprobs)} logprobs, loss_spans up to {last_sampled}. Return one log-prob for each "
                "response token."
            )
        response, end = begin + len(self.prompt_ids), begin + self.length
        ids[begin:response], ids[response:end] = self.prompt_ids, item.response_ids[start:stop]
        if logprobs is not None:
            logprobs[response:end] = item.logprobs[start:stop]
        if item.status == OK:
            for span_start, span_stop in item.loss_spans:
                first, last = max(span_start, start), min(span_stop, stop)
                if first < last:
                    mask[response + first - start : response + last - start] = True
            if rewards is not None:
                for index, reward in rewards_by_token(item).items():
                    if start <= index < stop:
                        rewards[response + index - start] = reward
        if not item.restarts:
            item.prompt_ids, item.response_ids = ids[begin:response], ids[response:end]
            if logprobs is not None:
                item.logprobs = logprobs[response:end]


def _collate_routing(trajectories: Sequence[tuple[int, Trajectory]], offsets: Sequence[int]) -> Tensor | None:
    """Return TrainBatch.routing of the sequences with these offsets, or None if no engine returned experts."""
    example = next((experts for _, item in trajectories for experts in item.routing if len(experts)), None)
    if example is None:
        return None
    shape = example.shape[1:]
    routing = lazy_zeros(offsets[-1] * math.prod(shape), np.int16).reshape(-1, *shape)
    row = 0
    for _, item in trajectories:
        count = 1 + len(item.restarts)
        for number, (start, stop) in enumerate(pairwise(offsets[row : row + count + 1])):
            end = start
            if number < len(item.routing):
                experts = item.routing[number][: stop - start]
                end += len(experts)
                routing[start:end] = experts
                item.routing[number] = routing[start:end]  # frees the engine's array of this row
            routing[end:stop] = -1
        row += count
    return torch.from_numpy(routing)


def token_rewards(item: Trajectory) -> list[float]:
    """Return the rewards of the response tokens [L], see `rewards_by_token`; 0 on all other tokens."""
    rewards = rewards_by_token(item)
    return [rewards.get(index, 0.0) for index in range(len(item.response_ids))]


def rewards_by_token(item: Trajectory) -> dict[int, float]:
    """Return the rewards of an episode by the index of a response token.

    The reward of a turn is on the last token that was sampled up to its end. A trajectory with `token_rewards` has
    each of them on its own token, or on the last token that was sampled before it. The difference between the
    episode's reward and these rewards, for example a length penalty, is on the last sampled token.

    Returns:
        Token index -> reward. Empty if no token is in the loss mask.
    """
    rewards: dict[int, float] = {}
    if not item.loss_spans:
        return rewards
    starts = [start for start, _ in item.loss_spans]
    rewards_by_stop = (
        [(turn.stop, turn.reward) for turn in item.turns]
        if item.token_rewards is None
        else [(index + 1, reward) for index, reward in enumerate(item.token_rewards) if reward]
    )
    rest = item.reward
    for stop, reward in rewards_by_stop:
        span = bisect_left(starts, stop) - 1
        if span >= 0:
            index = min(stop, item.loss_spans[span][1]) - 1
            rewards[index] = rewards.get(index, 0.0) + reward
            rest -= reward
    if item.token_rewards is None or abs(rest) > _ROUNDING * abs(item.reward):
        index = item.loss_spans[-1][1] - 1
        rewards[index] = rewards.get(index, 0.0) + rest
    return rewards


@dataclass(frozen=True, slots=True)
class SFTExample:
    """One demonstration for supervised fine-tuning: a conversation of L tokens."""

    input_ids: list[int]
    """Token ids [L]."""
    loss_mask: list[bool]
    """True for the assistant's tokens [L], including the token that ends its turn."""


def collate_sft_examples(rows: Sequence[SFTExample]) -> TrainBatch:
    """Concatenate demonstrations into one batch. Each is a separate group, with temperature 1 and reward 0."""
    count = len(rows)
    lengths = torch.tensor([len(row.input_ids) for row in rows])
    first = [row.loss_mask.index(True) if any(row.loss_mask) else len(row.loss_mask) for row in rows]
    zeros = torch.zeros(count, dtype=torch.int64)
    return TrainBatch(
        input_ids=torch.tensor([token for row in rows for token in row.input_ids], dtype=torch.int32),
        loss_mask=torch.tensor([is_trained for row in rows for is_trained in row.loss_mask], dtype=torch.bool),
        offsets=torch.cat([zeros[:1], lengths.cumsum(0)]),
        prompt_lengths=torch.tensor(first),
        group_ids=torch.arange(count),
        rewards=torch.zeros(count),
        temperature=torch.ones(count),
        status=torch.ones(count, dtype=torch.bool),
        min_versions=zeros,
        max_versions=zeros,
    )
