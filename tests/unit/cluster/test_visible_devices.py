"""GPUs that a process with several slots uses, and its share of the node's cores."""

from __future__ import annotations

import pytest

from skyrl_train.cluster.placement import compute_min_cores_per_slot, visible_devices
from skyrl_train.errors import ConfigError


def test_visible_devices_keep_slot_order():
    assert visible_devices([("a", "6"), ("a", "2")], "key") == "6,2"
    assert visible_devices([("a", "MIG-1")], "key") == "MIG-1"


def test_gpus_on_several_nodes_are_rejected():
    with pytest.raises(
        ConfigError,
        match=r"^tensor_parallel_size=2: one engine needs 2 GPUs on one node, but they are on 2 nodes \(a, b\)",
    ):
        visible_devices([("b", "0"), ("a", "0")], "tensor_parallel_size=2")


@pytest.mark.parametrize(
    ("nodes", "cpus", "cores"),
    [
        (["a"], {"a": 96.0}, 96),
        (["a"] * 8, {"a": 96.0, "unused": 200.0}, 12),
        (["a", "a", "b"], {"a": 64.0, "b": 8.0}, 8),
        (["a", "b", "b"], {"a": 64.0, "b": 8.0}, 4),
        (["a"] * 8, {"a": 4.0}, 1),
        (["a"], {"a": 0.0}, 1),
        (["dead"], {"a": 64.0}, 1),
    ],
)
def test_the_slots_of_a_node_share_its_cores(nodes: list[str], cpus: dict[str, float], cores: int):
    assert compute_min_cores_per_slot(nodes, cpus) == cores
