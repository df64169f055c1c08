from __future__ import annotations

import json
from pathlib import Path

import pytest

from skyrl_train.config.hydra import load_preset
from skyrl_train.config.local_checks import is_accelerator_available, resolve_device
from skyrl_train.config.prepare import prepare_config
from skyrl_train.config.section import freeze
from skyrl_train.errors import ConfigError

EXPLICIT_DEFAULTS = [
    "generator.backend=vllm",
    "generator.model_dtype=bfloat16",
    "generator.weight_sync_backend=nccl",
    "trainer.bf16=true",
    "trainer.flash_attn=true",
]


@pytest.mark.parametrize("overrides", [[], EXPLICIT_DEFAULTS], ids=["untouched", "spelt out"])
@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_cpu_defaults_are_applied_and_noted(overrides: list[str], device: str):
    config, notes = resolve_device(load_preset([*overrides, f"device={device}"]), has_accelerator=False)
    assert config.device == "cpu"
    assert (config.trainer.bf16, config.trainer.flash_attn) == (False, False)
    generator = config.generator
    assert (generator.backend, generator.model_dtype, generator.weight_sync_backend) == (
        "transformers",
        "float32",
        "gloo",
    )
    (note,) = notes  # one line
    fitted = (
        "backend=transformers, generator.model_dtype=float32, generator.weight_sync_backend=gloo, trainer.bf16=false"
    )
    assert (
        f": generator.{fitted}, trainer.flash_attn=false; trainer.placement counts shares of CPUs instead of GPUs."
        in note
    )
    assert note.startswith("device=auto -> cpu: no accelerator was found; ") is (device == "auto")


def test_values_that_are_not_defaults_are_kept():
    config, notes = resolve_device(
        load_preset(["generator.model_dtype=float16", "generator.backend=sglang"]), has_accelerator=False
    )
    assert (config.generator.model_dtype, config.generator.backend) == ("float16", "sglang")
    assert not any("model_dtype" in note or "generator.backend" in note for note in notes)


def test_an_accelerator_keeps_its_precision_and_collectives():
    config, notes = resolve_device(load_preset(), has_accelerator=True)
    assert config.device == "cuda"
    assert config.trainer.bf16 is True
    assert (config.generator.model_dtype, config.generator.weight_sync_backend) == ("bfloat16", "nccl")
    assert config.generator.backend == "vllm"
    assert not any("generator.backend" in note for note in notes)


def test_explicit_engine_is_kept_on_cpu(tmp_path):
    assert prepare_config([], has_accelerator=False).config.generator.backend == "transformers"
    assert prepare_config(["generator.backend=vllm"], has_accelerator=False).config.generator.backend == "vllm"
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_base_config, _self_]\ngenerator: {backend: vllm}\n")
    preset = ["--config-dir", str(tmp_path), "--config-name", "mine"]
    assert prepare_config(preset, has_accelerator=False).config.generator.backend == "vllm"


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({"model_type": "qwen3_next"}, "bfloat16"),
        ({"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}}, "bfloat16"),
        ({"model_type": "qwen2"}, "float32"),
        ({}, "float32"),
    ],
)
@pytest.mark.parametrize("overrides", [[], ["generator.model_dtype=bfloat16"]], ids=["default", "spelt out"])
def test_vllm_on_cpu_keeps_bfloat16_if_needed(
    tmp_path: Path, model: dict[str, object], expected: str, overrides: list[str]
):
    (tmp_path / "config.json").write_text(json.dumps(model))
    line = [f"trainer.policy.model.path={tmp_path}", "generator.backend=vllm", *overrides]
    config = prepare_config(line, has_accelerator=False).config
    assert (config.generator.backend, config.generator.model_dtype) == ("vllm", expected)


def test_cpu_can_be_chosen_despite_accelerator():
    assert resolve_device(load_preset(["device=cpu"]), has_accelerator=True)[0].generator.weight_sync_backend == "gloo"


@pytest.mark.fault("F05")
def test_cuda_without_accelerator_is_refused():
    with pytest.raises(ConfigError, match=r"device=cuda: must be cpu or auto on this machine\. No NVIDIA device"):
        prepare_config(["device=cuda"], has_accelerator=False)


def test_what_is_given_stays_as_it_is():
    given = load_preset()
    resolved, _ = resolve_device(given, has_accelerator=False)
    assert given.generator.backend == "vllm"
    assert freeze(resolved).trainer.algorithm is given.trainer.algorithm


@pytest.mark.parametrize("visible", ["", "-1", " "])
def test_hidden_accelerators_are_none(monkeypatch: pytest.MonkeyPatch, visible: str):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert is_accelerator_available() is False
