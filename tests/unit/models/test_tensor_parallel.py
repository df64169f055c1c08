from __future__ import annotations

import math

import pytest
import torch

from skyrl_train.models.parts import Part
from skyrl_train.strategies.shards import Slice


@pytest.mark.parametrize(
    ("shape", "dim", "blocks"), [((8, 3), 0, 1), ((5, 8), 1, 1), ((2, 12, 3), 1, 2), ((2, 3, 8), 2, 1), ((8,), 0, 1)]
)
def test_parts_are_equal_and_make_up_the_whole(shape: tuple[int, ...], dim: int, blocks: int):
    whole = torch.arange(math.prod(shape)).view(shape)
    places = [Part(dim, blocks, 2, rank) for rank in range(2)]
    parts = [place.of(whole) for place in places]
    assert parts[0].shape == parts[1].shape
    assert not set(parts[0].flatten().tolist()) & set(parts[1].flatten().tolist())
    assert all(torch.equal(place.whole(parts), whole) for place in places)
    halves = whole.tensor_split(2 * blocks, dim)
    assert torch.equal(parts[0], torch.cat(halves[::2], dim)), "the first of each block's"


def test_rows_of_a_part_are_rows_of_the_whole_where_it_is_rows_itself_and_all_columns_of_them_elsewhere():
    rows = Slice((4, 6), "float32", 6, 18)  # rows 1 and 2 of 4
    assert rows.within(Part(0, 1, 2, 1)) == Slice((8, 6), "float32", 30, 42)
    assert rows.within(Part(1, 1, 3, 2)) == Slice((4, 18), "float32", 18, 54)
    experts = Slice((4, 3, 2), "float32", 6, 12)  # the second one
    assert experts.within(Part(1, 2, 2, 0)) == Slice((4, 6, 2), "float32", 12, 24)
