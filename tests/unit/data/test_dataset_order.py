from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from skyrl_train.data.dataset import PromptOrder
from skyrl_train.errors import DataError


@given(st.integers(1, 50), st.integers(0, 2**32))
def test_every_epoch_visits_every_row_once(size: int, seed: int):
    order = PromptOrder(size, seed)
    for _ in range(3):
        assert sorted(next(order) for _ in range(size)) == list(range(size))


def test_epochs_and_seeds_differ_and_the_same_seed_repeats():
    first = [PromptOrder(100, 0).row(index) for index in range(200)]
    assert first[:100] != first[100:]
    assert first == [PromptOrder(100, 0).row(index) for index in range(200)]
    assert first != [PromptOrder(100, 1).row(index) for index in range(200)]


def test_the_order_is_pinned_so_that_old_checkpoints_stay_good():
    assert [PromptOrder(10, 42).row(index) for index in range(12)] == [5, 6, 0, 7, 3, 2, 4, 9, 1, 8, 0, 8]


@pytest.mark.fault("F37")
@given(st.integers(1, 9), st.integers(0, 40))
def test_a_resumed_order_goes_on_where_it_was(size: int, taken: int):
    order = PromptOrder(size, 7)
    for _ in range(taken):
        next(order)
    assert order.state() == {"epoch": taken // size, "position": taken % size}
    resumed = PromptOrder(size, 7)
    resumed.load_state(order.state())
    assert [next(resumed) for _ in range(20)] == [next(order) for _ in range(20)]


def test_a_place_is_counted_from_the_start_of_the_run():
    order = PromptOrder(4, 3)
    rows = [next(order) for _ in range(10)]
    order.cursor = 6
    assert next(order) == rows[6] == order.row(6)


def test_unshuffled_rows_come_as_they_are():
    order = PromptOrder(3, 0, shuffle=False)
    assert [next(order) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_impossible_places_and_sizes_are_refused():
    with pytest.raises(DataError, match="at least one row"):
        PromptOrder(0, 0)
    for state in ({"epoch": 0, "position": 3}, {"epoch": -1, "position": 0}):
        with pytest.raises(DataError, match=r"is not in 0\.\.2"):
            PromptOrder(3, 0).load_state(state)
