"""The order in which a ragged batch goes through a model: equal prompts of adjacent sequences run once.

Legend: T tokens of all sequences, U tokens that go through the model, B sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_train.models.ragged_attention import Segments, SharedTokens, concat_aranges


@dataclass(frozen=True)
class SharedPromptLayout:
    """The tokens that go through the model, and their order.

    Adjacent sequences with the same leading tokens become one segment of these tokens, and one segment per sequence
    with the rest, which attends to both. Segments are sorted by length, so that those of equal length share an
    attention call.
    """

    segments: Segments
    token_indices: Tensor
    """[U] int64: indices of the batch's tokens that go through the model, in order."""
    inverse_indices: Tensor
    """[T] int64: index of each token of the batch in `token_indices`."""

    @classmethod
    def from_offsets(
        cls, offsets: Tensor, shared_prompt_lengths: Tensor | None, min_tokens: int = 1
    ) -> SharedPromptLayout:
        """Return the layout of a batch, with shared prompts only once.

        Args:
            offsets: Sequence boundaries [B+1].
            shared_prompt_lengths: Number of leading tokens that each sequence shares with the previous one [B], such as
                [0, 5, 5, 0, 3] for a group of three sequences and one of two. The first sequence of a group has 0, and
                all others of the group have the same number. None: no tokens are shared.
            min_tokens: Minimum number of tokens that go through the model. If the batch has fewer, its last token is
                repeated and the copies are ignored.

        Raises:
            AssertionError: Sequences of one group have different numbers.
        """
        if min_tokens > 1:
            count = int(offsets[-1])
            missing = min_tokens - count + (0 if shared_prompt_lengths is None else int(shared_prompt_lengths.sum()))
            if missing > 0:
                extra = torch.arange(1, missing + 1, device=offsets.device)
                padded_lengths = (
                    None
                    if shared_prompt_lengths is None
                    else torch.cat([shared_prompt_lengths, shared_prompt_lengths.new_zeros(missing)])
                )
                padded = cls.from_offsets(torch.cat([offsets, offsets[-1] + extra]), padded_lengths)
                return cls(padded.segments, padded.token_indices.clamp(max=count - 1), padded.inverse_indices[:count])
        if shared_prompt_lengths is None or not bool(shared_prompt_lengths.any()):
            segments, token_indices = Segments.from_offsets(offsets).sort_by_length()
            inverse_indices = torch.empty_like(token_indices).index_copy(
                0, token_indices, torch.arange(len(token_indices), device=token_indices.device)
            )
            return cls(segments, token_indices, inverse_indices)
        return _share_prompts(offsets.cpu(), shared_prompt_lengths.cpu(), offsets.device)


def _share_prompts(offsets: Tensor, shared_prompt_lengths: Tensor, device: torch.device) -> SharedPromptLayout:
    """Return the layout with shared prompts. It is computed on the CPU, where the lengths are needed in any case."""
    starts, lengths = offsets[:-1], offsets.diff()
    # The root of a sequence is the last one before it that shares nothing with its own predecessor.
    rows = torch.arange(len(starts))
    roots = torch.where(shared_prompt_lengths == 0, rows, 0).cummax(0).values
    next_lengths = torch.cat([shared_prompt_lengths[1:], shared_prompt_lengths.new_zeros(1)])
    # [B] number of tokens that a sequence shares with an adjacent one
    prefix = torch.where(shared_prompt_lengths > 0, shared_prompt_lengths, next_lengths)
    is_consistent = (shared_prompt_lengths[1:] == 0) | (shared_prompt_lengths[1:] == prefix[:-1])
    assert bool(is_consistent.all()), "adjacent sequences share different numbers of tokens"

    # Segments: the shared tokens of each root that shares some, then the other tokens of each sequence.
    shared_roots = rows[(roots == rows) & (prefix > 0)]
    segment_starts = torch.cat([starts[shared_roots], starts + prefix])
    segment_lengths = torch.cat([prefix[shared_roots], lengths - prefix])
    num_shared_keys = torch.cat([torch.zeros_like(shared_roots), prefix]) * (segment_lengths > 0)
    sort_keys = list(zip(segment_lengths.tolist(), num_shared_keys.tolist(), strict=True))
    order = torch.tensor(sorted(range(len(sort_keys)), key=sort_keys.__getitem__))
    segment_starts, segment_lengths, num_shared_keys = (
        segment_starts[order],
        segment_lengths[order],
        num_shared_keys[order],
    )
    segment_offsets = torch.cat([segment_lengths.new_zeros(1), segment_lengths.cumsum(0)])
    token_indices = concat_aranges(segment_starts, segment_lengths)

    inverse_indices = torch.empty(int(offsets[-1]), dtype=torch.int64)
    inverse_indices[token_indices] = torch.arange(len(token_indices))
    copies = shared_prompt_lengths > 0
    inverse_indices[concat_aranges(starts[copies], prefix[copies])] = inverse_indices[
        concat_aranges(starts[roots[copies]], prefix[copies])
    ]

    own_starts = segment_offsets[:-1]
    sorted_index = torch.empty_like(order).index_copy(0, order, torch.arange(len(order)))  # unsorted -> sorted
    segment_of_root = torch.zeros_like(rows).index_copy(0, shared_roots, sorted_index[: len(shared_roots)])
    row_of_segment = torch.cat([shared_roots, rows])[order]
    shared_starts = own_starts[segment_of_root[roots[row_of_segment]]]
    key_starts = torch.stack([shared_starts, own_starts], 1).flatten()
    key_indices = concat_aranges(key_starts, torch.stack([num_shared_keys, segment_lengths], 1).flatten())
    key_lengths = num_shared_keys + segment_lengths
    return SharedPromptLayout(
        Segments(
            offsets=segment_offsets.to(device, torch.int32),
            lengths=tuple(segment_lengths.tolist()),
            key_indices=key_indices.to(device),
            key_offsets=torch.cat([key_lengths.new_zeros(1), key_lengths.cumsum(0)]).to(device, torch.int32),
            key_lengths=tuple(key_lengths.tolist()),
            shared=SharedTokens(lengths, inverse_indices, token_indices),
        ),
        token_indices.to(device),
        inverse_indices.to(device),
    )
