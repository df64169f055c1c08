"""The KV cache of running requests, in which samples of one prompt share the prompt's keys and values.

    chunk c ──► prefix [Hk, P, D]      the prompt, stored once
            └─► lanes  [Hk, w, S, D]   the generated tokens of up to w rows with this prompt

Attention over the prefix is one matrix product for all rows of a chunk. It reads the prompt's keys once instead of w
times, and reading them is the main cost of decoding. A row is identified by its slot, c * w + lane.

The states of recurrent layers have one size for all lengths: see recurrent_states.py. They are stacked in the order of
the rows of a step, and copied when that changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import Cache

from skyrl_train.engines.transformers.adapters import Adapter
from skyrl_train.engines.transformers.attention import PackedPrompts
from skyrl_train.engines.transformers.recurrent_states import Mix, RecurrentStates, StateRow, gather_states


class PromptKey(NamedTuple):
    """The identity of a prompt in the cache: everything that determines its keys and values, except the weights."""

    token_ids: tuple[int, ...]
    adapter: Adapter | None = None


@dataclass(slots=True)
class NewPrompt:
    """A prompt, and the number of its rows that need slots in the cache."""

    key: PromptKey
    rows: int
    start: int | None
    """Index of the prompt's first token in the packed forward pass; None if the prompt is cached already."""

    @property
    def length(self) -> int:
        """The number of tokens of the prompt."""
        return len(self.key.token_ids)


@dataclass(slots=True)
class _Layer:
    prefix_k: Tensor
    """[C, Hk, P, D]"""
    prefix_v: Tensor
    lanes_k: Tensor
    """[C, Hk, w, S, D]"""
    lanes_v: Tensor

    @property
    def heads(self) -> int:
        return self.prefix_k.shape[1]


@dataclass(slots=True)
class _Chunk:
    key: PromptKey | None
    """None for an empty chunk, and for one whose prompt was prefilled with older weights."""
    length: int
    used: list[bool] = field(default_factory=list)

    @property
    def live(self) -> int:
        return sum(self.used)


@dataclass(slots=True)
class _Step:
    """The state of one decode step, which all layers share. Tensors are on the device."""

    slots: Tensor
    """[B]"""
    head_rows: dict[int, Tensor]
    """Index of each row and head in [C * Hk * w]: [B * Hk], by Hk."""
    write_at: dict[int, Tensor]
    """Index of each row's new token in [C * Hk * w * S]: [B * Hk], by Hk."""
    positions: Tensor
    """Position of the new token in its sequence: [B]."""
    visible_at: Tensor
    """Index of the new token in the lane mask: [B]."""
    prefix_tokens: int
    """Number of prefix columns that are read."""
    stored: int
    """Number of tokens in the longest lane, including the new one."""
    longest: int
    """Length of the longest sequence, including the new token."""
    windows: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def lane_tokens(self) -> int:
        """Number of lane columns that are read."""
        return _round_up(self.stored)


class DecodeCache(Cache):
    """The KV cache of running rows, and the attention plan of decode steps. Only the engine's thread may use it."""

    def __init__(self, device: torch.device):
        """Create an empty cache, which allocates memory on `device` with its first prompt."""
        super().__init__(layers=[])
        self._device = device
        self.reset()

    def reset(self) -> None:
        """Drop all rows and prompts, and free their memory."""
        self.layers_kv: dict[int, _Layer] = {}
        """Keys and values of each attention layer, by its index; empty until the first prompt is stored."""
        self._chunks: list[_Chunk] = []
        self._width = 1
        self._capacity = self._prefix_capacity = self._lane_capacity = 0
        self._step: _Step | None = None
        self._current = 0
        self._queries: dict[tuple[int, int], Tensor] = {}
        self._prefix_mask = self._lane_mask = torch.empty(0)
        self._row_states: dict[int, StateRow] = {}
        """The states of recurrent layers by slot. New rows share the states of their prompt until `begin` copies them.
        Empty for a model without recurrent layers."""
        self._prompt_states: dict[PromptKey, StateRow] = {}
        """The states of recurrent layers at the end of prompts that later rows may share."""
        self._is_recurrent = False
        """True once prompts with states have been stored."""
        self._states: RecurrentStates | None = None
        """The states of the rows of the current step, which its layers update."""

    # -- called by transformers --------------------------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: to transformers the cache is empty, because the caller passes explicit position ids."""
        return 0

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any):  # type: ignore[no-untyped-def]
        self._current = layer_idx
        return key_states, value_states  # They may be compressed. `attend` receives and stores the expanded ones.

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
        *,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        layer, step = self.layers_kv[self._current], self._step
        assert step is not None
        write_at = step.write_at[layer.heads]
        for store, states in ((layer.lanes_k, key), (layer.lanes_v, value)):
            store.view(-1, store.shape[-1]).index_copy_(0, write_at, states.reshape(-1, store.shape[-1]))
        rows, heads, _, width = query.shape
        kv_heads, chunks, lanes = layer.heads, len(self._chunks), self._width
        per_head, columns = heads // kv_heads, (step.prefix_tokens, step.lane_tokens)
        head_rows = step.head_rows[kv_heads]
        q = self._query_buffer(chunks * kv_heads * lanes, per_head * width, query)
        q.index_copy_(0, head_rows, query.reshape(rows * kv_heads, per_head * width))
        shared = q.view(chunks * kv_heads, lanes * per_head, width)
        own = q.view(chunks * kv_heads * lanes, per_head, width)

        def read(store: Tensor, batch: int, count: int) -> Tensor:
            return store[:chunks].view(batch, -1, store.shape[-1])[:, :count]

        unused = query.new_empty(1, 1, 1)  # beta=0: baddbmm ignores its first argument
        parts = [
            torch.baddbmm(unused, x, read(store, x.shape[0], count).transpose(1, 2), beta=0, alpha=scaling)
            for x, store, count in zip((shared, own), (layer.prefix_k, layer.lanes_k), columns, strict=True)
        ]
        if softcap:
            parts = [part.div_(softcap).tanh_().mul_(softcap) for part in parts]
        scores = query.new_empty(chunks, kv_heads, lanes, per_head, sum(columns) + (sinks is not None))
        masks = self._masks(window)
        torch.add(parts[0].view(*scores.shape[:4], -1), masks[0], out=scores[..., : columns[0]])
        torch.add(parts[1].view(*scores.shape[:4], -1), masks[1], out=scores[..., columns[0] : sum(columns)])
        if sinks is not None:
            scores[..., -1] = sinks.view(kv_heads, 1, per_head)
        weights = scores.softmax(-1, dtype=torch.promote_types(query.dtype, torch.float32)).to(query.dtype)
        out = torch.bmm(
            weights.view(*shared.shape[:2], -1)[..., : columns[0]],
            read(layer.prefix_v, shared.shape[0], columns[0]),
        )
        out = out.view(own.shape[0], per_head, -1)
        out.baddbmm_(
            weights.view(*own.shape[:2], -1)[..., columns[0] : sum(columns)],
            read(layer.lanes_v, own.shape[0], columns[1]),
        )
        return out.view(own.shape[0], -1).index_select(0, head_rows).view(rows, 1, heads, -1)

    def mix(self, mix: Mix, hidden_states: Tensor) -> Tensor:
        """Run a recurrent layer on the new token of every row."""
        assert self._states is not None
        return mix(hidden_states, self._states.cache, slice(0, len(hidden_states)))

    # -- slots of rows -----------------------------------------------------------------------------------------------

    def has_prompt(self, key: PromptKey) -> bool:
        """True if the keys, values and states of this prompt are cached and valid for the current weights."""
        # A row may still use the keys and values of a prompt whose states were not kept, because nobody needed them.
        has_states = not self._is_recurrent or key in self._prompt_states
        return has_states and any(chunk.key == key for chunk in self._chunks)

    def forget_prompts(self) -> None:
        """Stop sharing cached prompts with new rows, for example after a change of weights.

        Running rows keep their keys, values and states.
        """
        self._prompt_states.clear()
        for chunk in self._chunks:
            chunk.key = None

    def allocate_slots(
        self, prompts: Sequence[NewPrompt], packed: PackedPrompts | None, needed: frozenset[PromptKey]
    ) -> list[int]:
        """Allocate slots for new rows, and store their prompts' keys, values and states.

        Args:
            prompts: The prompts, with the number of new rows of each.
            packed: Keys, values and states of the prompts whose `start` is not None; None if there is no such prompt.
            needed: Prompts that stay cached even if they have no rows.

        Returns:
            The slot of every new row, in the order of `prompts`.
        """
        if not self._chunks:
            self._width = _best_width([(p.length, p.rows) for p in prompts], lane_tokens=32)
        slots: list[int] = []
        writes: list[tuple[int, NewPrompt]] = []
        for prompt in prompts:
            end = len(slots) + prompt.rows
            for index, chunk in enumerate(self._chunks):
                if chunk.key == prompt.key:
                    slots += self._take_lanes(index, end - len(slots))
            while len(slots) < end:
                index = self._free_chunk(needed)
                self._chunks[index] = _Chunk(prompt.key, prompt.length, [False] * self._width)
                writes.append((index, prompt))
                slots += self._take_lanes(index, end - len(slots))
            self._share_states(prompt, slots[end - prompt.rows :], packed, keep=prompt.key in needed)
        self._prompt_states = {key: state for key, state in self._prompt_states.items() if key in needed}
        if writes:
            self._write_prompts(writes, packed)
        self._hide_lanes(slots)
        return slots

    def release(self, slots: Sequence[int]) -> None:
        """Free the lanes of rows that have ended."""
        for slot in slots:
            self._chunks[slot // self._width].used[slot % self._width] = False
            self._row_states.pop(slot, None)
        if not self._row_states:
            self._states = None  # requests may wait for a long time, for example while the engine is paused

    def compact(self, needed: frozenset[PromptKey]) -> np.ndarray | None:
        """Move the rows into fewer or smaller chunks if at least half of the lanes are empty and that saves memory.

        Args:
            needed: Prompts that stay cached even if they have no rows.

        Returns:
            The new slot by old slot, -1 for slots without a row; None if nothing moved.
        """
        live = [index for index, chunk in enumerate(self._chunks) if chunk.live or chunk.key in needed]
        rows = sum(chunk.live for chunk in self._chunks)
        slots = len(self._chunks) * self._width
        if slots < 8 or rows * 2 > slots:
            return None
        by_prompt: dict[object, list[int]] = {}
        for index in live:
            # Chunks of forgotten prompts may have been computed with different weights, so they are never merged.
            key = self._chunks[index].key
            by_prompt.setdefault(index if key is None else key, []).append(index)
        counts = [
            (self._chunks[indices[0]].length, max(1, sum(self._chunks[i].live for i in indices)))
            for indices in by_prompt.values()
        ]
        tokens = self._step.lane_tokens if self._step else 1
        width = _best_width(counts, tokens)
        longest = max(chunk.length for chunk in self._chunks)
        if _cost(counts, width, tokens) > 0.7 * len(self._chunks) * (longest + self._width * tokens):
            return None
        return self._rearrange(list(by_prompt.values()), width)

    # -- a step ------------------------------------------------------------------------------------------------------

    def begin(self, slots: Sequence[int] | np.ndarray, stored: Sequence[int] | np.ndarray) -> None:
        """Start a decode step with a new batch.

        Args:
            slots: The slots of the rows, [B].
            stored: How many sampled tokens of each row the cache stores already, [B].
        """
        if self._row_states:
            self._gather_states([int(slot) for slot in slots])
        slots, generated = np.asarray(slots), np.asarray(stored)
        lengths = np.array([chunk.length for chunk in self._chunks])
        self._reserve_lanes(int(generated.max()) + 1)
        prefix = lengths[slots // self._width]
        head_rows, write_at = {}, {}
        for heads in {layer.heads for layer in self.layers_kv.values()}:
            chunk, lane = slots // self._width, slots % self._width
            rows = ((chunk[:, None] * heads + np.arange(heads)) * self._width + lane[:, None]).reshape(-1)
            head_rows[heads] = self._to_device(rows)
            write_at[heads] = self._to_device(rows * self._lane_capacity + np.repeat(generated, heads))
        self._step = _Step(
            slots=self._to_device(slots),
            head_rows=head_rows,
            write_at=write_at,
            positions=self._to_device(prefix + generated),
            visible_at=self._to_device(slots * self._lane_capacity + generated),
            prefix_tokens=_round_up(int(lengths.max())),
            stored=int(generated.max()) + 1,
            longest=int((prefix + generated).max()) + 1,
        )
        self._lane_mask.view(-1)[self._step.visible_at] = 0.0

    def advance(self) -> bool:
        """Start the next decode step with the same rows.

        Returns:
            False if nothing was done because the lanes are full or there is no batch. The caller then calls `begin`,
            which enlarges the lanes.
        """
        step = self._step
        if step is None or step.stored >= self._lane_capacity:
            return False
        for at in step.write_at.values():
            at += 1
        step.positions += 1
        step.visible_at += 1
        step.stored += 1
        step.longest += 1
        step.windows.clear()
        self._lane_mask.view(-1)[step.visible_at] = 0.0
        return True

    def _gather_states(self, slots: Sequence[int]) -> None:
        """Stack the states of these rows in their order, for the layers of a step."""
        rows = [self._row_states[slot] for slot in slots]
        stacked = self._states
        if stacked is None or rows != [StateRow(stacked, row) for row in range(stacked.count)]:
            self._states = gather_states(rows, freed=stacked)
            self._row_states = {slot: StateRow(self._states, row) for row, slot in enumerate(slots)}

    @property
    def positions(self) -> Tensor:
        """Position of each row's new token in its sequence, [B, 1]."""
        assert self._step is not None
        return self._step.positions.unsqueeze(1)

    def _masks(self, window: int | None) -> tuple[Tensor, Tensor]:
        """Return the masks to add to prefix and lane scores, broadcastable to [C, Hk, w, per_head, tokens]."""
        step, chunks = self._step, len(self._chunks)
        assert step is not None
        prefix = self._prefix_mask[:chunks, : step.prefix_tokens].view(chunks, 1, 1, 1, -1)
        lanes = self._lane_mask[:chunks, :, : step.lane_tokens].view(chunks, 1, self._width, 1, -1)
        if window is None or window >= step.longest:
            return prefix, lanes
        if window not in step.windows:
            last = torch.zeros(chunks * self._width, dtype=torch.long, device=self._device)
            last[step.slots] = step.positions
            last = last.view(chunks, 1, self._width, 1, 1)
            lengths = self._to_device(np.array([chunk.length for chunk in self._chunks])).view(-1, 1, 1, 1, 1)
            hidden = torch.finfo(prefix.dtype).min
            at = torch.arange(step.prefix_tokens, device=self._device)
            own = lengths + torch.arange(step.lane_tokens, device=self._device)
            step.windows[window] = (
                prefix.masked_fill(at <= last - window, hidden),
                lanes.masked_fill(own <= last - window, hidden),
            )
        return step.windows[window]

    # -- memory ------------------------------------------------------------------------------------------------------

    def _to_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(self._device)

    def _query_buffer(self, rows: int, width: int, like: Tensor) -> Tensor:
        """Return a buffer [rows, width]. Lanes without a row contain stale but finite numbers."""
        buffer = self._queries.get((rows, width))
        if buffer is None:
            self._queries.clear()
            buffer = self._queries[rows, width] = like.new_zeros(rows, width)
        return buffer

    def _take_lanes(self, index: int, count: int) -> list[int]:
        """Take up to `count` free lanes of a chunk and return their slots."""
        used = self._chunks[index].used
        lanes = [lane for lane, taken in enumerate(used) if not taken][:count]
        for lane in lanes:
            used[lane] = True
        return [index * self._width + lane for lane in lanes]

    def _share_states(
        self, prompt: NewPrompt, slots: Sequence[int], packed: PackedPrompts | None, *, keep: bool
    ) -> None:
        """Give new rows the states of recurrent layers at the end of their prompt, and keep a copy if `keep` is set."""
        self._is_recurrent |= packed is not None and bool(packed.states)
        if not self._is_recurrent:
            return
        if packed is not None and prompt.start is not None:
            state = packed.states[prompt.start]
            if keep:  # a copy, because the states of all prompts of equal length share memory
                self._prompt_states[prompt.key] = StateRow(gather_states([state]), 0)
        else:
            state = self._prompt_states[prompt.key]
        self._row_states |= dict.fromkeys(slots, state)

    def _free_chunk(self, needed: frozenset[PromptKey]) -> int:
        for index, chunk in enumerate(self._chunks):
            if not chunk.live and chunk.key not in needed:
                return index
        self._chunks.append(_Chunk(None, 0))
        return len(self._chunks) - 1

    def _write_prompts(self, writes: Sequence[tuple[int, NewPrompt]], packed: PackedPrompts | None) -> None:
        """Fill the prefixes of chunks, from the packed forward pass or from another chunk of the same prompt."""
        longest = max(prompt.length for _, prompt in writes)
        if not self.layers_kv:
            assert packed is not None
            self.layers_kv = {index: _empty_layer(k, v) for index, (k, v) in packed.layers_kv.items()}
        if len(self._chunks) > self._capacity or longest > self._prefix_capacity or not self._lane_capacity:
            grown = len(self._chunks) if not self._capacity else max(len(self._chunks), self._capacity * 3 // 2)
            self._reallocate(
                self._capacity if len(self._chunks) <= self._capacity else grown,
                max(self._prefix_capacity, _round_up(longest)),
                self._lane_capacity or 32,
            )
        by_length: dict[int, list[tuple[int, int]]] = {}
        written = {index for index, _ in writes}
        for index, prompt in writes:
            if prompt.start is not None:
                by_length.setdefault(prompt.length, []).append((index, prompt.start))
                continue
            twin = next(i for i, chunk in enumerate(self._chunks) if chunk.key == prompt.key and i not in written)
            for layer in self.layers_kv.values():
                layer.prefix_k[index], layer.prefix_v[index] = layer.prefix_k[twin], layer.prefix_v[twin]
        for length, sources in by_length.items():
            assert packed is not None
            targets = self._to_device(np.array([index for index, _ in sources]))
            tokens = self._to_device(np.array([start for _, start in sources])[:, None] + np.arange(length))
            for layer_idx, layer in self.layers_kv.items():
                key, value = packed.layers_kv[layer_idx]
                layer.prefix_k[targets, :, :length] = key[0][:, tokens].transpose(0, 1)
                layer.prefix_v[targets, :, :length] = value[0][:, tokens].transpose(0, 1)
        hidden = torch.finfo(self._prefix_mask.dtype).min
        for index, prompt in writes:
            self._prefix_mask[index] = hidden
            self._prefix_mask[index, : prompt.length] = 0.0

    def _hide_lanes(self, slots: Sequence[int]) -> None:
        rows = self._lane_mask.view(-1, self._lane_capacity)
        rows[self._to_device(np.array(slots))] = torch.finfo(rows.dtype).min

    def _reserve_lanes(self, tokens: int) -> None:
        if tokens > self._lane_capacity:
            self._reallocate(self._capacity, self._prefix_capacity, max(_round_up(tokens), 2 * self._lane_capacity))

    def _rearrange(self, groups: Sequence[Sequence[int]], width: int) -> np.ndarray:
        """Move the rows of each group of chunks, which share a prompt, into chunks of `width` lanes."""
        moved = np.full(len(self._chunks) * self._width, -1, dtype=np.int64)
        chunks: list[_Chunk] = []
        source: list[int] = []
        for group in groups:
            old = [i * self._width + lane for i in group for lane, used in enumerate(self._chunks[i].used) if used]
            for first in range(0, max(len(old), 1), width):
                rows = old[first : first + width]
                moved[rows] = len(chunks) * width + np.arange(len(rows))
                old_chunk = self._chunks[group[0]]
                chunks.append(_Chunk(old_chunk.key, old_chunk.length, [lane < len(rows) for lane in range(width)]))
                source.append(group[0])
        old_slots = np.flatnonzero(moved >= 0)
        old_width, self._width = self._width, width
        longest = max(chunk.length for chunk in chunks)
        self._reallocate(
            len(chunks),
            _round_up(longest),
            self._lane_capacity,
            np.array(source),
            old_slots,
            moved[old_slots],
            old_width,
        )
        self._chunks = chunks
        self._row_states = {int(moved[slot]): state for slot, state in self._row_states.items()}
        self._step = None
        return moved

    def _reallocate(
        self,
        capacity: int,
        prefix_capacity: int,
        lane_capacity: int,
        source: np.ndarray | None = None,
        old_slots: np.ndarray | None = None,
        new_slots: np.ndarray | None = None,
        old_width: int | None = None,
    ) -> None:
        """Copy all keys and values into new tensors of another size, one layer at a time.

        New chunk i gets the prefix of old chunk `source[i]`, and rows move from `old_slots` to `new_slots`. Without
        these arguments all rows keep their slots.
        """
        old_capacity, width, old_width = self._capacity, self._width, old_width or self._width
        if source is None or old_slots is None or new_slots is None:
            source, old_slots = np.arange(old_capacity), np.arange(old_capacity * width)
            new_slots = old_slots
        chunk_from = self._to_device(source)
        old_chunk, old_lane = self._to_device(old_slots // old_width), self._to_device(old_slots % old_width)
        new_chunk, new_lane = self._to_device(new_slots // width), self._to_device(new_slots % width)
        prefix = min(self._prefix_capacity, prefix_capacity)
        lanes = min(self._lane_capacity, lane_capacity)

        def moved_prefix(old: Tensor) -> Tensor:
            new = old.new_zeros(capacity, old.shape[1], prefix_capacity, old.shape[-1])
            new[: len(source), :, :prefix] = old[:, :, :prefix].index_select(0, chunk_from)
            return new

        def moved_lanes(old: Tensor) -> Tensor:
            new = old.new_zeros(capacity, old.shape[1], width, lane_capacity, old.shape[-1])
            new[new_chunk, :, new_lane, :lanes] = old[old_chunk, :, old_lane, :lanes]
            return new

        for layer in self.layers_kv.values():
            layer.prefix_k, layer.prefix_v = moved_prefix(layer.prefix_k), moved_prefix(layer.prefix_v)
            layer.lanes_k, layer.lanes_v = moved_lanes(layer.lanes_k), moved_lanes(layer.lanes_v)
        like = next(iter(self.layers_kv.values())).prefix_k
        hidden = torch.finfo(like.dtype).min
        prefix_mask = like.new_full((capacity, prefix_capacity), hidden)
        lane_mask = like.new_full((capacity, width, lane_capacity), hidden)
        if old_capacity:
            prefix_mask[: len(source), :prefix] = self._prefix_mask[chunk_from, :prefix]
            lane_mask[new_chunk, new_lane, :lanes] = self._lane_mask[old_chunk, old_lane, :lanes]
        self._prefix_mask, self._lane_mask = prefix_mask, lane_mask
        self._capacity, self._prefix_capacity, self._lane_capacity = capacity, prefix_capacity, lane_capacity
        self._queries.clear()


def _empty_layer(key: Tensor, value: Tensor) -> _Layer:
    heads = key.shape[1]
    return _Layer(
        key.new_empty(0, heads, 0, key.shape[-1]),
        value.new_empty(0, heads, 0, value.shape[-1]),
        key.new_empty(0, heads, 1, 0, key.shape[-1]),
        value.new_empty(0, heads, 1, 0, value.shape[-1]),
    )


def _round_up(tokens: int) -> int:
    # On CPUs, matrix products with fewer than 8 columns are several times slower.
    return -(-tokens // 8) * 8


def _cost(prompts: Sequence[tuple[int, int]], width: int, lane_tokens: int) -> int:
    """Return how many tokens the cache stores, and a step reads, with chunks of `width` lanes.

    Args:
        prompts: (length of the prompt, number of rows) of each prompt.
    """
    longest = max(length for length, _ in prompts)
    return sum(-(-rows // width) for _, rows in prompts) * (longest + width * lane_tokens)


def _best_width(prompts: Sequence[tuple[int, int]], lane_tokens: int) -> int:
    max_rows = max(rows for _, rows in prompts)
    widths = {rows for _, rows in prompts} | {1 << power for power in range(max_rows.bit_length())}
    return min(sorted(widths, reverse=True), key=lambda width: _cost(prompts, width, lane_tokens))
