"""One weight sync: sends the trainer's weights to the engines and verifies that they arrived.

`WeightSync.sync_all` makes the calls of both ends in order. Each trainer rank's `WeightSender` (sender.py) announces a
manifest and sends buckets on a route (broadcast.py, ipc.py, checkpoint_route.py). Each engine's `WeightReceiver`
(receiver.py) verifies and loads them.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np

from skyrl_train.aio import gather_all
from skyrl_train.errors import DeadlineExceeded, EngineError, NonFiniteWeights, WeightSyncError
from skyrl_train.weight_sync.broadcast import abort_group
from skyrl_train.weight_sync.buckets import num_bytes, plan_buckets
from skyrl_train.weight_sync.changes import wire_spec
from skyrl_train.weight_sync.protocol import Bucket, Manifest, WeightRoute

PROBE_TOLERANCE = 1e-4
"""In nats, for float32 on both sides. Half-precision engines need a larger tolerance."""
_DISCONNECT_POLL_S = 1.0
"""A rank that waits for no other rank leaves a group within this time."""
_HEALTH_TIMEOUT_S = 5.0
"""A live engine answers a health check within this time."""


class TrainerRanks(Protocol):
    """All ranks of the trainer's policy.

    Each rank has `address(others: bool) -> (host, free port)` and the methods of `WeightSenderMixin`.
    """

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        """Call a method on all ranks concurrently and return the results in rank order."""


class AcceleratorMemory(Protocol):
    """The owner of what trainer and engines hold on accelerators that they share."""

    async def prepare_sync(self) -> None:
        """Let the engines receive weights from the trainer, and the trainer compute log-probs."""

    async def prepare_scoring(self) -> None:
        """Let the engines compute log-probs. The trainer may be offloaded."""


@dataclass(frozen=True)
class Probe:
    """Token sequences for which every engine must return the trainer's log-probs after a sync."""

    token_ids: Sequence[Sequence[int]]
    compute_trainer_logprobs: Callable[[Sequence[Sequence[int]]], Awaitable[list[list[float]]]]
    """Returns the log-probs (nats) of all tokens but the first of each sequence, at temperature 1."""
    tolerance: float = PROBE_TOLERANCE
    """Allowed difference of a token's log-prob: in nats if the trainer's is above -1, else as a fraction of its
    absolute value.
    """
    mean_tolerance: float = math.inf
    """Allowed mean difference, in nats."""
    every_sync: bool = True
    """If False, only the first sync is probed, which shows if engine and trainer compute the same model."""
    self_test: bool = False
    """If True, perturbed weights are sent before the first sync, which the probe must notice: see
    `WeightSync.self_test`.
    """


class _LogprobDiff(NamedTuple):
    """Differences between an engine's log-probs and the trainer's."""

    largest: float
    """In nats."""
    mean: float
    """In nats."""
    relative: float
    """Largest difference as a fraction of the trainer's log-prob if that is below -1, else in nats. A token of
    log-prob -20 has a logit 20 below the others, which bfloat16 rounds to a multiple of 1/8.
    """


class WeightSync:
    """Verified transfers of the trainer's weights to engines, over persistent connections.

    A failed sync is not repeated here. Its connections are closed, engines that received part of the weights stay
    partially loaded, and the next sync reconnects and sends everything.
    """

    def __init__(
        self,
        trainer: TrainerRanks,
        engines: Callable[[], Sequence[Any]],
        *,
        route: str,
        deadline_s: float,
        probe: Probe | None = None,
        folder: str = "",
        adapter_only: bool = False,
        memory: AcceleratorMemory | None = None,
    ):
        """Create the syncs between these ranks and engines; nothing is connected yet.

        Args:
            trainer: The ranks that send.
            engines: Called for every sync; if an engine was replaced, all are connected again. They have the methods
                of an InferenceEngine that concern weights, `score` and `health`, and none of these blocks the event
                loop.
            route: Name of the route, from `WeightRoute`.
            deadline_s: Seconds that a sync may take.
            probe: Comparison of log-probs after a sync; None for no comparison.
            folder: Folder of the `checkpoint` route; every engine must see it at the same path.
            adapter_only: True if engines get the model once and later only its adapter. Otherwise they get the model
                with the adapter merged into it.
            memory: Owner of the accelerators that trainer and engines share; None if they have dedicated ones.
        """
        self._trainer = trainer
        self._engines = engines
        self._route = route
        self._deadline_s = deadline_s
        self._probe = probe
        self._folder = folder
        self._adapter_only = adapter_only
        self._memory = memory
        self._connected: list[Any] = []
        self._address = ""
        """Address of the transfer group (`broadcast`)."""
        self._phase = ""
        """Current phase of a sync, for the error if its deadline passes."""
        self._self_test_due = probe is not None and probe.self_test
        self._probe_passed = False
        self._announced_version: tuple[int, int] | None = None
        """Last announced version, and the number of optimizer steps that made it."""
        self._num_elements = 0
        """Number of elements of all tensors in the last complete sync."""
        self.metrics: dict[str, float] = {}
        """Metrics of the last successful sync."""

    async def sync_all(self, version: int) -> dict[str, float]:
        """Send the weights to all engines as `version`, verify them, and return metrics.

        The first call runs `self_test` if the probe asks for it. A failure disconnects the trainer.

        Raises:
            WeightSyncError: Weights did not arrive intact. The message names engine and tensor.
            DeadlineExceeded: The sync took longer than `deadline_s`. The message names the phase.
            EngineError: An engine failed or was lost.
        """
        if self._self_test_due:
            self._self_test_due = False
            return await self.self_test(version)
        return await self._sync(version, list(self._engines()))

    async def sync_one(self, engine: Any, version: int) -> dict[str, float]:
        """Sync a single engine, which was just started or did not complete the last sync, and return metrics.

        All tensors are sent over a new connection. The next `sync_all` connects all engines again.

        Raises:
            WeightSyncError: Weights did not arrive intact. The message names engine and tensor.
            DeadlineExceeded: The sync took longer than `deadline_s`. The message names the phase.
            EngineError: The engine failed or was lost.
        """
        # This engine may lack tensors that the others have, so send everything over a new connection.
        await self._disconnect()
        metrics = await self._sync(version, [engine])
        self._connected = []
        return metrics

    async def self_test(self, version: int) -> dict[str, float]:
        """Test the probe: perturbed weights must change the engines' log-probs, and true weights must restore them.

        Ends with the true weights as `version`. Requires a probe of every sync.

        Returns:
            Metrics of the sync of the true weights, and weights/self_test_gap: the smallest change that an engine's
            log-probs showed, in nats.

        Raises:
            WeightSyncError: The probe does not notice perturbed weights, so it would not notice a failed sync either;
                or weights did not arrive intact.
            DeadlineExceeded: A sync took longer than `deadline_s`.
            EngineError: An engine failed or was lost.
        """
        assert self._probe is not None and self._probe.every_sync, "only a probe of every sync can be tested"
        engines = list(self._engines())
        async with self._sync_scope(version, engines):
            await self._transfer(version, engines, perturbed=True)
            diffs = await self._measure_probe_diffs(self._probe, engines)
        metrics = await self._sync(version, engines)
        largest, mean = metrics["weights/probe_gap"], metrics["weights/probe_gap_mean"]
        for name, diff in diffs.items():
            if not (diff.largest > 10 * largest or diff.mean > 10 * mean):  # one unlikely token may always be far off
                raise WeightSyncError(
                    f"engine {name}: perturbed weights changed the probe's log-probs by only {diff.largest:.3g} nats, "
                    f"the true weights by {largest:.3g}. Either the engine does not load the weights that it receives, "
                    "or the probe is not sensitive enough. Check the engine's version and backend."
                )
        self.metrics = metrics | {"weights/self_test_gap": min(diff.largest for diff in diffs.values())}
        return self.metrics

    async def _sync(self, version: int, engines: list[Any]) -> dict[str, float]:
        async with self._sync_scope(version, engines):
            manifest, num_buckets = await self._transfer(version, engines)
            diff = await self.verify(version, engines)
        self.metrics = {
            "weights/version": float(version),
            "weights/bytes": float(sum(num_bytes(wire_spec(spec)) for spec in manifest.tensors)),
            "weights/buckets": float(num_buckets),
        }
        if manifest.base_version is None:
            self._num_elements = sum(math.prod(spec.shape) for spec in manifest.tensors)
        elif manifest.precedes_changes:
            changed = sum(spec.changed or 0 for spec in manifest.tensors)
            self.metrics["weights/changed"] = changed / max(1, self._num_elements)
        if diff is not None:
            self.metrics |= {"weights/probe_gap": diff.largest, "weights/probe_gap_mean": diff.mean}
        return self.metrics

    @asynccontextmanager
    async def _sync_scope(self, version: int, engines: Sequence[Any]) -> AsyncIterator[None]:
        """Bound a sync by the deadline, disconnect the trainer if it fails, and name an engine that was lost."""
        try:
            async with asyncio.timeout(self._deadline_s) as deadline:
                yield
        except BaseException as error:
            await self._disconnect()
            if isinstance(error, TimeoutError) and deadline.expired():
                raise DeadlineExceeded(f"weight sync of version {version}: {self._phase}", self._deadline_s) from error
            if isinstance(error, WeightSyncError) and (lost := await _find_lost_engine(engines)):
                raise EngineError(f"engine {lost!r} was lost during {self._phase}: {error}") from error
            raise

    # -- sending -----------------------------------------------------------------------------------------------------

    async def _transfer(self, version: int, engines: list[Any], perturbed: bool = False) -> tuple[Manifest, int]:
        """Send the weights, perturbed ones for a self-test. Return the manifest and the number of buckets."""
        if not engines:
            raise WeightSyncError(
                "No inference engine is alive, so the weights cannot be sent. The engines' logs in the run's folder "
                "say why they died."
            )
        if self._memory is not None:
            self._phase = "the placement of the weights on the accelerators"
            await self._memory.prepare_sync()
        await self._connect(engines)
        self._phase = "the trainer's manifest"
        manifest: Manifest = (await self._trainer.call_all("prepare_manifest", version, perturbed))[0]
        self._check_manifest(manifest)
        self._phase = "the engines' check of the manifest"
        await gather_all(engine.begin_weights(manifest) for engine in engines)
        buckets = plan_buckets(manifest)
        await (
            self._broadcast(buckets, engines)
            if self._route == WeightRoute.BROADCAST
            else self._send_buckets_by_handle(buckets, engines)
        )
        self._phase = "the engines' check of the loaded weights"
        await gather_all(engine.commit_weights(version) for engine in engines)
        await self._trainer.call_all("mark_weights_delivered", version)
        return manifest, len(buckets)

    def _check_manifest(self, manifest: Manifest) -> None:
        """Raise an error for weights that are not finite, or not those that this version had before."""
        version, num_optimizer_steps = manifest.version, manifest.updates
        if manifest.non_finite:
            names = ", ".join(manifest.non_finite[:3]) + (", ..." if len(manifest.non_finite) > 3 else "")
            raise NonFiniteWeights(f"{names} contains NaN or infinity in version {version} of the trainer's weights.")
        if (
            self._announced_version is not None
            and self._announced_version[0] == version
            and self._announced_version[1] != num_optimizer_steps
        ):
            raise WeightSyncError(
                f"the trainer's weights changed without a new version: version {version} was made by "
                f"{self._announced_version[1]} optimizer steps when it was first sent, and now by "
                f"{num_optimizer_steps}. The weights were not sent."
            )
        self._announced_version = version, num_optimizer_steps

    async def _broadcast(self, buckets: Sequence[Bucket], engines: Sequence[Any]) -> None:
        """Send every bucket as a collective of trainer and engines. Nobody waits for the others between buckets."""
        current_bucket = dict.fromkeys(range(len(engines) + 1), 0)

        async def run(participant: int, transfer: Callable[[Bucket], Awaitable[Any]]) -> None:
            for bucket in buckets:
                current_bucket[participant] = bucket.index
                slowest = min(current_bucket.values())
                self._set_bucket_phase(buckets[slowest], buckets)
                await transfer(bucket)
            del current_bucket[participant]

        def send(bucket: Bucket) -> Awaitable[Any]:
            return self._trainer.call_all("send_weights", bucket.index)

        transfers = [send, *(engine.receive_weights for engine in engines)]
        await gather_all(run(participant, transfer) for participant, transfer in enumerate(transfers))

    async def _send_buckets_by_handle(self, buckets: Sequence[Bucket], engines: Sequence[Any]) -> None:
        """Pass every bucket or its location to the engines. The trainer prepares the next bucket while they load."""
        preparation = asyncio.ensure_future(self._prepare_bucket(buckets[0])) if buckets else None
        try:
            for bucket in buckets:
                self._set_bucket_phase(bucket, buckets)
                assert preparation is not None
                prepared = await preparation
                following = buckets[bucket.index + 1 : bucket.index + 2]
                preparation = asyncio.ensure_future(self._prepare_bucket(following[0])) if following else None
                await gather_all(engine.receive_weights(prepared) for engine in engines)
        finally:
            if preparation is not None:
                preparation.cancel()

    async def _prepare_bucket(self, bucket: Bucket) -> Bucket:
        results = [
            result for result in await self._trainer.call_all("send_weights", bucket.index) if result is not None
        ]
        return replace(results[0], handles=tuple(handle for result in results for handle in result.handles))

    def _set_bucket_phase(self, bucket: Bucket, buckets: Sequence[Bucket]) -> None:
        self._phase = f"bucket {bucket.index + 1} of {len(buckets)} ({bucket.names[0]}...)"

    async def _connect(self, engines: list[Any]) -> None:
        if len(engines) == len(self._connected) and all(a is b for a, b in zip(engines, self._connected, strict=True)):
            return
        self._phase = "the connection of trainer and engines"
        sizes = [engine.capabilities.weight_ranks for engine in engines]
        address, world_size = self._folder, sum(sizes) + 1
        if self._route == WeightRoute.BROADCAST:
            has_other_node = any(engine.capabilities.other_machine for engine in engines)
            host, port = (await self._trainer.call_all("address", has_other_node))[0]
            address = self._address = f"{host}:{port}"
        timeout = self._deadline_s
        await gather_all(
            [
                self._trainer.call_all(
                    "connect_weights", self._route, address, world_size, timeout, self._adapter_only
                ),
                *(
                    e.connect_weights(self._route, address, rank, world_size, timeout)
                    for rank, e in zip(accumulate([1, *sizes]), engines, strict=False)
                ),
            ]
        )
        self._connected = engines

    async def _disconnect(self) -> None:
        """Disconnect the trainer, so that no engine waits for it. Its errors do not matter to the caller."""
        self._connected = []
        closing = asyncio.ensure_future(self._trainer.call_all("disconnect_weights"))
        address, self._address = self._address, ""
        deadline = time.monotonic() + self._deadline_s
        done, _ = await asyncio.wait([closing], timeout=_DISCONNECT_POLL_S)
        # A rank that waits for a peer accepts no call. A busy machine may not accept the first connection in time.
        while not done and address and time.monotonic() < deadline:
            await asyncio.to_thread(abort_group, address)
            done, _ = await asyncio.wait([closing], timeout=_DISCONNECT_POLL_S)
        await asyncio.wait([closing], timeout=deadline - time.monotonic())
        closing.cancel()  # Learner.is_responsive does not check a rank with a running call
        await asyncio.wait([closing])
        if not closing.cancelled():
            closing.exception()

    # -- verifying ---------------------------------------------------------------------------------------------------

    async def verify(self, version: int, engines: Sequence[Any]) -> _LogprobDiff | None:
        """Check that these engines serve all weights of `version`, and compare log-probs if the probe is due.

        Args:
            version: Version that the engines must serve.
            engines: Engines to check.

        Returns:
            The largest differences of log-probs, or None if they were not compared.

        Raises:
            WeightSyncError: An engine differs. The message names it.
        """
        self._phase = "the check of the engines' versions"
        for health in await gather_all(engine.health() for engine in engines):
            if health.partially_loaded or health.version != version:
                state = "is partially loaded" if health.partially_loaded else f"serves version {health.version}"
                raise WeightSyncError(
                    f"engine {health.name} {state}, but the trainer is at version {version}. Sync the engine first."
                )
        probe = self._probe
        if probe is None or (self._probe_passed and not probe.every_sync):
            return None
        diffs = await self._measure_probe_diffs(probe, engines)
        for name, diff in diffs.items():
            _check_logprob_diff(name, diff, probe, version)
        self._probe_passed = True
        return _LogprobDiff(*(max(values) for values in zip(*diffs.values(), strict=True)))

    async def _measure_probe_diffs(self, probe: Probe, engines: Sequence[Any]) -> dict[str, _LogprobDiff]:
        """Return the differences of log-probs of each engine, by its name."""
        self._phase = "the log-prob probe"
        names = [health.name for health in await gather_all(engine.health() for engine in engines)]
        expected = await probe.compute_trainer_logprobs(probe.token_ids)
        if self._memory is not None:
            await self._memory.prepare_scoring()
        results = await gather_all(engine.score(probe.token_ids) for engine in engines)
        return {name: _logprob_diff(expected, result) for name, result in zip(names, results, strict=True)}


async def _find_lost_engine(engines: Sequence[Any]) -> str | None:
    """Return the name of an engine whose health check fails, or None.

    In a collective its peers fail first, and do not know which one it is.
    """
    results = asyncio.gather(*(engine.health() for engine in engines), return_exceptions=True)
    with suppress(TimeoutError):
        async with asyncio.timeout(_HEALTH_TIMEOUT_S):
            for engine, result in zip(engines, await results, strict=True):
                if isinstance(result, EngineError):
                    return str(engine.capabilities.name)
    return None


def _logprob_diff(expected: list[list[float]], actual: list[list[float]]) -> _LogprobDiff:
    """Return the differences of two sets of log-probs. A NaN anywhere makes all of them NaN, which no tolerance
    allows.
    """
    pairs = [
        pair
        for trainer_row, engine_row in zip(expected, actual, strict=True)
        for pair in zip(trainer_row, engine_row, strict=True)
    ]
    trainers, engines = np.array(pairs).T
    differences = np.abs(trainers - engines)
    relative = differences / np.maximum(np.abs(trainers), 1)
    return _LogprobDiff(float(differences.max()), float(differences.mean()), float(relative.max()))


def _check_logprob_diff(name: str, diff: _LogprobDiff, probe: Probe, version: int) -> None:
    """Raise WeightSyncError for differences that the probe does not allow."""
    if not diff.relative <= probe.tolerance:
        raise WeightSyncError(
            f"engine {name}: log-probs of the probe's tokens differ from the trainer's by {diff.largest:.3g} nats, and "
            f"by {diff.relative:.3g} of a token's log-prob or of 1 nat, whichever is more (allowed: "
            f"{probe.tolerance:g}) at version {version}. The engine's weights are stale or corrupt."
        )
    if not diff.mean <= probe.mean_tolerance:
        raise WeightSyncError(
            f"engine {name}: log-probs of the first prompts differ from the trainer's by {diff.mean:.3g} nats on "
            f"average (allowed: {probe.mean_tolerance:g}; the largest: {diff.largest:.3g}) at version {version}. "
            "Half precision does not explain this: engine and trainer do not compute the same model. Compare their "
            "settings (rope, adapters, quantization), try generator.model_dtype=float32 with trainer.bf16=false, or "
            "disable this check with generator.weight_sync_check=off."
        )
