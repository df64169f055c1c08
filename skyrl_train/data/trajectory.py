"""The parts of an episode: its turns, its tokens, and the group of a prompt's samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
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

OK = "ok"
FAILED = "failed"
"""The episode raised, hung or was lost: it is masked and counted under `error`, never scored 0."""
MIN_PASS_REWARD = 1.0
"""The least outcome that counts as a pass."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One generation in an episode: response tokens [start, stop) were sampled, then the environment answered.

    Generators of SkyRL's interface return an episode of several generations as one turn.
    """

    start: int
    stop: int
    reward: float
    stop_reason: str
    """The engine's stop | length | abort."""
    min_version: int
    max_version: int
    mean_version: float = 0.0
    """Over its tokens."""
    running_s: float = field(default=0.0, compare=False)
    """Seconds in the engine's batch."""
    environment_s: float | None = field(default=None, compare=False)
    """Seconds until the environment had answered, its tools' calls and waiting for its process included."""
    tool_calls: tuple[ToolCallRecord, ...] = ()
    """The calls that the environment read from its text. They are for people: the model never sees them."""
    observation_tokens: int = 0
    """Tokens in [start, stop) that were not sampled. Only turns of SkyRL's generators have any."""

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the model sampled."""
        return self.stop - self.start - self.observation_tokens


@dataclass(frozen=True, slots=True)
class Restart:
    """From response token `start` on, the model saw `prompt_ids` instead of the tokens before it.

    A chat template had rewritten the history, so the rest of the episode is a separate sequence.
    """

    start: int
    prompt_ids: Tokens

    def __eq__(self, other: object) -> bool:
        return fields_equal(self, other)


@dataclass(slots=True)
class Trajectory:
    """One episode as tokens. L is the number of response tokens, including environment turns.

    Example, one turn: prompt_ids=[5, 6], response_ids=[7, 2], loss_spans=[(0, 2)], logprobs=[-0.1, -0.3],
    turns=[Turn(0, 2, reward=1.0, stop_reason="stop", min_version=3, max_version=3)], reward=1.0
    """

    prompt: Prompt
    sample: int
    """Index among the group's n samples."""
    prompt_ids: Tokens
    response_ids: Tokens
    """[L], the sampled tokens and those rendered between turns, verbatim; never re-tokenised."""
    loss_spans: list[Span]
    """The stretches of sampled tokens, in order; none if a sampler keeps the response out of the loss."""
    logprobs: LogProbs
    """[L], nats, temperature-scaled, before top-p and top-k (`Completion.full_logprobs`); 0.0 on other tokens. Empty if
    whoever sampled did not tell."""
    turns: list[Turn]
    reward: float
    """The sum over turns; 0.0 and meaningless unless status is ok."""
    stop_reason: str
    temperature: float
    env_metrics: dict[str, float] = field(default_factory=dict)
    status: str = OK
    error: str | None = None
    """The name under which a failure is counted: the exception's class, "timeout", "bad_reward", "engine"..."""
    text: str = ""
    """The decoded response, for people; it is never parsed."""
    messages: list[Message] = field(default_factory=list)
    """The whole conversation: the environment's opening, and every answer with its observations."""
    raw_reward: float | None = None
    """`reward` before length penalties, if there are any."""
    detail: str = ""
    """What a failure said, with the file and line of whoever raised it."""
    restarts: list[Restart] = field(default_factory=list)
    """Not empty if the episode consists of several sequences; the trajectory is still one sample."""
    token_rewards: list[float] | None = None
    """[L], if rewards belong to tokens other than the last ones of turns; it sums to `reward`."""
    routing: list[Any] = field(default_factory=list, compare=False)
    """numpy [tokens, layers, k] of every sequence, from its prompt's first token on: the experts that tokens went to in
    the engine. It may end before the sequence does; empty if engines do not tell."""

    def __post_init__(self) -> None:
        self.prompt_ids, self.response_ids = to_token_array(self.prompt_ids), to_token_array(self.response_ids)
        self.logprobs = to_logprob_array(self.logprobs)

    def __eq__(self, other: object) -> bool:
        return fields_equal(self, other)

    @classmethod
    def empty(cls, prompt: Prompt, sample: int, temperature: float) -> Trajectory:
        """An episode before its first token."""
        nothing = to_token_array([])
        return cls(prompt, sample, nothing, nothing, [], to_logprob_array([]), [], 0.0, "abort", temperature)

    @property
    def loss_mask(self) -> NDArray[np.bool_]:
        """[L], true on the tokens of `loss_spans`."""
        return spans_to_mask(self.loss_spans, len(self.response_ids))

    def sequences(self) -> Iterator[tuple[Tokens, int, int]]:
        """(prompt ids, start, stop) of every sequence: response tokens [start, stop) follow this prompt."""
        begins = [Restart(0, self.prompt_ids), *self.restarts]
        for one, after in zip(begins, [*begins[1:], None], strict=True):
            yield one.prompt_ids, one.start, len(self.response_ids) if after is None else after.start

    def fail(self, kind: str, detail: str) -> None:
        """Mark the episode as failed with `kind`; its reward so far is discarded."""
        self.status, self.error, self.reward = FAILED, kind, 0.0
        self.env_metrics, self.detail = {}, detail
        self.text = self.text or detail

    @property
    def outcome(self) -> float:
        """The reward without length penalties; it decides which samples pass and which groups are useful."""
        return self.reward if self.raw_reward is None else self.raw_reward

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the model sampled; the rest of `response_ids` was rendered between turns."""
        return sum(turn.sampled_tokens for turn in self.turns)

    @property
    def sampled_turns(self) -> list[Turn]:
        """Those with tokens: an engine does not say which weights a turn without any is from."""
        return [turn for turn in self.turns if turn.start < turn.stop]

    @property
    def min_version(self) -> int:
        """Of its tokens; of none 0."""
        return min((turn.min_version for turn in self.sampled_turns), default=0)

    @property
    def max_version(self) -> int:
        """Of its tokens; of none 0."""
        return max((turn.max_version for turn in self.sampled_turns), default=0)


@dataclass(slots=True)
class TrajectoryGroup:
    """The n trajectories of one prompt: what an advantage compares."""

    prompt: Prompt
    trajectories: list[Trajectory]
    status: str = OK
