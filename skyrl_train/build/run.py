"""A run put together: cluster, slots, actors, client, environments, and the trainer that drives them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from skyrl_train.build.algorithm import build_advantages, build_objective, needs_reference
from skyrl_train.build.engines import build_engines
from skyrl_train.build.services import (
    Services,
    build_state,
    fingerprints_of,
    intervals,
    learner_services,
    schedule_of,
    start_learner,
)
from skyrl_train.collectors.rollout_collector import RolloutCollector
from skyrl_train.config.hydra import plain
from skyrl_train.config.schema import Config
from skyrl_train.data.chat import render_prompt
from skyrl_train.data.dataset import PromptDataset
from skyrl_train.data.order import PromptOrder
from skyrl_train.data.sft import Demonstration, demonstration_batch
from skyrl_train.engines.client import EngineClient
from skyrl_train.engines.lockstep import Lockstep
from skyrl_train.engines.sampling import normalise
from skyrl_train.environments.host import EnvironmentHost
from skyrl_train.generators.conversation import ConversationGenerator, RolloutSettings
from skyrl_train.report.trackers import Trackers
from skyrl_train.trainer.evaluation import Evaluator
from skyrl_train.trainer.residency import AlwaysResident, Residency, TimeShared
from skyrl_train.trainer.trainer import Trainer
from skyrl_train.weight_sync.publish import Probe, WeightPublisher
from skyrl_train.workers.learner import Learner, WorkerGroup

PROBE_SEQUENCES = 4
PROBE_TOKENS = 64
"""Size of the log-prob probe: the beginnings of the first training prompts."""
HALF_PRECISION_PROBE_TOLERANCE = 0.25
"""nats: bfloat16 engines and trainers round differently in every layer."""


@dataclass(frozen=True)
class RunningServices:
    """`Services` with engines and environments, all of them started."""

    base: Services
    client: EngineClient
    environments: EnvironmentHost


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
                fingerprints=fingerprints_of(trainer, train_dataset.fingerprint) if train_dataset else {},
                schedule=schedule_of(trainer, len(train_dataset)) if train_dataset else None,
                objective=build_objective(cfg) if trains else None,
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


def build_environments(cfg: Config) -> EnvironmentHost:
    gym = plain(cfg.environment.skyrl_gym)
    return EnvironmentHost(
        {name: settings for name, settings in gym.items() if isinstance(settings, dict)},
        max_workers=cfg.environment.skyrl_gym.max_env_workers,
        step_deadline_s=cfg.trainer.timeouts.environment_step_s,
        plugins=tuple(cfg.trainer.plugins),
    )


def build_generator(
    cfg: Config, tokenizer: Any, client: Any, environments: EnvironmentHost, *, evaluation: bool
) -> ConversationGenerator:
    """Rollouts for training or for evaluation.

    In synchronous training the rollouts of a step go to the engines together, in the order of the data: what is in an
    engine's batch, and so the last bits of every number, does not depend on timing.
    """
    generator = cfg.generator
    settings = RolloutSettings(
        sampling=normalise(generator.eval_sampling_params if evaluation else generator.sampling_params),
        num_samples=generator.eval_n_samples_per_prompt if evaluation else generator.n_samples_per_prompt,
        seed=cfg.trainer.seed,
        max_prompt_tokens=generator.max_input_length,
        deadline_s=cfg.trainer.timeouts.rollout_s,
        chat_template_kwargs=dict(generator.chat_template_kwargs),
    )
    sampler = client if cfg.trainer.fully_async.enabled else Lockstep(client)
    return ConversationGenerator(sampler, environments, tokenizer, settings)


def build_publisher(
    cfg: Config, learner: Learner, client: EngineClient, probe_ids: Sequence[Sequence[int]]
) -> WeightPublisher:
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
    return [values[start + 1 : stop] for start, stop in pairwise(offsets)]


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
            prompt_at=lambda position: train_dataset.prompts[order.row(position)],
            prompts_of_step=schedule.prompts_of_step,
            max_staleness=trainer.fully_async.max_staleness_steps if trainer.fully_async.enabled else 0,
            max_failed_fraction=trainer.max_failed_fraction,
        ),
        learner=base.learner,
        advantages=advantages,
        publish=build_publisher(cfg, base.learner, running.client, probe_ids).publish,
        residency=residency,
        evaluator=build_evaluator(cfg, eval_generator, eval_dataset) if eval_dataset else None,
        state=build_state(base, fingerprints_of(trainer, train_dataset.fingerprint), {"kl": advantages}),
        trackers=base.trackers,
    )


def build_evaluator(cfg: Config, generator: ConversationGenerator, dataset: PromptDataset) -> Evaluator:
    dump_to = Path(cfg.trainer.export_path) / "dumped_evals" if cfg.trainer.dump_eval_results else None
    return Evaluator(
        generator.rollout, dataset.prompts, cfg.trainer.eval_batch_size, dump_to, cfg.trainer.max_failed_fraction
    )
