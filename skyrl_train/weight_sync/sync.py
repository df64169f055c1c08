"""One weight sync: sends the trainer's weights to the engines and verifies that they arrived.

`WeightSync.sync_all` makes the calls of both ends in order: each trainer rank's `WeightSender` (sender.py) announces a
manifest and sends buckets on a route (broadcast.py, handover.py), and each engine's `WeightReceiver` (receiver.py)
verifies and loads them.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np

from skyrl_train.aio import gather_all
from skyrl_train.errors import DeadlineExceeded, EngineError, NonFiniteWeights, WeightSyncError
from skyrl_train.weight_sync.broadcast import abort_group
from skyrl_train.weight_sync.buckets import num_bytes, plan_buckets
from skyrl_train.weight_sync.protocol import Bucket, Manifest

PROBE_TOLERANCE = 1e-4
"""In nats, for float32 on both sides; half-precision engines need a larger one."""
_DISCONNECT_POLL_S = 1.0
"""A rank that waits for nobody has left a group within this time."""
_HEALTH_TIMEOUT_S = 5.0
"""A living engine answers a health check within this time."""


class TrainerRanks(Protocol):
    """All ranks of the trainer's policy. Each has `address() -> (host, free port)` and the calls of a `SendingRank`."""

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        """Make the same call on every rank concurrently; results are in rank order."""


@dataclass(frozen=True)
class Probe:
    """After a sync every engine must return the trainer's log-probs for these tokens."""

    token_ids: Sequence[Sequence[int]]
    compute_trainer_logprobs: Callable[[Sequence[Sequence[int]]], Awaitable[list[list[float]]]]
    """Log-probs (nats) of all tokens but the first of each sequence, at temperature 1."""
    tolerance: float = PROBE_TOLERANCE
    """Allowed of a token's difference: in nats of a token whose log-prob is above -1, else as a share of that."""
    mean_tolerance: float = math.inf
    """Allowed of the mean difference, in nats."""
    every_sync: bool = True
    """False: after the first sync alone, which shows whether engine and trainer compute the same."""
    self_test: bool = False
    """Before the first sync, altered weights are sent, which the probe must notice: see `WeightSync.self_test`."""
    offload_trainer: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
    """Engines score inside this context, which on a shared accelerator takes the trainer out of their way."""


class _LogprobDiff(NamedTuple):
    """The difference between an engine's log-probs and the trainer's, in nats."""

    largest: float
    mean: float
    relative: float
    """The largest as a share of the token's own log-prob where that is below -1: a token of log-prob -20 has a logit
    20 below the others', which bfloat16 rounds to a multiple of 1/8."""


class WeightSync:
    """Verified transfers of the trainer's weights to engines, over connections that last.

    A failed sync is not repeated here: the transfer group is destroyed, engines with half of the weights stay torn, and
    the next sync reconnects and sends everything.
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
    ):
        """Create the syncs of these ranks and engines; nothing is connected yet.

        Args:
            trainer: The ranks that send.
            engines: Called for every sync; if an engine was replaced, all are connected again. They have the methods of
                an InferenceEngine that concern weights, `score` and `health`, and none of these blocks the event loop.
            route: One of `wire.ROUTES`.
            deadline_s: Seconds that a sync may take.
            probe: What to compare after a sync; None for nothing.
            folder: For the `checkpoint` route; every engine must see it at the same path.
            adapter_only: Engines get the model once and later only its adapter. Otherwise they get the model with the
                adapter merged into it.
        """
        self._trainer = trainer
        self._engines = engines
        self._route = route
        self._deadline_s = deadline_s
        self._probe = probe
        self._folder = folder
        self._adapter_only = adapter_only
        self._connected: list[Any] = []
        self._address = ""
        """Of the transfer group (broadcast)."""
        self._phase = ""
        """What a sync is at, for the error if its deadline passes."""
        self._self_test_due = probe is not None and probe.self_test
        self._probe_passed = False
        self._announced_version: tuple[int, int] | None = None
        """A version that was announced, and the optimizer steps that made it."""
        self.metrics: dict[str, float] = {}
        """Metrics of the last sync that succeeded."""

    async def sync_all(self, version: int) -> dict[str, float]:
        """Send the weights to all engines as `version`, and verify them; returns metrics.

        Raises WeightSyncError naming engine and tensor, DeadlineExceeded naming the phase, or the engine's own error.
        """
        if self._self_test_due:
            self._self_test_due = False
            return await self.self_test(version)
        return await self._sync(version, list(self._engines()))

    async def sync_one(self, engine: Any, version: int) -> dict[str, float]:
        """Sync a single engine, which has just been started or did not complete the last sync; returns metrics."""
        # This engine may lack what the others hold: send everything, over a new connection.
        await self._disconnect()
        metrics = await self._sync(version, [engine])
        self._connected = []
        return metrics

    async def self_test(self, version: int) -> dict[str, float]:
        """Test the probe: altered weights must change the engines' log-probs, and true ones must restore them.

        Ends with the true weights live as `version`; returns the metrics of that sync. Raises WeightSyncError if the
        probe does not notice altered weights: then it would not notice a failed sync either.
        """
        assert self._probe is not None and self._probe.every_sync, "it tests a probe of every sync"
        engines = list(self._engines())
        async with self._sync_scope(version, engines):
            await self._transfer(version, engines, perturbed=True)
            gaps = await self._measure_probe_diffs(self._probe, engines)
        metrics = await self._sync(version, engines)
        parity, mean = metrics["weights/probe_gap"], metrics["weights/probe_gap_mean"]
        for name, gap in gaps.items():
            if not (gap.largest > 10 * parity or gap.mean > 10 * mean):  # one unlikely token may be far off as it is
                raise WeightSyncError(
                    f"engine {name}: altered weights moved the probe's log-probs by {gap.largest:.3g} nats only, the "
                    f"true ones by {parity:.3g}: either the engine does not load what it is sent, or the probe is too "
                    "blunt."
                )
        self.metrics = metrics | {"weights/self_test_gap": min(gap.largest for gap in gaps.values())}
        return self.metrics

    async def _sync(self, version: int, engines: list[Any]) -> dict[str, float]:
        async with self._sync_scope(version, engines):
            manifest, num_buckets = await self._transfer(version, engines)
            gap = await self.verify(version, engines)
        self.metrics = {
            "weights/version": float(version),
            "weights/bytes": float(sum(num_bytes(spec) for spec in manifest.tensors)),
            "weights/buckets": float(num_buckets),
        }
        if gap is not None:
            self.metrics |= {"weights/probe_gap": gap.largest, "weights/probe_gap_mean": gap.mean}
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
                raise EngineError(f"engine {lost!r} was lost at {self._phase}: {error}") from error
            raise

    # -- sending -----------------------------------------------------------------------------------------------------

    async def _transfer(self, version: int, engines: list[Any], perturbed: bool = False) -> tuple[Manifest, int]:
        """Send the weights, or altered ones for a self-test; returns the manifest and the number of buckets."""
        if not engines:
            raise WeightSyncError("no inference engine is alive: there is nobody to send weights to.")
        await self._connect(engines)
        self._phase = "the trainer's manifest"
        manifest: Manifest = (await self._trainer.call_all("prepare_manifest", version, perturbed))[0]
        self._check_manifest(manifest)
        self._phase = "engines checking the manifest"
        await gather_all(engine.begin_weights(manifest) for engine in engines)
        planned = plan_buckets(manifest)
        await (
            self._broadcast(planned, engines)
            if self._route == "broadcast"
            else self._send_buckets_by_handle(planned, engines)
        )
        self._phase = "engines checking what they hold"
        await gather_all(engine.commit_weights(version) for engine in engines)
        await self._trainer.call_all("mark_weights_delivered", version)
        return manifest, len(planned)

    def _check_manifest(self, manifest: Manifest) -> None:
        """Raises WeightSyncError for weights that are not finite, or not those that this version had before."""
        version, updates = manifest.version, manifest.updates
        if manifest.non_finite:
            names = ", ".join(manifest.non_finite[:3]) + (", ..." if len(manifest.non_finite) > 3 else "")
            raise NonFiniteWeights(f"{names} holds NaN or infinity in version {version} of the trainer's weights.")
        if (
            self._announced_version is not None
            and self._announced_version[0] == version
            and self._announced_version[1] != updates
        ):
            raise WeightSyncError(
                f"the trainer's weights were changed while they were called version {version}: {updates} optimizer "
                f"steps made them, {self._announced_version[1]} when that version was first sent. No engine was given them."
            )
        self._announced_version = version, updates

    async def _broadcast(self, planned: Sequence[Bucket], engines: Sequence[Any]) -> None:
        """Trainer and engines take part in a collective for every bucket; nobody waits for others between them."""
        under_way = dict.fromkeys(range(len(engines) + 1), 0)

        async def take_part(who: int, act: Callable[[Bucket], Awaitable[Any]]) -> None:
            for bucket in planned:
                under_way[who] = bucket.index
                self._set_bucket_phase(planned[min(under_way.values())], planned)  # the slowest one's
                await act(bucket)
            del under_way[who]

        def send(bucket: Bucket) -> Awaitable[Any]:
            return self._trainer.call_all("send_weights", bucket.index)

        acts = [send, *(engine.receive_weights for engine in engines)]
        await gather_all(take_part(who, act) for who, act in enumerate(acts))

    async def _send_buckets_by_handle(self, planned: Sequence[Bucket], engines: Sequence[Any]) -> None:
        """The trainer's answer contains a bucket or its location; it prepares the next one while engines load it."""
        offers = asyncio.ensure_future(self._prepare_bucket(planned[0])) if planned else None
        try:
            for bucket, following in zip(planned, [*planned[1:], None], strict=True):
                self._set_bucket_phase(bucket, planned)
                assert offers is not None
                offered = await offers
                offers = asyncio.ensure_future(self._prepare_bucket(following)) if following else None
                await gather_all(engine.receive_weights(offered) for engine in engines)
        finally:
            if offers is not None:
                offers.cancel()

    async def _prepare_bucket(self, bucket: Bucket) -> Bucket:
        answers = [
            answer for answer in await self._trainer.call_all("send_weights", bucket.index) if answer is not None
        ]
        return replace(answers[0], handles=tuple(handle for answer in answers for handle in answer.handles))

    def _set_bucket_phase(self, bucket: Bucket, planned: Sequence[Bucket]) -> None:
        self._phase = f"bucket {bucket.index + 1} of {len(planned)} ({bucket.names[0]}...)"

    async def _connect(self, engines: list[Any]) -> None:
        if len(engines) == len(self._connected) and all(a is b for a, b in zip(engines, self._connected, strict=True)):
            return
        self._phase = "connecting trainer and engines"
        sizes = [engine.capabilities.weight_ranks for engine in engines]
        address, world_size = self._folder, sum(sizes) + 1
        if self._route == "broadcast":
            others = any(engine.capabilities.other_machine for engine in engines)
            host, port = (await self._trainer.call_all("address", others))[0]
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
        """Disconnect the trainer, so that no engine waits for it in vain; its errors do not matter to the caller."""
        self._connected = []
        closing = asyncio.ensure_future(self._trainer.call_all("disconnect_weights"))
        address, self._address = self._address, ""
        deadline = time.monotonic() + self._deadline_s
        done, _ = await asyncio.wait([closing], timeout=_DISCONNECT_POLL_S)
        # A rank that waits for a peer takes no other call. A busy machine may not take the first connection in time.
        while not done and address and time.monotonic() < deadline:
            await asyncio.to_thread(abort_group, address)
            done, _ = await asyncio.wait([closing], timeout=_DISCONNECT_POLL_S)
        await asyncio.wait([closing], timeout=deadline - time.monotonic())
        closing.cancel()  # a rank with a call in flight is not asked whether it responds: see Learner.is_responsive
        await asyncio.wait([closing])
        if not closing.cancelled():
            closing.exception()

    # -- verifying ---------------------------------------------------------------------------------------------------

    async def verify(self, version: int, engines: Sequence[Any]) -> _LogprobDiff | None:
        """Check that these engines serve `version` completely, and compare log-probs if the probe is due.

        Returns the largest gaps that the probe found. Raises WeightSyncError naming an engine that differs.
        """
        self._phase = "engines naming their version"
        for health in await gather_all(engine.health() for engine in engines):
            if health.torn or health.version != version:
                state = "is torn" if health.torn else f"serves version {health.version}"
                raise WeightSyncError(
                    f"engine {health.name} {state}, but the trainer is at version {version}: sync it first."
                )
        probe = self._probe
        if probe is None or (self._probe_passed and not probe.every_sync):
            return None
        gaps = await self._measure_probe_diffs(probe, engines)
        for name, gap in gaps.items():
            _check_logprob_diff(name, gap, probe, version)
        self._probe_passed = True
        return _LogprobDiff(*(max(found) for found in zip(*gaps.values(), strict=True)))

    async def _measure_probe_diffs(self, probe: Probe, engines: Sequence[Any]) -> dict[str, _LogprobDiff]:
        """Return the gap of each engine, by its name."""
        self._phase = "the log-prob probe"
        names = [health.name for health in await gather_all(engine.health() for engine in engines)]
        expected = await probe.compute_trainer_logprobs(probe.token_ids)
        async with probe.offload_trainer():
            answers = await gather_all(engine.score(probe.token_ids) for engine in engines)
        return {name: _logprob_diff(expected, answer) for name, answer in zip(names, answers, strict=True)}


async def _find_lost_engine(engines: Sequence[Any]) -> str | None:
    """The name of an engine that does not answer: in a collective its peers fail first, and do not know which it is."""
    answers = asyncio.gather(*(engine.health() for engine in engines), return_exceptions=True)
    with suppress(TimeoutError):
        async with asyncio.timeout(_HEALTH_TIMEOUT_S):
            for engine, answer in zip(engines, await answers, strict=True):
                if isinstance(answer, EngineError):
                    return str(engine.capabilities.name)
    return None


def _logprob_diff(expected: list[list[float]], found: list[list[float]]) -> _LogprobDiff:
    """A NaN anywhere makes both NaN, which no tolerance allows."""
    pairs = [pair for mine, theirs in zip(expected, found, strict=True) for pair in zip(mine, theirs, strict=True)]
    trainers, engines = np.array(pairs).T
    differences = np.abs(trainers - engines)
    relative = differences / np.maximum(np.abs(trainers), 1)
    return _LogprobDiff(float(differences.max()), float(differences.mean()), float(relative.max()))


def _check_logprob_diff(name: str, gap: _LogprobDiff, probe: Probe, version: int) -> None:
    """Raises WeightSyncError for a gap that the probe does not allow."""
    if not gap.relative <= probe.tolerance:
        raise WeightSyncError(
            f"engine {name}: log-probs of the probe's tokens differ from the trainer's by {gap.largest:.3g} nats, and "
            f"by {gap.relative:.3g} of a token's log-prob or of 1 nat, whichever is more (allowed: "
            f"{probe.tolerance:g}) at version {version}: its weights are stale or altered."
        )
    if not gap.mean <= probe.mean_tolerance:
        raise WeightSyncError(
            f"engine {name}: log-probs of the first prompts differ from the trainer's by {gap.mean:.3g} nats on "
            f"average (allowed: {probe.mean_tolerance:g}; the largest: {gap.largest:.3g}) at version {version}, more "
            "than half precision explains: engine and trainer do not compute the same model. Compare their settings "
            "(rope, adapters, quantization), try generator.model_dtype=float32 with trainer.bf16=false, or train all "
            "the same with generator.weight_sync_check=off."
        )
