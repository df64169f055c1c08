"""Episodes in places that can be lost: which call goes where, and what becomes of it when its place is gone.

A place is a process on this machine (host.py), or a pool of such processes somewhere in the cluster (hosts.py).
"""

from __future__ import annotations

import asyncio
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from skyrl_train.config.secrets import redact
from skyrl_train.data.json_values import jsonable
from skyrl_train.data.messages import Message, Prompt
from skyrl_train.environments.base import BAD_ROW, StepOutput
from skyrl_train.errors import ConfigError, EnvironmentFailure
from skyrl_train.messages import visible
from skyrl_train.metrics import NameLimit

log = logging.getLogger(__name__)

MAX_FRAME = 64 * 2**20
"""Maximum bytes of one message; a larger observation fails its episode."""
MAX_KINDS, MAX_KIND_LENGTH = 64, 100
"""Kinds of failure that environments may introduce, and characters of one: each becomes the name of a metric."""
OTHER_KIND = "other"
"""The kind of failures beyond MAX_KINDS."""


class Place(Protocol):
    """Where environments live, as the driver sees it."""

    episodes: set[HostedEpisode]

    def submit(self, call: WireCall) -> None:
        """Send a call; those of an episode arrive in the order of this."""


@dataclass(slots=True, eq=False)
class WireCall:
    """A call of an environment, as it is sent."""

    op: str
    frame: bytes
    """JSON: see `pack`."""
    episode: HostedEpisode | None = None
    answer: asyncio.Future[dict[str, Any]] | None = None
    """None if nothing waits for the answer: hello, replays and close."""


@dataclass(slots=True, eq=False)
class HostedEpisode:
    """One environment, from `EnvironmentPool.start` to `close`."""

    pool: EnvironmentPool
    number: int
    env_class: str
    messages: list[Message] = field(default_factory=list)
    """The messages that the environment opened with; render these instead of the row's."""
    metadata: dict[str, Any] = field(default_factory=dict)
    replayable: bool = True
    """`TextEnv.replayable`; valid once the environment has opened."""
    _place: Place | None = None
    _history: list[bytes] = field(default_factory=list)
    """Frames that were answered; sending them to another place rebuilds the environment there."""
    _failure: Exception | None = None
    _lost_calls: int = 0
    """How often a host was lost while it had a call of this episode."""

    async def step(self, text: str) -> StepOutput:
        """Send the model's text to the environment.

        Raises EnvironmentFailure; every later step then raises the same failure.
        """
        return StepOutput(**await self.pool.call(self, "step", text=text))

    async def close(self) -> None:
        """Queue the environment's `close` and return; its errors are logged. Safe to call twice and after a failure."""
        self.pool.close_episode(self)

    def fail(self, failure: Exception) -> None:
        """What every later call raises; the first failure stays."""
        self._failure = self._failure or failure


class EnvironmentPool(ABC):
    """Runs environments that may hang, crash or be lost. Use it as an async context manager.

    A failure fails one episode: it raises EnvironmentFailure with the kind under which it is counted. Episodes of a
    place that was lost are rebuilt in another one when they are next used, from their opening and the recorded texts;
    those that are not `replayable` fail with "environment_died".
    """

    loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        self._warned: set[tuple[str, str]] = set()
        self._next_number = 0
        self._fatal: Exception | None = None
        self._closing = False
        self._kinds = NameLimit(MAX_KINDS, MAX_KIND_LENGTH)

    @abstractmethod
    async def __aenter__(self) -> EnvironmentPool:
        """Begin; a ConfigError or SkyRLError says what cannot be had."""

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    @abstractmethod
    async def close(self) -> None:
        """Close all environments; none is left running on return."""

    @abstractmethod
    def _choose(self) -> Place:
        """The place for an episode that has none."""

    async def start(self, env_class: str, prompt: Prompt) -> HostedEpisode:
        """Start an episode: construct the environment and call its `init` with the prompt's messages and extras.

        Raises EnvironmentFailure, or ConfigError for an unknown environment.
        """
        episode = HostedEpisode(self, self._next_number, env_class)
        self._next_number += 1
        try:
            opened = await self.call(
                episode, "start", env_class=env_class, messages=prompt.messages, extras=prompt.env_extras
            )
        except (asyncio.CancelledError, EnvironmentFailure):
            self.close_episode(episode)
            raise
        episode.messages, episode.metadata = opened["messages"], opened["metadata"]
        return episode

    async def call(self, episode: HostedEpisode, op: str, **arguments: Any) -> dict[str, Any]:
        """The environment's answer. Raises EnvironmentFailure, or what ends the run."""
        if not hasattr(self, "loop"):
            raise RuntimeError("the pool is used outside `async with`")
        self._refuse_failed(episode)
        try:
            frame = pack({"op": op, "id": episode.number, **arguments})
        except (TypeError, ValueError, OverflowError, RecursionError) as error:  # texts always pass
            raise EnvironmentFailure(BAD_ROW, f"the row holds what JSON cannot carry: {error}") from error
        return await self.submit(episode, op, frame)

    def submit(self, episode: HostedEpisode, op: str, frame: bytes) -> asyncio.Future[dict[str, Any]]:
        """Send a call that was packed already. Raises as `call` does for an episode that has failed."""
        self._refuse_failed(episode)
        answer: asyncio.Future[dict[str, Any]] = self.loop.create_future()
        self._dispatch(WireCall(op, frame, episode, answer))
        return answer

    def close_episode(self, episode: HostedEpisode) -> None:
        """See HostedEpisode.close."""
        place, episode._place = episode._place, None
        if place is not None and not self._closing:
            place.episodes.discard(episode)
            place.submit(WireCall("close", pack({"op": "close", "id": episode.number}), episode))
        episode._history.clear()
        episode.fail(EnvironmentFailure("closed", "the episode is closed"))

    def _refuse_failed(self, episode: HostedEpisode) -> None:
        if self._closing:  # an answer that arrived during `close` let the episode go on
            raise EnvironmentFailure("host_closed", "the environment host was closed")
        failure = self._fatal or episode._failure
        if failure is not None:
            raise failure

    def _dispatch(self, call: WireCall) -> None:
        """Send a call to its episode's place; an episode without one is first rebuilt, call by call."""
        episode = call.episode
        assert episode is not None
        if episode._place is None:
            episode._place = self._choose()
            episode._place.episodes.add(episode)
            for index, frame in enumerate(episode._history):
                episode._place.submit(WireCall("step" if index else "start", frame, episode))
        episode._place.submit(call)

    def _answered(self, place: Place, call: WireCall, reply: dict[str, Any]) -> None:
        """An environment has answered to `start`, `step` or `close`."""
        error, episode = reply.get("error"), call.episode
        if error is not None:
            kind = error if self._kinds.admits(error) else OTHER_KIND
            detail = reply["detail"] if kind == error else f"{error:.{MAX_KIND_LENGTH}}: {reply['detail']}"
            if call.op == "close":
                self._warn_of_close(episode.env_class if episode else "", kind, detail)
            elif episode is not None:
                episode.fail(ConfigError(detail) if reply.get("fatal") else EnvironmentFailure(kind, detail))
        elif episode is not None and call.answer is not None and episode._place is place:
            episode._history.append(call.frame)
            episode.replayable = reply.get("replayable", episode.replayable)
        self._settle(call, reply)

    def _warn_of_close(self, env_class: str, error: str, detail: str) -> None:
        """Once for each kind: all episodes of a run may end so."""
        if (env_class, error) not in self._warned:
            self._warned.add((env_class, error))
            log.warning("closing %s: %s: %s (more of it is not said)", env_class, error, visible(redact(detail)))

    def _settle(self, call: WireCall, reply: dict[str, Any] | None = None) -> None:
        """Resolve `call` with the reply, or with its episode's failure."""
        if call.answer is None or call.answer.done():  # done: the waiting task was cancelled
            return
        failure = self._fatal or (call.episode._failure if call.episode else None)
        if failure is not None:
            call.answer.set_exception(failure)
        else:
            assert reply is not None
            call.answer.set_result(reply)

    def _move(self, place: Place, calls: Iterable[WireCall], detail: str) -> None:
        """A place is lost: send its calls again, elsewhere, but for those of episodes that have failed or must."""
        for episode in place.episodes:
            episode._place = None
            if episode._history and not episode.replayable:
                failure = f"{episode.env_class} is not replayable, and its process was lost: {detail}"
                episode.fail(EnvironmentFailure("environment_died", failure))
        for call in calls:
            if call.answer is None or call.answer.done():
                continue
            if self._fatal or (call.episode and call.episode._failure):
                self._settle(call)
            else:
                self._dispatch(call)


def pack(message: Mapping[str, Any], default: Callable[[Any], Any] = jsonable) -> bytes:
    """Return a message as JSON in ASCII, so that lone surrogates pass unchanged.

    Raises EnvironmentFailure "too_large" for more than MAX_FRAME, and as `json.dumps` does for what JSON cannot carry.
    """
    body = json.dumps(message, default=default).encode("ascii")
    if len(body) > MAX_FRAME:
        raise EnvironmentFailure("too_large", f"a message of {len(body)} bytes; at most {MAX_FRAME} pass")
    return body
