"""GRPO with vLLM from checkpoints of models with recurrent layers: the log-probs of engine and trainer agree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.models.cells import save_hybrid
from tests.integration.models.table import hybrid, hybrid_cells

from .conftest import Run, metrics_of

BOUNDS = {"float32": (1e-4, 1e-4), "bfloat16": (0.1, 3.0)}
"""Data type of the engine -> the largest mean and the largest difference of log-probs in nats. In bfloat16 rounding
changes which experts are chosen for a token."""


@pytest.mark.slow
@pytest.mark.on_demand
@pytest.mark.parametrize(("name", "dtype"), [pytest.param(*cell, id="-".join(cell)) for cell in hybrid_cells()])
def test_grpo_with_vllm_agrees_after_every_sync(
    run: Run, easy: Callable[[Path], list[str]], tmp_path: Path, name: str, dtype: str
) -> None:
    row = hybrid(name)
    if row.kind.startswith("qwen3_5"):
        pytest.importorskip("torchvision", reason="vLLM's classes of Qwen3.5 import it")
    model = (f"trainer.policy.model.path={save_hybrid(row, tmp_path / 'model')}", f"generator.model_dtype={dtype}")
    engine = ("generator.backend=vllm", "generator.weight_sync_check=probe")
    run("main_base", *easy(tmp_path), *model, *engine, "trainer.epochs=3", "trainer.max_steps=5")
    rows = metrics_of(tmp_path)
    largest_mean, largest = BOUNDS[dtype]
    for row_of_step in (rows[step] for step in range(1, 6)):
        for mean, maximum in (
            ("weights/probe_gap_mean", "weights/probe_gap"),
            ("rollout/logprob_diff", "rollout/logprob_diff_max"),
        ):
            assert row_of_step[mean] <= largest_mean and row_of_step[maximum] <= largest
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
