"""NativeEngine: the limit on concurrent requests, pauses that wait for them, and commits with a cancelled caller."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.engines.base import Completion, SampleRequest, SamplingParams
from skyrl_train.engines.http.connection import Connection
from skyrl_train.engines.http.native import NativeEngine
from skyrl_train.engines.http.native_servers import NativeServer, ServerCompletion
from skyrl_train.engines.lifecycle import MEMORY_TAGS, EngineState, Lifecycle
from skyrl_train.weight_sync.receiver import WeightReceiver

MAX_NUM_SEQS = 2
TOKENS = 4


class ControlledServer(NativeServer):
    """A server in this process whose requests end when the test calls `end`."""

    def __init__(self) -> None:
        super().__init__(Connection("http://127.0.0.1:1", "t", name="native"), deadline_s=10)
        self.kind, self.max_model_len, self.seeds, self.refusals = "a server", 64, True, {}
        self.sampling = self.SUPPORTED_SAMPLING
        self.running: dict[str, asyncio.Future[str]] = {}
        """Futures of the stop reasons of running requests, by request id."""

    async def discover(self, deadline_s: float) -> None:
        pass

    async def sample(self, rid: str, request: SampleRequest) -> ServerCompletion:
        self.running[rid] = asyncio.get_running_loop().create_future()
        try:
            reason = await self.running[rid]
        finally:
            del self.running[rid]
        count = TOKENS if reason == "length" else 0
        return ServerCompletion([5] * count, [-1.0] * count, reason)

    async def abort(self, rids: Sequence[str]) -> None:
        self.end("abort", rids)

    def end(self, reason: str, rids: Sequence[str] | None = None) -> None:
        """End these requests, or all if None."""
        for rid, future in self.running.items():
            if (rids is None or rid in rids) and not future.done():
                future.set_result(reason)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return [-1.0] * (len(token_ids) - 1)

    async def load_weights(self, folder: str) -> None:
        pass

    async def reset_prefix_cache(self) -> None:
        pass

    async def sleep(self, level: int) -> frozenset[str]:
        return MEMORY_TAGS

    async def wake_up(self, tags: Sequence[str]) -> None:
        pass

    async def check_alive(self) -> None:
        pass


@asynccontextmanager
async def connected(model: str, folder: Path) -> AsyncIterator[tuple[NativeEngine, ControlledServer]]:
    server = ControlledServer()
    engine = NativeEngine(
        server, model=model, dtype="float32", device="cpu", folder=str(folder), max_num_seqs=MAX_NUM_SEQS
    )
    await engine.connect(10)
    try:
        yield engine, server
    finally:
        server.end("abort")
        await engine.close()


def start_generate(engine: NativeEngine, name: str) -> asyncio.Future[list[Completion]]:
    request = SampleRequest(name, to_token_array((1, 2)), SamplingParams(max_tokens=TOKENS, ignore_eos=True), 0)
    return asyncio.ensure_future(engine.generate([request]))


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.defect("aborted-requests-leak-concurrency")
@pytest.mark.parametrize("end", ["abort", "cancel"])
def test_request_aborted_while_acquiring_releases_permit(end: str, tiny_model_path: str, tmp_path: Path):
    async def work() -> None:
        async with connected(tiny_model_path, tmp_path) as (engine, server):
            for ticks in range(10):  # iterations of the event loop between start and end of a request
                await engine.pause("abort")  # the request keeps its permit
                for number in range(MAX_NUM_SEQS + 1):
                    call = start_generate(engine, f"r{number}")
                    for _ in range(ticks):
                        await asyncio.sleep(0)
                    if end == "cancel":
                        call.cancel()
                    else:
                        await engine.abort([f"r{number}"])
                        if not ticks:  # the request had not started
                            call.cancel()
                    with suppress(asyncio.CancelledError):
                        assert (await call)[0].stop_reason == "abort"
                await engine.resume()
                calls = [start_generate(engine, f"later {number}") for number in range(MAX_NUM_SEQS)]
                await wait_until(lambda: len(server.running) == MAX_NUM_SEQS)
                server.end("length")
                assert [completion.stop_reason for call in calls for completion in await call] == [
                    "length"
                ] * MAX_NUM_SEQS

    asyncio.run(work())


@pytest.mark.parametrize(
    "change",
    [
        lambda lifecycle: None,
        Lifecycle.pause,
        lambda lifecycle: lifecycle.sleep(MEMORY_TAGS),
        Lifecycle.invalidate_weights,
        Lifecycle.close,
    ],
    ids=["nothing", "pause", "sleep", "weights", "close"],
)
def test_pause_wait_ends_after_last_request(
    change: Callable[[Lifecycle], object], tiny_model_path: str, tmp_path: Path
):
    async def work() -> None:
        async with connected(tiny_model_path, tmp_path) as (engine, server):
            call = start_generate(engine, "r")
            await wait_until(lambda: bool(server.running))
            pausing = asyncio.ensure_future(engine.pause("wait"))
            await asyncio.sleep(0.01)
            assert not pausing.done()
            change(engine.lifecycle)
            server.end("length")
            async with asyncio.timeout(1):
                await pausing
            await call

    asyncio.run(work())


def test_commit_with_cancelled_caller_holds_requests(
    tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    may_load = threading.Event()

    def commit(self: WeightReceiver, version: int) -> None:
        self.partially_loaded = True
        may_load.wait(5)
        self.partially_loaded, self.version = False, version

    async def work() -> None:
        async with connected(tiny_model_path, tmp_path) as (engine, server):
            committing = asyncio.ensure_future(engine.commit_weights(1))
            await asyncio.sleep(0.02)
            committing.cancel()
            with suppress(asyncio.CancelledError):
                await committing
            call = start_generate(engine, "r")
            await asyncio.sleep(0.02)
            assert not server.running
            may_load.set()
            await wait_until(lambda: bool(server.running))
            assert (engine.lifecycle.state, (await engine.health()).version) == (EngineState.RUNNING, 1)
            server.end("length")
            assert (await call)[0].versions[0].version == 1

    monkeypatch.setattr(WeightReceiver, "commit", commit)
    asyncio.run(work())
