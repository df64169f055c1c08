"""AsyncVLLM over engines of this process in place of vLLM in Ray actors."""

from __future__ import annotations

import asyncio
import importlib.util
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.modules.llm.backends import RLvLLMEngine

from skyrl_train.cluster.addresses import free_address
from skyrl_train.engines.transformers.engine import TransformersEngine
from skyrl_train.errors import ConfigError, UnsupportedParameter, WeightSyncError
from skyrl_train.tensordict.wrappers import async_vllm
from skyrl_train.tensordict.wrappers.async_vllm import AsyncVLLM, Replicas, make_async_vllm_engine
from skyrl_train.tensordict.wrappers.backends import vLLMWrapper
from skyrl_train.tensordict.wrappers.event_loop import call
from skyrl_train.tensordict.wrappers.stateless_group import stateless_init_process_group_async
from skyrl_train.testing.scripted_engine import ScriptedEngine
from skyrl_train.testing.tiny_models import byte_tokenizer, tiny_model
from tests.support.weight_targets import score

TOKENIZER = byte_tokenizer()
ROWS = [[5, 9, 77, 30], [8, 8, 250], [7, 6]]


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let engines start in this process; names of those that were freed."""
    freed: list[str] = []

    def start(
        target: str, options: dict[str, Any], *, name: str, ranks: int, start_ray: bool, deadline_s: float
    ) -> Any:
        assert target.endswith(":VLLMEngine")
        rest = {key: value for key, value in options.items() if key not in ("tensor_parallel_size", "enforce_eager")}
        engine: Any = TransformersEngine(**rest, name=name)
        return engine, lambda: freed.append(name)

    monkeypatch.setattr(async_vllm, "engine_in_actor", start)
    return freed


@pytest.fixture
def service(ended: list[str], tiny_model_path: str) -> Iterator[AsyncVLLM]:
    with AsyncVLLM.from_pretrained(tiny_model_path, num_replicas=2, device="cpu", compile=False) as started:
        yield started


def test_service_is_torchrl_engine_with_replicas(service: AsyncVLLM, ended: list[str]):
    assert isinstance(service, RLvLLMEngine)
    assert (service.num_replicas, len(service.actors), service.get_tp_size()) == (2, 2, 1)
    assert service.get_num_unfinished_requests() == [0, 0]
    assert service.get_model_metadata()["model.embed_tokens.weight"][0] == torch.float32
    assert service.get_master_port() == service.get_master_port()
    service.shutdown()
    service.shutdown()
    assert ended == ["vllm replica 1", "vllm replica 0"]
    with pytest.raises(RuntimeError, match="closed"):
        _ = service.engines


@pytest.mark.parametrize("group", [False, True])
def test_update_reaches_every_replica_and_is_verified(service: AsyncVLLM, group: bool):
    trained = tiny_model(seed=3)
    if group:
        service.init_weight_update_group()
    assert service.update_weights(iter(trained.state_dict().items())) == 1
    for engine in service.actors:
        for found, expected in zip(call(engine.score(ROWS), "score", 60.0), score(trained, ROWS), strict=True):
            assert found == pytest.approx(expected, abs=1e-4)
    with pytest.raises(WeightSyncError, match=r"model\.norm\.weight"):
        service.update_weights((name, one) for name, one in trained.named_parameters() if name != "model.norm.weight")
    assert service.update_weights(trained) > 1


def test_wrapper_samples_from_service_and_names_it_as_model(service: AsyncVLLM):
    policy = vLLMWrapper(service, tokenizer=TOKENIZER, input_mode="text", inplace=False, generate_kwargs={"seed": 1})
    assert policy.model is policy.get_new_version(pad_output=True).model is service
    assert vLLMWrapper(service).tokenizer.vocab_size == TOKENIZER.vocab_size  # the model's own
    out = policy(TensorDict(text=["hello", "you"], batch_size=(2,)), max_new_tokens=3)
    scorer = policy.get_new_version(generate=False, input_mode="tokens")
    scored = scorer(out.select("tokens", "masks"))
    for sampled, again in zip(out.unbind(0), scored.unbind(0), strict=True):
        response = sampled["log_probs"].response
        torch.testing.assert_close(again["log_probs"].full[-len(response) :], response, atol=1e-4, rtol=0)


def test_replicas_share_requests_and_keep_order():
    engines = [ScriptedEngine(lambda request: request.token_ids.tolist(), name=f"engine {i}") for i in range(2)]
    replicas = Replicas(engines, 60.0)
    policy = vLLMWrapper(replicas, tokenizer=TOKENIZER, input_mode="text", inplace=False)
    texts = [f"prompt {number}" for number in range(6)]
    assert list(policy(TensorDict(text=texts, batch_size=(6,)), max_new_tokens=99)["text"].response) == texts
    assert sorted(len(batch) for engine in engines for batch in engine.batches) == [3, 3]
    scores = call(replicas.score([[1] * length for length in range(2, 7)]), "score", 60.0)
    assert [len(row) for row in scores] == [1, 2, 3, 4, 5]


def test_pickled_service_reaches_same_engines_without_trainer_group():
    service = AsyncVLLM({"model": "m", "dtype": "float32"})
    service._closing, service._pusher = print, SimpleNamespace(close=lambda: None)  # type: ignore[assignment]
    again = pickle.loads(pickle.dumps(service))
    assert (again.model_path, again._closing, again._pusher) == ("m", None, None)


@pytest.mark.parametrize(("dtype", "sent"), [("auto", torch.float32), (torch.float16, torch.float16)])
def test_weights_are_sent_in_dtype_of_vllm(tiny_model_path: str, dtype: Any, sent: torch.dtype):
    service = AsyncVLLM({"model": tiny_model_path, "dtype": dtype, "device": "cpu"})
    assert {found for found, _ in service.get_model_metadata().values()} == {sent}


def test_wrong_settings_are_refused_before_start(tiny_model_path: str):
    for wrong in (
        {"num_replicas": 0},
        {"num_devices": 2, "tensor_parallel_size": 1},
        {"enable_fp32_output": True, "dtype": "bfloat16"},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            make_async_vllm_engine(model_name=tiny_model_path, **wrong)


@pytest.fixture
def vllm() -> Any:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed; scripts/cpu_engines installs it")
    import vllm

    return vllm


def test_generate_returns_request_outputs_of_vllm(vllm: Any, service: AsyncVLLM):
    params = vllm.SamplingParams(max_tokens=3, temperature=0.0, logprobs=1, prompt_logprobs=1, ignore_eos=True)
    alone = service.generate("hello", params)
    assert alone.prompt_token_ids == TOKENIZER("hello")["input_ids"]
    (answer,) = alone.outputs
    assert answer.text == TOKENIZER.decode(answer.token_ids) and answer.finish_reason == "length"
    (whole,) = call(service.engine.score([[*alone.prompt_token_ids, *answer.token_ids]]), "score", 60.0)
    found = [*alone.prompt_logprobs[1:], *answer.logprobs]
    assert [next(iter(one.values())).logprob for one in found] == pytest.approx(whole, abs=1e-4)
    both = service.generate(["a", {"prompt_token_ids": [7, 8]}], vllm.SamplingParams(n=2, max_tokens=1))
    assert [len(one.outputs) for one in both] == [2, 2]
    assert service.generate(prompt_token_ids=[7, 8], sampling_params={"max_tokens": 1}, actor_index=1).finished
    for wrong, named in (({"presence_penalty": 1.0}, "presence_penalty"), ({"logit_bias": {3: 1.0}}, "logit_bias")):
        with pytest.raises(ConfigError, match=named):
            service.generate("a", vllm.SamplingParams(**wrong))
    with pytest.raises(ConfigError, match="exactly one"):
        service.generate("a", prompt_token_ids=[1])


class LLM:
    """A `vllm.LLM` whose tokens are the prompt's own, each with log-prob -id."""

    llm_engine = SimpleNamespace(model_config=SimpleNamespace(logprobs_mode="raw_logprobs", max_model_len=64))
    get_tokenizer = staticmethod(byte_tokenizer)

    def generate(self, prompts: list[Any], params: Any, use_tqdm: bool) -> list[Any]:
        several = params if isinstance(params, list) else [params] * len(prompts)
        return [self._output(prompt["prompt_token_ids"], one) for prompt, one in zip(prompts, several, strict=True)]

    def _output(self, ids: list[int], params: Any) -> Any:
        nats = [{token: SimpleNamespace(logprob=-float(token)), 999: SimpleNamespace(logprob=-0.5)} for token in ids]
        own = ids[: params.max_tokens]
        out = SimpleNamespace(token_ids=own, logprobs=nats[: len(own)], finish_reason="length", stop_reason=None)
        return SimpleNamespace(outputs=[out], prompt_logprobs=[None, *nats[1:]])


LLM.__module__ = "vllm.entrypoints.llm"


def test_wrapper_accepts_llm_of_user_where_log_probs_are_exact(vllm: Any):
    policy = vLLMWrapper(LLM(), input_mode="tokens", inplace=False, generate_kwargs={"max_new_tokens": 2})
    batch = TensorDict(tokens=torch.tensor([[5, 6, 7]]), batch_size=(1,))
    (row,) = policy(batch).unbind(0)
    assert row["tokens"].response.tolist() == [5, 6]
    assert row["log_probs"].response.tolist() == [-5.0, -6.0]
    scored = policy.get_new_version(generate=False)(batch)
    assert scored[0]["log_probs"].full.tolist() == [0.0, -6.0, -7.0]
    for wrong in ({"temperature": 0.5}, {"repetition_penalty": 1.2}):
        with pytest.raises(UnsupportedParameter, match=next(iter(wrong))):
            policy(batch, **wrong)
    with pytest.raises(TypeError, match="max_model_len"):
        vLLMWrapper(LLM(), max_model_len=64)
    logits: Any = LLM()
    logits.llm_engine = SimpleNamespace(model_config=SimpleNamespace(logprobs_mode="raw_logits", max_model_len=64))
    with pytest.raises(ConfigError, match="logprobs_mode='raw_logits'"):
        vLLMWrapper(logits)


def test_group_forms_without_blocking_event_loop():
    host, port = free_address("127.0.0.1")

    async def form() -> list[Any]:
        return await asyncio.gather(
            *(stateless_init_process_group_async(host, port, rank, 2, "cpu", timeout=30.0) for rank in range(2))
        )

    first, second = asyncio.run(form())
    assert (first.rank, second.rank) == (0, 1)
    first.close()
    second.close()
