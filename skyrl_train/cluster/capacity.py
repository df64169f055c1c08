"""How many slots the living nodes have room for, found out without reserving any."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import ray
from ray._private.state import available_resources_per_node

_ROUNDING = 1e-3
"""Ray counts in ten-thousandths."""


@dataclass(frozen=True)
class ResourceDemand:
    """Slots that each take `slot` of a node's resources (CPU, GPU, custom ones), on nodes with these labels."""

    num_slots: int
    resources_per_slot: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)
    slots_per_bundle: int = 1
    """So many neighbouring slots are on one node each time."""

    @property
    def difficulty(self) -> tuple[int, float]:
        """How hard it is to place: by what a node must have, then by size."""
        return len(self.labels) + len(self.resources_per_slot), self.slots_per_bundle * self.resources_per_slot.get(
            "CPU", 0.0
        )


@dataclass(frozen=True)
class NodeCapacity:
    """What is free on a living node, by the names of Ray's resources."""

    free: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)


def can_place(demands: Iterable[ResourceDemand], nodes: Sequence[NodeCapacity]) -> bool:
    """Whether all slots have a place; the most demanding are placed first."""
    left = [dict(node.free) for node in nodes]
    for need in sorted(demands, key=lambda one: one.difficulty, reverse=True):
        missing = need.num_slots // need.slots_per_bundle
        for node, free in zip(nodes, left, strict=True):
            if missing and all(_matches_label(one, node.labels.get(name)) for name, one in need.labels.items()):
                placed = min(missing, count_fitting_slots(free, need.resources_per_slot) // need.slots_per_bundle)
                missing -= placed
                for name, amount in need.resources_per_slot.items():
                    free[name] = free.get(name, 0.0) - placed * need.slots_per_bundle * amount
        if missing:
            return False
    return True


def _matches_label(selector: str, label: str | None) -> bool:
    """Whether a node whose label this is meets Ray's label selector: X, !X, in(X, Y) or !in(X, Y)."""
    wanted = selector.removeprefix("!")
    among = [one.strip() for one in wanted[3:-1].split(",")] if wanted.startswith("in(") else [wanted]
    return (label in among) != selector.startswith("!")


def count_fitting_slots(free: Mapping[str, float], slot: Mapping[str, float]) -> int:
    """How many slots of this size there is room for in what is free on a node."""
    return min(int((free.get(name, 0.0) + _ROUNDING) / amount) for name, amount in slot.items() if amount > 0)


def query_free_capacity() -> list[NodeCapacity]:
    """What is free now on each node that Ray takes for living."""
    free = available_resources_per_node()
    return [
        NodeCapacity(found, dict(node["Labels"]))
        for node in ray.nodes()
        if node["Alive"] and (found := free.get(node["NodeID"])) is not None
    ]
