"""SkyRL's own generator, by its name."""

from skyrl_train.skyrl.gym_generator import SkyRLGymGenerator

__all__ = ["SkyRLGymGenerator"]
