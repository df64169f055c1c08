"""Every engine samples from the model's distribution, returns exact log-probs, and applies stopping rules."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from skyrl_train.engines.sampling_params import parse_sampling_params
from skyrl_train.errors import ConfigError, UnsupportedParameter
from tests.support.engine_harness import (
    END_OF_SEQUENCE,
    END_OF_TURN,
    MAX_MODEL_LEN,
    TOKENIZER,
    TOLERANCE,
    EngineHarness,
    assert_logprobs,
    assert_spans,
    largest_difference,
)
from tests.support.reference_sampler import Reference

PROMPTS = [(50, 60, 70, 80, 90), tuple(range(100, 131)), (9,)]


@pytest.fixture
def reference(bench: EngineHarness) -> Reference:
    """The reference of random weights, which the engine serves."""
    return bench.serve(bench.random_model(0), "random")


def spell(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def assert_rejected(bench: EngineHarness, parameter: str, **sampling: Any) -> None:
    """Check that the error names engine and parameter, and that the capabilities give a reason."""
    with pytest.raises(UnsupportedParameter, match=parameter) as caught:
        bench.generate(bench.request(PROMPTS[0], **sampling))
    assert bench.capabilities.name in str(caught.value)
    assert bench.refusal_reason(parameter)


# -- tokens and log-probs ---------------------------------------------------------------------------------------------


def test_greedy_tokens_match_hugging_face(bench: EngineHarness, reference: Reference):
    requests = [bench.request(prompt, temperature=0.0, max_tokens=24) for prompt in PROMPTS]
    for request, completion in zip(requests, bench.generate(*requests), strict=True):
        assert completion.request_id == request.request_id
        assert completion.token_ids.tolist() == reference.greedy(request.token_ids, 24)
        assert completion.stop_reason == "length"
        assert completion.stop_text is None
        assert completion.logprobs.tolist() == [0.0] * 24  # No other token could have been sampled.
        assert_logprobs(reference, request, completion)
        assert_spans(completion, [bench.run(bench.engine.health()).version])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_match_reference(bench: EngineHarness, reference: Reference, temperature: float):
    requests = [
        bench.request(prompt, seed=seed, temperature=temperature, max_tokens=20)
        for prompt in PROMPTS
        for seed in range(3)
    ]
    for request, completion in zip(requests, bench.generate(*requests), strict=True):
        assert len(completion.token_ids) == 20
        assert_logprobs(reference, request, completion)


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_p": 0.8},
        {"top_k": 5},
        {"min_p": 0.1},
        {"repetition_penalty": 1.3},
        {"top_k": 30, "top_p": 0.8},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
        {"top_p": 0.7, "min_p": 0.4},
    ],
    ids=lambda sampling: " ".join(sampling),
)
def test_logprobs_are_of_the_distribution_really_sampled_from(
    bench: EngineHarness, reference: Reference, sampling: dict[str, Any]
):
    missing = sampling.keys() - bench.capabilities.sampling
    if missing:
        assert_rejected(bench, sorted(missing)[0], **{name: sampling[name] for name in sorted(missing)[:1]})
        return
    requests = [bench.request(prompt, seed=seed, **sampling) for prompt in PROMPTS for seed in range(3)]
    for request, completion in zip(requests, bench.generate(*requests), strict=True):
        assert all(math.isfinite(logprob) for logprob in completion.logprobs), "a truncated token was sampled"
        assert_logprobs(reference, request, completion)


def test_batch_mixes_all_sampling_parameters(bench: EngineHarness, reference: Reference):
    options: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"top_k": 3},
        {"top_p": 0.5},
        {"temperature": 1.3, "min_p": 0.05},
    ]
    supported = [sampling for sampling in options if sampling.keys() <= bench.capabilities.sampling | {"temperature"}]
    requests = [
        bench.request(prompt, seed=seed, **sampling) for seed, sampling in enumerate(supported) for prompt in PROMPTS
    ]
    for request, completion in zip(requests, bench.generate(*requests), strict=True):
        assert_logprobs(reference, request, completion)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_top_logprobs_match_reference(bench: EngineHarness, reference: Reference, temperature: float):
    if not bench.capabilities.max_top_logprobs:
        with pytest.raises(UnsupportedParameter, match="top_logprobs"):
            bench.generate(bench.request(PROMPTS[0], top_logprobs=1))
        assert bench.refusal_reason("top_logprobs")
        return
    counts = [0, 3, 20, 0, 1]
    requests = [
        bench.request(PROMPTS[n % 3], seed=n, temperature=temperature, top_p=0.5, top_logprobs=count, max_tokens=8 + n)
        for n, count in enumerate(counts)
    ]
    for request, completion in zip(requests, bench.generate(*requests), strict=True):
        assert_logprobs(reference, request, completion)
        top = completion.top_logprobs
        if not request.top_logprobs:
            assert top is None
            continue
        assert top is not None
        assert top.token_ids.shape == top.logprobs.shape == (len(completion.token_ids), request.top_logprobs)
        ids = completion.token_ids.tolist()
        full = reference.distributions(request.token_ids, ids, temperature)
        for token, own, found, nats, expected in zip(
            ids, completion.full_logprobs, top.token_ids, top.logprobs, full, strict=True
        ):
            assert largest_difference(nats, expected[found]) <= TOLERANCE
            assert largest_difference(nats, sorted(expected, reverse=True)[: len(nats)]) <= TOLERANCE
            assert token not in found or nats[found == token] == own


def test_more_top_logprobs_than_supported_are_rejected(bench: EngineHarness):
    with pytest.raises(UnsupportedParameter, match="top_logprobs=21"):
        bench.generate(bench.request(PROMPTS[0], top_logprobs=21))


def test_scores_match_reference(bench: EngineHarness, reference: Reference):
    sequences = [list(range(3, 43)), [9, 2], [200, 100, 50, 25, 12], [7]]
    for temperature in (1.0, 0.7):
        if temperature != 1.0 and not bench.capabilities.score_temperature:
            with pytest.raises(UnsupportedParameter, match="temperature"):
                bench.run(bench.engine.score(sequences, temperature))
            assert bench.refusal_reason("score")
            continue
        scores = bench.run(bench.engine.score(sequences, temperature))
        for actual, expected in zip(scores, reference.score(sequences, temperature), strict=True):
            assert largest_difference(actual, expected) <= TOLERANCE


# -- JSON -------------------------------------------------------------------------------------------------------------

OBJECT = json.dumps(
    {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 23]}},
        "required": ["ok", "n"],
        "additionalProperties": False,
    }
)


def lacks_json(bench: EngineHarness) -> bool:
    if bench.capabilities.json_schema:
        return False
    with pytest.raises(UnsupportedParameter, match="json_schema"):
        bench.generate(bench.request(PROMPTS[0], ignore_eos=False, json_schema=OBJECT))
    assert bench.refusal_reason("json_schema")
    return True


def test_response_is_json_of_its_schema(bench: EngineHarness, reference: Reference):
    if lacks_json(bench):
        return
    requests = [
        bench.request(PROMPTS[0], seed=n, ignore_eos=False, max_tokens=150, json_schema=OBJECT) for n in range(6)
    ]
    completions = bench.generate(*requests, bench.request(PROMPTS[0]))
    stopped = [completion.token_ids for completion in completions if completion.stop_reason == "stop"]
    texts = [str(TOKENIZER.decode(ids, skip_special_tokens=True)) for ids in stopped]
    assert len(texts) >= 3  # others may consist of blanks, because the model is random
    for text in texts:
        parsed = json.loads(text)
        assert parsed.keys() == {"ok", "n"} and isinstance(parsed["ok"], bool) and parsed["n"] in (1, 23)
    assert_logprobs(reference, bench.request(PROMPTS[0]), completions[-1])


@pytest.mark.parametrize("sampling", [{"temperature": 0.7}, {"temperature": 0.0}, {"top_k": 2}], ids=str)
def test_schema_truncates_the_distribution(bench: EngineHarness, reference: Reference, sampling: dict[str, Any]):
    if lacks_json(bench):
        return
    llguidance = pytest.importorskip("llguidance")
    hf = pytest.importorskip("llguidance.hf")
    vocabulary = hf.from_tokenizer(TOKENIZER, n_vocab=320, eos_token=spell(END_OF_SEQUENCE + END_OF_TURN))
    schema = json.dumps({"enum": ["ab", "ac", 12, True]})
    requests = [
        bench.request(prompt, seed=seed, ignore_eos=False, json_schema=schema, **sampling)
        for prompt in PROMPTS
        for seed in range(3)
    ]
    for request, completion in zip(requests, bench.generate(*requests), strict=True):
        assert completion.stop_reason == "stop"
        temperature, ids = request.sampling.temperature, completion.token_ids.tolist()
        assert TOKENIZER.decode(ids, skip_special_tokens=True) in ('"ab"', '"ac"', "12", "true")
        matcher = llguidance.LLMatcher(vocabulary, llguidance.LLMatcher.grammar_from_json_schema(schema))
        full = reference.distributions(request.token_ids, ids, temperature)
        for n, token in enumerate(ids):
            assert abs(completion.full_logprobs[n] - full[n][token]) <= TOLERANCE
            allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:320] == 1
            kept = np.where(allowed, full[n].astype(np.float64), -np.inf)
            if request.sampling.top_k:
                kept[kept < np.sort(kept)[-request.sampling.top_k]] = -np.inf
            expected = kept[token] - np.logaddexp.reduce(kept) if temperature else 0.0
            assert abs(completion.logprobs[n] - expected) <= TOLERANCE
            assert allowed[token]
            matcher.consume_token(token)


@pytest.mark.parametrize(
    ("schema", "sampling", "message"),
    [
        ('{"type": "objectt"}', {}, "objectt"),
        ('{"type": "array", "uniqueItems": true}', {}, "uniqueItems"),
        ("{}", {"min_tokens": 3}, "min_tokens=3"),
        ("{}", {"ignore_eos": True}, "ignore_eos=True"),
    ],
)
def test_invalid_schemas_are_rejected(bench: EngineHarness, schema: str, sampling: dict[str, Any], message: str):
    if lacks_json(bench):
        return
    with pytest.raises(UnsupportedParameter, match=message):
        bench.generate(bench.request(PROMPTS[0], json_schema=schema, **{"ignore_eos": False, **sampling}))


# -- groups and seeds -------------------------------------------------------------------------------------------------


def test_group_samples_differ_and_keep_request_order(bench: EngineHarness, reference: Reference):
    requests = [bench.request(PROMPTS[1], name=f"sample-{n}", group="one", seed=n, max_tokens=8 + n) for n in range(8)]
    completions = bench.generate(*requests)
    assert [c.request_id for c in completions] == [r.request_id for r in requests]
    assert [len(c.token_ids) for c in completions] == [8 + n for n in range(8)]
    assert len({tuple(c.token_ids[:8]) for c in completions}) == 8
    for request, completion in zip(requests, completions, strict=True):
        assert_logprobs(reference, request, completion)


def test_seed_determines_tokens_in_any_batch(bench: EngineHarness, reference: Reference):
    if not bench.capabilities.seeds:
        assert bench.refusal_reason("seed")
        return
    same = [bench.request(PROMPTS[0], seed=2**64 - 7) for _ in range(3)]
    others = [bench.request(prompt, seed=n) for n in range(4) for prompt in PROMPTS]
    (alone,) = bench.generate(same[0])
    together = bench.generate(*others[:5], same[1], *others[5:], same[2])
    assert alone.token_ids.tolist() == together[5].token_ids.tolist() == together[-1].token_ids.tolist()
    assert len({tuple(c.token_ids) for c in (together[0], together[3], together[7], alone)}) == 4


# -- stopping ---------------------------------------------------------------------------------------------------------

SPELLED = "abc</d>."
"""The text that the model of these tests repeats in a cycle."""


@pytest.fixture
def speller(bench: EngineHarness) -> EngineHarness:
    bench.serve(bench.spelling_model(SPELLED), "speller")
    return bench


def spelled(bench: EngineHarness, **sampling: Any) -> Any:
    """Return the continuation of "a"."""
    (completion,) = bench.generate(bench.request(spell("a"), **({"temperature": 0.0, "max_tokens": 40} | sampling)))
    assert len(completion.token_ids) == len(completion.logprobs) == len(completion.full_logprobs)
    assert_spans(completion, [bench.run(bench.engine.health()).version])
    return completion


def test_max_tokens_ends_with_length(speller: EngineHarness):
    completion = spelled(speller, max_tokens=11)
    assert TOKENIZER.decode(completion.token_ids) == "bc</d>.abc<"
    assert (completion.stop_reason, completion.stop_text) == ("length", None)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_multi_token_stop_string_ends_and_is_kept(speller: EngineHarness, temperature: float):
    completion = spelled(speller, stop=("never", "</d>"), temperature=temperature)
    assert TOKENIZER.decode(completion.token_ids) == "bc</d>"
    assert (completion.stop_reason, completion.stop_text) == ("stop", "</d>")


def test_stop_token_ends_and_is_kept(speller: EngineHarness):
    (bracket,) = spell("<")
    completion = spelled(speller, stop_token_ids=(bracket, 250))
    assert TOKENIZER.decode(completion.token_ids) == "bc<"
    assert (completion.stop_reason, completion.stop_text) == ("stop", "<")


def test_stops_of_one_request_do_not_end_another(speller: EngineHarness):
    requests = [
        speller.request(spell("a"), temperature=0.0, max_tokens=12, **stops)
        for stops in ({"stop": ("c",)}, {}, {"stop_token_ids": tuple(spell("/"))})
    ]
    completions = speller.generate(*requests)
    assert [TOKENIZER.decode(c.token_ids) for c in completions] == ["bc", "bc</d>.abc</", "bc</"]
    assert [c.stop_reason for c in completions] == ["stop", "length", "stop"]


def test_min_tokens_delays_stop_string(speller: EngineHarness):
    if "min_tokens" not in speller.capabilities.sampling:
        assert_rejected(speller, "min_tokens", min_tokens=6)
        return
    completion = spelled(speller, stop=("c<",), min_tokens=6)
    assert TOKENIZER.decode(completion.token_ids) == "bc</d>.abc<"  # the second occurrence
    assert (completion.stop_reason, completion.stop_text) == ("stop", "c<")


@pytest.mark.parametrize(("min_tokens", "text"), [(2, "bc<"), (3, "bc<"), (4, "bc</d>.abc<")])
def test_stop_string_may_end_at_min_tokens(speller: EngineHarness, min_tokens: int, text: str):
    if "min_tokens" not in speller.capabilities.sampling:
        assert_rejected(speller, "min_tokens", min_tokens=6)
        return
    completion = spelled(speller, stop=("c<",), min_tokens=min_tokens)
    assert TOKENIZER.decode(completion.token_ids) == text
    assert (completion.stop_reason, completion.stop_text) == ("stop", "c<")


def test_min_tokens_forbids_a_stop_token(speller: EngineHarness):
    if "min_tokens" not in speller.capabilities.sampling:
        assert_rejected(speller, "min_tokens", min_tokens=6)
        return
    completion = spelled(speller, stop_token_ids=tuple(spell("<")), min_tokens=6)
    assert TOKENIZER.decode(completion.token_ids[:2]) == "bc"
    assert spell("<")[0] not in completion.token_ids[:5]
    assert len(completion.token_ids) >= 6


@pytest.fixture(params=[END_OF_SEQUENCE, END_OF_TURN])
def end(bench: EngineHarness, request: pytest.FixtureRequest) -> str:
    """A token that ends responses. The model repeats "ab" and this token in a cycle."""
    bench.serve(bench.spelling_model(f"ab{request.param}"), f"ending in {request.param}")
    return str(request.param)


def test_end_token_ends_and_is_kept(bench: EngineHarness, end: str):
    completion = spelled(bench, ignore_eos=False)
    assert completion.token_ids.tolist() == spell(f"b{end}")
    assert (completion.stop_reason, completion.stop_text) == ("stop", end)


def test_end_token_ends_with_custom_stop_tokens(bench: EngineHarness, end: str):
    completion = spelled(bench, ignore_eos=False, stop_token_ids=tuple(spell("x")))
    assert completion.token_ids.tolist() == spell(f"b{end}")
    completion = spelled(bench, ignore_eos=False, stop_token_ids=tuple(spell("b")))
    assert completion.token_ids.tolist() == spell("b")


def test_ignore_eos_continues_after_end_token(bench: EngineHarness, end: str):
    completion = spelled(bench, ignore_eos=True, max_tokens=7)
    assert completion.token_ids.tolist() == spell(f"b{end}ab{end}ab")
    assert completion.stop_reason == "length"


def test_min_tokens_forbids_end_tokens(bench: EngineHarness, end: str):
    if "min_tokens" not in bench.capabilities.sampling:
        assert_rejected(bench, "min_tokens", min_tokens=6)
        return
    completion = spelled(bench, ignore_eos=False, min_tokens=6)
    assert spell(end)[0] not in completion.token_ids[:5]
    assert len(completion.token_ids) >= 6


# -- unsupported and invalid requests ---------------------------------------------------------------------------------


def test_every_parameter_is_supported_or_rejected_by_name(bench: EngineHarness):
    active: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "stop": ("x",),
        "stop_token_ids": (3,),
        "ignore_eos": True,
    }
    for parameter, value in active.items():
        if parameter in bench.capabilities.sampling:
            (completion,) = bench.generate(bench.request(PROMPTS[0], max_tokens=4, **{parameter: value}))
            assert 1 <= len(completion.token_ids) <= 4
        else:
            assert_rejected(bench, parameter, **{parameter: value})


def test_nan_temperature_is_rejected():
    with pytest.raises(ConfigError, match=r"temperature=nan is not allowed"):
        parse_sampling_params({"max_tokens": 1, "temperature": math.nan})


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ((), "token"),
        ((5, 320), "token ids.*320"),
        ((-1, 5), "token ids"),
        (tuple([7] * MAX_MODEL_LEN), str(MAX_MODEL_LEN)),
    ],
    ids=["empty", "beyond the vocabulary", "negative", "too long"],
)
def test_invalid_prompts_are_rejected_by_name(bench: EngineHarness, prompt: tuple[int, ...], message: str):
    before = bench.run(bench.engine.health())
    valid = bench.request(PROMPTS[0])
    with pytest.raises(UnsupportedParameter, match=message) as caught:
        bench.generate(valid, bench.request(prompt))
    assert bench.capabilities.name in str(caught.value)
    after = bench.run(bench.engine.health())
    assert (after.running, after.queued) == (0, 0), "the valid request of the call must not run"
    assert after.generated_tokens == before.generated_tokens


def test_prompt_may_leave_space_for_one_token(bench: EngineHarness, reference: Reference):
    request = bench.request([7 + n % 90 for n in range(MAX_MODEL_LEN - 1)], temperature=0.0, max_tokens=100)
    (completion,) = bench.generate(request)
    assert completion.stop_reason == "length"
    assert len(completion.token_ids) == 1
    assert_logprobs(reference, request, completion)
