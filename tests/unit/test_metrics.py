from __future__ import annotations

import json
import math
import time
from contextlib import suppress

import pytest
from hypothesis import given, strategies as st

from skyrl_train.metrics import MetricNameLimit, Metrics

observations = st.lists(st.tuples(st.integers(-1000, 1000), st.integers(1, 100)), min_size=1, max_size=30)


@given(values=observations, cut=st.integers(0, 30))
def test_a_mean_does_not_depend_on_how_values_were_cut_over_processes(values: list[tuple[int, int]], cut: int):
    whole, left, right = Metrics(), Metrics(), Metrics()
    for index, (value, weight) in enumerate(values):
        for metrics in (whole, left if index < cut else right):
            metrics.add("m", value, weight)
            metrics.add_sum("s", value * weight, weight)
            metrics.count("c", value)
            metrics.update_max("x", value)
    left.merge(json.loads(json.dumps(right.to_dict())))
    expected = whole.flush()
    assert left.flush() == expected
    assert expected["m"] == pytest.approx(sum(v * w for v, w in values) / sum(w for _, w in values))
    assert expected["s"] == expected["m"]
    assert expected["c"] == sum(v for v, _ in values)
    assert expected["x"] == max(v for v, _ in values)


@pytest.mark.defect("nan-lost-in-a-maximum")
@pytest.mark.parametrize("values", [[math.nan, 1.0], [1.0, math.nan], [2.0, math.nan, 1.0], [math.nan, math.inf]])
def test_a_nan_stays_the_maximum_wherever_it_comes_from(values: list[float]):
    one, merged = Metrics(), Metrics()
    for value in values:
        one.update_max("ratio", value)
        of_a_rank = Metrics()
        of_a_rank.update_max("ratio", value)
        merged.merge(of_a_rank.to_dict())
    assert math.isnan(one.flush()["ratio"])
    assert math.isnan(merged.flush()["ratio"])


def test_flush_forgets():
    metrics = Metrics()
    for add in (metrics.add, metrics.count, metrics.update_max):
        add(add.__name__, 1.0)
    assert metrics.flush() == {"add": 1.0, "count": 1.0, "maximum": 1.0}
    assert metrics.flush() == {}


def test_a_mean_over_no_weight_is_absent_not_a_division_by_zero():
    metrics = Metrics()
    metrics.add_sum("policy/kl", 0.0, 0.0)
    assert metrics.flush() == {}


def test_a_timed_block_counts_also_when_it_raises_and_adds_up():
    metrics = Metrics()
    for _ in range(2):
        with suppress(KeyError), metrics.timed("phase"):
            time.sleep(0.02)
            raise KeyError
    assert 0.04 <= metrics.flush()["timing/phase_s"] < 1.0


def test_names_beyond_a_limit_are_not_admitted_and_known_ones_stay():
    limit = MetricNameLimit(max_names=2, max_length=5)
    assert [limit.admits(name) for name in ("a", "too long", "bbbbb", "c", "a")] == [True, False, True, False, True]
