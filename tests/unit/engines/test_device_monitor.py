"""An engine whose accelerator does not compute any more is dead, and is restarted; any other failure costs requests."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
import torch

from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.engines.base import Completion, SampleRequest, SamplingParams
from skyrl_train.engines.client import EngineClient
from skyrl_train.engines.lifecycle import Lifecycle
from skyrl_train.engines.step_loop import DeviceMonitor, check_device
from skyrl_train.engines.transformers.engine import TransformersEngine
from skyrl_train.errors import EngineError, WeightSyncError
from skyrl_train.testing.tiny_models import tiny_model
from skyrl_train.trainer.publisher import WeightPublisher
from tests.support.publishers import publisher_of

ILLEGAL = "CUDA error: an illegal memory access was encountered"


class Device:
    """A stub that computes until it is poisoned, as a CUDA context is by an illegal access."""

    def __init__(self) -> None:
        self.poisoned = False
        self.asked = 0

    def compute(self) -> None:
        self.asked += 1
        if self.poisoned:
            raise RuntimeError(ILLEGAL)

    def illegal_access(self, *_: Any) -> Any:
        self.poisoned = True
        raise RuntimeError(ILLEGAL)

    def ordinary_failure(self, *_: Any) -> Any:
        raise RuntimeError("an ordinary failure")


def engine_on(device: Device) -> TransformersEngine:
    engine = TransformersEngine(tiny_model(hidden_size=32), name="a")
    engine.device_monitor.check_device = device.compute  # type: ignore[method-assign]
    return engine


def request(max_tokens: int = 4) -> SampleRequest:
    return SampleRequest("r", to_token_array((5, 6, 7)), SamplingParams(max_tokens=max_tokens, ignore_eos=True), 0)


async def generate_supervised(engines: list[TransformersEngine]) -> tuple[Completion, WeightPublisher, EngineClient]:
    """One request to the first engine; the others are those that a restart starts."""
    client, spare = EngineClient([engines[0]], deadline_s=20), engines[1:]

    async def start(name: str, wait_for_node: bool) -> TransformersEngine:
        return spare.pop()

    async def nothing(engine: Any) -> None:
        pass

    cast(Any, engines[0]).kill = lambda: None  # or it would be closed before its restart
    publisher = publisher_of(client, start, nothing, max_engine_restarts=1)
    (answer,) = await client.generate([request()])
    return answer, publisher, client


@pytest.mark.defect("poisoned-device-counted-as-alive")
def test_device_error_in_step_restarts_engine():
    device = Device()

    async def run() -> None:
        engines = [engine_on(device), engine_on(Device())]
        engines[0].served.decode = device.illegal_access  # type: ignore[method-assign,assignment]
        answer, publisher, client = await generate_supervised(engines)
        assert (answer.stop_reason, publisher.restarts, client.dead_engines) == ("length", 1, {})
        with pytest.raises(EngineError, match=f"'a' is dead: .*{ILLEGAL}"):
            await engines[0].health()
        with pytest.raises(EngineError, match="'a' is dead"):
            await engines[0].generate([request()])
        for engine in engines:
            await engine.close()

    asyncio.run(run())
    assert device.asked == 1, "what is lost is not asked again"


def test_error_with_working_device_loses_only_requests():
    device = Device()

    async def run() -> None:
        engine = engine_on(device)
        decode, engine.served.decode = engine.served.decode, device.ordinary_failure  # type: ignore[method-assign,assignment]
        with pytest.raises(EngineError, match="an ordinary failure"):
            await engine.generate([request()])
        engine.served.decode = decode  # type: ignore[method-assign]
        answer, publisher, _ = await generate_supervised([engine])
        assert (answer.stop_reason, publisher.restarts) == ("length", 0)
        await engine.close()

    asyncio.run(run())
    assert device.asked == 1


@pytest.mark.defect("poisoned-device-counted-as-alive")
def test_device_error_in_command_kills_only_engine():
    device = Device()

    async def run() -> None:
        engine = engine_on(device)
        engine.served.score = device.illegal_access  # type: ignore[method-assign,assignment]
        with pytest.raises(EngineError, match="'a' is dead"):
            await engine.score([[5, 6]])
        with pytest.raises(EngineError, match="'a' is dead"):
            await engine.health()
        await engine.close()

    asyncio.run(run())


def test_device_error_ends_requests_of_paused_engine():
    device = Device()

    async def run() -> None:
        engine = engine_on(device)
        call = asyncio.ensure_future(engine.generate([request(max_tokens=1000)]))
        while not (await engine.health()).running:
            await asyncio.sleep(0.001)
        await engine.pause()
        engine.served.score = device.illegal_access  # type: ignore[method-assign,assignment]
        with pytest.raises(EngineError, match="'a' is dead"):
            await engine.score([[5, 6]])
        async with asyncio.timeout(10):
            with pytest.raises(EngineError, match="'a' is dead"):
                await call
        await engine.close()

    asyncio.run(run())


def test_package_errors_do_not_trigger_device_check():
    """A sync that another rank gave up may still wait on the device: it must not wait, too."""
    device = Device()

    def refused() -> None:
        raise WeightSyncError("the manifest is stale")

    with pytest.raises(WeightSyncError):
        DeviceMonitor(Lifecycle("a"), device.compute).run(refused)
    assert device.asked == 0


@pytest.mark.defect("poisoned-device-counted-as-alive")
def test_device_error_in_transfer_kills_engine():
    device = Device()
    lifecycle = Lifecycle("a")
    accelerator = DeviceMonitor(lifecycle, device.compute, device.illegal_access)

    def failed() -> None:
        raise WeightSyncError("a transfer of 8 bytes did not complete")

    with pytest.raises(EngineError, match=f"'a' is dead: .*{ILLEGAL}"):
        accelerator.run(failed)
    with pytest.raises(EngineError, match="'a' is dead"):
        lifecycle.check_alive()
    assert device.asked == 0, "nobody waits for a device on which a transfer may still hang"


def test_out_of_memory_is_not_device_error(monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def poisoned(*_: Any) -> None:
        raise RuntimeError(ILLEGAL)

    monkeypatch.setattr(torch, "ones", full)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    check_device(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "synchronize", poisoned)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        check_device(torch.device("cuda"))
