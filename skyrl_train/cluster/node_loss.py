"""Find out if an actor died with its node, which Ray itself reports only after a while."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import ray
from ray._private.state import actors as table_of_actors

NODE_LOSS_DETECTION_S = 45.0
"""Time after which Ray has declared a silent node dead: by default five health checks, 3 s apart, of up to 10 s each.
"""
_POLL_INTERVAL_S = 0.25
_ALIVE = "ALIVE"


async def describe_lost_node(actor_id: str, within_s: float = NODE_LOSS_DETECTION_S) -> str | None:
    """Return a description of an unresponsive actor's node if the node was lost.

    Waits until Ray reports the actor or its node as dead, or for `within_s` seconds.

    Args:
        actor_id: Ray's id of the actor, in hex.
        within_s: Seconds to wait.

    Returns:
        The node's address and id as text. None if the node is alive, or if the driver is a Ray client (`ray://`),
        which cannot read Ray's tables.
    """
    if ray.util.client.ray.is_connected():
        return None
    deadline = time.monotonic() + within_s
    while True:
        row, live_nodes = await asyncio.to_thread(_query_actor, actor_id)
        address = row.get("Address", {})
        if address.get("NodeID") and address["NodeID"] not in live_nodes:
            return f"its node {address['IPAddress']} (Ray's id {address['NodeID'][:12]}) was lost."
        if row.get("State") != _ALIVE or time.monotonic() > deadline:
            return None
        await asyncio.sleep(_POLL_INTERVAL_S)


def _query_actor(actor: str) -> tuple[dict[str, Any], set[str]]:
    """Return Ray's row of the actor and the ids of the live nodes."""
    row = table_of_actors(actor) or {}
    return row, {node["NodeID"] for node in ray.nodes() if node["Alive"]}
