"""The `broadcast` route over real sockets: engines in threads of this process, and one in a process of its own."""

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


class Faulty(FakeEngine):
    """An engine that does `action` once, when bucket `at` is due."""

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
        if action == "refuse":
            raise EngineError(f"{self.name} refuses")
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


def holds_trainers_weights(trainer: LocalTrainer, engine: FakeEngine) -> bool:
    held = dict(engine.model.named_parameters())
    return all(torch.equal(held[name], tensor) for name, tensor in trainer.model.named_parameters())


def close(trainer: LocalTrainer, *engines: FakeEngine) -> None:
    trainer.sender.close()
    for engine in engines:
        engine.receiver.close()


@pytest.mark.parametrize("tied", [True, False])
def test_two_engines_get_every_version_over_one_connection(tied):
    trainer = LocalTrainer(tiny_model(seed=1, tied=tied, **SMALL), bucket_bytes=20_000)
    engines = [FakeEngine(tiny_model(seed=seed, tied=tied, **SMALL), f"engine-{seed}") for seed in (2, 3)]
    weight_sync = sync_of(trainer, engines)

    connections = []
    connect = engines[0].receiver.connect

    def counted(*arguments: Any) -> None:
        connections.append(arguments)
        connect(*arguments)

    engines[0].receiver.connect = counted  # type: ignore[method-assign,assignment]

    async def syncs() -> None:
        for version in (0, 1, 2):
            perturb(trainer.model)
            await weight_sync.sync_all(version)
            assert all(holds_trainers_weights(trainer, engine) for engine in engines)
        assert len(connections) == 1

    asyncio.run(syncs())
    close(trainer, *engines)


def plain(**tensors: Tensor) -> Any:
    return torch.nn.ParameterDict({name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()})


def test_tensors_that_stand_alone_arrive_bit_for_bit_however_they_lie_in_memory():
    torch.manual_seed(0)
    sent = {
        "whole": torch.randn(6, 8),
        "with a gap": torch.randn(7),
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


def test_the_probe_agrees_over_a_bfloat16_wire_when_the_trainer_scores_in_it_too():
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
    assert holds_trainers_weights(trainer, engine)
    close(trainer, engine)


@pytest.mark.fault("F30")
@pytest.mark.parametrize(
    ("action", "error", "message"),
    [
        ("die", EngineError, "right died|engine 'right' was lost"),  # the others may notice first
        ("hang", DeadlineExceeded, r"weight sync of version 2: bucket 2 of \d+ .* within 15 s"),
        ("drop", WeightSyncError, "engine right: bucket 1 is missing: bucket 2 was sent instead"),
    ],
)
def test_an_engine_lost_between_buckets_ends_the_sync_in_time_and_a_complete_one_heals(action, error, message):
    before = set(threading.enumerate())
    trainer = LocalTrainer(tiny_model(seed=1, **SMALL), bucket_bytes=20_000)
    engines = [Faulty("left"), Faulty("right")]
    weight_sync = sync_of(trainer, engines, deadline_s=15)

    async def story() -> None:
        await weight_sync.sync_all(1)
        perturb(trainer.model)
        engines[1].action = action
        start = time.monotonic()
        with pytest.raises(error, match=message):
            await weight_sync.sync_all(2)
        assert time.monotonic() - start < 30
        if action == "hang":  # else it may end before left has loaded anything
            assert engines[0].receiver.partially_loaded
        assert engines[0].receiver.version == 1
        engines[1].dead = False  # restarted
        with pytest.raises(WeightSyncError, match=r"engine left (is partially loaded|serves version 1)"):
            await weight_sync.verify(2, engines)
        await weight_sync.sync_all(2)
        for engine in engines:
            assert holds_trainers_weights(trainer, engine)
            assert (engine.receiver.partially_loaded, engine.receiver.version) == (False, 2)

    asyncio.run(story())
    close(trainer, *engines)
    assert not [thread for thread in set(threading.enumerate()) - before if "asyncio" in thread.name]


class OneCallAtATime(LocalTrainer):
    """A trainer that behaves like an actor: calls run one at a time, to their end, even if the caller gives up."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.thread = ThreadPoolExecutor(1)

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        call = asyncio.get_running_loop().run_in_executor(self.thread, getattr(self, method), *args)
        return [await asyncio.shield(call)]


class Unwilling(Faulty):
    """Fails as it is asked to connect, while the others wait for it."""

    async def connect_weights(self, route: str, address: str, rank: int, world_size: int, timeout_s: float) -> None:
        if self.action == "connect":
            self.action = ""
            raise EngineError(f"{self.name} does not connect")
        await super().connect_weights(route, address, rank, world_size, timeout_s)


@pytest.mark.fault("F30")
@pytest.mark.defect("a-disconnect-waits-for-what-hangs")
@pytest.mark.parametrize(("action", "lost_calls"), [("refuse", 0), ("connect", 0), ("connect", 1)])
def test_a_sync_that_one_engine_fails_is_called_off_for_all_long_before_its_deadline(
    action: str, lost_calls: int, monkeypatch: pytest.MonkeyPatch
):
    """Without closing its connection: the others would wait for it as long as they may.

    A busy machine may not take the first connection that calls the transfer off.
    """
    attempts = itertools.count()
    monkeypatch.setattr(
        "skyrl_train.weight_sync.sync.abort_group",
        lambda address: None if next(attempts) < lost_calls else abort_group(address),
    )
    trainer = OneCallAtATime(tiny_model(seed=1, **SMALL), bucket_bytes=20_000)
    engines = [Unwilling("left"), Unwilling("right", action)]
    weight_sync = sync_of(trainer, engines, deadline_s=120)

    async def story() -> None:
        start = time.monotonic()
        with pytest.raises(EngineError, match=r"right (refuses|does not connect)"):
            await weight_sync.sync_all(1)
        assert time.monotonic() - start < 30
        await weight_sync.sync_all(1)
        assert all(holds_trainers_weights(trainer, engine) for engine in engines)

    asyncio.run(story())
    close(trainer, *engines)


class Forgetful(LocalTrainer):
    """Sends another value of one parameter than the one that it announced."""

    def __init__(self, model: PreTrainedModel, altered: str):
        super().__init__(model, bucket_bytes=20_000)
        self.altered = altered
        self.readings = 0

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        self.readings += 1
        second = self.readings % 2 == 0
        for name, tensor in self.model.named_parameters():
            yield name, tensor + 1 if second and name == self.altered else tensor


@pytest.mark.fault("F30")
@pytest.mark.parametrize(
    ("altered", "torn"),
    [
        ("model.embed_tokens.weight", False),  # in the first bucket: nothing was loaded
        ("model.layers.1.self_attn.q_proj.weight", True),
        ("model.norm.weight", True),  # in the last, which no other follows
    ],
)
def test_a_tensor_that_arrives_altered_is_named_though_the_next_bucket_is_on_its_way(altered: str, torn: bool):
    trainer = Forgetful(tiny_model(seed=1, **SMALL), altered)
    engines = [FakeEngine(tiny_model(seed=seed, **SMALL), f"engine-{seed}") for seed in (2, 3)]
    before = {name: tensor.detach().clone() for name, tensor in engines[0].model.named_parameters()}
    weight_sync = sync_of(trainer, engines)
    with pytest.raises(WeightSyncError, match=f"engine-[23]: {altered} changed in transit"):
        asyncio.run(weight_sync.sync_all(1))
    for engine in engines:
        assert (engine.receiver.version, engine.receiver.partially_loaded) == (0, torn)
    held = dict(engines[0].model.named_parameters())
    assert torch.equal(held[altered], before[altered])
    assert all(torch.equal(held[name], before[name]) for name in held) != torn
    trainer.altered = ""
    asyncio.run(weight_sync.sync_all(1))
    assert all(holds_trainers_weights(trainer, engine) for engine in engines)
    close(trainer, *engines)


def test_buckets_of_a_broadcast_between_cpus_fit_the_cache():
    trainer = LocalTrainer(tiny_model(seed=1, **SMALL), bucket_bytes=1 << 30)
    engine = FakeEngine(tiny_model(seed=2, **SMALL), "engine-0")
    assert trainer.prepare_manifest(0).bucket_bytes == 1 << 30
    asyncio.run(sync_of(trainer, [engine]).sync_all(1))
    assert trainer.prepare_manifest(2).bucket_bytes == MAX_CPU_BUCKET_BYTES
    close(trainer, engine)


@pytest.mark.fault("F30")
def test_engines_that_never_connect_are_a_deadline_not_a_hang():
    trainer = LocalTrainer(tiny_model(seed=1, **SMALL))

    class Absent(Faulty):
        async def connect_weights(self, route, address, rank, world_size, timeout_s) -> None:
            await asyncio.sleep(3600)

    start = time.monotonic()
    with pytest.raises(
        (DeadlineExceeded, WeightSyncError), match=r"the connection of trainer and engines|could not connect"
    ):
        asyncio.run(sync_of(trainer, [Absent("absent")], deadline_s=2).sync_all(1))
    assert time.monotonic() - start < 30


@pytest.mark.fault("F30")
def test_a_bucket_out_of_step_is_refused_before_its_bytes_meet_a_buffer_of_another_size():
    """gloo ends the process where lengths differ, so this must be seen first."""
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
    """An engine's process: method calls in, answers out."""
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


class RemoteTarget:
    """The engine in another process, called over a pipe."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other,), daemon=True)
        self.process.start()
        other.close()
        self.kill_at: int | None = None
        self.capabilities = Capabilities("right")

    async def call(self, method: str, *args):
        def ask():
            try:
                self.connection.send((method, args))
                return self.connection.recv()
            except (EOFError, OSError) as error:
                raise EngineError("remote died") from error

        answer, error = await asyncio.to_thread(ask)
        if error is not None:
            raise error
        return answer

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
def test_an_engine_process_killed_between_buckets_neither_hangs_the_trainer_nor_the_next_sync():
    trainer = LocalTrainer(tiny_model(seed=1, **SMALL), bucket_bytes=20_000)
    remote, local = RemoteTarget(), FakeEngine(tiny_model(seed=2, **SMALL), "local")
    engines: list[Any] = [local, remote]
    weight_sync = WeightSync(trainer, lambda: engines, route="broadcast", deadline_s=60)

    async def story() -> None:
        await weight_sync.sync_all(1)
        held = await remote.call("fingerprints")
        assert held == {name: fingerprint(tensor) for name, tensor in trainer.model.named_parameters()}
        perturb(trainer.model)
        remote.kill_at = 2
        start = time.monotonic()
        with pytest.raises((EngineError, WeightSyncError)):
            await weight_sync.sync_all(2)
        assert time.monotonic() - start < 40
        assert local.receiver.partially_loaded
        engines.remove(remote)
        await weight_sync.sync_all(2)
        assert holds_trainers_weights(trainer, local)

    try:
        asyncio.run(story())
    finally:
        remote.process.kill()
        remote.process.join()
        close(trainer, local)
