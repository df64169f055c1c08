"""SkyRL's import path of its helper functions for scripts."""

from skyrl_train.skyrl.metrics import Timer
from skyrl_train.skyrl.script_entry import initialize_ray, validate_cfg

__all__ = ["Timer", "initialize_ray", "validate_cfg"]
