"""Restarts of a run's ranks after one of them was lost (trainer.restarts).

If the remaining nodes have no room for everything, the run continues with fewer environment hosts, ranks and engines.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import chain
from typing import TypeVar

from skyrl_train.cluster.capacity import NodeCapacity, ResourceDemand, can_place, query_free_capacity
from skyrl_train.cluster.placement import cpus_per_slot
from skyrl_train.cluster.ray_cluster import Cluster
from skyrl_train.config.keys import replace_value
from skyrl_train.config.predicates import (
    RunComponents,
    count_run_slots,
    environment_host_cpus,
    gpus_per_engine,
    num_environment_hosts,
)
from skyrl_train.config.schema import Config
from skyrl_train.config.validate import validate
from skyrl_train.engines.target_count import ENGINES_FILE, lock_target_file, read_target, target_file_version
from skyrl_train.errors import (
    ClusterLost,
    ConfigError,
    InsufficientResources,
    RewardModelLost,
    RunInterrupted,
    WorkerDied,
)
from skyrl_train.experiment.engines import engine_count_fixed_reason
from skyrl_train.learner.learner import RESPONSE_TIMEOUT_S, Learner
from skyrl_train.report.progress_log import print_status
from skyrl_train.storage.mirror import LATEST_FILE
from skyrl_train.storage.uris import resolve_local_folder
from skyrl_train.trainer.run_folder import hold_run_lock, release_run_lock

T = TypeVar("T")
_POLL_INTERVAL_S = 0.5


async def with_restarts(
    attempt: Callable[[], Awaitable[T]],
    config: Config,
    cluster: Cluster,
    prepare_restart: Callable[[Config, Config, str], Awaitable[Config]],
) -> T:
    """Run attempts until one returns, and start another one after a lost rank, at most trainer.restarts times.

    Each further attempt resumes from the run's latest checkpoint, with as many ranks as there is room for. The run's
    lock is held between attempts. There is no restart behind a Ray client, after the run was asked to stop, or if Ray's
    own processes died, which takes the driver's cluster with them.

    Args:
        attempt: One attempt at the run.
        config: The configuration of the first attempt.
        cluster: The cluster.
        prepare_restart: Prepares another attempt. It receives the configuration to continue with, the one of the first
            attempt, and the cause of the last attempt's end. It returns the configuration that fits the remaining
            nodes.

    Returns:
        The result of the first attempt that succeeds.

    Raises:
        InsufficientResources: The remaining nodes have no room for a rank and an engine.
        Exception: The error of the last attempt.
    """
    next_config = running = config
    restarts = 0
    initial_time_ns = latest_checkpoint_time_ns(config)
    cannot_restart = cluster.is_ray_client  # a Ray client does not report which nodes remain
    folder = resolve_local_folder(config.trainer.ckpt_path)
    try:
        while True:
            stamp = _target_stamp(config)
            try:
                return await attempt()
            except Exception as error:
                is_exhausted = restarts == config.trainer.restarts
                is_cluster_dead = cluster.failure() is not None
                if is_exhausted or cannot_restart or _is_stopping() or not _lost_a_rank(error) or is_cluster_dead:
                    raise
                cause = f"{type(error).__name__}: {error}"
                hold_run_lock(folder)
            restarts += 1
            with lock_target_file(folder):
                if _target_stamp(config) != stamp:
                    next_config = with_target_count(next_config, running)
                # The file belongs to the attempt that is over. Without it, `skyrl-train engines` asks to wait until
                # the next attempt has written its own.
                (folder / ENGINES_FILE).unlink(missing_ok=True)
            if latest_checkpoint_time_ns(config) != initial_time_ns:  # the run has saved a checkpoint
                next_config = replace_value(next_config, "trainer.resume_mode", "latest")
            running = await prepare_restart(next_config, config, cause)
    finally:
        release_run_lock(folder)


def _is_stopping() -> bool:
    """True if the run was asked to stop, and lost a rank while it was stopping."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def shrink_to_cluster(
    next_config: Config, configured: Config, components: RunComponents, cluster: Cluster
) -> Config:
    """Reconnect to the cluster and scale the configuration down to the remaining nodes. Prints one line about it.

    Args:
        next_config: The configuration to continue with.
        configured: The configuration of the first attempt, for the printed line.
        components: The parts of the configuration that the experiment uses.
        cluster: The cluster, which is reconnected.

    Returns:
        The configuration that fits the remaining nodes.

    Raises:
        InsufficientResources: Not even one rank and one engine fit.
    """
    cluster.connect()
    added = next_config.generator.num_inference_engines - configured.generator.num_inference_engines
    config = await shrink_to_nodes(next_config, components, cluster, max(0, added))
    before, after = count_run_slots(configured, components), count_run_slots(config, components)
    fewer = "" if after.policy == before.policy else f" ({before.policy} are configured)"
    engines = config.generator.num_inference_engines if after.engines else 0
    missing = configured.generator.num_inference_engines - engines if after.engines else 0
    hosts = config.environment.hosts if config.environment.hosts != configured.environment.hosts else 0
    print_status(
        "restart",
        f"{after.policy} ranks{fewer}"
        + (f" and {engines} engines" if engines else "")
        + (f" ({missing} fewer than configured)" if missing > 0 else "")
        + (f" and {hosts} environment hosts ({configured.environment.hosts} are configured)" if hosts else "")
        + f" on the {cluster.num_nodes} remaining nodes, from the latest checkpoint",
    )
    return config


def with_target_count(config: Config, running: Config) -> Config:
    """Return `config` with the number of engines that `skyrl-train engines` set while `running` was the configuration.

    Returns `config` unchanged if the number was not changed, cannot change or cannot be read. A run writes its own
    number when it begins.
    """
    with suppress(ConfigError, OSError):
        if engine_count_fixed_reason(running) is None:
            target = read_target(resolve_local_folder(running.trainer.ckpt_path))
            if target != running.generator.num_inference_engines:
                return replace_value(config, "generator.num_inference_engines", target)
    return config


def _target_stamp(config: Config) -> tuple[int, int] | None:
    """Return a value that changes whenever the target number of engines is written."""
    return target_file_version(resolve_local_folder(config.trainer.ckpt_path))


def latest_checkpoint_time_ns(config: Config) -> int | None:
    """Return when the latest checkpoint in the run's folder was committed (ns); None if there is none.

    A checkpoint from before the run began does not count as the run's own: trainer.resume_mode=from_path may leave it.
    """
    file = resolve_local_folder(config.trainer.ckpt_path) / LATEST_FILE
    return file.stat().st_mtime_ns if file.exists() else None


def _lost_a_rank(error: BaseException | None) -> bool:
    """True if the error or one of its causes is a lost rank, node or reward model replica."""
    return any(isinstance(cause, WorkerDied | ClusterLost | RewardModelLost) for cause in _causes(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


@asynccontextmanager
async def raise_lost_ranks(learner: Learner, restarts: int) -> AsyncIterator[None]:
    """Raise WorkerDied if an error of the body follows from a lost rank.

    An engine that receives weights, or a rank in a collective, may report a lost peer first. After any other error the
    ranks are pinged; in a run without restarts they are not.

    Args:
        learner: The ranks.
        restarts: trainer.restarts.

    Raises:
        WorkerDied: The body failed, and a rank does not respond.
    """
    try:
        yield
    except Exception as error:
        pings_ranks = restarts and not isinstance(error, RunInterrupted) and not _lost_a_rank(error)
        if not pings_ranks or await learner.is_responsive(RESPONSE_TIMEOUT_S):
            raise
        raise WorkerDied(f"a trainer rank does not respond, after {type(error).__name__}: {error}") from error


# -- scaling down


async def shrink_to_nodes(
    cfg: Config, components: RunComponents, cluster: Cluster, num_added_engines: int = 0
) -> Config:
    """Return the configuration with as many ranks, engines and environment hosts as the living nodes have room for.

    Waits up to trainer.timeouts.placement_s for room for everything, because slots of ended processes are released with
    a delay. After that it gives up hosts first, next the added engines, then as few slots as possible, the trainer's
    before an engine's. The number of ranks of other models with dedicated slots never changes.

    Args:
        cfg: The configuration to scale down.
        components: The parts of the configuration that the experiment uses.
        cluster: The cluster.
        num_added_engines: Number of engines that were added after the run began.

    Raises:
        InsufficientResources: Not even one rank, one engine and one host fit.
    """
    deadline = time.monotonic() + cfg.trainer.timeouts.placement_s
    while True:
        nodes, cpus = await asyncio.to_thread(lambda: (query_free_capacity(), cluster.num_cpus))
        if fits_on_nodes(cfg, components, nodes, cpus):
            return cfg
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(_POLL_INTERVAL_S)
    fitting = smaller_configs(
        cfg, components, lambda variant: fits_on_nodes(variant, components, nodes, cpus), num_added_engines
    )
    smaller = await asyncio.to_thread(next, fitting, None)  # thousands of ranks and engines have many variants
    if smaller is None:
        host = " and an environment host" if num_environment_hosts(cfg, components) else ""
        raise InsufficientResources(
            f"the {cluster.num_nodes} remaining nodes ({cluster.num_cpus:g} CPUs, {cluster.num_gpus:g} GPUs) have no "
            f"room for a trainer rank and an engine{host}, or those with the labels of trainer.placement.node_labels "
            "have none. Add nodes and start the run again."
        )
    return smaller


def smaller_configs(
    cfg: Config, components: RunComponents, is_feasible: Callable[[Config], bool], num_added_engines: int = 0
) -> Iterator[Config]:
    """Yield variants of the configuration with fewer and fewer slots that are feasible and valid, the largest first.

    Args:
        cfg: The configuration.
        components: The parts of the configuration that the experiment uses.
        is_feasible: True if the nodes have room for a configuration.
        num_added_engines: Number of engines that were added after the run began; they are given up first.
    """
    slots, hosts = count_run_slots(cfg, components), num_environment_hosts(cfg, components)
    engines, num_added_engines = (cfg.generator.num_inference_engines, num_added_engines) if slots.engines else (0, 0)
    all_ranks = ((slots.policy, engines - num_removed) for num_removed in range(num_added_engines))
    pairs = _pairs(slots.policy, engines - num_added_engines, gpus_per_engine(cfg.generator))
    for ranks, num_engines in chain(all_ranks, pairs):
        variant = cfg
        if ranks != slots.policy:
            variant = replace_value(variant, "trainer.placement.policy_num_nodes", 1)
            variant = replace_value(variant, "trainer.placement.policy_num_gpus_per_node", ranks)
        if num_engines != engines:
            variant = replace_value(variant, "generator.num_inference_engines", num_engines)
        if not is_feasible(_with_hosts(variant, min(1, hosts))):
            continue
        candidates = (_with_hosts(variant, number) for number in range(hosts, min(1, hosts) - 1, -1))
        yield from (
            variant
            for variant in candidates
            if is_feasible(variant) and not validate(variant, allow_unregistered_names=True)
        )


def _pairs(ranks: int, engines: int, slots_per_engine: int) -> Iterator[tuple[int, int]]:
    """Yield (ranks, engines) from all of them down to one of each; among pairs with equal slots, more engines first."""
    for total in range(ranks + engines * slots_per_engine, 0, -1):
        max_engines, min_engines = (
            min(engines, (total - 1) // slots_per_engine),
            max(min(1, engines), -((ranks - total) // slots_per_engine)),
        )
        yield from (
            (total - num_engines * slots_per_engine, num_engines)
            for num_engines in range(max_engines, min_engines - 1, -1)
        )


def _with_hosts(cfg: Config, number: int) -> Config:
    return cfg if number in (0, cfg.environment.hosts) else replace_value(cfg, "environment.hosts", number)


def fits_on_nodes(cfg: Config, components: RunComponents, nodes: Sequence[NodeCapacity], cpus: float) -> bool:
    """True if these nodes have room for the run.

    Args:
        cfg: The configuration.
        components: The parts of the configuration that the experiment uses.
        nodes: The free capacity of each node.
        cpus: CPUs of the complete cluster, from which the size of a CPU slot follows.
    """
    slots, placement, environment = count_run_slots(cfg, components), cfg.trainer.placement, cfg.environment
    slot = {"CPU": 1.0, "GPU": 1.0}
    if cfg.device != "cuda":
        slot = {"CPU": cpus_per_slot(cpus - environment_host_cpus(cfg, components), slots.total)}
    if slot["CPU"] <= 0:
        return False
    policy_slots = slots.total if slots.engines_colocated else slots.policy
    demands = [
        ResourceDemand(count, slot, placement.node_labels)
        for count in (policy_slots, slots.reference, slots.critic, slots.reward)
    ]
    if not slots.engines_colocated:
        slots_per_node = gpus_per_engine(cfg.generator) // placement.nodes_per_engine
        demands.append(ResourceDemand(slots.engines, slot, placement.engine_node_labels, slots_per_node))
    demands.append(
        ResourceDemand(
            num_environment_hosts(cfg, components), {"CPU": environment.host_cpus, **environment.host_resources}
        )
    )
    return can_place(demands, nodes)
