"""Whether an actor died alone or with its node, which Ray itself knows only after a while."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import ray
from ray._private.state import actors as table_of_actors

NODE_LOSS_DETECTION_S = 45.0
"""By then Ray has given up a node that fell silent: by default after five health checks, 3 s apart, of up to 10 s."""
_POLL_INTERVAL_S = 0.25
_ALIVE = "ALIVE"


async def describe_lost_node(actor_id: str, within_s: float = NODE_LOSS_DETECTION_S) -> str | None:
    """What to say of an actor (Ray's id) that does not answer if its node is lost; None if the node lives.

    Waits until Ray knows: either that the actor's process has ended, or that its node has. Ray has no such tables for a
    driver behind a Ray client (`ray://`): None.
    """
    if ray.util.client.ray.is_connected():
        return None
    deadline = time.monotonic() + within_s
    while True:
        known, alive = await asyncio.to_thread(_look, actor_id)
        place = known.get("Address", {})
        if place.get("NodeID") and place["NodeID"] not in alive:
            return f"its node {place['IPAddress']} (Ray's id {place['NodeID'][:12]}) was lost."
        if known.get("State") != _ALIVE or time.monotonic() > deadline:
            return None
        await asyncio.sleep(_POLL_INTERVAL_S)


def _look(actor: str) -> tuple[dict[str, Any], set[str]]:
    """Ray's row of the actor, and the ids of the nodes that live."""
    known = table_of_actors(actor) or {}
    return known, {node["NodeID"] for node in ray.nodes() if node["Alive"]}
