"""The interface to a server that is vLLM's or SGLang's own, for NativeEngine (native.py)."""

from __future__ import annotations

import json
import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from skyrl_train.engines.base import SampleRequest
from skyrl_train.engines.http.connection import Connection
from skyrl_train.errors import EngineError, UnsupportedParameter
from skyrl_train.listening import API_KEY


@dataclass(frozen=True, slots=True)
class Sampled:
    """A server's answer to a request; lists are [L] for L sampled tokens."""

    token_ids: list[int]
    logprobs: list[float]
    """nats, temperature-scaled, without truncation; at temperature 1 if greedy."""
    stop_reason: str
    """stop | length | abort"""
    cached_tokens: int = 0


class NativeServer(ABC):
    """One kind of server: its routes and parameters. A call that fails raises EngineError or DeadlineExceeded."""

    kind: str
    """E.g. "vLLM 0.32.0"; set by `start`, as are the other attributes."""
    max_model_len: int
    SAMPLING: ClassVar = frozenset({"temperature", "stop", "stop_token_ids", "ignore_eos"})
    """SamplingParams fields that a server may support: those that leave both log-probs of a token equal."""
    sampling: frozenset[str]
    """The fields that this server supports."""
    seeds: bool
    refusals: Mapping[str, str]

    def __init__(self, connection: Connection, deadline_s: float):
        """`deadline_s`: the deadline of every call."""
        self.connection = connection
        self.deadline_s = deadline_s

    @abstractmethod
    async def start(self, deadline_s: float) -> None:
        """Wait for the server and find out what it supports.

        Raises EngineError if it is of another kind, or was started with wrong options.
        """

    @abstractmethod
    async def sample(self, rid: str, request: SampleRequest) -> Sampled:
        """Sample one request, under the id `rid`."""

    @abstractmethod
    async def abort(self, rids: Sequence[str]) -> None:
        """End these requests: they are answered with their tokens so far. Unknown ids are ignored."""

    @abstractmethod
    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs (nats, temperature 1) of all tokens but the first."""

    @abstractmethod
    async def load(self, folder: str) -> None:
        """Serve the weights of a Hugging Face folder, which the server must be able to read."""

    @abstractmethod
    async def reset_prefix_cache(self) -> None:
        """Forget cached prompts; to be called only while no request runs."""

    @abstractmethod
    async def sleep(self, level: int) -> frozenset[str]:
        """Free memory; returns the tags of what was freed: "weights", "kv_cache"."""

    @abstractmethod
    async def wake_up(self, tags: Sequence[str]) -> None:
        """Reallocate what `sleep` freed."""

    @abstractmethod
    async def check(self) -> None:
        """Raises EngineError if the server is not alive."""

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
        """Call a route; returns the JSON of the answer, or None. `hints`: HTTP status -> what to do about it.

        The call is repeated if the connection breaks, unless `once`: then repeating is up to the caller
        (`Connection.attempts`).
        """
        body = b"" if payload is None else json.dumps(payload, default=operator.index).encode()

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
        """The exception for an answer with an error status."""
        name, url = self.connection.name, self.connection.url
        if status == 401:
            hint = f"it does not accept this token: set {API_KEY} to the server's --api-key."
        else:
            hint = hints.get(status) or raw.decode(errors="replace")[:500]
        kind = UnsupportedParameter if status == 400 else EngineError
        return kind(f"Engine {name!r} at {url} answered {route} with HTTP status {status}: {hint}")
