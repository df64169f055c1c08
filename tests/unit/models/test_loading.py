from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.errors import ConfigError
from skyrl_train.models.export import export_hf
from skyrl_train.models.loading import (
    load_causal_lm,
    load_config,
    load_tokenizer,
    open_causal_lm,
)
from skyrl_train.models.pretrained_weights import PretrainedWeights
from skyrl_train.testing.tiny_models import byte_tokenizer, save_tiny_model, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


def load(path: str, **options: Any) -> Any:
    return load_causal_lm(path, dtype=torch.float32, **options)


def test_folder_loads_in_the_requested_dtype(folder: str) -> None:
    model = load_causal_lm(folder, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(model.lm_head.weight.float(), tiny_model().lm_head.weight, rtol=0.01, atol=0.01)
    assert load_tokenizer(folder).decode(load_tokenizer(folder).encode("7 + 5")) == "7 + 5"


@pytest.mark.parametrize(
    ("path", "advice"),
    [("/no/such/folder", "no such folder"), ("./no-such-folder", "no such folder"), ("not a hub name!", "hub")],
)
def test_missing_path_error_names_key_and_value(path: str, advice: str) -> None:
    for function in (load, load_tokenizer, load_config):
        with pytest.raises(ConfigError, match=r"^trainer\.ref\.model\.path=") as caught:
            function(path, key="trainer.ref.model.path")
        assert repr(path) in str(caught.value)
        assert advice in str(caught.value)


def test_folder_without_safetensors_is_rejected(tmp_path: Path, folder: str) -> None:
    tiny_model().config.save_pretrained(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"\*\.safetensors"):
        load(str(tmp_path))


@pytest.mark.fault("F38")
def test_checkpoint_code_is_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (tmp_path / "modeling_evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")
    config = {
        "model_type": "evil",
        "auto_map": dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "modeling_evil.Evil"),
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError):
        load(str(tmp_path))
    assert not marker.exists()


@pytest.mark.parametrize("loader", [load_causal_lm, open_causal_lm])
def test_incomplete_checkpoint_is_rejected(tmp_path: Path, loader: Callable[..., Any]) -> None:
    model = tiny_model()
    tensors = ((name, value) for name, value in model.named_parameters() if "layers.1.mlp.up_proj" not in name)
    export_hf(model.config, tensors, byte_tokenizer(), tmp_path)
    message = r"^a\.key=.* lacks 1 tensors, such as 'model\.layers\.1\.mlp\.up_proj\.weight'"
    with pytest.raises(ConfigError, match=message):
        loader(str(tmp_path), dtype=torch.float32, key="a.key")


@pytest.mark.defect("quantized-weights-read-as-floats")
def test_weights_unreadable_by_rows_are_rejected(tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(save_tiny_model(tmp_path))
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"^a\.key=.* quantized weights are not supported"):
        open_causal_lm(str(path), dtype=torch.float32, key="a.key")

    contains = PretrainedWeights.__contains__
    monkeypatch.setattr(
        PretrainedWeights, "__contains__", lambda saved, name: "up_proj" not in name and contains(saved, name)
    )
    with pytest.raises(ConfigError, match=r"^a\.key=.* 2 parameters, such as 'model\.layers\.0\.mlp\.up_proj\.weight'"):
        open_causal_lm(folder, dtype=torch.float32, key="a.key")


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe", "gemma", "falcon_h1"])
def test_meta_model_equals_the_loaded_model(tmp_path: Path, kind: str) -> None:
    path = save_tiny_model(tmp_path, kind, dtype=torch.bfloat16)
    loaded, (model, pretrained) = load(path), open_causal_lm(path, dtype=torch.float32)
    parameters = dict(loaded.named_parameters())
    assert [(name, tensor.dtype, tensor.is_meta) for name, tensor in model.named_parameters()] == [
        (name, tensor.dtype, True) for name, tensor in parameters.items()
    ]
    for name, parameter in parameters.items():
        for rows in (slice(None), slice(0, 3), slice(1, 2), slice(len(parameter) - 1, len(parameter))):
            assert torch.equal(pretrained.read(name, rows).float(), parameter[rows]), (name, rows)
    assert all(torch.equal(tensor, loaded.get_buffer(name)) for name, tensor in model.named_buffers())
    assert model.config.to_dict() == loaded.config.to_dict()


def test_misspelled_overrides_are_rejected(folder: str) -> None:
    assert len(load(folder, model_config_kwargs={"num_hidden_layers": 1}).model.layers) == 1
    with pytest.raises(ConfigError, match=r"model_config_kwargs\.num_hiden_layers=1.*'num_hidden_layers'"):
        load(folder, model_config_kwargs={"num_hiden_layers": 1})


def test_rope_changes_reach_the_frequencies(folder: str) -> None:
    plain = load(folder).model.rotary_emb.inv_freq
    slower = load(folder, rope_theta=1e6).model.rotary_emb.inv_freq
    assert slower[-1] < plain[-1]
    halved = load(folder, rope_scaling={"type": "linear", "factor": 2.0}).model.rotary_emb.inv_freq
    torch.testing.assert_close(halved, plain / 2)
    yarn = load(folder, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    assert yarn.config.rope_parameters["original_max_position_embeddings"] == 4096


def test_unsupported_rope_changes_are_rejected(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "gemma3_text")
    with pytest.raises(ConfigError, match=r"rope_theta=10000\.0"):
        load(path, rope_theta=1e4)


def test_weights_outside_the_folder_are_rejected(folder: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    (model / "model.safetensors").rename(tmp_path / "evil.safetensors")
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "../evil.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"evil\.safetensors', which is not a file of the model's folder"):
        open_causal_lm(str(model), dtype=torch.float32, key="a.key")
