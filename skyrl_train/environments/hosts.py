"""Environments on other nodes: a pool over Ray actors, called environment hosts, each of which is a WorkerPool.

In a host, a `WorkerPool` enforces deadlines, kills workers and replays their episodes. The driver's `HostPool`
distributes episodes over the hosts, restarts a lost host, and rebuilds its episodes in another one.

At most two Ray calls to a host are in flight, because a Ray call costs the driver as much as ten environment calls in
it. `call_episodes` sends the environment calls that accumulated during the previous Ray call. `answers` waits for
answers and returns all that are available.
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

from skyrl_train.aio import mark_exception_retrieved, with_timeout
from skyrl_train.config.redaction import redact
from skyrl_train.environments.pool import CLOSE_TIMEOUT_S, EnvironmentPool, Episode, WorkerPool
from skyrl_train.errors import ConfigError, DeadlineExceeded, EnvironmentFailure, EnvironmentHostsLost, SkyRLError

if TYPE_CHECKING:
    from skyrl_train.cluster.actors import ActorProxy

log = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S = 2.0
"""Maximum time between the heartbeats of a host."""
MAX_BATCH = 256
"""Maximum number of environment calls or answers in one Ray call."""
HEARTBEAT_TIMEOUT_S = 60.0
"""Time without a heartbeat after which a host counts as lost, for example because its node is unreachable."""
MAX_HOST_LOSSES = 3
"""Number of host losses during an episode's calls after which the episode fails, because it may kill the hosts."""
_MIN_RESTART_S, _MAX_RESTART_S = 1.0, 30.0
"""Pause before a restart. It doubles each time that a restarted host is lost before it opens."""
_POLL_S = 0.25
_CLOSE_TIMEOUT_S = 3 * CLOSE_TIMEOUT_S

HostCall = tuple[int, int, str, Sequence[bytes], str, bytes]
"""Number of the call, id of its episode, env_class, history, op and frame."""
Reply = dict[str, Any] | EnvironmentFailure | ConfigError
Answer = tuple[int, Reply] | tuple[None, str]
"""Number of a call and its reply, or None and the text of a warning."""


class EnvironmentHost(WorkerPool):
    """A WorkerPool in a Ray actor, whose coroutines a HostPool calls. It takes the arguments of a WorkerPool."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self._episodes: dict[int, Episode] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._answers: list[Answer] = []
        """Answers whose receipt the driver has not confirmed."""
        self._confirmed = 0
        self._has_answers = asyncio.Event()

    async def open(self) -> str:
        """Start the pool and return the host name of this machine."""
        await self.__aenter__()
        return socket.gethostname()

    async def call_episodes(self, calls: Sequence[HostCall]) -> None:
        """Begin encoded calls without waiting for their answers.

        If an episode is new to this host, the call's `history` rebuilds it first.
        """
        for call in calls:
            task = asyncio.ensure_future(self._answer(*call))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    async def answers(self, num_received: int) -> list[Answer]:
        """Wait for answers of environment calls and return up to MAX_BATCH of them, the oldest first.

        The list is empty if there are none within HEARTBEAT_INTERVAL_S seconds. The host keeps answers, and returns
        them again, until a later call confirms them.

        Args:
            num_received: Number of answers that the driver has received so far, all calls together. The host forgets
                these.

        Returns:
            Pairs of the call's number and its result or error, or of None and the text of a warning.
        """
        del self._answers[: num_received - self._confirmed]
        self._confirmed = num_received
        if not self._answers:
            self._has_answers.clear()
            with suppress(TimeoutError):
                await with_timeout(HEARTBEAT_INTERVAL_S, self._has_answers.wait())
        return self._answers[:MAX_BATCH]

    async def end(self, num_received: int) -> list[Answer]:
        """Close all environments and return the answers that the driver has not received.

        Args:
            num_received: Number of answers that the driver has received so far.
        """
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
        except Exception as error:  # the driver waits for an answer to every call
            reply = EnvironmentFailure(type(error).__name__, str(error))
        self._add_answer((call, reply))

    def _warn(self, text: str) -> None:
        self._add_answer((None, text))

    def _add_answer(self, answer: Answer) -> None:
        self._answers.append(answer)
        self._has_answers.set()


class _HostHandle:
    """The driver's end of one host.

    Args:
        remote: Proxy of the Ray actor.
    """

    def __init__(self, remote: ActorProxy):
        self.remote = remote
        self.episodes: set[Episode] = set()
        self.is_lost = False
        self.close_tasks: set[asyncio.Task[None]] = set()
        self._numbers = count()
        self._outbox: list[HostCall] = []
        self._sending: asyncio.Task[None] | None = None
        self._replies: dict[int, asyncio.Future[Reply]] = {}
        """Futures of the replies to the calls that are in flight, by the number of the call."""
        self._num_received = 0

    async def call(self, episode: Episode, history: Sequence[bytes], op: str, frame: bytes) -> Reply:
        """Send an encoded call and return the host's reply.

        Args:
            episode: Episode of the call.
            history: Encoded calls that rebuild the episode if it is new to this host.
            op: Name of the call: "start", "step" or "close".
            frame: The encoded call.

        Raises:
            asyncio.CancelledError: The host was lost.
        """
        if self.is_lost:
            raise asyncio.CancelledError
        number = next(self._numbers)
        self._outbox.append((number, episode.episode_id, episode.env_class, history, op, frame))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.ensure_future(self._send())
        self._replies[number] = reply = asyncio.get_running_loop().create_future()
        return await reply

    async def _send(self) -> None:
        try:
            while self._outbox:
                batch = self._outbox[:MAX_BATCH]
                del self._outbox[:MAX_BATCH]
                await self.remote.call_with_deadline(math.inf, "call_episodes", batch)
        except Exception:
            if not self.is_lost:
                self.remote.kill()  # so that `receive` raises too

    async def receive(self, heartbeat_timeout_s: float) -> None:
        """Receive the host's answers and deliver them to the waiting calls, until the host is lost.

        Args:
            heartbeat_timeout_s: Time without a heartbeat after which the host counts as lost, in seconds.

        Raises:
            DeadlineExceeded: The host sent no heartbeat for `heartbeat_timeout_s`.
            Exception: The Ray call failed, for example because the actor died.
        """
        while True:
            answers = asyncio.ensure_future(self.remote.call_with_deadline(math.inf, "answers", self._num_received))
            try:
                # counts polls and not seconds, because a busy driver does not receive heartbeats
                for _ in range(math.ceil(heartbeat_timeout_s / _POLL_S)):
                    if (await asyncio.wait([answers], timeout=_POLL_S))[0]:
                        break
                else:
                    raise DeadlineExceeded(f"{self.remote.name}.answers", heartbeat_timeout_s)
                self._take(answers.result())
            finally:
                answers.cancel()

    def _take(self, answers: Sequence[Answer]) -> None:
        self._num_received += len(answers)
        for answer in answers:
            if answer[0] is None:  # the host can redact only the secrets of its own node
                log.warning("%s: %s", self.remote.name, redact(answer[1]))
            elif not (reply := self._replies.pop(answer[0])).done():  # done: its caller was cancelled
                reply.set_result(answer[1])

    async def close(self) -> None:
        """Close all environments and kill the actor. Raises if the actor does not respond in time."""
        try:
            if self.close_tasks:
                receiving = mark_exception_retrieved(asyncio.ensure_future(self.receive(HEARTBEAT_TIMEOUT_S)))
                await asyncio.wait(self.close_tasks, timeout=CLOSE_TIMEOUT_S)
                receiving.cancel()
            self._take(await self.remote.call_with_deadline(_CLOSE_TIMEOUT_S, "end", self._num_received))
        finally:
            self.abandon()

    def close_episode(self, episode: Episode) -> None:
        """Start to close an environment after its latest call, which may still be in flight. Return immediately."""
        closing = asyncio.ensure_future(self._close_episode(episode))
        self.close_tasks.add(closing)
        closing.add_done_callback(self.close_tasks.discard)

    async def _close_episode(self, episode: Episode) -> None:
        if episode.pending_call is not None:
            await asyncio.wait([episode.pending_call])
        await self.call(episode, (), "close", b"")

    def abandon(self) -> None:
        """Kill the actor, cancel its calls in flight, and detach its episodes, which are rebuilt on their next call."""
        self.is_lost = True
        for episode in self.episodes:
            episode.runner = None
        for reply in self._replies.values():
            reply.cancel()
        self.remote.kill()


class HostPool(EnvironmentPool):
    """A pool that runs environments in Ray actors, each of which is a WorkerPool. It passes on their failures.

    A host is lost if its actor or node dies, or if it sends no heartbeat for `heartbeat_timeout_s`. Its episodes are
    rebuilt in another host, and the calls that were in flight are repeated. Two kinds of episodes fail with
    "environment_died" instead: those that are not `replayable`, and those whose calls were in flight at
    MAX_HOST_LOSSES losses of a host. A lost host is restarted as soon as resources are available. While there is no
    host, calls wait for at most `environment_hosts_s`. Then they raise EnvironmentHostsLost, which ends the run.

    Example:
        async with HostPool(2, lambda index: spawn(cluster, "...hosts:EnvironmentHost", settings, ...)) as pool:
            episode = await pool.start("gsm8k", prompt)
    """

    def __init__(
        self,
        num_hosts: int,
        spawn: Callable[[int], ActorProxy],
        *,
        environment_hosts_s: float = 180.0,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
    ):
        """Configure the pool. Entering it starts the hosts.

        Args:
            num_hosts: Number of hosts (`environment.hosts`).
            spawn: Starts an actor with the EnvironmentHost of the given index, without waiting for it, and returns the
                actor's proxy.
            environment_hosts_s: Maximum time to wait for the hosts, in seconds
                (`trainer.timeouts.environment_hosts_s`).
            heartbeat_timeout_s: Time without a heartbeat after which a host counts as lost, in seconds.
        """
        super().__init__()
        self.environment_hosts_s = environment_hosts_s
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self.hosts: list[_HostHandle] = []
        """Hosts that are open."""
        self._num_hosts = num_hosts
        self._spawn = spawn
        self._host_tasks: list[asyncio.Task[None]] = []
        self._last_loss = ""
        """Why the last host was lost."""

    async def __aenter__(self) -> HostPool:
        """Start all hosts. Raises EnvironmentHostsLost if one fails to start or if it takes `environment_hosts_s`."""
        self.loop = asyncio.get_running_loop()
        opened = [self.loop.create_future() for _ in range(self._num_hosts)]
        self._host_tasks = [self.loop.create_task(self._run_host(index, done)) for index, done in enumerate(opened)]
        try:
            await with_timeout(self.environment_hosts_s, asyncio.gather(*opened))
        except BaseException as error:
            num_started = len(self.hosts)
            await self.close()
            if not isinstance(error, Exception):
                raise
            is_late = isinstance(error, TimeoutError) and not isinstance(error, SkyRLError)
            timeout = f" within trainer.timeouts.environment_hosts_s={self.environment_hosts_s:g} s"
            cause = timeout if is_late else f": {error}"
            raise EnvironmentHostsLost(
                f"environment.hosts={self._num_hosts}: {num_started} of them started{cause}"
            ) from error
        return self

    async def close(self) -> None:
        """Close all environments and end all hosts. A host that cannot be closed is killed, which logs a warning."""
        self._closing = True
        for task in self._host_tasks:
            task.cancel()
        await asyncio.gather(*self._host_tasks, return_exceptions=True)
        for error in await asyncio.gather(*(host.close() for host in self.hosts), return_exceptions=True):
            if isinstance(error, BaseException):
                log.warning("an environment host could not be closed and was killed: %s", error)
        self.hosts.clear()

    async def send(self, episode: Episode, op: str, frame: bytes) -> dict[str, Any]:
        """Send an encoded call to the episode's host and return the environment's answer.

        If the host is lost, another host rebuilds the episode and the call is repeated there.

        Raises:
            EnvironmentFailure: The episode failed, cannot be replayed, or lost its host MAX_HOST_LOSSES times.
            EnvironmentHostsLost: No host is left, and none could be restarted in time.
        """
        while True:
            history: Sequence[bytes] = ()
            if episode.runner is None:
                episode.fail_if_not_replayable(self._last_loss)
                host = await self._select_host(episode)
                host.episodes.add(episode)
                episode.runner, history = host, tuple(episode.history)
            self._raise_if_failed(episode)
            assert isinstance(episode.runner, _HostHandle)
            host = episode.runner
            call = mark_exception_retrieved(asyncio.ensure_future(self._call(host, episode, history, op, frame)))
            episode.pending_call = call
            await asyncio.wait([call])  # the call continues if this coroutine is cancelled
            try:
                reply = call.result()
            except (Exception, asyncio.CancelledError) as error:  # the latter from `_HostHandle.abandon`
                self._abandon(host, error)
                episode.num_lost_calls += 1
                if episode.num_lost_calls >= MAX_HOST_LOSSES:
                    detail = f"{episode.env_class} in {op}: its host was lost {MAX_HOST_LOSSES} times"
                    episode.fail(EnvironmentFailure("environment_died", detail))
            else:
                if reply is not None:
                    return reply

    async def _call(
        self, host: _HostHandle, episode: Episode, history: Sequence[bytes], op: str, frame: bytes
    ) -> dict[str, Any] | None:
        """Return a host's answer after recording the call in the episode, or None if the episode has failed."""
        reply = await host.call(episode, history, op, frame)
        if isinstance(reply, EnvironmentFailure):
            episode.fail(self._failure(reply.kind, reply.detail))
            return None
        if isinstance(reply, ConfigError):
            episode.fail(reply)
            return None
        if episode.runner is host:
            episode.history.append(frame)
            episode.replayable = reply.get("replayable", episode.replayable)
        return reply

    async def _select_host(self, episode: Episode) -> _HostHandle:
        """Return the host with the fewest episodes. Raise EnvironmentHostsLost if none opens in the time allowed."""
        # counts polls and not seconds, because a busy driver does not start hosts
        for _ in range(math.ceil(self.environment_hosts_s / _POLL_S)):
            self._raise_if_failed(episode)
            if self.hosts:
                return min(self.hosts, key=lambda host: len(host.episodes))
            await asyncio.sleep(_POLL_S)
        raise EnvironmentHostsLost(
            f"environment.hosts={self._num_hosts}: all of them are lost, and none could be restarted within "
            f"trainer.timeouts.environment_hosts_s={self.environment_hosts_s:g} s. The last loss: {self._last_loss}"
        )

    async def _run_host(self, index: int, opened: asyncio.Future[None]) -> None:
        """Start a host, and restart it whenever it is lost. `opened` completes when the first start has ended."""
        pause = _MIN_RESTART_S
        while True:
            host = None
            try:
                host = _HostHandle(self._spawn(index))
                machine = await host.remote.call_with_deadline(math.inf, "open")  # the actor may wait for resources
                log.info("%s runs on %s", host.remote.name, machine)
                self.hosts.append(host)
                pause = _MIN_RESTART_S
                if not opened.done():
                    opened.set_result(None)
                await host.receive(self.heartbeat_timeout_s)
            except asyncio.CancelledError:
                if host is not None and host not in self.hosts:  # `close` ends the others
                    host.remote.kill()
                raise
            except Exception as error:
                if not opened.done():  # the first start failed, so a restart would fail too
                    if host is not None:
                        host.abandon()
                    opened.set_exception(error)
                    return
                if host is not None:
                    self._abandon(host, error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MAX_RESTART_S)

    def _abandon(self, host: _HostHandle, error: BaseException) -> None:
        """Abandon a host, unless it is already lost or the pool is closing. `_run_host` then restarts it."""
        if host.is_lost or self._closing:
            return
        self._last_loss = str(error)
        log.warning(
            "%s is lost, with %d episodes, and is being restarted: %s", host.remote.name, len(host.episodes), error
        )
        if host in self.hosts:
            self.hosts.remove(host)
        host.abandon()
