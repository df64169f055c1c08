"""A run whose ranks are started again when one of them was lost, on what is left (trainer.restarts)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

from skyrl_train.config.keys import with_value_at
from skyrl_train.config.predicates import Uses, slots_of
from skyrl_train.config.schema import Config
from skyrl_train.engines.wanted import ENGINES_FILE, changing, read_wanted, stamp, why_fixed
from skyrl_train.errors import ClusterLost, ConfigError, RewardModelLost, Stopped, WorkerDied
from skyrl_train.report.phases import say
from skyrl_train.storage.mirror import LATEST_FILE
from skyrl_train.storage.places import working_folder
from skyrl_train.trainer.checkpoints import keep_locked, unlock

if TYPE_CHECKING:
    from skyrl_train.cluster.runtime import Cluster
    from skyrl_train.learner.learner import Learner

T = TypeVar("T")
_ANSWER_S = 30.0
"""Within this time a rank that lives answers a call that does nothing."""


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
            unasked = _asked(config)
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
            with changing(folder):
                if _asked(config) != unasked:
                    goes_on = as_wanted(goes_on, running)
                # It holds for the attempt that is over: who asks before the next has written its own is told to wait.
                (folder / ENGINES_FILE).unlink(missing_ok=True)
            resumed = resuming(goes_on) if last_commit(config) != found else goes_on
            running = await start_over(resumed, config, cause)
    finally:
        unlock(folder)


def _is_stopping() -> bool:
    """Whether the run was asked to stop, and a rank was lost while it came to that."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def fit_to_what_is_left(goes_on: Config, configured: Config, uses: Uses, cluster: Cluster) -> Config:
    """The like of `goes_on` for what is left of the cluster. Raises NoRoom."""
    from skyrl_train.assembly.fewer_slots import fit_to_nodes

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


def as_wanted(config: Config, running: Config) -> Config:
    """`config`, with as many engines as `running` has been asked for (`skyrl-train engines`) since it began.

    It writes its own number when it begins.
    """
    placement, generator = running.trainer.placement, running.generator
    fixed = why_fixed(colocate_all=placement.colocate_all, run_engines_locally=generator.run_engines_locally)
    with suppress(ConfigError, OSError):
        if fixed is None:
            wanted = read_wanted(working_folder(running.trainer.ckpt_path))
            if wanted != generator.num_inference_engines:
                return with_value_at(config, "generator.num_inference_engines", wanted)
    return config


def _asked(config: Config) -> tuple[int, int] | None:
    """Another value once a run has written, or was asked for, a number of engines."""
    return stamp(working_folder(config.trainer.ckpt_path))


def last_commit(config: Config) -> int | None:
    """When the newest checkpoint in the run's folder was committed (ns), None before there is one.

    What was there before the run began may be what trainer.resume_mode=from_path leaves behind.
    """
    file = working_folder(config.trainer.ckpt_path) / LATEST_FILE
    return file.stat().st_mtime_ns if file.exists() else None


def resuming(config: Config) -> Config:
    """The configuration that goes on from the run's own newest checkpoint."""
    return with_value_at(config, "trainer.resume_mode", "latest")


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
        if not asks or await learner.answers(_ANSWER_S):
            raise
        raise WorkerDied(f"a rank of the trainer does not answer, after {type(error).__name__}: {error}") from error
