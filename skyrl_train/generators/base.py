"""SkyRL's generator interface, by its names."""

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
