"""Every preset of examples/algorithms trains through the entrypoint, with a tiny model and task."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from skyrl_train.algorithms.registry import advantage_estimators, policy_losses
from skyrl_train.cluster.runtime import Cluster
from skyrl_train.entrypoints.main_base import BasePPOExp, run_experiment
from skyrl_train.environments.registry import environments
from skyrl_train.testing.tiny_models import save_tiny_model

from .conftest import LOWER_CASE, metrics_of

PRESETS = Path(__file__).parents[3] / "examples" / "algorithms"
NAMES = sorted(path.stem for path in PRESETS.glob("*.yaml") if path.stem != "gsm8k")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One Ray for all presets; its workers, which are each run's own, and this process find the plugins."""
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "lower_case_plugin.py").write_text(LOWER_CASE)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        for registry in (policy_losses, advantage_estimators, environments):  # plugins are this module's alone
            patch.setattr(registry, "_items", dict(registry._items))
            patch.setattr(registry, "table", dict(registry.table))
        for plugin in ("lower_case_plugin", "custom_loss", "custom_advantage"):
            patch.delitem(sys.modules, plugin, raising=False)
        patch.setenv("PYTHONPATH", str(PRESETS), prepend=os.pathsep)
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        patch.syspath_prepend(PRESETS)
        patch.syspath_prepend(folder)
        with Cluster():
            yield
        for plugin in ("lower_case_plugin", "custom_loss", "custom_advantage"):
            sys.modules.pop(plugin, None)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("teacher"), seed=1)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key."""
    values: dict[str, Any] = {}
    for name, value in tree.items():
        values |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return values


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_preset_trains(name: str, cluster: None, teacher: str, easy: Callable[[Path], list[str]], tmp_path: Path):
    own = {
        "dapo": ["trainer.algorithm.overlong_buffer.len=4", "generator.apply_overlong_filtering=false"],
        "distillation": [f"trainer.ref.model.path={teacher}"],
        "custom_loss": ["trainer.plugins=[lower_case_plugin,custom_loss]"],
        "custom_advantage": ["trainer.plugins=[lower_case_plugin,custom_advantage]"],
    }
    overrides = [
        *(one for one in easy(tmp_path) if "use_kl_loss" not in one),  # the preset says
        "device=cpu",
        "trainer.max_steps=2",
        "trainer.policy_mini_batch_size=2",
        "trainer.critic_mini_batch_size=2",
        "trainer.gradient_checkpointing=false",
        "trainer.ckpt_interval=0",
        "environment.skyrl_gym.max_env_workers=1",  # each imports the plugins, and with some of them torch
        *own.get(name, []),
    ]
    run_experiment(BasePPOExp, ["--config-dir", str(PRESETS), "--config-name", name, *overrides])
    asked = flat(yaml.safe_load((PRESETS / f"{name}.yaml").read_text()))
    for key in ("defaults", *(override.partition("=")[0] for override in overrides)):
        asked.pop(key, None)
    saved = flat(yaml.safe_load((tmp_path / "ckpts" / "config.yaml").read_text()))
    for key, value in asked.items():
        assert saved[key] == value or "${" in str(value), key
    found = metrics_of(tmp_path)
    assert max(found) == 2
    for step in (1, 2):
        assert all(math.isfinite(value) for value in found[step].values() if isinstance(value, float))
        assert found[step]["policy/skipped"] == 0
    assert found[2]["policy/grad_norm"] > 0
