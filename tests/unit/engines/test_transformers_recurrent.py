"""Models with recurrent layers in the transformers engine: each sequence has states of its own."""

from __future__ import annotations

import asyncio
import copy
import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.engines.base import Completion, SampleRequest, SamplingParams
from skyrl_train.engines.transformers.cache import DecodeCache, NewPrompt, PromptKey
from skyrl_train.engines.transformers.engine import TransformersEngine
from skyrl_train.engines.transformers.model_runner import ModelRunner
from skyrl_train.engines.transformers.recurrent_states import RecurrentStates
from skyrl_train.errors import EngineError
from skyrl_train.testing.tiny_models import HYBRID_KINDS, tiny_model
from tests.support.engine_harness import (
    TOLERANCE,
    BackgroundLoop,
    EngineHarness,
    assert_logprobs,
    assert_spans,
    largest_difference,
)
from tests.support.reference_sampler import Reference

PROMPTS = [(5, 6, 7, 8, 9), (20, 21, 22, 23, 24), tuple(range(11, 22)), (30,), tuple(range(40, 180))]
"""The first two have one length and are prefilled together. The last one has several chunks of each scan."""
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def loop() -> Iterator[BackgroundLoop]:
    loop = BackgroundLoop()
    yield loop
    loop.close()


def requests(max_tokens: int = 10) -> list[SampleRequest]:
    """Return three requests for each prompt, with responses of different lengths."""
    return [
        SampleRequest(
            f"{index}.{sample}",
            to_token_array(prompt),
            SamplingParams(max_tokens=max_tokens + 5 * sample, ignore_eos=True),
            seed=100 * index + sample,
            group=str(index),
        )
        for index, prompt in enumerate(PROMPTS)
        for sample in range(3)
    ]


def generate(model: PreTrainedModel, requests: list[SampleRequest], max_num_seqs: int) -> list[Completion]:
    async def run() -> list[Completion]:
        engine = TransformersEngine(copy.deepcopy(model), max_num_seqs=max_num_seqs)
        try:
            return await engine.generate(requests)
        finally:
            await engine.close()

    return asyncio.run(run())


@pytest.mark.parametrize("kind", HYBRID_KINDS)
def test_logprobs_match_each_sequence_alone(kind: str) -> None:
    # With 4 rows, samples of a prompt start at different times, rows end and others take their place.
    model = tiny_model(kind, layers=4)
    reference = Reference(model)
    for request, completion in zip(requests(), generate(model, requests(), max_num_seqs=4), strict=True):
        assert_logprobs(reference, request, completion)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "nemotron_h", "lfm2"])
def test_retracted_requests_recompute_their_states(kind: str) -> None:
    model = tiny_model(kind, layers=4)
    long = [replace(request, sampling=replace(request.sampling, max_tokens=60)) for request in requests()[:6]]

    async def run() -> list[Completion]:
        engine = TransformersEngine(copy.deepcopy(model), max_num_seqs=4)
        try:
            call = asyncio.ensure_future(engine.generate(long))
            for tokens in (50, 200):
                while (await engine.health()).generated_tokens < tokens:
                    await asyncio.sleep(0.001)
                await engine.pause("retract")
                await engine.resume()
            return await call
        finally:
            await engine.close()

    reference = Reference(model)
    for request, completion in zip(long, asyncio.run(run()), strict=True):
        assert_logprobs(reference, request, completion)


@pytest.mark.parametrize("mode", ["keep", "retract"])
@pytest.mark.parametrize("kind", ["qwen3_5_text", "kimi_linear", "nemotron_h", "lfm2"])
def test_paused_rows_outlive_aborts_and_syncs(kind: str, mode: str, loop: BackgroundLoop, tmp_path: Path) -> None:
    old, new = tiny_model(kind), tiny_model(kind, seed=5)
    # The reference caches the input of this projection, and would compute earlier keys and values with new weights.
    kept = {name: tensor for name, tensor in old.state_dict().items() if "kv_b_proj" in name}
    new.load_state_dict(kept, strict=False)
    bench = EngineHarness(TransformersEngine(copy.deepcopy(old), max_num_seqs=8), old, loop, tmp_path)
    rows = [bench.request(PROMPTS[index % 3], seed=index, max_tokens=200) for index in range(6)]
    aborted_ids = [rows[index].request_id for index in (0, 4)]

    async def run() -> list[Completion]:
        calls = bench.start(*rows)
        await bench.wait_until_running(len(rows))
        await bench.engine.pause(mode)
        await bench.engine.abort(aborted_ids)
        await bench.publish(new)
        await bench.engine.resume()
        return await calls

    completions = bench.run(run())
    bench.run(bench.engine.close())
    before, after = Reference(old), Reference(new)
    for request, completion in zip(rows, completions, strict=True):
        prompt, sampled, full = request.token_ids, completion.token_ids, completion.full_logprobs
        if request.request_id in aborted_ids:
            assert completion.stop_reason == "abort" and 0 < len(sampled) < 200
            assert_logprobs(before, request, completion)
            continue
        change = assert_spans(completion, [0, 1])[0].stop
        assert 0 < change < len(sampled) == 200
        expected = before.logprobs(prompt, sampled[:change], request.sampling)[1]
        if mode == "keep":
            expected += after.full_logprobs_after(before, prompt, sampled, change)
        else:
            expected += after.logprobs(prompt, sampled, request.sampling)[1][change:]
        assert largest_difference(full, expected) <= TOLERANCE


def test_states_are_freed_with_their_rows() -> None:
    runner = ModelRunner(tiny_model("qwen3_5_text"), CPU, "states")
    cache, keys = DecodeCache(CPU), [PromptKey(prompt) for prompt in PROMPTS[:3]]
    with torch.inference_mode():
        packed, starts, _ = runner.prefill(keys)
        states = [weakref.ref(packed.states[start].states) for start in starts]
        prompts = [NewPrompt(key, 2, start) for key, start in zip(keys, starts, strict=True)]
        slots = cache.allocate_slots(prompts, packed, frozenset(keys[:1]))
        del packed
        cache.begin(slots, [0] * 6)
        gc.collect()
        assert [state() for state in states] == [None] * 3, "rows have copies, and so have prompts that are needed"
        later = cache.allocate_slots([NewPrompt(keys[0], 1, None)], None, frozenset())
        decoded = runner.decode(torch.tensor([7] * 7), begun(cache, [*slots, *later], [1] * 6 + [0]))
    assert decoded.shape[0] == 7
    assert not cache._prompt_states, "no queued request needs them"


def live_states() -> list[RecurrentStates]:
    gc.collect()
    return [thing for thing in gc.get_objects() if type(thing) is RecurrentStates]  # isinstance reads __class__


def test_states_of_ended_rows_are_freed_during_pause() -> None:
    """The queue is not empty, so the cache is not reset."""
    model = tiny_model("qwen3_5_text", layers=4)
    of_others = live_states()

    async def count_states() -> int:
        engine = TransformersEngine(model, max_num_seqs=2)
        try:
            call = asyncio.ensure_future(engine.generate(requests(60)[:3]))
            while (await engine.health()).generated_tokens < 5:
                await asyncio.sleep(0.001)
            await engine.pause("keep")
            await engine.abort(["0.0", "0.1"])
            assert (await engine.health()).queued == 1
            count = sum(all(states is not other for other in of_others) for states in live_states())
            await engine.resume()
            await call
            return count
        finally:
            await engine.close()

    assert asyncio.run(count_states()) == 1, "only the prompt's, which the queued request needs"


def test_scoring_allocates_no_states(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ModelRunner(tiny_model("qwen3_5_text", layers=4), CPU, "states")
    scores = runner.score(PROMPTS, 1.0)
    monkeypatch.delattr(RecurrentStates, "empty")
    assert runner.score(PROMPTS, 1.0) == scores


def begun(cache: DecodeCache, slots: list[int], stored: list[int]) -> DecodeCache:
    cache.begin(slots, stored)
    return cache


def test_prompt_without_states_is_computed_again() -> None:
    """A running row has the keys and values of the prompt, but its states at the prompt's end are gone."""
    model = tiny_model("qwen3_5_text", layers=4)

    def request(name: str, max_tokens: int) -> SampleRequest:
        prompt, params = to_token_array(PROMPTS[0]), SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return SampleRequest(name, prompt, params, seed=1, group="g")

    async def sample() -> list[Completion]:
        engine = TransformersEngine(copy.deepcopy(model), max_num_seqs=2)
        try:
            running = asyncio.ensure_future(engine.generate([request("running", 4000)]))
            while (await engine.health()).generated_tokens < 5:
                await asyncio.sleep(0.001)
            completions = await engine.generate([request("short", 1), request("queued", 10)])
            await engine.abort(["running"])
            return [*completions, *await running]
        finally:
            await engine.close()

    short, queued, running = asyncio.run(sample())
    assert list(short.token_ids) == list(queued.token_ids[:1])
    assert list(queued.token_ids) == list(running.token_ids[:10]), "the seeds are equal"


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("minimax", {"num_local_experts": 2}, "MiniMaxForCausalLM: it has layers of type linear_attention"),
        ("recurrent_gemma", {"lru_width": 16}, "RecurrentGemmaForCausalLM: its recurrent layers keep states"),
        ("granitemoehybrid", {"mamba_n_heads": 4}, "GraniteMoeHybridForCausalLM: it has no attention layers"),
    ],
)
def test_unsupported_recurrent_model_is_refused(kind: str, options: dict[str, Any], reason: str) -> None:
    config = AutoConfig.for_model(
        kind, vocab_size=32, hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=2, **options
    )
    with pytest.raises(EngineError, match=reason):
        TransformersEngine(AutoModelForCausalLM.from_config(config))
