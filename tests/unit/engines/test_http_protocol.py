"""Parsing of received data returns a value, or raises an error that names the invalid member, and nothing else."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from pydantic_core import PydanticSerializationError

from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.engines.base import Capabilities, Completion, SampleRequest, SamplingParams, TopLogProbs, VersionSpan
from skyrl_train.engines.http.dialects import chat_completions
from skyrl_train.engines.http.dialects.chat_completions import ChatCompletionRequest
from skyrl_train.engines.http.json_body import InvalidBodyError, parse_body, read_json, write_json
from skyrl_train.engines.http.openai import Translator
from skyrl_train.engines.http.openai_protocol import CompletionRequest
from skyrl_train.engines.http.protocol import (
    REMOTE_METHODS,
    BeginWeights,
    Generate,
    Limits,
    NullableFloats,
    ReceiveWeights,
    Result,
    ServerInfo,
    decode_error,
    encode_error,
)
from skyrl_train.errors import (
    DataError,
    DeadlineExceeded,
    EngineError,
    SkyRLError,
    UnsupportedParameter,
    WeightSyncError,
    WorkerDied,
)
from skyrl_train.testing.tiny_models import byte_tokenizer
from skyrl_train.weight_sync.protocol import Bucket, Manifest, SharedHandle, TensorSpec
from tests.support.trajectories import completion_from

LIMITS = Limits()
TYPES: list[Any] = [call.arguments for call in REMOTE_METHODS.values()]
TYPES += [SampleRequest, SamplingParams, Manifest, TensorSpec, Bucket, SharedHandle]
TYPES += [ChatCompletionRequest, CompletionRequest]
WORDS = [*dict.fromkeys(field.name for kind in TYPES for field in fields(kind))]
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
)
ANY_JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=4), inner, max_size=6)
    ),
    max_leaves=12,
)


def _arguments(method: str, body: Any) -> Any:
    return parse_body(REMOTE_METHODS[method].arguments, body).checked(LIMITS)


def _result(kind: Any, value: Any) -> Any:
    """Return the value as the receiver reads it."""
    generic: Any = Result
    return parse_body(generic[kind], write_json(Result(value))).result


def _json(value: Any) -> Any:
    return read_json(write_json(value))


def _request(**more: Any) -> SampleRequest:
    return replace(SampleRequest("r0", to_token_array((1, 2, 3)), SamplingParams(max_tokens=4), 7), **more)


def _translator() -> Translator:
    return Translator(byte_tokenizer(), limits=LIMITS, default_max_tokens=16, deadline_s=5)


@given(st.sampled_from(sorted(REMOTE_METHODS)), ANY_JSON)
def test_any_json_is_arguments_or_invalid(method: str, body: Any):
    with suppress(InvalidBodyError, WeightSyncError):
        _arguments(method, body)


@given(st.sampled_from(["chat", "text"]), ANY_JSON)
def test_any_json_is_completion_request_or_invalid(kind: str, body: Any):
    with suppress(InvalidBodyError, DataError):
        chat_completions.parse(body) if kind == "chat" else _TRANSLATOR.text(body, None)


_TRANSLATOR = _translator()
_GOOD_CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
_GOOD_CALLS: dict[str, Any] = {
    "generate": {"requests": [_json(_request(top_logprobs=2, json_schema="{}"))]},
    "score": {"token_ids": [[1, 2]]},
    "connect_weights": {"route": "ipc", "address": "", "rank": 1, "world_size": 2, "timeout_s": 5},
    "begin_weights": {"manifest": _json(Manifest(1, (TensorSpec("w", (2, 2), "float32", -5),)))},
    "receive_weights": {"bucket": _json(Bucket(0, ("w",), (-5,)))},
}


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(deeper for key, item in items for deeper in _paths(item, (*path, key)))]


def _with(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    changed = dict(value) if isinstance(value, dict) else list(value)
    changed[path[0]] = _with(value[path[0]], path[1:], new)
    return changed


@given(st.sampled_from(sorted(_GOOD_CALLS)), st.data())
def test_modified_call_is_call_or_invalid(method: str, data: Any):
    body = _GOOD_CALLS[method]
    path = data.draw(st.sampled_from(_paths(body)))
    with suppress(InvalidBodyError, WeightSyncError):
        _arguments(method, _with(body, path, data.draw(ANY_JSON)))


@given(st.data())
def test_chat_with_extra_member_is_chat_or_invalid(data: Any):
    body = _GOOD_CHAT | {data.draw(st.sampled_from(WORDS)): data.draw(ANY_JSON)}
    with suppress(InvalidBodyError, DataError):
        chat_completions.parse(body)


@given(st.binary(max_size=40))
def test_any_bytes_are_json_or_invalid(body: bytes):
    with suppress(InvalidBodyError):
        read_json(body)


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999", "[1, NaN]", "9" * 5000, "[" * 100_000, '"\ud800'])
def test_non_json_and_non_finite_numbers_are_invalid(text: str):
    with pytest.raises(InvalidBodyError):
        read_json(text.encode(errors="surrogatepass"))


def test_lone_surrogate_is_rejected():
    with pytest.raises(InvalidBodyError, match=r"content.*surrogate"):
        chat_completions.parse(read_json(rb'{"model": "m", "messages": [{"role": "user", "content": "\ud800"}]}'))


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=8), st.integers(0, 2**64 - 1))
def test_written_json_is_read_back_bitwise(numbers: list[float], seed: int):
    request = _request(
        seed=seed,
        sampling=SamplingParams(max_tokens=9, temperature=0.7, stop=("\n", "é"), stop_token_ids=(5,)),
        session="s",
        deadline_s=1.5,
        top_logprobs=2,
        json_schema='{"enum": [null, "é"]}',
    )
    ids = list(range(len(numbers)))
    completion = completion_from("r0", ids, numbers, numbers, "stop", [VersionSpan(0, len(ids), 3)], "\n")
    if ids:
        columns = np.array([numbers, numbers], np.float32).T
        completion = replace(completion, top_logprobs=TopLogProbs(np.array([ids, ids]).T, columns))
    for value, kind in ((request, SampleRequest), (completion, Completion)):
        assert _result(kind, value) == value
    assert _arguments("generate", _json(Generate([request]))).requests == [request]


def test_requests_of_earlier_versions_are_read():
    body = {"request_id": "r0", "token_ids": [1, 2, 3], "sampling": {"max_tokens": 4}, "seed": 7}
    assert _arguments("generate", {"requests": [body]}).requests == [_request()]
    answer = {"request_id": "r0", "token_ids": [5], "logprobs": [-1.0], "full_logprobs": [-1.0], "stop_reason": "stop"}
    completion = Completion("r0", np.array([5]), np.array([-1.0]), np.array([-1.0]), "stop", [])
    assert _result(Completion, answer | {"versions": []}) == completion


def test_weight_sync_messages_are_read_back():
    manifest = Manifest(3, (TensorSpec("a.b", (2, 3), "bfloat16", -(2**63)),), bucket_bytes=64, base_version=2)
    assert _arguments("begin_weights", _json(BeginWeights(manifest))).manifest == manifest
    bucket = Bucket(0, ("a.b",), (-1,), handles=(SharedHandle(0, 16, "/proc/1/fd/7"),))
    assert _arguments("receive_weights", _json(ReceiveWeights(bucket))).bucket == bucket
    info = ServerInfo("m", Capabilities("e", frozenset({"top_p"}), refusals={"lora": "no"}), LIMITS)
    assert _result(ServerInfo, info) == info


def test_non_finite_numbers_are_sent_as_null():
    (scores,) = _result(list[NullableFloats], [[-1.5, math.nan, -math.inf]])
    assert scores[0] == -1.5 and all(map(math.isnan, scores[1:]))
    numbers = np.array([-1.5, math.nan], np.float32)
    completion = Completion("r0", np.array([5, 6], np.int32), numbers, numbers, "stop", [])
    assert np.array_equal(_result(Completion, completion).logprobs, numbers, equal_nan=True)


@pytest.mark.parametrize("body", ["", "{", '{"result": "\\ud800"}', "[" * 300 + "]" * 300, '{"result": NaN}', "null"])
def test_invalid_response_raises_invalid_body_error(body: str):
    with pytest.raises(InvalidBodyError):
        parse_body(REMOTE_METHODS["generate"].response_type, body.encode())


def test_tensors_cannot_be_sent():
    with pytest.raises(PydanticSerializationError, match="Tensor"):
        write_json(Bucket(0, ("w",), (0,), payload=torch.zeros(4, dtype=torch.uint8)))
    with pytest.raises(InvalidBodyError, match=r"bucket\.payload"):
        _arguments("receive_weights", {"bucket": {"index": 0, "names": [], "fingerprints": [], "payload": [1]}})


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"token_ids": []}, "requests[0].token_ids"),
        ({"token_ids": [1, -2]}, "requests[0].token_ids"),
        ({"token_ids": [1, 2.0]}, "requests[0].token_ids[1]"),
        ({"seed": 2**64}, "requests[0].seed"),
        ({"seed": True}, "requests[0].seed"),
        ({"deadline_s": 0}, "requests[0].deadline_s"),
        ({"request_id": "x" * 2000}, "requests[0].request_id"),
        ({"sampling": {}}, "requests[0].sampling.max_tokens"),
        ({"sampling": {"max_tokens": 10**9}}, "requests[0].sampling.max_tokens"),
        ({"sampling": {"max_tokens": 4, "temperature": -1}}, "requests[0].sampling.temperature"),
        ({"sampling": {"max_tokens": 4, "temperature": "hot"}}, "requests[0].sampling.temperature"),
        ({"sampling": {"max_tokens": 4, "stop": ["x"] * 17}}, "requests[0].sampling.stop"),
        ({"sampling": {"max_tokens": 4, "stop": "x"}}, "requests[0].sampling.stop"),
        ({"sampling": {"max_tokens": 4, "top_q": 1}}, "requests[0].sampling.top_q"),
        ({"json_schema": "{"}, "requests[0].json_schema"),
        ({"json_schema": "[]"}, "requests[0].json_schema"),
        ({"json_schema": {}}, "requests[0].json_schema"),
        ({"top_logprobs": 1.5}, "requests[0].top_logprobs"),
        ({"extra": 1}, "requests[0].extra"),
    ],
)
def test_request_out_of_bounds_is_rejected_with_path(change: dict[str, Any], param: str):
    body = {"requests": [_json(_request()) | change]}
    with pytest.raises(InvalidBodyError) as caught:
        _arguments("generate", body)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("bucket", "param"),
    [
        ({"handles": [{"slot": 0, "size": 16, "file": "/etc/passwd"}]}, "bucket.handles[0].file"),
        ({"handles": [{"slot": 0, "size": 16}]}, "bucket.handles[0].file"),
        ({"handles": [{"slot": 0, "size": 16, "file": "/proc/1/fd/2", "cuda": []}]}, "bucket.handles[0].cuda"),
        ({"file": "weights.bin"}, "bucket.file"),
        ({"fingerprints": [1]}, "bucket.fingerprints"),
    ],
)
def test_bucket_accepts_only_process_memory_and_safetensors(bucket: dict[str, Any], param: str):
    with pytest.raises(InvalidBodyError) as caught:
        _arguments("receive_weights", {"bucket": {"index": 0, "names": [], "fingerprints": []} | bucket})
    assert caught.value.param == param


def test_duplicate_request_id_is_rejected():
    with pytest.raises(InvalidBodyError, match="twice"):
        _arguments("generate", {"requests": [_json(_request())] * 2})


def test_in_process_weight_route_is_rejected_by_name():
    body = {"route": "in_process", "address": "", "rank": 1, "world_size": 2, "timeout_s": 5}
    with pytest.raises(WeightSyncError, match=r"in_process.*broadcast"):
        _arguments("connect_weights", body)


@pytest.mark.parametrize("kind", [UnsupportedParameter, EngineError, WeightSyncError, WorkerDied])
def test_errors_keep_their_type(kind: type[SkyRLError]):
    status, body = encode_error(kind("engine 'x' cannot"))
    decoded = decode_error(status, json.loads(json.dumps(body)), "remote")
    assert type(decoded) is kind and str(decoded) == "engine 'x' cannot"


def test_deadline_error_keeps_its_fields():
    decoded = decode_error(*encode_error(DeadlineExceeded("engine 3", 1.5)), "remote")
    assert isinstance(decoded, DeadlineExceeded) and (decoded.waited_for, decoded.seconds) == ("engine 3", 1.5)


@pytest.mark.parametrize("body", [None, [], {"error": 3}, {"error": {"message": 3}}, "x"])
def test_malformed_error_body_is_engine_error(body: Any):
    assert type(decode_error(500, body, "remote")) is EngineError


def test_completion_text_keeps_special_reasoning_tokens():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]"]})
    translator = Translator(tokenizer, limits=LIMITS, default_max_tokens=16, deadline_s=5)
    ids = np.array(tokenizer.encode("[THINK]a[/THINK]b", add_special_tokens=False), np.int32)
    zeros = np.zeros(len(ids), np.float32)
    done = Completion("0", ids, zeros, zeros, "stop", [])
    text = translator.text({"model": "m", "prompt": "?"}, None)
    assert translator.to_response(text, [done])["choices"][0]["text"] == "[THINK]a[/THINK]b"
