"""Slots of the KV cache: samples share their prompt, and compaction removes empty lanes."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from skyrl_train.engines.transformers.attention import PackedPrompts
from skyrl_train.engines.transformers.cache import DecodeCache, NewPrompt, PromptKey

CPU = torch.device("cpu")


def _packed(lengths: list[int]) -> PackedPrompts:
    """Return prompts of two layers with two heads, in which token t of the pack has key t and value -t."""
    packed = PackedPrompts(lengths, CPU)
    keys = torch.arange(sum(lengths), dtype=torch.float32).view(1, 1, -1, 1).expand(1, 2, -1, 4).contiguous()
    for layer in range(2):
        packed.update(keys, -keys, layer)
        packed.attend(keys, keys, -keys, 1.0, None)
    return packed


def _key(tokens: Iterable[int]) -> PromptKey:
    return PromptKey(tuple(tokens))


def _prompts(lengths: list[int], rows: list[int]) -> list[NewPrompt]:
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    return [
        NewPrompt(_key(range(start, start + length)), count, start)
        for start, length, count in zip(starts, lengths, rows, strict=True)
    ]


def _shape(cache: DecodeCache) -> tuple[int, int]:
    """Return the number of allocated chunks, and the number of lanes of each."""
    lanes = cache.layers_kv[0].lanes_k
    return lanes.shape[0], lanes.shape[2]


@pytest.mark.parametrize(
    ("rows", "chunks", "width"), [([8, 8, 8], 3, 8), ([1, 1, 1], 3, 1), ([5, 5], 2, 5), ([16, 1, 1, 1, 1], 12, 2)]
)
def test_chunk_width_minimizes_memory(rows, chunks, width):
    lengths = [4 * (index + 1) for index in range(len(rows))]
    cache = DecodeCache(CPU)
    slots = cache.allocate_slots(_prompts(lengths, rows), _packed(lengths), frozenset())
    assert len(set(slots)) == sum(rows)
    assert _shape(cache) == (chunks, width)


def test_free_lane_is_used_before_new_chunk():
    cache = DecodeCache(CPU)
    slots = cache.allocate_slots(_prompts([6], [4]), _packed([6]), frozenset())
    cache.release(slots[1:3])
    reused = cache.allocate_slots([NewPrompt(_key(range(6)), 2, None)], None, frozenset())
    assert sorted(reused) == slots[1:3]
    added = cache.allocate_slots([NewPrompt(_key(range(6)), 1, None)], None, frozenset())
    assert added[0] // 4 == 1  # a second chunk, whose prompt is copied from the first
    assert torch.equal(cache.layers_kv[1].prefix_k[1], cache.layers_kv[1].prefix_k[0])


def test_needed_prompt_is_not_overwritten():
    for needed, is_cached in ((frozenset({_key(range(6))}), True), (frozenset(), False)):
        cache = DecodeCache(CPU)
        cache.release(cache.allocate_slots(_prompts([6], [2]), _packed([6]), frozenset()))
        cache.allocate_slots([NewPrompt(_key((90, 91)), 2, 0)], _packed([2]), needed)
        assert cache.has_prompt(_key(range(6))) is is_cached


def test_compaction_preserves_keys_and_values():
    lengths, cache = [8] * 6, DecodeCache(CPU)
    slots = cache.allocate_slots(_prompts(lengths, [8] * 6), _packed(lengths), frozenset())
    cache.begin(slots, [0] * 48)
    states = torch.arange(48, dtype=torch.float32).view(48, 1, 1, 1).expand(48, 2, 1, 4)
    for layer in range(2):
        cache.update(states, states, layer)
        cache.attend(states, states, states, 1.0, None)
    assert cache.compact(frozenset()) is None
    remaining = [3, 17, 40]
    cache.release([slot for row, slot in enumerate(slots) if row not in remaining])
    moved = cache.compact(frozenset())
    assert moved is not None
    assert _shape(cache) == (3, 1)
    for row in remaining:
        chunk = int(moved[slots[row]])
        assert cache.layers_kv[1].lanes_k[chunk, 0, 0, 0, 0] == row
        assert cache.layers_kv[1].prefix_v[chunk, 0, 0, 0] == -(row // 8) * 8


def test_changed_weights_separate_equal_prompts():
    cache = DecodeCache(CPU)
    slots = cache.allocate_slots(_prompts([6], [8]), _packed([6]), frozenset())
    cache.forget_prompts()
    assert not cache.has_prompt(_key(range(6)))
    later = cache.allocate_slots(_prompts([6], [8]), _packed([6]), frozenset())
    assert not {slot // 8 for slot in slots} & {slot // 8 for slot in later}
    cache.release(slots[1:] + later[1:])
    cache.begin([slots[0], later[0]], [0, 0])
    assert cache.compact(frozenset()) is not None
    assert _shape(cache) == (2, 1)
