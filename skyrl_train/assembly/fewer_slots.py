"""The run's configuration for what is left of its cluster: fewer hosts, ranks and engines where all have no room."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from skyrl_train.cluster.placement import cpus_per_slot
from skyrl_train.cluster.room import FreeNode, Need, fits, free_nodes
from skyrl_train.cluster.runtime import Cluster
from skyrl_train.config.keys import with_value_at
from skyrl_train.config.predicates import Uses, slots_of, slots_per_engine
from skyrl_train.config.schema import Config
from skyrl_train.config.validate import validate
from skyrl_train.errors import NoRoom

_LOOKS_EVERY_S = 0.5


async def fit_to_nodes(cfg: Config, uses: Uses, cluster: Cluster, added: int = 0) -> Config:
    """`cfg` with as many ranks of the policy, engines, and hosts of environments, as the living nodes have room for.

    Waits up to trainer.timeouts.placement_s for room for all: what has ended gives its slots back a little later. Then
    hosts are given up first, next the `added` engines that the run did not begin with, then as few slots as possible,
    the trainer's before an engine's. Raises NoRoom if not even one of each fits. Ranks of other models that have slots
    of their own are never fewer.
    """
    deadline = time.monotonic() + cfg.trainer.timeouts.placement_s
    while True:
        nodes, cpus = await asyncio.to_thread(lambda: (free_nodes(), cluster.cpus))
        if has_room(cfg, uses, nodes, cpus):
            return cfg
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(_LOOKS_EVERY_S)
    fitting = candidates(cfg, uses, lambda one: has_room(one, uses, nodes, cpus), added)
    found = await asyncio.to_thread(next, fitting, None)  # of thousands of ranks and engines there are many
    if found is None:
        host = " and a host of environments" if _hosts(cfg, uses) else ""
        raise NoRoom(
            f"the {cluster.nodes} nodes that are left ({cluster.cpus:g} CPUs, {cluster.gpus:g} GPUs) have no room "
            f"for a rank of the trainer and an engine{host}, or not those with the labels of "
            "trainer.placement.node_labels."
        )
    return found


def candidates(cfg: Config, uses: Uses, has_room: Callable[[Config], bool], added: int = 0) -> Iterator[Config]:
    """The like of `cfg` with fewer and fewer slots; only what has room and would be accepted as a configuration."""
    slots, hosts = slots_of(cfg, uses), _hosts(cfg, uses)
    engines, added = (cfg.generator.num_inference_engines, added) if slots.engines else (0, 0)
    all_ranks = ((slots.policy, engines - given_up) for given_up in range(added))
    fewer = _pairs(slots.policy, engines - added, slots_per_engine(cfg.generator))
    for ranks, left in chain(all_ranks, fewer):
        one = cfg
        if ranks != slots.policy:
            one = with_value_at(one, "trainer.placement.policy_num_nodes", 1)
            one = with_value_at(one, "trainer.placement.policy_num_gpus_per_node", ranks)
        if left != engines:
            one = with_value_at(one, "generator.num_inference_engines", left)
        if not has_room(_with_hosts(one, min(1, hosts))):
            continue
        able = (_with_hosts(one, number) for number in range(hosts, min(1, hosts) - 1, -1))
        yield from (one for one in able if has_room(one) and not validate(one, open_to_names=True))


def _pairs(ranks: int, engines: int, stride: int) -> Iterator[tuple[int, int]]:
    """(ranks, engines), from all of them down to one of each; of pairs with as many slots, those with more engines."""
    for total in range(ranks + engines * stride, 0, -1):
        most, fewest = min(engines, (total - 1) // stride), max(min(1, engines), -((ranks - total) // stride))
        yield from ((total - left * stride, left) for left in range(most, fewest - 1, -1))


def _hosts(cfg: Config, uses: Uses) -> int:
    """Those that the run uses."""
    return cfg.environment.hosts if uses.rewards else 0


def _with_hosts(cfg: Config, number: int) -> Config:
    return cfg if number in (0, cfg.environment.hosts) else with_value_at(cfg, "environment.hosts", number)


def has_room(cfg: Config, uses: Uses, nodes: Sequence[FreeNode], cpus: float) -> bool:
    """Whether these nodes have room for the run; `cpus`: of the whole cluster, by which a CPU slot is measured."""
    slots, placement, environment = slots_of(cfg, uses), cfg.trainer.placement, cfg.environment
    slot = {"CPU": 1.0, "GPU": 1.0}
    if cfg.device != "cuda":
        slot = {"CPU": cpus_per_slot(cpus - environment.hosts * environment.host_cpus, slots.total)}
    if slot["CPU"] <= 0:
        return False
    home = slots.total if slots.time_shared else slots.policy
    needs = [Need(count, slot, placement.node_labels) for count in (home, slots.reference, slots.critic, slots.reward)]
    if not slots.time_shared:
        together = slots_per_engine(cfg.generator) // placement.nodes_per_engine
        needs.append(Need(slots.engines, slot, placement.engine_node_labels, together))
    needs.append(Need(_hosts(cfg, uses), {"CPU": environment.host_cpus, **environment.host_resources}))
    return fits(needs, nodes)
