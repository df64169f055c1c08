"""A real engine behind the endpoint, used by openai, curl, a trainer and the command `serve`."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import torch

from skyrl_train.cluster.addresses import free_address
from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.engines.base import Completion, SampleRequest, SamplingParams
from skyrl_train.engines.http.remote import RemoteEngine
from skyrl_train.engines.http.server import HttpEndpoint
from skyrl_train.engines.sampling_params import request_seed
from skyrl_train.engines.transformers.engine import TransformersEngine
from skyrl_train.errors import EngineError, WeightSyncError
from skyrl_train.testing.tiny_models import byte_tokenizer, tiny_model
from skyrl_train.weight_sync.sync import Probe, WeightSync
from tests.support.engine_harness import BackgroundLoop
from tests.support.weight_targets import LocalTrainer, score

TOKEN = "a-secret-of-this-test"
MESSAGES: Any = [{"role": "user", "content": "Say something."}]


class HttpServer:
    """An engine and its endpoint on an event loop in a background thread, so that clients may block."""

    def __init__(self) -> None:
        self.loop = BackgroundLoop()
        self.engine = TransformersEngine(tiny_model(), byte_tokenizer(), max_model_len=256)
        self.endpoint = HttpEndpoint(self.engine, byte_tokenizer(), model_name="tiny", token=TOKEN)
        self.loop.run(self.endpoint.__aenter__())

    def close(self) -> None:
        self.loop.run(self.endpoint.__aexit__(None, None, None))
        self.loop.run(self.engine.close())
        self.loop.close()


@pytest.fixture(scope="module")
def http_server() -> Iterator[HttpServer]:
    server = HttpServer()
    yield server
    server.close()


@pytest.fixture
def client(http_server: HttpServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{http_server.endpoint.url}/v1", api_key=TOKEN, max_retries=0, timeout=60) as client:
        yield client


def test_openai_chat_has_engine_logprobs(http_server: HttpServer, client: openai.OpenAI):
    answer = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        n=3,
        seed=5,
        max_completion_tokens=12,
        temperature=0.7,
        top_p=0.9,
        logprobs=True,
        extra_body={"return_token_ids": True},
    )
    prompt = tuple(answer.prompt_token_ids)  # type: ignore[attr-defined]
    sampling = SamplingParams(max_tokens=12, temperature=0.7, top_p=0.9)
    requests = [
        SampleRequest(f"{n}", to_token_array(prompt), sampling, request_seed(5, "0", n, 0, 0), group="g")
        for n in range(3)
    ]
    completions: list[Completion] = http_server.loop.run(http_server.engine.generate(requests))
    assert len({tuple(completion.token_ids) for completion in completions}) == 3
    for choice, completion in zip(answer.choices, completions, strict=True):
        assert choice.token_ids == completion.token_ids.tolist()  # type: ignore[attr-defined]
        assert choice.message.content == byte_tokenizer().decode(
            completion.token_ids.tolist(), skip_special_tokens=True
        )
        assert choice.logprobs is not None and choice.logprobs.content is not None
        logprobs = [row.logprob for row in choice.logprobs.content]
        assert logprobs == pytest.approx(completion.logprobs.tolist(), abs=1e-5)
        assert choice.finish_reason == ("stop" if completion.stop_reason == "stop" else "length")
    assert answer.usage is not None and answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == sum(len(completion.token_ids) for completion in completions)


def test_openai_reads_a_stream(client: openai.OpenAI):
    options: Any = {"model": "tiny", "messages": MESSAGES, "seed": 1, "max_tokens": 8}
    complete = client.chat.completions.create(**options).choices[0]
    text, reasons, tokens = "", [], 0
    for chunk in client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        reasons += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
        tokens += chunk.usage.completion_tokens if chunk.usage else 0
    assert (text, reasons) == (complete.message.content, [complete.finish_reason]) and 0 < tokens <= 8


def test_openai_completion_ends_before_stop_string(client: openai.OpenAI):
    options: Any = {"model": "tiny", "prompt": "Once upon", "seed": 2, "max_tokens": 24}
    complete = client.completions.create(**options, logprobs=0).choices[0]
    assert complete.logprobs is not None and len(complete.logprobs.token_logprobs or []) == len(
        complete.logprobs.tokens or []
    )
    at = next(i for i, character in enumerate(complete.text) if i > 2 and character.isprintable())
    stop = complete.text[at]
    truncated = client.completions.create(**options, stop=stop).choices[0]
    assert (truncated.text, truncated.finish_reason) == (complete.text[: complete.text.index(stop)], "stop")


def test_openai_lists_model_and_raises_own_errors(http_server: HttpServer, client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == ["tiny"]
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="gpt"):
        client.chat.completions.create(model="gpt", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="256"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 300}])
    with openai.OpenAI(base_url=f"{http_server.endpoint.url}/v1", api_key="wrong", max_retries=0) as anonymous_client:
        with pytest.raises(openai.AuthenticationError):
            anonymous_client.models.list()


def curl(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["curl", "-sS", "-w", "\n%{http_code}", *arguments, url], capture_output=True, text=True, timeout=60, check=True
    )


def test_curl_completes_a_chat(http_server: HttpServer):
    body = json.dumps({"model": "tiny", "messages": MESSAGES, "max_tokens": 4})
    url = f"{http_server.endpoint.url}/v1/chat/completions"
    json_body = ("-H", "Content-Type: application/json", "-d", body)
    text, _, status = curl(url, "-H", f"Authorization: Bearer {TOKEN}", *json_body).stdout.rpartition("\n")
    assert status == "200" and json.loads(text)["choices"][0]["message"]["role"] == "assistant"
    assert curl(url, *json_body).stdout.endswith("\n401")


def test_prometheus_counts_match_client_usage(http_server: HttpServer, client: openai.OpenAI):
    def scrape() -> dict[str, float]:
        text = curl(f"{http_server.endpoint.url}/metrics", "-H", f"Authorization: Bearer {TOKEN}").stdout.rpartition(
            "\n"
        )[0]
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        return {series: float(value) for series, _, value in lines}

    before = scrape()
    usage = client.chat.completions.create(model="tiny", messages=MESSAGES, n=2, max_tokens=6).usage
    after = scrape()
    assert usage is not None
    for kind, tokens in (("prompt", usage.prompt_tokens), ("completion", usage.completion_tokens)):
        assert after[f"skyrl_http_{kind}_tokens_total"] - before[f"skyrl_http_{kind}_tokens_total"] == tokens > 0
    assert after['skyrl_engine_requests{state="running"}'] == 0


@pytest.mark.fault("F28")
def test_oversized_curl_body_is_rejected(http_server: HttpServer, tmp_path: Path):
    big = tmp_path / "big"
    with big.open("wb") as file:
        file.truncate(1 << 30)  # a sparse file
    options = ("-H", f"Authorization: Bearer {TOKEN}", "-H", "Content-Type: application/json", "-T", str(big))
    assert curl(f"{http_server.endpoint.url}/generate", "-X", "POST", *options).stdout.endswith("\n413")
    assert curl(f"{http_server.endpoint.url}/health", "-H", f"Authorization: Bearer {TOKEN}").stdout.endswith("\n200")


@pytest.mark.parametrize("route", ["broadcast", "checkpoint", "ipc"])
def test_weights_arrive_over_http(http_server: HttpServer, tmp_path: Path, route: str):
    model = tiny_model(seed=11)
    trainer = LocalTrainer(model)
    ids = [[5, 6, 7, 8, 9], [30, 31, 32]]

    async def trainer_score(token_ids: Any) -> list[list[float]]:
        return score(model, token_ids)

    async def run() -> None:
        remote = await RemoteEngine(http_server.endpoint.url, TOKEN, name="far", deadline_s=30).connect(10)
        try:
            before = (await remote.health()).version
            probe = Probe(ids, trainer_score)
            weight_sync = WeightSync(
                trainer, lambda: [remote], route=route, deadline_s=30, probe=probe, folder=str(tmp_path)
            )
            for version in (before + 1, before + 2):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(0.01 * version)
                metrics = await weight_sync.sync_all(version)
                assert metrics["weights/probe_gap"] < 1e-4
                assert (await remote.health()).version == version
                completion = (
                    await remote.generate([SampleRequest("r", to_token_array((5, 6)), SamplingParams(max_tokens=3), 1)])
                )[0]
                assert {span.version for span in completion.versions} == {version}
            with torch.no_grad():
                model.get_parameter("model.norm.weight")[0] = float("nan")
            with pytest.raises(WeightSyncError, match=r"model\.norm\.weight"):
                await weight_sync.sync_all(before + 3)
            assert (await remote.health()).version == before + 2
            await remote.score(ids)
            await remote.connect_weights("checkpoint", "", 1, 2, 5)  # makes the engine leave the transfer group
        finally:
            trainer.disconnect_weights()
            await remote.close()

    asyncio.run(run())


SLOW_SERVER = """
import asyncio
from skyrl_train.engines.http.server import HttpEndpoint
from skyrl_train.testing.scripted_engine import ScriptedEngine
async def main():
    engine = ScriptedEngine(delay_s=600)
    async with HttpEndpoint(engine, None, model_name="m", token="a-secret-of-this-test") as endpoint:
        print(endpoint.url, flush=True)
        while not engine.batches:
            await asyncio.sleep(0.01)
        print("busy", flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""


def test_killed_server_is_reported_by_name_in_time():
    process = subprocess.Popen([sys.executable, "-c", SLOW_SERVER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None

    async def run(url: str) -> float:
        remote = await RemoteEngine(url, TOKEN, name="far", deadline_s=60).connect(30)
        try:
            call = asyncio.ensure_future(
                remote.generate([SampleRequest("r", to_token_array((5, 6)), SamplingParams(max_tokens=3), 1)])
            )
            assert process.stdout is not None
            await asyncio.to_thread(process.stdout.readline)
            start = time.monotonic()
            process.kill()
            with pytest.raises(EngineError, match=r"'far'.*lost during generate"):
                await call
            return time.monotonic() - start
        finally:
            await remote.close()

    try:
        assert asyncio.run(run(process.stdout.readline().strip())) < 30
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextmanager
def run_serve(tiny_model_path: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start the command `serve`, wait until it serves, and yield its process and port."""
    _, port = free_address()
    overrides = [
        f"trainer.policy.model.path={tiny_model_path}",
        f"generator.http_endpoint_port={port}",
        "generator.served_model_name=tiny",
        "generator.num_inference_engines=1",
        "generator.sampling_params.max_generate_length=8",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "skyrl_train.entrypoints.serve", *overrides],
        cwd=folder,
        env=os.environ | {"SKYRL_API_KEY": TOKEN},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    lines: list[str] = []
    assert process.stdout is not None
    try:
        while not (lines and lines[-1].startswith("Serving")):
            lines.append(process.stdout.readline())
            assert lines[-1], process.communicate()
        assert lines[-1] == f"Serving tiny at http://127.0.0.1:{port}/v1; the token is the value of SKYRL_API_KEY.\n"
        assert TOKEN not in "".join(lines)
        yield process, port
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.on_demand
@pytest.mark.slow
def test_serve_exits_with_cause_of_engine_death(tiny_model_path: str, tmp_path: Path):
    with run_serve(tiny_model_path, tmp_path) as (process, _):
        children = psutil.Process(process.pid).children(recursive=True)
        (engine,) = [child for child in children if "_AsyncWorkerActor" in " ".join(child.cmdline())]
        engine.kill()
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1
        assert re.search(r"EnginesLost: No engine is alive.*engine 0", err), err
