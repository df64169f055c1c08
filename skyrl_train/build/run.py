"""A run put together: cluster, slots, actors, client, environments, and the trainer that drives them."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from skyrl_train.build.algorithm import build_advantages, build_objective, needs_reference
from skyrl_train.build.engines import build_engines
from skyrl_train.build.layout import Layout, place
from skyrl_train.build.learner import build_learner
from skyrl_train.cluster.runtime import Cluster
from skyrl_train.collectors.rollout_collector import RolloutCollector
from skyrl_train.config.hydra import plain, save_resolved
from skyrl_train.config.schema import Config, TrainerConfig
from skyrl_train.data.chat import render_prompt
from skyrl_train.data.dataset import PromptDataset, PromptOrder
from skyrl_train.data.sft import Demonstration, demonstration_batch
from skyrl_train.engines.client import EngineClient
from skyrl_train.engines.lockstep import Lockstep
from skyrl_train.engines.sampling import normalise
from skyrl_train.environments.host import EnvironmentHost
from skyrl_train.errors import DeadlineExceeded
from skyrl_train.generators.conversation import ConversationGenerator, RolloutSettings
from skyrl_train.report.trackers import Trackers, make_trackers
from skyrl_train.trainer.checkpoints import Checkpoints
from skyrl_train.trainer.evaluation import Evaluator
from skyrl_train.trainer.residency import AlwaysResident, Residency, TimeShared
from skyrl_train.trainer.run_directory import RunDirectory
from skyrl_train.trainer.run_state import RunState
from skyrl_train.trainer.schedule import StepSchedule
from skyrl_train.trainer.trainer import Intervals, Trainer
from skyrl_train.weight_sync.publish import Probe, WeightPublisher
from skyrl_train.workers.learner import Learner, WorkerGroup
from skyrl_train.workers.learner_worker import Objective

PROBE_SEQUENCES = 4
PROBE_TOKENS = 64
"""Size of the log-prob probe: the beginnings of the first training prompts."""
HALF_PRECISION_PROBE_TOLERANCE = 0.25
"""nats: bfloat16 engines and trainers round differently in every layer."""


@dataclass(frozen=True)
class Services:
    """What a run holds: everything that is closed again when it ends."""

    cfg: Config
    cluster: Cluster
    directory: Path
    layout: Layout
    learner: Learner | None
    trackers: Trackers


@dataclass(frozen=True)
class RunningServices:
    """`Services` with engines and environments, all of them started."""

    base: Services
    client: EngineClient
    environments: EnvironmentHost


def schedule_of(trainer: TrainerConfig, num_prompts: int) -> StepSchedule:
    return StepSchedule(num_prompts, trainer.train_batch_size, trainer.epochs, trainer.max_steps)


def optimizer_steps(trainer: TrainerConfig, schedule: StepSchedule) -> int:
    """Length of the learning-rate schedule."""
    per_step = -(-trainer.train_batch_size // trainer.policy_mini_batch_size) * trainer.update_epochs_per_batch
    return schedule.total_steps * per_step


def build_trackers(cfg: Config, directory: Path) -> Trackers:
    """JSONL files in `directory`, and whatever trainer.logger names."""
    trainer = cfg.trainer
    names = [trainer.logger] if isinstance(trainer.logger, str) else list(trainer.logger)
    return make_trackers(names, directory, trainer.project_name, trainer.run_name, plain(cfg))


def run_directory(cfg: Config, fingerprints: Mapping[str, str]) -> RunDirectory:
    """trainer.ckpt_path, held for this run."""
    trainer = cfg.trainer
    identity = {
        "project_name": trainer.project_name,
        "run_name": trainer.run_name,
        "model": trainer.policy.model.path,
        **fingerprints,
    }
    return RunDirectory(Path(trainer.ckpt_path), identity, resuming=trainer.resume_mode != "none")


@asynccontextmanager
async def learner_services(
    cfg: Config,
    *,
    fingerprints: Mapping[str, str],
    schedule: StepSchedule | None,
    objective: Objective | None,
    with_reference: bool = False,
    with_engines: bool = False,
    get_tracker: Callable[[Path], Trackers],
) -> AsyncIterator[Services]:
    """Folder, trackers, cluster, slots, and a learner that is not yet set up. On exit nothing is left running."""
    trainer = cfg.trainer
    for module in trainer.plugins:
        importlib.import_module(module)
    with ExitStack() as stack:
        directory = stack.enter_context(run_directory(cfg, fingerprints))
        save_resolved(cfg, directory.path / "config.yaml")
        trackers = stack.enter_context(get_tracker(directory.path))
        cluster = stack.enter_context(Cluster(trainer.plugins))
        layout = place(
            cluster,
            trainer.placement,
            cfg.generator,
            device=cfg.device,
            deadline_s=trainer.timeouts.placement_s,
            with_policy=schedule is not None,
            with_reference=with_reference,
            with_engines=with_engines,
        )
        learner = None
        if schedule is not None:
            learner = build_learner(
                cluster,
                trainer,
                layout,
                objective=objective,
                total_steps=optimizer_steps(trainer, schedule),
                device=cfg.device,
                wire_dtype=cfg.generator.model_dtype,
                bucket_bytes=int(cfg.generator.weight_transfer_threshold_cuda_ipc_GB * 2**30),
            )
        yield Services(cfg, cluster, directory.path, layout, learner, trackers)


@asynccontextmanager
async def services(
    cfg: Config,
    *,
    train_dataset: PromptDataset | None,
    get_tracker: Callable[[Path], Trackers],
    get_client: Callable[[Sequence[Any]], EngineClient],
) -> AsyncIterator[RunningServices]:
    """Everything that training needs, started; without a training set there is no learner (evaluation only)."""
    trainer = cfg.trainer
    trains = train_dataset is not None
    async with AsyncExitStack() as stack:
        base = await stack.enter_async_context(
            learner_services(
                cfg,
                fingerprints={"train_data": train_dataset.fingerprint} if train_dataset else {},
                schedule=schedule_of(trainer, len(train_dataset)) if train_dataset else None,
                objective=build_objective(trainer.algorithm) if trains else None,
                with_reference=trains and needs_reference(trainer.algorithm),
                with_engines=True,
                get_tracker=get_tracker,
            )
        )
        environments = await stack.enter_async_context(build_environments(cfg))
        seats = base.layout.engines
        assert seats is not None
        engines = build_engines(base.cluster, cfg.generator, trainer.timeouts, seats, cfg.device)
        if base.layout.time_shared and cfg.device == "cuda":
            # On a shared accelerator an engine measures free memory when it starts: the learner loads after it sleeps.
            client = get_client(await engines)
            await client.sleep()
            await start_learner(base.learner, trainer)
        else:
            started, _ = await asyncio.gather(engines, start_learner(base.learner, trainer))
            client = get_client(started)
            if base.layout.time_shared:
                await client.sleep()
        yield RunningServices(base, client, environments)


async def start_learner(learner: Learner | None, trainer: TrainerConfig) -> None:
    """Load the trained models, within the deadline."""
    if learner is None:
        return
    try:
        async with asyncio.timeout(trainer.timeouts.engine_start_s) as deadline:
            await learner.setup()
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise DeadlineExceeded("start of the trainer's ranks", trainer.timeouts.engine_start_s) from error


def build_environments(cfg: Config) -> EnvironmentHost:
    gym = plain(cfg.environment.skyrl_gym)
    return EnvironmentHost(
        {name: settings for name, settings in gym.items() if isinstance(settings, dict)},
        max_workers=cfg.environment.skyrl_gym.max_env_workers,
        step_deadline_s=cfg.trainer.timeouts.environment_step_s,
        plugins=cfg.trainer.plugins,
    )


def build_generator(
    cfg: Config, tokenizer: Any, client: Any, environments: EnvironmentHost, *, evaluation: bool
) -> ConversationGenerator:
    """Rollouts for training or for evaluation.

    Synchronous single-turn rollouts of a step go to the engines together, in the order of the data: what is in an engine's
    batch, and so the last bits of every number, do not depend on timing. Others are sent as soon as they are ready.
    """
    generator = cfg.generator
    together = generator.batched or (generator.max_turns == 1 and not cfg.trainer.fully_async.enabled)
    settings = RolloutSettings(
        sampling=normalise(generator.eval_sampling_params if evaluation else generator.sampling_params),
        num_samples=generator.eval_n_samples_per_prompt if evaluation else generator.n_samples_per_prompt,
        seed=cfg.trainer.seed,
        max_prompt_tokens=generator.max_input_length,
        deadline_s=cfg.trainer.timeouts.rollout_s,
        chat_template_kwargs=dict(generator.chat_template_kwargs),
    )
    return ConversationGenerator(Lockstep(client) if together else client, environments, tokenizer, settings)


def build_publisher(cfg: Config, learner: Learner, client: EngineClient, probe_ids: Sequence[Sequence[int]]) -> WeightPublisher:
    """Weights to the engines, over NCCL or gloo, with the checks that generator.weight_sync_check names."""
    half = cfg.trainer.bf16 or cfg.generator.model_dtype != "float32"
    probe = Probe(
        token_ids=probe_ids,
        trainer_score=partial(score_sequences, learner, learner.policy),
        **({"tolerance": HALF_PRECISION_PROBE_TOLERANCE} if half else {}),
    )
    return WeightPublisher(
        learner.policy,
        lambda: client.engines,
        route="broadcast",
        deadline_s=cfg.trainer.timeouts.weight_sync_s,
        probe=probe if cfg.generator.weight_sync_check == "probe" else None,
    )


async def score_sequences(
    learner: Learner, group: WorkerGroup, token_ids: Sequence[Sequence[int]]
) -> list[list[float]]:
    """The trainer's log-probs (nats) of every token after its sequence's first, at temperature 1."""
    rows = [Demonstration(list(ids), [False] + [True] * (len(ids) - 1)) for ids in token_ids]
    batch = demonstration_batch(rows)
    values = (await learner.logprobs(group, batch)).tolist()
    offsets = batch.offsets.tolist()
    return [values[start + 1 : stop] for start, stop in zip(offsets, offsets[1:], strict=False)]


def build_trainer(
    cfg: Config,
    running: RunningServices,
    *,
    tokenizer: Any,
    train_generator: ConversationGenerator,
    eval_generator: ConversationGenerator,
    train_dataset: PromptDataset,
    eval_dataset: PromptDataset | None,
) -> Trainer:
    """The trainer over running services."""
    base, trainer = running.base, cfg.trainer
    assert base.learner is not None
    advantages = build_advantages(trainer.algorithm)
    schedule = schedule_of(trainer, len(train_dataset))
    order = PromptOrder(len(train_dataset), trainer.seed)
    residency: Residency = AlwaysResident()
    if base.layout.time_shared:
        residency = TimeShared(running.client, base.learner)
    probe_ids = [
        render_prompt(tokenizer, prompt.messages, dict(cfg.generator.chat_template_kwargs))[:PROBE_TOKENS]
        for prompt in train_dataset.prompts[:PROBE_SEQUENCES]
    ]
    return Trainer(
        schedule=schedule,
        intervals=intervals(trainer, schedule),
        collector=RolloutCollector(
            train_generator.rollout,
            prompt_at=lambda position: train_dataset.prompts[order.index_at(position)],
            prompts_of_step=schedule.prompts_of_step,
            max_staleness=trainer.fully_async.max_staleness_steps if trainer.fully_async.enabled else 0,
            max_failed_fraction=trainer.max_failed_fraction,
        ),
        learner=base.learner,
        advantages=advantages,
        publish=build_publisher(cfg, base.learner, running.client, probe_ids).publish,
        residency=residency,
        evaluator=build_evaluator(cfg, eval_generator, eval_dataset) if eval_dataset else None,
        state=build_state(base, {"train_data": train_dataset.fingerprint}, {"kl": advantages}),
        trackers=base.trackers,
    )


def build_evaluator(cfg: Config, generator: ConversationGenerator, dataset: PromptDataset) -> Evaluator:
    dump_to = Path(cfg.trainer.export_path) / "dumped_evals" if cfg.trainer.dump_eval_results else None
    return Evaluator(generator.rollout, dataset.prompts, cfg.trainer.eval_batch_size, dump_to)


def build_state(base: Services, fingerprints: Mapping[str, str], controllers: Mapping[str, Any]) -> RunState:
    assert base.learner is not None
    trainer = base.cfg.trainer
    return RunState(
        Checkpoints(base.directory, trainer.max_ckpts_to_keep),
        base.learner,
        Path(trainer.export_path),
        resume_mode=trainer.resume_mode,
        resume_path=trainer.resume_path,
        fingerprints=fingerprints,
        controllers=controllers,
    )


def intervals(trainer: TrainerConfig, schedule: StepSchedule) -> Intervals:
    return Intervals(
        evaluate=trainer.eval_interval,
        checkpoint=trainer.ckpt_interval,
        export=trainer.hf_save_interval,
        evaluate_before=trainer.eval_before_train,
        total_steps=schedule.total_steps,
    )
