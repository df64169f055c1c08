"""SkyRL's import path of its generator interface."""

from skyrl_train.skyrl.interface import (
    BatchMetadata,
    ConversationType,
    GeneratorInput,
    GeneratorInterface,
    GeneratorOutput,
    MetricsOutput,
    TrainingPhase,
    TrajectoryID,
)

__all__ = [
    "BatchMetadata",
    "ConversationType",
    "GeneratorInput",
    "GeneratorInterface",
    "GeneratorOutput",
    "MetricsOutput",
    "TrainingPhase",
    "TrajectoryID",
]
