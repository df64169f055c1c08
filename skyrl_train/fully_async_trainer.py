"""SkyRL's import path of its fully asynchronous trainer."""

from skyrl_train.skyrl.trainer import FullyAsyncRayPPOTrainer

__all__ = ["FullyAsyncRayPPOTrainer"]
