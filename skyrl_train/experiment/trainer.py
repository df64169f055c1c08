"""Builds the training loop over the started resources: rollouts, evaluation, weight syncs and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from skyrl_train.agents.generator import AgentGenerator, EnvironmentDispatcher, Generator
from skyrl_train.agents.runner import AgentRunner
from skyrl_train.agents.server import SessionServer
from skyrl_train.agents.session import SessionSettings
from skyrl_train.config.predicates import max_staleness_steps, runs_groups_independently, sleep_level
from skyrl_train.config.redaction import redact
from skyrl_train.config.schema import Config, DataConfig, TrainerConfig
from skyrl_train.data.batch import SFTExample
from skyrl_train.data.control_tokens import find_end_of_turn_name, find_end_of_turn_token
from skyrl_train.data.dataset import PromptDataset, PromptOrder
from skyrl_train.data.token_texts import get_vocabulary_texts
from skyrl_train.engines.client import BatchedEngineClient, EngineClient
from skyrl_train.engines.sampling_params import parse_sampling_params, with_stop_token
from skyrl_train.environments.pool import EnvironmentPool
from skyrl_train.environments.tasks.agent import NAME as AGENT
from skyrl_train.experiment.algorithm import build_advantage_step, build_correction_steps, comparison_scope
from skyrl_train.experiment.data import chat_template_text
from skyrl_train.experiment.engines import engine_count_fixed_reason
from skyrl_train.experiment.environments import coroutine_workers, environment_settings
from skyrl_train.experiment.publisher import build_publisher
from skyrl_train.experiment.run_resources import RolloutResources, RunResources, env_try_overrides
from skyrl_train.learner.reward_worker import RewardModel
from skyrl_train.report.console import rollout_line
from skyrl_train.report.progress_log import print_status
from skyrl_train.rollouts.collector import (
    Curriculum,
    DynamicSampling,
    GroupFilterSettings,
    RewardShaping,
    Rollout,
    RolloutCollector,
)
from skyrl_train.rollouts.conversation import ConversationGenerator, EpisodeLimiter, RolloutSettings
from skyrl_train.rollouts.scoring import FirstRolloutLogger, RewardModelScorer
from skyrl_train.storage.uris import resolve_local_folder
from skyrl_train.trainer.batch_dump import BatchDump
from skyrl_train.trainer.checkpoint_manager import CheckpointManager
from skyrl_train.trainer.checkpoints import CheckpointStore
from skyrl_train.trainer.engine_scaler import EngineScaler
from skyrl_train.trainer.evaluation import Evaluator
from skyrl_train.trainer.guards import Guards
from skyrl_train.trainer.offload_manager import ColocatedOffloadManager, OffloadManager
from skyrl_train.trainer.rollout_metrics import sample_row
from skyrl_train.trainer.rollout_writer import SAMPLED_GROUPS, RolloutWriter
from skyrl_train.trainer.trainer import (
    SFTTrainer,
    StepProfiler,
    StepSchedule,
    Trainer,
)

DEFAULT_SAMPLE_GB = 1.0
"""Maximum size of a run's sample of rollouts if trainer.keep_rollouts_gb is not set."""


def build_trainer(
    cfg: Config,
    running: RolloutResources,
    *,
    tokenizer: Any,
    train_generator: Generator,
    eval_generator: Generator,
    train_dataset: PromptDataset,
    eval_dataset: PromptDataset | None,
    schedule: StepSchedule | None = None,
) -> Trainer:
    """Return the trainer that uses these started resources.

    Args:
        cfg: The configuration.
        running: The started resources, with a learner.
        tokenizer: The policy's tokenizer.
        train_generator: Turns training prompts into groups of trajectories.
        eval_generator: Turns evaluation prompts into groups of trajectories.
        train_dataset: The prompts to train on.
        eval_dataset: The prompts to evaluate on; None for no evaluation.
        schedule: The schedule of steps; None for the configured one.

    Raises:
        ConfigError: An engine does not support the configured weight syncs.
    """
    base, trainer = running.base, cfg.trainer
    schedule = schedule or base.schedule
    assert base.learner is not None and schedule is not None
    first_rollout_logger = build_first_rollout_logger()
    advantage_step = build_advantage_step(trainer.algorithm)
    rollouts = build_reward_model_scorer(cfg, train_generator, running.reward_model, first_rollout_logger)
    collector = build_collector(cfg, rollouts, train_dataset, schedule)
    end_of_turn = find_end_of_turn_name(tokenizer, cfg.generator.chat_template_kwargs)
    guards = Guards(trainer.guards, comparison_scope(trainer.algorithm), end_of_turn)
    offload_manager = OffloadManager()
    if base.placement.engines_colocated:
        offload_manager = ColocatedOffloadManager(running.client, base.learner, base.offload_mode, sleep_level(cfg))
    publisher = build_publisher(running, tokenizer, train_dataset, offload_manager)
    scaler = EngineScaler(
        running.client,
        publisher,
        start=running.engine_launcher.start,
        stop=running.engine_launcher.stop,
        folder=base.folder,
        drain_s=trainer.timeouts.drain_s,
        fixed_reason=engine_count_fixed_reason(cfg),
    )
    return Trainer(
        schedule=schedule,
        cfg=trainer,
        collector=collector,
        learner=base.learner,
        batch_transforms=[advantage_step, *build_correction_steps(trainer.algorithm)],
        publisher=publisher,
        scaler=scaler,
        offload_manager=offload_manager,
        evaluator=build_evaluator(cfg, running, eval_generator, eval_dataset, first_rollout_logger)
        if eval_dataset
        else None,
        checkpoint_manager=build_checkpoint_manager(
            base, {"kl": advantage_step, "collector": collector, "guards": guards}, tokenizer
        ),
        trackers=base.trackers,
        guards=guards,
        step_profiler=build_profiles(base, running.client),
        batch_dump=build_batch_dump(trainer),
        rollout_writer=build_rollout_writer(base, tokenizer),
    )


def build_sft_trainer(base: RunResources, *, tokenizer: Any, sft_examples: Sequence[SFTExample]) -> SFTTrainer:
    """Return the trainer for supervised fine-tuning.

    Args:
        base: The started resources, with a learner.
        tokenizer: The policy's tokenizer.
        sft_examples: The examples to train on, in order of the data.
    """
    trainer, schedule = base.cfg.trainer, base.schedule
    assert base.learner is not None and schedule is not None
    return SFTTrainer(
        sft_examples=sft_examples,
        index_at=PromptOrder(len(sft_examples), trainer.seed).row,
        schedule=schedule,
        cfg=trainer,
        learner=base.learner,
        checkpoint_manager=build_checkpoint_manager(base, {}, tokenizer),
        trackers=base.trackers,
        guards=Guards(trainer.guards, None),
        batch_dump=build_batch_dump(trainer),
        step_profiler=build_profiles(base),
    )


# -- rollouts


def build_generator(
    cfg: Config, tokenizer: Any, client: Any, environments: EnvironmentPool, *, evaluation: bool
) -> Generator:
    """Return the generator of rollouts for training or for evaluation.

    If the agent environment is configured, its rows go to an `AgentGenerator` and all others to a
    `ConversationGenerator`.

    In synchronous training the first turns of a step are sent to the engines as one batch, in the order of the data. So
    an engine's batches, and with them the last bits of every number, do not depend on timing. With generator.batched
    the same holds for later turns; without it no conversation waits for another.

    Args:
        cfg: The configuration.
        tokenizer: The policy's tokenizer.
        client: The client of the engines. All generators of a client share one rate limit.
        environments: The pool of environment processes.
        evaluation: True for the rollouts of evaluations, False for those of training.
    """
    generator = cfg.generator
    sampling_params = parse_sampling_params(generator.eval_sampling_params if evaluation else generator.sampling_params)
    settings = RolloutSettings(
        sampling_params=with_stop_token(
            sampling_params, find_end_of_turn_token(tokenizer, generator.chat_template_kwargs)
        ),
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
        n_samples_by_data_source=generator.eval_n_samples_by_data_source if evaluation else {},
    )
    limiter = _limiter(cfg, client)
    sampler = client if runs_groups_independently(cfg, evaluation=evaluation) else BatchedEngineClient(client)
    conversations = ConversationGenerator(
        sampler,
        environments,
        tokenizer,
        settings,
        later_turn_client=sampler if generator.batched and generator.max_turns > 1 else client,
        limiter=limiter,
    )
    agent = cfg.environment.skyrl_gym.agent
    if not agent.command and not agent.run:
        return conversations
    sessions = SessionSettings(
        sampling_params=settings.sampling_params,
        seed=settings.seed,
        max_input_length=settings.max_input_length,
        rollout_s=settings.rollout_s,
        max_calls=agent.max_calls,
        max_sampled_tokens=agent.max_tokens,
        chat_template_kwargs=settings.chat_template_kwargs,
    )
    agents = AgentGenerator(
        _agent_runner(cfg, tokenizer, client, environments),
        sessions,
        client=client,
        num_samples=settings.num_samples,
        limiter=limiter,
    )
    return EnvironmentDispatcher(conversations, {AGENT: agents})


_limiters: WeakKeyDictionary[Any, EpisodeLimiter] = WeakKeyDictionary()
"""Rate limiter of each client: training rollouts and a concurrent evaluation share one limit."""
_agent_runners: WeakKeyDictionary[Any, AgentRunner] = WeakKeyDictionary()
"""Runner of agents of each client, which training rollouts and a concurrent evaluation share."""


def _limiter(cfg: Config, client: Any) -> EpisodeLimiter | None:
    limit = cfg.generator.rate_limit
    if not limit.enabled:
        return None
    return _limiters.setdefault(client, EpisodeLimiter(limit.trajectories_per_second, limit.max_concurrency))


def _agent_runner(cfg: Config, tokenizer: Any, client: Any, environments: EnvironmentPool) -> AgentRunner:
    """Return the runner of a client's agents, which is closed before the environments are."""
    runner = _agent_runners.get(client)
    if runner is None:
        settings, model = environment_settings(cfg)[AGENT], cfg.generator.served_model_name or cfg.generator.model_name
        server = SessionServer(
            client,
            tokenizer,
            model_name=model,
            host=settings["host"],
            port=settings["port"],
            public_url=settings["public_url"],
        )
        runner = _agent_runners[client] = AgentRunner(
            settings,
            server,
            model_name=model,
            environments=environments,
            max_workers=coroutine_workers(cfg),
            plugins=tuple(cfg.trainer.plugins),
            log_file=environments.log_file,
        )
        environments.dependents.push_async_callback(_close_agent_runner, client)
    return runner


async def _close_agent_runner(client: Any) -> None:
    await _agent_runners.pop(client).close()  # it refers to the client, so the entry would never vanish by itself


def build_collector(cfg: Config, rollout: Rollout, dataset: PromptDataset, schedule: StepSchedule) -> RolloutCollector:
    """Return a collector that goes through the training data in the order given by the seed.

    Args:
        cfg: The configuration.
        rollout: Turns a prompt into a group of trajectories.
        dataset: The training prompts.
        schedule: Says how many prompts each step has.
    """
    trainer, fully_async = cfg.trainer, cfg.trainer.fully_async
    order = PromptOrder(len(dataset), trainer.seed)
    return RolloutCollector(
        rollout,
        prompt_at=lambda position: dataset.prompts[order.row(position)],
        num_prompts_in_step=schedule.num_prompts_in_step,
        max_staleness_steps=max_staleness_steps(trainer),
        max_failed_fraction=trainer.max_failed_fraction,
        group_filters=build_group_filter_settings(cfg),
        num_parallel_generation_workers=fully_async.num_parallel_generation_workers if fully_async.enabled else None,
        env_try_overrides=env_try_overrides(cfg),
    )


def build_group_filter_settings(cfg: Config) -> GroupFilterSettings:
    """Return the settings that change, drop and replace groups before a step trains on them."""
    algorithm, generator = cfg.trainer.algorithm, cfg.generator
    return GroupFilterSettings(
        shaping=RewardShaping(
            zero_reward_on_non_stop=generator.zero_reward_on_non_stop,
            apply_overlong_filtering=generator.apply_overlong_filtering,
            overlong_buffer=algorithm.overlong_buffer,
            max_generate_length=generator.sampling_params.max_generate_length,
        ),
        dynamic_sampling=_dynamic_sampling(cfg.trainer),
        zero_variance_filter=algorithm.zero_variance_filter,
        over_provisioning=generator.over_provisioning,
        curriculum=_curriculum(cfg.data),
    )


def _dynamic_sampling(trainer: TrainerConfig) -> DynamicSampling | None:
    settings, fully_async = trainer.algorithm.dynamic_sampling, trainer.fully_async
    if settings.type is None:
        needs_full_batch = fully_async.enabled and fully_async.sample_full_batch
        disable_hint = "trainer.fully_async.sample_full_batch=false"
        return (
            DynamicSampling(max_sample_batches=settings.max_sample_batches, disable_hint=disable_hint)
            if needs_full_batch
            else None
        )
    return DynamicSampling(
        min_replace_ratio=settings.min_replace_ratio if settings.type == "replace" else 1.0,
        max_sample_batches=settings.max_sample_batches,
    )


def _curriculum(data: DataConfig) -> Curriculum | None:
    settings = data.curriculum
    if settings.min_pass_rate <= 0 and settings.max_pass_rate >= 1:
        return None
    return Curriculum(settings.min_pass_rate, settings.max_pass_rate)


def build_reward_model_scorer(
    cfg: Config, generator: Any, model: RewardModel | None, first_rollout_logger: FirstRolloutLogger
) -> RewardModelScorer:
    """Return a rollout function that adds the reward model's score, if there is a model, to the generator's rewards.

    Args:
        cfg: The configuration; trainer.reward.coef is the factor of the model's score.
        generator: Its method `rollout(prompt, position)` returns a group of trajectories.
        model: The reward model; None to leave rewards as they are.
        first_rollout_logger: Prints the run's first rollout.
    """
    score_fn = None if model is None else model.score
    return RewardModelScorer(
        generator.rollout, score_fn=score_fn, coef=cfg.trainer.reward.coef, first=first_rollout_logger
    )


def build_first_rollout_logger() -> FirstRolloutLogger:
    """Return a logger that prints the run's first rollout, without secrets."""
    return FirstRolloutLogger(
        lambda item, seconds: print_status("first rollout", redact(rollout_line(sample_row(item), seconds)))
    )


def build_evaluator(
    cfg: Config,
    running: RolloutResources,
    generator: Generator,
    dataset: PromptDataset,
    first_rollout_logger: FirstRolloutLogger | None = None,
) -> Evaluator:
    """Return the evaluator of a dataset.

    Args:
        cfg: The configuration.
        running: The started engines, with their client, and the reward model.
        generator: Turns evaluation prompts into groups of trajectories.
        dataset: The prompts to evaluate on.
        first_rollout_logger: The logger that training uses; None for a separate one.
    """
    dump_to = resolve_local_folder(cfg.trainer.export_path) / "dumped_evals" if cfg.trainer.dump_eval_results else None
    is_async = cfg.trainer.fully_async.enabled
    return Evaluator(
        build_reward_model_scorer(
            cfg, generator, running.reward_model, first_rollout_logger or build_first_rollout_logger()
        ),
        dataset.prompts,
        cfg.trainer.eval_batch_size,
        dump_to,
        cfg.trainer.max_failed_fraction,
        # In asynchronous training, rollouts for training continue during an evaluation.
        on_rollouts_done=None if is_async else running.client.reset_statistics,
        require_single_version=is_async,
        env_try_overrides=env_try_overrides(cfg),
    )


# -- steps, checkpoints and records


def build_checkpoint_manager(base: RunResources, controllers: Mapping[str, Any], tokenizer: Any) -> CheckpointManager:
    """Return the manager of a run's checkpoints and exports.

    Args:
        base: The started resources, with a learner.
        controllers: Name -> object with a state that checkpoints save and restore.
        tokenizer: Its chat template is saved unless generator.chat_template_kwargs gives or names another one.
    """
    assert base.learner is not None
    trainer = base.cfg.trainer
    return CheckpointManager(
        CheckpointStore(base.folder, trainer.max_ckpts_to_keep, base.mirrors.run),
        base.learner,
        resolve_local_folder(trainer.export_path),
        resume_mode=trainer.resume_mode,
        resume_path=trainer.resume_path,
        fingerprints=base.fingerprints,
        controllers=controllers,
        chat_template=chat_template_text(tokenizer, base.cfg.generator.chat_template_kwargs),
        reference_folder=base.folder / "reference.partial" if trainer.update_ref_every_epoch else None,
        async_checkpoint=trainer.async_checkpoint,
        # In the background a rank only responds between two updates.
        deadline_s=trainer.timeouts.checkpoint_s + trainer.timeouts.update_s * trainer.async_checkpoint,
        export_mirror=base.mirrors.exports,
    )


def build_profiles(base: RunResources, client: EngineClient | None = None) -> StepProfiler:
    """Return the profiler of trainer.profile_steps, for the trainer's ranks and the run's own transformers engines.

    Prints a note if engines of another backend are left out.

    Args:
        base: The started resources, with a learner.
        client: The client of the engines; None without engines.
    """
    learner, trainer, generator = base.learner, base.cfg.trainer, base.cfg.generator
    assert learner is not None

    def profiled() -> list[Any]:
        return [*learner.workers, *(client.engines if with_engines and client is not None else ())]

    with_engines = generator.backend == "transformers" and generator.run_engines_locally
    if client is not None and trainer.profile_steps and not with_engines:
        print_status("profile", f"only the trainer's ranks: engines of {generator.backend} have profilers of their own")
    return StepProfiler(trainer.profile_steps, base.folder / "profiles", profiled)


def build_batch_dump(trainer: TrainerConfig) -> BatchDump | None:
    """Return the writer of training batches; None without trainer.dump_data_batch."""
    return BatchDump(resolve_local_folder(trainer.export_path) / "dumped_data") if trainer.dump_data_batch else None


def build_rollout_writer(base: RunResources, tokenizer: Any) -> RolloutWriter:
    """Return the writer of rollouts to the run's folder, as trainer.keep_rollouts and keep_rollouts_gb configure."""
    trainer = base.cfg.trainer
    max_gb = trainer.keep_rollouts_gb
    if max_gb is None and trainer.keep_rollouts == "sample":
        max_gb = DEFAULT_SAMPLE_GB
    return RolloutWriter(
        base.folder,
        max_groups={"all": None, "sample": SAMPLED_GROUPS, "none": 0}[trainer.keep_rollouts],
        max_bytes=None if max_gb is None else max_gb * 1e9,
        vocabulary=lambda: get_vocabulary_texts(tokenizer),
        on_delete=None if base.mirrors.run is None else base.mirrors.run.delete_record,
    )
