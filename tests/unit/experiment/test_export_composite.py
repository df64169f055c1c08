"""Exports of composite checkpoints whose language model was trained: they load as the original composite."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from skyrl_train.config.run_folder import load_run_config
from skyrl_train.errors import CheckpointError
from skyrl_train.experiment.export import ExportRequest, export
from skyrl_train.learner.checkpoint_policy import open_policy
from skyrl_train.models.loading import load_causal_lm
from tests.support.checkpointed_run import save_run
from tests.support.multimodal_models import KINDS, save_composite

LORA = ("trainer.policy.model.lora.rank=4", "trainer.policy.model.lora.alpha=8")
IDS = torch.arange(3, 43).view(2, 20)
IN_CI = ("gemma3", "qwen2_5_vl", "llama4")
TRAINABLE = [
    pytest.param(kind, marks=[] if kind in IN_CI else pytest.mark.on_demand) for kind in KINDS if kind != "qwen3_5"
]
PROCESSOR = ("preprocessor_config.json", "processor_config.json")


@torch.no_grad()
def logprobs(model: Any) -> Tensor:
    logits: Tensor = model(input_ids=IDS, use_cache=False).logits.log_softmax(-1)
    return logits[:, :-1].gather(-1, IDS[:, 1:, None]).squeeze(-1)


def tower_names(names: set[str]) -> set[str]:
    return {name for name in names if "vision" in name or "visual" in name or "projector" in name}


@pytest.mark.parametrize("kind", TRAINABLE)
def test_export_keeps_other_towers_bit_equal(kind: str, tmp_path: Path) -> None:
    base = save_composite(tmp_path / "base", kind, tied=kind == "gemma3")
    checkpoint = save_run(tmp_path / "run", base)
    location, verification = export(ExportRequest(str(checkpoint), str(tmp_path / "model")))
    folder = Path(location)
    before, after = (load_file(one / "model.safetensors") for one in (Path(base), folder))
    towers = tower_names(set(before))
    assert before.keys() == after.keys() and towers
    unchanged = {name for name in before if torch.equal(before[name], after[name])}
    assert towers <= unchanged and len(unchanged - towers) < 5, unchanged - towers
    for name in PROCESSOR:
        assert (folder / name).read_bytes() == (Path(base) / name).read_bytes()
    configs = [json.loads((one / "config.json").read_text()) for one in (Path(base), folder)]
    assert configs[0] == configs[1]
    found: Any = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    loaded, info = found
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with open_policy(checkpoint, load_run_config(checkpoint.parent).trainer) as policy:
        torch.testing.assert_close(logprobs(loaded), policy.logprobs(IDS), rtol=0, atol=1e-4)
    torch.testing.assert_close(logprobs(loaded), logprobs(load_causal_lm(location, dtype=torch.float32)))
    assert verification is not None and verification.max_logprob_diff < 1e-4
    assert "AutoModelForImageTextToText.from_pretrained" in (folder / "README.md").read_text()


def test_bfloat16_export_keeps_dtype_of_other_towers(tmp_path: Path) -> None:
    base = save_composite(tmp_path / "base", "gemma3")
    place, _ = export(ExportRequest(str(save_run(tmp_path / "run", base)), str(tmp_path / "model"), dtype="bfloat16"))
    before, after = (load_file(Path(one) / "model.safetensors") for one in (base, place))
    towers = tower_names(set(before))
    assert all(torch.equal(before[name], after[name]) and after[name].dtype == torch.float32 for name in towers)
    assert all(after[name].dtype == torch.bfloat16 for name in after.keys() - towers)
    config = json.loads((Path(place) / "config.json").read_text())
    assert config["dtype"] == config["text_config"]["dtype"] == "bfloat16"


@pytest.mark.parametrize("kind", TRAINABLE)
def test_exported_adapter_loads_on_the_composite(kind: str, tmp_path: Path) -> None:
    base = save_composite(tmp_path / "base", kind)
    experts = ["trainer.policy.model.lora.target_parameters=[gate_up_proj,down_proj]"] if "moe" in kind else []
    checkpoint = save_run(tmp_path / "run", base, *LORA, *experts)
    merged, _ = export(ExportRequest(str(checkpoint), str(tmp_path / "merged")))
    adapter, _ = export(ExportRequest(str(checkpoint), str(tmp_path / "adapter"), adapter=True))
    start: Any = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.bfloat16).float()  # as in the run
    before = logprobs(start)
    model: Any = peft.PeftModel.from_pretrained(start, adapter)
    whole: Any = AutoModelForImageTextToText.from_pretrained(merged)
    torch.testing.assert_close(logprobs(model), logprobs(whole), rtol=0, atol=1e-4)
    assert not torch.allclose(logprobs(model), before, atol=0.1)
    adapted = {name for name, _ in model.named_modules() if name.endswith(".lora_A")}
    assert adapted and not tower_names(adapted), "only the language model has adapters"


@pytest.mark.parametrize("kind", ["gemma3", "gemma4"])
def test_export_keeps_every_dtype_of_the_base(kind: str, tmp_path: Path) -> None:
    base = save_composite(tmp_path / "base", kind, dtype=torch.bfloat16)
    place, _ = export(ExportRequest(str(save_run(tmp_path / "run", base)), str(tmp_path / "model"), dtype="bfloat16"))
    before, after = (load_file(Path(one) / "model.safetensors") for one in (base, place))
    dtypes = [{name: tensor.dtype for name, tensor in tensors.items()} for tensors in (before, after)]
    assert dtypes[0] == dtypes[1]
    configs = [json.loads((Path(one) / "config.json").read_text()) for one in (base, place)]
    assert configs[0] == configs[1]


def test_other_towers_are_not_taken_from_another_base(tmp_path: Path) -> None:
    checkpoint = save_run(tmp_path / "run", save_composite(tmp_path / "base", "gemma3"))
    other = save_composite(tmp_path / "other", "gemma3", seed=1)
    with pytest.raises(CheckpointError, match=r"was trained from another model: trainer\.policy\.model\.path"):
        export(ExportRequest(str(checkpoint), str(tmp_path / "model"), base=other))
