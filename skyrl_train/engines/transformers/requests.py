"""The state of requests in the transformers engine, and the storage of their sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from skyrl_train.data.arrays import LogProbs, Tokens, logprob_array, plain_ids, token_array
from skyrl_train.engines.base import Completion, SampleRequest, VersionSpan
from skyrl_train.engines.token_sampler import StopStrings
from skyrl_train.engines.transformers.cache import Key


class GenerateCall:
    """One call of generate(): its future gets the completions, in request order, once all requests are done."""

    def __init__(self, requests: Sequence[SampleRequest]):
        self.future: Future[list[Completion]] = Future()
        # From now on the future cannot be cancelled while the engine's thread uses it.
        self.future.set_running_or_notify_cancel()
        self.requests = [TrackedRequest(request, self) for request in requests]
        self._left = len(self.requests)

    def request_done(self) -> None:
        self._left -= 1
        if not self._left and not self.future.done():
            self.future.set_result([row.completion for row in self.requests if row.completion is not None])

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


@dataclass(eq=False, slots=True)
class TrackedRequest:
    """One request from submission to completion."""

    request: SampleRequest
    call: GenerateCall
    key: Key = field(default_factory=lambda: Key(()))
    """The tokens to prefill when it is admitted: the prompt, and after a retraction also its sampled tokens."""
    limit: int = 0
    """The most tokens to sample: max_tokens, or less if the model's maximum length is reached first."""
    stop_ids: frozenset[int] = frozenset()
    """All token ids that end it, including end-of-sequence."""
    never_yet: Tensor | None = None
    """Token ids that are forbidden before min_tokens."""
    stops: StopStrings | None = None
    seen: Tensor | None = None
    """bool [V], the tokens in it so far, if there is a repetition penalty."""
    page: int = -1
    """Its page in the Transcript."""
    slot: int = -1
    """Its slot in the DecodeCache."""
    generated: int = 0
    stop_text: str | None = None
    changes: list[tuple[int, int]] = field(default_factory=list)
    """(first token, version) of every change of weights, the first ones included."""
    routing: list[np.ndarray] = field(default_factory=list)
    """int16 [tokens, layers, k] of consecutive tokens from the prompt's first one on; empty if it is not kept."""
    completion: Completion | None = None

    @property
    def reread(self) -> int:
        """How many sampled tokens were prefilled with the prompt, after a retraction."""
        return len(self.key.token_ids) - len(self.request.token_ids)

    def admit(self, transcript: Transcript, version: int, routing: np.ndarray | None) -> None:
        """Begin to run with weights of this version, for the first time or after a retraction.

        `routing`: of the tokens that were prefilled. Those that were sampled earlier stay where they went then.
        """
        if routing is not None:
            self.routing.append(routing[sum(map(len, self.routing)) :])
        if self.page < 0:
            self.page = transcript.page()
        if not self.changes or self.changes[-1][1] != version:
            self.changes.append((self.generated, version))

    def retract(self, transcript: Transcript) -> None:
        """Prepare for the queue, keeping the tokens sampled so far."""
        sampled, _, _ = transcript.read(self.page, self.generated)
        self.key = self.key._replace(token_ids=plain_ids(np.concatenate((self.request.token_ids, sampled))))

    def finish(self, transcript: Transcript, reason: str, running_s: float) -> None:
        ids, logprobs, full = token_array([]), logprob_array([]), logprob_array([])
        if self.page >= 0:
            ids, logprobs, full = transcript.read(self.page, self.generated)
        starts = [start for start, _ in self.changes[1:]] + [self.generated]
        spans = [
            VersionSpan(start, stop, version)
            for (start, version), stop in zip(self.changes, starts, strict=False)
            if stop > start
        ]
        request_id = self.request.request_id
        routing = np.concatenate(self.routing) if self.routing else None
        self.completion = Completion(request_id, ids, logprobs, full, reason, spans, self.stop_text, running_s, routing)
        if self.page >= 0:
            transcript.free(self.page)


class Transcript:
    """Sampled tokens and log-probs of all running requests, in arrays that they share."""

    def __init__(self) -> None:
        self._ids = np.zeros((0, 64), dtype=np.int64)
        self._logprobs = np.zeros((2, 0, 64), dtype=np.float32)
        self._free: list[int] = []

    def page(self) -> int:
        if not self._free:
            count = len(self._ids)
            more = max(16, count)
            self._ids = np.pad(self._ids, ((0, more), (0, 0)))
            self._logprobs = np.pad(self._logprobs, ((0, 0), (0, more), (0, 0)))
            self._free = list(range(count, count + more))
        return self._free.pop()

    def write(self, pages: np.ndarray, at: np.ndarray, ids: np.ndarray, logprobs: np.ndarray) -> None:
        """Write one token per row: pages, at (its index), ids [B]; logprobs [2, B] (sampled from; full)."""
        if len(at) and (longest := int(at.max())) >= self._ids.shape[1]:
            more = max(longest + 1 - self._ids.shape[1], self._ids.shape[1])
            self._ids = np.pad(self._ids, ((0, 0), (0, more)))
            self._logprobs = np.pad(self._logprobs, ((0, 0), (0, 0), (0, more)))
        self._ids[pages, at] = ids
        self._logprobs[:, pages, at] = logprobs

    def read(self, page: int, count: int) -> tuple[Tokens, LogProbs, LogProbs]:
        """Copies of a request's first tokens and of their log-probs: sampled from, and full."""
        logprobs, full = (row[page, :count].copy() for row in self._logprobs)
        return self._ids[page, :count].astype(np.int32), logprobs, full

    def at(self, pages: np.ndarray, at: np.ndarray) -> np.ndarray:
        return self._ids[pages, at]

    def tail(self, page: int, start: int, stop: int) -> list[int]:
        return self._ids[page, start:stop].tolist()

    def free(self, page: int) -> None:
        self._free.append(page)
