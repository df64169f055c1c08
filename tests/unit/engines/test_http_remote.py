"""A RemoteEngine and an endpoint with a scripted engine, and servers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from skyrl_train.cluster.addresses import free_address
from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.engines.base import SampleRequest, SamplingParams
from skyrl_train.engines.client import EngineClient
from skyrl_train.engines.http.connection import MAX_ATTEMPTS
from skyrl_train.engines.http.protocol import Limits
from skyrl_train.engines.http.remote import RemoteEngine
from skyrl_train.engines.http.server import HttpEndpoint
from skyrl_train.errors import ConfigError, DeadlineExceeded, EngineError, UnsupportedParameter, WeightSyncError
from skyrl_train.testing.scripted_engine import ALL_CAPABILITIES, ScriptedEngine
from skyrl_train.weight_sync.protocol import Bucket, Manifest, SharedHandle, TensorSpec
from tests.support.machine_speed import network_address

TOKEN = "a-secret-of-this-test"


def _request(name: str = "r0", **more: Any) -> SampleRequest:
    return replace(SampleRequest(name, to_token_array((1, 2, 3)), SamplingParams(max_tokens=4), 7), **more)


def run_with_remote_engine(
    test: Callable[[RemoteEngine], Awaitable[Any]], engine: ScriptedEngine, **options: Any
) -> Any:
    async def run() -> Any:
        async with HttpEndpoint(engine, None, model_name="m", token=TOKEN, **options) as endpoint:
            remote = await RemoteEngine(endpoint.url, TOKEN, name="far", deadline_s=20).connect(10)
            try:
                return await asyncio.wait_for(test(remote), 60)
            finally:
                await remote.close()

    return asyncio.run(run())


def test_every_method_reaches_the_engine():
    engine = ScriptedEngine(
        capabilities=replace(ALL_CAPABILITIES, weight_routes=frozenset({"in_process", "broadcast"}))
    )

    async def test(remote: RemoteEngine) -> None:
        assert remote.capabilities == replace(engine.capabilities, name="far", weight_routes=frozenset({"broadcast"}))
        completions = await remote.generate([_request("a"), _request("b", session="s", group="g", deadline_s=5)])
        assert [
            (completion.request_id, completion.token_ids.tolist(), completion.stop_reason) for completion in completions
        ] == [
            ("a", [1, 2, 3], "stop"),
            ("b", [1, 2, 3], "stop"),
        ]
        assert await remote.generate([]) == []
        assert await remote.score([[1, 2, 3], [4]], temperature=0.5) == [[-1.0, -1.0], []]
        await remote.abort(["a"])
        await remote.pause("abort")
        assert (await remote.health()).paused
        await remote.resume()
        assert await remote.sleep(2) == 0
        await remote.wake_up(["weights", "kv_cache"])
        await remote.wake_up()
        await remote.reset_prefix_cache()
        await remote.connect_weights("checkpoint", "", 1, 2, 5)
        await remote.begin_weights(Manifest(3, (TensorSpec("w", (2,), "float32", 9),)))
        await remote.receive_weights(Bucket(0, ("w",), (9,), handles=(SharedHandle(0, 16, "/proc/1/fd/3"),)))
        assert (await remote.health()).partially_loaded
        await remote.commit_weights(3)
        health = await remote.health()
        assert (health.name, health.version, health.generated_tokens) == ("far", 3, 6)

    run_with_remote_engine(test, engine)
    assert engine.batches[0][1] == _request("b", session="s", group="g", deadline_s=5)
    assert "close" not in engine.calls


def test_partial_tokens_arrive_from_the_server():
    engine = ScriptedEngine(lambda request: range(100), delay_s=0.3)

    async def test(remote: RemoteEngine) -> None:
        call = asyncio.ensure_future(remote.generate([_request("a", sampling=SamplingParams(max_tokens=100))]))
        while not (found := await remote.partial_tokens(["a", "b"])):
            await asyncio.sleep(0.01)
        (completion,) = await call
        assert found.keys() == {"a"} and found["a"].dtype == completion.token_ids.dtype
        assert 0 < len(found["a"]) < 100
        assert completion.token_ids[: len(found["a"])].tolist() == found["a"].tolist()

    run_with_remote_engine(test, engine)


def test_engine_without_partial_tokens_is_not_asked():
    engine = ScriptedEngine(capabilities=replace(ALL_CAPABILITIES, partial_tokens=False))

    async def test(remote: RemoteEngine) -> None:
        assert await remote.partial_tokens(["a"]) == {}

    run_with_remote_engine(test, engine)
    assert "partial_tokens" not in engine.calls


@pytest.mark.defect("reconnected-engine-stays-paused")
def test_connecting_resumes_paused_engine():
    engine = ScriptedEngine()

    async def test(remote: RemoteEngine) -> bool:
        await remote.pause("keep")
        second_client = await RemoteEngine(f"http://127.0.0.1:{port}", TOKEN, deadline_s=20).connect(10)
        try:
            return (await second_client.health()).paused
        finally:
            await second_client.close()

    _, port = free_address()
    assert not run_with_remote_engine(test, engine, port=port)


def test_non_loopback_engine_may_be_on_another_node():
    async def test(remote: RemoteEngine) -> bool:
        return remote.capabilities.other_machine

    assert not run_with_remote_engine(test, ScriptedEngine(), host="127.0.0.1")
    assert run_with_remote_engine(test, ScriptedEngine(), host=network_address())


@pytest.mark.parametrize(
    "error",
    [
        UnsupportedParameter("Engine 'x' does not support top_k=3."),
        EngineError("Engine 'x' is partially loaded."),
        WeightSyncError("model.w is corrupt"),
        DeadlineExceeded("engine x.generate", 2.5),
    ],
)
def test_engine_errors_keep_their_type(error: Exception):
    async def test(remote: RemoteEngine) -> None:
        with pytest.raises(type(error)) as caught:
            await remote.generate([_request()])
        assert type(caught.value) is type(error) and str(caught.value) == str(error)

    run_with_remote_engine(test, ScriptedEngine(failures={"generate": error}))


def test_unexpected_engine_exception_is_engine_error():
    async def test(remote: RemoteEngine) -> None:
        with pytest.raises(EngineError, match=r"'far'.*500"):
            await remote.generate([_request()])

    run_with_remote_engine(test, ScriptedEngine(failures={"generate": RuntimeError("bug")}))


def test_calls_are_split_to_fit_the_server():
    engine = ScriptedEngine()
    requests = [_request(f"r{n}", token_ids=(1,) * 40) for n in range(20)]

    async def test(remote: RemoteEngine) -> None:
        completions = await remote.generate(requests)
        assert [completion.request_id for completion in completions] == [request.request_id for request in requests]
        assert len(await remote.score([[1, 2]] * 7)) == 7
        with pytest.raises(UnsupportedParameter, match=r"'long'.*bytes"):
            await remote.generate([_request("long", token_ids=(1,) * 2000)])

    run_with_remote_engine(test, engine, limits=Limits(body_bytes=2000, requests=6))
    assert len(engine.batches) >= 4 and max(map(len, engine.batches)) <= 6


def test_remote_engine_rejects_in_process_route():
    async def test(remote: RemoteEngine) -> None:
        with pytest.raises(WeightSyncError, match="in_process"):
            await remote.connect_weights("in_process", "", 1, 2, 5)
        with pytest.raises(WeightSyncError, match="in_process"):
            await remote.receive_weights(Bucket(0, ("w",), (0,), payload=torch.zeros(4, dtype=torch.uint8)))
        with pytest.raises(WeightSyncError, match="GPU memory"):
            await remote.receive_weights(Bucket(0, ("w",), (0,), handles=(SharedHandle(0, 4, cuda=(1,)),)))

    engine = ScriptedEngine()
    run_with_remote_engine(test, engine)
    assert not [call for call in engine.calls if "weights" in call]


def test_cancelling_call_aborts_requests_on_server():
    engine = ScriptedEngine(delay_s=60)

    async def test(remote: RemoteEngine) -> None:
        call = asyncio.ensure_future(remote.generate([_request("gone")]))
        while not engine.batches:
            await asyncio.sleep(0.01)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
        while "abort" not in engine.calls:
            await asyncio.sleep(0.01)

    run_with_remote_engine(test, engine)


@pytest.mark.fault("F27")
def test_wrong_token_fails_immediately_and_stays_secret():
    async def run() -> None:
        async with HttpEndpoint(ScriptedEngine(), None, model_name="m", token=TOKEN) as endpoint:
            remote = RemoteEngine(endpoint.url, "guessed", name="far")
            with pytest.raises(EngineError, match="SKYRL_API_KEY") as caught:
                await remote.connect(10)
            assert "guessed" not in str(caught.value)

    asyncio.run(run())


@pytest.mark.parametrize(
    "url", ["", "http://", "ftp://host:1", "http://me:secret@host:1", "host:99999999", "http://h?a=b"]
)
def test_invalid_address_is_rejected(url: str):
    with pytest.raises(ConfigError, match="host:port"):
        RemoteEngine(url, TOKEN)


def test_missing_server_is_named_in_time():
    async def run() -> None:
        with contextlib.closing(socket.socket()) as unused:
            unused.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{unused.getsockname()[1]}"
            with pytest.raises(DeadlineExceeded, match=address):
                await RemoteEngine(address, TOKEN).connect(0.5)

    asyncio.run(run())


class FlakyServer:
    """A TCP server that forwards its first `num_served` requests to an endpoint and drops the other connections."""

    def __init__(self, port: int, num_served: int):
        self._port = port
        self._num_served = num_served
        self.paths: list[str] = []

    async def __aenter__(self) -> FlakyServer:
        self._server = await asyncio.start_server(self._handle, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward the only request of a connection to the endpoint, or close the connection."""
        head = await reader.readuntil(b"\r\n\r\n")
        self.paths.append(head.split()[1].decode())
        length = next((int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), 0)
        body = await reader.readexactly(length)
        if len(self.paths) <= self._num_served or self.paths[-1] == "/abort":
            endpoint_reader, endpoint_writer = await asyncio.open_connection("127.0.0.1", self._port)
            endpoint_writer.write(head.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + body)
            writer.write(await endpoint_reader.read())
            endpoint_writer.close()
        writer.close()


def run_with_flaky_server(
    num_served: int, test: Callable[[RemoteEngine, FlakyServer], Awaitable[Any]], engine: ScriptedEngine
) -> None:
    async def run() -> None:
        async with HttpEndpoint(engine, None, model_name="m", token=TOKEN) as endpoint:
            async with FlakyServer(int(endpoint.url.rpartition(":")[2]), num_served) as flaky:
                remote = await RemoteEngine(flaky.url, TOKEN, name="far", deadline_s=20).connect(10)
                try:
                    await asyncio.wait_for(test(remote, flaky), 60)
                finally:
                    await remote.close()

    asyncio.run(run())


def test_broken_generate_is_aborted_and_retried_twice():
    async def test(remote: RemoteEngine, flaky: FlakyServer) -> None:
        with pytest.raises(EngineError, match=rf"'far'.*generate.*attempt {MAX_ATTEMPTS}"):
            await remote.generate([_request()])
        assert flaky.paths[2:] == ["/generate", "/abort", "/generate", "/abort", "/generate"]

    run_with_flaky_server(2, test, ScriptedEngine())


def test_non_idempotent_calls_are_not_repeated():
    async def test(remote: RemoteEngine, flaky: FlakyServer) -> None:
        with pytest.raises(EngineError, match=r"commit_weights.*attempt 1"):
            await remote.commit_weights(1)
        assert flaky.paths[2:] == ["/commit_weights"]

    run_with_flaky_server(2, test, ScriptedEngine())


def test_requests_of_dead_server_move_to_another():
    async def run() -> float:
        near = ScriptedEngine(name="near")
        endpoint = await HttpEndpoint(
            ScriptedEngine(delay_s=60), None, model_name="m", token=TOKEN, drain_s=0
        ).__aenter__()
        url = endpoint.url
        far = await RemoteEngine(url, TOKEN, name="far", deadline_s=60).connect(10)
        client = EngineClient([far, near], deadline_s=60)
        call = asyncio.ensure_future(client.generate([_request("a"), _request("b")]))
        await asyncio.sleep(0.3)
        start = time.monotonic()
        await endpoint.__aexit__(None, None, None)
        assert [completion.token_ids.tolist() for completion in await call] == [[1, 2, 3]] * 2
        assert list(client.dead_engines) == ["far"] and url in client.dead_engines["far"]
        await far.close()
        return time.monotonic() - start

    assert asyncio.run(run()) < 40


def test_unknown_response_is_engine_error():
    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 15\r\nConnection: close\r\n\r\n{"result": [1]}')
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(respond, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(EngineError, match=r"far.*protocol"):
            await RemoteEngine(f"127.0.0.1:{port}", TOKEN, name="far").connect(5)
        server.close()
        await server.wait_closed()

    asyncio.run(run())
