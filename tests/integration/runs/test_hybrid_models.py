"""GRPO from checkpoints of models with recurrent layers, and its resumption from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from skyrl_train.testing.tiny_models import HYBRID_KINDS, save_tiny_model

from .conftest import Run, metrics_of

IN_CI = "qwen3_5_text"


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == IN_CI else [pytest.mark.on_demand]) for kind in HYBRID_KINDS]
)
def test_grpo_resumes_bitwise_identical(run: Run, easy: Callable[[Path], list[str]], tmp_path: Path, kind: str) -> None:
    path = save_tiny_model(tmp_path / "model", kind, layers=4)
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"

    def train(folder: Path, steps: int) -> str:
        model = (f"trainer.policy.model.path={path}", "generator.backend=transformers")
        return run("main_base", *easy(folder), *model, "trainer.epochs=3", f"trainer.max_steps={steps}").stdout

    train(straight, 5)
    train(resumed, 2)
    assert "resumed at step 2" in train(resumed, 5)
    rows = metrics_of(straight)
    for step in range(1, 6):
        assert rows[step]["rollout/logprob_diff_max"] <= 1e-4
        assert rows[step]["policy/grad_norm"] > 0
    assert metrics_of(resumed) == rows
