"""The services that every kind of run needs: its folder, trackers, cluster, slots and learner."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_train import trace
from skyrl_train.assembly.algorithm import Learning, compared_rewards
from skyrl_train.assembly.capacity import capacity_of
from skyrl_train.assembly.data import template_of
from skyrl_train.assembly.layout import Layout, place
from skyrl_train.assembly.learner import build_learner
from skyrl_train.assembly.shared_paths import shared_paths
from skyrl_train.assembly.storage import NO_MIRRORS, Mirrors, mirrors_of
from skyrl_train.cluster.paths import check_paths
from skyrl_train.cluster.runtime import Cluster
from skyrl_train.config.hydra import CONFIG_FILE, plain, save_resolved
from skyrl_train.config.problems import Problem, raise_all
from skyrl_train.config.run_folder import identity
from skyrl_train.config.schema import Config, TrainerConfig
from skyrl_train.config.secrets import redact
from skyrl_train.data.vocabulary import vocabulary_texts
from skyrl_train.errors import DeadlineExceeded
from skyrl_train.learner.learner import Learner
from skyrl_train.report.diagnosis import (
    NO_DIFFERENCE,
    RULES,
    Rule,
    async_rules,
    gradient_rule,
    memory_rule,
    truncated_rule,
)
from skyrl_train.report.logs import run_logs
from skyrl_train.report.phases import phase
from skyrl_train.report.trackers import Trackers, make_trackers
from skyrl_train.storage.places import working_folder
from skyrl_train.trainer.batch_dump import BatchDump
from skyrl_train.trainer.checkpoints import Checkpoints, RunDirectory
from skyrl_train.trainer.kept_rollouts import SAMPLED_GROUPS, KeptRollouts
from skyrl_train.trainer.run_state import RunState
from skyrl_train.trainer.trainer import StepProfiles, StepSchedule

SAMPLE_GB = 1.0
"""What a run's sample of rollouts takes at most, unless trainer.keep_rollouts_gb says."""


@dataclass(frozen=True)
class Services:
    """The open resources of a run; all of them are closed when it ends."""

    cfg: Config
    cluster: Cluster
    directory: Path
    layout: Layout
    learner: Learner | None
    trackers: Trackers
    mirrors: Mirrors = NO_MIRRORS


def schedule_of(trainer: TrainerConfig, num_prompts: int) -> StepSchedule:
    return StepSchedule(num_prompts, trainer.train_batch_size, trainer.epochs, trainer.max_steps)


def fingerprints_of(trainer: TrainerConfig, train_data: str) -> dict[str, str]:
    """Fingerprints of everything that decides which prompts a step sees; a run resumes only if none has changed."""
    return {"train_data": train_data, "data_order": f"seed {trainer.seed}, {trainer.train_batch_size} prompts a step"}


def build_trackers(cfg: Config, directory: Path, end_of_turn: str = "") -> Trackers:
    """Return the JSONL files in `directory`, and the trackers that trainer.logger names.

    `end_of_turn`: the token that ends an answer, for the diagnosis.
    """
    trainer = cfg.trainer
    names = [trainer.logger] if isinstance(trainer.logger, str) else list(trainer.logger)
    about = redact((trainer.project_name, trainer.run_name, plain(cfg)))
    return make_trackers(names, directory, *about, rules=rules_of(cfg, end_of_turn))


def rules_of(cfg: Config, end_of_turn: str = "") -> list[Rule]:
    """Return the diagnosis rules for this run's metrics; `end_of_turn` as in `build_trackers`."""
    in_groups = compared_rewards(cfg.trainer.algorithm) == "group"
    rules = [*([NO_DIFFERENCE] if in_groups else []), gradient_rule(in_groups)]
    ahead = cfg.trainer.fully_async
    rules += async_rules(ahead.max_staleness_steps) if ahead.enabled else ()
    if (capacity := capacity_of(cfg.device)) is not None:
        name = "memory/learner_peak_gib" if cfg.device == "cuda" else "memory/learner_peak_rss_gib"
        rules.append(memory_rule(capacity / 2**30, name))
    return [*rules, *(truncated_rule(end_of_turn) if rule.name == "truncated" else rule for rule in RULES)]


def run_directory(cfg: Config, fingerprints: Mapping[str, str], mirrors: Mirrors = NO_MIRRORS) -> RunDirectory:
    """The run directory for trainer.ckpt_path, with this run's identity."""
    path, resuming = folder_of(cfg, fingerprints), cfg.trainer.resume_mode != "none"
    return RunDirectory(path, identity(cfg) | dict(redact(fingerprints)), resuming, mirrors.run)


def folder_of(cfg: Config, fingerprints: Mapping[str, str]) -> Path:
    """The folder of this run on this machine.

    An evaluation-only run has a subfolder, so that it does not mix its records with those of a training run.
    """
    return working_folder(cfg.trainer.ckpt_path) / ("" if fingerprints else "evaluation")


@asynccontextmanager
async def learner_services(
    cfg: Config,
    cluster: Cluster,
    *,
    fingerprints: Mapping[str, str],
    schedule: StepSchedule | None,
    learning: Learning | None,
    fitted: TrainerConfig,
    with_engines: bool = False,
    with_reward: bool = False,
    build_tracker: Callable[[Path], Trackers],
) -> AsyncIterator[Services]:
    """Folder, trackers, cluster, slots, and a learner that is not set up yet. On exit everything is closed.

    `fitted`: the trainer's section for the learner, see memory_fit.py; what the run saves is `cfg`, as it was written.
    Raises ConfigError for profiled steps that the schedule does not have.
    """
    trainer = cfg.trainer
    if schedule is not None:
        check_profiled_steps(trainer, schedule)
    async with AsyncExitStack() as stack:
        mirrors = mirrors_of(cfg, folder_of(cfg, fingerprints))
        directory = await mirrors.enter(stack, run_directory(cfg, fingerprints, mirrors))
        await stack.enter_async_context(mirrors.kept(trainer.timeouts.upload_s))
        stack.enter_context(directory.restored_on_mismatch())
        save_resolved(cfg, directory.path / CONFIG_FILE)
        logs = stack.enter_context(run_logs(directory.path))
        if trainer.trace:
            stack.enter_context(trace.to_file(directory.path / trace.TRACE_FILE))
        with phase("trackers", "files and services that keep the run's numbers"):
            trackers = stack.enter_context(build_tracker(directory.path))
        stack.enter_context(cluster)
        stack.enter_context(cluster.logging_to(logs))
        with phase("slots", "cores or accelerators that Ray reserves"):
            roles = {"with_reward": with_reward, "with_engines": with_engines, "with_policy": schedule is not None}
            layout = _placed(cfg, cluster, learning, **roles)
        learner = None
        if schedule is not None and learning is not None:
            learner = build_learner(
                cluster,
                fitted,
                layout,
                learning=learning,
                schedule=schedule,
                generator=cfg.generator,
                device=cfg.device,
            )
        yield Services(cfg, cluster, directory.path, layout, learner, trackers, mirrors)


def _placed(cfg: Config, cluster: Cluster, learning: Learning | None, **roles: bool) -> Layout:
    """The slots of a run, whose nodes see the paths that their processes will use."""
    trainer = cfg.trainer
    layout = place(
        cluster,
        trainer.placement,
        cfg.generator,
        device=cfg.device,
        deadline_s=trainer.timeouts.placement_s,
        with_reference=learning is not None and learning.with_reference,
        with_critic=learning is not None and learning.critic is not None,
        at_once=trainer.fully_async.enabled,
        other_cpus=cfg.environment.hosts * cfg.environment.host_cpus,
        **roles,
    )
    if not cluster.single_machine:
        check_paths(shared_paths(cfg, layout), trainer.timeouts.rendezvous_s)
    return layout


async def start_learner(learner: Learner | None, trainer: TrainerConfig) -> None:
    """Load the learner's models. Raises DeadlineExceeded if that takes more than timeouts.engine_start_s."""
    if learner is None:
        return
    try:
        async with asyncio.timeout(trainer.timeouts.engine_start_s) as deadline:
            await learner.setup()
    except TimeoutError as error:
        if not deadline.expired():
            await learner.explain(error)
            raise
        late = DeadlineExceeded("start of the trainer's ranks", trainer.timeouts.engine_start_s)
        await learner.explain(late)
        raise late from error


def build_state(
    base: Services, fingerprints: Mapping[str, str], controllers: Mapping[str, Any], tokenizer: Any
) -> RunState:
    """Return the checkpoints and exports of a run.

    `tokenizer` has the chat template of the training, unless generator.chat_template_kwargs gives or names another one.
    """
    assert base.learner is not None
    trainer = base.cfg.trainer
    return RunState(
        Checkpoints(base.directory, trainer.max_ckpts_to_keep, base.mirrors.run),
        base.learner,
        working_folder(trainer.export_path),
        resume_mode=trainer.resume_mode,
        resume_path=trainer.resume_path,
        fingerprints=fingerprints,
        controllers=controllers,
        chat_template=template_of(tokenizer, base.cfg.generator.chat_template_kwargs),
        reference_folder=base.directory / "reference.partial" if trainer.update_ref_every_epoch else None,
        async_checkpoint=trainer.async_checkpoint,
        # In the background a rank is asked between two updates.
        deadline_s=trainer.timeouts.checkpoint_s + trainer.timeouts.update_s * trainer.async_checkpoint,
        uploads=base.mirrors.run,
        exports=base.mirrors.exports,
    )


def check_profiled_steps(trainer: TrainerConfig, schedule: StepSchedule) -> None:
    """Raises ConfigError for steps after the run's last one."""
    allowed, advice = f"steps of this run, 1 to {schedule.total_steps}", "They are counted as in metrics.jsonl."
    late = any(step > schedule.total_steps for step in trainer.profile_steps)
    raise_all([Problem("trainer.profile_steps", trainer.profile_steps, allowed, advice)] if late else [])


def build_profiles(base: Services, engines: Callable[[], Sequence[Any]] = list) -> StepProfiles:
    """Profiles of the trainer's ranks, and of `engines` that are asked for when a profiled step begins."""
    learner = base.learner
    assert learner is not None
    steps, folder = base.cfg.trainer.profile_steps, base.directory / "profiles"
    return StepProfiles(steps, folder, lambda: [*learner.workers, *engines()])


def build_batch_dump(trainer: TrainerConfig) -> BatchDump | None:
    return BatchDump(working_folder(trainer.export_path) / "dumped_data") if trainer.dump_data_batch else None


def build_kept_rollouts(base: Services, tokenizer: Any) -> KeptRollouts:
    trainer = base.cfg.trainer
    bound = trainer.keep_rollouts_gb
    if bound is None and trainer.keep_rollouts == "sample":
        bound = SAMPLE_GB
    return KeptRollouts(
        base.directory,
        groups={"all": None, "sample": SAMPLED_GROUPS, "none": 0}[trainer.keep_rollouts],
        most_bytes=None if bound is None else bound * 1e9,
        vocabulary=lambda: vocabulary_texts(tokenizer),
        deleted=None if base.mirrors.run is None else base.mirrors.run.drop,
    )
