"""Environments on other nodes: a pool over Ray actors, the environment hosts, each of which has a pool of workers.

In a host, deadlines, kills and replays of workers are those of a `WorkerPool`. The driver's `HostPool` spreads episodes
over the hosts, starts a lost host again, and rebuilds its episodes in another one.

Two Ray calls to a host are under way at most, as one costs the driver as much as ten calls in it. `call_episodes` takes
the calls that came up during the one before it; `answers` waits for answers, and returns all that there are.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any

from skyrl_train.config.secrets import redact
from skyrl_train.environments.pool import CLOSE_GRACE_S, EnvironmentPool, Episode, WorkerPool
from skyrl_train.errors import ConfigError, DeadlineExceeded, EnvironmentFailure, EnvironmentHostsLost, SkyRLError
from skyrl_train.tasks import unwatched, within

if TYPE_CHECKING:
    from skyrl_train.cluster.actors import Remote

log = logging.getLogger(__name__)

BEAT_S = 2.0
"""Maximum time between a host's signs of life."""
MAX_BATCH = 256
"""Calls, or answers, that one Ray call carries."""
SILENCE_S = 60.0
"""Time without a sign of life after which a host counts as lost: its process is stopped, or its node out of reach."""
MAX_LOST_CALLS = 3
"""Calls of one episode that may be under way in a host that is lost: they may be what kills the hosts."""
_MIN_RESTART_S, _MAX_RESTART_S = 1.0, 30.0
"""The pause before a restart doubles while a host that is started again is lost before it opens."""
_POLL_S = 0.25
_CLOSE_DEADLINE_S = 3 * CLOSE_GRACE_S

HostCall = tuple[int, int, str, Sequence[bytes], str, bytes]
"""The number of a call, that of its episode, env_class, history, op, frame."""
Reply = dict[str, Any] | EnvironmentFailure | ConfigError
Answer = tuple[int, Reply] | tuple[None, str]
"""The number of a call and its reply, or None and a warning."""


class EnvironmentHost(WorkerPool):
    """A WorkerPool in a Ray actor, whose coroutines a HostPool calls; takes a WorkerPool's arguments."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self._episodes: dict[int, Episode] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._answers: list[Answer] = []
        """Warnings that the driver has not confirmed."""
        self._confirmed = 0
        self._has_answers = asyncio.Event()

    async def open(self) -> str:
        """Begin. Returns the name of this machine."""
        await self.__aenter__()
        return socket.gethostname()

    async def call_episodes(self, calls: Sequence[HostCall]) -> None:
        """Begin packed calls. A call's `history` rebuilds an episode that is new to this host."""
        for call in calls:
            task = asyncio.ensure_future(self._answer(*call))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    async def answers(self, num_received: int) -> list[Answer]:
        """Return answers, as soon as there are any, or none after BEAT_S. The driver has received that many so far."""
        del self._answers[: num_received - self._confirmed]
        self._confirmed = num_received
        if not self._answers:
            self._has_answers.clear()
            with suppress(TimeoutError):
                await within(BEAT_S, self._has_answers.wait())
        return self._answers[:MAX_BATCH]

    async def end(self, num_received: int) -> list[Answer]:
        """Close all environments; returns the answers that are left."""
        await self.close()
        return self._answers[num_received - self._confirmed :]

    async def _answer(
        self, call: int, number: int, env_class: str, history: Sequence[bytes], op: str, frame: bytes
    ) -> None:
        reply: Reply = {}
        try:
            if op == "close":
                self.close_episode(self._episodes.pop(number))
            else:
                if number not in self._episodes:
                    self._episodes[number] = Episode(self, number, env_class, history=list(history))
                reply = await self.send(self._episodes[number], op, frame)
        except (EnvironmentFailure, ConfigError) as failure:
            reply = failure.with_traceback(None)
        except Exception as error:  # each call is answered, whatever goes wrong with one
            reply = EnvironmentFailure(type(error).__name__, str(error))
        self._add_answer((call, reply))

    def _warn(self, text: str) -> None:
        self._add_answer((None, text))

    def _add_answer(self, answer: Answer) -> None:
        self._answers.append(answer)
        self._has_answers.set()


class _Host:
    """The driver's view of one host."""

    def __init__(self, remote: Remote):
        self.remote = remote
        self.episodes: set[Episode] = set()
        self.is_lost = False
        self.closings: set[asyncio.Task[None]] = set()
        self._numbers = count()
        self._outbox: list[HostCall] = []
        self._sending: asyncio.Task[None] | None = None
        self._replies: dict[int, asyncio.Future[Reply]] = {}
        """Pending calls, by number."""
        self._num_received = 0

    async def call(self, episode: Episode, history: Sequence[bytes], op: str, frame: bytes) -> Reply:
        """Return the host's reply to a packed call. It is cancelled if the host is lost."""
        if self.is_lost:
            raise asyncio.CancelledError
        number = next(self._numbers)
        self._outbox.append((number, episode.number, episode.env_class, history, op, frame))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.ensure_future(self._send())
        self._replies[number] = reply = asyncio.get_running_loop().create_future()
        return await reply

    async def _send(self) -> None:
        try:
            while self._outbox:
                batch = self._outbox[:MAX_BATCH]
                del self._outbox[:MAX_BATCH]
                await self.remote.call_within(math.inf, "call_episodes", batch)
        except Exception:
            if not self.is_lost:
                self.remote.kill()  # so that `receive` raises, too

    async def receive(self, silence_s: float) -> None:
        """Pass on the host's answers, without end. Raises how the host was lost."""
        while True:
            answers = asyncio.ensure_future(self.remote.call_within(math.inf, "answers", self._num_received))
            try:
                for _ in range(math.ceil(silence_s / _POLL_S)):  # not by the clock: a busy driver hears nobody
                    if (await asyncio.wait([answers], timeout=_POLL_S))[0]:
                        break
                else:
                    raise DeadlineExceeded(f"{self.remote.name}.answers", silence_s)
                self._take(answers.result())
            finally:
                answers.cancel()

    def _take(self, answers: Sequence[Answer]) -> None:
        self._num_received += len(answers)
        for answer in answers:
            if answer[0] is None:  # the host knows only the secrets of its own node
                log.warning("%s: %s", self.remote.name, redact(answer[1]))
            elif not (reply := self._replies.pop(answer[0])).done():  # else its caller was cancelled
                reply.set_result(answer[1])

    async def close(self) -> None:
        """Close all environments, and end the actor."""
        try:
            if self.closings:
                receiving = unwatched(asyncio.ensure_future(self.receive(SILENCE_S)))
                await asyncio.wait(self.closings, timeout=CLOSE_GRACE_S)
                receiving.cancel()
            self._take(await self.remote.call_within(_CLOSE_DEADLINE_S, "end", self._num_received))
        finally:
            self.lose()

    def close_episode(self, episode: Episode) -> None:
        """Close an environment after its last call, which may still be under way."""
        closing = asyncio.ensure_future(self._close_episode(episode))
        self.closings.add(closing)
        closing.add_done_callback(self.closings.discard)

    async def _close_episode(self, episode: Episode) -> None:
        if episode.under_way is not None:
            await asyncio.wait([episode.under_way])
        await self.call(episode, (), "close", b"")

    def lose(self) -> None:
        """Kill the actor, and have each episode that was here start elsewhere."""
        self.is_lost = True
        for episode in self.episodes:
            episode.place = None
        for reply in self._replies.values():
            reply.cancel()
        self.remote.kill()


class HostPool(EnvironmentPool):
    """Runs environments in `count` hosts: Ray actors, each with a WorkerPool, whose failures it passes on.

    A host is lost if its actor or node dies, or if it gives no sign of life for `silence_s`. Its episodes are rebuilt
    in another host, and nobody is blamed: the calls that were under way are made again, but for episodes that are not
    `replayable`, and those that have met the loss of MAX_LOST_CALLS hosts, which fail with "environment_died". A lost
    host is started again, as soon as there is room. While there is no host, calls wait, for `deadline_s` at most: after
    that they raise EnvironmentHostsLost, which ends the run.

    Example:
        async with HostPool(2, lambda index: spawn(cluster, "...hosts:EnvironmentHost", settings, ...)) as pool:
            episode = await pool.start("gsm8k", prompt)
    """

    def __init__(
        self,
        count: int,
        spawn: Callable[[int], Remote],
        *,
        deadline_s: float = 180.0,
        silence_s: float = SILENCE_S,
    ):
        """`spawn` starts the actor with an EnvironmentHost that has the index given, and does not wait for it."""
        super().__init__()
        self.deadline_s = deadline_s
        self.silence_s = silence_s
        self.hosts: list[_Host] = []
        """Hosts that are open."""
        self._count = count
        self._spawn = spawn
        self._keepers: list[asyncio.Task[None]] = []
        self._cause = ""
        """How the last host was lost."""

    async def __aenter__(self) -> HostPool:
        """Start all hosts. Raises EnvironmentHostsLost if they are not there within `deadline_s`."""
        self.loop = asyncio.get_running_loop()
        opened = [self.loop.create_future() for _ in range(self._count)]
        self._keepers = [self.loop.create_task(self._keep(index, one)) for index, one in enumerate(opened)]
        try:
            await within(self.deadline_s, asyncio.gather(*opened))
        except BaseException as error:
            there = len(self.hosts)
            await self.close()
            if not isinstance(error, Exception):
                raise
            late = isinstance(error, TimeoutError) and not isinstance(error, SkyRLError)
            how = f" within trainer.timeouts.environment_hosts_s={self.deadline_s:g} s" if late else f": {error}"
            raise EnvironmentHostsLost(f"environment.hosts={self._count}: {there} of them started{how}") from error
        return self

    async def close(self) -> None:
        """Close all environments and end all hosts."""
        self._closing = True
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for error in await asyncio.gather(*(host.close() for host in self.hosts), return_exceptions=True):
            if isinstance(error, BaseException):
                log.warning("an environment host was not closed: %s", error)
        self.hosts.clear()

    async def send(self, episode: Episode, op: str, frame: bytes) -> dict[str, Any]:
        """Return the environment's answer to a packed call, which is made again if its host is lost."""
        while True:
            history: Sequence[bytes] = ()
            if episode.place is None:
                episode.fail_unless_replayable(self._cause)
                host = await self._choose(episode)
                host.episodes.add(episode)
                episode.place, history = host, tuple(episode.history)
            self._refuse_failed(episode)
            host = episode.place
            call = unwatched(asyncio.ensure_future(self._call(host, episode, history, op, frame)))
            episode.under_way = call
            await asyncio.wait([call])  # it goes on if this is cancelled
            try:
                reply = call.result()
            except (Exception, asyncio.CancelledError) as error:  # the latter from `_Host.lose`
                self._lose(host, error)
                episode.lost_calls += 1
                if episode.lost_calls >= MAX_LOST_CALLS:
                    detail = f"{episode.env_class} in {op}: its host was lost {MAX_LOST_CALLS} times"
                    episode.fail(EnvironmentFailure("environment_died", detail))
            else:
                if reply is not None:
                    return reply

    async def _call(
        self, host: _Host, episode: Episode, history: Sequence[bytes], op: str, frame: bytes
    ) -> dict[str, Any] | None:
        """Return the answer of a host, and record it; None if the episode has failed."""
        reply = await host.call(episode, history, op, frame)
        if isinstance(reply, EnvironmentFailure):
            episode.fail(self._failure(reply.kind, reply.detail))
            return None
        if isinstance(reply, ConfigError):
            episode.fail(reply)
            return None
        if episode.place is host:
            episode.history.append(frame)
            episode.replayable = reply.get("replayable", episode.replayable)
        return reply

    async def _choose(self, episode: Episode) -> _Host:
        """Return the host with the fewest episodes. Raises EnvironmentHostsLost if there is none for `deadline_s`."""
        for _ in range(math.ceil(self.deadline_s / _POLL_S)):  # not by the clock: a busy driver starts nothing
            self._refuse_failed(episode)
            if self.hosts:
                return min(self.hosts, key=lambda host: len(host.episodes))
            await asyncio.sleep(_POLL_S)
        raise EnvironmentHostsLost(
            f"environment.hosts={self._count}: all of them are lost, and none could be started again within "
            f"trainer.timeouts.environment_hosts_s={self.deadline_s:g} s. The last one: {self._cause}"
        )

    async def _keep(self, index: int, opened: asyncio.Future[None]) -> None:
        """Start host `index`, and start it again whenever it was lost."""
        pause = _MIN_RESTART_S
        while True:
            host = None
            try:
                host = _Host(self._spawn(index))
                machine = await host.remote.call_within(math.inf, "open")  # it may have to wait for room
                log.info("%s runs on %s", host.remote.name, machine)
                self.hosts.append(host)
                pause = _MIN_RESTART_S
                if not opened.done():
                    opened.set_result(None)
                await host.receive(self.silence_s)
            except asyncio.CancelledError:
                if host is not None and host not in self.hosts:  # else `close` ends it
                    host.remote.kill()
                raise
            except Exception as error:
                if not opened.done():  # what is wrong now is wrong for ever
                    if host is not None:
                        host.lose()
                    opened.set_exception(error)
                    return
                if host is not None:
                    self._lose(host, error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MAX_RESTART_S)

    def _lose(self, host: _Host, error: BaseException) -> None:
        """Abandon a host, once; its keeper then starts it again."""
        if host.is_lost or self._closing:
            return
        self._cause = str(error)
        log.warning(
            "%s is lost, with %d episodes, and is started again: %s", host.remote.name, len(host.episodes), error
        )
        if host in self.hosts:
            self.hosts.remove(host)
        host.lose()
