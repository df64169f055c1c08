"""How many slots the living nodes have room for, found out without reserving any."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import ray
from ray._private.state import available_resources_per_node

_ROUNDING = 1e-3
"""Ray counts in ten-thousandths."""


@dataclass(frozen=True)
class Need:
    """Slots that each take `slot` of a node's resources (CPU, GPU, custom ones), on nodes with these labels."""

    count: int
    slot: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)
    together: int = 1
    """So many neighbouring slots are on one node each time."""

    @property
    def demand(self) -> tuple[int, float]:
        """How hard it is to place: by what a node must have, then by size."""
        return len(self.labels) + len(self.slot), self.together * self.slot.get("CPU", 0.0)


@dataclass(frozen=True)
class FreeNode:
    """What is free on a living node, by the names of Ray's resources."""

    free: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)


def fits(needs: Iterable[Need], nodes: Sequence[FreeNode]) -> bool:
    """Whether all slots have a place; the most demanding are placed first."""
    left = [dict(node.free) for node in nodes]
    for need in sorted(needs, key=lambda one: one.demand, reverse=True):
        missing = need.count // need.together
        for node, free in zip(nodes, left, strict=True):
            if missing and all(_selects(one, node.labels.get(name)) for name, one in need.labels.items()):
                placed = min(missing, slots_on(free, need.slot) // need.together)
                missing -= placed
                for name, amount in need.slot.items():
                    free[name] = free.get(name, 0.0) - placed * need.together * amount
        if missing:
            return False
    return True


def _selects(selector: str, label: str | None) -> bool:
    """Whether a node whose label this is meets Ray's label selector: X, !X, in(X, Y) or !in(X, Y)."""
    wanted = selector.removeprefix("!")
    among = [one.strip() for one in wanted[3:-1].split(",")] if wanted.startswith("in(") else [wanted]
    return (label in among) != selector.startswith("!")


def slots_on(free: Mapping[str, float], slot: Mapping[str, float]) -> int:
    """How many slots of this size there is room for in what is free on a node."""
    return min(int((free.get(name, 0.0) + _ROUNDING) / amount) for name, amount in slot.items() if amount > 0)


def free_nodes() -> list[FreeNode]:
    """What is free now on each node that Ray takes for living."""
    free = available_resources_per_node()
    return [
        FreeNode(found, dict(node["Labels"]))
        for node in ray.nodes()
        if node["Alive"] and (found := free.get(node["NodeID"])) is not None
    ]
