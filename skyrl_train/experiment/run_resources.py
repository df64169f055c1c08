"""Starts the resources of a run, in this order.

1. The run's folder, its uploads, logs and trackers.
2. Ray, and the slots of all processes.
3. The learner: ranks of policy, reference and critic.
4. Environments, the reward model, and engines with their client.

`trainer.py` builds the training loop over them. On exit everything is stopped in the reverse order.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import shlex
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from skyrl_train import trace
from skyrl_train.aio import gather_all
from skyrl_train.algorithms.advantages import ComparisonScope
from skyrl_train.cluster.actors import ActorProxy, spawn
from skyrl_train.cluster.capacity import query_accelerator_types
from skyrl_train.cluster.placement import reserve_spread_pool
from skyrl_train.cluster.ray_cluster import Cluster
from skyrl_train.cluster.shared_paths import check_shared_paths
from skyrl_train.config.hydra import CONFIG_FILE, save_resolved, to_dict
from skyrl_train.config.locations import is_uri
from skyrl_train.config.predicates import (
    OffloadMode,
    RunComponents,
    count_run_slots,
    environment_host_cpus,
    offload_mode,
    sleep_level,
)
from skyrl_train.config.problems import Problem, raise_problems
from skyrl_train.config.redaction import redact
from skyrl_train.config.run_folder import run_identity
from skyrl_train.config.schema import Config, TrainerConfig
from skyrl_train.data.dataset import PromptDataset
from skyrl_train.engines.client import EngineClient
from skyrl_train.environments.hosts import HostPool
from skyrl_train.environments.pool import EnvironmentPool, WorkerPool
from skyrl_train.environments.user_registrations import serialize_user_registrations
from skyrl_train.errors import SkyRLError, StorageError
from skyrl_train.experiment import memory_plan
from skyrl_train.experiment.algorithm import ObjectiveSpec, build_policy_objective_spec, comparison_scope
from skyrl_train.experiment.engines import EngineLauncher, init_target_file, require_installed
from skyrl_train.experiment.environments import pool_settings
from skyrl_train.experiment.learner import build_learner, build_reward_model, start_learner
from skyrl_train.experiment.memory_tuning import plan_engine_cache, tune_and_report
from skyrl_train.experiment.placement import RunPlacement, reserve_slots, shared_paths
from skyrl_train.learner.learner import Learner
from skyrl_train.learner.reward_worker import RewardModel
from skyrl_train.report.diagnosis import (
    ENV_TRY,
    NO_DIFFERENCE,
    NO_DIFFERENCE_IN_STEP,
    RULES,
    Rule,
    async_rules,
    gradient_rule,
    memory_rule,
    ratio_rules,
    truncated_rule,
)
from skyrl_train.report.logs import environment_log, run_logs
from skyrl_train.report.progress_log import startup_phase
from skyrl_train.report.trackers import Trackers, make_trackers
from skyrl_train.storage.mirror import Mirror
from skyrl_train.storage.uris import resolve_local_folder
from skyrl_train.trainer.run_folder import RunFolder
from skyrl_train.trainer.trainer import StepSchedule

_CLOSE_TIMEOUT_S = 10.0
"""Seconds for engines to clean up at the end of a run."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunResources:
    """The open resources of every kind of run. All of them are closed when the run ends."""

    cfg: Config
    cluster: Cluster
    fingerprints: Mapping[str, str]
    """Fingerprints of data and order: see data_fingerprints. Empty if nothing is trained."""
    schedule: StepSchedule | None
    folder: Path
    placement: RunPlacement
    learner: Learner | None
    trackers: Trackers
    mirrors: Mirrors
    offload_mode: OffloadMode = OffloadMode.ALL
    """Memory that colocated engines and learner free for each other."""


@dataclass(frozen=True)
class RolloutResources:
    """`RunResources` with engines, environments and, if configured, a reward model, all of them started."""

    base: RunResources
    client: EngineClient
    engine_launcher: EngineLauncher
    environments: EnvironmentPool
    reward_model: RewardModel | None = None


@asynccontextmanager
async def start_rollout_resources(
    cfg: Config,
    cluster: Cluster,
    components: RunComponents,
    *,
    train_dataset: PromptDataset | None,
    build_tracker: Callable[[Path], Trackers],
    build_client: Callable[[Sequence[Any]], EngineClient],
) -> AsyncIterator[RolloutResources]:
    """Start everything that training with rewards or an evaluation needs, and stop it on exit.

    Args:
        cfg: The configuration.
        cluster: The cluster.
        components: The parts of the configuration that the run uses.
        train_dataset: The prompts to train on; None for an evaluation, which has no learner.
        build_tracker: Returns the trackers for the run's folder.
        build_client: Returns the client of the started engines.

    Raises:
        ConfigError: The backend is not installed, the cluster has too few resources, or an engine does not support a
            setting.
        DeadlineExceeded: Models were not loaded within timeouts.engine_start_s.
        StorageError: On exit, if the last uploads failed.
    """
    trainer, generator = cfg.trainer, cfg.generator
    if generator.run_engines_locally:
        require_installed(generator.backend)
    async with AsyncExitStack() as stack:
        base = await stack.enter_async_context(
            start_run_resources(
                cfg,
                cluster,
                components,
                objective_spec=None if train_dataset is None else build_policy_objective_spec(cfg),
                num_prompts=0 if train_dataset is None else len(train_dataset),
                train_data="" if train_dataset is None else train_dataset.fingerprint,
                build_tracker=build_tracker,
            )
        )
        if base.learner is not None:
            init_target_file(cfg, base.folder)
        environments = await stack.enter_async_context(start_environments(cfg, cluster, base.folder))
        cache_limit = plan_engine_cache(cfg) if base.placement.engines_colocated else None
        engine_launcher = EngineLauncher(cfg, cluster, base.placement, cache_limit)
        reward_model = build_reward_model(cluster, trainer, base.placement, device=cfg.device)
        # An engine measures free memory when it starts, so models that stay on its accelerator must be loaded before.
        with startup_phase("models", "trainer and engines load their models"):
            if reward_model is not None:
                await reward_model.setup(trainer.timeouts.engine_start_s)
            if base.placement.engines_colocated and cfg.device == "cuda":
                # For the same reason the learner loads its models when the engines sleep.
                client = build_client(await engine_launcher.start_all())
                await _sleep(client, base.offload_mode, sleep_level(cfg))
                assert base.learner is not None  # colocated engines share their slots with a learner
                await start_learner(base.learner, trainer)
            else:
                learner = [] if base.learner is None else [start_learner(base.learner, trainer)]
                engines, *_ = await gather_all([engine_launcher.start_all(), *learner])
                client = build_client(engines)
                if base.placement.engines_colocated:
                    await _sleep(client, base.offload_mode)
        stack.push_async_callback(_close, client)
        yield RolloutResources(base, client, engine_launcher, environments, reward_model)


async def _sleep(client: EngineClient, mode: OffloadMode, level: int = 1) -> None:
    """Put started engines into the state in which a ColocatedOffloadManager expects them."""
    if mode is not OffloadMode.NONE:
        await client.sleep(level, mode is OffloadMode.KV_CACHE)


@asynccontextmanager
async def start_run_resources(
    cfg: Config,
    cluster: Cluster,
    components: RunComponents,
    *,
    objective_spec: ObjectiveSpec | None,
    num_prompts: int,
    train_data: str,
    build_tracker: Callable[[Path], Trackers],
) -> AsyncIterator[RunResources]:
    """Start the run's folder, trackers, cluster, slots and the learner's processes; close everything on exit.

    `start_learner` loads the learner's models later.

    Args:
        cfg: The configuration. It is saved to the run's folder as it is; the learner gets a copy tuned to memory.
        cluster: The cluster.
        components: The parts of the configuration that the run uses.
        objective_spec: The loss that the learner trains with; None without a learner.
        num_prompts: Number of training prompts or examples.
        train_data: Fingerprint of the training data.
        build_tracker: Returns the trackers for the run's folder.

    Raises:
        ConfigError: trainer.profile_steps names a step beyond the last one, the run's folder belongs to another run, or
            the cluster has too few resources.
        StorageError: On exit, if the last uploads failed.
    """
    trainer, tuned = cfg.trainer, cfg
    fingerprints: dict[str, str] = {}
    schedule = None
    if objective_spec is not None:
        tuned = tune_and_report(cfg, objective_spec)  # for the learner; the run saves `cfg` as it was written
        if components.engines:  # only training with rewards has a memory plan
            memory_plan.print_memory_plan(tuned, objective_spec)
        fingerprints, schedule = data_fingerprints(trainer, train_data), build_schedule(trainer, num_prompts)
        _check_profiled_steps(trainer, schedule)
    async with AsyncExitStack() as stack:
        mirrors = build_mirrors(cfg, run_location(cfg, fingerprints))
        run_folder = await mirrors.enter(stack, build_run_folder(cfg, fingerprints, mirrors))
        await stack.enter_async_context(mirrors.keep_uploading(trainer.timeouts.upload_s))
        stack.enter_context(run_folder.restored_on_mismatch())
        save_resolved(cfg, run_folder.path / CONFIG_FILE)
        logs = stack.enter_context(run_logs(run_folder.path))
        if trainer.trace:
            stack.enter_context(trace.write_trace(run_folder.path / trace.TRACE_FILE))
        with startup_phase("trackers", "opening the files and services that store metrics"):
            trackers = stack.enter_context(build_tracker(run_folder.path))
        stack.enter_context(cluster)
        stack.enter_context(cluster.redirect_actor_logs(logs))
        with startup_phase("slots", "Ray reserves CPU cores or GPUs"):
            placement = reserve_slots(
                cluster,
                count_run_slots(cfg, components),
                trainer.placement,
                cfg.generator,
                device=cfg.device,
                deadline_s=trainer.timeouts.placement_s,
                overlaps_training=trainer.fully_async.enabled,
                reserved_cpus=environment_host_cpus(cfg, components),
            )
            nodes = placement.node_ids
            device, accelerators = ("gpu", query_accelerator_types(nodes)) if placement.has_gpus else ("cpu", [])
            run_folder.record_hardware(device, placement.num_slots, len(nodes), accelerators)
            if not cluster.is_single_node:
                check_shared_paths(shared_paths(cfg, placement), trainer.timeouts.rendezvous_s)
        learner = None
        if schedule is not None and objective_spec is not None:
            learner = build_learner(
                cluster,
                tuned.trainer,
                placement,
                objective_spec=objective_spec,
                schedule=schedule,
                generator=cfg.generator,
                device=cfg.device,
            )
        yield RunResources(
            cfg,
            cluster,
            fingerprints,
            schedule,
            run_folder.path,
            placement,
            learner,
            trackers,
            mirrors,
            offload_mode(tuned),
        )


# -- schedule, folder and uploads


def build_schedule(trainer: TrainerConfig, num_prompts: int) -> StepSchedule:
    """Return the schedule of a run's steps."""
    return StepSchedule(num_prompts, trainer.train_batch_size, trainer.epochs, trainer.max_steps)


def data_fingerprints(trainer: TrainerConfig, train_data: str) -> dict[str, str]:
    """Return fingerprints of everything that decides which prompts a step trains on.

    A run only resumes from a checkpoint with the same fingerprints.
    """
    return {"train_data": train_data, "data_order": f"seed {trainer.seed}, {trainer.train_batch_size} prompts a step"}


def _check_profiled_steps(trainer: TrainerConfig, schedule: StepSchedule) -> None:
    """Raise ConfigError if trainer.profile_steps names a step after the run's last one."""
    allowed, advice = f"steps of this run, 1 to {schedule.total_steps}", "Steps are counted as in metrics.jsonl."
    is_beyond_end = any(step > schedule.total_steps for step in trainer.profile_steps)
    raise_problems([Problem("trainer.profile_steps", trainer.profile_steps, allowed, advice)] if is_beyond_end else [])


@dataclass(frozen=True)
class Mirrors:
    """The mirrors that upload a run's two folders; None for a folder that is not at a URI."""

    run: Mirror | None = None
    exports: Mirror | None = None

    async def enter(self, stack: AsyncExitStack, folder: RunFolder) -> RunFolder:
        """Enter the run's folder in a thread, so that the event loop can handle signals meanwhile.

        Downloads take time, and so does checking whether a process that has claimed the URI is still alive. If the
        caller is cancelled, waits until the folder has been entered, so that `stack` can leave it.

        Args:
            stack: Enters the folder and leaves it later.
            folder: The run's folder.

        Returns:
            The entered folder.
        """
        entering = asyncio.ensure_future(asyncio.to_thread(stack.enter_context, folder))
        try:
            return await asyncio.shield(entering)
        except asyncio.CancelledError:
            if self.run is not None:
                self.run.stop()
            await asyncio.wait([entering])  # `stack` can only leave what has been entered
            raise

    @asynccontextmanager
    async def keep_uploading(self, deadline_s: float) -> AsyncIterator[None]:
        """Upload changes while the body runs, and wait for the last uploads on exit.

        Args:
            deadline_s: Seconds to wait for the last uploads of both mirrors.

        Raises:
            StorageError: Files could not be uploaded within `deadline_s`. Only logged if the body failed.
        """
        mirrors = [mirror for mirror in (self.run, self.exports) if mirror is not None]
        try:
            for mirror in mirrors:
                await asyncio.to_thread(mirror.start)
        except BaseException:
            for mirror in mirrors:
                mirror.stop()
            raise
        failed = True
        try:
            yield
            failed = False
        finally:
            deadline = time.monotonic() + deadline_s
            try:
                for mirror in mirrors:
                    with startup_phase("upload", mirror.describe_upload):
                        await asyncio.to_thread(mirror.finish, max(0.0, deadline - time.monotonic()))
            except StorageError as error:
                if not failed:
                    raise
                _log.error("%s", error)
            except asyncio.CancelledError:
                _log.warning("The run ended before its last uploads. Run the same command again to finish them.")
                raise
            finally:
                for mirror in mirrors:
                    await asyncio.to_thread(mirror.stop)


def run_location(cfg: Config, fingerprints: Mapping[str, str]) -> str:
    """Return the folder or the URI of this run.

    A run that only evaluates has a subfolder, so that its records do not mix with those of a training run.
    """
    return cfg.trainer.ckpt_path if fingerprints else os.path.join(cfg.trainer.ckpt_path, "evaluation")


def build_run_folder(cfg: Config, fingerprints: Mapping[str, str], mirrors: Mirrors = Mirrors()) -> RunFolder:
    """Return the run's folder for trainer.ckpt_path. Nothing is created yet.

    The folder gets this run's identity: settings of the configuration, and fingerprints of the data. A resumed run must
    have the same identity.

    Args:
        cfg: The configuration.
        fingerprints: Fingerprints of the data; empty for a run that only evaluates.
        mirrors: The uploaders of the run's folders that are at URIs.
    """
    path, resuming = resolve_local_folder(run_location(cfg, fingerprints)), cfg.trainer.resume_mode != "none"
    return RunFolder(path, run_identity(cfg) | dict(redact(fingerprints)), resuming, mirrors.run)


def build_mirrors(cfg: Config, location: str) -> Mirrors:
    """Return an uploader for each of the run's two folders that is at a URI.

    Args:
        cfg: The configuration; trainer.export_path is the location of the exports.
        location: Location of the run: a local folder or a URI. For a URI, the uploader copies the local folder there.

    Raises:
        ConfigError: A URI cannot be used.
    """
    exports, keep = cfg.trainer.export_path, cfg.trainer.max_ckpts_to_keep
    run = Mirror(resolve_local_folder(location), location, keep) if is_uri(location) else None
    return Mirrors(run, Mirror(resolve_local_folder(exports), exports, lease_owner=run) if is_uri(exports) else None)


# -- trackers


def build_trackers(cfg: Config, folder: Path, end_of_turn: str = "") -> Trackers:
    """Return the JSONL files in `folder` and the trackers that trainer.logger names.

    Args:
        cfg: The configuration, which trackers receive without secrets.
        folder: The run's folder.
        end_of_turn: Text of the token that ends an answer, for the diagnosis; "" if unknown.

    Raises:
        ConfigError: A tracker is unknown or its package is not installed.
    """
    trainer = cfg.trainer
    names = [trainer.logger] if isinstance(trainer.logger, str) else list(trainer.logger)
    run_info = redact((trainer.project_name, trainer.run_name, to_dict(cfg)))
    return make_trackers(names, folder, *run_info, rules=diagnosis_rules(cfg, end_of_turn))


def diagnosis_rules(cfg: Config, end_of_turn: str = "") -> list[Rule]:
    """Return the diagnosis rules for this run's metrics; `end_of_turn` as in `build_trackers`."""
    scope, max_ratio = comparison_scope(cfg.trainer.algorithm), cfg.trainer.guards.max_ratio
    rules = [gradient_rule(scope == ComparisonScope.GROUP)]
    if scope is not None:
        rules.insert(0, NO_DIFFERENCE if scope == ComparisonScope.GROUP else NO_DIFFERENCE_IN_STEP)
    if max_ratio is not None and "ratio" not in cfg.trainer.guards.stop:  # otherwise the error of the guard says it
        rules += ratio_rules(max_ratio)
    fully_async = cfg.trainer.fully_async
    rules += async_rules(fully_async.max_staleness_steps) if fully_async.enabled else ()
    if (capacity := memory_plan.memory_capacity(cfg.device)) is not None:
        name = "memory/learner_peak_gib" if cfg.device == "cuda" else "memory/learner_peak_rss_gib"
        rules.append(memory_rule(capacity / 2**30, name))
    rules += [truncated_rule(end_of_turn) if rule.name == "truncated" else rule for rule in RULES]
    return [replace(rule, advice=rule.advice.replace(ENV_TRY, f"`{env_try_command(cfg)}`")) for rule in rules]


def env_try_command(cfg: Config) -> str:
    """Return a command line that tries the run's environment on the first row of its data."""
    data = cfg.data.train_data or cfg.data.val_data
    words = ["skyrl-train", "env", "try", cfg.environment.env_class, *(("--data", data[0]) if data else ())]
    return shlex.join([*words, *env_try_overrides(cfg)])


def env_try_overrides(cfg: Config) -> list[str]:
    """Return the arguments with which `skyrl-train env try` finds the run's environments."""
    plugins = cfg.trainer.plugins
    return [f"trainer.plugins=[{','.join(plugins)}]"] if plugins else []


# -- environments and engines


@asynccontextmanager
async def start_environments(cfg: Config, cluster: Cluster, folder: Path) -> AsyncIterator[EnvironmentPool]:
    """Start the processes of environments and stop them on exit.

    Args:
        cfg: The configuration.
        cluster: The cluster, for environment.hosts.
        folder: The run's folder, whose logs get the output of environments.

    Raises:
        ConfigError: The nodes have no room for environment.hosts.
        EnvironmentHostsLost: The hosts did not start.
    """
    log = environment_log(folder.absolute())
    if not cfg.environment.hosts:
        async with WorkerPool(**pool_settings(cfg, log)) as pool:
            yield pool
        return
    hosts = build_host_pool(cfg, cluster, log)
    with startup_phase("environments", f"starting {cfg.environment.hosts} hosts on nodes of the cluster"):
        await hosts.__aenter__()
    try:
        yield hosts
    finally:
        await hosts.__aexit__()


def build_host_pool(cfg: Config, cluster: Cluster, log: Path) -> HostPool:
    """Reserve resources for environment.hosts. The hosts start when the returned pool is entered with `async with`.

    Args:
        cfg: The configuration.
        cluster: The cluster.
        log: The file that workers print to, a path on the host's node.

    Raises:
        ConfigError: The nodes have no room for the hosts within timeouts.placement_s.
    """
    environment, timeouts = cfg.environment, cfg.trainer.timeouts
    pool = reserve_spread_pool(
        cluster,
        count=environment.hosts,
        cpus=environment.host_cpus,
        resources=environment.host_resources,
        deadline_s=timeouts.placement_s,
        key=f"environment.hosts={environment.hosts}",
    )
    settings = pool_settings(cfg, log)
    settings["max_env_workers"] = max(1, min(settings["max_env_workers"], int(2 * environment.host_cpus)))
    settings |= {"module_path": [entry or os.getcwd() for entry in sys.path], "checks": True}

    def start(index: int) -> ActorProxy:
        return spawn(
            cluster,
            "skyrl_train.environments.hosts:EnvironmentHost",
            {**settings, "registrations": serialize_user_registrations()},
            pool=pool,
            index=index,
            name=f"environment host {index}",
            is_async=True,
            deadline_s=math.inf,
            runs_user_code=True,
        )

    return HostPool(environment.hosts, start, environment_hosts_s=timeouts.environment_hosts_s)


async def _close(client: EngineClient) -> None:
    """Close the connections to engines elsewhere, which keep running, and ask the run's own engines to clean up.

    The processes of the latter are killed later.
    """
    with suppress(SkyRLError, ConnectionError, TimeoutError):
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            await client.close()
