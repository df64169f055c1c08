"""Resuming with the model, adapters and schedule of the checkpoint, or with other ones."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_train.config.schema import LoraConfig, OptimizerConfig
from skyrl_train.errors import CheckpointMismatch
from skyrl_train.learner.base_model_record import tensor_fingerprints
from skyrl_train.learner.learner import Learner
from skyrl_train.models.loading import open_causal_lm
from skyrl_train.strategies.checkpoint_shards import open_shards
from skyrl_train.testing.tiny_models import save_tiny_model
from skyrl_train.trainer.checkpoint_manager import CheckpointManager
from tests.support.checkpoint_fixtures import Position, rewrite_trainer_state, with_saved_state
from tests.support.learner_specs import policy_batch

LORA = LoraConfig(rank=4, alpha=8)


def save(model: str, root: Path, *, steps: int = 1, **spec: Any) -> Path:
    """Save a checkpoint after some optimizer steps and return its folder."""

    async def run(state: CheckpointManager, learner: Learner, position: Position) -> None:
        await state.resume()
        for _ in range(steps):
            await learner.update(policy_batch())
        await state.save(steps)

    with_saved_state(model, root, run, spec=spec)
    return root / f"global_step_{steps}"


def resume(model: str, root: Path, mode: Mapping[str, Any] | None = None, **spec: Any) -> int:
    """Resume and return the step of the checkpoint."""
    steps = []

    async def run(state: CheckpointManager, learner: Learner, position: Position) -> None:
        steps.append((await state.resume())[0])

    with_saved_state(model, root, run, spec=spec, **(mode or {}))
    return steps[0]


def change_weights(model: str, folder: Path, name: str = "model.layers.1.mlp.up_proj.weight") -> str:
    """Copy a model and change one number of one tensor."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    weights[name][3, 5] += 1e-3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize("mode", ["latest", "from_path"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alpha": 64}, r"trainer\.policy\.model\.lora\.alpha was 8, is 64\."),
        ({"rank": 8}, r"trainer\.policy\.model\.lora\.rank was 4, is 8\."),
        ({"rank": 0}, r"trainer\.policy\.model\.lora\.rank was 4, is 0\."),
        (
            {"target_modules": ["q_proj", "v_proj"]},
            r"lora\.target_modules or target_parameters: the adapters of 10 layers differ; that of model\.layers\.0\.m",
        ),
    ],
)
def test_other_adapters_are_rejected(
    mode: str, changes: dict[str, Any], message: str, tiny_model_path: str, tmp_path: Path
):
    checkpoint = save(tiny_model_path, tmp_path / "run", lora=LORA)
    options = {"resume_mode": mode, "resume_path": str(checkpoint) if mode == "from_path" else None}
    changed = replace(LORA, **changes)
    with pytest.raises(CheckpointMismatch, match=message):
        resume(tiny_model_path, tmp_path / "run", options, lora=changed if changed.rank else None)
    same = replace(LORA, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
    assert resume(tiny_model_path, tmp_path / "run", options, lora=same) == 1, "another description of the same layers"


@pytest.mark.parametrize("lora", [None, LORA])
def test_other_base_model_is_rejected(lora: LoraConfig | None, tiny_model_path: str, tmp_path: Path):
    save(tiny_model_path, tmp_path / "run", lora=lora)
    other = change_weights(tiny_model_path, tmp_path / "other")
    with pytest.raises(
        CheckpointMismatch, match=r"trainer\.policy\.model\.path: its weights had the fingerprint \w{16}, now"
    ):
        resume(other, tmp_path / "run", lora=lora)


def test_equal_weights_resume_from_another_folder(
    tiny_model_path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    save(tiny_model_path, tmp_path / "run", lora=LORA)
    moved = tmp_path / "moved"
    AutoModelForCausalLM.from_pretrained(tiny_model_path).save_pretrained(moved, max_shard_size="50KB")
    AutoTokenizer.from_pretrained(tiny_model_path).save_pretrained(moved)
    assert len(list(moved.glob("*.safetensors"))) > 1
    assert resume(str(moved), tmp_path / "run", lora=LORA) == 1
    assert resume(str(moved), tmp_path / "run", lora=LORA, dtype="bfloat16") == 1
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not [record for record in warnings if record.name.startswith("skyrl_train")]


def test_earlier_checkpoint_resumes_with_a_warning(
    tiny_model_path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    rewrite_trainer_state(save(tiny_model_path, tmp_path / "run", lora=LORA), base_models=None)
    other = change_weights(tiny_model_path, tmp_path / "other")
    assert resume(other, tmp_path / "run", lora=LORA) == 1
    assert "did not record the base model of its policy" in caplog.text


def test_changed_learning_rate_is_logged(tiny_model_path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    cosine: dict[str, Any] = {"optimizer_config": OptimizerConfig(lr=1e-3, scheduler="cosine")}
    save(tiny_model_path, tmp_path / "run", steps=4, total_steps=4, **cosine)
    assert resume(tiny_model_path, tmp_path / "run", total_steps=4, **cosine) == 4
    assert "learning rate" not in caplog.text
    assert resume(tiny_model_path, tmp_path / "run", total_steps=8, **cosine) == 4
    assert "The learning rate of the policy's next update is 0.0005 in this run's schedule and 0 in the schedule" in (
        caplog.text
    )


def test_shards_without_learning_rate_load(tiny_model_path: str, tmp_path: Path):
    """Checkpoints of earlier versions record no learning rate."""
    checkpoint = save(tiny_model_path, tmp_path / "run")
    with open_shards(checkpoint / "policy") as reader:
        assert reader.read_optional_float("next_lr") == 1e-3
        assert reader.read_optional_float("of_a_later_version") is None


def test_fingerprint_is_the_same_for_any_number_of_ranks(tmp_path: Path):
    for kind in ("qwen2", "qwen3_moe"):
        model, saved = open_causal_lm(save_tiny_model(tmp_path / kind, kind), dtype=torch.float32)
        alone = tensor_fingerprints(model, saved, 0, 1)
        shares = [tensor_fingerprints(model, saved, rank, 3) for rank in range(3)]
        assert alone.keys() >= dict(model.named_parameters()).keys()
        assert {name: digest for share in shares for name, digest in share.items()} == alone
        assert sum(map(len, shares)) == len(alone)
