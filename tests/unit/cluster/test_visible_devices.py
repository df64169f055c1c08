"""Which accelerators a process with several slots uses."""

from __future__ import annotations

import pytest

from skyrl_train.cluster.placement import visible_devices
from skyrl_train.errors import ConfigError


def test_an_engine_sees_the_accelerators_of_its_slots_in_their_order():
    assert visible_devices([("a", "6"), ("a", "2")], "key") == "6,2"
    assert visible_devices([("a", "MIG-1")], "key") == "MIG-1"


def test_slots_on_several_nodes_are_refused_by_the_keys_name():
    with pytest.raises(ConfigError, match=r"^tensor_parallel_size=2: the 2 accelerators .* on 2 nodes \(a, b\)"):
        visible_devices([("b", "0"), ("a", "0")], "tensor_parallel_size=2")
