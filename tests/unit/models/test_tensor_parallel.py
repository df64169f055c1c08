from __future__ import annotations

import math

import pytest
import torch

from skyrl_train.models.parameter_shards import ParameterShard
from skyrl_train.strategies.checkpoint_shards import ParameterSlice


@pytest.mark.parametrize(
    ("shape", "dim", "blocks"), [((8, 3), 0, 1), ((5, 8), 1, 1), ((2, 12, 3), 1, 2), ((2, 3, 8), 2, 1), ((8,), 0, 1)]
)
def test_parts_are_equal_and_make_up_the_whole(shape: tuple[int, ...], dim: int, blocks: int):
    whole = torch.arange(math.prod(shape)).view(shape)
    places = [ParameterShard(dim, blocks, 2, rank) for rank in range(2)]
    parts = [place.extract(whole) for place in places]
    assert parts[0].shape == parts[1].shape
    assert not set(parts[0].flatten().tolist()) & set(parts[1].flatten().tolist())
    assert all(torch.equal(place.merge(parts), whole) for place in places)
    halves = whole.tensor_split(2 * blocks, dim)
    assert torch.equal(parts[0], torch.cat(halves[::2], dim)), "the first of each block's"


def test_rows_of_a_part_are_rows_of_the_whole_where_it_is_rows_itself_and_all_columns_of_them_elsewhere():
    rows = ParameterSlice((4, 6), "float32", 6, 18)  # rows 1 and 2 of 4
    assert rows.to_full(ParameterShard(0, 1, 2, 1)) == ParameterSlice((8, 6), "float32", 30, 42)
    assert rows.to_full(ParameterShard(1, 1, 3, 2)) == ParameterSlice((4, 18), "float32", 18, 54)
    experts = ParameterSlice((4, 3, 2), "float32", 6, 12)  # the second one
    assert experts.to_full(ParameterShard(1, 2, 2, 0)) == ParameterSlice((4, 6, 2), "float32", 12, 24)
