"""The task that learning is measured on: examples/quickstart's, with more problems to evaluate on."""

from __future__ import annotations

import sys
from pathlib import Path

from skyrl_train.environments.tasks.arithmetic import generate
from skyrl_train.report.jsonl import METRICS_FILE, read_jsonl

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "quickstart"))

import quickstart
from model import save_model

PROBLEMS = 1_000


def prepare(folder: Path, seed: int) -> Path:
    """Data, with more problems to evaluate on than the quickstart's own, and the model after its warm-up."""
    texts = quickstart.write_data(folder / "data", seed, quickstart.OPERATIONS)
    problems = generate(PROBLEMS, quickstart.OPERATIONS, quickstart.MAX_VALUE, seed + 2, "validation")
    quickstart.write_jsonl(folder / "data" / "validation.jsonl", problems)
    save_model(folder / "model", texts, seed)
    return quickstart.warm_up(folder, seed, steps=None)


def scores_of(run: Path) -> list[float]:
    """Greedy accuracies of a run's evaluations, in their order."""
    name = "eval/arithmetic/avg_score"
    return [line[name] for line in read_jsonl(run / METRICS_FILE) if name in line]
