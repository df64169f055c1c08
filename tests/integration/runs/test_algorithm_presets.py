"""Every preset of examples/algorithms trains through the entrypoint, with a tiny model and task."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from skyrl_train.testing.tiny_models import save_tiny_model

from .conftest import Run, metrics_of

PRESETS = Path(__file__).parents[3] / "examples" / "algorithms"
NAMES = sorted(path.stem for path in PRESETS.glob("*.yaml") if path.stem != "gsm8k")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_preset_trains(name: str, run: Run, easy: Callable[[Path], list[str]], tmp_path: Path):
    save_tiny_model(tmp_path / "teacher", seed=1)
    own = {
        "dapo": ["trainer.algorithm.overlong_buffer.len=4", "generator.apply_overlong_filtering=false"],
        "distillation": [f"trainer.ref.model.path={tmp_path / 'teacher'}"],
        "custom_loss": ["trainer.plugins=[lower_case_plugin,custom_loss]"],
        "custom_advantage": ["trainer.plugins=[lower_case_plugin,custom_advantage]"],
    }
    run(
        "main_base",
        "--config-dir",
        str(PRESETS),
        "--config-name",
        name,
        *easy(tmp_path),
        "device=cpu",
        "trainer.max_steps=2",
        "trainer.policy_mini_batch_size=2",
        "trainer.critic_mini_batch_size=2",
        "trainer.gradient_checkpointing=false",
        "trainer.ckpt_interval=0",
        *own.get(name, []),
        PYTHONPATH=f"{PRESETS}{os.pathsep}{tmp_path}",
    )
    found = metrics_of(tmp_path)
    assert max(found) == 2
    for step in (1, 2):
        assert all(math.isfinite(value) for value in found[step].values() if isinstance(value, float))
        assert found[step]["policy/skipped"] == 0
    assert found[2]["policy/grad_norm"] > 0
