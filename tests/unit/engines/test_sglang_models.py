from __future__ import annotations

from typing import Any

import pytest

from skyrl_train.engines.sglang.arguments import check_model
from skyrl_train.errors import ConfigError
from skyrl_train.testing.tiny_models import tiny_model

ON_CPU = {"attention_backend": "torch_native"}


def refused(kind: str, arguments: dict[str, Any], max_model_len: int = 256, **changes: Any) -> bool:
    config = tiny_model(kind).config
    config.update(changes)
    try:
        check_model(config, arguments, name="one", max_model_len=max_model_len)
    except ConfigError:
        return True
    return False


@pytest.mark.parametrize(("longest", "wanted"), [(129, True), (128, False)])
def test_ignored_sliding_window_is_rejected_for_longer_contexts(longest: int, wanted: bool):
    assert refused("mistral", {}, longest, sliding_window=128) is wanted
    windowed = {"sliding_window": 128, "layer_types": ["full_attention", "sliding_attention"]}
    assert refused("qwen2", {}, longest, **windowed) is wanted


def test_supported_or_unused_sliding_window_is_accepted():
    assert not refused("qwen2", {}, sliding_window=128, layer_types=["full_attention"] * 2)
    assert not refused("mistral", {}, sliding_window=None)
    assert not refused("gemma3_text", ON_CPU, sliding_window=128)


@pytest.mark.parametrize("kind", ["gpt_oss", "deepseek_v3", "exaone4", "hunyuan_v1_dense", "minimax_m2"])
def test_models_unsupported_by_cpu_attention_are_rejected(kind: str):
    assert refused(kind, ON_CPU)
    assert not refused(kind, {})


@pytest.mark.parametrize("kind", ["ernie4_5", "gemma4_text", "olmo3", "smollm3"])
def test_wrongly_served_model_is_rejected_on_every_device(kind: str):
    assert refused(kind, ON_CPU)
    assert refused(kind, {})
