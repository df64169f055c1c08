"""An episode's tokens exactly as the model read and sampled them: an append-only record."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from skyrl_train.data.arrays import Tokens, joined, logprob_array, token_array
from skyrl_train.data.trajectory import Restart, Trajectory, Turn
from skyrl_train.engines.base import Completion


class Ledger:
    """Writes a trajectory's tokens: sampled tokens are in the loss, the environment's tokens are not.

    `context` is what the model reads next. Sampled tokens stay as they were sampled: nothing is tokenised again.

    Example: open([5, 6]), sampled 7 2, tell([9, 8]), sampled 3 2: response_ids [7, 2, 9, 8, 3, 2], loss_spans and turns
    [0, 2) and [4, 6).
    """

    def __init__(self, trajectory: Trajectory):
        self._item = trajectory
        self._prompt_ids = trajectory.prompt_ids
        """The prompt of the current sequence ..."""
        self._start = 0
        """... and the index of the first response token that follows it."""

    def open(self, prompt_ids: ArrayLike) -> None:
        """Begin the episode with its prompt."""
        self._item.prompt_ids = self._prompt_ids = token_array(prompt_ids)

    @property
    def context(self) -> Tokens:
        """All tokens of the current sequence: what the model reads next."""
        return np.concatenate((self._prompt_ids, self._item.response_ids[self._start :]))

    def sample(self, completion: Completion) -> None:
        """Append a turn of the model; what comes of it is told later, by `note`."""
        item, start = self._item, len(self._item.response_ids)
        self._append(completion.token_ids, completion.full_logprobs)
        item.stop_reason = completion.stop_reason
        self._route(completion.routing)
        versions = [span.version for span in completion.versions] or [0]
        counted = sum((span.stop - span.start) * span.version for span in completion.versions)
        mean = counted / max(1, len(completion.token_ids))
        stop, reason = len(item.response_ids), completion.stop_reason
        if start < stop:
            item.loss_spans.append((start, stop))
        item.turns.append(Turn(start, stop, 0.0, reason, min(versions), max(versions), mean, completion.running_s))

    def _route(self, routing: Any) -> None:
        """Note where tokens went: those of earlier turns stay as they were when they were sampled."""
        if routing is None:
            return
        sequences = self._item.routing
        while len(sequences) <= len(self._item.restarts):
            sequences.append(routing[:0])
        known = len(sequences[-1])
        sequences[-1] = np.concatenate([sequences[-1], routing[known:]])

    def note(self, **known: Any) -> None:
        """Set fields of the last turn: what the environment made of it."""
        self._item.turns[-1] = replace(self._item.turns[-1], **known)

    @property
    def last_sampled(self) -> int | None:
        """The last token of the last turn, if nothing was appended since; else None."""
        last = self._item.turns[-1]
        return int(self._item.response_ids[-1]) if last.start < last.stop == len(self._item.response_ids) else None

    def tell(self, ids: ArrayLike) -> None:
        """Append tokens that the model reads but did not sample."""
        told = token_array(ids)
        self._append(told, np.zeros(len(told), np.float32))

    def _append(self, ids: ArrayLike, logprobs: ArrayLike) -> None:
        item = self._item
        item.response_ids = joined(item.response_ids, token_array(ids))
        item.logprobs = joined(item.logprobs, logprob_array(logprobs))

    def take_back(self) -> None:
        """Remove the last sampled token: an end of message, where the message continues after all."""
        item, last = self._item, self._item.turns[-1]
        assert last.start < last.stop == len(item.response_ids), "nothing was said after it"
        item.response_ids, item.logprobs = item.response_ids[:-1], item.logprobs[:-1]
        item.turns[-1] = last = replace(last, stop=last.stop - 1)
        item.loss_spans[-1:] = [(last.start, last.stop)] if last.start < last.stop else []

    def restart(self, prompt_ids: ArrayLike) -> None:
        """Let the model read `prompt_ids` next.

        If they begin with the current context, they extend the current sequence; otherwise a new sequence begins.
        """
        context, ids = self.context, token_array(prompt_ids)
        if np.array_equal(ids[: len(context)], context):
            self.tell(ids[len(context) :])
            return
        self._prompt_ids, self._start = ids, len(self._item.response_ids)
        self._item.restarts.append(Restart(self._start, ids))
