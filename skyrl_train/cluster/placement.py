"""Slots: placement-group bundles, each with the accelerator (or share of CPUs) for one rank or engine."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from skyrl_train.aio import with_timeout
from skyrl_train.cluster.addresses import LOOPBACK, free_address
from skyrl_train.cluster.ray_cluster import Cluster
from skyrl_train.errors import ClusterLost, ConfigError, DeadlineExceeded, InsufficientResources

T = TypeVar("T")
CHECK_INTERVAL_S = 2.0
_PROBE_TIMEOUT_S = 5.0
_GPU_SHARE = 0.001
"""Share of an accelerator for a task that only finds out which one it is; small enough to fit besides the tenants."""


@dataclass(frozen=True)
class ResourcePool:
    """`count` slots of one placement group; `tenants` actors share each of them."""

    placement_group: PlacementGroup
    num_slots: int
    cpus_per_slot: float
    """CPUs reserved by each slot, shared by its tenants."""
    gpus_per_slot: float
    actors_per_slot: int
    min_cores_per_slot: int
    """CPUs of a slot's node, divided by the slots there; the fewest of all slots. Its tenants take turns."""
    slots_per_bundle: int = 1
    """Neighbouring slots of one bundle, which lie on one node."""
    bundle_order: tuple[int, ...] = ()
    """The bundles, those of a node together; empty if they are in order anyway."""
    slot_node_ids: tuple[str, ...] = ()
    """Ray's id of the node of each slot when they were reserved."""

    def bundle_index(self, index: int) -> int:
        """The bundle of slot `index`."""
        bundle = index // self.slots_per_bundle
        return self.bundle_order[bundle] if self.bundle_order else bundle


def cpus_per_slot(cluster_cpus: float, total_slots: int) -> float:
    """CPUs that a CPU slot reserves: one, or less on a small cluster; a share is left for driver and environments.

    `cluster_cpus`: without those of environment hosts.
    """
    return round(min(1.0, cluster_cpus / (total_slots + 1)), 3)


def reserve_pool(
    cluster: Cluster,
    *,
    count: int,
    actors_per_slot: int,
    device: str,
    total_slots: int,
    deadline_s: float,
    key: str,
    strategy: str = "PACK",
    labels: Mapping[str, str] | None = None,
    slots_per_bundle: int = 1,
    reserved_cpus: float = 0.0,
) -> ResourcePool:
    """Reserve `count` slots.

    Args:
        total_slots: Of the whole run, so that all of its slots fit the CPUs.
        key: The configuration key that needs the slots, for the error message.
        strategy: PACK for as few nodes as possible, SPREAD for as many as possible.
        labels: What a node must be labelled with.
        together: So many neighbouring slots lie on one node, each time.
        other_cpus: Of the cluster, for what has no slots.

    Raises ConfigError if the cluster does not provide them within `deadline_s` seconds, ClusterLost if nothing else
    either: then it is not that they are too many.
    """
    gpus = 1.0 if device == "cuda" else 0.0
    if (
        reserved_cpus >= cluster.num_cpus and not gpus
    ):  # also where nodes may come: CPU slots are shares of what is there
        raise ConfigError(
            f"environment.hosts: they take {reserved_cpus:g} CPUs, which leaves none for ranks and engines; "
            f"{_describe_cluster(cluster)}. Ask for fewer hosts, or set environment.host_cpus lower."
        )
    cpus = 1.0 if gpus else cpus_per_slot(cluster.num_cpus - reserved_cpus, total_slots)
    need = f"{key}: needs {count} slots" + (f" of 1 GPU, {count} GPUs" if gpus else f" of {cpus:g} CPU")
    need += f", {slots_per_bundle} at a time on one node" if slots_per_bundle > 1 else ""
    need += f", on nodes with the labels {dict(labels)}" if labels else ""
    advice = "Ask for fewer ranks or engines, colocate them (trainer.placement.colocate_all=true), or add nodes."
    if gpus * total_slots > cluster.num_gpus and not cluster.may_autoscale:
        raise ConfigError(f"{need} ({total_slots} in the whole run); {_describe_cluster(cluster)}. {advice}")
    bundle = {"CPU": cpus * slots_per_bundle} | ({"GPU": gpus * slots_per_bundle} if gpus else {})
    bundles = [bundle] * (count // slots_per_bundle)
    group = _create_placement_group(cluster, bundles, strategy, deadline_s, need, advice, labels)
    return _build_pool(group, count, cpus, gpus, actors_per_slot, slots_per_bundle)


def _build_pool(
    group: PlacementGroup, count: int, cpus: float, gpus: float, actors_per_slot: int, slots_per_bundle: int
) -> ResourcePool:
    """The slots of a group that has its nodes."""
    table: Mapping[int, str] = placement_group_table(group)["bundles_to_node_id"]
    order = order_by_node([table[index] for index in range(count // slots_per_bundle)])
    nodes = tuple(table[index] for index in order for _ in range(slots_per_bundle))
    return ResourcePool(
        group, count, cpus, gpus, actors_per_slot, _query_min_cores_per_slot(nodes), slots_per_bundle, order, nodes
    )


def order_by_node(nodes: Sequence[str]) -> tuple[int, ...]:
    """The indices of `nodes`, equal ones together, in the order in which each comes first.

    Ranks that are neighbours talk most: those of a tensor-parallel group above all.
    """
    return tuple(sorted(range(len(nodes)), key=lambda index: nodes.index(nodes[index])))


async def reserve_additional_pool(
    cluster: Cluster,
    existing_pool: ResourcePool,
    *,
    count: int,
    total_slots: int,
    deadline_s: float,
    labels: Mapping[str, str] | None = None,
    reserved_cpus: float = 0.0,
) -> ResourcePool:
    """Reserve `count` slots more for a run under way, in a group of their own: `cluster.gives_back` ends it.

    On CPUs a slot is no larger than it would be had the run begun with `total_slots`, those that it asks for included.
    Slots are as many on a node as those of `like`; `labels`, `other_cpus`: see `reserve`. A group
    that waits for room is what makes an autoscaler add nodes. Raises ConfigError if there is none within `deadline_s`
    seconds.
    """
    cpus = (
        existing_pool.cpus_per_slot
        if existing_pool.gpus_per_slot
        else min(existing_pool.cpus_per_slot, cpus_per_slot(cluster.num_cpus - reserved_cpus, total_slots))
    )
    together = existing_pool.slots_per_bundle
    bundle = {"CPU": cpus * together} | (
        {"GPU": existing_pool.gpus_per_slot * together} if existing_pool.gpus_per_slot else {}
    )
    bundles = count // together
    selector = [dict(labels)] * bundles if labels else None
    group = placement_group([bundle] * bundles, strategy="PACK", bundle_label_selector=selector)
    cluster.register_placement_group(group)
    try:
        async with asyncio.timeout(deadline_s):
            while not await asyncio.to_thread(group.wait, 1):
                pass
        return await asyncio.to_thread(_build_pool, group, count, cpus, existing_pool.gpus_per_slot, 1, together)
    except TimeoutError:
        cluster.release_placement_group(group)
        free = await asyncio.to_thread(ray.available_resources)
        raise ConfigError(
            f"{count} slots more of {cpus:g} CPU"
            + (f" and {existing_pool.gpus_per_slot:g} GPU" if existing_pool.gpus_per_slot else "")
            + " were not free "
            f"within {deadline_s:g} s ({free.get('CPU', 0.0):g} CPUs and {free.get('GPU', 0.0):g} GPUs are now). Add "
            "nodes to the Ray cluster, or end what uses them, and ask again."
        ) from None
    except BaseException:
        cluster.release_placement_group(group)
        raise


def reserve_spread_pool(
    cluster: Cluster, *, count: int, cpus: float, resources: Mapping[str, float], deadline_s: float, key: str
) -> ResourcePool:
    """Reserve `count` slots of CPUs and custom resources for one actor each, spread over nodes as far as there are any.

    Raises as `reserve`.
    """
    others = "".join(f" and {amount:g} {name}" for name, amount in resources.items())
    need = f"{key}: needs {count} x {cpus:g} CPU{others}"
    bundle = {"CPU": cpus, **resources}
    lacks = [name for name, amount in bundle.items() if count * amount > ray.cluster_resources().get(name, 0.0)]
    advice = "Ask for fewer hosts, for less in environment.host_cpus and environment.host_resources, or add nodes."
    if lacks and not cluster.may_autoscale:
        raise ConfigError(f"{need}; {_describe_cluster(cluster)}, which is not enough {' or '.join(lacks)}. {advice}")
    group = _create_placement_group(cluster, [bundle] * count, "SPREAD", deadline_s, need, advice)
    return _build_pool(group, count, cpus, 0.0, 1, 1)


def _describe_cluster(cluster: Cluster) -> str:
    return f"the Ray cluster has {cluster.num_cpus:g} CPUs and {cluster.num_gpus:g} GPUs in all"


def _create_placement_group(
    cluster: Cluster,
    bundles: list[dict[str, float]],
    strategy: str,
    deadline_s: float,
    need: str,
    advice: str,
    labels: Mapping[str, str] | None = None,
) -> PlacementGroup:
    selector = [dict(labels)] * len(bundles) if labels else None
    group = placement_group(bundles, strategy=strategy, bundle_label_selector=selector)
    if not _wait_until_placed(group, deadline_s):
        remove_placement_group(group)
        if not _probe_raylets():
            raise ClusterLost(f"{need}; not placed within {deadline_s:g} s, nor is anything: a raylet does not answer.")
        free = ray.available_resources()
        idle = f"{free.get('CPU', 0.0):g} CPUs and {free.get('GPU', 0.0):g} GPUs are free now"
        raise ConfigError(f"{need}; {_describe_cluster(cluster)}, {idle}; not placed within {deadline_s:g} s. {advice}")
    cluster.register_placement_group(group)
    return group


def _wait_until_placed(group: PlacementGroup, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    # group.ready() would be a task, which holds a worker that could be an actor; a wait hears no Ctrl-C before its end.
    try:
        while not (ready := group.wait(1)) and time.monotonic() < deadline:
            pass
    except Exception:  # Ray's own kind: there is no such group any more, as there is no node for it
        return False
    return bool(ready)


def _probe_raylets() -> bool:
    """Whether every node still reserves what it is asked for: of a resource that each has for itself alone."""
    asked = [{f"node:{node['NodeManagerAddress']}": 0.001} for node in ray.nodes() if node["Alive"]]
    if not asked:
        return False
    group = placement_group(asked, strategy="SPREAD")
    try:
        return _wait_until_placed(group, _PROBE_TIMEOUT_S)
    finally:
        remove_placement_group(group)


def _query_min_cores_per_slot(nodes: Iterable[str]) -> int:
    cpus = {node["NodeID"]: node["Resources"].get("CPU", 1.0) for node in ray.nodes() if node["Alive"]}
    return compute_min_cores_per_slot(nodes, cpus)


def compute_min_cores_per_slot(nodes: Iterable[str], cpus: Mapping[str, float]) -> int:
    """CPUs for each slot, where they are fewest: `nodes` are those of all slots, `cpus` what each node has."""
    return min(max(1, int(cpus.get(node, 1.0)) // slots) for node, slots in Counter(nodes).items())


def slot_scheduling_strategy(pool: ResourcePool, index: int) -> PlacementGroupSchedulingStrategy:
    """Where Ray puts an actor or a task that uses slot `index`."""
    return PlacementGroupSchedulingStrategy(pool.placement_group, placement_group_bundle_index=pool.bundle_index(index))


async def await_unless_node_lost(work: Awaitable[T], pool: ResourcePool, indices: Sequence[int]) -> T:
    """Await `work`, which needs these of the slots. Raises ClusterLost once their node has died: it would never end."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=CHECK_INTERVAL_S))[0]:
            if not await _are_on_live_nodes(pool, indices):
                raise ClusterLost("a node with slots of this run died.")
        return task.result()
    finally:
        task.cancel()


async def wait_for_rescheduling(pool: ResourcePool, indices: Sequence[int], within_s: float) -> None:
    """Wait until these of the slots have a node, those of a lost one a new one. Raises NoRoom if they have none then.

    Ray moves the bundles of a lost node by itself, and what is in the others goes on.
    """
    deadline = time.monotonic() + within_s
    while not await _are_on_live_nodes(pool, indices):
        if time.monotonic() > deadline:
            raise InsufficientResources("a node with slots of this run was lost, and the others have no room for them.")
        await asyncio.sleep(min(CHECK_INTERVAL_S, max(within_s, 0.1)))


async def _are_on_live_nodes(pool: ResourcePool, indices: Sequence[int]) -> bool:
    """Whether each of these slots is on a living node. Of a group as a whole Ray knows only whether all are."""
    table, nodes = await asyncio.to_thread(lambda: (placement_group_table(pool.placement_group), ray.nodes()))
    living = {node["NodeID"] for node in nodes if node["Alive"]}
    return all(table["bundles_to_node_id"].get(pool.bundle_index(index)) in living for index in indices)


async def locate_gpus(pool: ResourcePool, indices: Sequence[int], deadline_s: float) -> list[tuple[str, str]]:
    """Node and accelerator (an entry of CUDA_VISIBLE_DEVICES there) of each of these slots.

    A share of each slot must be free: that of the tenant that will use it. Raises DeadlineExceeded.
    """
    asked = [
        ray.remote(_locate_gpu)
        .options(
            num_cpus=0,
            num_gpus=_GPU_SHARE,
            scheduling_strategy=slot_scheduling_strategy(pool, index),
        )
        .remote()
        for index in indices
    ]
    try:
        return list(await with_timeout(deadline_s, asyncio.gather(*asked)))
    except TimeoutError as error:
        raise DeadlineExceeded(f"asking slots {list(indices)} for their accelerators", deadline_s) from error


async def find_free_address(cluster: Cluster, pool: ResourcePool, index: int, deadline_s: float) -> tuple[str, int]:
    """(address, free port) of the node of a slot, as the run's other processes reach it.

    Raises DeadlineExceeded, and ClusterLost if the node cannot be asked.
    """
    options: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": slot_scheduling_strategy(pool, index)}
    asked: Any = ray.remote(_free_address).options(**options).remote(cluster.is_single_node)
    try:
        return await with_timeout(deadline_s, asked)  # type: ignore[no-any-return]
    except TimeoutError as error:
        raise DeadlineExceeded(f"asking the node of slot {index} for a free port", deadline_s) from error
    except RayError as error:
        raise ClusterLost(f"the node of slot {index} does not say which of its ports is free: {error}") from error


def _free_address(is_single_node: bool) -> tuple[str, int]:
    return free_address(LOOPBACK if is_single_node else ray.util.get_node_ip_address())


def _locate_gpu() -> tuple[str, str]:
    (device,) = ray.get_gpu_ids()
    return ray.get_runtime_context().get_node_id(), str(device)


def visible_devices(locations: Sequence[tuple[str, str]], key: str) -> str:
    """CUDA_VISIBLE_DEVICES for a process that uses all of these (node, accelerator) places, in order.

    Raises ConfigError naming `key` if they are on several nodes.
    """
    nodes = sorted({node for node, _ in locations})
    if len(nodes) > 1:
        raise ConfigError(
            f"{key}: {len(locations)} accelerators that one engine needs on one node lie on {len(nodes)} "
            f"({', '.join(nodes)}). Make it divide the accelerators of a node and start more engines instead, or set "
            "trainer.placement.nodes_per_engine."
        )
    return ",".join(device for _, device in locations)
