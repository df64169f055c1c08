"""Synthetic run folders for `report`, `watch` and their page."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from skyrl_train.report.rollout_files import write_rollouts, write_vocabulary
from skyrl_train.testing.synthetic_rollouts import synthetic_rollouts, synthetic_vocabulary

CALL = {"function": {"name": "calculator", "arguments": '{"expression": "17 * 3"}'}}
SAMPLES = 8
ROLLOUTS = 64
"""Number of rollouts per step."""


def write_run(run: Path, name: str, *, steps: int, kept: Sequence[int] = (), lr: float = 1e-6, seed: int = 0) -> Path:
    """Create a run of that many steps, with rollouts of the steps `kept`."""
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metric_lines(steps, seed)))
    trainer = {"run_name": name, "project_name": "made up", "policy": {"optimizer_config": {"lr": lr}}}
    (run / "config.yaml").write_text(json.dumps({"trainer": trainer}))  # which is YAML
    if kept:
        write_vocabulary(run, synthetic_vocabulary())
    for step in kept:
        write_step(run, step)
    return run


def write_step(run: Path, step: int) -> None:
    """Write the rollouts of a step. Every tenth calls a tool in its turn, and in odd steps in its message too."""
    table = synthetic_rollouts(ROLLOUTS, step, samples_per_prompt=SAMPLES, mean_tokens=40)
    if step % 2:
        table = with_messages(table, [_asking(json.loads(one)) for one in table["messages"].to_pylist()])
    write_rollouts(run, step, table)


def with_messages(table: pa.Table, conversations: Sequence[list[dict[str, Any]]]) -> pa.Table:
    """Return a table of rollouts with other conversations."""
    column = pa.array([json.dumps(messages) for messages in conversations], pa.string())
    return table.set_column(table.schema.get_field_index("messages"), "messages", column)


def _asking(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if len(messages) > 2:
        messages[1] |= {"tool_calls": [CALL]}
    return messages


def metric_lines(steps: int, seed: int) -> list[dict[str, Any]]:
    """Return lines with an evaluation every ten steps from step 0. The last ten steps have truncated responses."""
    noise = np.random.default_rng(seed).normal(size=(steps + 1, 3)).round(4).tolist()
    lines = []
    for step, (first, second, third) in enumerate(noise):
        rise = 1 - math.exp(-step / 15)
        line: dict[str, Any] = {"step": step, "time": 1.8e9 + 60 * step}
        if step:
            line |= {
                "reward/mean": 0.8 * rise + 0.05 * first,
                "response/mean_tokens": 100 + 2 * step + 5 * second,
                "response/truncated_fraction": 0.6 if step > steps - 10 else 0.05,
                "policy/entropy": 2 - 1.5 * rise + 0.02 * second,
                "policy/grad_norm": abs(third),
                "policy/kl": 0.02 * rise + 0.001 * abs(first),
                "mismatch/kl": 0.001 + 0.0002 * abs(second),
                "async/staleness_max": float(step > 1),
                "async/staleness_mean": 0.5 * (step > 1),
                "rollouts/max_staleness": float(step > 1),
                "throughput/tokens_per_s": 5000 + 100 * second,
                "memory/learner_peak_rss_gib": 3 + 0.01 * step,
                "memory/learner_peak_gib": 20 + 0.1 * abs(third),
                "timing/step_s": 6.0,
                "timing/generate_s": 3.5,
                "timing/update_s": 2.0,
            }
        if step % 10 == 0:
            line |= {"eval/gsm8k/avg_score": 0.7 * rise, "eval/math/avg_score": 0.5 * rise}
        lines.append(line)
    return lines
