"""SkyRL's trainer for rollouts that run ahead, by its name."""

from skyrl_train.skyrl.trainer import FullyAsyncRayPPOTrainer

__all__ = ["FullyAsyncRayPPOTrainer"]
