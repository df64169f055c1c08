"""Checks of composite checkpoints before a run: a note that only their language model is used, and refusals."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from skyrl_train.config.hydra import load_preset
from skyrl_train.config.local_checks import list_model_paths
from skyrl_train.config.predicates import RunComponents
from skyrl_train.config.schema import Config
from skyrl_train.engines.sglang import arguments as sglang
from skyrl_train.engines.vllm.model_support import check_model
from skyrl_train.errors import ConfigError
from skyrl_train.experiment.preflight import checked_model
from skyrl_train.models.loading import POLICY_PATH_KEY, load_config
from tests.support.multimodal_models import save_composite
from tests.support.tiny_families import tiny_config


def config_of(path: str, *overrides: str) -> Config:
    return load_preset([f"trainer.policy.model.path={path}", "generator.backend=transformers", *overrides])


def check(config: Config) -> None:
    for key, path in list_model_paths(config, RunComponents()):
        checked_model(config, RunComponents(), key, path)


def test_composite_is_noted_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save_composite(tmp_path / "composite", "gemma3")
    capsys.readouterr()
    check(config_of(path, "trainer.algorithm.use_kl_loss=true"))
    assert capsys.readouterr().err.count("Gemma3ForConditionalGeneration is used as a text model") == 1


@pytest.mark.parametrize("role", ["policy", "ref"])
def test_composite_is_refused_if_switched_off(tmp_path: Path, role: str) -> None:
    path = save_composite(tmp_path / "composite", "gemma3")
    config = config_of(path, "trainer.algorithm.use_kl_loss=true", f"trainer.{role}.language_model_only=false")
    with pytest.raises(ConfigError, match=rf"^trainer\.{role}\.language_model_only=false: .* cannot be trained"):
        check(config)


def test_composite_with_recurrent_layers_is_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(config_of(save_composite(tmp_path / "composite", "qwen3_5"), "generator.backend=transformers"))
    assert "Qwen3_5ForConditionalGeneration is used as a text model" in capsys.readouterr().err


def test_composite_without_torchvision_is_refused_for_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(save_composite(tmp_path / "composite", "gemma3"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"vLLM needs torchvision for .*Gemma3ForConditionalGeneration"):
        check_model("composite", config, on_cpu=True, dtype="float32")
    check_model("text", config.get_text_config(), on_cpu=True, dtype="float32")


@pytest.mark.parametrize(
    ("kind", "reason"), [("glm4v", "its log-probs in vLLM differ"), ("qwen3_vl_moe", "vLLM reads its experts in")]
)
def test_composite_that_vllm_serves_wrongly_is_refused(tmp_path: Path, kind: str, reason: str) -> None:
    config = config_of(save_composite(tmp_path / "composite", kind), "generator.backend=vllm")
    with pytest.raises(ConfigError, match=rf"generator\.backend=vllm cannot serve .*: {reason} .*backend=transformers"):
        check(config)


def test_vllm_evaluation_refuses_unsupported_composite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    tiny_config("aya_vision").save_pretrained(tmp_path)
    config = config_of(str(tmp_path), "generator.backend=vllm")
    with pytest.raises(ConfigError, match=r"^trainer\.policy\.model\.path=.* AyaVisionForConditionalGeneration cannot"):
        checked_model(config, RunComponents(learner=False), POLICY_PATH_KEY, str(tmp_path))


def test_sequences_beyond_chunks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    path = save_composite(tmp_path / "composite", "llama4")  # its chunks have 128 tokens
    lengths = ("trainer.max_prompt_length=100", "generator.sampling_params.max_generate_length=29")
    with pytest.raises(ConfigError, match="sequences may have 129 tokens, but beyond 128 "):
        check(config_of(path, *lengths, "generator.backend=vllm"))
    check(config_of(path, *lengths, "generator.backend=vllm", "+generator.engine_init_kwargs.max_model_len=128"))
    check(config_of(path, *lengths))  # the transformers engine stops at the limit


def test_composite_is_refused_for_sglang(tmp_path: Path) -> None:
    config = load_config(save_composite(tmp_path / "composite", "gemma3"))
    with pytest.raises(ConfigError, match="Engine 'one': SGLang cannot serve Gemma3ForConditionalGeneration"):
        sglang.check_composite(config, "one")
    sglang.check_composite(config.get_text_config(), "one")
