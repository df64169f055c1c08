"""Adapters of models with recurrent layers: peft loads the exported folder, and computes what the learner computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from skyrl_train.config.schema import LoraConfig
from skyrl_train.config.section import freeze
from skyrl_train.learner.worker import LearnerWorker
from skyrl_train.models.expert_adapters import get_expert_parameters
from skyrl_train.models.loading import load_causal_lm
from tests.support.learner_specs import policy_batch, tiny_spec
from tests.support.padded_reference import padded_scores
from tests.support.tiny_adapters import fill_adapters

from .cells import make_hybrid, save_hybrid
from .table import HYBRIDS, hybrid

IN_CI = "Qwen3-Next"


@pytest.mark.parametrize(
    "name", [pytest.param(row.name, marks=[] if row.name == IN_CI else [pytest.mark.on_demand]) for row in HYBRIDS]
)
def test_peft_loads_exported_adapters_of_hybrids(name: str, tmp_path: Path):
    path = save_hybrid(hybrid(name), tmp_path / "model")
    experts = sorted({key.rpartition(".")[2] for key in get_expert_parameters(make_hybrid(hybrid(name)))})
    assert bool(experts) == ("experts" in hybrid(name).layers)
    lora = freeze(LoraConfig(rank=3, alpha=6, target_parameters=experts or None))
    worker = LearnerWorker(tiny_spec(path, lora=lora), 0, 1)
    worker.build(path)
    fill_adapters(worker.module)
    worker.export(str(tmp_path / "export"))
    batch = policy_batch()
    expected = worker.forward([batch], 1)
    base, merged = (load_causal_lm(folder, dtype=torch.float32) for folder in (path, str(tmp_path / "export")))
    loaded: Any = peft.PeftModel.from_pretrained(base, str(tmp_path / "export" / "adapter"))
    for model in (merged, loaded):
        alone = [padded_scores(model, batch.select([row]))[0] for row in range(len(batch.offsets) - 1)]
        torch.testing.assert_close(expected, torch.cat(alone).detach(), rtol=0, atol=1e-4)
