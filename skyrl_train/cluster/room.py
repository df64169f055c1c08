"""How many slots the living nodes have room for, found out without reserving any."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import ray
from ray._private.state import available_resources_per_node

_ROUNDING = 1e-3
"""Ray counts in ten-thousandths."""


@dataclass(frozen=True)
class Need:
    """Slots on nodes with these labels; `together` neighbouring ones on one node each time."""

    count: int
    labels: Mapping[str, str]
    together: int = 1


@dataclass(frozen=True)
class FreeNode:
    """What is free on a living node."""

    cpus: float
    gpus: float
    labels: Mapping[str, str]

    def slots(self, cpus: float, gpus: float) -> int:
        """How many slots of this size it has room for."""
        by_cpu = int((self.cpus + _ROUNDING) / cpus)
        return min(by_cpu, int((self.gpus + _ROUNDING) / gpus)) if gpus else by_cpu


def fits(needs: Iterable[Need], nodes: Sequence[FreeNode], cpus: float, gpus: float) -> bool:
    """Whether all slots, each of so many CPUs and GPUs, have a place; the most demanding are placed first."""
    left = [node.slots(cpus, gpus) for node in nodes]
    for need in sorted(needs, key=lambda one: (len(one.labels), one.together), reverse=True):
        for _ in range(need.count // need.together):
            able = (
                index
                for index, node in enumerate(nodes)
                if left[index] >= need.together and need.labels.items() <= node.labels.items()
            )
            place = next(able, None)
            if place is None:
                return False
            left[place] -= need.together
    return True


def free_nodes() -> list[FreeNode]:
    """What is free now on each node that Ray takes for living."""
    free = available_resources_per_node()
    return [
        FreeNode(found.get("CPU", 0.0), found.get("GPU", 0.0), dict(node["Labels"]))
        for node in ray.nodes()
        if node["Alive"] and (found := free.get(node["NodeID"])) is not None
    ]
