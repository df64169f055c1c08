"""The collector of rollouts and its samplers, from configuration."""

from __future__ import annotations

from skyrl_train.config.schema import Config
from skyrl_train.data.dataset import PromptDataset, PromptOrder
from skyrl_train.rollouts.collector import (
    Curriculum,
    DynamicSampling,
    RewardShaping,
    Rollout,
    RolloutCollector,
    Samplers,
)
from skyrl_train.trainer.trainer import StepSchedule


def build_collector(cfg: Config, rollout: Rollout, dataset: PromptDataset, schedule: StepSchedule) -> RolloutCollector:
    """A collector that goes through the training data in the order given by the seed."""
    trainer, ahead = cfg.trainer, cfg.trainer.fully_async
    order = PromptOrder(len(dataset), trainer.seed)
    return RolloutCollector(
        rollout,
        prompt_at=lambda position: dataset.prompts[order.row(position)],
        prompts_of_step=schedule.prompts_of_step,
        max_staleness_steps=ahead.max_staleness_steps if ahead.enabled else 0,
        max_failed_fraction=trainer.max_failed_fraction,
        samplers=build_samplers(cfg, ahead=ahead.enabled),
        num_parallel_generation_workers=ahead.num_parallel_generation_workers if ahead.enabled else None,
    )


def build_samplers(cfg: Config, *, ahead: bool) -> Samplers:
    """`ahead`: whether rollouts run ahead of the step that is learnt."""
    algorithm, generator = cfg.trainer.algorithm, cfg.generator
    return Samplers(
        shaping=RewardShaping(
            zero_reward_on_non_stop=generator.zero_reward_on_non_stop,
            apply_overlong_filtering=generator.apply_overlong_filtering,
            overlong_buffer=algorithm.overlong_buffer,
            max_generate_length=generator.sampling_params.max_generate_length,
        ),
        dynamic_sampling=_dynamic_sampling(cfg, ahead),
        zero_variance_filter=algorithm.zero_variance_filter,
        over_provisioning=generator.over_provisioning,
        curriculum=_curriculum(cfg),
    )


def _dynamic_sampling(cfg: Config, ahead: bool) -> DynamicSampling | None:
    settings = cfg.trainer.algorithm.dynamic_sampling
    if settings.type is None:
        full = ahead and cfg.trainer.fully_async.sample_full_batch
        off = "trainer.fully_async.sample_full_batch=false"
        return DynamicSampling(max_sample_batches=settings.max_sample_batches, off=off) if full else None
    return DynamicSampling(
        min_replace_ratio=settings.min_replace_ratio if settings.type == "replace" else 1.0,
        max_sample_batches=settings.max_sample_batches,
    )


def _curriculum(cfg: Config) -> Curriculum | None:
    settings = cfg.data.curriculum
    if settings.min_pass_rate <= 0 and settings.max_pass_rate >= 1:
        return None
    return Curriculum(settings.min_pass_rate, settings.max_pass_rate)
