"""SkyRL's function for its defaults, by its names."""

from __future__ import annotations

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from skyrl_train.config.hydra import BASE_PRESET, presets_folder

CONFIG_DIR = presets_folder()
DEFAULT_CONFIG_NAME = f"{BASE_PRESET}.yaml"


def get_default_config() -> DictConfig:
    """Every key with its default, as Hydra composes it."""
    with initialize_config_dir(config_dir=str(CONFIG_DIR), version_base=None):
        return compose(config_name=BASE_PRESET)
