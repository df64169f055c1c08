"""Selects and orders the tokens of a ragged batch that go through a model: equal prompts of neighbours only once.

Legend: T tokens of all sequences, U tokens that are computed, B sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_train.models.ragged_attention import Segments, concat_aranges


@dataclass(frozen=True)
class SharedPromptLayout:
    """The order in which sequences go through the model.

    Sequences with the same first tokens become one stretch of these tokens, and one stretch per sequence with the rest,
    which sees both. Stretches are sorted by length, so that those of equal length share an attention call.
    """

    segments: Segments
    token_indices: Tensor
    """[U] int64: indices of the batch's tokens that are computed, in order."""
    inverse_indices: Tensor
    """[T] int64: index of each token of the batch in `tokens`."""

    @classmethod
    def from_offsets(
        cls, offsets: Tensor, shared_prompt_lengths: Tensor | None, min_tokens: int = 1
    ) -> SharedPromptLayout:
        """The packing of sequences with offsets [B+1].

        `repeated` [B]: how many first tokens each sequence has in common with the one before it: 0, or as many as its
        neighbour has, if that is not 0; None: no tokens are shared. `least`: if there are fewer tokens, the last one is
        computed repeatedly and its copies are ignored.
        """
        if min_tokens > 1:
            count = int(offsets[-1])
            missing = min_tokens - count + (0 if shared_prompt_lengths is None else int(shared_prompt_lengths.sum()))
            if missing > 0:
                more = torch.arange(1, missing + 1, device=offsets.device)
                alone = (
                    None
                    if shared_prompt_lengths is None
                    else torch.cat([shared_prompt_lengths, shared_prompt_lengths.new_zeros(missing)])
                )
                full = cls.from_offsets(torch.cat([offsets, offsets[-1] + more]), alone)
                return cls(full.segments, full.token_indices.clamp(max=count - 1), full.inverse_indices[:count])
        if shared_prompt_lengths is None or not bool(shared_prompt_lengths.any()):
            segments, tokens = Segments.from_offsets(offsets).sort_by_length()
            places = torch.empty_like(tokens).index_copy(0, tokens, torch.arange(len(tokens), device=tokens.device))
            return cls(segments, tokens, places)
        return _share_prompts(offsets.cpu(), shared_prompt_lengths.cpu(), offsets.device)


def _share_prompts(offsets: Tensor, shared_prompt_lengths: Tensor, device: torch.device) -> SharedPromptLayout:
    """The packing with shared first tokens: computed on the CPU, where the lengths are needed in any case."""
    starts, lengths = offsets[:-1], offsets.diff()
    # The root of a sequence is the last one before it that shares nothing with its own predecessor.
    rows = torch.arange(len(starts))
    roots = torch.where(shared_prompt_lengths == 0, rows, 0).cummax(0).values
    following = torch.cat([shared_prompt_lengths[1:], shared_prompt_lengths.new_zeros(1)])
    prefix = torch.where(
        shared_prompt_lengths > 0, shared_prompt_lengths, following
    )  # [B] what a sequence shares with any neighbour
    same = (shared_prompt_lengths[1:] == 0) | (shared_prompt_lengths[1:] == prefix[:-1])
    assert bool(same.all()), "neighbours share different numbers of tokens"

    # Stretches: what is shared, of the roots that share something; then what is each sequence's own.
    sharing = rows[(roots == rows) & (prefix > 0)]
    begin = torch.cat([starts[sharing], starts + prefix])
    size = torch.cat([prefix[sharing], lengths - prefix])
    before = torch.cat([torch.zeros_like(sharing), prefix]) * (size > 0)  # tokens seen before the first one
    sizes = list(zip(size.tolist(), before.tolist(), strict=True))
    order = torch.tensor(sorted(range(len(sizes)), key=sizes.__getitem__))
    begin, size, before = begin[order], size[order], before[order]
    stretch_offsets = torch.cat([size.new_zeros(1), size.cumsum(0)])
    tokens = concat_aranges(begin, size)

    places = torch.empty(int(offsets[-1]), dtype=torch.int64)
    places[tokens] = torch.arange(len(tokens))
    copies = shared_prompt_lengths > 0
    places[concat_aranges(starts[copies], prefix[copies])] = places[
        concat_aranges(starts[roots[copies]], prefix[copies])
    ]

    own = stretch_offsets[:-1]
    rank_of = torch.empty_like(order).index_copy(0, order, torch.arange(len(order)))  # stretch -> its place in order
    stretch_of_root = torch.zeros_like(rows).index_copy(0, sharing, rank_of[: len(sharing)])
    row_of = torch.cat([sharing, rows])[order]
    shared_start = own[stretch_of_root[roots[row_of]]]
    key_starts = torch.stack([shared_start, own], 1).flatten()
    keys = concat_aranges(key_starts, torch.stack([before, size], 1).flatten())
    seen = before + size
    return SharedPromptLayout(
        Segments(
            offsets=stretch_offsets.to(device, torch.int32),
            lengths=tuple(size.tolist()),
            key_indices=keys.to(device),
            key_offsets=torch.cat([seen.new_zeros(1), seen.cumsum(0)]).to(device, torch.int32),
            key_lengths=tuple(seen.tolist()),
        ),
        tokens.to(device),
        places.to(device),
    )
