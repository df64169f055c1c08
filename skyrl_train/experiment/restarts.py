"""A run whose ranks are started again when one of them was lost, on what is left (trainer.restarts).

Where all have no room, it goes on with fewer environment hosts, ranks and engines.
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
    """What `attempt` returns, which is made again after a rank was lost, up to trainer.restarts times in the run.

    Each further attempt resumes from the run's newest checkpoint, with as many ranks as have room. Raises what the last
    attempt did, or NoRoom. One's own Ray that died ends the run in any case: it takes the driver with it.

    Args:
        config: The configuration of the first attempt.
        start_over: Prepares another attempt. It gets the configuration to go on from, the one of the first attempt, and
            why the last attempt ended; it returns the configuration that has room.
    """
    goes_on = running = config
    restarts = 0
    found = latest_checkpoint_time_ns(config)
    cannot = cluster.is_ray_client  # what is left of a cluster is not told behind a Ray client
    folder = resolve_local_folder(config.trainer.ckpt_path)
    try:
        while True:
            unchanged = _target_stamp(config)
            try:
                return await attempt()
            except Exception as error:
                spent = restarts == config.trainer.restarts
                died = cluster.failure() is not None
                if spent or cannot or _is_stopping() or not _lost_a_rank(error) or died:
                    raise
                cause = f"{type(error).__name__}: {error}"
                hold_run_lock(folder)
            restarts += 1
            with lock_target_file(folder):
                if _target_stamp(config) != unchanged:
                    goes_on = with_target_count(goes_on, running)
                # It holds for the attempt that is over: who asks before the next has written its own is told to wait.
                (folder / ENGINES_FILE).unlink(missing_ok=True)
            if latest_checkpoint_time_ns(config) != found:  # there is a newest checkpoint of the run's own
                goes_on = replace_value(goes_on, "trainer.resume_mode", "latest")
            running = await prepare_restart(goes_on, config, cause)
    finally:
        release_run_lock(folder)


def _is_stopping() -> bool:
    """Whether the run was asked to stop, and a rank was lost while it came to that."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def shrink_to_cluster(
    next_config: Config, configured: Config, components: RunComponents, cluster: Cluster
) -> Config:
    """The like of `goes_on` for what is left of the cluster. Raises NoRoom."""
    cluster.connect()
    added = next_config.generator.num_inference_engines - configured.generator.num_inference_engines
    config = await shrink_to_nodes(next_config, components, cluster, max(0, added))
    before, after = (count_run_slots(one, components) for one in (configured, config))
    fewer = "" if after.policy == before.policy else f" ({before.policy} are configured)"
    engines = config.generator.num_inference_engines if after.engines else 0
    missing = configured.generator.num_inference_engines - engines if after.engines else 0
    hosts = config.environment.hosts if config.environment.hosts != configured.environment.hosts else 0
    print_status(
        "restart",
        f"{after.policy} ranks{fewer}"
        + (f" and {engines} engines" if engines else "")
        + (f" ({missing} fewer than configured)" if missing > 0 else "")
        + (f" and {hosts} hosts of environments ({configured.environment.hosts} are configured)" if hosts else "")
        + f" on the {cluster.num_nodes} nodes that are left, from the newest checkpoint",
    )
    return config


def with_target_count(config: Config, running: Config) -> Config:
    """Return `config` with the number of engines that `running` was asked for (`skyrl-train engines`) since it began.

    A run writes its own number when it begins.
    """
    with suppress(ConfigError, OSError):
        if engine_count_fixed_reason(running) is None:
            target = read_target(resolve_local_folder(running.trainer.ckpt_path))
            if target != running.generator.num_inference_engines:
                return replace_value(config, "generator.num_inference_engines", target)
    return config


def _target_stamp(config: Config) -> tuple[int, int] | None:
    """Return a value that changes when a run writes, or is asked for, a number of engines."""
    return target_file_version(resolve_local_folder(config.trainer.ckpt_path))


def latest_checkpoint_time_ns(config: Config) -> int | None:
    """When the newest checkpoint in the run's folder was committed (ns), None before there is one.

    What was there before the run began may be what trainer.resume_mode=from_path leaves behind.
    """
    file = resolve_local_folder(config.trainer.ckpt_path) / LATEST_FILE
    return file.stat().st_mtime_ns if file.exists() else None


def _lost_a_rank(error: BaseException | None) -> bool:
    """Or a replica of the reward model, which may also not answer."""
    return any(isinstance(one, WorkerDied | ClusterLost | RewardModelLost) for one in _causes(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


@asynccontextmanager
async def raise_lost_ranks(learner: Learner, restarts: int) -> AsyncIterator[None]:
    """Inside, an error that follows from a lost rank is raised as WorkerDied; not asked in a run without restarts.

    An engine to which weights are sent, or a rank in the middle of a collective, may say first that it lost a peer.
    """
    try:
        yield
    except Exception as error:
        asks = restarts and not isinstance(error, RunInterrupted) and not _lost_a_rank(error)
        if not asks or await learner.is_responsive(RESPONSE_TIMEOUT_S):
            raise
        raise WorkerDied(f"a rank of the trainer does not answer, after {type(error).__name__}: {error}") from error


# -- what has room


async def shrink_to_nodes(
    cfg: Config, components: RunComponents, cluster: Cluster, num_added_engines: int = 0
) -> Config:
    """`cfg` with as many ranks of the policy, engines, and hosts of environments, as the living nodes have room for.

    Waits up to trainer.timeouts.placement_s for room for all: what has ended gives its slots back a little later. Then
    hosts are given up first, next the `added` engines that the run did not begin with, then as few slots as possible,
    the trainer's before an engine's. Raises NoRoom if not even one of each fits. Ranks of other models that have slots
    of their own are never fewer.
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
        cfg, components, lambda one: fits_on_nodes(one, components, nodes, cpus), num_added_engines
    )
    found = await asyncio.to_thread(next, fitting, None)  # of thousands of ranks and engines there are many
    if found is None:
        host = " and a host of environments" if num_environment_hosts(cfg, components) else ""
        raise InsufficientResources(
            f"the {cluster.num_nodes} nodes that are left ({cluster.num_cpus:g} CPUs, {cluster.num_gpus:g} GPUs) have no room "
            f"for a rank of the trainer and an engine{host}, or not those with the labels of "
            "trainer.placement.node_labels."
        )
    return found


def smaller_configs(
    cfg: Config, components: RunComponents, is_feasible: Callable[[Config], bool], num_added_engines: int = 0
) -> Iterator[Config]:
    """The like of `cfg` with fewer and fewer slots; only what has room and would be accepted as a configuration."""
    slots, hosts = count_run_slots(cfg, components), num_environment_hosts(cfg, components)
    engines, num_added_engines = (cfg.generator.num_inference_engines, num_added_engines) if slots.engines else (0, 0)
    all_ranks = ((slots.policy, engines - given_up) for given_up in range(num_added_engines))
    fewer = _pairs(slots.policy, engines - num_added_engines, gpus_per_engine(cfg.generator))
    for ranks, left in chain(all_ranks, fewer):
        one = cfg
        if ranks != slots.policy:
            one = replace_value(one, "trainer.placement.policy_num_nodes", 1)
            one = replace_value(one, "trainer.placement.policy_num_gpus_per_node", ranks)
        if left != engines:
            one = replace_value(one, "generator.num_inference_engines", left)
        if not is_feasible(_with_hosts(one, min(1, hosts))):
            continue
        able = (_with_hosts(one, number) for number in range(hosts, min(1, hosts) - 1, -1))
        yield from (one for one in able if is_feasible(one) and not validate(one, allow_unregistered_names=True))


def _pairs(ranks: int, engines: int, stride: int) -> Iterator[tuple[int, int]]:
    """(ranks, engines), from all of them down to one of each; of pairs with as many slots, those with more engines."""
    for total in range(ranks + engines * stride, 0, -1):
        most, fewest = min(engines, (total - 1) // stride), max(min(1, engines), -((ranks - total) // stride))
        yield from ((total - left * stride, left) for left in range(most, fewest - 1, -1))


def _with_hosts(cfg: Config, number: int) -> Config:
    return cfg if number in (0, cfg.environment.hosts) else replace_value(cfg, "environment.hosts", number)


def fits_on_nodes(cfg: Config, components: RunComponents, nodes: Sequence[NodeCapacity], cpus: float) -> bool:
    """Whether these nodes have room for the run; `cpus`: of the whole cluster, by which a CPU slot is measured."""
    slots, placement, environment = count_run_slots(cfg, components), cfg.trainer.placement, cfg.environment
    slot = {"CPU": 1.0, "GPU": 1.0}
    if cfg.device != "cuda":
        slot = {"CPU": cpus_per_slot(cpus - environment_host_cpus(cfg, components), slots.total)}
    if slot["CPU"] <= 0:
        return False
    home = slots.total if slots.engines_colocated else slots.policy
    needs = [
        ResourceDemand(count, slot, placement.node_labels)
        for count in (home, slots.reference, slots.critic, slots.reward)
    ]
    if not slots.engines_colocated:
        together = gpus_per_engine(cfg.generator) // placement.nodes_per_engine
        needs.append(ResourceDemand(slots.engines, slot, placement.engine_node_labels, together))
    needs.append(
        ResourceDemand(
            num_environment_hosts(cfg, components), {"CPU": environment.host_cpus, **environment.host_resources}
        )
    )
    return can_place(needs, nodes)
