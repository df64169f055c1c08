"""The GRPO loop of the example uses only the tensordict parts."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[3] / "examples" / "tensordict_grpo"
OUR_MODULES = ("grpo", "warm_up", "model")


@pytest.fixture
def grpo(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the example's module."""
    monkeypatch.syspath_prepend(FOLDER)
    path, before = list(sys.path), {name: sys.modules.pop(name, None) for name in OUR_MODULES}
    yield importlib.import_module("grpo")
    sys.path[:] = path
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


@pytest.mark.on_demand
@pytest.mark.slow
def test_it_raises_accuracy_on_held_out_problems(grpo: Any, tmp_path: Path):
    assert len((FOLDER / "grpo.py").read_text().splitlines()) <= 80
    before, after = grpo.train(tmp_path, 16)
    assert after - before >= 0.2


@pytest.mark.defect("D41")
def test_example_resumes_with_named_optimizer(grpo: Any, tmp_path: Path):
    grpo.train(tmp_path, 1, warm_up_steps=3, prompts=2)
    first = torch.load(tmp_path / "checkpoint.pt")
    grpo.train(tmp_path, 2, warm_up_steps=3, prompts=2)
    second = torch.load(tmp_path / "checkpoint.pt")
    assert [first["step"], second["step"]] == [1, 2]
    steps = [int(one["optimizer"]["state"][0]["step"]) for one in (first, second)]
    assert steps == [2, 4]  # two batches of the buffer a step: the optimizer's moments went on, too
    (group,) = second["optimizer"]["param_groups"]
    assert group["weight_decay"] == 0.01
    assert group["decoupled_weight_decay"]  # AdamW, not Adam
    moved = max(float((second["model"][name] - first["model"][name]).abs().max()) for name in first["model"])
    assert moved <= 2 * 2 * grpo.RATE  # from the saved weights, not from a warm-up of their own
