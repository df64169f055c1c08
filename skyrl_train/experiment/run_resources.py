"""What a run starts, in this order.

1. Its folder, with the uploads of it, its logs and its trackers.
2. Ray, and the slots of all processes.
3. The learner: ranks of policy, reference and critic.
4. Environments, the reward model, and engines with the client in front of them.

`trainer.py` makes the loop over all of it. On exit everything is stopped in the reverse order.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_train import trace
from skyrl_train.aio import gather_all
from skyrl_train.cluster.actors import ActorProxy, spawn
from skyrl_train.cluster.placement import reserve_spread_pool
from skyrl_train.cluster.ray_cluster import Cluster
from skyrl_train.cluster.shared_paths import check_shared_paths
from skyrl_train.config.hydra import CONFIG_FILE, save_resolved, to_dict
from skyrl_train.config.locations import is_uri
from skyrl_train.config.predicates import RunComponents, count_run_slots, environment_host_cpus, sleep_level
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
from skyrl_train.experiment.memory_tuning import tune_and_report
from skyrl_train.experiment.placement import RunPlacement, reserve_slots, shared_paths
from skyrl_train.learner.learner import Learner
from skyrl_train.learner.reward_worker import RewardModel
from skyrl_train.report.diagnosis import (
    NO_DIFFERENCE,
    RULES,
    Rule,
    async_rules,
    gradient_rule,
    memory_rule,
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
"""Time for engines to clean up at the end of a run."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunResources:
    """The open resources of every kind of run; all of them are closed when it ends."""

    cfg: Config
    cluster: Cluster
    fingerprints: Mapping[str, str]
    """See fingerprints_of; empty where nothing is trained."""
    schedule: StepSchedule | None
    folder: Path
    placement: RunPlacement
    learner: Learner | None
    trackers: Trackers
    mirrors: Mirrors


@dataclass(frozen=True)
class RolloutResources:
    """`Services` with engines, environments and, if configured, a reward model, all of them started."""

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
    """Start everything that training with rewards needs.

    Without a training set there is no learner: that is an evaluation.
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
        engine_slots = EngineLauncher(cfg, cluster, base.placement)
        reward_model = build_reward_model(cluster, trainer, base.placement, device=cfg.device)
        # An engine measures free memory when it starts: whatever stays on its accelerator must be there before that.
        with startup_phase("models", "processes of trainer and engines that load them"):
            if reward_model is not None:
                await reward_model.setup(trainer.timeouts.engine_start_s)
            if base.placement.engines_colocated and cfg.device == "cuda":
                # For the same reason the learner loads after the engine sleeps.
                client = build_client(await engine_slots.start_all())
                await client.sleep(sleep_level(cfg))
                assert base.learner is not None  # it is what engines share time with
                await start_learner(base.learner, trainer)
            else:
                learner = [] if base.learner is None else [start_learner(base.learner, trainer)]
                engines, *_ = await gather_all([engine_slots.start_all(), *learner])
                client = build_client(engines)
                if base.placement.engines_colocated:
                    await client.sleep()
        stack.push_async_callback(_close, client)
        yield RolloutResources(base, client, engine_slots, environments, reward_model)


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
    """Folder, trackers, cluster, slots, and a learner that is not set up yet. On exit everything is closed.

    Args:
        objective_spec: What the learner trains with; None if there is none.
        num_prompts: The size of the training data.
        train_data: Their fingerprint.

    Raises:
        ConfigError: A step is to be profiled that the run does not have.
    """
    trainer, fitted = cfg.trainer, cfg
    fingerprints: dict[str, str] = {}
    schedule = None
    if objective_spec is not None:
        fitted = tune_and_report(cfg, objective_spec)  # for the learner; what the run saves is `cfg`, as it was written
        if components.engines:  # the plan is that of training with rewards
            memory_plan.print_memory_plan(fitted, objective_spec)
        fingerprints, schedule = data_fingerprints(trainer, train_data), build_schedule(trainer, num_prompts)
        _check_profiled_steps(trainer, schedule)
    async with AsyncExitStack() as stack:
        mirrors = build_mirrors(cfg, run_location(cfg, fingerprints))
        directory = await mirrors.enter(stack, build_run_folder(cfg, fingerprints, mirrors))
        await stack.enter_async_context(mirrors.keep_uploading(trainer.timeouts.upload_s))
        stack.enter_context(directory.restored_on_mismatch())
        save_resolved(cfg, directory.path / CONFIG_FILE)
        logs = stack.enter_context(run_logs(directory.path))
        if trainer.trace:
            stack.enter_context(trace.write_trace(directory.path / trace.TRACE_FILE))
        with startup_phase("trackers", "files and services that keep the run's numbers"):
            trackers = stack.enter_context(build_tracker(directory.path))
        stack.enter_context(cluster)
        stack.enter_context(cluster.redirect_actor_logs(logs))
        with startup_phase("slots", "cores or accelerators that Ray reserves"):
            layout = reserve_slots(
                cluster,
                count_run_slots(cfg, components),
                trainer.placement,
                cfg.generator,
                device=cfg.device,
                deadline_s=trainer.timeouts.placement_s,
                overlaps_training=trainer.fully_async.enabled,
                reserved_cpus=environment_host_cpus(cfg, components),
            )
            if not cluster.is_single_node:
                check_shared_paths(shared_paths(cfg, layout), trainer.timeouts.rendezvous_s)
        learner = None
        if schedule is not None and objective_spec is not None:
            learner = build_learner(
                cluster,
                fitted.trainer,
                layout,
                objective_spec=objective_spec,
                schedule=schedule,
                generator=cfg.generator,
                device=cfg.device,
            )
        yield RunResources(cfg, cluster, fingerprints, schedule, directory.path, layout, learner, trackers, mirrors)


# -- schedule, folder and uploads


def build_schedule(trainer: TrainerConfig, num_prompts: int) -> StepSchedule:
    return StepSchedule(num_prompts, trainer.train_batch_size, trainer.epochs, trainer.max_steps)


def data_fingerprints(trainer: TrainerConfig, train_data: str) -> dict[str, str]:
    """Fingerprints of everything that decides which prompts a step sees; a run resumes only if none has changed."""
    return {"train_data": train_data, "data_order": f"seed {trainer.seed}, {trainer.train_batch_size} prompts a step"}


def _check_profiled_steps(trainer: TrainerConfig, schedule: StepSchedule) -> None:
    """Raises ConfigError for steps after the run's last one."""
    allowed, advice = f"steps of this run, 1 to {schedule.total_steps}", "They are counted as in metrics.jsonl."
    late = any(step > schedule.total_steps for step in trainer.profile_steps)
    raise_problems([Problem("trainer.profile_steps", trainer.profile_steps, allowed, advice)] if late else [])


@dataclass(frozen=True)
class Mirrors:
    """The mirrors of a run's two folders, for those that are at addresses."""

    run: Mirror | None = None
    exports: Mirror | None = None

    async def enter(self, stack: AsyncExitStack, folder: RunFolder) -> RunFolder:
        """Enter the run's folder beside the event loop, which hears signals meanwhile.

        Whether a process that has claimed the address still lives takes a while to see, and so do downloads.
        """
        entering = asyncio.ensure_future(asyncio.to_thread(stack.enter_context, folder))
        try:
            return await asyncio.shield(entering)
        except asyncio.CancelledError:
            if self.run is not None:
                self.run.stop()
            await asyncio.wait([entering])  # what it has entered, `stack` leaves
            raise

    @asynccontextmanager
    async def keep_uploading(self, deadline_s: float) -> AsyncIterator[None]:
        """Inside, they are kept up to date; on exit the last uploads are waited for.

        Raises StorageError for what could not be uploaded within `deadline_s`, unless something else went wrong before.
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
                _log.warning("The last uploads were not waited for: the same command finishes them.")
                raise
            finally:
                for mirror in mirrors:
                    await asyncio.to_thread(mirror.stop)


def run_location(cfg: Config, fingerprints: Mapping[str, str]) -> str:
    """Return the folder or the address of this run.

    An evaluation-only run has a subfolder, so that it does not mix its records with those of a training run.
    """
    return cfg.trainer.ckpt_path if fingerprints else os.path.join(cfg.trainer.ckpt_path, "evaluation")


def build_run_folder(cfg: Config, fingerprints: Mapping[str, str], mirrors: Mirrors = Mirrors()) -> RunFolder:
    """Return the run directory for trainer.ckpt_path, with this run's identity."""
    path, resuming = resolve_local_folder(run_location(cfg, fingerprints)), cfg.trainer.resume_mode != "none"
    return RunFolder(path, run_identity(cfg) | dict(redact(fingerprints)), resuming, mirrors.run)


def build_mirrors(cfg: Config, location: str) -> Mirrors:
    """Return the mirrors of a run at `place`."""
    exports, keep = cfg.trainer.export_path, cfg.trainer.max_ckpts_to_keep
    run = Mirror(resolve_local_folder(location), location, keep) if is_uri(location) else None
    return Mirrors(run, Mirror(resolve_local_folder(exports), exports, lease_owner=run) if is_uri(exports) else None)


# -- trackers


def build_trackers(cfg: Config, folder: Path, end_of_turn: str = "") -> Trackers:
    """Return the JSONL files in `directory`, and the trackers that trainer.logger names.

    `end_of_turn`: the token that ends an answer, for the diagnosis.
    """
    trainer = cfg.trainer
    names = [trainer.logger] if isinstance(trainer.logger, str) else list(trainer.logger)
    about = redact((trainer.project_name, trainer.run_name, to_dict(cfg)))
    return make_trackers(names, folder, *about, rules=diagnosis_rules(cfg, end_of_turn))


def diagnosis_rules(cfg: Config, end_of_turn: str = "") -> list[Rule]:
    """Return the diagnosis rules for this run's metrics; `end_of_turn` as in `build_trackers`."""
    in_groups = comparison_scope(cfg.trainer.algorithm) == "group"
    rules = [*([NO_DIFFERENCE] if in_groups else []), gradient_rule(in_groups)]
    ahead = cfg.trainer.fully_async
    rules += async_rules(ahead.max_staleness_steps) if ahead.enabled else ()
    if (capacity := memory_plan.memory_capacity(cfg.device)) is not None:
        name = "memory/learner_peak_gib" if cfg.device == "cuda" else "memory/learner_peak_rss_gib"
        rules.append(memory_rule(capacity / 2**30, name))
    return [*rules, *(truncated_rule(end_of_turn) if rule.name == "truncated" else rule for rule in RULES)]


# -- environments and engines


@asynccontextmanager
async def start_environments(cfg: Config, cluster: Cluster, folder: Path) -> AsyncIterator[EnvironmentPool]:
    """Inside, environments run. `directory`: the run's folder.

    Raises ConfigError for hosts that find no room, and EnvironmentHostsLost for those that do not start.
    """
    log = environment_log(folder.absolute())
    if not cfg.environment.hosts:
        async with WorkerPool(**pool_settings(cfg, log)) as pool:
            yield pool
        return
    hosts = build_host_pool(cfg, cluster, log)
    with startup_phase("environments", f"{cfg.environment.hosts} hosts on nodes of the cluster"):
        await hosts.__aenter__()
    try:
        yield hosts
    finally:
        await hosts.close()


def build_host_pool(cfg: Config, cluster: Cluster, log: Path) -> HostPool:
    """Reserve room for environment.hosts; they start with the `async with` of what is returned."""
    environment, timeouts = cfg.environment, cfg.trainer.timeouts
    slots = reserve_spread_pool(
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
            pool=slots,
            index=index,
            name=f"environment host {index}",
            is_async=True,
            deadline_s=math.inf,
            runs_user_code=True,
        )

    return HostPool(environment.hosts, start, environment_hosts_s=timeouts.environment_hosts_s)


async def _close(client: EngineClient) -> None:
    """Close the connections to engines elsewhere, which keep running, and our own engines, which are killed later."""
    with suppress(SkyRLError, ConnectionError, TimeoutError):
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            await client.close()
