"""Whether slots fit on nodes, before any are reserved."""

from __future__ import annotations

import pytest

from skyrl_train.cluster.placement import Slots, together_by_node
from skyrl_train.cluster.room import FreeNode, Need, fits

TRAINER = {"role": "trainer"}
ANY: dict[str, str] = {}
NODES = [FreeNode(8, 4, TRAINER), FreeNode(8, 2, {}), FreeNode(8, 1, {})]


@pytest.mark.parametrize(
    ("needs", "fit"),
    [
        ([Need(7, ANY)], True),
        ([Need(8, ANY)], False),
        ([Need(4, TRAINER), Need(3, ANY)], True),
        ([Need(3, ANY), Need(4, TRAINER)], True),  # those that may be anywhere leave room for those that may not
        ([Need(5, TRAINER)], False),
        ([Need(6, ANY, together=2)], True),
        ([Need(4, TRAINER), Need(2, ANY, together=2), Need(1, ANY)], True),
        ([Need(4, ANY, together=4), Need(4, ANY, together=4)], False),  # six are free, but on no node four
    ],
)
def test_slots_fit_only_where_nodes_have_the_labels_and_room_for_those_together(needs: list[Need], fit: bool):
    assert fits(needs, NODES, cpus=1.0, gpus=1.0) == fit


def test_shares_of_a_cpu_are_counted_as_ray_rounds_them():
    assert FreeNode(1.9998, 0, {}).slots(0.667, 0.0) == 2
    assert FreeNode(2.0, 0, {}).slots(1.0, 0.0) == 2
    assert FreeNode(2.0, 0, {}).slots(1.0, 1.0) == 0


def test_neighbouring_slots_are_on_one_node_in_whatever_order_ray_has_placed_bundles():
    order = together_by_node(["b", "a", "b", "c", "a", "b"])
    assert order == (0, 2, 5, 1, 4, 3)
    assert together_by_node(["a", "a", "a"]) == (0, 1, 2)
    group: object = None
    slots = Slots(group, 6, 1.0, 0.0, 1, 1, order=order)  # type: ignore[arg-type]
    assert [slots.bundle(index) for index in range(6)] == [0, 2, 5, 1, 4, 3]
    pairs = Slots(group, 6, 1.0, 0.0, 1, 1, together=2, order=(2, 0, 1))  # type: ignore[arg-type]
    assert [pairs.bundle(index) for index in range(6)] == [2, 2, 0, 0, 1, 1]
