"""The run's configuration for what is left of its cluster: fewer ranks and engines if there is no room for all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from skyrl_train.cluster.placement import cpus_per_slot
from skyrl_train.cluster.room import Need, fits, free_nodes
from skyrl_train.cluster.runtime import Cluster
from skyrl_train.config.keys import with_value_at
from skyrl_train.config.presence import Uses, slots_of
from skyrl_train.config.schema import Config
from skyrl_train.config.slots import slots_per_engine
from skyrl_train.config.validate import validate
from skyrl_train.errors import NoRoom

_LOOKS_EVERY_S = 0.5


async def fit_to_nodes(cfg: Config, uses: Uses, cluster: Cluster) -> Config:
    """`cfg` with as many ranks of the policy, and engines, as the living nodes have room for.

    Waits up to trainer.timeouts.placement_s for room for all: what has ended gives its slots back a little later. The
    slots that are given up are as few as possible, the trainer's before an engine's. Raises NoRoom if not even one of
    each fits. Ranks of other models that have slots of their own are never fewer.
    """
    deadline = time.monotonic() + cfg.trainer.timeouts.placement_s
    while True:
        found = next((one for one in candidates(cfg, uses) if _has_room(one, uses, cluster)), None)
        if found is cfg or time.monotonic() > deadline:
            break
        await asyncio.sleep(_LOOKS_EVERY_S)
    if found is None:
        raise NoRoom(
            f"the {cluster.nodes} nodes that are left ({cluster.cpus:g} CPUs, {cluster.gpus:g} GPUs) have no room "
            "for a rank of the trainer and an engine, or not those with the labels of trainer.placement.node_labels."
        )
    return found


def candidates(cfg: Config, uses: Uses) -> Iterator[Config]:
    """`cfg` itself, then its like with fewer and fewer slots; only what would be accepted as a configuration."""
    slots = slots_of(cfg, uses)
    engines = cfg.generator.num_inference_engines if slots.engines else 0
    stride = slots_per_engine(cfg.generator)
    pairs = [(ranks, left) for ranks in range(1, slots.policy + 1) for left in range(min(1, engines), engines + 1)]
    for ranks, left in sorted(pairs, key=lambda one: (one[0] + one[1] * stride, one[1]), reverse=True):
        one = cfg
        if ranks != slots.policy:
            one = with_value_at(one, "trainer.placement.policy_num_nodes", 1)
            one = with_value_at(one, "trainer.placement.policy_num_gpus_per_node", ranks)
        if left != engines:
            one = with_value_at(one, "generator.num_inference_engines", left)
        if one is cfg or not validate(one, open_to_names=True):
            yield one


def _has_room(cfg: Config, uses: Uses, cluster: Cluster) -> bool:
    slots, placement = slots_of(cfg, uses), cfg.trainer.placement
    home = slots.total if slots.time_shared else slots.policy
    needs = [Need(count, placement.node_labels) for count in (home, slots.reference, slots.critic, slots.reward)]
    if not slots.time_shared:
        needs.append(Need(slots.engines, placement.engine_node_labels, slots_per_engine(cfg.generator)))
    gpus = 1.0 if cfg.device == "cuda" else 0.0
    return fits(needs, free_nodes(), 1.0 if gpus else cpus_per_slot(cluster.cpus, slots.total), gpus)
