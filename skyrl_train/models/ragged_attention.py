"""Causal attention over ragged sequences, without padding: for training and for prefill.

Legend: T tokens of all sequences, H query heads, K key/value heads (H a multiple of K), D head size, B sequences, S
segments of tokens (`Segments`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from skyrl_train.data.device_copy import STAYS_ON_HOST
from skyrl_train.errors import ConfigError
from skyrl_train.models.flash_attention import VarlenArgs, get_flash_kernel
from skyrl_train.models.sequence_parallel import SequenceParallel
from skyrl_train.models.sliding_windows import register_window_masks

RAGGED_ATTENTION_NAME = "skyrl_ragged"
"""Name of this attention in transformers, for `model.set_attn_implementation`."""
_PADDING = 64
"""Maximum number of padding tokens of a sequence in a `PaddedBatch`, plus 1."""


@dataclass(frozen=True)
class Segments:
    """The boundaries of segments of tokens, and the keys that each segment attends to: the same in every layer.

    A segment is a sequence, or the rest of a sequence after tokens that it shares with others. In the latter case
    `key_indices` lists the tokens that it attends to: the shared ones first, its own last. Adjacent segments of equal
    lengths share one kernel call.
    """

    offsets: Tensor
    """[S+1] int32 on the tokens' device: segment s is tokens offsets[s]:offsets[s+1]."""
    lengths: tuple[int, ...]
    """[S]: the number of tokens of each segment."""
    key_indices: Tensor | None = None
    """[sum of key_lengths] int64: token indices, segment by segment; None if each attends only to its own tokens."""
    key_offsets: Tensor | None = None
    """[S+1] int32: the boundaries of segments in `key_indices`; set with it."""
    key_lengths: tuple[int, ...] | None = None
    """[S]: the number of keys of each segment; set with `key_indices`."""
    shared: SharedTokens | None = field(default=None, metadata=STAYS_ON_HOST)
    """The sequences that the segments are parts of; set with `key_indices`."""
    prepared_sequences: PackedSequences | None = None
    """The value of `sequences`, from `prepare_sequences`."""

    @classmethod
    def from_offsets(cls, offsets: Tensor) -> Segments:
        """Return one segment per sequence, from offsets [B+1]. On a GPU, it synchronizes with the device once."""
        return cls(offsets.to(torch.int32), tuple(offsets.diff().tolist()))

    @property
    def attended_lengths(self) -> tuple[int, ...]:
        """Number of tokens that the last token of each segment attends to, including itself [S].

        This is the segment's length, plus the length of the shared tokens in front of it if it has any.
        """
        return self.lengths if self.key_lengths is None else self.key_lengths

    def prepare_sequences(self) -> Segments:
        """Return the segments with their `sequences`, so that a copy on a device has these, too."""
        return replace(self, prepared_sequences=self.sequences.prepare_batches())

    @cached_property
    def sequences(self) -> PackedSequences:
        """The sequences without segments, each of them with the tokens that it shares with others."""
        if self.prepared_sequences is not None:
            return self.prepared_sequences
        if self.shared is None:
            return PackedSequences.from_lengths([length for length in self.lengths if length], self.offsets.device)
        return self.shared.repeat(self.offsets.device)

    def group_equal_lengths(self) -> list[tuple[int, int, int]]:
        """Return groups of adjacent segments of equal size; empty segments are left out.

        Returns:
            (number of segments, their length, number of tokens that they attend to) for each group.
        """
        groups = [
            (len(list(equal)), *sizes)
            for sizes, equal in groupby(zip(self.lengths, self.attended_lengths, strict=True))
        ]
        return [(count, length, attended) for count, length, attended in groups if length]

    def sort_by_length(self) -> tuple[Segments, Tensor]:
        """Return the segments sorted by length, and the index [T] that reorders tokens: `sorted = tokens[index]`.

        Only for segments without `key_indices`.
        """
        assert self.key_indices is None, "segments with shared keys are sorted when they are built"
        rows = torch.tensor(sorted(range(len(self.lengths)), key=self.lengths.__getitem__), device=self.offsets.device)
        offsets, lengths = self.offsets.long(), self.offsets.diff()[rows]
        sorted_offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
        return Segments(sorted_offsets, tuple(sorted(self.lengths))), concat_aranges(offsets[:-1][rows], lengths)


@dataclass(frozen=True)
class PaddedBatch:
    """Adjacent sequences of a row as a rectangle, padded at the end to the longest of them."""

    num_tokens: int
    shape: tuple[int, int]
    """Number of sequences, and length of the longest."""
    places: Tensor | None
    """[num_tokens]: each token's place in the flat rectangle; None without padding."""

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device) -> PaddedBatch:
        """Return the rectangle of sequences of these lengths."""
        shape, places = (len(lengths), max(lengths)), None
        if min(lengths) < shape[1]:
            places = concat_aranges(shape[1] * torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
        return cls(sum(lengths), shape, places)

    def pad(self, rows: Tensor) -> Tensor:
        """Return the rectangle [sequences, longest, ...] of rows [num_tokens, ...]; padding is 0."""
        if self.places is None:
            return rows.unflatten(0, self.shape)
        flat = rows.new_zeros(self.shape[0] * self.shape[1], *rows.shape[1:]).index_copy(0, self.places, rows)
        return flat.unflatten(0, self.shape)

    def unpad(self, rectangle: Tensor) -> Tensor:
        """Return the rows [num_tokens, ...] of a rectangle."""
        flat = rectangle.flatten(0, 1)
        return flat if self.places is None else deterministic_index_select(flat, self.places)


@dataclass(frozen=True)
class PackedSequences:
    """Full sequences end to end, for layers that cannot share the computation of a prompt."""

    lengths: tuple[int, ...]
    """Number of tokens of each sequence, at least 1."""
    offsets: Tensor
    """[B+1] int64: the boundaries of sequences."""
    offsets_on_cpu: Tensor = field(metadata=STAYS_ON_HOST)
    """A copy of `offsets` on the CPU."""
    indices: Tensor | None = None
    """[sum of lengths] int64: the row's token at each place; None if the row consists of these sequences."""
    places: Tensor | None = None
    """[T] int64: a place of each token of the row; set with `indices`."""
    prepared_batches: tuple[PaddedBatch, ...] | None = None
    """The value of `batches`, from `prepare_batches`."""

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device) -> PackedSequences:
        """Return the sequences of a row that consists of sequences of these lengths."""
        offsets = torch.tensor([0, *accumulate(lengths)])
        return cls(tuple(lengths), offsets.to(device), offsets)

    def prepare_batches(self) -> PackedSequences:
        """Return the sequences with their `batches`, so that a copy on a device has these, too."""
        return replace(self, prepared_batches=self.batches)

    @cached_property
    def batches(self) -> tuple[PaddedBatch, ...]:
        """Batches of adjacent sequences with similar lengths, for functions that run each sequence alone."""
        if self.prepared_batches is not None:
            return self.prepared_batches
        groups = [list(group) for _, group in groupby(self.lengths, lambda length: -(-length // _PADDING))]
        return tuple(PaddedBatch.from_lengths(group, self.offsets.device) for group in groups)

    def unpack(self, rows: Tensor) -> Tensor:
        """Return the sequences [sum of lengths, D] of a row [T, D]."""
        return rows if self.indices is None else deterministic_index_select(rows, self.indices)

    def pack(self, rows: Tensor) -> Tensor:
        """Return the row [T, D] of sequences [sum of lengths, D]. A repeated token's values come from one place."""
        return rows if self.places is None else deterministic_index_select(rows, self.places)


@dataclass(frozen=True)
class SharedTokens:
    """The sequences of a row in which adjacent sequences share their leading tokens; see `SharedPromptLayout`."""

    lengths: Tensor
    """[B] int64 on the CPU: number of tokens of each sequence, shared ones included."""
    indices: Tensor
    """[sum of lengths] int64 on the CPU: the row's token at each place of the sequences."""
    places: Tensor
    """[T] int64 on the CPU: the place in the sequences from which each token of the row is taken."""

    def repeat(self, device: torch.device) -> PackedSequences:
        """Return the sequences with shared tokens repeated, in ascending order of length, without empty ones."""
        order = self.lengths.argsort(stable=True)
        starts = self.lengths.cumsum(0) - self.lengths
        sorted_places = concat_aranges(starts[order], self.lengths[order])
        new_places = torch.empty_like(sorted_places).index_copy(0, sorted_places, torch.arange(len(sorted_places)))
        lengths = [length for length in self.lengths[order].tolist() if length]
        return replace(
            PackedSequences.from_lengths(lengths, device),
            indices=self.indices[sorted_places].to(device),
            places=new_places[self.places].to(device),
        )


def concat_aranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """Return concatenated ranges of int64 [sum of lengths]: lengths[i] numbers from starts[i] on, for each i."""
    before = lengths.cumsum(0) - lengths
    shift = torch.repeat_interleave(starts - before, lengths)
    return shift + torch.arange(len(shift), device=shift.device)


def ragged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments | Tensor,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return softmax(scaling · q kᵀ) v within each sequence, where each token attends to itself and earlier tokens.

    Args:
        query: Queries [T, H, D].
        key: Keys [T, K, D].
        value: Values [T, K, D].
        segments: The segments, or the offsets [B+1] of sequences.
        scaling: Factor of the scores; 1/√D by default.
        sliding_window: Number of tokens that a token attends to, itself included; None for all.
        softcap: With a softcap c, scores become c·tanh(scores/c). None: no softcap.
        sinks: Score, in each head [H], of an additional key with value 0 that all tokens attend to (gpt-oss,
            arXiv:2508.10925). None: no such key.

    Returns:
        The attended values [T, H, D].
    """
    if isinstance(segments, Tensor):
        segments = Segments.from_offsets(segments)
    assert sum(segments.lengths) == len(query), f"offsets cover {sum(segments.lengths)} of {len(query)} tokens"
    options = _ScoreOptions(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, sinks)
    if segments.key_indices is not None:
        key, value = (
            deterministic_index_select(key, segments.key_indices),
            deterministic_index_select(value, segments.key_indices),
        )
    kernel = get_flash_kernel(
        query, value, window=sliding_window is not None, softcap=softcap is not None, sinks=sinks is not None
    )
    if kernel is not None:
        cu_seqlens_k = segments.offsets if segments.key_offsets is None else segments.key_offsets
        max_seqlens = max(segments.lengths), max(segments.attended_lengths)
        varlen_args = VarlenArgs(segments.offsets, cu_seqlens_k, *max_seqlens, options.scaling, sliding_window, softcap)
        return kernel.attend(query, key, value, varlen_args, sinks)
    if segments.key_indices is None and len(segments.group_equal_lengths()) > len(set(segments.lengths) - {0}):
        segments, tokens = segments.sort_by_length()
        query, key, value = (deterministic_index_select(rows, tokens) for rows in (query, key, value))
        ordered = _attend_by_length(query, key, value, segments, options)
        return torch.empty_like(ordered).index_copy(0, tokens, ordered)
    return _attend_by_length(query, key, value, segments, options)


class _DeterministicIndexSelect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(index)
        ctx.count = len(rows)
        return rows.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (index,) = ctx.saved_tensors
        exact = torch.promote_types(gradient.dtype, torch.float32)
        sums, terms = gradient.new_zeros(ctx.count, *gradient.shape[1:], dtype=exact), gradient.to(exact)
        if gradient.is_cuda:  # index_put_ sorts on GPUs, but index_add_ adds in any order
            sums.index_put_((index,), terms, accumulate=True)
        else:  # index_add_ adds rows in order on CPUs, but index_put_ adds in any order
            sums.index_add_(0, index, terms)
        return sums.to(gradient.dtype), None


def deterministic_index_select(rows: Tensor, index: Tensor) -> Tensor:
    """Return rows[index], whose backward sums the gradients of repeated rows in a fixed order, in at least float32."""
    result: Tensor = _DeterministicIndexSelect.apply(rows, index)
    return result


class _ScoreOptions(NamedTuple):
    """Options that change attention scores; see `ragged_attention`."""

    scaling: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


def _attend_by_length(query: Tensor, key: Tensor, value: Tensor, segments: Segments, options: _ScoreOptions) -> Tensor:
    """Run one kernel call per group of equal lengths. `split` instead of slices makes backward one concatenation."""
    groups = segments.group_equal_lengths()
    queries = query.split([count * length for count, length, _ in groups])
    sizes = [count * attended for count, _, attended in groups]
    window = options.window
    outputs = []
    for (count, length, attended), q, k, v in zip(groups, queries, key.split(sizes), value.split(sizes), strict=True):
        q = q.unflatten(0, (count, length)).transpose(1, 2)  # [count, heads, length, D]
        k, v = (x.unflatten(0, (count, attended)).transpose(1, 2) for x in (k, v))
        if options.softcap is not None or options.sinks is not None:
            output = _unfused_attention(q, k, v, options)
        else:
            is_plain_causal = length == attended and (window is None or window >= length)
            output = scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=None if is_plain_causal else _visible(length, attended, window, q.device),
                is_causal=is_plain_causal,
                scale=options.scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


def _unfused_attention(query: Tensor, key: Tensor, value: Tensor, options: _ScoreOptions) -> Tensor:
    """Compute attention with the scores of each group as a tensor, for options that no fused kernel of the device
    supports.
    """
    count, heads, length, size = query.shape
    grouped = query.unflatten(1, (key.shape[1], -1))  # [count, K, H/K, length, D]
    scores = grouped @ key.unsqueeze(2).transpose(-1, -2) * options.scaling
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    scores = scores.masked_fill(~_visible(length, key.shape[2], options.window, query.device), -torch.inf)
    if options.sinks is not None:
        sinks = options.sinks.to(scores.dtype).view(key.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
    return (weights[..., : key.shape[2]] @ value.unsqueeze(2)).view(count, heads, length, size)


def _visible(length: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return a bool tensor [length, num_keys], True for the keys (columns) that a query (row) attends to.

    The last query is aligned with the last key.
    """
    diagonal = num_keys - length
    visible = torch.ones(length, num_keys, dtype=torch.bool, device=device).tril(diagonal)
    return visible if window is None else visible.triu(diagonal + 1 - window)


def check_attention_arguments(
    module: nn.Module,
    attention_mask: Tensor | int | None,
    dropout: float = 0.0,
    ragged_segments: Segments | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> None:
    """Raise ConfigError if a model passes arguments to its attention that attention without padding does not support.

    Args:
        module: The attention module, for the message.
        attention_mask: None, or an int for the layer's window; a tensor is an error.
        dropout: Must be 0.
        ragged_segments: The segments of the batch; None is an error.
        position_bias: Must be None.
        **_: Ignored.
    """
    name = type(module).__name__
    if ragged_segments is None:
        raise ConfigError(
            f"{name} was called without sequence boundaries. Either its model does not pass keyword arguments to its "
            "attention, as transformers' attention interface requires, or it was not called by a RaggedModel. Use "
            "another model class."
        )
    for feature, is_used in (
        ("attention dropout", dropout > 0),
        ("a position bias", position_bias is not None),
        ("attention to later tokens", not getattr(module, "is_causal", True)),
        ("a precomputed mask", isinstance(attention_mask, Tensor)),
    ):
        if is_used:
            raise ConfigError(
                f"{name} uses {feature}, which attention without padding does not support. Use another model class."
            )


@torch.compiler.disable  # lists of lengths would recompile a graph for every micro-batch
def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | int | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    ragged_segments: Segments | None = None,
    sequence_parallel: SequenceParallel | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers calls it: query [1, H, T, D], key and value [1, K, T, D] to [1, T, H, D].

    With `sequence_parallel`, T is the number of this rank's tokens, but `ragged_segments` covers those of all ranks. An
    int as mask is the layer's window: see sliding_windows.py.
    """
    check_attention_arguments(module, attention_mask, dropout, ragged_segments, position_bias)
    assert ragged_segments is not None
    window = attention_mask if isinstance(attention_mask, int) else sliding_window
    # Under autocast, rotary embeddings make queries and keys wider than values, which no fused kernel supports.
    q, k, v = (x.squeeze(0).transpose(0, 1).to(value.dtype) for x in (query, key, value))
    if sequence_parallel is not None:
        q, k, v = sequence_parallel.scatter_heads(q, k, v, sum(ragged_segments.lengths))
        s_aux = s_aux if s_aux is None else s_aux[sequence_parallel.local_slice(len(s_aux))]
    output = ragged_attention(
        q, k, v, ragged_segments, scaling=scaling, sliding_window=window, softcap=softcap, sinks=s_aux
    )
    if sequence_parallel is not None:
        output = sequence_parallel.gather_heads(output)
    return output.unsqueeze(0), None


AttentionInterface.register(RAGGED_ATTENTION_NAME, _attention_forward)
register_window_masks(RAGGED_ATTENTION_NAME)
