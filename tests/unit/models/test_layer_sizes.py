from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig

from skyrl_train.experiment.memory_plan import model_shape
from skyrl_train.models.layer_sizes import get_layer_sizes
from skyrl_train.models.loading import POLICY_PATH_KEY
from skyrl_train.testing.tiny_models import save_tiny_model


def test_layers_can_have_different_head_sizes() -> None:
    config = AutoConfig.for_model("gemma4_text")
    assert get_layer_sizes(config, "head_dim") == [256, 512]
    assert get_layer_sizes(config, "num_key_value_heads") == [4]


def test_missing_attribute_has_no_sizes() -> None:
    assert get_layer_sizes(AutoConfig.for_model("qwen2"), "head_dim") == []


def test_memory_plan_uses_largest_heads(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "gemma4_text")
    largest = get_layer_sizes(AutoConfig.from_pretrained(path), "head_dim")[-1]
    assert model_shape(path, key=POLICY_PATH_KEY).head_dim == largest > 32
