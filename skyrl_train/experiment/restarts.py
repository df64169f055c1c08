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

from skyrl_train.cluster.placement import cpus_per_slot
from skyrl_train.cluster.room import FreeNode, Need, fits, free_nodes
from skyrl_train.cluster.runtime import Cluster
from skyrl_train.config.keys import with_value_at
from skyrl_train.config.predicates import Uses, cpus_of_hosts, num_hosts, slots_of, slots_per_engine
from skyrl_train.config.schema import Config
from skyrl_train.config.validate import validate
from skyrl_train.engines.target_count import ENGINES_FILE, count_locked, read_target, stamp
from skyrl_train.errors import ClusterLost, ConfigError, NoRoom, RewardModelLost, Stopped, WorkerDied
from skyrl_train.experiment.engines import why_number_is_fixed
from skyrl_train.learner.learner import ANSWER_S, Learner
from skyrl_train.report.phases import say
from skyrl_train.storage.mirror import LATEST_FILE
from skyrl_train.storage.places import working_folder
from skyrl_train.trainer.run_directory import keep_locked, unlock

T = TypeVar("T")
_LOOKS_EVERY_S = 0.5


async def with_restarts(
    attempt: Callable[[], Awaitable[T]],
    config: Config,
    cluster: Cluster,
    start_over: Callable[[Config, Config, str], Awaitable[Config]],
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
    found = last_commit(config)
    cannot = cluster.is_client  # what is left of a cluster is not told behind a Ray client
    folder = working_folder(config.trainer.ckpt_path)
    try:
        while True:
            unchanged = _target_stamp(config)
            try:
                return await attempt()
            except Exception as error:
                spent = restarts == config.trainer.restarts
                died = cluster.death() is not None
                if spent or cannot or _is_stopping() or not _lost_a_rank(error) or died:
                    raise
                cause = f"{type(error).__name__}: {error}"
                keep_locked(folder)
            restarts += 1
            with count_locked(folder):
                if _target_stamp(config) != unchanged:
                    goes_on = with_target_count(goes_on, running)
                # It holds for the attempt that is over: who asks before the next has written its own is told to wait.
                (folder / ENGINES_FILE).unlink(missing_ok=True)
            if last_commit(config) != found:  # there is a newest checkpoint of the run's own
                goes_on = with_value_at(goes_on, "trainer.resume_mode", "latest")
            running = await start_over(goes_on, config, cause)
    finally:
        unlock(folder)


def _is_stopping() -> bool:
    """Whether the run was asked to stop, and a rank was lost while it came to that."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def fit_to_what_is_left(goes_on: Config, configured: Config, uses: Uses, cluster: Cluster) -> Config:
    """The like of `goes_on` for what is left of the cluster. Raises NoRoom."""
    cluster.connect()
    added = goes_on.generator.num_inference_engines - configured.generator.num_inference_engines
    config = await fit_to_nodes(goes_on, uses, cluster, max(0, added))
    before, after = (slots_of(one, uses) for one in (configured, config))
    fewer = "" if after.policy == before.policy else f" ({before.policy} are configured)"
    engines = config.generator.num_inference_engines if after.engines else 0
    missing = configured.generator.num_inference_engines - engines if after.engines else 0
    hosts = config.environment.hosts if config.environment.hosts != configured.environment.hosts else 0
    say(
        "restart",
        f"{after.policy} ranks{fewer}"
        + (f" and {engines} engines" if engines else "")
        + (f" ({missing} fewer than configured)" if missing > 0 else "")
        + (f" and {hosts} hosts of environments ({configured.environment.hosts} are configured)" if hosts else "")
        + f" on the {cluster.nodes} nodes that are left, from the newest checkpoint",
    )
    return config


def with_target_count(config: Config, running: Config) -> Config:
    """Return `config` with the number of engines that `running` was asked for (`skyrl-train engines`) since it began.

    A run writes its own number when it begins.
    """
    with suppress(ConfigError, OSError):
        if why_number_is_fixed(running) is None:
            target = read_target(working_folder(running.trainer.ckpt_path))
            if target != running.generator.num_inference_engines:
                return with_value_at(config, "generator.num_inference_engines", target)
    return config


def _target_stamp(config: Config) -> tuple[int, int] | None:
    """Return a value that changes when a run writes, or is asked for, a number of engines."""
    return stamp(working_folder(config.trainer.ckpt_path))


def last_commit(config: Config) -> int | None:
    """When the newest checkpoint in the run's folder was committed (ns), None before there is one.

    What was there before the run began may be what trainer.resume_mode=from_path leaves behind.
    """
    file = working_folder(config.trainer.ckpt_path) / LATEST_FILE
    return file.stat().st_mtime_ns if file.exists() else None


def _lost_a_rank(error: BaseException | None) -> bool:
    """Or a replica of the reward model, which may also not answer."""
    return any(isinstance(one, WorkerDied | ClusterLost | RewardModelLost) for one in _causes(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


@asynccontextmanager
async def rank_losses(learner: Learner, restarts: int) -> AsyncIterator[None]:
    """Inside, an error that follows from a lost rank is raised as WorkerDied; not asked in a run without restarts.

    An engine to which weights are sent, or a rank in the middle of a collective, may say first that it lost a peer.
    """
    try:
        yield
    except Exception as error:
        asks = restarts and not isinstance(error, Stopped) and not _lost_a_rank(error)
        if not asks or await learner.answers(ANSWER_S):
            raise
        raise WorkerDied(f"a rank of the trainer does not answer, after {type(error).__name__}: {error}") from error


# -- what has room


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
        host = " and a host of environments" if num_hosts(cfg, uses) else ""
        raise NoRoom(
            f"the {cluster.nodes} nodes that are left ({cluster.cpus:g} CPUs, {cluster.gpus:g} GPUs) have no room "
            f"for a rank of the trainer and an engine{host}, or not those with the labels of "
            "trainer.placement.node_labels."
        )
    return found


def candidates(cfg: Config, uses: Uses, has_room: Callable[[Config], bool], added: int = 0) -> Iterator[Config]:
    """The like of `cfg` with fewer and fewer slots; only what has room and would be accepted as a configuration."""
    slots, hosts = slots_of(cfg, uses), num_hosts(cfg, uses)
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


def _with_hosts(cfg: Config, number: int) -> Config:
    return cfg if number in (0, cfg.environment.hosts) else with_value_at(cfg, "environment.hosts", number)


def has_room(cfg: Config, uses: Uses, nodes: Sequence[FreeNode], cpus: float) -> bool:
    """Whether these nodes have room for the run; `cpus`: of the whole cluster, by which a CPU slot is measured."""
    slots, placement, environment = slots_of(cfg, uses), cfg.trainer.placement, cfg.environment
    slot = {"CPU": 1.0, "GPU": 1.0}
    if cfg.device != "cuda":
        slot = {"CPU": cpus_per_slot(cpus - cpus_of_hosts(cfg, uses), slots.total)}
    if slot["CPU"] <= 0:
        return False
    home = slots.total if slots.time_shared else slots.policy
    needs = [Need(count, slot, placement.node_labels) for count in (home, slots.reference, slots.critic, slots.reward)]
    if not slots.time_shared:
        together = slots_per_engine(cfg.generator) // placement.nodes_per_engine
        needs.append(Need(slots.engines, slot, placement.engine_node_labels, together))
    needs.append(Need(num_hosts(cfg, uses), {"CPU": environment.host_cpus, **environment.host_resources}))
    return fits(needs, nodes)
