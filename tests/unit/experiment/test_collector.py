from __future__ import annotations

from skyrl_train.config.hydra import load_preset
from skyrl_train.config.schema import OverlongBufferConfig
from skyrl_train.experiment.trainer import build_group_filter_settings
from skyrl_train.rollouts.collector import Curriculum, DynamicSampling, GroupFilterSettings, RewardShaping


def filter_settings(*overrides: str) -> GroupFilterSettings:
    return build_group_filter_settings(load_preset(list(overrides)))


def test_group_filters_are_off_by_default():
    assert filter_settings("generator.sampling_params.max_generate_length=8") == GroupFilterSettings(
        RewardShaping(max_generate_length=8)
    )


def test_keys_reach_group_filters():
    found = filter_settings(
        "generator.zero_reward_on_non_stop=true",
        "generator.apply_overlong_filtering=true",
        "generator.sampling_params.max_generate_length=64",
        "generator.over_provisioning=0.25",
        "trainer.algorithm.overlong_buffer.len=16",
        "trainer.algorithm.overlong_buffer.penalty_factor=0.5",
        "trainer.algorithm.zero_variance_filter=true",
    )
    assert found == GroupFilterSettings(
        RewardShaping(True, True, OverlongBufferConfig(16, 0.5), 64), None, True, 0.25, None
    )


def test_dynamic_sampling_filter_and_replace_settings():
    prefix = "trainer.algorithm.dynamic_sampling"
    filtered = filter_settings(f"{prefix}.type=filter", f"{prefix}.max_sample_batches=7")
    assert filtered.dynamic_sampling == DynamicSampling(min_replace_ratio=1.0, max_sample_batches=7)
    replaced = filter_settings(f"{prefix}.type=replace", f"{prefix}.min_replace_ratio=0.5")
    assert replaced.dynamic_sampling == DynamicSampling(min_replace_ratio=0.5, max_sample_batches=30)


def test_narrow_pass_rates_enable_curriculum():
    assert isinstance(filter_settings("data.curriculum.min_pass_rate=0.1").curriculum, Curriculum)
    assert isinstance(filter_settings("data.curriculum.max_pass_rate=0.9").curriculum, Curriculum)
