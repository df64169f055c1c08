"""GRPO from a composite checkpoint: two steps, a checkpoint to resume from, and an export that is the composite."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from skyrl_train.experiment.export import ExportRequest, export
from tests.integration.models.table import COMPOSITES
from tests.support.multimodal_models import save_composite

from .conftest import Run, metrics_of

ADAPTERS = ("trainer.policy.model.lora.rank=4", "trainer.policy.optimizer_config.lr=1e-2")
SHORT = ("trainer.max_prompt_length=96", "generator.max_input_length=96")
"""Lengths within an attention chunk of the tiny Llama 4, beyond which vLLM computes something else."""
CELLS = [pytest.param(row, engine, id=f"{row.name}-{engine}") for row in COMPOSITES for engine in row.engines]


@pytest.fixture
def train(run: Run, easy: Callable[[Path], list[str]], tmp_path: Path) -> Callable[..., Path]:
    def start(path: str, *overrides: str) -> Path:
        overrides = (f"trainer.policy.model.path={path}", *SHORT, *overrides)
        done = run("main_base", *easy(tmp_path), *overrides, "generator.weight_sync_check=probe")
        assert "is used as a text model" in done.stderr
        rows = metrics_of(tmp_path)
        for step, row in rows.items():
            if step:
                assert row["weights/probe_gap"] <= 1e-4 and row["rollout/logprob_diff_max"] <= 1e-4
                assert row["policy/grad_norm"] > 0
        return tmp_path

    return start


def assert_only_language_model_changed(base: str, exported: Path) -> None:
    before, after = (load_file(folder / "model.safetensors") for folder in (Path(base), exported))
    towers = {name for name in before if "vision" in name or "visual" in name or "projector" in name}
    assert before.keys() == after.keys() and towers
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and not changed & towers
    assert json.loads((exported / "config.json").read_text()) == json.loads((Path(base) / "config.json").read_text())
    assert (exported / "preprocessor_config.json").is_file()
    found: Any = AutoModelForImageTextToText.from_pretrained(exported, output_loading_info=True)
    _, info = found
    assert not info["missing_keys"] and not info["unexpected_keys"]


@pytest.mark.slow
@pytest.mark.on_demand
@pytest.mark.parametrize(("row", "engine"), CELLS)
def test_grpo_trains_language_model_of_composite(
    train: Callable[..., Path], tmp_path: Path, row: Any, engine: str
) -> None:
    if engine == "vllm":
        pytest.importorskip("torchvision", reason="vLLM's classes of composites import it")
    base = save_composite(tmp_path / "composite", row.kind, **row.shape)
    steps = ("trainer.max_steps=2", "trainer.ckpt_interval=1", "trainer.hf_save_interval=2")
    folder = train(base, *steps, f"generator.backend={engine}", "trainer.algorithm.use_kl_loss=true")
    exported = folder / "exports" / "global_step_2" / "policy"
    assert_only_language_model_changed(base, exported)
    train(str(exported), "trainer.max_steps=1", f"generator.backend={engine}", f"trainer.ckpt_path={tmp_path}/again")


@pytest.mark.slow
@pytest.mark.on_demand
@pytest.mark.parametrize(("engine", "sync"), [("transformers", "adapter"), ("vllm", "adapter"), ("vllm", "merged")])
def test_composite_adapters_are_synced_and_exported(
    train: Callable[..., Path], tmp_path: Path, engine: str, sync: str
) -> None:
    if engine == "vllm":
        pytest.importorskip("torchvision", reason="vLLM's classes of composites import it")
    base = save_composite(tmp_path / "composite", "gemma3")
    steps = ("trainer.max_steps=2", "trainer.hf_save_interval=2", f"trainer.policy.model.lora.sync={sync}")
    folder = train(base, *steps, *ADAPTERS, f"generator.backend={engine}")
    exported = folder / "exports" / "global_step_2" / "policy"
    assert_only_language_model_changed(base, exported)
    adapter = load_file(exported / "adapter" / "adapter_model.safetensors")
    assert all(name.startswith("base_model.model.model.language_model.layers.") for name in adapter)


@pytest.mark.slow
@pytest.mark.on_demand
@pytest.mark.parametrize(
    ("kind", "hidden_size", "division"),
    [
        ("gemma3", 64, None),
        ("qwen2_5_vl", 128, "tensor"),
        ("qwen3_vl", 64, "sequence"),
        ("qwen3_vl_moe", 64, "expert"),
    ],
)
def test_composite_is_trained_by_two_ranks(
    train: Callable[..., Path], tmp_path: Path, kind: str, hidden_size: int, division: str | None
) -> None:
    base = save_composite(tmp_path / "composite", kind, hidden_size=hidden_size, tied=kind == "gemma3")
    ranks = ["trainer.placement.policy_num_gpus_per_node=2"]
    ranks += [f"trainer.policy.{division}_parallel_size=2"] if division else []
    folder = train(base, "trainer.max_steps=2", "trainer.hf_save_interval=2", "generator.backend=transformers", *ranks)
    assert_only_language_model_changed(base, folder / "exports" / "global_step_2" / "policy")


@pytest.mark.slow
@pytest.mark.on_demand
def test_resumed_composite_ppo_is_bitwise_equal(run: Run, easy: Callable[[Path], list[str]], tmp_path: Path) -> None:
    base = save_composite(tmp_path / "composite", "gemma3", tied=True)
    common = (
        f"trainer.policy.model.path={base}",
        f"trainer.critic.model.path={base}",
        "trainer.algorithm.advantage_estimator=gae",
        "trainer.critic_mini_batch_size=4",
        "trainer.epochs=2",
        "generator.backend=transformers",
        "trainer.hf_save_interval=4",
    )
    exported = []
    for name, stops in (("whole", (4,)), ("parts", (2, 4))):
        for stop in stops:
            run("main_base", *easy(tmp_path / name), *common, f"trainer.max_steps={stop}")
        exported.append(tmp_path / name / "exports" / "global_step_4" / "policy")
        assert_only_language_model_changed(base, exported[-1])
    whole, parts = (load_file(folder / "model.safetensors") for folder in exported)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.slow
@pytest.mark.on_demand
def test_composite_sft_resumes_and_is_exported(run: Run, tmp_path: Path) -> None:
    base = save_composite(tmp_path / "composite", "mistral3")
    rows = [
        {"messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": "abc" * (1 + i % 3)}]}
        for i in range(12)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = (
        f"data.train_data=['{tmp_path / 'rows.jsonl'}']",
        f"trainer.policy.model.path={base}",
        f"trainer.ckpt_path={tmp_path / 'ckpts'}",
        f"trainer.export_path={tmp_path / 'exports'}",
        "trainer.logger=console",
        "trainer.train_batch_size=2",
        "trainer.policy_mini_batch_size=2",
        "trainer.epochs=1",
        "trainer.ckpt_interval=2",
        "trainer.max_tokens_per_microbatch=2048",
        "trainer.policy.optimizer_config.lr=1e-3",
    )
    run("main_sft", *common, "trainer.max_steps=2")
    run("main_sft", *common, "trainer.max_steps=4")
    assert sorted(metrics_of(tmp_path)) == [1, 2, 3, 4]
    export(ExportRequest(str(tmp_path / "ckpts" / "global_step_4"), str(tmp_path / "model")))
    assert_only_language_model_changed(base, tmp_path / "model")
