"""An engine whose accelerator no longer works is dead and is restarted. Other failures end only requests."""

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
    """A stub of a device that fails for good after `illegal_access`, like a CUDA context."""

    def __init__(self) -> None:
        self.is_broken = False
        self.num_checks = 0

    def check(self) -> None:
        self.num_checks += 1
        if self.is_broken:
            raise RuntimeError(ILLEGAL)

    def illegal_access(self, *_: Any) -> Any:
        self.is_broken = True
        raise RuntimeError(ILLEGAL)

    def ordinary_failure(self, *_: Any) -> Any:
        raise RuntimeError("an ordinary failure")


def engine_on(device: Device) -> TransformersEngine:
    engine = TransformersEngine(tiny_model(hidden_size=32), name="a")
    engine.device_monitor.check_device = device.check  # type: ignore[method-assign]
    return engine


def request(max_tokens: int = 4) -> SampleRequest:
    return SampleRequest("r", to_token_array((5, 6, 7)), SamplingParams(max_tokens=max_tokens, ignore_eos=True), 0)


async def generate_supervised(engines: list[TransformersEngine]) -> tuple[Completion, WeightPublisher, EngineClient]:
    """Run a request on the first engine. A restart uses the other engines as replacements."""
    client, replacements = EngineClient([engines[0]], deadline_s=20), engines[1:]

    async def start(name: str, wait_for_node: bool) -> TransformersEngine:
        return replacements.pop()

    async def noop(engine: Any) -> None:
        pass

    cast(Any, engines[0]).kill = lambda: None  # without `kill` the engine would be closed before its restart
    publisher = publisher_of(client, start, noop, max_engine_restarts=1)
    (completion,) = await client.generate([request()])
    return completion, publisher, client


@pytest.mark.defect("broken-device-passes-health-check")
def test_device_error_in_step_restarts_engine():
    device = Device()

    async def run() -> None:
        engines = [engine_on(device), engine_on(Device())]
        engines[0].served.decode = device.illegal_access  # type: ignore[method-assign,assignment]
        completion, publisher, client = await generate_supervised(engines)
        assert (completion.stop_reason, publisher.restarts, client.dead_engines) == ("length", 1, {})
        with pytest.raises(EngineError, match=f"'a' is dead: .*{ILLEGAL}"):
            await engines[0].health()
        with pytest.raises(EngineError, match="'a' is dead"):
            await engines[0].generate([request()])
        for engine in engines:
            await engine.close()

    asyncio.run(run())
    assert device.num_checks == 1, "a lost device is not checked again"


def test_error_with_working_device_loses_only_requests():
    device = Device()

    async def run() -> None:
        engine = engine_on(device)
        decode, engine.served.decode = engine.served.decode, device.ordinary_failure  # type: ignore[method-assign,assignment]
        with pytest.raises(EngineError, match="an ordinary failure"):
            await engine.generate([request()])
        engine.served.decode = decode  # type: ignore[method-assign]
        completion, publisher, _ = await generate_supervised([engine])
        assert (completion.stop_reason, publisher.restarts) == ("length", 0)
        await engine.close()

    asyncio.run(run())
    assert device.num_checks == 1


@pytest.mark.defect("broken-device-passes-health-check")
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
    """After a sync that another rank aborted, the device may still be busy, so the check must not wait for it."""
    device = Device()

    def raise_package_error() -> None:
        raise WeightSyncError("the manifest is stale")

    with pytest.raises(WeightSyncError):
        DeviceMonitor(Lifecycle("a"), device.check).run(raise_package_error)
    assert device.num_checks == 0


@pytest.mark.defect("broken-device-passes-health-check")
def test_device_error_in_transfer_kills_engine():
    device = Device()
    lifecycle = Lifecycle("a")
    monitor = DeviceMonitor(lifecycle, device.check, device.illegal_access)

    def raise_transfer_error() -> None:
        raise WeightSyncError("a transfer of 8 bytes did not complete")

    with pytest.raises(EngineError, match=f"'a' is dead: .*{ILLEGAL}"):
        monitor.run(raise_transfer_error)
    with pytest.raises(EngineError, match="'a' is dead"):
        lifecycle.check_alive()
    assert device.num_checks == 0, "no check waits for a device on which a transfer may still hang"


def test_out_of_memory_is_not_device_error(monkeypatch: pytest.MonkeyPatch):
    def raise_out_of_memory(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def raise_device_error(*_: Any) -> None:
        raise RuntimeError(ILLEGAL)

    monkeypatch.setattr(torch, "ones", raise_out_of_memory)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    check_device(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "synchronize", raise_device_error)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        check_device(torch.device("cuda"))
