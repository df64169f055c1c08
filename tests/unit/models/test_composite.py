"""Composite checkpoints as text models: loading, names and exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Llama4TextConfig, LlavaModel

from skyrl_train.errors import ConfigError
from skyrl_train.models.composite import to_composite_overrides
from skyrl_train.models.loading import (
    build_meta_model,
    has_untied_head,
    list_checkpoint_names,
    load_causal_lm,
    load_config,
    load_meta_model,
    open_causal_lm,
    to_checkpoint_tensors,
)
from skyrl_train.models.logprob_model import LogprobModel, check_model_supported
from skyrl_train.models.sliding_windows import max_plain_attention_length
from tests.support.multimodal_models import KINDS, composite_model, save_composite
from tests.support.padded_reference import ragged_batch
from tests.support.tiny_families import tiny_config


@pytest.mark.parametrize("kind", KINDS)
def test_text_model_computes_the_composites_logits(kind: str, tmp_path: Path) -> None:
    path = save_composite(tmp_path / "model", kind)
    model = load_causal_lm(path, dtype=torch.float32)
    ids = torch.arange(3, 43).view(2, 20)
    with torch.no_grad():
        expected = composite_model(kind)(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        actual = model(input_ids=ids).logits
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    assert not any("vision" in name or "visual" in name for name in model.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_text_model_builds_on_the_meta_device(kind: str, tmp_path: Path) -> None:
    """The memory plan builds models on the meta device, independently of what the process did before.

    transformers replaces torch.linspace while it loads a model, and torch looks up the functions that create tensors at
    the first use of a default device, so only processes that had used one before raised the error.
    """
    with torch.device("meta"):
        torch.zeros(1)
    config = load_config(save_composite(tmp_path / "model", kind))
    with torch.device("meta"):
        model = build_meta_model(config, torch.float32)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_overrides_apply_to_the_language_model(tmp_path: Path) -> None:
    path = save_composite(tmp_path / "model", "gemma3")
    config = load_config(path, overrides={"num_hidden_layers": 1})
    assert config.text_config.num_hidden_layers == 1 and config.vision_config.num_hidden_layers == 1
    model, pretrained = open_causal_lm(path, dtype=torch.float32, model_config_kwargs={"num_hidden_layers": 1})
    layers: Any = model.base_model.layers
    assert len(layers) == 1
    other_names = [name for name, _ in pretrained.iter_non_text_tensors()]
    assert other_names and not any(name.startswith("language_model.") for name in other_names), (
        "the second layer is excluded, too"
    )
    with pytest.raises(ConfigError, match="Gemma3TextConfig has no such attribute"):
        load_config(path, overrides={"num_layers": 1})
    assert to_composite_overrides(config, {"tie_word_embeddings": False, "rope_theta": 1.0}) == {
        "text_config": {"tie_word_embeddings": False, "rope_theta": 1.0},
        "tie_word_embeddings": False,
    }


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl", "llama4"])
def test_checkpoint_names_are_those_of_the_file(kind: str, tmp_path: Path) -> None:
    path = save_composite(tmp_path / "model", kind)
    model = load_meta_model(path, torch.float32)
    named = to_checkpoint_tensors(model, dict(model.named_parameters()))
    in_file = list_checkpoint_names(path)
    assert named.keys() < in_file
    assert to_checkpoint_tensors(model, named).keys() == named.keys(), "checkpoint names stay unchanged"


def test_untied_head_of_composite_is_detected(tmp_path: Path) -> None:
    path = save_composite(tmp_path / "model", "gemma3", tied=True)
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors["language_model.model.embed_tokens.weight"]
    for equal in (tensors, tensors | {"language_model.lm_head.weight": embedding.clone()}):
        save_file(equal, file, metadata={"format": "pt"})
        assert not has_untied_head(path)
        model: Any = load_causal_lm(path, dtype=torch.float32)
        assert model.lm_head.weight is model.model.embed_tokens.weight
    save_file(tensors | {"language_model.lm_head.weight": embedding + 1}, file, metadata={"format": "pt"})
    assert has_untied_head(path)
    model = load_causal_lm(path, dtype=torch.float32)
    assert torch.equal(model.lm_head.weight, embedding + 1)


def test_composite_without_language_tensor_is_rejected(tmp_path: Path) -> None:
    path = save_composite(tmp_path / "model", "gemma3")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    del tensors["language_model.model.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"the checkpoint lacks 1 tensors, such as 'model\.language_model\.norm"):
        load_causal_lm(path, dtype=torch.float32)


def test_llama_4_is_rejected_beyond_its_chunks(tmp_path: Path) -> None:
    path = save_composite(tmp_path / "model", "llama4")
    config = {"attention_chunk_size": 16}
    model = LogprobModel(load_causal_lm(path, dtype=torch.float32, model_config_kwargs=config))
    batch = ragged_batch([16])
    assert model(model.lay_out(batch)).logprobs.shape == (16,)
    batch = ragged_batch([17])
    with pytest.raises(ConfigError, match="A sequence has 17 tokens, but beyond 16 "):
        model.lay_out(batch)


def test_llama_4_without_chunks_is_limited_by_its_query_scales() -> None:
    scaled: dict[str, Any] = {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2, "no_rope_layers": [1, 0]}
    assert max_plain_attention_length(Llama4TextConfig(**scaled, floor_scale=64)) == 63
    assert max_plain_attention_length(Llama4TextConfig(**scaled, floor_scale=64, attn_temperature_tuning=False)) is None
    assert max_plain_attention_length(Llama4TextConfig(**scaled | {"no_rope_layers": [1, 1]}, floor_scale=64)) is None


def test_noncausal_masks_are_rejected_without_weights() -> None:
    config = tiny_config("llama")
    check_model_supported(build_meta_model(config, torch.float32))
    config.is_causal = False  # as in the configurations of embedding models
    with pytest.raises(ConfigError, match="LlamaAttention uses a precomputed mask"):
        check_model_supported(build_meta_model(config, torch.float32))


def test_quantized_language_model_is_rejected(tmp_path: Path) -> None:
    path = save_composite(tmp_path / "model", "gemma3")
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    config["text_config"]["quantization_config"] = {"quant_method": "fp8"}
    file.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="quantized weights are not supported"):
        load_causal_lm(path, dtype=torch.float32)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("paligemma", "it lets the tokens of a prompt see later ones"),
        ("aya_vision", "its logits are not those of its language model"),
        ("inkling_mm_model", "it changes states before its head"),
        ("blip", "it has no language-model head"),
        ("kosmos-2", "it computes no logits from text alone"),
        ("florence2", "its language model has another class, BartModel"),
    ],
)
def test_composite_beyond_its_language_model_is_rejected(kind: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"ForConditionalGeneration cannot be used as a text model: {reason}"):
        build_meta_model(tiny_config(kind), torch.float32)


@pytest.mark.parametrize("argument", ["inputs_embeds", "attention_mask"])
def test_composite_that_changes_inputs_is_rejected(argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = LlavaModel.forward

    def changed(self: LlavaModel, input_ids: Tensor, **options: Any) -> Any:
        embeddings = self.get_input_embeddings()(input_ids)
        added = {"inputs_embeds": 2 * embeddings, "attention_mask": torch.ones_like(input_ids)}
        return forward(
            self, None if argument == "inputs_embeds" else input_ids, **options | {argument: added[argument]}
        )

    config = tiny_config("llava")
    assert type(build_meta_model(config, torch.float32)).__name__ == "LlamaForCausalLM"
    monkeypatch.setattr(LlavaModel, "forward", changed)
    with pytest.raises(ConfigError, match=f"it also passes {argument} to its language model"):
        build_meta_model(config, torch.float32)
