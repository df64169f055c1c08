"""Checks that every engine makes before anything is queued, with the same error messages."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from skyrl_train.data.arrays import Tokens, plain_ids
from skyrl_train.engines.base import Capabilities, SampleRequest, SamplingParams
from skyrl_train.engines.sampling import check_supported
from skyrl_train.errors import EngineError, UnsupportedParameter

SLEEPING = frozenset({"weights", "kv_cache"})
"""The tags of what `sleep` frees and `wake_up` allocates."""


def check_new_ids(engine: str, requests: Iterable[SampleRequest], under_way: Iterable[str]) -> None:
    """Raises UnsupportedParameter for a request whose id is `under_way` already, or is that of another request."""
    taken = set(under_way)
    for request in requests:
        if request.request_id in taken:
            used = request.request_id
            raise UnsupportedParameter(f"Engine {engine!r}: request id {used!r} is in use; give each its own.")
        taken.add(request.request_id)


def check_logprobs(engine: str, *logprobs: Iterable[float]) -> None:
    """Raises EngineError if a log-prob is not finite: no parameter of a request can cause that, only broken weights."""
    if not all(math.isfinite(one) for each in logprobs for one in each):
        raise EngineError(f"Engine {engine!r}: the model's logits are not finite; its weights are broken.")


@dataclass(frozen=True, slots=True)
class Checks:
    """The checks of one engine. Each method raises UnsupportedParameter naming engine, value, and what is allowed."""

    engine: Capabilities
    vocab_size: int
    max_model_len: int
    """The most tokens of prompt plus response."""
    max_score_len: int
    """The most tokens of a sequence to score."""

    def request(self, request: SampleRequest, adapters: Collection[str]) -> None:
        """Check a request to sample; `adapters`: the names of those loaded."""
        check_supported(request.sampling, self.engine)
        self._stop_ids(request.sampling)
        if request.adapter is not None and request.adapter not in adapters:
            known = ", ".join(sorted(adapters)) or self.engine.refusals.get("adapter", "none")
            raise self._refusal(f"adapter={request.adapter!r}", f"adapters loaded: {known}")
        what = f"request {request.request_id!r}"
        self._ids(what, request.token_ids)
        if len(request.token_ids) >= self.max_model_len:
            raise self._refusal(
                what,
                f"its prompt has {len(request.token_ids)} tokens, max_model_len={self.max_model_len} leaves none to "
                "sample. Shorten the prompt or raise max_model_len",
            )

    def score(self, token_ids: Sequence[Sequence[int]], temperature: float) -> list[tuple[int, ...]]:
        """Check the arguments of `score`; returns the ids as Python's integers."""
        if temperature != 1.0 and not self.engine.score_temperature:
            raise self._refusal(f"score(temperature={temperature})", self.engine.refusals["score.temperature"])
        plain = [plain_ids(ids) for ids in token_ids]
        for ids in plain:
            self._ids("score", ids)
            if len(ids) > self.max_score_len:
                allowed = f"at most {self.max_score_len} tokens, got {len(ids)}. Shorten it or raise max_model_len"
                raise self._refusal("score", allowed)
        return plain

    def pause(self, mode: str) -> None:
        """Check the mode of `pause`."""
        if mode not in self.engine.pause_modes:
            why = self.engine.refusals.get(f"pause.{mode}", "")
            allowed = f"it knows {', '.join(sorted(self.engine.pause_modes))}"
            raise self._refusal(f"pause(mode={mode!r})", f"{why} {allowed}".strip())

    def wake_up(self, tags: Sequence[str] | None) -> None:
        """Check the tags of `wake_up`."""
        if unknown := set(tags or ()) - SLEEPING:
            raise self._refusal(f"wake_up({sorted(unknown)})", f"it knows {', '.join(sorted(SLEEPING))}")

    def adapter(self, name: str) -> None:
        """Check that an adapter can be loaded."""
        if not self.engine.lora:
            raise self._refusal(f"adapter={name!r}", self.engine.refusals["adapter"])

    def _stop_ids(self, sampling: SamplingParams) -> None:
        ids = sampling.stop_token_ids
        if beyond := [one for one in ids if not 0 <= one < self.vocab_size]:
            raise self._refusal(f"stop_token_ids with {beyond[0]}", f"token ids must be in 0..{self.vocab_size - 1}")
        if sampling.min_tokens and 2 * len(set(ids)) > self.vocab_size:
            allowed = f"they forbid at most half of the {self.vocab_size} tokens, or there may be none to sample"
            raise self._refusal(f"{len(set(ids))} stop_token_ids with min_tokens={sampling.min_tokens}", allowed)

    def _ids(self, what: str, ids: Sequence[int] | Tokens) -> None:
        if not len(ids):
            raise self._refusal(what, "it has no tokens")
        array = np.asarray(ids)
        least, most = int(array.min()), int(array.max())
        if least < 0 or most >= self.vocab_size:
            allowed = f"token ids must be in 0..{self.vocab_size - 1}, got {least}..{most}"
            raise self._refusal(what, allowed)

    def _refusal(self, what: str, why: str) -> UnsupportedParameter:
        return UnsupportedParameter(f"Engine {self.engine.name!r} cannot honour {what}: {why.rstrip('.')}.")
