"""The `broadcast` route over real sockets, with engines in threads of this process and in another process."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from skyrl_train.engines.base import Capabilities, EngineHealth
from skyrl_train.errors import DeadlineExceeded, EngineError, SkyRLError, WeightSyncError
from skyrl_train.testing.tiny_models import tiny_model
from skyrl_train.weight_sync.broadcast import BroadcastGroup, abort_group
from skyrl_train.weight_sync.buckets import fingerprint
from skyrl_train.weight_sync.protocol import Bucket
from skyrl_train.weight_sync.sender import MAX_CPU_BUCKET_BYTES
from skyrl_train.weight_sync.sync import Probe, WeightSync
from tests.support.weight_targets import FakeEngine, LocalTrainer, score

SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32}


class FaultyEngine(FakeEngine):
    """An engine that performs `action` once, when bucket `at` is due."""

    def __init__(self, name: str, action: str = "", at: int = 1):
        super().__init__(tiny_model(seed=2, **SMALL), name)
        self.action = action
        self.at = at
        self.dead = False

    async def health(self) -> EngineHealth:
        if self.dead:
            raise EngineError(f"{self.name} died")
        return await super().health()

    async def receive_weights(self, bucket: Bucket) -> None:
        action, self.action = (self.action, "") if bucket.index == self.at else ("", self.action)
        if action == "die":
            self.dead = True
            self.receiver.close()
            raise EngineError(f"{self.name} died")
        if action == "reject":
            raise EngineError(f"{self.name} rejects the bucket")
        if action == "hang":
            await asyncio.sleep(3600)
        if action != "drop":
            await super().receive_weights(bucket)


def perturb(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))


def sync_of(trainer: LocalTrainer, engines: Sequence[Any], deadline_s: float = 30) -> WeightSync:
    return WeightSync(trainer, lambda: engines, route="broadcast", deadline_s=deadline_s)


def has_trainers_weights(trainer: LocalTrainer, engine: FakeEngine) -> bool:
    weights = dict(engine.model.named_parameters())
    return all(torch.equal(weights[name], tensor) for name, tensor in trainer.model.named_parameters())


def close(trainer: LocalTrainer, *engines: FakeEngine) -> None:
    trainer.sender.close()
    for engine in engines:
        engine.receiver.close()


@pytest.mark.parametrize("tied", [True, False])
def test_engines_get_all_versions_over_one_connection(tied):
    trainer = LocalTrainer(tiny_model(seed=1, tied=tied, **SMALL), bucket_bytes=20_000)
    engines = [FakeEngine(tiny_model(seed=seed, tied=tied, **SMALL), f"engine-{seed}") for seed in (2, 3)]
    weight_sync = sync_of(trainer, engines)

    connections = []
    connect = engines[0].receiver.connect

    def count_and_connect(*arguments: Any) -> None:
        connections.append(arguments)
        connect(*arguments)

    engines[0].receiver.connect = count_and_connect  # type: ignore[method-assign,assignment]

    async def run() -> None:
        for version in (0, 1, 2):
            perturb(trainer.model)
            await weight_sync.sync_all(version)
            assert all(has_trainers_weights(trainer, engine) for engine in engines)
        assert len(connections) == 1

    asyncio.run(run())
    close(trainer, *engines)


def plain(**tensors: Tensor) -> Any:
    return torch.nn.ParameterDict({name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()})


def test_single_tensor_buckets_arrive_exactly():
    torch.manual_seed(0)
    sent = {
        "full": torch.randn(6, 8),
        "with padding": torch.randn(7),
        "transposed": torch.randn(8, 6).T,
        "part": torch.randn(100)[1:41],
        "cast": torch.randn(12).bfloat16(),
        "empty": torch.zeros(0),
    }
    trainer = LocalTrainer(plain(**sent), bucket_bytes=1)
    engine = FakeEngine(plain(**{name: torch.zeros(tensor.shape) for name, tensor in sent.items()}), "engine-0")
    metrics = asyncio.run(sync_of(trainer, [engine]).sync_all(1))
    assert metrics["weights/buckets"] >= 5
    assert all(torch.equal(engine.model.get_parameter(name), tensor.float()) for name, tensor in sent.items())
    close(trainer, engine)


def test_probe_agrees_over_bfloat16_wire():
    trainer = LocalTrainer(tiny_model(seed=1, **SMALL), wire_dtype="bfloat16")
    engine = FakeEngine(tiny_model(seed=2, **SMALL), "engine-0")
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.copy_(parameter.bfloat16())

    async def trainer_score(token_ids):
        return score(trainer.model, token_ids)

    probe = Probe([[1, 2, 3, 4]], trainer_score)
    weight_sync = WeightSync(trainer, lambda: [engine], route="broadcast", deadline_s=30, probe=probe)
    asyncio.run(weight_sync.sync_all(1))
    assert has_trainers_weights(trainer, engine)
    close(trainer, engine)


@pytest.mark.fault("F30")
@pytest.mark.parametrize(
    ("action", "error", "message"),
    [
        ("die", EngineError, "right died|engine 'right' was lost"),  # other participants may notice it first
        ("hang", DeadlineExceeded, r"weight sync of version 2: bucket 2 of \d+ .* within 6 s"),
        ("drop", WeightSyncError, "engine right: bucket 1 is missing: bucket 2 was sent instead"),
    ],
)
def test_engine_lost_between_buckets_fails_sync_in_time(action, error, message):
    before = set(threading.enumerate())
    trainer = LocalTrainer(tiny_model(seed=1, **SMALL), bucket_bytes=20_000)
    engines = [FaultyEngine("left"), FaultyEngine("right")]
    weight_sync = sync_of(trainer, engines, deadline_s=6)

    async def run() -> None:
        await weight_sync.sync_all(1)
        perturb(trainer.model)
        engines[1].action = action
        start = time.monotonic()
        with pytest.raises(error, match=message):
            await weight_sync.sync_all(2)
        assert time.monotonic() - start < 30
        if action == "hang":  # otherwise the sync may end before left has loaded anything
            assert engines[0].receiver.partially_loaded
        assert engines[0].receiver.version == 1
        engines[1].dead = False  # restarted
        with pytest.raises(WeightSyncError, match=r"engine left (is partially loaded|serves version 1)"):
            await weight_sync.verify(2, engines)
        await weight_sync.sync_all(2)
        for engine in engines:
            assert has_trainers_weights(trainer, engine)
            assert (engine.receiver.partially_loaded, engine.receiver.version) == (False, 2)

    asyncio.run(run())
    close(trainer, *engines)
    assert not [thread for thread in set(threading.enumerate()) - before if "asyncio" in thread.name]


class SerialTrainer(LocalTrainer):
    """A trainer that behaves like an actor: it runs one call at a time, to the end, even if the caller gives up."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.thread = ThreadPoolExecutor(1)

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        call = asyncio.get_running_loop().run_in_executor(self.thread, getattr(self, method), *args)
        return [await asyncio.shield(call)]


class UnconnectableEngine(FaultyEngine):
    """An engine that fails to connect, while the other participants wait for it."""

    async def connect_weights(self, route: str, address: str, rank: int, world_size: int, timeout_s: float) -> None:
        if self.action == "connect":
            self.action = ""
            raise EngineError(f"{self.name} does not connect")
        await super().connect_weights(route, address, rank, world_size, timeout_s)


@pytest.mark.fault("F30")
@pytest.mark.defect("disconnect-waits-for-hung-engine")
@pytest.mark.parametrize(("action", "lost_calls"), [("reject", 0), ("connect", 0), ("connect", 1)])
def test_failure_of_one_engine_aborts_sync_early(action: str, lost_calls: int, monkeypatch: pytest.MonkeyPatch):
    """Fail an engine that keeps its connection open, so that the others would wait until the deadline.

    A busy machine may not accept the first connection that aborts the transfer.
    """
    attempts = itertools.count()
    monkeypatch.setattr(
        "skyrl_train.weight_sync.sync.abort_group",
        lambda address: None if next(attempts) < lost_calls else abort_group(address),
    )
    trainer = SerialTrainer(tiny_model(seed=1, **SMALL), bucket_bytes=20_000)
    engines = [UnconnectableEngine("left"), UnconnectableEngine("right", action)]
    weight_sync = sync_of(trainer, engines, deadline_s=120)

    async def run() -> None:
        start = time.monotonic()
        with pytest.raises(EngineError, match=r"right (rejects the bucket|does not connect)"):
            await weight_sync.sync_all(1)
        assert time.monotonic() - start < 30
        await weight_sync.sync_all(1)
        assert all(has_trainers_weights(trainer, engine) for engine in engines)

    asyncio.run(run())
    close(trainer, *engines)


class ChangingTrainer(LocalTrainer):
    """A trainer that sends another value of one parameter than the one that it announced."""

    def __init__(self, model: PreTrainedModel, changed: str):
        super().__init__(model, bucket_bytes=20_000)
        self.changed = changed
        self.readings = 0

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        self.readings += 1
        second = self.readings % 2 == 0
        for name, tensor in self.model.named_parameters():
            yield name, tensor + 1 if second and name == self.changed else tensor


@pytest.mark.fault("F30")
@pytest.mark.parametrize(
    ("changed", "partially_loaded"),
    [
        ("model.embed_tokens.weight", False),  # in the first bucket, before anything is loaded
        ("model.layers.1.self_attn.q_proj.weight", True),
        ("model.norm.weight", True),  # in the last bucket
    ],
)
def test_changed_tensor_is_named(changed: str, partially_loaded: bool):
    trainer = ChangingTrainer(tiny_model(seed=1, **SMALL), changed)
    engines = [FakeEngine(tiny_model(seed=seed, **SMALL), f"engine-{seed}") for seed in (2, 3)]
    before = {name: tensor.detach().clone() for name, tensor in engines[0].model.named_parameters()}
    weight_sync = sync_of(trainer, engines)
    with pytest.raises(WeightSyncError, match=f"engine-[23]: {changed} changed in transit"):
        asyncio.run(weight_sync.sync_all(1))
    for engine in engines:
        assert (engine.receiver.version, engine.receiver.partially_loaded) == (0, partially_loaded)
    weights = dict(engines[0].model.named_parameters())
    assert torch.equal(weights[changed], before[changed])
    assert all(torch.equal(weights[name], before[name]) for name in weights) != partially_loaded
    trainer.changed = ""
    asyncio.run(weight_sync.sync_all(1))
    assert all(has_trainers_weights(trainer, engine) for engine in engines)
    close(trainer, *engines)


def test_cpu_broadcast_buckets_fit_the_cache():
    trainer = LocalTrainer(tiny_model(seed=1, **SMALL), bucket_bytes=1 << 30)
    engine = FakeEngine(tiny_model(seed=2, **SMALL), "engine-0")
    assert trainer.prepare_manifest(0).bucket_bytes == 1 << 30
    asyncio.run(sync_of(trainer, [engine]).sync_all(1))
    assert trainer.prepare_manifest(2).bucket_bytes == MAX_CPU_BUCKET_BYTES
    close(trainer, engine)


@pytest.mark.fault("F30")
def test_engine_that_never_connects_hits_deadline():
    trainer = LocalTrainer(tiny_model(seed=1, **SMALL))

    class AbsentEngine(FaultyEngine):
        async def connect_weights(self, route, address, rank, world_size, timeout_s) -> None:
            await asyncio.sleep(3600)

    start = time.monotonic()
    with pytest.raises(
        (DeadlineExceeded, WeightSyncError), match=r"the connection of trainer and engines|could not connect"
    ):
        asyncio.run(sync_of(trainer, [AbsentEngine("absent")], deadline_s=2).sync_all(1))
    assert time.monotonic() - start < 30


@pytest.mark.fault("F30")
def test_unexpected_bucket_is_rejected_by_its_header():
    """gloo ends the process if lengths differ, so the header must be checked first."""
    address = "{}:{}".format(*LocalTrainer(tiny_model(**SMALL)).address())
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(BroadcastGroup, address, 1, 2, "cpu", 10.0)
        root = BroadcastGroup(address, 0, 2, "cpu", 10.0)
        peer = joining.result()
        sending = pool.submit(root.send_bucket, 7, 2, torch.zeros(999, dtype=torch.uint8))
        with pytest.raises(WeightSyncError, match=r"\[7, 1, 64\] was announced but \[7, 2, 999\] is being sent"):
            peer.receive_bucket(7, 1, torch.zeros(64, dtype=torch.uint8))
        peer.close()
        root.close()
        sending.exception()


def serve(connection) -> None:
    """Run an engine in its own process: receive method calls, send back results."""
    engine = FakeEngine(tiny_model(seed=5, **SMALL), "remote")

    def fingerprints() -> dict[str, int]:
        return {name: fingerprint(tensor) for name, tensor in engine.model.named_parameters()}

    while True:
        method, args = connection.recv()
        try:
            call = fingerprints() if method == "fingerprints" else asyncio.run(getattr(engine, method)(*args))
            connection.send((call, None))
        except SkyRLError as error:
            connection.send((None, error))


class RemoteProcessEngine:
    """An engine in another process that is called over a pipe."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other,), daemon=True)
        self.process.start()
        other.close()
        self.kill_at: int | None = None
        self.capabilities = Capabilities("right")

    async def call(self, method: str, *args):
        def send_and_receive():
            try:
                self.connection.send((method, args))
                return self.connection.recv()
            except (EOFError, OSError) as error:
                raise EngineError("remote died") from error

        result, error = await asyncio.to_thread(send_and_receive)
        if error is not None:
            raise error
        return result

    async def connect_weights(self, route, address, rank, world_size, timeout_s) -> None:
        await self.call("connect_weights", route, address, rank, world_size, timeout_s)

    async def begin_weights(self, manifest) -> None:
        await self.call("begin_weights", manifest)

    async def receive_weights(self, bucket: Bucket) -> None:
        if bucket.index == self.kill_at:
            assert self.process.pid is not None
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.join()
        await self.call("receive_weights", bucket)

    async def commit_weights(self, version) -> None:
        await self.call("commit_weights", version)

    async def score(self, token_ids, temperature: float = 1.0) -> list[list[float]]:
        return await self.call("score", token_ids, temperature)

    async def health(self) -> EngineHealth:
        return await self.call("health")


@pytest.mark.fault("F30")
def test_killed_engine_process_does_not_hang_trainer():
    trainer = LocalTrainer(tiny_model(seed=1, **SMALL), bucket_bytes=20_000)
    remote, local = RemoteProcessEngine(), FakeEngine(tiny_model(seed=2, **SMALL), "local")
    engines: list[Any] = [local, remote]
    weight_sync = WeightSync(trainer, lambda: engines, route="broadcast", deadline_s=60)

    async def run() -> None:
        await weight_sync.sync_all(1)
        remote_fingerprints = await remote.call("fingerprints")
        assert remote_fingerprints == {name: fingerprint(tensor) for name, tensor in trainer.model.named_parameters()}
        perturb(trainer.model)
        remote.kill_at = 2
        start = time.monotonic()
        with pytest.raises((EngineError, WeightSyncError)):
            await weight_sync.sync_all(2)
        assert time.monotonic() - start < 40
        assert local.receiver.partially_loaded
        engines.remove(remote)
        await weight_sync.sync_all(2)
        assert has_trainers_weights(trainer, local)

    try:
        asyncio.run(run())
    finally:
        remote.process.kill()
        remote.process.join()
        close(trainer, local)
