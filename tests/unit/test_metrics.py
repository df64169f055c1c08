from __future__ import annotations

import json
import math
import time
from contextlib import suppress

import pytest
from hypothesis import given, strategies as st

from skyrl_train.metrics import MetricNameLimit, Metrics

observations = st.lists(st.tuples(st.integers(-1000, 1000), st.integers(1, 100)), min_size=1, max_size=30)


@given(values=observations, split=st.integers(0, 30))
def test_mean_is_independent_of_split_over_processes(values: list[tuple[int, int]], split: int):
    whole, left, right = Metrics(), Metrics(), Metrics()
    for index, (value, weight) in enumerate(values):
        for metrics in (whole, left if index < split else right):
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


@pytest.mark.defect("maximum-drops-nan")
@pytest.mark.parametrize("values", [[math.nan, 1.0], [1.0, math.nan], [2.0, math.nan, 1.0], [math.nan, math.inf]])
def test_nan_stays_the_maximum(values: list[float]):
    metrics, merged = Metrics(), Metrics()
    for value in values:
        metrics.update_max("ratio", value)
        rank_metrics = Metrics()
        rank_metrics.update_max("ratio", value)
        merged.merge(rank_metrics.to_dict())
    assert math.isnan(metrics.flush()["ratio"])
    assert math.isnan(merged.flush()["ratio"])


def test_flush_resets_metrics():
    metrics = Metrics()
    for add in (metrics.add, metrics.count, metrics.update_max):
        add(add.__name__, 1.0)
    assert metrics.flush() == {"add": 1.0, "count": 1.0, "update_max": 1.0}
    assert metrics.flush() == {}


def test_mean_without_weight_is_absent():
    metrics = Metrics()
    metrics.add_sum("policy/kl", 0.0, 0.0)
    assert metrics.flush() == {}


def test_timed_block_counts_even_if_it_raises():
    metrics = Metrics()
    for _ in range(2):
        with suppress(KeyError), metrics.timed("phase"):
            time.sleep(0.02)
            raise KeyError
    assert 0.04 <= metrics.flush()["timing/phase_s"] < 1.0


def test_metric_name_limit_rejects_excess_names():
    limit = MetricNameLimit(max_names=2, max_length=5)
    assert [limit.admits(name) for name in ("a", "too long", "bbbbb", "c", "a")] == [True, False, True, False, True]
