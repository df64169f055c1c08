"""The experts of each token that SGLang returns on GPUs, in its form of an answer."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.engines.base import SampleRequest, SamplingParams
from skyrl_train.engines.lifecycle import Lifecycle
from skyrl_train.engines.sglang.arguments import engine_arguments
from skyrl_train.engines.sglang.requests import RequestManager
from skyrl_train.errors import ConfigError
from skyrl_train.testing.tiny_models import save_tiny_model

EXPERTS = np.arange(4 * 2 * 3, dtype=np.int32).reshape(4, 2, 3)
"""Experts of the four tokens that the model has read, in two layers."""
META = {
    "finish_reason": {"type": "length", "length": 2},
    "output_token_logprobs": [(-1.5, 7, None), (-0.25, 9, None)],
    "cached_tokens": 0,
    "weight_versions": [{"start": 0, "end": 2, "version": "3"}],
    "routed_experts": base64.b64encode(EXPERTS.tobytes()).decode(),
}


def completion(routing_shape: tuple[int, int] | None, meta: dict[str, Any], known: int = 0) -> Any:
    unused: Any = None
    manager = RequestManager(
        unused, unused, frozenset(), Lifecycle("a"),
        max_model_len=64, on_cpu=False, max_num_seqs=4, routing_shape=routing_shape,
    )  # fmt: skip
    request = SampleRequest("r", to_token_array((1, 2, 3)), SamplingParams(max_tokens=2), 0, known_routing=known)
    return manager._completion(request, False, [7, 9], meta)


def test_answer_has_experts_of_all_tokens_but_last():
    routing = completion((2, 3), META).routing
    assert routing.shape == (3 + 2 - 1, 2, 3)
    assert (routing == EXPERTS).all()
    assert (completion((2, 3), META, known=3).routing == EXPERTS[3:]).all()


def test_answer_without_experts_has_no_routing():
    assert completion(None, META).routing is None
    assert completion((2, 3), {**META, "routed_experts": None}).routing is None


def test_routing_on_cpu_is_refused(tmp_path: Any):
    model = str(save_tiny_model(tmp_path / "model", "qwen3_moe"))
    arguments: dict[str, Any] = {
        "name": "a", "dtype": "float32", "max_num_seqs": 4, "max_model_len": 64, "max_lora_rank": 0,
        "rope_scaling": None, "rope_theta": None, "options": {"keeps_routing": True},
    }  # fmt: skip
    assert engine_arguments(model, device="cuda", **arguments)["enable_return_routed_experts"] is True
    with pytest.raises(ConfigError, match="experts of tokens on GPUs only"):
        engine_arguments(model, device="cpu", **arguments)
