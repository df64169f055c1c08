from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st

from skyrl_train.data.arrays import fresh, give_back, joined, mask_of, spans_of, token_array
from skyrl_train.data.trajectory import Prompt
from tests.support.trajectories import completion_from, trajectory_from


@given(st.lists(st.booleans(), max_size=30))
def test_a_mask_is_its_spans(mask: list[bool]):
    spans = spans_of(mask)
    assert mask_of(spans, len(mask)).tolist() == mask
    assert all(start < stop for start, stop in spans)
    assert all(one[1] < other[0] for one, other in pairwise(spans)), "as few as there can be"


def test_an_array_of_the_right_type_is_not_copied():
    ids = np.arange(3, dtype=np.int32)
    assert token_array(ids) is ids and joined(token_array([]), ids) is ids
    assert token_array([1, 2]).dtype == np.int32


def test_trajectories_and_completions_are_equal_by_their_elements():
    one = trajectory_from(Prompt("0", [], "none"), 0, [1], [2, 3], [1, 1], [-0.5, -1.0], [], 1.0, "stop", 1.0)
    assert one == replace(one, response_ids=token_array([2, 3]))
    assert one != replace(one, response_ids=token_array([2, 4])) and one != replace(one, reward=0.0) and one != 7
    done = completion_from("a", [1], [-1.0], [-1.0], "stop", [])
    assert done == completion_from("a", [1], [-1.0], [-1.0], "stop", [])
    assert done != completion_from("a", [1], [-1.0], [-2.0], "stop", [])


@pytest.mark.parametrize("length", [0, 5, 1 << 20])
def test_fresh_arrays_are_zeros_to_write_to(length: int):
    found = fresh(length, np.float32)
    assert found.shape == (length,) and found.dtype == np.float32 and not found.any()
    found[:] = 2.0
    give_back()
    assert (found == 2.0).all()
