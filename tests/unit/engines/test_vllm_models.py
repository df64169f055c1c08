from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from skyrl_train.engines.vllm.model_support import check_model
from skyrl_train.errors import ConfigError
from skyrl_train.testing.tiny_models import tiny_config

GATED_DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
SERVED: dict[str, Any] = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
"""Settings with which vLLM serves gated delta nets on CPUs."""


@pytest.fixture(autouse=True)
def torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)


def check(kind: str, *, on_cpu: bool = True, dtype: str = "float32", **changes: Any) -> None:
    config = tiny_config(kind, tied=False)
    config.update(changes)
    check_model("some/model", config, on_cpu=on_cpu, dtype=dtype)


@pytest.mark.parametrize("kind", ["lfm2", "lfm2_moe", "kimi_linear", "nemotron_h", "jamba", "olmo_hybrid"])
def test_unsupported_hybrids_are_rejected_on_cpus(kind: str):
    with pytest.raises(ConfigError, match=rf"cannot serve 'some/model' \({kind}\): .* Set generator\.backend=trans"):
        check(kind)
    check(kind, on_cpu=False)


def test_served_hybrids_are_accepted():
    check("granitemoehybrid", mamba_n_groups=1)
    check("falcon_h1")
    for kind in GATED_DELTA_NETS:
        check(kind, dtype="bfloat16", **SERVED)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_norms_that_vllm_computes_differently_are_rejected(on_cpu: bool):
    with pytest.raises(ConfigError, match=r"normalizes each of its mamba_n_groups groups .* alone"):
        check("granitemoehybrid", on_cpu=on_cpu, mamba_n_groups=2)
    with pytest.raises(ConfigError, match="mamba_norm_before_gate=true"):
        check("falcon_h1", on_cpu=on_cpu, mamba_rms_norm=True)
    check("falcon_h1", on_cpu=on_cpu, mamba_rms_norm=True, mamba_norm_before_gate=False)


@pytest.mark.parametrize("kind", GATED_DELTA_NETS)
def test_gated_delta_nets_need_bfloat16_on_cpus(kind: str):
    with pytest.raises(ConfigError, match=r"bfloat16 only\. Set generator\.model_dtype=bfloat16 or"):
        check(kind, **SERVED)
    with pytest.raises(ConfigError, match=r"heads of size .* \(linear_key_head_dim"):
        check(kind, dtype="bfloat16")
    check(kind, on_cpu=False)


def test_tied_qwen3_next_is_rejected_on_cpus():
    with pytest.raises(ConfigError, match="tie_word_embeddings=true"):
        check("qwen3_next", dtype="bfloat16", tie_word_embeddings=True, **SERVED)


def test_qwen3_5_needs_torchvision(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs torchvision for 'some/model' \(qwen3_5_text\)"):
        check("qwen3_5_text", dtype="bfloat16", **SERVED)
    check("qwen3_next", dtype="bfloat16", **SERVED)
