"""Whether slots fit on nodes, before any are reserved."""

from __future__ import annotations

import pytest

from skyrl_train.cluster.placement import Slots, together_by_node
from skyrl_train.cluster.room import FreeNode, Need, fits, slots_on

TRAINER = {"role": "trainer"}
GPU = {"CPU": 1.0, "GPU": 1.0}
HOST = {"CPU": 4.0, "environments": 1.0}
NODES = [
    FreeNode({"CPU": 8, "GPU": 4}, TRAINER),
    FreeNode({"CPU": 8, "GPU": 2}),
    FreeNode({"CPU": 8, "GPU": 1, "environments": 2}),
]


@pytest.mark.parametrize(
    ("needs", "fit"),
    [
        ([Need(7, GPU)], True),
        ([Need(8, GPU)], False),
        ([Need(4, GPU, TRAINER), Need(3, GPU)], True),
        ([Need(3, GPU), Need(4, GPU, TRAINER)], True),  # those that may be anywhere leave room for those that may not
        ([Need(5, GPU, TRAINER)], False),
        ([Need(6, GPU, together=2)], True),
        ([Need(4, GPU, TRAINER), Need(2, GPU, together=2), Need(1, GPU)], True),
        ([Need(4, GPU, together=4), Need(4, GPU, together=4)], False),  # six are free, but on no node four
        ([Need(6, GPU), Need(1, HOST)], True),
        ([Need(7, GPU), Need(2, HOST)], False),  # no CPU is left beside them for the last one's GPU
        ([Need(1, HOST), Need(1, {"CPU": 6.0})], True),
        ([Need(3, HOST)], False),
    ],
)
def test_slots_fit_only_where_nodes_have_what_each_takes_the_labels_and_room_for_those_together(
    needs: list[Need], fit: bool
):
    assert fits(needs, NODES) == fit


@pytest.mark.defect("a-label-selector-had-no-room")
@pytest.mark.parametrize(
    ("selector", "nodes"),
    [("trainer", 1), ("!trainer", 2), ("in(trainer, engine)", 1), ("!in(engine,trainer)", 2), ("in(engine)", 0)],
)
def test_labels_are_selected_as_ray_selects_them(selector: str, nodes: int):
    counted = [fits([Need(1, GPU, {"role": selector})], [node]) for node in NODES]
    assert sum(counted) == nodes


def test_shares_of_a_cpu_are_counted_as_ray_rounds_them():
    assert slots_on({"CPU": 1.9998}, {"CPU": 0.667}) == 2
    assert slots_on({"CPU": 2.0}, {"CPU": 1.0}) == 2
    assert slots_on({"CPU": 2.0}, GPU) == 0


def test_neighbouring_slots_are_on_one_node_in_whatever_order_ray_has_placed_bundles():
    order = together_by_node(["b", "a", "b", "c", "a", "b"])
    assert order == (0, 2, 5, 1, 4, 3)
    assert together_by_node(["a", "a", "a"]) == (0, 1, 2)
    group: object = None
    slots = Slots(group, 6, 1.0, 0.0, 1, 1, order=order)  # type: ignore[arg-type]
    assert [slots.bundle(index) for index in range(6)] == [0, 2, 5, 1, 4, 3]
    pairs = Slots(group, 6, 1.0, 0.0, 1, 1, together=2, order=(2, 0, 1))  # type: ignore[arg-type]
    assert [pairs.bundle(index) for index in range(6)] == [2, 2, 0, 0, 1, 1]
