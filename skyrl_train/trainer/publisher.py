"""Publishing of weights: every engine serves the trainer's weights, and dead engines are restarted with them."""

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
from skyrl_train.trainer.offload_manager import OffloadManager
from skyrl_train.weight_sync.sync import WeightSync

log = logging.getLogger(__name__)


class WeightPublisher:
    """Sends each version of the weights to all engines, verifies it, and supervises the engines.

    Dead engines are restarted, and engines may be added and removed. An engine receives requests only once it has the
    current weights.
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
        offload_manager: OffloadManager | None = None,
    ):
        """Create the publisher and register it with the client, which then restarts engines that die during rollouts.

        Args:
            learner: The ranks whose weights are sent.
            client: The client of the engines.
            weight_sync: The transfers from the learner to the client's engines.
            restart_engine: Starts the dead engine of a name again and returns it. If its second argument is True, it
                first waits for a node with enough resources. Raises InsufficientResources if there is none.
            max_engine_restarts: Number of restarts allowed in the whole run, including failed ones.
            pause_mode: How rollouts are paused while weights are sent; rollouts and training continue while engines
                are restarted. None if no rollouts run during a sync.
            offload_manager: Moves engines and learner onto or off shared accelerators; None if they share none.
        """
        self._learner = learner
        self._client = client
        self._weight_sync = weight_sync
        self._restart_engine = restart_engine
        self._max_engine_restarts = max_engine_restarts
        self._pause_mode = pause_mode
        self._offload_manager = offload_manager or OffloadManager()
        self._restart_lock = asyncio.Lock()
        self._sync_lock = asyncio.Lock()
        """Held while weights are sent. An engine may start at the same time, but receives its weights afterwards."""
        self._engines_without_node: set[str] = set()
        """Dead engines that no node can run at present; this has been logged."""
        self.restarts = 0
        """Number of restarts so far, including failed ones."""
        client.restart_dead_engines, client.restarts_immediately = (
            self._restart_while_generating,
            pause_mode is not None,
        )

    # -- all engines -------------------------------------------------------------------------------------------------

    async def publish(self, version: int) -> dict[str, float]:
        """Send the learner's weights to all engines and restart dead ones.

        With a `pause_mode` dead engines are restarted in the background, as long as another engine is alive.

        Args:
            version: The version of the weights, which the engines report for tokens that they sample with them.

        Returns:
            The metrics of the last sync, of the engines and the number of restarts.

        Raises:
            SkyRLError: The sync of an engine that is still alive failed.
            EnginesLost: An engine died and cannot be restarted.
        """
        client, pause_mode = self._client, self._pause_mode
        async with nullcontext() if pause_mode else client.hold_requests():
            async with self._sync_lock, self._learner.hold_version():
                async with client.pause_requests(pause_mode) if pause_mode else nullcontext():
                    await self._send_to_all(version)
            if pause_mode and client.engines:  # these continue with rollouts during the restart
                client.start_restart()
            elif pause_mode:
                await client.wait_for_restart()
            else:
                await self.restart_dead_engines()
        # The metrics of the last sync. If a failed sync was repeated, these are the metrics of the last engine.
        metrics = self._weight_sync.metrics | await client.metrics() | {"engines/restarts": float(self.restarts)}
        idle, wasted = metrics.pop("engines/idle"), metrics.pop("engines/wasted_tokens")
        return metrics | ({"async/engines_idle": idle, "async/wasted_tokens": wasted} if pause_mode else {})

    async def _send_to_all(self, version: int) -> None:
        """Sync all engines; if some died in a failed sync, sync each remaining one separately.

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
        """Cancel the restart in progress. Restarts call the ranks, which must be free for a final save."""
        await self._client.cancel_restart()

    # -- single engines ----------------------------------------------------------------------------------------------

    async def add(self, name: str, engine: Any) -> None:
        """Send the current weights to a new engine, and then let the client send it requests.

        Args:
            name: The name of the engine, which is not in use.
            engine: The engine, which is not sampling.

        Raises:
            WorkerDied: The sync failed, and a rank of the trainer does not respond.
            SkyRLError: The sync failed for another reason. The client does not use the engine.
        """
        async with self._sync_lock:
            await self._send_current(engine)
            self._client.add(name, engine)

    async def remove(self, name: str) -> Any:
        """Remove a retired engine from the client and return it. It takes part in no further syncs or restarts.

        Waits for a sync or restart in progress.
        """
        async with self._restart_lock, self._sync_lock:
            self._engines_without_node.discard(name)
            return self._client.remove(name)

    async def restart_dead_engines(self) -> None:
        """Restart every dead engine, including those that die during the call.

        An engine that no node can run is skipped while another engine is alive; later calls retry it.

        Raises:
            EnginesLost: An engine cannot be restarted: `max_engine_restarts` is used up, the cluster is lost, a rank of
                the trainer does not respond, or no node can run the last engine.
        """
        async with self._restart_lock:
            skipped: set[str] = set()
            while dead := {name: cause for name, cause in self._client.dead_engines.items() if name not in skipped}:
                # Engines that probably have a node come first: if none is alive, one without a node ends the run.
                name, cause = min(dead.items(), key=lambda item: item[0] in self._engines_without_node)
                if not await self._restart_within_budget(name, cause):
                    skipped.add(name)

    async def _restart_while_generating(self) -> None:
        await self.restart_dead_engines()
        await self._offload_manager.prepare_scoring()

    async def _restart_within_budget(self, name: str, cause: str) -> bool:
        """Try to restart an engine once. Return False if no node can run it and other engines are alive."""
        if self.restarts >= self._max_engine_restarts:
            if name in self._engines_without_node and self._client.has_live_engine:
                return False  # it remains stopped, as before the other engines used up the restarts
            raise EnginesLost(
                f"{name} died ({cause}), and all {self._max_engine_restarts} restarts that "
                "generator.max_engine_restarts allows are used up."
            )
        self.restarts += 1
        started_at = now()
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
                "%s died (%s) and remains stopped: %s The run continues without it and retries after each step.",
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
                f"{name} died ({cause}) and cannot be restarted because a rank of the trainer does not respond: {error}"
            ) from error
        except SkyRLError as error:
            log.warning("Engine restart %d failed for %s: %s", self.restarts, name, error)
        else:
            self._engines_without_node.discard(name)
            log.warning(
                "%s died (%s) and was restarted with the current weights in %.1f s (restart %d of at most %d, see "
                "generator.max_engine_restarts).",
                name,
                cause,
                now() - started_at,
                self.restarts,
                self._max_engine_restarts,
            )
        return True

    async def _restart(self, name: str) -> None:
        # Only one engine waits for a node on behalf of all that have none, because requests may be held while it waits.
        wait_for_node = not (self._engines_without_node and self._client.has_live_engine)
        self._client.kill(name)
        await self._offload_manager.prepare_engine_start()
        engine = await self._restart_engine(name, wait_for_node)
        try:
            async with self._sync_lock, self._offload_manager.replacing(engine):
                await self._send_current(engine)
                self._client.replace(name, engine)
        except BaseException:
            await _kill_or_close(engine)
            raise

    async def _send_current(self, engine: Any) -> None:
        """Sync one engine with the newest complete version.

        Raises WorkerDied if the sync fails and a rank of the trainer does not respond, otherwise the original error.
        """
        async with self._learner.hold_version() as version:
            try:
                await self._weight_sync.sync_one(engine, version)
            except SkyRLError as error:
                if not await self._learner.is_responsive(RESPONSE_TIMEOUT_S):
                    raise WorkerDied(f"{type(error).__name__}: {error}") from error
                raise


async def _kill_or_close(engine: Any) -> None:
    """Kill an engine that this run started, or close the connection to a remote one."""
    if hasattr(engine, "kill"):
        engine.kill()
    else:
        await engine.close()
