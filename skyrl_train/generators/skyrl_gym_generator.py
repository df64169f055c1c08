"""SkyRL's import path of its built-in generator."""

from skyrl_train.skyrl.gym_generator import SkyRLGymGenerator

__all__ = ["SkyRLGymGenerator"]
