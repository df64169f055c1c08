"""Check if slots fit on the live nodes, without reserving any."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import ray
from ray._private.state import available_resources_per_node

_ACCELERATOR_PREFIX = "accelerator_type:"
_ROUNDING = 1e-3
"""Tolerance of resource counts, which Ray rounds to ten-thousandths."""


@dataclass(frozen=True)
class ResourceDemand:
    """A number of equal slots, on nodes with certain labels."""

    num_slots: int
    """Number of slots, a multiple of `slots_per_bundle`."""
    resources_per_slot: Mapping[str, float]
    """Amounts of a node's resources (CPU, GPU, custom ones) that each slot takes."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Ray's label selectors that a node must match, by label name."""
    slots_per_bundle: int = 1
    """Number of neighboring slots that must be on one node."""

    @property
    def difficulty(self) -> tuple[int, float]:
        """Sort key that grows with the difficulty of placing the slots: constraints first, then CPUs of a bundle."""
        return len(self.labels) + len(self.resources_per_slot), self.slots_per_bundle * self.resources_per_slot.get(
            "CPU", 0.0
        )


@dataclass(frozen=True)
class NodeCapacity:
    """Free resources of a live node."""

    free: Mapping[str, float]
    """Free amounts by the names of Ray's resources."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Ray's labels of the node."""


def can_place(demands: Iterable[ResourceDemand], nodes: Sequence[NodeCapacity]) -> bool:
    """Return True if the slots of all demands can be placed on the nodes.

    Demands are placed greedily, each on the first nodes that fit, in the order of descending `difficulty`. So the
    result may be False although another placement would fit.
    """
    free_by_node = [dict(node.free) for node in nodes]
    for demand in sorted(demands, key=lambda item: item.difficulty, reverse=True):
        unplaced = demand.num_slots // demand.slots_per_bundle
        for node, free in zip(nodes, free_by_node, strict=True):
            if unplaced and all(
                _matches_label(selector, node.labels.get(name)) for name, selector in demand.labels.items()
            ):
                num_placed = min(
                    unplaced, count_fitting_slots(free, demand.resources_per_slot) // demand.slots_per_bundle
                )
                unplaced -= num_placed
                for name, amount in demand.resources_per_slot.items():
                    free[name] = free.get(name, 0.0) - num_placed * demand.slots_per_bundle * amount
        if unplaced:
            return False
    return True


def _matches_label(selector: str, label: str | None) -> bool:
    """Return True if a node's label matches Ray's label selector: X, !X, in(X, Y) or !in(X, Y)."""
    pattern = selector.removeprefix("!")
    allowed = [value.strip() for value in pattern[3:-1].split(",")] if pattern.startswith("in(") else [pattern]
    return (label in allowed) != selector.startswith("!")


def count_fitting_slots(free: Mapping[str, float], slot: Mapping[str, float]) -> int:
    """Return the number of slots that fit into a node's free resources.

    Args:
        free: Free amounts of the node, by resource name.
        slot: Amounts that one slot takes, by resource name. At least one is positive.
    """
    return min(int((free.get(name, 0.0) + _ROUNDING) / amount) for name, amount in slot.items() if amount > 0)


def query_free_capacity() -> list[NodeCapacity]:
    """Return the resources that are free now on each live node."""
    free = available_resources_per_node()
    return [
        NodeCapacity(amounts, dict(node["Labels"]))
        for node in ray.nodes()
        if node["Alive"] and (amounts := free.get(node["NodeID"])) is not None
    ]


def query_accelerator_types(node_ids: Collection[str]) -> list[str]:
    """Return the names of the accelerator types of some live nodes as Ray detects them, for example ["H100"]."""
    names = {
        name
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] in node_ids
        for name in node["Resources"]
        if name.startswith(_ACCELERATOR_PREFIX)
    }
    return sorted(name.removeprefix(_ACCELERATOR_PREFIX) for name in names)
