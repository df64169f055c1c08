"""SkyRL's generator interface: the types of `generate`. Names and fields are those of SkyRL-train 0.3."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypedDict

MessageType = dict[str, Any]
ConversationType = list[MessageType]
TrainingPhase = Literal["train", "eval"]


@dataclass(frozen=True)
class TrajectoryID:
    """The id of one sample: the uid of its row (`instance_id`) and its index among the row's samples."""

    instance_id: str
    repetition_id: int

    def to_string(self) -> str:
        """Return "<instance_id>_<repetition_id>"."""
        return f"{self.instance_id}_{self.repetition_id}"


@dataclass
class BatchMetadata:
    """The step and the phase for which a batch is generated."""

    global_step: int
    """The training step of the batch, counted from 1; in evaluations, the last finished step."""
    training_phase: TrainingPhase


class GeneratorInput(TypedDict):
    """The input of `generate`: lists with one entry per sample. The samples of a prompt are adjacent."""

    prompts: list[ConversationType]
    env_classes: list[str]
    env_extras: list[dict[str, Any]] | None
    sampling_params: dict[str, Any] | None
    trajectory_ids: list[TrajectoryID] | None
    batch_metadata: BatchMetadata | None


class GeneratorOutput(TypedDict):
    """The output of `generate`: lists with one entry per sample, in the order of the input.

    With step-wise training, there is one entry for each step of an episode.
    """

    prompt_token_ids: list[list[int]]
    response_ids: list[list[int]]
    rewards: list[float] | list[list[float]]
    """One number for each response, or one for each token of each response."""
    loss_masks: list[list[int]]
    stop_reasons: list[str] | None
    rollout_metrics: dict[str, Any] | None
    rollout_logprobs: list[list[float]] | None
    trajectory_ids: NotRequired[list[TrajectoryID] | None]
    is_last_step: NotRequired[list[bool] | None]
    """Step-wise training: True if the entry ends its episode. The reward of the last step is the episode's."""


class MetricsOutput(TypedDict):
    """Reward metrics of a GeneratorOutput."""

    avg_score: float | None
    pass_at_n: float | None
    mean_positive_reward: float | None


class GeneratorInterface(ABC):
    """A generator of trajectories. Subclass it, and return an instance from `BasePPOExp.get_generator`."""

    @abstractmethod
    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Generate one trajectory for each sample of the input, and return them in the order of the input.

        An exception ends the run. To exclude a sample from training, give it a loss mask of zeros.
        """


class InferenceEngineInput(TypedDict, total=False):
    """The input of `InferenceEngineClient.generate`: either `prompts` or `prompt_token_ids`, and options."""

    prompts: list[ConversationType] | None
    prompt_token_ids: list[list[int]] | None
    sampling_params: dict[str, Any] | None
    session_ids: list[Any] | None


class InferenceEngineOutput(TypedDict):
    """The output of `InferenceEngineClient.generate`: lists with one entry per prompt."""

    responses: list[str]
    """Texts without control tokens. Build multi-turn episodes from `response_ids`: re-encoding texts is not exact."""
    response_ids: list[list[int]]
    stop_reasons: list[str]
    response_logprobs: list[list[float]] | None
    """Log-probs of the sampled tokens in nats, after temperature scaling and before top-p and top-k truncation."""
