"""Durations and response lengths of a simulated run."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field


@dataclass
class ResponseLengths:
    """A log-normal distribution of response lengths in tokens: its mean, and the deviation of the logarithm."""

    mean: float = 512.0
    sigma: float = 0.6

    def draw(self, seed: int, max_tokens: int) -> int:
        """Return a length from 1 to `max_tokens` that depends only on `seed`."""
        length = random.Random(seed).lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)
        return max(1, min(max_tokens, round(length)))


@dataclass
class EngineTimings:
    """Timings of one engine."""

    decode_s: float = 0.02
    """Seconds of a decode step, without the time that its sequences add."""
    decode_per_sequence_s: float = 0.0
    """Seconds that every sequence of the batch adds to a decode step."""
    prefill_tokens_per_s: float = 20_000.0
    max_num_seqs: int = 1024
    """Maximum number of running sequences. Others wait."""
    start_s: float = 60.0
    """Seconds of a start, without the weight sync that follows."""
    failures_per_hour: float = 0.0


@dataclass
class LearnerTimings:
    """Times of the learner, in seconds."""

    update_s_per_token: float = 1e-4
    score_s_per_token: float = 0.0
    step_s: float = 0.0
    """Additional seconds of every step, independent of the number of tokens."""


@dataclass
class Timings:
    """Seconds and tokens of one run."""

    engine: EngineTimings = field(default_factory=EngineTimings)
    learner: LearnerTimings = field(default_factory=LearnerTimings)
    sync_s: float = 1.0
    """Seconds of a weight sync."""
    response: ResponseLengths = field(default_factory=ResponseLengths)
    """Lengths of the responses of one turn."""
    prompt_tokens: int = 128
    turns: int = 1
    tool_s: float = 0.0
    """Mean seconds between two turns of an episode, exponentially distributed."""
    pass_rate: float = 0.5
    """Share of the responses with reward 1."""
