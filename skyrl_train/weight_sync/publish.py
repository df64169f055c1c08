"""One sync, start to end: the trainer's weights to all engines, proven to have arrived."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from skyrl_train.errors import DeadlineExceeded, WeightSyncError
from skyrl_train.weight_sync.buckets import buckets, num_bytes
from skyrl_train.weight_sync.wire import Bucket, Manifest

PROBE_TOLERANCE = 1e-4
"""nats, fp32 on both sides; half-precision engines need a wider one."""


class TrainerRanks(Protocol):
    """The trainer's ranks seen as one.

    Each rank answers address() -> (host, free port), connect_weights(route, "host:port", world_size, timeout_s),
    manifest(version), send_weights(index) and disconnect_weights(), all of them a WeightSender's.
    """

    async def all(self, method: str, *args: Any) -> list[Any]:
        """The same call on every rank at once; answers in rank order."""


class WeightHealth(Protocol):
    """The part of an EngineHealth that concerns weights."""

    name: str
    version: int
    torn: bool


class WeightTarget(Protocol):
    """The part of an InferenceEngine that takes weights; `receive_weights` must not block the event loop."""

    async def connect_weights(self, route: str, address: str, rank: int, world_size: int, timeout_s: float) -> None: ...

    async def begin_weights(self, manifest: Manifest) -> None: ...

    async def receive_weights(self, bucket: Bucket) -> None: ...

    async def commit_weights(self, version: int) -> None: ...

    async def score(self, token_ids: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]: ...

    async def health(self) -> WeightHealth: ...


@dataclass(frozen=True)
class Probe:
    """`weight_sync_check: probe`: after a sync, every engine must give these tokens the trainer's log-probs."""

    token_ids: Sequence[Sequence[int]]
    trainer_score: Callable[[Sequence[Sequence[int]]], Awaitable[list[list[float]]]]
    """Log-probs (nats) of every token after its first, at temperature 1."""
    tolerance: float = PROBE_TOLERANCE


class WeightPublisher:
    """Knows the trainer and the engines, and whether they are connected.

    A sync that fails is not repeated here: the group is torn down, engines that hold half of it stay torn, and the next
    `publish` connects anew and sends everything.
    """

    def __init__(
        self,
        trainer: TrainerRanks,
        engines: Callable[[], Sequence[WeightTarget]],
        *,
        route: str,
        deadline_s: float,
        probe: Probe | None = None,
    ):
        """`engines` is asked at every sync: an engine that was replaced makes the group connect anew."""
        self._trainer = trainer
        self._engines = engines
        self._route = route
        self._deadline_s = deadline_s
        self._probe = probe
        self._connected: list[WeightTarget] = []
        self._doing = ""

    async def publish(self, version: int) -> dict[str, float]:
        """Send everything as `version`; returns metrics.

        Raises WeightSyncError naming engine and tensor, DeadlineExceeded naming the phase, or an engine's own error.
        """
        try:
            async with asyncio.timeout(self._deadline_s) as deadline:
                manifest, count = await self._transfer(version)
                await self.check(version)
        except BaseException as error:
            await self._disconnect()
            if isinstance(error, TimeoutError) and deadline.expired():
                raise DeadlineExceeded(f"weight sync of version {version}: {self._doing}", self._deadline_s) from error
            raise
        return {
            "weights/version": float(version),
            "weights/bytes": float(sum(num_bytes(spec) for spec in manifest.tensors)),
            "weights/buckets": float(count),
        }

    async def check(self, version: int) -> None:
        """Every engine says that it serves `version`, whole; with a probe, its log-probs say so too.

        Raises WeightSyncError naming the engine that does not.
        """
        self._doing = "engines naming their version"
        engines = list(self._engines())
        health = await _together(engine.health() for engine in engines)
        for one in health:
            if one.torn or one.version != version:
                state = "is torn" if one.torn else f"serves version {one.version}"
                raise WeightSyncError(
                    f"engine {one.name} {state}, but the trainer is at version {version}: sync it first."
                )
        if self._probe is not None:
            await self._check_probe(self._probe, version, engines, [one.name for one in health])

    async def _transfer(self, version: int) -> tuple[Manifest, int]:
        engines = list(self._engines())
        if not engines:
            raise WeightSyncError("no inference engine is alive: there is nobody to send weights to.")
        await self._connect(engines)
        self._doing = "the trainer's manifest"
        manifest: Manifest = (await self._trainer.all("manifest", version))[0]
        self._doing = "engines checking the manifest"
        await _together(engine.begin_weights(manifest) for engine in engines)
        cut = buckets(manifest)
        for bucket in cut:
            self._doing = f"bucket {bucket.index + 1} of {len(cut)} ({bucket.names[0]}...)"
            await self._send(bucket, engines)
        self._doing = "engines checking what they hold"
        await _together(engine.commit_weights(version) for engine in engines)
        return manifest, len(cut)

    async def _send(self, bucket: Bucket, engines: list[WeightTarget]) -> None:
        if self._route == "in_process":
            sent = (await self._trainer.all("send_weights", bucket.index))[0]
            await _together(engine.receive_weights(sent) for engine in engines)
        else:
            sending = self._trainer.all("send_weights", bucket.index)
            await _together([sending, *(engine.receive_weights(bucket) for engine in engines)])

    async def _connect(self, engines: list[WeightTarget]) -> None:
        if len(engines) == len(self._connected) and all(a is b for a, b in zip(engines, self._connected, strict=True)):
            return
        self._doing = "connecting trainer and engines"
        host, port = (await self._trainer.all("address"))[0]
        address, world_size = f"{host}:{port}", len(engines) + 1
        timeout = self._deadline_s
        await _together(
            [
                self._trainer.all("connect_weights", self._route, address, world_size, timeout),
                *(
                    e.connect_weights(self._route, address, rank, world_size, timeout)
                    for rank, e in enumerate(engines, 1)
                ),
            ]
        )
        self._connected = engines

    async def _disconnect(self) -> None:
        """Leave nobody waiting for a peer that will not come; that this fails too changes nothing for the caller."""
        self._connected = []
        closing = asyncio.ensure_future(self._trainer.all("disconnect_weights"))
        done, _ = await asyncio.wait([closing], timeout=self._deadline_s)
        for task in done:
            task.exception()

    async def _check_probe(
        self, probe: Probe, version: int, engines: Sequence[WeightTarget], names: Sequence[str]
    ) -> None:
        self._doing = "the log-prob probe"
        wanted, *answers = await _together(
            [probe.trainer_score(probe.token_ids), *(engine.score(probe.token_ids) for engine in engines)]
        )
        for name, answer in zip(names, answers, strict=True):
            worst = _largest_difference(wanted, answer)
            if not worst <= probe.tolerance:
                raise WeightSyncError(
                    f"engine {name}: log-probs of the probe's tokens differ from the trainer's by {worst:.3g} nats "
                    f"(allowed: {probe.tolerance:g}) at version {version}: its weights are stale or altered."
                )


def _largest_difference(wanted: list[list[float]], got: list[list[float]]) -> float:
    """NaN anywhere gives NaN, which no tolerance allows."""
    differences = [
        abs(a - b) for mine, theirs in zip(wanted, got, strict=True) for a, b in zip(mine, theirs, strict=True)
    ]
    return math.nan if any(map(math.isnan, differences)) else max(differences)


async def _together(calls: Any) -> list[Any]:
    """All at once; the first failure is raised at once and the others are no longer waited for."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
