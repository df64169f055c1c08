"""Configurations that a script composes with Hydra: validation, completion and conversion."""

from __future__ import annotations

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from skyrl_train.config.prepare import prepare_composed, prepare_config
from skyrl_train.config.utils import get_default_config
from skyrl_train.entrypoints.main_base import config_dir, validate_cfg
from skyrl_train.errors import ConfigError
from skyrl_train.utils import SkyRLTrainConfig


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(config_dir, version_base=None):
        return compose("ppo_base_config", list(overrides))


def test_composed_configuration_equals_command_line():
    overrides = ["trainer.policy.model.path=m", "generator.sampling_params.temperature=0.5", "trainer.ckpt_path=/x"]
    assert prepare_composed(composed(*overrides)).config == prepare_config(overrides, has_user_code=True).config
    assert prepare_composed(get_default_config()).config == prepare_config([]).config


def test_aliases_and_custom_keys_are_read():
    cfg = composed(
        "trainer.algorithm.ppo_loss_type=gspo",
        "+generator.my_rate=3",
        "+environment.skyrl_gym.shout.bonus=10",
        "+environment.mine=a",
    )
    assert cfg.generator.my_rate == 3
    prepared = prepare_composed(cfg)
    config = prepared.config
    assert config.trainer.algorithm.policy_loss_type == "gspo"
    assert config.generator.my_rate == 3 and config.environment.mine == "a"
    assert config.environment.skyrl_gym.own == {"shout": {"bonus": 10}}
    assert sum("custom key" in note for note in prepared.notes) == 3


def test_skyrl_train_config_equals_command_line(capsys: pytest.CaptureFixture[str]):
    overrides = ["trainer.policy.model.path=m", "+generator.my_rate=3", "generator.inference_engine.backend=sglang"]
    cfg = SkyRLTrainConfig.from_cli_overrides([*overrides, "+environment.skyrl_gym.shout.bonus=10"])
    assert cfg.generator.my_rate == 3 and cfg.environment.skyrl_gym.shout.bonus == 10
    config = prepare_composed(cfg).config
    assert config == prepare_config([*overrides, "+environment.skyrl_gym.shout.bonus=10"], has_user_code=True).config
    assert config.generator.backend == "sglang"
    with pytest.raises(SystemExit) as exit_info:
        SkyRLTrainConfig.from_cli_overrides(["trainer.algorithm.eps_clip_lo=0.1"])
    assert exit_info.value.code == 2 and "Did you mean trainer.algorithm.eps_clip_low?" in capsys.readouterr().err


def test_changes_of_script_are_used():
    cfg = composed()
    cfg.trainer.train_batch_size = 7
    cfg.trainer.policy_mini_batch_size = 7
    assert prepare_composed(cfg).config.trainer.train_batch_size == 7


def test_misspelled_key_error_suggests_key():
    with pytest.raises(ConfigError, match=r"Did you mean trainer\.algorithm\.eps_clip_low\?"):
        prepare_composed(composed("trainer.algorithm.eps_clip_lo=0.1"))


def test_validation_completes_config_or_exits(capsys: pytest.CaptureFixture[str]):
    cfg = composed("device=cpu")
    validate_cfg(cfg)
    generator = cfg.generator
    longest = generator.max_input_length + generator.sampling_params.max_generate_length
    assert cfg.trainer.algorithm.max_seq_len == longest
    with pytest.raises(SystemExit) as exit_info:
        validate_cfg(composed("device=cpu", "trainer.train_batch_size=0"))
    assert exit_info.value.code == 2 and "trainer.train_batch_size=0" in capsys.readouterr().err
