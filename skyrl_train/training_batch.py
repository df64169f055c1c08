"""SkyRL's import path of its training batch."""

from skyrl_train.skyrl.batches import TrainingInputBatch

__all__ = ["TrainingInputBatch"]
