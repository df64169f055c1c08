"""Resource pools: slots in the bundles of a placement group, each with the resources of one rank or engine.

A slot is one GPU, or a share of CPUs on a cluster without GPUs.
"""

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
"""Seconds between two checks of the nodes."""
_PROBE_TIMEOUT_S = 5.0
_GPU_SHARE = 0.001
"""Share of a GPU for a task that only finds out which GPU it got; small enough to fit next to the slot's actors."""


@dataclass(frozen=True)
class ResourcePool:
    """Slots of one placement group. Several actors may share each slot."""

    placement_group: PlacementGroup
    num_slots: int
    """Number of slots."""
    cpus_per_slot: float
    """CPUs that each slot reserves, shared by its actors."""
    gpus_per_slot: float
    """1 for slots with a GPU, 0 for slots of CPUs."""
    actors_per_slot: int
    """Number of actors that share each slot."""
    min_cores_per_slot: int
    """CPUs per slot on the node where they are fewest. The actors of a slot use them in turn."""
    slots_per_bundle: int = 1
    """Neighboring slots of one bundle, which are on one node."""
    bundle_order: tuple[int, ...] = ()
    """Bundle indices, grouped by node. Empty if the bundles are in this order anyway."""
    slot_node_ids: tuple[str, ...] = ()
    """Ray's id of each slot's node when the pool was reserved."""

    def bundle_index(self, index: int) -> int:
        """Return the index of the bundle that has slot `index`."""
        bundle = index // self.slots_per_bundle
        return self.bundle_order[bundle] if self.bundle_order else bundle


def cpus_per_slot(cluster_cpus: float, total_slots: int) -> float:
    """Return the CPUs that a CPU slot reserves: one, or less on a small cluster.

    A share as large as a slot is left for the driver and its environments.

    Args:
        cluster_cpus: CPUs of the cluster, without those of environment hosts.
        total_slots: Slots of the whole run.
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
    """Reserve slots, and block until the cluster has placed them.

    Args:
        cluster: Cluster of the run, which removes the placement group when it closes.
        count: Number of slots, a multiple of `slots_per_bundle`.
        actors_per_slot: Number of actors that share each slot.
        device: "cuda" for slots of one GPU, otherwise slots of CPUs.
        total_slots: Slots of the whole run, so that all of them fit the CPUs.
        deadline_s: Seconds to wait for the slots.
        key: Configuration key that needs the slots, for error messages.
        strategy: "PACK" for as few nodes as possible, "SPREAD" for as many as possible.
        labels: Ray's label selectors that nodes must match, by label name. None: any node.
        slots_per_bundle: Number of neighboring slots that must be on one node.
        reserved_cpus: CPUs of the cluster that the pool must leave free.

    Raises:
        ConfigError: The cluster is too small, or has not placed the slots within the deadline.
        ClusterLost: The slots were not placed because a raylet does not respond.
    """
    gpus = 1.0 if device == "cuda" else 0.0
    # Autoscaling does not help here: CPU slots are shares of the CPUs that exist now.
    if reserved_cpus >= cluster.num_cpus and not gpus:
        raise ConfigError(
            f"environment.hosts: the hosts take {reserved_cpus:g} CPUs, which leaves none for ranks and engines; "
            f"{_describe_cluster(cluster)}. Ask for fewer hosts, or set environment.host_cpus lower."
        )
    cpus = 1.0 if gpus else cpus_per_slot(cluster.num_cpus - reserved_cpus, total_slots)
    demand_text = f"{key}: needs " + (f"{count} GPUs" if gpus else f"{count} bundles of {cpus:g} CPU")
    demand_text += f", {slots_per_bundle} at a time on one node" if slots_per_bundle > 1 else ""
    demand_text += f", on nodes with the labels {dict(labels)}" if labels else ""
    hint = "Ask for fewer ranks or engines, colocate them (trainer.placement.colocate_all=true), or add nodes."
    if gpus * total_slots > cluster.num_gpus and not cluster.may_autoscale:
        raise ConfigError(f"{demand_text} ({total_slots} in the whole run); {_describe_cluster(cluster)}. {hint}")
    bundle = {"CPU": cpus * slots_per_bundle} | ({"GPU": gpus * slots_per_bundle} if gpus else {})
    bundles = [bundle] * (count // slots_per_bundle)
    placement = _create_placement_group(cluster, bundles, strategy, deadline_s, demand_text, hint, labels)
    return _build_pool(placement, count, cpus, gpus, actors_per_slot, slots_per_bundle)


def _build_pool(
    placement: PlacementGroup, count: int, cpus: float, gpus: float, actors_per_slot: int, slots_per_bundle: int
) -> ResourcePool:
    """Return the pool of a placement group whose bundles have been placed."""
    table: Mapping[int, str] = placement_group_table(placement)["bundles_to_node_id"]
    order = order_by_node([table[index] for index in range(count // slots_per_bundle)])
    node_ids = tuple(table[index] for index in order for _ in range(slots_per_bundle))
    return ResourcePool(
        placement,
        count,
        cpus,
        gpus,
        actors_per_slot,
        _query_min_cores_per_slot(node_ids),
        slots_per_bundle,
        order,
        node_ids,
    )


def order_by_node(nodes: Sequence[str]) -> tuple[int, ...]:
    """Return the indices of `nodes` with equal nodes grouped, in the order in which each node comes first.

    Neighboring ranks communicate most, above all those of a tensor-parallel group.
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
    """Reserve more slots for a run in progress, in a placement group of their own.

    A pending placement group makes an autoscaler add nodes. `cluster.release_placement_group` frees the slots again.
    CPU slots are as large as those of `existing_pool`, or smaller if the run had started with `total_slots` slots.

    Args:
        cluster: Cluster of the run.
        existing_pool: Pool whose size of slots and number of slots per bundle the new pool takes over.
        count: Number of slots, a multiple of `existing_pool.slots_per_bundle`.
        total_slots: Slots of the whole run, including the new ones.
        deadline_s: Seconds to wait for the slots.
        labels: Ray's label selectors that nodes must match, by label name. None: any node.
        reserved_cpus: CPUs of the cluster that the slots must leave free.

    Raises:
        ConfigError: The slots were not placed within the deadline.
    """
    cpus = (
        existing_pool.cpus_per_slot
        if existing_pool.gpus_per_slot
        else min(existing_pool.cpus_per_slot, cpus_per_slot(cluster.num_cpus - reserved_cpus, total_slots))
    )
    slots_per_bundle = existing_pool.slots_per_bundle
    bundle = {"CPU": cpus * slots_per_bundle} | (
        {"GPU": existing_pool.gpus_per_slot * slots_per_bundle} if existing_pool.gpus_per_slot else {}
    )
    num_bundles = count // slots_per_bundle
    selector = [dict(labels)] * num_bundles if labels else None
    placement = placement_group([bundle] * num_bundles, strategy="PACK", bundle_label_selector=selector)
    cluster.register_placement_group(placement)
    try:
        async with asyncio.timeout(deadline_s):
            while not await asyncio.to_thread(placement.wait, 1):
                pass
        return await asyncio.to_thread(
            _build_pool, placement, count, cpus, existing_pool.gpus_per_slot, 1, slots_per_bundle
        )
    except TimeoutError:
        cluster.release_placement_group(placement)
        free = await asyncio.to_thread(ray.available_resources)
        raise ConfigError(
            f"{count} more bundles of {cpus:g} CPU"
            + (f" and {existing_pool.gpus_per_slot:g} GPU" if existing_pool.gpus_per_slot else "")
            + f" did not become free within {deadline_s:g} s ({free.get('CPU', 0.0):g} CPUs and "
            f"{free.get('GPU', 0.0):g} GPUs are free now). Add nodes to the Ray cluster or stop other jobs, and try "
            "again."
        ) from None
    except BaseException:
        cluster.release_placement_group(placement)
        raise


def reserve_spread_pool(
    cluster: Cluster, *, count: int, cpus: float, resources: Mapping[str, float], deadline_s: float, key: str
) -> ResourcePool:
    """Reserve slots of CPUs and custom resources for one actor each, spread over as many nodes as possible.

    Args:
        cluster: Cluster of the run, which removes the placement group when it closes.
        count: Number of slots.
        cpus: CPUs of each slot.
        resources: Custom resources of each slot, by name.
        deadline_s: Seconds to wait for the slots.
        key: Configuration key that needs the slots, for error messages.

    Raises:
        ConfigError: The cluster is too small, or has not placed the slots within the deadline.
        ClusterLost: The slots were not placed because a raylet does not respond.
    """
    custom = "".join(f" and {amount:g} {name}" for name, amount in resources.items())
    demand_text = f"{key}: needs {count} x {cpus:g} CPU{custom}"
    bundle = {"CPU": cpus, **resources}
    short = [name for name, amount in bundle.items() if count * amount > ray.cluster_resources().get(name, 0.0)]
    hint = "Ask for fewer hosts, for less in environment.host_cpus and environment.host_resources, or add nodes."
    if short and not cluster.may_autoscale:
        raise ConfigError(
            f"{demand_text}; {_describe_cluster(cluster)}, which is not enough {' or '.join(short)}. {hint}"
        )
    placement = _create_placement_group(cluster, [bundle] * count, "SPREAD", deadline_s, demand_text, hint)
    return _build_pool(placement, count, cpus, 0.0, 1, 1)


def _describe_cluster(cluster: Cluster) -> str:
    return f"the Ray cluster has {cluster.num_cpus:g} CPUs and {cluster.num_gpus:g} GPUs in all"


def _create_placement_group(
    cluster: Cluster,
    bundles: list[dict[str, float]],
    strategy: str,
    deadline_s: float,
    demand_text: str,
    hint: str,
    labels: Mapping[str, str] | None = None,
) -> PlacementGroup:
    selector = [dict(labels)] * len(bundles) if labels else None
    placement = placement_group(bundles, strategy=strategy, bundle_label_selector=selector)
    if not _wait_until_placed(placement, deadline_s):
        remove_placement_group(placement)
        if not _probe_raylets():
            raise ClusterLost(f"{demand_text}; not placed within {deadline_s:g} s, because a raylet does not respond.")
        free = ray.available_resources()
        free_text = f"{free.get('CPU', 0.0):g} CPUs and {free.get('GPU', 0.0):g} GPUs are free now"
        raise ConfigError(
            f"{demand_text}; {_describe_cluster(cluster)}, {free_text}; not placed within {deadline_s:g} s. {hint}"
        )
    cluster.register_placement_group(placement)
    return placement


def _wait_until_placed(placement: PlacementGroup, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    # placement.ready() would run a task, which occupies a worker process. Short waits let Ctrl-C through.
    try:
        while not (ready := placement.wait(1)) and time.monotonic() < deadline:
            pass
    except Exception:  # of a type of Ray's own: the group was removed, as no node can hold it
        return False
    return bool(ready)


def _probe_raylets() -> bool:
    """Return True if every live node can still place a bundle.

    Reserves a little of the resource `node:<ip>` of each node. A node whose raylet hangs fails this test.
    """
    bundles = [{f"node:{node['NodeManagerAddress']}": 0.001} for node in ray.nodes() if node["Alive"]]
    if not bundles:
        return False
    placement = placement_group(bundles, strategy="SPREAD")
    try:
        return _wait_until_placed(placement, _PROBE_TIMEOUT_S)
    finally:
        remove_placement_group(placement)


def _query_min_cores_per_slot(node_ids: Iterable[str]) -> int:
    cpus = {node["NodeID"]: node["Resources"].get("CPU", 1.0) for node in ray.nodes() if node["Alive"]}
    return compute_min_cores_per_slot(node_ids, cpus)


def compute_min_cores_per_slot(nodes: Iterable[str], cpus: Mapping[str, float]) -> int:
    """Return the CPUs per slot, at least 1, of the node where they are fewest.

    Args:
        nodes: Node id of each slot.
        cpus: CPUs of each node, by id.
    """
    return min(max(1, int(cpus.get(node, 1.0)) // slots) for node, slots in Counter(nodes).items())


def slot_scheduling_strategy(pool: ResourcePool, index: int) -> PlacementGroupSchedulingStrategy:
    """Return Ray's scheduling strategy for an actor or a task in slot `index`."""
    return PlacementGroupSchedulingStrategy(pool.placement_group, placement_group_bundle_index=pool.bundle_index(index))


async def await_unless_node_lost(work: Awaitable[T], pool: ResourcePool, indices: Sequence[int]) -> T:
    """Await `work`, which depends on some slots of a pool, and return its result.

    Args:
        work: Awaitable, cancelled if this call ends early.
        pool: Pool of the slots.
        indices: Slots on which `work` depends.

    Raises:
        ClusterLost: A node of these slots died, so `work` would never finish.
    """
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=CHECK_INTERVAL_S))[0]:
            if not await _are_on_live_nodes(pool, indices):
                raise ClusterLost("a node of this run died.")
        return task.result()
    finally:
        task.cancel()


async def wait_for_rescheduling(pool: ResourcePool, indices: Sequence[int], within_s: float) -> None:
    """Wait until all of these slots are on live nodes.

    Ray itself moves the bundles of a lost node to other nodes; the other bundles keep running.

    Args:
        pool: Pool of the slots.
        indices: Slots to wait for.
        within_s: Seconds to wait.

    Raises:
        InsufficientResources: Some slot is on no live node after that time.
    """
    deadline = time.monotonic() + within_s
    while not await _are_on_live_nodes(pool, indices):
        if time.monotonic() > deadline:
            raise InsufficientResources(
                "A node of this run was lost, and the other nodes have no free resources for its actors. Add a node, "
                "or resume with fewer GPUs."
            )
        await asyncio.sleep(min(CHECK_INTERVAL_S, max(within_s, 0.1)))


async def _are_on_live_nodes(pool: ResourcePool, indices: Sequence[int]) -> bool:
    """Return True if each of these slots is on a live node.

    Ray's own state of a placement group covers only all of its bundles.
    """
    table, nodes = await asyncio.to_thread(lambda: (placement_group_table(pool.placement_group), ray.nodes()))
    live_node_ids = {node["NodeID"] for node in nodes if node["Alive"]}
    return all(table["bundles_to_node_id"].get(pool.bundle_index(index)) in live_node_ids for index in indices)


async def locate_gpus(pool: ResourcePool, indices: Sequence[int], deadline_s: float) -> list[tuple[str, str]]:
    """Return node id and GPU (an entry of CUDA_VISIBLE_DEVICES there) of each of these slots.

    The tasks that ask need a thousandth of each slot's GPU, so an actor's share of it must still be free.

    Args:
        pool: Pool with GPUs.
        indices: Slots to locate.
        deadline_s: Seconds that this may take.

    Raises:
        DeadlineExceeded: Some slot's task did not finish in time.
    """
    refs = [
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
        return list(await with_timeout(deadline_s, asyncio.gather(*refs)))
    except TimeoutError as error:
        raise DeadlineExceeded(f"locating the GPUs of bundles {list(indices)}", deadline_s) from error


async def find_free_address(cluster: Cluster, pool: ResourcePool, index: int, deadline_s: float) -> tuple[str, int]:
    """Return the address of a slot's node, as the run's other processes reach it, and a free port of it.

    Args:
        cluster: Cluster of the run.
        pool: Pool of the slot.
        index: Index of the slot.
        deadline_s: Seconds that this may take.

    Raises:
        DeadlineExceeded: The node did not answer in time.
        ClusterLost: The task on the node failed, for example because the node died.
    """
    options: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": slot_scheduling_strategy(pool, index)}
    reference: Any = ray.remote(_free_address).options(**options).remote(cluster.is_single_node)
    try:
        return await with_timeout(deadline_s, reference)  # type: ignore[no-any-return]
    except TimeoutError as error:
        raise DeadlineExceeded(f"finding a free port on the node of bundle {index}", deadline_s) from error
    except RayError as error:
        raise ClusterLost(f"no free port could be found on the node of bundle {index}: {error}") from error


def _free_address(is_single_node: bool) -> tuple[str, int]:
    return free_address(LOOPBACK if is_single_node else ray.util.get_node_ip_address())


def _locate_gpu() -> tuple[str, str]:
    (device,) = ray.get_gpu_ids()
    return ray.get_runtime_context().get_node_id(), str(device)


def visible_devices(locations: Sequence[tuple[str, str]], key: str) -> str:
    """Return CUDA_VISIBLE_DEVICES for a process that uses all of these GPUs, in the order of `locations`.

    Args:
        locations: Node id and GPU of each, see `locate_gpus`.
        key: Configuration key that requires them to be on one node, for the error message.

    Raises:
        ConfigError: The GPUs are on several nodes.
    """
    nodes = sorted({node for node, _ in locations})
    if len(nodes) > 1:
        raise ConfigError(
            f"{key}: one engine needs {len(locations)} GPUs on one node, but they are on {len(nodes)} nodes "
            f"({', '.join(nodes)}). Choose a value that divides the number of GPUs of a node and start more engines "
            "instead, or set trainer.placement.nodes_per_engine."
        )
    return ",".join(device for _, device in locations)
