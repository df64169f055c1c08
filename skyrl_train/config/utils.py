"""SkyRL's names for the folder of the presets and for the default configuration."""

from __future__ import annotations

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from skyrl_train.config.hydra import BASE_PRESET, presets_folder

CONFIG_DIR = presets_folder()
DEFAULT_CONFIG_NAME = f"{BASE_PRESET}.yaml"


def get_default_config() -> DictConfig:
    """Return the default configuration as Hydra composes it, with all keys and unresolved interpolations."""
    with initialize_config_dir(config_dir=str(CONFIG_DIR), version_base=None):
        return compose(config_name=BASE_PRESET)
