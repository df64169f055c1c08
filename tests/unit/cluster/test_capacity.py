"""Checks if slots fit on nodes before any are reserved."""

from __future__ import annotations

import pytest

from skyrl_train.cluster.capacity import NodeCapacity, ResourceDemand, can_place, count_fitting_slots
from skyrl_train.cluster.placement import ResourcePool, order_by_node

TRAINER = {"role": "trainer"}
GPU = {"CPU": 1.0, "GPU": 1.0}
HOST = {"CPU": 4.0, "environments": 1.0}
NODES = [
    NodeCapacity({"CPU": 8, "GPU": 4}, TRAINER),
    NodeCapacity({"CPU": 8, "GPU": 2}),
    NodeCapacity({"CPU": 8, "GPU": 1, "environments": 2}),
]


@pytest.mark.parametrize(
    ("demands", "fit"),
    [
        ([ResourceDemand(7, GPU)], True),
        ([ResourceDemand(8, GPU)], False),
        ([ResourceDemand(4, GPU, TRAINER), ResourceDemand(3, GPU)], True),
        # demands without labels leave room for those with labels
        ([ResourceDemand(3, GPU), ResourceDemand(4, GPU, TRAINER)], True),
        ([ResourceDemand(5, GPU, TRAINER)], False),
        ([ResourceDemand(6, GPU, slots_per_bundle=2)], True),
        ([ResourceDemand(4, GPU, TRAINER), ResourceDemand(2, GPU, slots_per_bundle=2), ResourceDemand(1, GPU)], True),
        # six GPUs are free, but no node has four of them
        ([ResourceDemand(4, GPU, slots_per_bundle=4), ResourceDemand(4, GPU, slots_per_bundle=4)], False),
        ([ResourceDemand(6, GPU), ResourceDemand(1, HOST)], True),
        ([ResourceDemand(7, GPU), ResourceDemand(2, HOST)], False),  # no CPU is left for the last GPU
        ([ResourceDemand(1, HOST), ResourceDemand(1, {"CPU": 6.0})], True),
        ([ResourceDemand(3, HOST)], False),
    ],
)
def test_slots_need_resources_labels_and_bundles(demands: list[ResourceDemand], fit: bool):
    assert can_place(demands, NODES) == fit


@pytest.mark.defect("label-selector-finds-no-node")
@pytest.mark.parametrize(
    ("selector", "nodes"),
    [("trainer", 1), ("!trainer", 2), ("in(trainer, engine)", 1), ("!in(engine,trainer)", 2), ("in(engine)", 0)],
)
def test_label_selectors_match_as_in_ray(selector: str, nodes: int):
    counted = [can_place([ResourceDemand(1, GPU, {"role": selector})], [node]) for node in NODES]
    assert sum(counted) == nodes


def test_cpu_shares_are_rounded_as_in_ray():
    assert count_fitting_slots({"CPU": 1.9998}, {"CPU": 0.667}) == 2
    assert count_fitting_slots({"CPU": 2.0}, {"CPU": 1.0}) == 2
    assert count_fitting_slots({"CPU": 2.0}, GPU) == 0


def test_neighboring_slots_are_on_one_node():
    order = order_by_node(["b", "a", "b", "c", "a", "b"])
    assert order == (0, 2, 5, 1, 4, 3)
    assert order_by_node(["a", "a", "a"]) == (0, 1, 2)
    group: object = None
    slots = ResourcePool(group, 6, 1.0, 0.0, 1, 1, bundle_order=order)  # type: ignore[arg-type]
    assert [slots.bundle_index(index) for index in range(6)] == [0, 2, 5, 1, 4, 3]
    pairs = ResourcePool(group, 6, 1.0, 0.0, 1, 1, slots_per_bundle=2, bundle_order=(2, 0, 1))  # type: ignore[arg-type]
    assert [pairs.bundle_index(index) for index in range(6)] == [2, 2, 0, 0, 1, 1]
