"""Assembles a run: cluster, slots, actors, client, environments, and the trainer that drives them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from skyrl_train.assembly import memory_plan
from skyrl_train.assembly.algorithm import (
    build_advantage_step,
    build_correction_steps,
    compared_rewards,
    policy_learning,
)
from skyrl_train.assembly.collector import build_collector
from skyrl_train.assembly.elastic import EngineSeats, announce_number, build_watch
from skyrl_train.assembly.engines import build_engines, connect_engine, engine_settings, require_installed, server_urls
from skyrl_train.assembly.environment_hosts import environments_of_run
from skyrl_train.assembly.memory_fit import announce_fit
from skyrl_train.assembly.publisher import build_publisher, build_supervisor, pause_mode, supervised_publish
from skyrl_train.assembly.reward import build_reward_model, scored_rollouts, start_reward_model
from skyrl_train.assembly.services import (
    Services,
    build_batch_dump,
    build_kept_rollouts,
    build_profiles,
    build_state,
    fingerprints_of,
    learner_services,
    schedule_of,
    start_learner,
)
from skyrl_train.assembly.sync_choices import sleep_level
from skyrl_train.cluster.runtime import Cluster
from skyrl_train.config.generator import RateLimitConfig
from skyrl_train.config.schema import Config
from skyrl_train.config.secrets import redact
from skyrl_train.data.chat import render_prompt
from skyrl_train.data.control_tokens import end_of_turn_name, end_of_turn_token
from skyrl_train.data.dataset import PromptDataset
from skyrl_train.data.messages import template_kwargs_of
from skyrl_train.engines.client import EngineClient, Lockstep
from skyrl_train.engines.sampling import normalise, with_stop_token
from skyrl_train.environments.pool import EnvironmentPool
from skyrl_train.errors import SkyRLError
from skyrl_train.learner.reward_worker import RewardModel
from skyrl_train.report.console import rollout_line
from skyrl_train.report.phases import phase, say
from skyrl_train.report.trackers import Trackers
from skyrl_train.rollouts.conversation import ConversationGenerator, EpisodeLimiter, RolloutSettings
from skyrl_train.rollouts.scoring import FirstRollout
from skyrl_train.storage.places import working_folder
from skyrl_train.tasks import gather_all
from skyrl_train.trainer.evaluation import Evaluator
from skyrl_train.trainer.guards import Guards
from skyrl_train.trainer.rollout_metrics import sample_row
from skyrl_train.trainer.trainer import Publish, Residency, StepSchedule, TimeShared, Trainer
from skyrl_train.weight_sync.publish import WeightPublisher

PROBE_SEQUENCES = 4
PROBE_TOKENS = 64
"""Tokens per sequence of the log-prob probe, whose sequences are the beginnings of the first training prompts."""
_CLOSE_S = 10.0
"""Time for engines to clean up at the end of a run."""


@dataclass(frozen=True)
class RunningServices:
    """`Services` with engines, environments and, if configured, a reward model, all of them started."""

    base: Services
    client: EngineClient
    environments: EnvironmentPool
    reward_model: RewardModel | None = None


@asynccontextmanager
async def services(
    cfg: Config,
    cluster: Cluster,
    *,
    train_dataset: PromptDataset | None,
    build_tracker: Callable[[Path], Trackers],
    build_client: Callable[[Sequence[Any]], EngineClient],
) -> AsyncIterator[RunningServices]:
    """Start everything that training needs; without a training set there is no learner (evaluation only)."""
    trainer = cfg.trainer
    local = cfg.generator.run_engines_locally
    if local:
        require_installed(cfg.generator.backend)
    learning, fitted = None, cfg
    if train_dataset is not None:
        learning = policy_learning(cfg)
        fitted = announce_fit(cfg, learning)
        memory_plan.announce(fitted, learning)
    async with AsyncExitStack() as stack:
        base = await stack.enter_async_context(
            learner_services(
                cfg,
                cluster,
                fingerprints=fingerprints_of(trainer, train_dataset.fingerprint) if train_dataset else {},
                schedule=schedule_of(trainer, len(train_dataset)) if train_dataset else None,
                learning=learning,
                fitted=fitted.trainer,
                with_engines=local,
                with_reward=trainer.reward.model.path is not None,
                build_tracker=build_tracker,
            )
        )
        if train_dataset is not None:
            announce_number(cfg, base.directory)
        environments = await stack.enter_async_context(environments_of_run(cfg, cluster, base.directory))
        reward_model = build_reward_model(base)
        # An engine measures free memory when it starts: whatever stays on its accelerator must be there before that.
        with phase("models", "processes of trainer and engines that load them"):
            await start_reward_model(reward_model, trainer.timeouts.engine_start_s)
            if base.layout.time_shared and cfg.device == "cuda":
                # For the same reason the learner loads after the engine sleeps.
                client = build_client(await start_engines(base))
                await client.sleep(sleep_level(cfg))
                await start_learner(base.learner, trainer)
            else:
                started, _ = await gather_all([start_engines(base), start_learner(base.learner, trainer)])
                client = build_client(started)
                if base.layout.time_shared:
                    await client.sleep()
        stack.push_async_callback(_close, client)
        yield RunningServices(base, client, environments, reward_model)


async def _close(client: EngineClient) -> None:
    """Close the connections to engines elsewhere, which keep running, and our own engines, which are killed later."""
    with suppress(SkyRLError, ConnectionError, TimeoutError):
        async with asyncio.timeout(_CLOSE_S):
            await client.close()


async def start_engines(base: Services) -> Sequence[Any]:
    """The run's own engines in their slots, or connections to those that run elsewhere."""
    generator, timeouts, role_slots = engine_settings(base.cfg), base.cfg.trainer.timeouts, base.layout.engines
    if role_slots is not None:
        return await build_engines(base.cluster, generator, timeouts, role_slots, base.cfg.device)
    return await gather_all(connect_engine(url, base.cfg) for url in server_urls(generator))


def build_generator(
    cfg: Config, tokenizer: Any, client: Any, environments: EnvironmentPool, *, evaluation: bool
) -> ConversationGenerator:
    """The generator of rollouts for training or for evaluation.

    In synchronous training the first turns of a step are sent to the engines as one batch, in the order of the data. So
    an engine's batches, and with them the last bits of every number, do not depend on timing. With generator.batched
    the same holds for later turns; without it no conversation waits for another.
    """
    generator = cfg.generator
    sampling_params = normalise(generator.eval_sampling_params if evaluation else generator.sampling_params)
    settings = RolloutSettings(
        sampling_params=with_stop_token(sampling_params, end_of_turn_token(tokenizer, generator.chat_template_kwargs)),
        n_samples_per_prompt=generator.eval_n_samples_per_prompt if evaluation else generator.n_samples_per_prompt,
        seed=cfg.trainer.seed,
        max_input_length=generator.max_input_length,
        rollout_s=cfg.trainer.timeouts.rollout_s,
        chat_template_kwargs=dict(generator.chat_template_kwargs),
        max_turns=generator.max_turns,
        use_conversation_multi_turn=generator.use_conversation_multi_turn,
        append_eos_token_after_stop_str_in_multi_turn=generator.append_eos_token_after_stop_str_in_multi_turn,
        step_wise_trajectories=generator.step_wise_trajectories,
        retokenize_chat_history=generator.retokenize_chat_history,
        namespace="evaluation." if evaluation else "",
    )
    limit = generator.rate_limit
    # Taking the fastest groups requires that groups run independently, and with a rate limit a group that may not begin
    # yet must not hold up the others.
    cuts = generator.over_provisioning > 0 and not evaluation
    independent = cfg.trainer.fully_async.enabled or cuts or limit.enabled
    sampler = client if independent else Lockstep(client)
    return ConversationGenerator(
        sampler,
        environments,
        tokenizer,
        settings,
        later_turns=sampler if generator.batched and generator.max_turns > 1 else client,
        limiter=_limiter_of(client, limit) if limit.enabled else None,
    )


_limiters: WeakKeyDictionary[Any, EpisodeLimiter] = WeakKeyDictionary()
"""Of a run's client: rollouts for training and an evaluation beside them have one limit together."""


def _limiter_of(client: Any, limit: RateLimitConfig) -> EpisodeLimiter:
    return _limiters.setdefault(client, EpisodeLimiter(limit.trajectories_per_second, limit.max_concurrency))


def build_trainer(
    cfg: Config,
    running: RunningServices,
    *,
    tokenizer: Any,
    train_generator: ConversationGenerator,
    eval_generator: ConversationGenerator,
    train_dataset: PromptDataset,
    eval_dataset: PromptDataset | None,
    schedule: StepSchedule | None = None,
) -> Trainer:
    """The trainer that uses these running services; `schedule` is the configuration's if there is no other."""
    base, trainer = running.base, cfg.trainer
    assert base.learner is not None
    first = first_rollout()
    advantage_step = build_advantage_step(trainer.algorithm)
    schedule = schedule_of(trainer, len(train_dataset)) if schedule is None else schedule
    rollouts = scored_rollouts(cfg, train_generator, running.reward_model, first)
    collector = build_collector(cfg, rollouts, train_dataset, schedule)
    end_of_turn = end_of_turn_name(tokenizer, cfg.generator.chat_template_kwargs)
    guards = Guards(trainer.guards, compared_rewards(trainer.algorithm), end_of_turn)
    residency = Residency()
    if base.layout.time_shared:
        residency = TimeShared(running.client, base.learner, sleep_level(cfg))
    probe_ids = [
        render_prompt(
            tokenizer, prompt.messages, template_kwargs_of(prompt.env_extras, cfg.generator.chat_template_kwargs)
        )[:PROBE_TOKENS]
        for prompt in train_dataset.prompts[:PROBE_SEQUENCES]
    ]
    publisher = build_publisher(cfg, base.learner, running.client, probe_ids, one_node=base.layout.one_node)
    publish, release = _publishing(base, running.client, publisher)
    return Trainer(
        schedule=schedule,
        cfg=trainer,
        collector=collector,
        learner=base.learner,
        batch_steps=[advantage_step, *build_correction_steps(trainer.algorithm)],
        publish=publish,
        residency=residency,
        evaluator=build_evaluator(cfg, running, eval_generator, eval_dataset, first) if eval_dataset else None,
        state=build_state(
            base,
            fingerprints_of(trainer, train_dataset.fingerprint),
            {"kl": advantage_step, "collector": collector, "guards": guards},
            tokenizer,
        ),
        trackers=base.trackers,
        guards=guards,
        release=release,
        profiles=build_profiles(base, profiled_engines(cfg, running.client)),
        batch_dump=build_batch_dump(trainer),
        kept_rollouts=build_kept_rollouts(base, tokenizer),
    )


def _publishing(
    base: Services, client: EngineClient, publisher: WeightPublisher
) -> tuple[Publish, Callable[[], Awaitable[None]]]:
    """What syncs the engines, restarts them and changes their number; and what gives that up."""
    assert base.learner is not None
    seats = EngineSeats(base) if base.layout.engines is not None else None
    supervisor = build_supervisor(base, client, publisher, seats)
    wanted = build_watch(base, client, supervisor, seats)
    client.on_close(wanted.end)
    mode = pause_mode(base.cfg, client.engines)
    publish = supervised_publish(
        base.learner, client, publisher, supervisor, mode=mode, time_shared=base.layout.time_shared
    )

    async def release() -> None:
        await wanted.end()
        await client.stop_reviving()

    return wanted.after(publish), release


def first_rollout() -> FirstRollout:
    return FirstRollout(lambda item, seconds: say("first rollout", redact(rollout_line(sample_row(item), seconds))))


def profiled_engines(cfg: Config, client: EngineClient) -> Callable[[], Sequence[Any]]:
    """The engines that profile themselves: those that compute with torch in a process of this run's own."""
    if cfg.generator.backend == "transformers" and cfg.generator.run_engines_locally:
        return lambda: client.engines
    if cfg.trainer.profile_steps:
        say("profile", f"the trainer's ranks alone: engines of {cfg.generator.backend} have profilers of their own")
    return list


def build_evaluator(
    cfg: Config,
    running: RunningServices,
    generator: ConversationGenerator,
    dataset: PromptDataset,
    first: FirstRollout | None = None,
) -> Evaluator:
    """`first`: that of the run's training, if there is one."""
    dump_to = working_folder(cfg.trainer.export_path) / "dumped_evals" if cfg.trainer.dump_eval_results else None
    ahead = cfg.trainer.fully_async.enabled
    return Evaluator(
        scored_rollouts(cfg, generator, running.reward_model, first or first_rollout()),
        dataset.prompts,
        cfg.trainer.eval_batch_size,
        dump_to,
        cfg.trainer.max_failed_fraction,
        after=None if ahead else running.client.begin_anew,  # rollouts for training go on
        one_version=ahead,
    )
