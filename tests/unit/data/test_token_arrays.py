from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from skyrl_train.data.messages import Prompt
from skyrl_train.data.token_arrays import (
    append_array,
    lazy_zeros,
    mask_to_spans,
    spans_to_mask,
    to_token_array,
    trim_memory,
)
from skyrl_train.engines.base import Capabilities, SampleRequest, SamplingParams
from skyrl_train.engines.sampling_params import RequestValidator
from skyrl_train.errors import UnsupportedParameter
from tests.support.trajectories import completion_from, trajectory_from


@given(st.lists(st.booleans(), max_size=30))
def test_a_mask_is_its_spans(mask: list[bool]):
    spans = mask_to_spans(mask)
    assert spans_to_mask(spans, len(mask)).tolist() == mask
    assert all(start < stop for start, stop in spans)
    assert all(one[1] < other[0] for one, other in pairwise(spans)), "as few as there can be"


def test_array_of_right_type_is_not_copied():
    ids = np.arange(3, dtype=np.int32)
    assert to_token_array(ids) is ids and append_array(to_token_array([]), ids) is ids
    assert to_token_array([1, 2]).dtype == np.int32


def test_appended_view_does_not_keep_base():
    answers = np.arange(100, dtype=np.int32)
    kept = append_array(to_token_array([]), answers[:3])
    assert kept.tolist() == [0, 1, 2] and not np.shares_memory(kept, answers)


@pytest.mark.parametrize("ids", [[1, 2, 3], (1, 2, 3), np.arange(1, 4, dtype=np.int32), (1, *np.arange(2, 4))])
def test_scored_ids_are_python_integers(ids: Any):
    request = SampleRequest("a", ids, SamplingParams(max_tokens=1), 0)
    assert request.token_ids.tolist() == [1, 2, 3] and request.token_ids.dtype == np.int32
    assert (
        request
        == replace(request, token_ids=to_token_array([1, 2, 3]))
        != replace(request, token_ids=to_token_array([1]))
    )
    scored = RequestValidator(Capabilities("any"), vocab_size=4, max_model_len=9, max_score_len=9).check_score(
        [ids], 1.0
    )
    assert scored == [(1, 2, 3)] and {*map(type, scored[0])} == {int}


@pytest.mark.parametrize(
    "ids",
    [
        *([1.5], [2**31], [2**70], ["7"], [[1, 2], [3]], 5, None, {1, 2}),
        *(np.array([0.5]), np.array([2**32 + 5]), np.array([[1, 2, 3]], np.int32)),
    ],
)
def test_a_request_refuses_what_are_no_token_ids(ids: Any):
    with pytest.raises(UnsupportedParameter, match=r"request 'a': token_ids must be one flat list of integers"):
        SampleRequest("a", ids, SamplingParams(max_tokens=1), 0)


def test_trajectories_and_completions_are_equal_by_their_elements():
    one = trajectory_from(Prompt("0", [], "none"), 0, [1], [2, 3], [1, 1], [-0.5, -1.0], [], 1.0, "stop", 1.0)
    assert one == replace(one, response_ids=to_token_array([2, 3]))
    assert one != replace(one, response_ids=to_token_array([2, 4])) and one != replace(one, reward=0.0) and one != 7
    done = completion_from("a", [1], [-1.0], [-1.0], "stop", [])
    assert done == completion_from("a", [1], [-1.0], [-1.0], "stop", [])
    assert done != completion_from("a", [1], [-1.0], [-2.0], "stop", [])


@pytest.mark.parametrize("length", [0, 5, 1 << 20])
def test_fresh_arrays_are_zeros_to_write_to(length: int):
    found = lazy_zeros(length, np.float32)
    assert found.shape == (length,) and found.dtype == np.float32 and not found.any()
    found[:] = 2.0
    trim_memory()
    assert (found == 2.0).all()
