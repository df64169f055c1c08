"""SkyRL's functions for scripts, by its names."""

from skyrl_train.skyrl.launch import initialize_ray, validate_cfg

__all__ = ["initialize_ray", "validate_cfg"]
