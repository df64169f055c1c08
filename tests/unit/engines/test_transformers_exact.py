"""The transformers engine samples from the model's distribution, compared with Hugging Face's forward and generate."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.engines.base import Completion, SampleRequest, SamplingParams
from skyrl_train.engines.transformers.cache import DecodeCache, NewPrompt, PromptKey
from skyrl_train.engines.transformers.engine import TransformersEngine
from skyrl_train.engines.transformers.model_runner import ModelRunner
from skyrl_train.errors import EngineError
from skyrl_train.testing.tiny_models import HYBRID_KINDS, tiny_model
from tests.support.double_precision import double_precision

VOCABULARY = 97
HYBRIDS = list(HYBRID_KINDS)
KINDS = ["qwen2", "qwen3", "llama", "mistral", "gemma", "gemma2", "gemma3_text", "gpt_oss"]
WINDOWED = ["mistral", "gemma2", "gemma3_text", "gpt_oss"]
WINDOWED_BY_MASK = ["qwen2_moe", "phimoe"]


def _model(kind: str = "qwen2", window: int | None = None) -> PreTrainedModel:
    model = tiny_model(kind, vocab_size=VOCABULARY, hidden_size=32)
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    if window is not None:
        if kind == "qwen2_moe":
            model.config.layer_types = ["sliding_attention"] * len(model.model.layers)
        model.config.sliding_window = window
        for layer in model.model.layers:
            if getattr(layer.self_attn, "sliding_window", None) is not None:
                layer.self_attn.sliding_window = window
    return model


def _prompts(lengths: list[int], seed: int = 0) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()) for length in lengths]


def _requests(prompts: list[tuple[int, ...]], samples: int, sampling: SamplingParams) -> list[SampleRequest]:
    return [
        SampleRequest(f"{p}.{s}", to_token_array(prompt), sampling, seed=1000 * p + s, group=str(p))
        for p, prompt in enumerate(prompts)
        for s in range(samples)
    ]


def _generate(model: PreTrainedModel, requests: list[SampleRequest], **options) -> list[Completion]:
    async def run() -> list[Completion]:
        engine = TransformersEngine(copy.deepcopy(model), **options)
        try:
            return await engine.generate(requests)
        finally:
            await engine.close()

    return asyncio.run(run())


@torch.no_grad()
def _reference(model: PreTrainedModel, request: SampleRequest, ids: list[int]) -> tuple[list[float], list[float]]:
    """Return the log-probs of `ids` in the truncated and in the full distribution, with eager attention."""
    model.set_attn_implementation("eager")
    tokens = torch.tensor([[*request.token_ids.tolist(), *ids]])
    logits = model(input_ids=tokens, use_cache=False).logits[0].float()
    sampling, start = request.sampling, len(request.token_ids)
    logprobs, full = [], []
    for index, token in enumerate(ids):
        row = logits[start + index - 1].unsqueeze(0)
        temperature = sampling.temperature or 1.0
        full.append(float((row / temperature).log_softmax(-1)[0, token]))
        steps: Any = LogitsProcessorList()
        if sampling.repetition_penalty != 1:
            steps.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        row = steps(tokens[:, : start + index], row) / temperature
        steps = LogitsProcessorList()
        if sampling.top_k:
            steps.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            steps.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p:
            steps.append(MinPLogitsWarper(sampling.min_p))
        logprobs.append(float(steps(tokens[:, : start + index], row).log_softmax(-1)[0, token]))
    return logprobs, full


def _assert_logprobs_are_the_models(model, requests, completions):
    for request, completion in zip(requests, completions, strict=True):
        logprobs, full = _reference(model, request, completion.token_ids.tolist())
        assert completion.logprobs.tolist() == pytest.approx(logprobs, abs=1e-4)
        assert completion.full_logprobs.tolist() == pytest.approx(full, abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_match_model_for_every_architecture(kind):
    model = _model(kind)
    requests = _requests(_prompts([5, 11, 5, 1]), 3, SamplingParams(max_tokens=14))
    _assert_logprobs_are_the_models(model, requests, _generate(model, requests))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"top_p": 0.8},
        {"top_k": 5},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.02},
        {"repetition_penalty": 1.3},
    ],
)
def test_logprobs_are_of_the_distribution_really_sampled_from(options):
    model = _model()
    requests = _requests(_prompts([6, 9]), 4, SamplingParams(max_tokens=12, **options))
    _assert_logprobs_are_the_models(model, requests, _generate(model, requests))


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_matches_hugging_face(kind):
    model = _model(kind)
    requests = _requests(_prompts([4, 9, 13]), 2, SamplingParams(max_tokens=20, temperature=0.0))
    model.set_attn_implementation("eager")
    reference: Any = model
    for request, completion in zip(requests, _generate(model, requests), strict=True):
        ids = torch.tensor([request.token_ids.tolist()])
        mask = torch.ones_like(ids)
        expected = reference.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0)
        assert completion.token_ids.tolist() == expected[0, ids.shape[1] :].tolist()
        assert completion.logprobs.tolist() == [0.0] * 20


@pytest.mark.parametrize("kind", [*WINDOWED, "qwen2_moe"])
@pytest.mark.parametrize("window", [4, 9])
def test_sliding_windows_hide_older_tokens(kind, window):
    # Prompts are shorter and longer than the window, and sampled tokens push the prompt out of it.
    model = _model(kind, window)
    requests = _requests(_prompts([3, 12, 7]), 2, SamplingParams(max_tokens=16))
    _assert_logprobs_are_the_models(model, requests, _generate(model, requests))


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("kind", [*KINDS, "qwen3_moe", "deepseek_v3", *WINDOWED_BY_MASK, *HYBRIDS])
def test_decoding_is_exact_in_double_precision(kind: str, samples: int):
    model: Any = _model(kind, window=6 if kind in (*WINDOWED, *WINDOWED_BY_MASK) else None).double().eval()
    model.set_experts_implementation("eager")  # The default implementation lacks float64.
    prompts, new = _prompts([11, 3, 11]), 40  # more tokens than the initial lanes can store
    sampled = torch.tensor(_prompts([new] * 3 * samples, seed=1))
    rows = [prompt for prompt in prompts for _ in range(samples)]
    device = torch.device("cpu")
    with double_precision(), torch.inference_mode():
        model.set_attn_implementation("eager")
        expected = [
            model(input_ids=torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0, len(prompt) - 1 :]
            for prompt, ids in zip(rows, sampled.tolist(), strict=True)
        ]
        served, cache = ModelRunner(model, device, "double"), DecodeCache(device)
        keys = [PromptKey(prompt) for prompt in prompts]
        packed, starts, logits = served.prefill(keys)
        new_prompts = [NewPrompt(key, samples, start) for key, start in zip(keys, starts, strict=True)]
        slots = cache.allocate_slots(new_prompts, packed, frozenset())
        results = [logits.repeat_interleave(samples, 0)]
        for step in range(new):
            if not cache.advance():
                cache.begin(slots, [step] * len(slots))
            results.append(served.decode(sampled[:, step], cache))
    assert results[-1].dtype == torch.float64
    torch.testing.assert_close(torch.stack(results, 1), torch.stack(expected), atol=1e-9, rtol=0)


def test_other_rows_do_not_affect_a_row():
    # Responses of 1 to 90 tokens in 6 rows: rows finish, lanes are reused, the cache grows, shrinks and is compacted.
    model = _model()
    prompts = _prompts([3, 40, 8, 17, 8, 21], seed=1)
    requests = [
        replace(request, sampling=SamplingParams(max_tokens=1 + (37 * index) % 90))
        for index, request in enumerate(_requests(prompts, 6, SamplingParams(max_tokens=1)))
    ]
    completions = _generate(model, requests, max_num_seqs=6)
    assert [len(completion.token_ids) for completion in completions] == [r.sampling.max_tokens for r in requests]
    _assert_logprobs_are_the_models(model, requests, completions)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_5_text"])
def test_shrinking_batch_stays_exact_after_compaction(kind):
    model = _model(kind)
    requests = [
        replace(request, sampling=SamplingParams(max_tokens=3 if index % 8 else 40))
        for index, request in enumerate(_requests(_prompts([5, 6, 7, 8]), 8, SamplingParams(max_tokens=1)))
    ]
    _assert_logprobs_are_the_models(model, requests, _generate(model, requests))


def test_results_are_independent_of_batch_and_order():
    model = _model()
    requests = _requests(_prompts([6, 9, 4]), 4, SamplingParams(max_tokens=25))
    together = {c.request_id: c for c in _generate(model, requests)}
    backwards = {c.request_id: c for c in _generate(model, requests[::-1], max_num_seqs=5)}
    alone = [_generate(model, [request])[0] for request in requests[::3]]
    assert {i: c.token_ids.tolist() for i, c in together.items()} == {
        i: c.token_ids.tolist() for i, c in backwards.items()
    }
    for completion in alone:
        assert completion.token_ids.tolist() == together[completion.request_id].token_ids.tolist()


def test_results_are_bitwise_independent_of_earlier_work():
    model = _model()
    requests = _requests(_prompts([6, 9, 4]), 4, SamplingParams(max_tokens=25))

    async def after_other_work() -> list[Completion]:
        engine = TransformersEngine(copy.deepcopy(model))
        try:
            await engine.generate(_requests(_prompts([30, 6], seed=9), 3, SamplingParams(max_tokens=7)))
            return await engine.generate(requests)
        finally:
            await engine.close()

    assert _generate(model, requests) == asyncio.run(after_other_work())


def test_sampled_tokens_follow_the_models_distribution():
    model = _model()
    prompt = _prompts([7])
    count = 4000
    completions = _generate(model, _requests(prompt, count, SamplingParams(max_tokens=2)), max_num_seqs=count)
    with torch.no_grad():
        first_probs = model(input_ids=torch.tensor(prompt)).logits[0, -1].softmax(-1)
        mode = int(first_probs.argmax())
        second_probs = model(input_ids=torch.tensor([[*prompt[0], mode]])).logits[0, -1].softmax(-1)
    first = [completion.token_ids[0] for completion in completions]
    second = [completion.token_ids[1] for completion in completions if completion.token_ids[0] == mode]
    for ids, probabilities in ((first, first_probs), (second, second_probs)):
        shares = torch.bincount(torch.tensor(ids), minlength=VOCABULARY) / len(ids)
        error = (probabilities * (1 - probabilities) / len(ids)).sqrt()
        assert ((shares - probabilities).abs() <= 5 * error + 2 / len(ids)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_served(dtype):
    model = _model().to(dtype)
    requests = _requests(_prompts([6, 9]), 2, SamplingParams(max_tokens=8))
    for request, completion in zip(requests, _generate(model, requests), strict=True):
        expected = _reference(model, request, completion.token_ids.tolist())[1]
        assert completion.full_logprobs.tolist() == pytest.approx(expected, abs=0.15)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_match_model_for_any_length(kind):
    model = _model(kind)
    sequences = _prompts([9, 2, 1, 30, 9])

    async def score(temperature: float) -> list[list[float]]:
        engine = TransformersEngine(copy.deepcopy(model))
        try:
            return await engine.score(sequences, temperature)
        finally:
            await engine.close()

    for temperature in (1.0, 0.7):
        for ids, scores in zip(sequences, asyncio.run(score(temperature)), strict=True):
            request = SampleRequest("", to_token_array(ids[:1]), SamplingParams(1, temperature=temperature), 0)
            assert scores == pytest.approx(_reference(model, request, list(ids[1:]))[1], abs=1e-4)


def test_state_space_model_is_rejected():
    from transformers import MambaConfig, MambaForCausalLM

    mamba = MambaForCausalLM(MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(EngineError, match="MambaForCausalLM"):
        TransformersEngine(mamba)


def test_encoder_decoder_is_rejected():
    from transformers import T5Config, T5ForConditionalGeneration

    small = T5Config(vocab_size=32, d_model=16, d_ff=16, d_kv=4, num_layers=1, num_heads=2)
    small.decoder_start_token_id = 0
    with pytest.raises(EngineError, match="encoder"):
        TransformersEngine(T5ForConditionalGeneration(small))


def test_model_with_extra_attention_input_is_rejected():
    model = _model()
    for layer in model.model.layers:  # like a model that passes more than queries, keys and values
        layer.self_attn.forward = partial(layer.self_attn.forward, position_bias=torch.zeros(1))
    with pytest.raises(EngineError, match="Qwen2Attention: it uses position_bias"):
        TransformersEngine(model)


def test_dynamic_rope_is_rejected():
    model = _model("llama")
    model.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    with pytest.raises(EngineError, match="RoPE depends on the longest sequence"):
        TransformersEngine(model)


def test_abort_before_first_sample_returns_empty_completion():
    async def run():
        engine = TransformersEngine(_model(), max_num_seqs=1)
        await engine.pause()
        waiting = asyncio.ensure_future(engine.generate(_requests(_prompts([4]), 1, SamplingParams(max_tokens=8))))
        while not (await engine.health()).queued:
            await asyncio.sleep(0.01)
        await engine.pause("abort")
        try:
            return (await asyncio.wait_for(waiting, 30))[0]
        finally:
            await engine.close()

    completion = asyncio.run(run())
    assert (completion.token_ids.tolist(), completion.logprobs.tolist()) == ([], [])
    assert completion.stop_reason == "abort"
