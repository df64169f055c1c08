"""Episodes as tokens: turns, trajectories, and the group of a prompt's samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl_train.data.messages import Message, Prompt, ToolCallRecord
from skyrl_train.data.token_arrays import (
    LogProbs,
    Span,
    Tokens,
    fields_equal,
    spans_to_mask,
    to_logprob_array,
    to_token_array,
)


class TrajectoryStatus(StrEnum):
    """State of an episode."""

    OK = "ok"
    FAILED = "failed"
    """The episode raised, hung or was lost. It is masked and counted under `error`, and never gets a reward of 0."""


OK, FAILED = TrajectoryStatus.OK, TrajectoryStatus.FAILED
MIN_PASS_REWARD = 1.0
"""Minimum outcome that counts as a pass."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One generation of an episode: response tokens [start, stop) were sampled, then the environment responded.

    Generators of SkyRL's interface return an episode of several generations as one turn.
    """

    start: int
    stop: int
    reward: float
    stop_reason: str
    """The engine's reason: stop, length or abort."""
    min_version: int
    """Oldest weight version that sampled a token of the turn."""
    max_version: int
    """Newest weight version that sampled a token of the turn."""
    mean_version: float = 0.0
    """Mean weight version of the turn's tokens."""
    running_s: float = field(default=0.0, compare=False)
    """Seconds in the engine's batch."""
    environment_s: float | None = field(default=None, compare=False)
    """Seconds until the environment had responded, including its tool calls and the wait for its process."""
    tool_calls: tuple[ToolCallRecord, ...] = ()
    """Tool calls that the environment parsed from the turn's text, for reports. The model does not read them."""
    observation_tokens: int = 0
    """Number of tokens in [start, stop) that were not sampled. Only turns of SkyRL's generators have any."""

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the model sampled."""
        return self.stop - self.start - self.observation_tokens


@dataclass(frozen=True, slots=True)
class Restart:
    """The beginning of a further sequence of an episode, after a chat template had rewritten the history.

    For response tokens from index `start` on, the model read `prompt_ids` instead of the tokens before them.
    """

    start: int
    prompt_ids: Tokens

    def __eq__(self, other: object) -> bool:
        return fields_equal(self, other)


@dataclass(slots=True)
class Trajectory:
    """One episode as tokens. L is the number of response tokens, including those of the environment's messages.

    Example:
        An episode of one turn: prompt_ids=[5, 6], response_ids=[7, 2], loss_spans=[(0, 2)], logprobs=[-0.1, -0.3],
        turns=[Turn(0, 2, reward=1.0, stop_reason="stop", min_version=3, max_version=3)], reward=1.0
    """

    prompt: Prompt
    sample: int
    """Index of the trajectory in its group."""
    prompt_ids: Tokens
    """Token ids of the prompt of the first sequence."""
    response_ids: Tokens
    """Token ids [L]: sampled tokens, and tokens rendered between turns. They are never decoded and encoded again."""
    loss_spans: list[Span]
    """Spans of the response tokens that are trained on, in order: the sampled ones. Empty if the response is masked."""
    logprobs: LogProbs
    """Log-probs [L] in nats of the sampled tokens, temperature-scaled, before top-p and top-k
    (`Completion.full_logprobs`); 0.0 on other tokens. Empty if they are not known."""
    turns: list[Turn]
    reward: float
    """Sum of the turns' rewards. It is 0.0 and has no meaning unless the status is ok."""
    stop_reason: str
    """The engine's reason for the end of the last turn: stop, length or abort."""
    temperature: float
    """Sampling temperature."""
    env_metrics: dict[str, float] = field(default_factory=dict)
    """Metrics that the environment reported."""
    status: TrajectoryStatus = OK
    error: str | None = None
    """Name under which a failure is counted: the exception's class, "timeout", "bad_reward", "engine", ..."""
    text: str = ""
    """Decoded response, for reports. It is never parsed."""
    messages: list[Message] = field(default_factory=list)
    """Complete conversation: the initial messages, and every answer with its observations."""
    raw_reward: float | None = None
    """Reward before length penalties; None if there are no penalties."""
    detail: str = ""
    """Message of a failure, with the file and line where it was raised."""
    restarts: list[Restart] = field(default_factory=list)
    """Beginnings of further sequences. The trajectory is one sample even if it has several sequences."""
    token_rewards: list[float] | None = None
    """Rewards of tokens [L], which sum to `reward`. None if each turn's reward belongs to its last token."""
    routing: list[Any] = field(default_factory=list, compare=False)
    """Expert ids of each sequence, numpy [tokens, layers, k], from the first prompt token on, as the engine routed the
    tokens. An array may end before its sequence. Empty if the engine does not return experts."""
    session: dict[str, Any] | None = None
    """The calls of a program to a chat API, see `agents.records`; None for episodes of other environments."""

    def __post_init__(self) -> None:
        self.prompt_ids, self.response_ids = to_token_array(self.prompt_ids), to_token_array(self.response_ids)
        self.logprobs = to_logprob_array(self.logprobs)

    def __eq__(self, other: object) -> bool:
        return fields_equal(self, other)

    @classmethod
    def empty(cls, prompt: Prompt, sample: int, temperature: float) -> Trajectory:
        """Return an episode before its first token.

        Args:
            prompt: The prompt.
            sample: Index of the trajectory in its group.
            temperature: Sampling temperature.
        """
        no_tokens = to_token_array([])
        return cls(prompt, sample, no_tokens, no_tokens, [], to_logprob_array([]), [], 0.0, "abort", temperature)

    @property
    def loss_mask(self) -> NDArray[np.bool_]:
        """Mask [L] of the response tokens in `loss_spans`."""
        return spans_to_mask(self.loss_spans, len(self.response_ids))

    def sequences(self) -> Iterator[tuple[Tokens, int, int]]:
        """Yield (prompt ids, start, stop) for each sequence: its response tokens [start, stop) follow its prompt."""
        starts = [Restart(0, self.prompt_ids), *self.restarts]
        for current, following in zip(starts, [*starts[1:], None], strict=True):
            stop = len(self.response_ids) if following is None else following.start
            yield current.prompt_ids, current.start, stop

    def fail(self, kind: str, detail: str) -> None:
        """Mark the episode as failed, and discard its reward and its environment's metrics.

        Args:
            kind: Name under which the failure is counted (`error`).
            detail: Message of the failure. It becomes `text` if there is no text yet.
        """
        self.status, self.error, self.reward = FAILED, kind, 0.0
        self.env_metrics, self.detail = {}, detail
        self.text = self.text or detail

    @property
    def outcome(self) -> float:
        """Reward without length penalties. It decides which samples pass and which groups are useful."""
        return self.reward if self.raw_reward is None else self.raw_reward

    @property
    def sampled_tokens(self) -> int:
        """Number of response tokens that the model sampled.

        The other response tokens come from the environment and the chat template, between turns.
        """
        return sum(turn.sampled_tokens for turn in self.turns)

    @property
    def sampled_turns(self) -> list[Turn]:
        """Turns with at least one token. Engines report no weight version for empty turns."""
        return [turn for turn in self.turns if turn.start < turn.stop]

    @property
    def min_version(self) -> int:
        """Oldest weight version that sampled a token; 0 if no token was sampled."""
        return min((turn.min_version for turn in self.sampled_turns), default=0)

    @property
    def max_version(self) -> int:
        """Newest weight version that sampled a token; 0 if no token was sampled."""
        return max((turn.max_version for turn in self.sampled_turns), default=0)


@dataclass(slots=True)
class TrajectoryGroup:
    """All trajectories of one prompt, whose rewards an advantage estimator compares."""

    prompt: Prompt
    trajectories: list[Trajectory]
    status: TrajectoryStatus = OK
