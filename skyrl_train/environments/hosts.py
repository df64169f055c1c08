"""Environments in pools of processes that are elsewhere in a cluster: both ends of the wire to them.

An actor holds a `HostServer`, which is an `EnvironmentHost` that is asked from afar: deadlines of calls, the killing of
processes and their replay happen there as they do beside a driver. The driver holds `EnvironmentHosts`: it spreads
episodes over these actors, starts an actor again that was lost, and replays its episodes in another one.

Wire: two calls of the actor are under way at most. `send` takes all calls of environments that have come up since the
one before it, `answers` returns all answers since the one before it, and an empty list after a while: a sign of life.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from skyrl_train.environments.host import CLOSE_GRACE_S, EnvironmentHost
from skyrl_train.environments.pool import EnvironmentPool, HostedEpisode, WireCall
from skyrl_train.errors import ConfigError, DeadlineExceeded, EnvironmentFailure, EnvironmentHostsLost, SkyRLError
from skyrl_train.tasks import within

if TYPE_CHECKING:
    from skyrl_train.cluster.actors import Remote

log = logging.getLogger(__name__)

BEAT_S = 2.0
"""How long a host that has nothing to say says nothing."""
GATHER_S = 0.01
"""How long each end gathers what it sends at once: a message costs the driver as much as some ten calls in it."""
SILENCE_S = 60.0
"""How long nothing is heard of a host until it counts as lost: its process is stopped, or its node is out of reach."""
MAX_SENT = 16 * 2**20
"""Bytes of calls that are sent at once, unless a single one is larger."""
MAX_LOST_CALLS = 3
"""How often an episode may be under way in a host that is lost: it may be what kills them."""
_RESTARTS_AFTER_S, _LONGEST_PAUSE_S = 1.0, 30.0
"""The pause doubles while a host that is started again is lost before it opens."""
_LOOKS_EVERY_S = 0.25
_CLOSES_S = 3 * CLOSE_GRACE_S
_UNASKED = -1

Sent = tuple[int, int, str, str, bytes]
"""The number of a call (_UNASKED: nobody waits for the answer), that of its episode, env_class, op, frame."""
Answer = tuple[int, dict[str, Any]]
"""The number of a call, and what the environment's process answered."""

# ----------------------------------------------------------------------------------------------------- actor's end


class HostServer:
    """An EnvironmentHost for a driver in another process; takes that class's arguments."""

    def __init__(self, **settings: Any):
        self._host = _TellingHost(self._tell, **settings)
        self._episodes: dict[int, HostedEpisode] = {}
        self._answers: list[Answer] = []
        self._some = asyncio.Event()

    async def open(self) -> str:
        """Begin; returns the name of this machine."""
        await self._host.__aenter__()
        return socket.gethostname()

    async def send(self, calls: Sequence[Sent]) -> None:
        """Take calls, in their order."""
        for number, episode, env_class, op, frame in calls:
            if op == "close":
                if (closing := self._episodes.pop(episode, None)) is not None:
                    self._host.close_episode(closing)
                continue
            if op == "start":
                self._episodes[episode] = HostedEpisode(self._host, episode, env_class)
            try:
                answer = self._host.submit(self._episodes[episode], op, frame)
            except Exception as failure:  # each call is answered, whatever goes wrong with one
                self._tell(number, _as_answer(failure))
            else:
                answer.add_done_callback(partial(self._answered, number))

    async def answers(self) -> list[Answer]:
        """What there is to say, as soon as there is anything, or nothing after BEAT_S."""
        if not self._answers:
            with suppress(TimeoutError):
                await within(BEAT_S, self._some.wait())
        if self._answers:
            await asyncio.sleep(GATHER_S)
        told, self._answers = self._answers, []
        self._some.clear()
        return told

    async def close(self) -> None:
        """Close all environments and end all processes."""
        await self._host.close()

    def _answered(self, number: int, answer: asyncio.Future[dict[str, Any]]) -> None:
        failure = answer.exception()
        self._tell(number, answer.result() if failure is None else _as_answer(failure))

    def _tell(self, number: int, answer: dict[str, Any]) -> None:
        if number != _UNASKED:
            self._answers.append((number, answer))
            self._some.set()


class _TellingHost(EnvironmentHost):
    """Has the driver warn of what goes wrong when environments close: its log is the run's."""

    def __init__(self, tell: Callable[[int, dict[str, Any]], None], **settings: Any):
        super().__init__(**settings)
        self._tell = tell

    def _warn_of_close(self, env_class: str, error: str, detail: str) -> None:
        if (env_class, error) not in self._warned:
            self._warned.add((env_class, error))
            self._tell(_WARNING, {"env_class": env_class, "error": error, "detail": detail})


_WARNING = -2
"""In place of a call's number: an environment's `close` has failed."""


def _as_answer(failure: BaseException) -> dict[str, Any]:
    if isinstance(failure, EnvironmentFailure):
        return {"error": failure.kind, "detail": failure.detail}
    return {"error": type(failure).__name__, "detail": str(failure), "fatal": isinstance(failure, ConfigError)}


# ---------------------------------------------------------------------------------------------------- driver's end


class _Host:
    """The driver's view of one actor."""

    def __init__(self, pool: EnvironmentHosts, remote: Remote):
        self.remote = remote
        self.episodes: set[HostedEpisode] = set()
        self.calls: dict[int, WireCall] = {}
        """Those that have not been answered, by number."""
        self._pool = pool
        self._numbers = itertools.count()
        self._outbox: list[Sent] = []
        self._sending: asyncio.Task[None] | None = None

    def submit(self, call: WireCall) -> None:
        """See pool.Place."""
        assert call.episode is not None
        number = _UNASKED
        if call.answer is not None:
            number = next(self._numbers)
            self.calls[number] = call
        self._outbox.append((number, call.episode.number, call.episode.env_class, call.op, call.frame))
        if self._sending is None or self._sending.done():
            self._sending = self._pool.loop.create_task(self._send())

    async def _send(self) -> None:
        """Send all there is; what comes up meanwhile is sent at once when that has arrived."""
        with suppress(Exception):  # `receive` meets the same end, and says how it came
            while self._outbox:
                await asyncio.sleep(GATHER_S)
                batch = list(_first(self._outbox))
                del self._outbox[: len(batch)]
                await self.remote.call_within(math.inf, "send", batch)

    async def receive(self, silence_s: float) -> None:
        """Pass on what the host says, without an end. Raises how it was lost."""
        while True:
            for number, reply in await self._answers(silence_s):
                if number == _WARNING:
                    self._pool._warn_of_close(**reply)
                else:
                    self._pool._answered(self, self.calls.pop(number), reply)

    async def _answers(self, silence_s: float) -> list[Answer]:
        answers = asyncio.ensure_future(self.remote.call_within(math.inf, "answers"))
        try:
            for _ in range(math.ceil(silence_s / _LOOKS_EVERY_S)):  # not by the clock: a busy driver hears nobody
                if (await asyncio.wait([answers], timeout=_LOOKS_EVERY_S))[0]:
                    found: list[Answer] = answers.result()
                    return found
            raise DeadlineExceeded(f"{self.remote.name}.answers", silence_s)
        finally:
            answers.cancel()

    def end(self) -> None:
        """Kill the actor; nothing is sent any more."""
        if self._sending is not None:
            self._sending.cancel()
        self.remote.kill()


def _first(outbox: Sequence[Sent]) -> Iterator[Sent]:
    size = 0
    for sent in outbox:
        size += len(sent[-1])
        if size > MAX_SENT and size > len(sent[-1]):
            return
        yield sent


class EnvironmentHosts(EnvironmentPool):
    """Runs environments in `count` actors, each with a pool of processes: an `EnvironmentHost` in other places.

    Failures of episodes are those of `EnvironmentHost`. A host is lost if its actor or node dies, or if nothing is
    heard of it for `silence_s`. Its episodes are rebuilt in another host, and nobody is blamed: the calls that were
    under way are made again, but for episodes that are not `replayable`, and those that have met the loss of
    MAX_LOST_CALLS hosts, which fail with "environment_died". A lost host is started again, as soon as there is room.
    While there is no host, calls wait, for `deadline_s` at most: after that they raise EnvironmentHostsLost, which ends
    the run.

    Example:
        async with EnvironmentHosts(2, lambda index: spawn(cluster, "...hosts:HostServer", settings, ...)) as hosts:
            episode = await hosts.start("gsm8k", prompt)
    """

    def __init__(
        self,
        count: int,
        spawn: Callable[[int], Remote],
        *,
        deadline_s: float = 180.0,
        silence_s: float = SILENCE_S,
    ):
        """`spawn` starts the actor with a HostServer that has the index given, and does not wait for it."""
        super().__init__()
        self._count = count
        self._spawn = spawn
        self._deadline_s = deadline_s
        self._silence_s = silence_s
        self._hosts: list[_Host] = []
        """Those that are open."""
        self._restarters: list[asyncio.Task[None]] = []
        self._waiting: list[WireCall] = []
        """While there is no host."""
        self._without: asyncio.Task[None] | None = None
        self._cause = ""
        """How the last one was lost."""

    async def __aenter__(self) -> EnvironmentHosts:
        """Start all hosts. Raises EnvironmentHostsLost if they are not there within `deadline_s`."""
        self.loop = asyncio.get_running_loop()
        opened = [self.loop.create_future() for _ in range(self._count)]
        self._restarters = [self.loop.create_task(self._keep(index, one)) for index, one in enumerate(opened)]
        try:
            await within(self._deadline_s, asyncio.gather(*opened))
        except BaseException as error:
            there = len(self._hosts)
            await self.close()
            if not isinstance(error, Exception):
                raise
            late = isinstance(error, TimeoutError) and not isinstance(error, SkyRLError)
            how = f" within trainer.timeouts.environment_hosts_s={self._deadline_s:g} s" if late else f": {error}"
            raise EnvironmentHostsLost(f"environment.hosts={self._count}: {there} of them started{how}") from error
        return self

    async def close(self) -> None:
        """Close all environments and end all hosts."""
        self._closing = True
        for task in [*self._restarters, *([] if self._without is None else [self._without])]:
            task.cancel()
        await asyncio.gather(*self._restarters, return_exceptions=True)
        closed = EnvironmentFailure("host_closed", "the environment hosts were closed")
        for call in [*self._waiting, *(call for host in self._hosts for call in host.calls.values())]:
            if call.answer is not None and not call.answer.done():
                call.answer.set_exception(closed)
        endings = [host.remote.call_within(_CLOSES_S, "close") for host in self._hosts]
        for error in await asyncio.gather(*endings, return_exceptions=True):
            if isinstance(error, BaseException):
                log.warning("an environment host was not closed: %s", error)
        for host in self._hosts:
            host.end()
        self._hosts.clear()

    async def _keep(self, index: int, opened: asyncio.Future[None]) -> None:
        """Have host `index` run: start it, and start it again whenever it was lost."""
        pause = _RESTARTS_AFTER_S
        while True:
            host = None
            try:
                host = _Host(self, self._spawn(index))
                machine = await host.remote.call_within(math.inf, "open")  # it may have to wait for room
                log.info("%s runs on %s", host.remote.name, machine)
                self._begin(host)
                pause = _RESTARTS_AFTER_S
                if not opened.done():
                    opened.set_result(None)
                await host.receive(self._silence_s)
            except asyncio.CancelledError:
                if host is not None and host not in self._hosts:  # else `close` ends it
                    host.end()
                raise
            except Exception as error:
                if host is not None:
                    host.end()
                if not opened.done():  # what is wrong now is wrong for ever
                    opened.set_exception(error)
                    return
                if host is not None:
                    self._lose(host, error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _begin(self, host: _Host) -> None:
        self._hosts.append(host)
        if self._without is not None:
            self._without.cancel()
            self._without = None
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            if call.answer is not None and not call.answer.done():
                self._dispatch(call)

    def _lose(self, host: _Host, error: Exception) -> None:
        """A host is gone: its episodes go to others."""
        self._cause = f" The last one: {error}"
        log.warning(
            "%s is lost, with %d episodes, and is started again: %s", host.remote.name, len(host.episodes), error
        )
        if host not in self._hosts:  # it never opened
            return
        self._hosts.remove(host)
        if not self._hosts:
            self._without = self.loop.create_task(self._give_up())
        calls = list(host.calls.values())
        for call in calls:
            assert call.episode is not None
            call.episode._lost_calls += 1
            if call.episode._lost_calls >= MAX_LOST_CALLS:
                detail = f"{call.episode.env_class} in {call.op}: its host was lost {MAX_LOST_CALLS} times"
                call.episode.fail(EnvironmentFailure("environment_died", detail))
        self._move(host, calls, str(error))

    async def _give_up(self) -> None:
        """After a while without hosts, fail all calls that wait."""
        for _ in range(math.ceil(self._deadline_s / _LOOKS_EVERY_S)):  # not by the clock: a busy driver starts nothing
            await asyncio.sleep(_LOOKS_EVERY_S)
        for call in self._waiting:
            if call.answer is not None and not call.answer.done():
                call.answer.set_exception(self._none_left())
        self._waiting.clear()

    def _none_left(self) -> EnvironmentHostsLost:
        return EnvironmentHostsLost(
            f"environment.hosts={self._count}: all of them are lost, and none could be started again within "
            f"trainer.timeouts.environment_hosts_s={self._deadline_s:g} s.{self._cause}"
        )

    def _choose(self) -> _Host:
        return min(self._hosts, key=lambda host: (len(host.episodes), len(host.calls)))

    def _dispatch(self, call: WireCall) -> None:
        assert call.episode is not None
        if self._hosts or call.episode._place is not None:
            super()._dispatch(call)
        elif self._without is not None and self._without.done():
            assert call.answer is not None
            call.answer.set_exception(self._none_left())
        else:
            self._waiting.append(call)
