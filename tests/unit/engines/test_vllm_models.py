from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from skyrl_train.engines.vllm.model_support import check_model
from skyrl_train.errors import ConfigError
from skyrl_train.testing.tiny_models import tiny_config

GATED_DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
SERVED: dict[str, Any] = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
"""Settings with which vLLM serves gated delta nets on CPUs."""


@pytest.fixture(autouse=True)
def torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)


def check(
    kind: str,
    *,
    on_cpu: bool = True,
    dtype: str = "float32",
    tied: bool = False,
    config_dtype: Any = None,
    **changes: Any,
) -> None:
    config = tiny_config(kind, tied=tied)
    config.update(changes | {"dtype": config_dtype})
    check_model("some/model", config, on_cpu=on_cpu, dtype=dtype)


@pytest.mark.parametrize("kind", ["lfm2", "lfm2_moe", "nemotron_h", "jamba", "olmo_hybrid"])
def test_unsupported_hybrids_are_rejected_on_cpus(kind: str):
    tied = kind.startswith("lfm2")
    with pytest.raises(ConfigError, match=rf"cannot serve 'some/model' \({kind}\): .* Set generator\.backend=trans"):
        check(kind, tied=tied)
    check(kind, on_cpu=False, tied=tied)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_kimi_linear_is_rejected_on_every_device(on_cpu: bool):
    with pytest.raises(ConfigError, match="have not been tested on GPUs"):
        check("kimi_linear", on_cpu=on_cpu)


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
    check(kind, on_cpu=False)


@pytest.mark.parametrize("kind", GATED_DELTA_NETS)
@pytest.mark.parametrize(("key_size", "value_size"), [(32, 32), (64, 128), (96, 96), (256, 256)])
def test_head_sizes_without_cpu_kernel_are_rejected(kind: str, key_size: int, value_size: int):
    sizes: dict[str, Any] = {"linear_key_head_dim": key_size, "linear_value_head_dim": value_size}
    with pytest.raises(ConfigError, match=r"same head size, 64 or 128 \(linear_key_head_dim"):
        check(kind, dtype="bfloat16", **sizes)
    check(kind, on_cpu=False, **sizes)


def test_gated_delta_nets_accept_heads_of_size_64():
    check("qwen3_next", dtype="bfloat16", linear_key_head_dim=64, linear_value_head_dim=64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, None])
def test_auto_is_the_dtype_that_vllm_chooses(dtype: torch.dtype | None):
    check("qwen3_next", dtype="auto", config_dtype=dtype, **SERVED)
    with pytest.raises(ConfigError, match="bfloat16 only"):
        check("qwen3_next", dtype="auto", config_dtype=torch.float16, **SERVED)


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize(("kind", "tied"), [("qwen3_next", True), ("nemotron_h", True), ("lfm2", False)])
def test_heads_that_vllm_ties_differently_are_rejected(kind: str, tied: bool, on_cpu: bool):
    with pytest.raises(ConfigError, match=f"tie_word_embeddings={str(tied).lower()}"):
        check(kind, on_cpu=on_cpu, dtype="bfloat16", tied=tied, **SERVED if kind == "qwen3_next" else {})


def test_qwen3_5_needs_torchvision(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs torchvision for 'some/model' \(qwen3_5_text\)"):
        check("qwen3_5_text", dtype="bfloat16", **SERVED)
    check("qwen3_next", dtype="bfloat16", **SERVED)
