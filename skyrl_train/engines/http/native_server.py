"""What a NativeEngine (native.py) wants of a server that is vLLM's or SGLang's own."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from skyrl_train.engines.base import SampleRequest
from skyrl_train.engines.http.connection import Connection
from skyrl_train.engines.http.wire import API_KEY
from skyrl_train.errors import EngineError, UnsupportedParameter


@dataclass(frozen=True, slots=True)
class Sampled:
    """A server's answer; lists are [L], L sampled tokens."""

    token_ids: list[int]
    logprobs: list[float]
    """nats, temperature-scaled, of nothing truncated; at temperature 1 where greedy."""
    stop_reason: str
    """stop | length | abort"""
    cached_tokens: int = 0


class NativeServer(ABC):
    """One kind of server: its routes and words. Every call raises EngineError or DeadlineExceeded when it fails."""

    kind: str
    """E.g. "vLLM 0.32.0"; known after `start`, as are the next three."""
    max_model_len: int
    SAMPLING: ClassVar = frozenset({"temperature", "stop", "stop_token_ids", "ignore_eos"})
    """Names of SamplingParams fields that a server may honour: those with which both of its log-probs are the same."""
    sampling: frozenset[str]
    """Those that this one honours."""
    seeds: bool
    refusals: Mapping[str, str]

    def __init__(self, connection: Connection, deadline_s: float):
        """`deadline_s`: of every call."""
        self.connection = connection
        self.deadline_s = deadline_s

    @abstractmethod
    async def start(self, deadline_s: float) -> None:
        """Wait for the server and learn what it can do. EngineError where it is another one, or started wrongly."""

    @abstractmethod
    async def sample(self, rid: str, request: SampleRequest) -> Sampled: ...

    @abstractmethod
    async def abort(self, rids: Sequence[str]) -> None:
        """Those of them that the server knows are answered with what they have."""

    @abstractmethod
    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs (nats, temperature 1) of every token after the first."""

    @abstractmethod
    async def load(self, folder: str) -> None:
        """Serve the weights of a Hugging Face folder that the server can read."""

    @abstractmethod
    async def reset_prefix_cache(self) -> None:
        """Nothing is under way."""

    @abstractmethod
    async def sleep(self, level: int) -> frozenset[str]:
        """What was given back: "weights", "kv_cache"."""

    @abstractmethod
    async def wake_up(self, tags: Sequence[str]) -> None: ...

    @abstractmethod
    async def check(self) -> None:
        """EngineError when it does not live."""

    async def ask(
        self,
        verb: str,
        route: str,
        payload: Any = None,
        *,
        params: Mapping[str, str] | None = None,
        deadline_s: float | None = None,
        hints: Mapping[int, str] | None = None,
        once: bool = False,
    ) -> Any:
        """The JSON of an answer, or None. `hints`: status -> what to do about it.

        Sent again where the connection broke; with `once` the caller does that (`Connection.attempts`).
        """
        body = b"" if payload is None else json.dumps(payload).encode()

        async def attempt(_: int) -> tuple[int, bytes]:
            return await self.connection.once(verb, route, body, params)

        work = attempt(0) if once else self.connection.attempts(route, attempt, repeatable=True)
        status, raw = await self.connection.within(route, deadline_s or self.deadline_s, work)
        if status != 200:
            raise self.refusal(status, route, raw, hints or {})
        try:
            return json.loads(raw) if raw else None
        except ValueError:
            return None

    def refusal(self, status: int, route: str, raw: bytes, hints: Mapping[int, str]) -> EngineError:
        name, url = self.connection.name, self.connection.url
        if status == 401:
            hint = f"it does not accept this token: set {API_KEY} to the server's --api-key."
        else:
            hint = hints.get(status) or raw.decode(errors="replace")[:500]
        kind = UnsupportedParameter if status == 400 else EngineError
        return kind(f"Engine {name!r} at {url} answered {route} with HTTP status {status}: {hint}")
