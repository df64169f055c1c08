"""Weight syncs of a run: every engine serves the trainer's weights, those that died in between included."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

from skyrl_train.clock import now
from skyrl_train.engines.client import EngineClient
from skyrl_train.errors import ClusterLost, EnginesLost, InsufficientResources, SkyRLError, WorkerDied
from skyrl_train.learner.learner import RESPONSE_TIMEOUT_S, Learner
from skyrl_train.weight_sync.sync import WeightSync

log = logging.getLogger(__name__)


class WeightPublisher:
    """Sends each version of the weights to all engines, verifies it, and supervises the engines.

    Dead engines are restarted, and engines may join. An engine gets requests only once it has the current weights.
    """

    def __init__(
        self,
        learner: Learner,
        client: EngineClient,
        weight_sync: WeightSync,
        restart_engine: Callable[[str, bool], Awaitable[Any]],
        *,
        max_engine_restarts: int,
        pause_mode: str | None = None,
        engines_colocated: bool = False,
        shares_accelerator: bool = False,
    ):
        """Create the publisher of a run, which from now on restarts engines that die while they generate.

        Args:
            learner: The weights to send.
            client: The client of the engines.
            weight_sync: The transfers from the learner to the client's engines.
            restart_engine: Starts the dead engine of a name again, and returns it. Raises NoRoom if no node has room;
                given True, it first waits for one.
            max_engine_restarts: How often in the whole run, failed restarts included.
            pause_mode: How rollouts are paused while weights are sent. They, and the trainer, go on while engines are
                restarted. None if no rollouts run during a sync.
            time_shared: Engines and learner take turns on the same slots.
            shares_memory: These slots are accelerators, whose memory a starting engine needs.
        """
        self._learner = learner
        self._client = client
        self._weight_sync = weight_sync
        self._restart_engine = restart_engine
        self._max_engine_restarts = max_engine_restarts
        self._pause_mode = pause_mode
        self._engines_colocated = engines_colocated
        self._shares_accelerator = shares_accelerator
        self._restart_lock = asyncio.Lock()
        self._sync_lock = asyncio.Lock()
        """Held while weights are sent: an engine may be started meanwhile, but gets its weights afterwards."""
        self._engines_without_node: set[str] = set()
        """Dead engines that have no node for now, which has been logged."""
        self.restarts = 0
        client.restart_dead_engines, client.restarts_immediately = (
            self._restart_while_generating,
            pause_mode is not None,
        )

    # -- all engines -------------------------------------------------------------------------------------------------

    async def publish(self, version: int) -> dict[str, float]:
        """Send the learner's weights as this version, restart dead engines, and return the metrics of both."""
        client, pause_mode = self._client, self._pause_mode
        async with nullcontext() if pause_mode else client.hold_requests():
            restarts_before = self.restarts
            async with self._sync_lock, self._learner.hold_version():
                async with client.pause_requests(pause_mode) if pause_mode else nullcontext():
                    await self._send_to_all(version)
            if pause_mode and client.engines:  # they go on meanwhile
                client.start_restart()
            elif pause_mode:
                await client.wait_for_restart()
            else:
                await self.restart_dead_engines()
            if self._engines_colocated and self.restarts > restarts_before:
                await client.sleep()
        # The metrics of the last sync: if a failed one was repeated, that is the one with the last engine.
        metrics = self._weight_sync.metrics | await client.metrics() | {"engines/restarts": float(self.restarts)}
        idle, wasted = metrics.pop("engines/idle"), metrics.pop("engines/wasted_tokens")
        return metrics | ({"async/engines_idle": idle, "async/wasted_tokens": wasted} if pause_mode else {})

    async def _send_to_all(self, version: int) -> None:
        """Sync all engines; if some died in a failed sync, sync each living one in turn.

        After a failed sync an engine may still hold the altered weights of a self-test.
        """
        client = self._client
        alive = len(client.engines)
        try:
            if alive:
                await self._weight_sync.sync_all(version)
        except SkyRLError:
            await client.health()  # marks engines that do not answer as dead
            if len(client.engines) == alive:
                raise
            for engine in client.engines:
                try:
                    await self._weight_sync.sync_one(engine, version)
                except SkyRLError:
                    await client.health()
                    if engine in client.engines:
                        raise

    async def stop_restarts(self) -> None:
        """Restart no more engines: nothing takes part in calls of the ranks afterwards."""
        await self._client.cancel_restart()

    # -- single engines ----------------------------------------------------------------------------------------------

    async def add(self, name: str, engine: Any) -> None:
        """Give a new engine the current weights, and from then on requests. Raises what sending them raised."""
        async with self._sync_lock:
            await self._send_current(engine)
            self._client.add(name, engine)

    async def remove(self, name: str) -> Any:
        """Return a retired engine, which takes part in no sync and no restart from now on."""
        async with self._restart_lock, self._sync_lock:
            self._engines_without_node.discard(name)
            return self._client.remove(name)

    async def restart_dead_engines(self) -> None:
        """Restart every dead engine, those that die meanwhile too, except those that have no node while others live.

        Raises EnginesLost with the cause of the first one left if the budget is spent.
        """
        async with self._restart_lock:
            skipped: set[str] = set()
            while left := {name: cause for name, cause in self._client.dead_engines.items() if name not in skipped}:
                # Those that may well start come first: where no engine is left, one without a node would end the run.
                name, cause = min(left.items(), key=lambda item: item[0] in self._engines_without_node)
                if not await self._restart_within_budget(name, cause):
                    skipped.add(name)

    async def _restart_while_generating(self) -> None:
        await self.restart_dead_engines()
        if self._engines_colocated:
            await self._learner.offload()
            await self._client.wake_up()

    async def _restart_within_budget(self, name: str, cause: str) -> bool:
        """Try once. Returns False if there is no node for it and others live: it is tried again the next time."""
        if self.restarts >= self._max_engine_restarts:
            if name in self._engines_without_node and self._client.has_live_engine:
                return False  # it stays away, as it did before the others spent the budget
            raise EnginesLost(
                f"{name} died ({cause}), and the {self._max_engine_restarts} restarts of "
                "generator.max_engine_restarts are spent."
            )
        self.restarts += 1
        begun = now()
        try:
            await self._restart(name)
        except InsufficientResources as error:
            if not self._client.has_live_engine:
                raise EnginesLost(
                    f"{name} died ({cause}), no engine is left, and it cannot be restarted: {error}"
                ) from error
            self.restarts -= 1
            log.log(
                logging.DEBUG if name in self._engines_without_node else logging.WARNING,
                "%s died (%s) and stays away: %s The run goes on without it; room is looked for after each step.",
                name,
                cause,
                error,
            )
            self._engines_without_node.add(name)
            return False
        except ClusterLost as error:
            raise EnginesLost(f"{name} died ({cause}) and cannot be restarted: {error}") from error
        except WorkerDied as error:
            raise EnginesLost(
                f"{name} died ({cause}) and cannot be restarted, as a rank of the trainer does not answer: {error}"
            ) from error
        except SkyRLError as error:
            log.warning("Restart %d of engines failed for %s: %s", self.restarts, name, error)
        else:
            self._engines_without_node.discard(name)
            log.warning(
                "%s died (%s) and was restarted with the current weights in %.1f s, restart %d of the %d of "
                "generator.max_engine_restarts.",
                name,
                cause,
                now() - begun,
                self.restarts,
                self._max_engine_restarts,
            )
        return True

    async def _restart(self, name: str) -> None:
        # One engine waits for a node, for all that have none: requests may be held meanwhile.
        wait_for_node = not (self._engines_without_node and self._client.has_live_engine)
        self._client.kill(name)
        if self._shares_accelerator:
            await self._learner.offload()
        engine = await self._restart_engine(name, wait_for_node)
        try:
            async with self._sync_lock:
                await self._send_current(engine)
                self._client.replace(name, engine)
        except BaseException:
            await _end(engine)
            raise

    async def _send_current(self, engine: Any) -> None:
        """Sync one engine with the newest version, never with one in the making.

        Raises WorkerDied if that fails and a rank of the trainer does not answer, else what it failed with.
        """
        if self._shares_accelerator:
            await engine.sleep()
            await self._learner.onload_weights_only()
            await engine.wake_up(["weights"])
        async with self._learner.hold_version() as version:
            try:
                await self._weight_sync.sync_one(engine, version)
            except SkyRLError as error:
                if not await self._learner.is_responsive(RESPONSE_TIMEOUT_S):
                    raise WorkerDied(f"{type(error).__name__}: {error}") from error
                raise


async def _end(engine: Any) -> None:
    """Kill an engine of the run's own, or close the connection to one that runs elsewhere."""
    if hasattr(engine, "kill"):
        engine.kill()
    else:
        await engine.close()
