"""SkyRL's generator interface: what `generate` takes and returns. Names and fields are those of SkyRL-train 0.3."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypedDict

MessageType = dict[str, Any]
ConversationType = list[MessageType]
TrainingPhase = Literal["train", "eval"]


@dataclass(frozen=True)
class TrajectoryID:
    """One sample: the row of the data, and which of its samples."""

    instance_id: str
    repetition_id: int

    def to_string(self) -> str:
        return f"{self.instance_id}_{self.repetition_id}"


@dataclass
class BatchMetadata:
    global_step: int
    """The step that the batch is for, from 1; evaluations have that of the last finished step."""
    training_phase: TrainingPhase


class GeneratorInput(TypedDict):
    """N samples, n of one prompt after the other."""

    prompts: list[ConversationType]
    env_classes: list[str]
    env_extras: list[dict[str, Any]] | None
    sampling_params: dict[str, Any] | None
    trajectory_ids: list[TrajectoryID] | None
    batch_metadata: BatchMetadata | None


class GeneratorOutput(TypedDict):
    """N samples in the order of the input; with step-wise training one entry for each step of an episode."""

    prompt_token_ids: list[list[int]]
    response_ids: list[list[int]]
    rewards: list[float] | list[list[float]]
    """Of every response, or of every token of every response."""
    loss_masks: list[list[int]]
    stop_reasons: list[str] | None
    rollout_metrics: dict[str, Any] | None
    rollout_logprobs: list[list[float]] | None
    trajectory_ids: NotRequired[list[TrajectoryID] | None]
    is_last_step: NotRequired[list[bool] | None]
    """Step-wise training: whether an entry ends its episode. The reward of the last step is the episode's."""


class MetricsOutput(TypedDict):
    avg_score: float | None
    pass_at_n: float | None
    mean_positive_reward: float | None


class GeneratorInterface(ABC):
    """Turns prompts into trajectories. Subclass it, and return an instance from `BasePPOExp.get_generator`."""

    @abstractmethod
    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """The trajectories, in the order of the input."""


class InferenceEngineInput(TypedDict, total=False):
    """Give either `prompts` or `prompt_token_ids`."""

    prompts: list[ConversationType] | None
    prompt_token_ids: list[list[int]] | None
    sampling_params: dict[str, Any] | None
    session_ids: list[Any] | None


class InferenceEngineOutput(TypedDict):
    responses: list[str]
    """Decoded without control tokens; of several turns only `response_ids` are exact."""
    response_ids: list[list[int]]
    stop_reasons: list[str]
    response_logprobs: list[list[float]] | None
    """nats, temperature-scaled, before top-p and top-k."""
