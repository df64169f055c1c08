from __future__ import annotations

import math

import pytest
import torch

from skyrl_train.models.parameter_shards import ParameterShard
from skyrl_train.strategies.checkpoint_shards import ParameterSlice


@pytest.mark.parametrize(
    ("shape", "dim", "blocks"), [((8, 3), 0, 1), ((5, 8), 1, 1), ((2, 12, 3), 1, 2), ((2, 3, 8), 2, 1), ((8,), 0, 1)]
)
def test_shards_are_equal_and_merge(shape: tuple[int, ...], dim: int, blocks: int):
    full = torch.arange(math.prod(shape)).view(shape)
    shards = [ParameterShard(dim, blocks, 2, rank) for rank in range(2)]
    tensors = [shard.extract(full) for shard in shards]
    assert tensors[0].shape == tensors[1].shape
    assert not set(tensors[0].flatten().tolist()) & set(tensors[1].flatten().tolist())
    assert all(torch.equal(shard.merge(tensors), full) for shard in shards)
    halves = full.tensor_split(2 * blocks, dim)
    assert torch.equal(tensors[0], torch.cat(halves[::2], dim)), "the first part of each block"


def test_slices_of_shards_convert_to_full_parameters():
    rows = ParameterSlice((4, 6), "float32", 6, 18)  # rows 1 and 2 of 4
    assert rows.to_full(ParameterShard(0, 1, 2, 1)) == ParameterSlice((8, 6), "float32", 30, 42)
    assert rows.to_full(ParameterShard(1, 1, 3, 2)) == ParameterSlice((4, 18), "float32", 18, 54)
    experts = ParameterSlice((4, 3, 2), "float32", 6, 12)  # the second one
    assert experts.to_full(ParameterShard(1, 2, 2, 0)) == ParameterSlice((4, 6, 2), "float32", 12, 24)
