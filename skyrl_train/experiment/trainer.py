"""The loop of a run, made from what the run has started: rollouts, evaluation, weight syncs, checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from skyrl_train.config.predicates import max_staleness_steps, runs_groups_independently, sleep_level
from skyrl_train.config.schema import Config, DataConfig, TrainerConfig
from skyrl_train.config.secrets import redact
from skyrl_train.data.batch import Demonstration
from skyrl_train.data.control_tokens import end_of_turn_name, end_of_turn_token
from skyrl_train.data.dataset import PromptDataset, PromptOrder
from skyrl_train.data.vocabulary import vocabulary_texts
from skyrl_train.engines.client import EngineClient, Lockstep
from skyrl_train.engines.sampling import normalise, with_stop_token
from skyrl_train.environments.pool import EnvironmentPool
from skyrl_train.experiment.algorithm import build_advantage_step, build_correction_steps, compared_rewards
from skyrl_train.experiment.data import template_of
from skyrl_train.experiment.engines import why_number_is_fixed
from skyrl_train.experiment.publisher import build_publisher
from skyrl_train.experiment.services import RunningServices, Services
from skyrl_train.learner.reward_worker import RewardModel
from skyrl_train.report.console import rollout_line
from skyrl_train.report.phases import say
from skyrl_train.rollouts.collector import (
    Curriculum,
    DynamicSampling,
    RewardShaping,
    Rollout,
    RolloutCollector,
    Samplers,
)
from skyrl_train.rollouts.conversation import ConversationGenerator, EpisodeLimiter, RolloutSettings
from skyrl_train.rollouts.scoring import FirstRollout, ScoredRollouts
from skyrl_train.storage.places import working_folder
from skyrl_train.trainer.batch_dump import BatchDump
from skyrl_train.trainer.checkpoints import Checkpoints
from skyrl_train.trainer.evaluation import Evaluator
from skyrl_train.trainer.guards import Guards
from skyrl_train.trainer.kept_rollouts import SAMPLED_GROUPS, KeptRollouts
from skyrl_train.trainer.rollout_metrics import sample_row
from skyrl_train.trainer.run_state import RunState
from skyrl_train.trainer.scaler import EngineScaler
from skyrl_train.trainer.trainer import Residency, SFTTrainer, StepProfiles, StepSchedule, TimeShared, Trainer

SAMPLE_GB = 1.0
"""What a run's sample of rollouts takes at most, unless trainer.keep_rollouts_gb says."""


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
    schedule = schedule or base.schedule
    assert base.learner is not None and schedule is not None
    first = first_rollout()
    advantage_step = build_advantage_step(trainer.algorithm)
    rollouts = scored_rollouts(cfg, train_generator, running.reward_model, first)
    collector = build_collector(cfg, rollouts, train_dataset, schedule)
    end_of_turn = end_of_turn_name(tokenizer, cfg.generator.chat_template_kwargs)
    guards = Guards(trainer.guards, compared_rewards(trainer.algorithm), end_of_turn)
    residency = Residency()
    if base.layout.time_shared:
        residency = TimeShared(running.client, base.learner, sleep_level(cfg))
    publisher = build_publisher(running, tokenizer, train_dataset)
    scaler = EngineScaler(
        running.client,
        publisher,
        start=running.engine_slots.start,
        stop=running.engine_slots.stop,
        folder=base.directory,
        drain_s=trainer.timeouts.drain_s,
        fixed=why_number_is_fixed(cfg),
    )
    return Trainer(
        schedule=schedule,
        cfg=trainer,
        collector=collector,
        learner=base.learner,
        batch_steps=[advantage_step, *build_correction_steps(trainer.algorithm)],
        publisher=publisher,
        scaler=scaler,
        residency=residency,
        evaluator=build_evaluator(cfg, running, eval_generator, eval_dataset, first) if eval_dataset else None,
        state=build_state(base, {"kl": advantage_step, "collector": collector, "guards": guards}, tokenizer),
        trackers=base.trackers,
        guards=guards,
        profiles=build_profiles(base, running.client),
        batch_dump=build_batch_dump(trainer),
        kept_rollouts=build_kept_rollouts(base, tokenizer),
    )


def build_sft_trainer(base: Services, *, tokenizer: Any, demonstrations: Sequence[Demonstration]) -> SFTTrainer:
    """The trainer that fine-tunes on demonstrations."""
    trainer, schedule = base.cfg.trainer, base.schedule
    assert base.learner is not None and schedule is not None
    return SFTTrainer(
        demonstrations=demonstrations,
        index_at=PromptOrder(len(demonstrations), trainer.seed).row,
        schedule=schedule,
        cfg=trainer,
        learner=base.learner,
        state=build_state(base, {}, tokenizer),
        trackers=base.trackers,
        guards=Guards(trainer.guards, None),
        batch_dump=build_batch_dump(trainer),
        profiles=build_profiles(base),
    )


# -- rollouts


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
    sampler = client if runs_groups_independently(cfg, evaluation=evaluation) else Lockstep(client)
    return ConversationGenerator(
        sampler,
        environments,
        tokenizer,
        settings,
        later_turns=sampler if generator.batched and generator.max_turns > 1 else client,
        limiter=_limiters.setdefault(client, EpisodeLimiter(limit.trajectories_per_second, limit.max_concurrency))
        if limit.enabled
        else None,
    )


_limiters: WeakKeyDictionary[Any, EpisodeLimiter] = WeakKeyDictionary()
"""Of a run's client: rollouts for training and an evaluation beside them have one limit together."""


def build_collector(cfg: Config, rollout: Rollout, dataset: PromptDataset, schedule: StepSchedule) -> RolloutCollector:
    """A collector that goes through the training data in the order given by the seed."""
    trainer, ahead = cfg.trainer, cfg.trainer.fully_async
    order = PromptOrder(len(dataset), trainer.seed)
    return RolloutCollector(
        rollout,
        prompt_at=lambda position: dataset.prompts[order.row(position)],
        prompts_of_step=schedule.prompts_of_step,
        max_staleness_steps=max_staleness_steps(trainer),
        max_failed_fraction=trainer.max_failed_fraction,
        samplers=build_samplers(cfg),
        num_parallel_generation_workers=ahead.num_parallel_generation_workers if ahead.enabled else None,
    )


def build_samplers(cfg: Config) -> Samplers:
    """What changes, drops and replaces groups before a step trains on them."""
    algorithm, generator = cfg.trainer.algorithm, cfg.generator
    return Samplers(
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
    settings, ahead = trainer.algorithm.dynamic_sampling, trainer.fully_async
    if settings.type is None:
        full = ahead.enabled and ahead.sample_full_batch
        off = "trainer.fully_async.sample_full_batch=false"
        return DynamicSampling(max_sample_batches=settings.max_sample_batches, off=off) if full else None
    return DynamicSampling(
        min_replace_ratio=settings.min_replace_ratio if settings.type == "replace" else 1.0,
        max_sample_batches=settings.max_sample_batches,
    )


def _curriculum(data: DataConfig) -> Curriculum | None:
    settings = data.curriculum
    if settings.min_pass_rate <= 0 and settings.max_pass_rate >= 1:
        return None
    return Curriculum(settings.min_pass_rate, settings.max_pass_rate)


def scored_rollouts(cfg: Config, generator: Any, model: RewardModel | None, first: FirstRollout) -> ScoredRollouts:
    """The generator's rollouts, scored by the reward model if there is one."""
    judge = None if model is None else model.score
    return ScoredRollouts(generator.rollout, judge=judge, coef=cfg.trainer.reward.coef, first=first)


def first_rollout() -> FirstRollout:
    return FirstRollout(lambda item, seconds: say("first rollout", redact(rollout_line(sample_row(item), seconds))))


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


# -- steps, checkpoints and records


def build_state(base: Services, controllers: Mapping[str, Any], tokenizer: Any) -> RunState:
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
        fingerprints=base.fingerprints,
        controllers=controllers,
        chat_template=template_of(tokenizer, base.cfg.generator.chat_template_kwargs),
        reference_folder=base.directory / "reference.partial" if trainer.update_ref_every_epoch else None,
        async_checkpoint=trainer.async_checkpoint,
        # In the background a rank is asked between two updates.
        deadline_s=trainer.timeouts.checkpoint_s + trainer.timeouts.update_s * trainer.async_checkpoint,
        exports=base.mirrors.exports,
    )


def build_profiles(base: Services, client: EngineClient | None = None) -> StepProfiles:
    """Profiles of the trainer's ranks, and of engines that compute with torch in a process of this run's own."""
    learner, trainer, generator = base.learner, base.cfg.trainer, base.cfg.generator
    assert learner is not None

    def profiled() -> list[Any]:
        return [*learner.workers, *(client.engines if with_engines and client is not None else ())]

    with_engines = generator.backend == "transformers" and generator.run_engines_locally
    if client is not None and trainer.profile_steps and not with_engines:
        say("profile", f"the trainer's ranks alone: engines of {generator.backend} have profilers of their own")
    return StepProfiles(trainer.profile_steps, base.directory / "profiles", profiled)


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
