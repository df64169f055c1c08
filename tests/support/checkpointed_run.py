"""A run folder with one checkpoint, written by a real learner in a second and without a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from skyrl_train.config.hydra import CONFIG_FILE, load_preset, save_resolved
from skyrl_train.learner.base_model_record import BaseModelRecord
from skyrl_train.learner.worker import LearnerWorker
from skyrl_train.report.jsonl import JsonlTracker
from skyrl_train.trainer.checkpoints import CheckpointStore
from tests.support.learner_specs import tiny_spec
from tests.support.tiny_adapters import fill_adapters

METRICS: tuple[Mapping[str, float], ...] = (
    {"eval/all/avg_score": 0.125},
    {"reward/mean": 0.25, "response/truncated_fraction": 0.5},
    {"reward/mean": 0.5, "response/truncated_fraction": 0.25, "eval/all/avg_score": 0.375},
    {"reward/mean": 0.75, "eval/all/avg_score": 1.0},
)
"""Metrics of steps 0 to 3."""


def save_run(
    folder: Path,
    model: str,
    *overrides: str,
    step: int = 2,
    metrics: Sequence[Mapping[str, float]] = METRICS,
    **spec: Any,
) -> Path:
    """Create a run whose policy has changed in every trained parameter. Return the folder of its checkpoint."""
    config = load_preset([f"trainer.policy.model.path={model}", *overrides])
    lora = config.trainer.policy.model.lora
    dtype = "bfloat16" if config.trainer.bf16 else "float32"
    worker = LearnerWorker(tiny_spec(model, lora=lora if lora.rank else None, dtype=dtype, **spec), 0, 1)
    worker.setup(*worker.address())
    change(worker)
    checkpoints = CheckpointStore(folder)
    worker.save(str(checkpoints.begin(step) / "policy"))
    share, adapters = worker.base_model_fingerprints()
    base_models = {"policy": asdict(BaseModelRecord.of([share], adapters))}
    checkpoint = checkpoints.commit(step, {"fingerprints": {}, "base_models": base_models, "controllers": {}})
    worker.close()
    save_resolved(config, folder / CONFIG_FILE)
    tracker = JsonlTracker(folder)
    for number, row in enumerate(metrics):
        tracker.log(row, number)
    tracker.close()
    return checkpoint


@torch.no_grad()
def change(worker: LearnerWorker) -> None:
    """Set all trained parameters to other values, equal in every worker of one model."""
    generator = torch.Generator().manual_seed(1)
    if worker.adapters is not None:
        fill_adapters(worker.module)
        return
    for parameter in worker.module.parameters():
        parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
