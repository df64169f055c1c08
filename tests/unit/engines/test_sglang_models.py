from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.engines.sglang.arguments import check_model, engine_arguments
from skyrl_train.errors import ConfigError
from skyrl_train.testing.tiny_models import HYBRID_KINDS, save_tiny_model, tiny_model

ON_CPU = {"attention_backend": "torch_native"}


def is_rejected(kind: str, arguments: dict[str, Any], max_model_len: int = 256, **changes: Any) -> bool:
    config = tiny_model(kind).config
    config.update(changes)
    try:
        check_model(config, arguments, name="engine", max_model_len=max_model_len)
    except ConfigError:
        return True
    return False


@pytest.mark.parametrize(("max_model_len", "expected"), [(129, True), (128, False)])
def test_ignored_sliding_window_is_rejected_for_longer_contexts(max_model_len: int, expected: bool):
    assert is_rejected("mistral", {}, max_model_len, sliding_window=128) is expected
    windowed = {"sliding_window": 128, "layer_types": ["full_attention", "sliding_attention"]}
    assert is_rejected("qwen2", {}, max_model_len, **windowed) is expected


def test_supported_or_unused_sliding_window_is_accepted():
    assert not is_rejected("qwen2", {}, sliding_window=128, layer_types=["full_attention"] * 2)
    assert not is_rejected("mistral", {}, sliding_window=None)
    assert not is_rejected("gemma3_text", ON_CPU, sliding_window=128)


def test_speculative_decoding_is_refused(tmp_path: Path):
    model = str(save_tiny_model(tmp_path / "model", "qwen3"))
    with pytest.raises(ConfigError, match="speculative_algorithm='NGRAM' is not allowed"):
        engine_arguments(
            model, name="a", device="cuda", dtype="float32", max_num_seqs=4, max_model_len=64, max_lora_rank=0,
            rope_scaling=None, rope_theta=None, options={"speculative_algorithm": "NGRAM"},
        )  # fmt: skip


@pytest.mark.parametrize("kind", ["gpt_oss", "deepseek_v3", "exaone4", "hunyuan_v1_dense", "minimax_m2"])
def test_models_unsupported_by_cpu_attention_are_rejected(kind: str):
    assert is_rejected(kind, ON_CPU)
    assert not is_rejected(kind, {})


@pytest.mark.parametrize("kind", HYBRID_KINDS)
def test_recurrent_layers_are_rejected_on_cpus(kind: str):
    assert is_rejected(kind, ON_CPU)
    assert not is_rejected(kind, {}, tie_word_embeddings=False) or kind == "kimi_linear"


def test_tied_head_that_sglang_ignores_is_rejected():
    assert is_rejected("qwen3_next", {}, tie_word_embeddings=True)
    assert not is_rejected("qwen3_5_text", {}, tie_word_embeddings=True)


@pytest.mark.parametrize("kind", HYBRID_KINDS)
def test_sglang_has_code_for_accepted_hybrids(kind: str):
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        pytest.skip("sglang is not installed; scripts/cpu_engines installs it")
    class_name = type(tiny_model(kind)).__name__
    files = (Path(spec.origin).parent / "srt" / "models").glob("*.py")
    entries = [text[text.index("\nEntryClass") :] for file in files if "\nEntryClass" in (text := file.read_text())]
    assert any(re.search(rf"\b{class_name}\b", entry) for entry in entries)


@pytest.mark.parametrize("kind", ["ernie4_5", "gemma4_text", "olmo3", "smollm3"])
def test_wrongly_served_model_is_rejected_on_every_device(kind: str):
    assert is_rejected(kind, ON_CPU)
    assert is_rejected(kind, {})
