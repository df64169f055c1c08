"""Modules that SkyRL's recipes call, by their names, two steps each. On demand, test_published_recipes runs all
recipes.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import metrics_of

REPOSITORY = Path(__file__).parents[3]
TWO_STEPS = ["trainer.max_steps=2", "trainer.ckpt_interval=0", "trainer.eval_before_train=false"]
RECIPES = {
    "examples.algorithm.custom_advantage_estimator.main_custom_adv_est": [
        "trainer.algorithm.advantage_estimator=simple_baseline"
    ],
    "scripts.full_context.main_full_ctx": [
        "+trainer.num_dummy_steps=2",
        "trainer.max_prompt_length=128",
        "generator.max_input_length=160",
    ],
}


@pytest.mark.on_demand
@pytest.mark.slow
@pytest.mark.parametrize("module", RECIPES)
def test_recipe_trains_through_own_module(
    module: str,
    small: Callable[[Path], list[str]],
    ray_of_all_runs: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    keys = [*small(tmp_path), *TWO_STEPS, *RECIPES[module]]
    monkeypatch.syspath_prepend(str(REPOSITORY))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY), prepend=":")
    monkeypatch.setattr(sys, "argv", [module, *keys])
    importlib.import_module(module).main()
    rows = metrics_of(tmp_path)
    assert rows[2]["policy/optimizer_steps"] == 1
    if module.endswith("main_full_ctx"):
        assert rows[2]["response/mean_tokens"] == 160 - 128 + 16 and rows[2]["reward/mean"] == 0.5
        assert rows[2]["policy/grad_norm"] > 0
