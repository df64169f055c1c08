"""Every preset of examples/algorithms trains through the entrypoint, with a tiny model and task."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from skyrl_train.testing.tiny_models import save_tiny_model

from .conftest import PRESETS, Run, flat, metrics_of

NAMES = sorted(path.stem for path in PRESETS.glob("*.yaml") if path.stem != "gsm8k")

ALWAYS = {"dapo"}
"""Presets that always run: one with group filters. Other tests cover the other parts: test_gsm8k_recipe.py a reference
model, test_ppo.py a critic, test_logs.py plugins."""


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("teacher"), seed=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.on_demand) for name in NAMES]
)
def test_preset_trains(name: str, run: Run, teacher: str, easy: Callable[[Path], list[str]], tmp_path: Path):
    preset_overrides = {
        "dapo": ["trainer.algorithm.overlong_buffer.len=4", "generator.apply_overlong_filtering=false"],
        "distillation": [f"trainer.ref.model.path={teacher}"],
        "custom_loss": ["trainer.plugins=[lower_case_plugin,custom_loss]"],
        "custom_advantage": ["trainer.plugins=[lower_case_plugin,custom_advantage]"],
    }
    overrides = [
        *(override for override in easy(tmp_path) if "use_kl_loss" not in override),  # the preset sets it
        "device=cpu",
        "trainer.max_steps=2",
        "trainer.policy_mini_batch_size=2",
        "trainer.critic_mini_batch_size=2",
        "trainer.gradient_checkpointing=false",
        "trainer.ckpt_interval=0",
        *preset_overrides.get(name, []),
    ]
    run("main_base", "--config-dir", str(PRESETS), "--config-name", name, *overrides)
    expected = flat(yaml.safe_load((PRESETS / f"{name}.yaml").read_text()))
    for key in ("defaults", *(override.partition("=")[0] for override in overrides)):
        expected.pop(key, None)
    saved = flat(yaml.safe_load((tmp_path / "ckpts" / "config.yaml").read_text()))
    for key, value in expected.items():
        assert saved[key] == value or "${" in str(value), key
    rows = metrics_of(tmp_path)
    assert max(rows) == 2
    for step in (1, 2):
        assert all(math.isfinite(value) for value in rows[step].values() if isinstance(value, float))
        assert rows[step]["policy/skipped"] == 0
    assert rows[2]["policy/grad_norm"] > 0
