"""GRPO with vLLM from checkpoints of models with recurrent layers: the log-probs of engine and trainer agree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.models.cells import save_hybrid
from tests.integration.models.table import HYBRIDS, hybrid

from .conftest import Run, metrics_of


@pytest.mark.slow
@pytest.mark.on_demand
@pytest.mark.parametrize("name", [row.name for row in HYBRIDS if row.vllm])
def test_grpo_with_vllm_agrees_after_every_sync(
    run: Run, easy: Callable[[Path], list[str]], tmp_path: Path, name: str
) -> None:
    row = hybrid(name)
    largest_mean = min(row.vllm.values())  # runs on CPUs use float32 if vLLM supports it
    if row.kind.startswith("qwen3_5"):
        pytest.importorskip("torchvision", reason="vLLM's classes of Qwen3.5 import it")
    model = (f"trainer.policy.model.path={save_hybrid(row, tmp_path / 'model')}",)
    engine = ("generator.backend=vllm", "generator.weight_sync_check=probe")
    run("main_base", *easy(tmp_path), *model, *engine, "trainer.epochs=3", "trainer.max_steps=5")
    rows = metrics_of(tmp_path)
    for row_of_step in (rows[step] for step in range(1, 6)):
        for mean, maximum in (
            ("weights/probe_gap_mean", "weights/probe_gap"),
            ("rollout/logprob_diff", "rollout/logprob_diff_max"),
        ):
            assert row_of_step[mean] <= largest_mean
            assert row_of_step[maximum] <= 1e-4 or "float32" not in row.vllm
        assert row_of_step["policy/grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.on_demand
@pytest.mark.parametrize("sync", ["merged", "adapter"])
def test_adapters_of_recurrent_layers_reach_vllm(
    run: Run, easy: Callable[[Path], list[str]], tmp_path: Path, sync: str
) -> None:
    model = (f"trainer.policy.model.path={save_hybrid(hybrid('Falcon-H1'), tmp_path / 'model')}",)
    lora = ("trainer.policy.model.lora.rank=4", f"trainer.policy.model.lora.sync={sync}")
    engine = ("generator.backend=vllm", "generator.model_dtype=float32", "generator.weight_sync_check=probe")
    large_steps = "trainer.policy.optimizer_config.lr=1e-2"
    run("main_base", *easy(tmp_path), *model, *lora, *engine, large_steps, "trainer.max_steps=2")
    for step in (1, 2):
        assert metrics_of(tmp_path)[step]["rollout/logprob_diff_max"] <= 1e-4


@pytest.mark.slow
@pytest.mark.on_demand
def test_merged_adapters_of_experts_reach_vllm(run: Run, easy: Callable[[Path], list[str]], tmp_path: Path) -> None:
    model = (f"trainer.policy.model.path={save_hybrid(hybrid('Granite 4 hybrid'), tmp_path / 'model')}",)
    experts = "trainer.policy.model.lora.target_parameters=[gate_up_proj,down_proj]"
    lora = ("trainer.policy.model.lora.rank=4", experts, "trainer.policy.model.lora.sync=merged")
    engine = ("generator.backend=vllm", "generator.weight_sync_check=probe")
    large_steps = "trainer.policy.optimizer_config.lr=1e-2"
    run("main_base", *easy(tmp_path), *model, *lora, *engine, large_steps, "trainer.max_steps=2")
    for step in (1, 2):
        assert metrics_of(tmp_path)[step]["rollout/logprob_diff_max"] <= 1e-4
