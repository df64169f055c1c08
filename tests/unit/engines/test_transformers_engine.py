"""The transformers engine with concurrent requests: stopping, aborts, pauses, weights, failures, close."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.engines.base import EngineHealth, SampleRequest, SamplingParams, VersionSpan
from skyrl_train.engines.transformers.engine import TransformersEngine
from skyrl_train.errors import EngineError, UnsupportedParameter, WeightSyncError
from skyrl_train.testing.tiny_models import byte_tokenizer, save_tiny_model, tiny_model
from skyrl_train.weight_sync.buckets import plan_buckets
from skyrl_train.weight_sync.protocol import Manifest, TensorSpec, dtype_name
from skyrl_train.weight_sync.sender import WeightSender

TOKENIZER = byte_tokenizer()
EOS = 2
PROMPT = (50, 60, 70, 80, 90)


@asynccontextmanager
async def _engine(model: Any = None, **options: Any) -> AsyncIterator[TransformersEngine]:
    engine = TransformersEngine(model or tiny_model(hidden_size=32), TOKENIZER, **options)
    try:
        yield engine
    finally:
        await engine.close()


def _request(name: str = "r", prompt: tuple[int, ...] = PROMPT, seed: int = 0, **sampling: Any) -> SampleRequest:
    sampling = {"max_tokens": 8, "ignore_eos": True} | sampling
    return SampleRequest(name, to_token_array(prompt), SamplingParams(**sampling), seed)


async def _until(engine: TransformersEngine, condition: Callable[[EngineHealth], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition(await engine.health()):
            await asyncio.sleep(0.001)


def _repeating_model(*tokens: int) -> Any:
    """Return a model whose greedy continuation repeats `tokens` in a cycle."""
    model = tiny_model("llama", hidden_size=64, layers=1, vocab_size=320, tied=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        codes = torch.randn(320, 64, generator=torch.Generator().manual_seed(0))
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight.copy_(codes)
        for token, successor in zip(tokens, [*tokens[1:], tokens[0]], strict=True):
            model.lm_head.weight[successor] = codes[token]
    return model


def _broken(*_: Any) -> Any:
    raise ZeroDivisionError("division by zero")


def _spell(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


# -- stopping ---------------------------------------------------------------------------------------------------------


def test_completions_keep_request_order_and_lengths():
    async def run():
        async with _engine() as engine:
            requests = [_request(f"r{length}", max_tokens=length, seed=length) for length in (5, 1, 9, 3)]
            return await engine.generate(requests)

    completions = asyncio.run(run())
    assert [c.request_id for c in completions] == ["r5", "r1", "r9", "r3"]
    for completion, length in zip(completions, (5, 1, 9, 3), strict=True):
        assert len(completion.token_ids) == len(completion.logprobs) == len(completion.full_logprobs) == length
        assert completion.stop_reason == "length"
        assert completion.stop_text is None
        assert completion.versions == [VersionSpan(0, length, 0)]


def test_eos_ends_row_and_is_kept():
    letters = _spell("abc")
    prompt = (letters[0],)

    async def run():
        async with _engine(_repeating_model(*letters, EOS)) as engine:
            plain = _request(prompt=prompt, temperature=0.0, max_tokens=50, ignore_eos=False)
            ignored = replace(plain, request_id="i", sampling=replace(plain.sampling, ignore_eos=True))
            longer = replace(plain, request_id="m", sampling=replace(plain.sampling, min_tokens=4))
            return await engine.generate([plain, ignored, longer])

    plain, ignored, longer = asyncio.run(run())
    assert plain.token_ids.tolist() == [*letters[1:], EOS]
    assert (plain.stop_reason, plain.stop_text) == ("stop", "<|im_end|>")
    assert (len(ignored.token_ids), ignored.stop_reason) == (50, "length")
    assert EOS not in longer.token_ids[:4]
    assert len(longer.token_ids) >= 4


def test_all_eos_tokens_of_configs_end_responses():
    letters = _spell("abc")
    for config in ("generation_config", "config"):
        model = _repeating_model(*letters)
        model.generation_config.eos_token_id = None
        vars(getattr(model, config))["eos_token_id"] = [300, letters[2]]

        async def run(model=model):
            async with _engine(model) as engine:
                return await engine.generate([_request(prompt=letters[:1], temperature=0.0, ignore_eos=False)])

        assert asyncio.run(run())[0].token_ids.tolist() == list(letters[1:])


def test_stop_strings_and_stop_token_ids():
    text = _spell("abc</d>.")

    async def run():
        async with _engine(_repeating_model(*text)) as engine:
            base: dict[str, Any] = {"prompt": text[:1], "temperature": 0.0, "max_tokens": 30}
            return await engine.generate(
                [
                    _request("string", stop=("</d>",), **base),
                    _request("id", stop_token_ids=(text[3],), **base),
                    _request("none", **base),
                    _request("late", stop=("</d>",), min_tokens=9, **base),
                ]
            )

    string, stop_id, none, late = asyncio.run(run())
    assert TOKENIZER.decode(string.token_ids) == "bc</d>"
    assert (string.stop_reason, string.stop_text) == ("stop", "</d>")
    assert stop_id.token_ids.tolist() == list(text[1:4])
    assert stop_id.stop_text == "<"
    assert (len(none.token_ids), none.stop_reason) == (30, "length")
    assert len(late.token_ids) == 14
    assert late.stop_text == "</d>"


def test_max_model_len_ends_a_row():
    async def run():
        async with _engine(max_model_len=12) as engine:
            completion = (await engine.generate([_request(max_tokens=100)]))[0]
            with pytest.raises(UnsupportedParameter, match="max_model_len=12"):
                await engine.generate([_request(prompt=tuple(range(3, 15)))])
            return completion

    completion = asyncio.run(run())
    assert (len(completion.token_ids), completion.stop_reason) == (7, "length")


# -- batching ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_num_seqs", [3, 64])
def test_samples_share_one_prefill(max_num_seqs):
    other = (9, 8, 7)

    async def run():
        async with _engine(max_num_seqs=max_num_seqs) as engine:
            requests = [_request(f"a{n}", seed=n) for n in range(8)]
            requests += [_request(f"b{n}", other, seed=n, max_tokens=2) for n in range(8)]
            completions = await engine.generate(requests)
            return completions, await engine.health()

    completions, health = asyncio.run(run())
    assert health.prefilled_tokens == len(PROMPT) + len(other)
    assert health.cached_tokens == 7 * (len(PROMPT) + len(other))
    assert health.generated_tokens == 8 * 8 + 8 * 2
    assert len({tuple(c.token_ids) for c in completions[:8]}) > 1
    assert (health.running, health.queued) == (0, 0)


def test_64_concurrent_calls_share_8_rows():
    async def run():
        async with _engine(max_num_seqs=8) as engine:
            max_running = 0

            async def watch():
                nonlocal max_running
                while True:
                    max_running = max(max_running, (await engine.health()).running)
                    await asyncio.sleep(0)

            watcher = asyncio.ensure_future(watch())
            calls = [engine.generate([_request(f"r{n}", seed=n, max_tokens=2 + n % 7)]) for n in range(64)]
            completions = await asyncio.gather(*calls)
            watcher.cancel()
            return max_running, completions

    max_running, completions = asyncio.run(run())
    assert [len(c[0].token_ids) for c in completions] == [2 + n % 7 for n in range(64)]
    assert 1 <= max_running <= 8


def test_finished_rows_free_the_cache():
    async def run():
        async with _engine() as engine:
            sizes, caches = [], []
            decode = engine.served.decode

            def watched(ids, cache, *others):
                sizes.append(len(ids))
                caches.append(cache)
                return decode(ids, cache, *others)

            engine.served.decode = watched  # type: ignore[method-assign]
            await engine.generate([_request(f"r{n}", max_tokens=n + 1) for n in range(6)])
            return sizes, caches[0].layers_kv

    sizes, layers = asyncio.run(run())
    assert sizes == [5, 4, 3, 2, 1]  # The first token of each row comes from the prefill.
    assert not layers


def test_duplicate_request_id_is_rejected():
    async def run():
        async with _engine() as engine:
            with pytest.raises(UnsupportedParameter, match="'r' is in use"):
                await engine.generate([_request("r"), _request("r")])

    asyncio.run(run())


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (_request(prompt=()), "no tokens"),
        (_request(prompt=(1, 320)), "0..319"),
        (_request(prompt=(-1,)), "0..319"),
        (replace(_request(), adapter="lora"), "adapter='lora'"),
        (_request(temperature=1e-40), "temperature=1e-40"),
        (_request(repetition_penalty=1e-40), "repetition_penalty=1e-40"),
        (_request(stop_token_ids=(7, 320), min_tokens=2), "stop_token_ids with 320: token ids must be in 0..319"),
        (_request(stop_token_ids=(-1,)), "stop_token_ids"),
        (_request(stop_token_ids=tuple(range(320)), min_tokens=2), "320 stop_token_ids with min_tokens=2"),
    ],
)
def test_invalid_requests_are_rejected_by_name(request_, message):
    async def run():
        async with _engine() as engine:
            with pytest.raises(UnsupportedParameter, match="transformers") as caught:
                await engine.generate([request_])
            assert message in str(caught.value)

    asyncio.run(run())


def test_eos_beyond_vocabulary_is_ignored():
    model = tiny_model(hidden_size=32)
    model.generation_config.eos_token_id = [EOS, 5000]

    async def run():
        async with _engine(model) as engine:
            return await engine.generate([_request(min_tokens=8, ignore_eos=False)])

    assert len(asyncio.run(run())[0].token_ids) == 8


def test_only_stop_strings_need_tokenizer():
    engine = TransformersEngine(tiny_model(hidden_size=32))
    assert engine.capabilities.sampling == {field.name for field in fields(SamplingParams)} - {"stop"}

    async def run():
        with pytest.raises(UnsupportedParameter, match="stop="):
            await engine.generate([_request(stop=("x",))])
        await engine.close()

    asyncio.run(run())


@pytest.mark.parametrize("reset", [False, True])
def test_queued_request_shares_prompt_until_cache_reset(reset):
    async def run():
        async with _engine(max_num_seqs=1) as engine:
            call = asyncio.ensure_future(engine.generate([_request(f"r{n}", seed=n, max_tokens=60) for n in range(2)]))
            await _until(engine, lambda health: health.running == 1)
            await engine.pause()
            if reset:
                await engine.reset_prefix_cache()
            await engine.resume()
            await call
            return (await engine.health()).prefilled_tokens

    assert asyncio.run(run()) == (2 if reset else 1) * len(PROMPT)


# -- aborts, pauses, deadlines ----------------------------------------------------------------------------------------


def test_abort_returns_what_was_sampled():
    async def run():
        async with _engine(max_num_seqs=1) as engine:
            running = asyncio.ensure_future(engine.generate([_request("a", max_tokens=4000)]))
            queued = asyncio.ensure_future(engine.generate([_request("b", max_tokens=4000)]))
            await _until(engine, lambda health: health.generated_tokens > 3)
            await engine.abort(["a", "b", "unknown"])
            return (await running)[0], (await queued)[0]

    running, queued = asyncio.run(run())
    assert running.stop_reason == queued.stop_reason == "abort"
    assert 3 < len(running.token_ids) == len(running.logprobs) < 4000
    assert running.versions == [VersionSpan(0, len(running.token_ids), 0)]
    assert (queued.token_ids.tolist(), queued.versions) == ([], [])


@pytest.mark.defect("queued-requests-time-out")
def test_deadline_counts_only_running_time():
    async def run():
        async with _engine(max_num_seqs=1) as engine:
            requests = [replace(_request(name, max_tokens=4000), deadline_s=0.2) for name in "ab"]
            start_s = time.monotonic()
            late = await engine.generate(requests)
            assert time.monotonic() - start_s >= 0.4
            await engine.pause()
            paused = await engine.generate([replace(_request("c"), deadline_s=0.1)])
            return late, paused

    (first, second), (paused,) = asyncio.run(run())
    assert first.stop_reason == second.stop_reason == paused.stop_reason == "abort"
    assert len(first.token_ids) and len(second.token_ids)
    assert first.running_s >= 0.2 and second.running_s >= 0.2
    assert paused.token_ids.tolist() == []


def test_resume_continues_with_same_tokens():
    request = _request("a", max_tokens=400, seed=5)

    async def run():
        async with _engine() as engine:
            uninterrupted = (await engine.generate([request]))[0]
            before = (await engine.health()).generated_tokens
            call = asyncio.ensure_future(engine.generate([request]))
            await _until(engine, lambda health: health.generated_tokens > before + 5)
            await engine.pause("keep")
            paused_at = (await engine.health()).generated_tokens
            await asyncio.sleep(0.05)
            health = await engine.health()
            assert (health.generated_tokens, health.paused, health.running) == (paused_at, True, 1)
            await engine.resume()
            return uninterrupted, (await call)[0]

    uninterrupted, resumed = asyncio.run(run())
    assert uninterrupted == resumed


def test_pause_abort_ends_everything_and_new_requests_wait():
    async def run():
        async with _engine(max_num_seqs=1) as engine:
            calls = [asyncio.ensure_future(engine.generate([_request(n, max_tokens=4000)])) for n in "ab"]
            await _until(engine, lambda health: health.generated_tokens > 3)
            await engine.pause("abort")
            assert [(await call)[0].stop_reason for call in calls] == ["abort", "abort"]
            later = asyncio.ensure_future(engine.generate([_request("c")]))
            await asyncio.sleep(0.05)
            assert not later.done()
            await engine.resume()
            return (await later)[0]

    assert asyncio.run(run()).stop_reason == "length"


def test_pause_wait_finishes_running_and_keeps_queued():
    async def run():
        async with _engine(max_num_seqs=1) as engine:
            first = asyncio.ensure_future(engine.generate([_request("a", max_tokens=60)]))
            second = asyncio.ensure_future(engine.generate([_request("b")]))
            await _until(engine, lambda health: health.generated_tokens > 3)
            await engine.pause("wait")
            health = await engine.health()
            await asyncio.sleep(0)
            assert (await first)[0].stop_reason == "length"
            assert not second.done()
            assert (health.paused, health.running, health.queued) == (True, 0, 1)
            await engine.resume()
            return (await second)[0]

    assert len(asyncio.run(run()).token_ids) == 8


# -- weights ----------------------------------------------------------------------------------------------------------


def _sync(source: torch.nn.Module, version: int) -> tuple[Manifest, list[Any]]:
    """Return the manifest and the buckets that a trainer with the weights of `source` sends in process."""
    sender = WeightSender(source.named_parameters, wire_dtype="float32", bucket_bytes=1 << 14, rank=0)
    manifest = sender.prepare_manifest(version)
    return manifest, [sender.send(bucket.index) for bucket in plan_buckets(manifest)]


def test_new_weights_are_served_with_their_version():
    old, new = tiny_model(hidden_size=32), tiny_model(hidden_size=32, seed=1)

    async def run():
        async with _engine(new) as fresh, _engine(old) as engine:
            expected = (await fresh.generate([_request(seed=3)]))[0]
            before = (await engine.generate([_request(seed=3)]))[0]
            manifest, buckets = _sync(tiny_model(hidden_size=32, seed=1), 4)
            await engine.begin_weights(manifest)
            for bucket in buckets:
                await engine.receive_weights(bucket)
            assert (await engine.health()).partially_loaded
            with pytest.raises(EngineError, match="is not fully loaded"):
                await engine.generate([_request()])
            with pytest.raises(EngineError, match="is not fully loaded"):
                await engine.score([(1, 2)])
            await engine.commit_weights(4)
            after = (await engine.generate([_request(seed=3)]))[0]
            return expected, before, after, await engine.health()

    expected, before, after, health = asyncio.run(run())
    assert after.token_ids.tolist() == expected.token_ids.tolist() != before.token_ids.tolist()
    assert after.logprobs.tolist() == expected.logprobs.tolist()
    assert after.versions == [VersionSpan(0, 8, 4)]
    assert (health.version, health.partially_loaded) == (4, False)


def test_completion_records_weight_change():
    prompts = [_request(f"r{n}", max_tokens=200, seed=n) for n in range(2)]

    async def run():
        async with _engine() as engine:
            call = asyncio.ensure_future(engine.generate(prompts))
            await _until(engine, lambda health: health.generated_tokens > 10)
            await engine.pause("keep")
            await engine.abort(["r1"])  # This frees a lane beside r0, which a new sample of the prompt must not use.
            manifest, buckets = _sync(tiny_model(hidden_size=32, seed=1), 1)
            await engine.begin_weights(manifest)
            for bucket in buckets:
                await engine.receive_weights(bucket)
            await engine.commit_weights(1)
            # A new request with the same prompt must not use keys and values of the old weights.
            prefilled_before = (await engine.health()).prefilled_tokens
            later = asyncio.ensure_future(engine.generate([_request("new", seed=9)]))
            await engine.resume()
            new = (await later)[0]
            prefilled = (await engine.health()).prefilled_tokens - prefilled_before
            async with _engine(tiny_model(hidden_size=32, seed=1)) as other:
                expected = (await other.generate([_request("new", seed=9)]))[0]
            return await call, new, expected, prefilled

    (row, aborted), new, expected, prefilled = asyncio.run(run())
    first, second = row.versions
    assert (first.start, first.stop, second.stop) == (0, second.start, 200)
    assert (first.version, second.version) == (0, 1)
    assert aborted.versions == [VersionSpan(0, first.stop, 0)]
    assert prefilled == len(PROMPT)
    assert new.token_ids.tolist() == expected.token_ids.tolist()
    assert new.logprobs.tolist() == pytest.approx(expected.logprobs.tolist(), abs=1e-5)
    assert new.versions == [VersionSpan(0, 8, 1)]


def test_rejected_manifest_keeps_old_weights():
    async def run():
        async with _engine() as engine:
            before = await engine.generate([_request(seed=1)])
            with pytest.raises(WeightSyncError, match=r"nothing\.like\.this"):
                await engine.begin_weights(Manifest(1, (TensorSpec("nothing.like.this", (2,), "float32"),)))
            return before, await engine.generate([_request(seed=1)])

    before, after = asyncio.run(run())
    assert before == after


def test_tied_weights_occur_once():
    async def run():
        async with _engine(tiny_model(hidden_size=32, tied=True)) as engine:
            return engine.served.parameters

    parameters = asyncio.run(run())
    assert "lm_head.weight" not in parameters
    assert {dtype_name(p.dtype) for p in parameters.values()} == {"float32"}


# -- failures and close -----------------------------------------------------------------------------------------------


def test_engine_survives_failed_step():
    async def run():
        async with _engine() as engine:
            decode = engine.served.decode
            engine.served.decode = _broken  # type: ignore[method-assign,assignment]
            with pytest.raises(EngineError, match=r"'transformers' failed: ZeroDivisionError"):
                await engine.generate([_request()])
            engine.served.decode = decode  # type: ignore[method-assign]
            return await engine.generate([_request()])

    assert asyncio.run(run())[0].stop_reason == "length"


def test_failed_prefill_does_not_block_deadlines():
    failing, late = (replace(_request(name, max_tokens=4000), deadline_s=0.2) for name in "ab")

    async def run():
        async with _engine(max_num_seqs=1) as engine:
            prefill = engine.served.prefill
            engine.served.prefill = _broken  # type: ignore[method-assign,assignment]
            with pytest.raises(EngineError, match=r"'transformers' failed: ZeroDivisionError"):
                await engine.generate([failing])
            engine.served.prefill = prefill  # type: ignore[method-assign]
            return await engine.generate([late])

    (completion,) = asyncio.run(run())
    assert completion.stop_reason == "abort"
    assert completion.running_s >= 0.2


def test_non_finite_weights_raise_error():
    model = tiny_model(hidden_size=32)

    async def run():
        async with _engine(model) as engine:
            with torch.no_grad():
                model.model.norm.weight[0] = float("nan")
            with pytest.raises(EngineError, match="not finite"):
                await engine.generate([_request()])

    asyncio.run(run())


def test_close_fails_running_and_later_calls():
    async def run():
        engine = TransformersEngine(tiny_model(hidden_size=32), name="brief")
        call = asyncio.ensure_future(engine.generate([_request(max_tokens=4000)]))
        await _until(engine, lambda health: health.running == 1)
        await engine.close()
        await engine.close()
        with pytest.raises(EngineError, match="'brief' was closed"):
            await call
        for late in (engine.generate([_request()]), engine.health(), engine.pause(), engine.score([(1, 2)])):
            with pytest.raises(EngineError, match="'brief' is closed"):
                await late

    asyncio.run(run())
    assert not any("brief" in thread.name for thread in threading.enumerate())


def test_cancelled_call_logs_no_loop_error():
    loop_errors: list[Any] = []

    async def run():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: loop_errors.append(context))
        async with _engine() as engine:
            call = asyncio.ensure_future(engine.generate([_request(max_tokens=4000)]))
            await _until(engine, lambda health: health.running == 1)
            call.cancel()

    asyncio.run(run())
    gc.collect()
    assert not loop_errors


def test_folder_is_loaded_with_tokenizer(tmp_path):
    path = save_tiny_model(tmp_path, hidden_size=32)

    async def run():
        engine = TransformersEngine(path, dtype="bfloat16", max_num_seqs=4, threads=torch.get_num_threads())
        try:
            return (await engine.generate([_request(stop=("never",))]))[0], engine.served.model.dtype
        finally:
            await engine.close()

    completion, dtype = asyncio.run(run())
    assert len(completion.token_ids) == 8
    assert dtype == torch.bfloat16
