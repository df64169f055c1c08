"""Sampling parameters have one meaning, invalid ones are rejected by name, and seeds are stable."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from skyrl_train.engines.base import SAMPLING_PARAM_NAMES, Capabilities, SampleRequest, SamplingParams
from skyrl_train.engines.sampling_params import (
    active_params,
    check_options,
    check_supported,
    parse_sampling_params,
    request_seed,
)
from skyrl_train.errors import ConfigError, UnsupportedParameter


@dataclass
class _Section:
    max_generate_length: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = 1
    stop: list[str] | None = None


def test_skyrl_defaults_are_off():
    params = parse_sampling_params(_Section())
    assert params == SamplingParams(max_tokens=64)
    assert active_params(params) == {}


@pytest.mark.parametrize("name", ["max_tokens", "max_generate_length", "max_new_tokens"])
def test_every_alias_of_max_tokens_is_accepted(name):
    assert parse_sampling_params({name: 7}).max_tokens == 7


@pytest.mark.parametrize("stop", ["</a>", ["</a>"], ("</a>",)])
def test_single_stop_string_needs_no_list(stop):
    assert parse_sampling_params({"max_tokens": 1, "stop": stop}).stop == ("</a>",)


def test_integers_are_accepted_as_numbers():
    assert parse_sampling_params({"max_tokens": 1, "temperature": 0, "top_p": 1}).temperature == 0.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("temperature", 1e-40),
        ("temperature", 0.009),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-40),
        ("repetition_penalty", 100.1),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("stop", [""]),
        ("stop", [3]),
        ("stop_token_ids", [-1]),
        ("ignore_eos", "yes"),
    ],
)
def test_invalid_value_is_rejected_with_key(name, value):
    with pytest.raises(ConfigError) as caught:
        parse_sampling_params({"max_tokens": 4, name: value}, "generator.sampling_params")
    assert f"generator.sampling_params.{name}=" in str(caught.value)
    assert "is not allowed" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 0.0), ("temperature", 0.01), ("repetition_penalty", 0.01), ("repetition_penalty", 100.0)],
)
def test_range_bounds_are_allowed(name, value):
    assert getattr(parse_sampling_params({"max_tokens": 4, name: value}), name) == value


def test_all_problems_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        parse_sampling_params({"max_tokens": 4, "temprature": 1.0, "top_p": 7.0})
    assert "Did you mean 'temperature'?" in str(caught.value)
    assert "top_p=7.0" in str(caught.value)


@pytest.mark.parametrize("lengths", [{}, {"max_tokens": 3, "max_new_tokens": 4}])
def test_max_tokens_must_be_given_exactly_once(lengths):
    with pytest.raises(ConfigError, match="exactly one"):
        parse_sampling_params(lengths)


def test_min_tokens_above_max_tokens_is_rejected():
    with pytest.raises(ConfigError, match="min_tokens=5"):
        parse_sampling_params({"max_tokens": 4, "min_tokens": 5})


def test_unsupported_parameter_is_named():
    limited = Capabilities(name="limited", sampling=frozenset({"temperature"}))
    check_supported(SamplingParams(4, temperature=0.5), limited)
    with pytest.raises(UnsupportedParameter, match=r"'limited'.*min_p=0.1"):
        check_supported(SamplingParams(4, min_p=0.1), limited)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"temperature": 1e-40}, r"'complete' does not support temperature=1e-40; allowed: 0 \(greedy\) or .* 0\.01"),
        (
            {"repetition_penalty": 1e-40},
            r"'complete' does not support repetition_penalty=1e-40; allowed: from 0\.01 to 100",
        ),
        ({"temperature": float("nan")}, "temperature=nan"),
    ],
)
def test_engine_rejects_value_out_of_range(options, match):
    complete = Capabilities(name="complete", sampling=SAMPLING_PARAM_NAMES)
    check_supported(SamplingParams(4, temperature=0, repetition_penalty=2), complete)
    with pytest.raises(UnsupportedParameter, match=match):
        check_supported(SamplingParams(4, **options), complete)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"top_logprobs": -1}, "top_logprobs=-1; allowed: 0 to 5. No more."),
        ({"top_logprobs": 6}, "top_logprobs=6; allowed: 0 to 5. No more."),
        ({"json_schema": "{}"}, "'some' does not support json_schema: no grammar."),
    ],
)
def test_unsupported_options_are_rejected_with_a_reason(options, match):
    refusals = {"top_logprobs": "No more.", "json_schema": "no grammar."}
    some = Capabilities("some", max_top_logprobs=5, refusals=refusals)
    request = SampleRequest("r", np.array([1]), SamplingParams(4), 0)
    check_options(replace(request, top_logprobs=5), some)
    with pytest.raises(UnsupportedParameter, match=match):
        check_options(replace(request, **options), some)


def test_schema_is_a_mapping_or_its_json():
    request = SampleRequest("r", np.array([1]), SamplingParams(4), 0)
    schema: Any = {"enum": [None]}
    assert replace(request, json_schema=schema).json_schema == '{"enum": [null]}'
    assert replace(request, json_schema="{ }").json_schema == '{"type": "object"}'
    with pytest.raises(UnsupportedParameter, match="request 'r': json_schema must be a JSON object, got 3"):
        replace(request, json_schema="3")


def test_seeds_are_pinned():
    # A run that is resumed after an upgrade must sample the same tokens.
    assert request_seed(1, "row-7", 2, 0, 30) == 16064284880719529871


@given(
    st.lists(
        st.tuples(st.integers(), st.text(), st.integers(0, 99), st.integers(0, 9), st.integers(0, 10**6)), unique=True
    )
)
def test_seeds_differ_wherever_an_argument_does(arguments):
    seeds = {request_seed(*argument) for argument in arguments}
    assert len(seeds) == len(arguments)
    assert all(0 <= seed < 2**64 for seed in seeds)
