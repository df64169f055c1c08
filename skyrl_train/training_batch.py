"""SkyRL's batch, by its name."""

from skyrl_train.skyrl.batches import TrainingInputBatch

__all__ = ["TrainingInputBatch"]
