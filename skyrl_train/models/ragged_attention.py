"""Causal attention over sequences laid end to end, without padding: for training and for prefill.

Legend: T tokens of all sequences, H query heads, K key/value heads (H a multiple of K), D head size, B sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from skyrl_train.errors import ConfigError

RAGGED = "skyrl_ragged"
"""The name transformers knows this attention by: `model.set_attn_implementation(RAGGED)`."""


@dataclass(frozen=True)
class Segments:
    """Where sequences start and stop, worked out once and used by every layer.

    Neighbours of equal length share one kernel call, so sort by length (`by_length`) where the order is free.
    """

    offsets: Tensor
    """[B+1] int32 on the tokens' device."""
    lengths: tuple[int, ...]
    """[B]"""

    @classmethod
    def of(cls, offsets: Tensor) -> Segments:
        """From [B+1] offsets on any device; waits for the device once."""
        return cls(offsets.to(torch.int32), tuple(offsets.diff().tolist()))

    def runs(self) -> list[tuple[int, int]]:
        """(number of sequences, their length) of neighbours of equal length, in order."""
        return [(len(list(same)), length) for length, same in groupby(self.lengths) if length]

    def by_length(self) -> tuple[Segments, Tensor]:
        """The same sequences sorted by length, and the [T] index that reorders tokens so: `sorted = tokens[index]`."""
        device = self.offsets.device
        rows = sorted(range(len(self.lengths)), key=self.lengths.__getitem__)
        lengths = torch.tensor([self.lengths[row] for row in rows], device=device)
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        starts = self.offsets.long()[torch.tensor(rows, device=device)]
        shift = torch.repeat_interleave(starts - offsets[:-1], lengths)
        tokens = shift + torch.arange(len(shift), device=device)
        return Segments(offsets.to(torch.int32), tuple(self.lengths[row] for row in rows)), tokens


def ragged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments | Tensor,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """softmax(scaling · q kᵀ) v within each sequence, each token seeing itself and what precedes it.

    query [T, H, D], key and value [T, K, D], segments or their offsets [B+1]; returns [T, H, D]. scaling: 1/√D unless
    given. sliding_window: a token sees that many tokens, itself included. softcap c: scores become c·tanh(scores/c).
    """
    if isinstance(segments, Tensor):
        segments = Segments.of(segments)
    assert sum(segments.lengths) == len(query), f"offsets cover {sum(segments.lengths)} of {len(query)} tokens"
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= 256 and softcap is None:
        return _flash(query, key, value, segments, scaling, sliding_window)
    if len(segments.runs()) > len(set(segments.lengths) - {0}):
        segments, tokens = segments.by_length()
        ordered = _by_runs(query[tokens], key[tokens], value[tokens], segments, scaling, sliding_window, softcap)
        return torch.empty_like(ordered).index_copy(0, tokens, ordered)
    return _by_runs(query, key, value, segments, scaling, sliding_window, softcap)


def _flash(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float, window: int | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # needs CUDA's flash kernels, so only where they run

    longest = max(segments.lengths)
    attend: Any = varlen_attn
    output: Tensor = attend(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        segments.offsets,
        segments.offsets,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output


def _by_runs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """One kernel call a run of equal lengths; `split` rather than slices, so that backward is one concatenation."""
    runs = segments.runs()
    sizes = [count * length for count, length in runs]
    outputs = []
    for (count, length), q, k, v in zip(runs, query.split(sizes), key.split(sizes), value.split(sizes), strict=True):
        q, k, v = (x.unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v))  # [count, heads, length, D]
        if softcap is not None:
            output = _softcapped(q, k, v, scaling, window, softcap)
        else:
            banded = window is not None and window < length
            output = scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=_visible(length, window, q.device) if banded else None,
                is_causal=not banded,
                scale=scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


def _softcapped(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None, softcap: float
) -> Tensor:
    """Attention with scores squashed by tanh: no fused kernel computes it, so scores are materialised for each run."""
    count, heads, length, size = query.shape
    grouped = query.unflatten(1, (key.shape[1], -1))  # [count, K, H/K, length, D]
    scores = grouped @ key.unsqueeze(2).transpose(-1, -2) * scaling
    scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~_visible(length, window, query.device), -torch.inf)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
    return (weights @ value.unsqueeze(2)).view(count, heads, length, size)


def _visible(length: int, window: int | None, device: torch.device) -> Tensor:
    """[length, length] bool: which keys (columns) a query (row) sees."""
    seen = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return seen if window is None else seen.triu(1 - window)


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    ragged_segments: Segments | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: query [1, H, T, D], key and value [1, K, T, D]; returns [1, T, H, D]."""
    name = type(module).__name__
    if ragged_segments is None:
        raise ConfigError(
            f"{name} was run without sequence boundaries: its model does not pass keyword arguments on to its "
            "attention as transformers' attention interface asks, or something other than the token scorer called it."
        )
    causal = getattr(module, "is_causal", True)
    for what, present in (
        ("attention dropout", dropout > 0),
        ("attention sinks", s_aux is not None),
        ("a position bias", position_bias is not None),
        ("attention to later tokens", not causal),
        ("a ready-made mask", attention_mask is not None),
    ):
        if present:
            raise ConfigError(f"{name} uses {what}, which attention over unpadded sequences does not support.")
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    output = ragged_attention(q, k, v, ragged_segments, scaling=scaling, sliding_window=sliding_window, softcap=softcap)
    return output.unsqueeze(0), None


AttentionInterface.register(RAGGED, _attention_forward)
