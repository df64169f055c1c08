"""Engines that join and leave: weights come before requests, no request is lost, and an engine always remains."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.engines.base import Completion, SampleRequest, SamplingParams
from skyrl_train.engines.client import EngineClient
from skyrl_train.engines.target_count import ENGINES_FILE, fixed_count_reason, write_target
from skyrl_train.errors import ConfigError, EngineError
from skyrl_train.testing.scripted_engine import ScriptedEngine
from skyrl_train.trainer import engine_scaler
from skyrl_train.trainer.engine_scaler import EngineScaler
from tests.support.publishers import publisher_of


class JoiningEngine(ScriptedEngine):
    """An engine that rejects requests before its first weights, and fails pending requests when it is closed."""

    def __init__(self, name: str, delay_s: float = 0.0, has_weights: bool = False):
        super().__init__(name=name, delay_s=delay_s)
        self.has_weights = has_weights
        self._closing = asyncio.Event()

    async def generate(self, requests: Any) -> list[Completion]:
        assert self.has_weights, "request before the current weights"
        answers = asyncio.ensure_future(super().generate(requests))
        closing = asyncio.ensure_future(self._closing.wait())
        await asyncio.wait({answers, closing}, return_when=asyncio.FIRST_COMPLETED)
        closing.cancel()
        if not answers.done():
            answers.cancel()
            raise EngineError(f"{self.name} was closed")
        return answers.result()

    async def health(self) -> Any:
        if self._closing.is_set():
            raise EngineError(f"{self.name} was closed")
        return await super().health()

    async def close(self) -> None:
        self._closing.set()
        await super().close()


class ScalerHarness:
    """A client with `num_engines` engines, its scaler, and records of what the scaler does."""

    def __init__(self, num_engines: int = 1, *, drain_s: float = 5.0, delay_s: float = 0.0, folder: Path = Path()):
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.has_free_gpus = True
        self.reports: list[str] = []
        self.stopped: list[str] = []
        self.delay_s = delay_s
        engines = [JoiningEngine(f"engine {index}", delay_s, has_weights=True) for index in range(num_engines)]
        self.client = EngineClient(engines, deadline_s=5)
        self.publisher = publisher_of(self.client, self.restart, self.sync, max_engine_restarts=9)
        self.scaler = EngineScaler(
            self.client,
            self.publisher,
            start=self.start,
            stop=self.stop,
            folder=folder,
            drain_s=drain_s,
            report=self.reports.append,
        )

    async def restart(self, name: str, wait_for_node: bool) -> JoiningEngine:
        return await self.start(name)

    async def start(self, name: str) -> JoiningEngine:
        await self.may_start.wait()
        if not self.has_free_gpus:
            raise ConfigError("no GPU is free")
        return JoiningEngine(name, self.delay_s)

    async def sync(self, engine: JoiningEngine) -> None:
        await asyncio.sleep(0)
        engine.has_weights = True

    async def stop(self, name: str, engine: JoiningEngine) -> None:
        self.stopped.append(name)
        await engine.close()

    async def scale_to(self, number: int) -> list[str]:
        self.scaler.set_target(number)
        await self.scaler.wait_until_settled()
        return self.client.engine_names


def request(name: str, session: str = "") -> SampleRequest:
    return SampleRequest(name, to_token_array((1, 2, 3)), SamplingParams(max_tokens=4), 0, session=session)


def async_test(check: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Turn a coroutine function into a test."""

    def test() -> None:
        asyncio.run(check())

    test.__name__ = check.__name__
    return test


@async_test
async def test_new_engines_get_weights_first_and_leave_first():
    run = ScalerHarness(1)
    assert await run.scale_to(3) == ["engine 0", "engine 1", "engine 2"]
    await run.client.generate([request(str(number)) for number in range(9)])
    engines: list[Any] = run.client.engines
    assert all(engine.batches for engine in engines), "a new engine receives requests"
    assert await run.scale_to(1) == ["engine 0"]
    assert sorted(run.stopped) == ["engine 1", "engine 2"]
    assert await run.scale_to(2) == ["engine 0", "engine 1"]
    assert (await run.client.metrics())["engines/count"] == 2
    await run.scaler.stop()


@async_test
async def test_leaving_engine_drains_and_gets_no_new_requests():
    run = ScalerHarness(2, delay_s=0.3)
    first = [asyncio.ensure_future(run.client.generate([request(f"a{n}", f"s{n}")])) for n in range(2)]
    await asyncio.sleep(0.05)
    leaving: Any = run.client.engines[1]
    run.scaler.set_target(1)
    assert leaving in run.client.engines, "it takes part in syncs until it is drained"
    assert (await run.client.metrics())["engines/count"] == 1
    later = await asyncio.gather(*(run.client.generate([request(f"b{n}", f"s{n}")]) for n in range(2)))
    await asyncio.gather(*first)
    await run.scaler.wait_until_settled()
    assert run.client.engine_names == ["engine 0"]
    assert len(leaving.batches) == 1
    assert [completion.request_id for (completion,) in later] == ["b0", "b1"]
    assert "all its requests finished" in run.reports[-1]


@async_test
async def test_drain_deadline_moves_requests_to_other_engines():
    run = ScalerHarness(3, drain_s=0.1, delay_s=0.4)
    waiting = [asyncio.ensure_future(run.client.generate([request(str(number))])) for number in range(3)]
    await asyncio.sleep(0.05)
    run.scaler.set_target(2)
    await run.scaler.wait_until_settled()
    assert run.stopped == ["engine 2"]
    assert "its unfinished requests go to other engines" in run.reports[0]
    await asyncio.sleep(0.05)
    second: Any = run.client.engines[0]
    assert [len(batch) for batch in second.batches] == [1, 1], "it received the request of the removed engine"
    await second.close()
    assert [completion.request_id for (completion,) in await asyncio.gather(*waiting)] == ["0", "1", "2"]


@async_test
async def test_removal_is_canceled_by_a_higher_target():
    run = ScalerHarness(2, delay_s=0.3)
    waiting = asyncio.ensure_future(run.client.generate([request("a"), request("b")]))
    await asyncio.sleep(0.05)
    run.scaler.set_target(1)
    run.scaler.set_target(2)
    await run.scaler.wait_until_settled()
    await waiting
    assert run.client.engine_names == ["engine 0", "engine 1"]
    assert run.stopped == run.client.retired_names == []
    await run.client.generate([request("c"), request("d")])
    engines: list[Any] = run.client.engines
    assert all(len(engine.batches) == 2 for engine in engines)


@async_test
async def test_sessions_keep_their_engine_when_another_leaves():
    run = ScalerHarness(3)
    await run.client.generate([request(f"a{n}", f"s{n}") for n in range(3)])
    last: Any = run.client.engines[2]
    run.client.retire("engine 1")
    run.client.remove("engine 1")
    await run.client.generate([request("b2", "s2")])
    await run.client.generate([request("b1", "s1")])
    assert [item.request_id for batch in last.batches for item in batch] == ["a2", "b2"]


@async_test
async def test_failed_start_is_reported_and_retried_on_request():
    run = ScalerHarness(1)
    run.has_free_gpus = False
    assert await run.scale_to(2) == ["engine 0"]
    assert run.reports == ["engine 1 could not be added, 1 remain: ConfigError: no GPU is free"]
    await run.client.generate([request("a")])
    run.has_free_gpus = True
    assert await run.scale_to(2) == ["engine 0", "engine 1"]


@async_test
async def test_start_is_canceled_by_a_lower_target():
    run = ScalerHarness(1)
    run.may_start.clear()
    run.scaler.set_target(3)
    await asyncio.sleep(0)
    assert run.scaler.expected_count == 3
    run.scaler.set_target(2)
    run.may_start.set()
    await run.scaler.wait_until_settled()
    assert run.client.engine_names == ["engine 0", "engine 1"]


@async_test
async def test_retired_dead_engine_is_not_restarted():
    run = ScalerHarness(2)
    await run.client.engines[1].close()
    await run.client.health()
    assert list(run.client.dead_engines) == ["engine 1"]
    run.client.retire("engine 1")
    await run.publisher.restart_dead_engines()
    assert run.publisher.restarts == 0
    run.client.unretire("engine 1")
    assert await run.scale_to(1) == ["engine 0"]
    assert run.stopped == ["engine 1"]


@async_test
async def test_dead_engine_is_removed_first():
    run = ScalerHarness(2)
    run.has_free_gpus = False
    await run.client.engines[0].close()
    await run.client.health()
    assert await run.scale_to(1) == ["engine 1"]
    assert run.stopped == ["engine 0"]


@async_test
async def test_restarting_engine_is_removed_after_its_restart():
    run = ScalerHarness(2)
    await run.client.engines[1].close()
    await run.client.health()
    run.may_start.clear()
    restarting = asyncio.ensure_future(run.publisher.restart_dead_engines())
    await asyncio.sleep(0.01)
    run.scaler.set_target(1)
    await asyncio.sleep(0.01)
    assert run.stopped == [], "its GPUs are not freed while it starts on them"
    run.may_start.set()
    await restarting
    await run.scaler.wait_until_settled()
    assert run.client.engine_names == ["engine 0"]
    assert run.stopped == ["engine 1"]


@async_test
async def test_stop_cancels_changes_in_progress():
    run = ScalerHarness(1)
    run.may_start.clear()
    run.scaler.set_target(2)
    await asyncio.sleep(0)
    await run.scaler.stop()
    run.scaler.set_target(4)
    run.may_start.set()
    await run.scaler.wait_until_settled()
    assert run.client.engine_names == ["engine 0"]


@async_test
async def test_idle_time_excludes_time_before_joining():
    run = ScalerHarness(1, delay_s=0.2)
    await run.client.metrics()
    await run.client.generate([request("a")])
    await run.scale_to(4)
    assert (await run.client.metrics())["engines/idle"] < 0.5


def test_target_of_zero_engines_is_rejected():
    async def check() -> None:
        with pytest.raises(AssertionError, match="at least one"):
            ScalerHarness(1).scaler.set_target(0)

    asyncio.run(check())


# -- the file in the run's folder


@pytest.fixture
def checks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_scaler, "CHECK_INTERVAL_S", 0.01)


async def wait_until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not done():
            await asyncio.sleep(0.01)


@pytest.mark.usefixtures("checks_often")
def test_target_file_is_watched_from_start_to_stop(tmp_path: Path):
    async def check() -> None:
        run = ScalerHarness(1, folder=tmp_path)
        write_target(tmp_path, 3)
        await asyncio.sleep(0.05)
        assert run.client.engine_names == ["engine 0"], "no engine joins before the scaler starts"
        for _ in range(2):
            run.scaler.start()
        await wait_until(lambda: len(run.client.engine_names) == 3)
        (tmp_path / ENGINES_FILE).write_text("three")
        await wait_until(lambda: "the number of engines is unchanged" in run.reports[-1])
        assert "'three'" in run.reports[-1]
        write_target(tmp_path, 2)
        await wait_until(lambda: len(run.client.engine_names) == 2)
        run.has_free_gpus = False
        write_target(tmp_path, 3)
        await wait_until(lambda: "engine 2 could not be added" in run.reports[-1])
        run.has_free_gpus = True
        write_target(tmp_path, 3)  # writing the same target again retries the failed start
        await wait_until(lambda: len(run.client.engine_names) == 3)
        await run.scaler.stop()
        write_target(tmp_path, 5)
        await asyncio.sleep(0.05)
        assert len(run.client.engine_names) == 3
        changes = [line for line in run.reports if "scaling from" in line]
        assert changes == ["scaling from 1 to 3", "scaling from 3 to 2", *["scaling from 2 to 3"] * 2]

    asyncio.run(check())


@pytest.mark.usefixtures("checks_often")
def test_fixed_number_of_engines_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    async def check() -> None:
        client = EngineClient([ScriptedEngine(name="engine 0")], deadline_s=5)
        unused: Any = None
        reason = fixed_count_reason(colocate_all=True, run_engines_locally=True)
        fixed = EngineScaler(client, unused, start=unused, stop=unused, folder=tmp_path, drain_s=5, fixed_reason=reason)
        fixed.start()
        await asyncio.sleep(0.05)
        assert capsys.readouterr().out == ""
        write_target(tmp_path, 3)
        await asyncio.sleep(0.1)
        await fixed.stop()

    asyncio.run(check())
    (line,) = capsys.readouterr().out.splitlines()
    assert "its engines are time-shared with the trainer" in line
