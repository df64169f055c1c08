"""SGLang with TorchRL's calls, over stand-ins for its engine and for its server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from aiohttp import web
from tensordict import TensorDict

from skyrl_train.cluster.addresses import free_address
from skyrl_train.errors import ConfigError, WeightSyncError
from skyrl_train.tensordict.wrappers import sglang_server
from skyrl_train.tensordict.wrappers.backends import SGLangWrapper
from skyrl_train.tensordict.wrappers.event_loop import call
from skyrl_train.tensordict.wrappers.sglang_server import AsyncSGLang
from skyrl_train.tensordict.wrappers.stateless_group import stateless_init_process_group
from skyrl_train.testing.scripted_engine import ScriptedEngine
from skyrl_train.testing.tiny_models import byte_tokenizer, tiny_model
from tests.support.tokenizers import sentencepiece_tokenizer
from tests.support.weight_targets import score

TOKENIZER = byte_tokenizer()


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text)["input_ids"])


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch, tiny_model_path: str) -> Iterator[AsyncSGLang]:
    """Its engine says what it was asked."""
    monkeypatch.setattr(
        sglang_server, "load_object", lambda _: lambda *args, **options: ScriptedEngine(lambda r: r.token_ids)
    )
    with AsyncSGLang.from_pretrained(tiny_model_path, dtype="float32") as server:
        yield server


def test_a_tokenizers_path_is_read_before_the_engine_starts(monkeypatch: pytest.MonkeyPatch, tiny_model_path: str):
    got: list[Any] = []

    def start(model: str, tokenizer: Any, **options: Any) -> ScriptedEngine:
        got.append(tokenizer)
        return ScriptedEngine()

    monkeypatch.setattr(sglang_server, "load_object", lambda _: start)
    with AsyncSGLang(model_path=tiny_model_path, tokenizer=tiny_model_path) as server:
        assert got == [server.tokenizer]
        assert server.tokenizer("a")["input_ids"] == ids("a")


@pytest.mark.defect("D09")
def test_all_prompts_of_a_call_and_all_calls_are_under_way_at_once(sglang: AsyncSGLang):
    engine: Any = sglang.engine
    call(engine.pause(), "pause", 10.0)
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(sglang.generate, [f"{n} a", f"{n} b"]) for n in range(3)]
        deadline = time.monotonic() + 60
        while call(engine.health(), "health", 10.0).running < 6:
            assert time.monotonic() < deadline, "calls wait for each other"
            time.sleep(0.005)
        call(engine.resume(), "resume", 10.0)
        found = [[one["text"] for one in answer.result(60)] for answer in answers]  # type: ignore[index]
    assert found == [[f"{n} a", f"{n} b"] for n in range(3)]
    assert [len(batch) for batch in engine.batches] == [2, 2, 2]


@pytest.mark.parametrize("text", ["the cat", "<s>the cat"])
def test_a_prompt_has_one_bos_and_no_eos(monkeypatch: pytest.MonkeyPatch, text: str):
    echoes = ScriptedEngine(lambda request: request.token_ids)
    monkeypatch.setattr(sglang_server, "load_object", lambda _: lambda *args, **options: echoes)
    tokenizer = sentencepiece_tokenizer(bos_and_eos=True)
    with AsyncSGLang(model_path="unread", tokenizer=tokenizer) as server:
        answer: Any = server.generate(text)
    assert tokenizer.convert_ids_to_tokens(answer["output_ids"]) == ["<s>", "\u2581the", "\u2581cat"]


@pytest.mark.defect("D09")
def test_sampling_parameters_reach_the_engine_and_metadata_is_the_models(sglang: AsyncSGLang, tiny_model_path: str):
    sampling = {"max_new_tokens": 3, "temperature": 0.5, "top_k": -1, "min_new_tokens": 1, "stop": ["q"]}
    one: Any = sglang.generate("hello", sampling_params=sampling, return_logprobs=True)
    assert isinstance(one, dict)
    request = sglang.engine.batches[0][0].sampling  # type: ignore[attr-defined]
    assert (request.max_tokens, request.temperature, request.min_tokens, request.stop) == (3, 0.5, 1, ("q",))
    assert one["output_ids"] == ids("hel")
    assert one["meta_info"]["finish_reason"] == {"type": "length"}
    assert one["meta_info"]["output_token_logprobs"] == [(-1.0, token, None) for token in ids("hel")]
    found = sglang.get_model_metadata()
    assert found == {name: (p.dtype, p.shape) for name, p in tiny_model().named_parameters()}


def test_prompts_or_ids_in_a_list_or_alone(sglang: AsyncSGLang):
    rows = [ids("ab"), ids("cde")]
    assert [one["output_ids"] for one in sglang.generate(input_ids=rows)] == rows  # type: ignore[index]
    assert sglang.generate(input_ids=torch.tensor(rows[0]))["output_ids"] == rows[0]  # type: ignore[call-overload]
    assert len(sglang.generate("a", sampling_params={"n": 3})) == 3
    assert sglang.flush_cache()
    wrong: Any
    for wrong in ({}, {"prompts": "a", "input_ids": [1]}, {"input_ids": []}, {"input_ids": [[1], []]}):
        with pytest.raises(ValueError, match="prompt"):
            sglang.generate(**wrong)
    with pytest.raises(ConfigError, match="dp_size"):
        AsyncSGLang.from_pretrained("nothing", dp_size=2)
    out = SGLangWrapper(sglang, tokenizer=TOKENIZER, input_mode="text")(TensorDict(text=["hello"], batch_size=(1,)))
    assert out["text"].response == ["hello"]


@pytest.mark.defect("D09")
def test_text_keeps_the_markers_of_reasoning(sglang: AsyncSGLang):
    sglang.tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]"]})
    one: Any = sglang.generate("[THINK]41[/THINK]42<|im_end|>")
    assert one["text"] == "[THINK]41[/THINK]42"


def test_weights_of_a_group_come_as_lists_and_are_proven(monkeypatch: pytest.MonkeyPatch, tiny_model_path: str):
    from skyrl_train.engines.transformers.engine import TransformersEngine

    def start(model: str, tokenizer: Any, *, tensor_parallel_size: int, **options: Any) -> TransformersEngine:
        return TransformersEngine(model, tokenizer, **options)

    monkeypatch.setattr(sglang_server, "load_object", lambda _: start)
    trained, port = tiny_model(seed=5), free_address()[1]
    rows = [[5, 9, 77, 30], [8, 8, 250]]
    with (
        AsyncSGLang(model_path=tiny_model_path, dtype="float32", device="cpu") as server,
        ThreadPoolExecutor(1) as pool,
    ):
        joining = pool.submit(stateless_init_process_group, "127.0.0.1", port, 0, 2, "cpu", 60.0)
        server.init_weight_update_group("127.0.0.1", port, device="cpu")
        group = joining.result(60)
        try:
            metadata = server.get_model_metadata()
            with pytest.raises(ConfigError, match="lists"):
                server.update_weights_from_distributed("a.name", ["float32"], [[1]])
            sending = pool.submit(lambda: [group.broadcast(p.detach()) for _, p in trained.named_parameters()])
            kinds, shapes = zip(*metadata.values(), strict=True)
            assert server.update_weights_from_distributed(list(metadata), kinds, shapes) == 1
            sending.result(60)
        finally:
            group.close()
        served = call(server.engine.score(rows), "score", 60.0)
        torch.testing.assert_close(served, score(trained, rows), atol=1e-4, rtol=0)
        with pytest.raises(WeightSyncError, match="does not send it"):
            server.update_weights(list(trained.named_parameters())[:-1])
        assert server.update_weights(tiny_model()) == 2
    with pytest.raises(RuntimeError, match="closed"):
        server.generate("a")


class FakeServer:
    """Answers as SGLang does; /generate only once `concurrent` requests have arrived."""

    def __init__(self, model: str, concurrent: int):
        self.model, self.concurrent = model, concurrent
        self.bodies: list[Any] = []
        self.complete = asyncio.Event()

    async def start(self) -> str:
        app = web.Application()
        app.router.add_get("/server_info", self._info)
        app.router.add_get("/ready", self._ok)
        app.router.add_post("/flush_cache", self._ok)
        app.router.add_post("/generate", self._generate)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.5", "max_req_input_len": 64, "model_path": self.model})

    async def _ok(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        if len(self.bodies) == self.concurrent:
            self.complete.set()
        await asyncio.wait_for(self.complete.wait(), 60)
        answer = body["input_ids"][::-1]
        meta = {"output_token_logprobs": [[-0.5, token, None] for token in answer], "finish_reason": {"type": "stop"}}
        return web.json_response({"output_ids": answer, "meta_info": meta})


@pytest.mark.defect("D01")
@pytest.mark.defect("D09")
def test_a_server_gets_all_prompts_at_once_and_its_log_probs_are_no_ids(tiny_model_path: str):
    fake = FakeServer(tiny_model_path, concurrent=3)
    url = call(fake.start(), "start", 30.0)
    try:
        with AsyncSGLang.connect(url, token="t") as server:
            assert server.model_path == tiny_model_path
            wrapper = SGLangWrapper(server, tokenizer=TOKENIZER, input_mode="text", inplace=False)
            out = wrapper(TensorDict(text=["ab", "cd", "ef"], batch_size=(3,)), max_new_tokens=5)
            assert list(out["text"].response) == ["ba", "dc", "fe"]
            assert out["log_probs"][0].response.tolist() == [-0.5, -0.5]
            assert fake.bodies[0]["sampling_params"]["max_new_tokens"] == 5
            assert server.flush_cache()
    finally:
        call(fake.stop(), "stop", 30.0)


def test_no_server_is_a_connection_error():
    with pytest.raises(ConnectionError, match="No SGLang server answers at"):
        AsyncSGLang.connect(f"127.0.0.1:{free_address()[1]}", token="t", connect_timeout=0.3)
    with pytest.raises(ConfigError, match="needs server_url"):
        AsyncSGLang()
