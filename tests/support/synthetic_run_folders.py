"""Synthetic run folders with the files of a real run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from skyrl_train.report.diagnosis import RULES, STEP_TIME_METRIC, Diagnosis
from skyrl_train.report.jsonl import JsonlTracker
from skyrl_train.report.trackers import Trackers
from skyrl_train.testing.synthetic_rollouts import synthetic_run
from skyrl_train.trainer.run_folder import RunFolder

ADVERSARIAL_TEXT = (
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "<img src=x onerror=alert(1)>",
    "]]></SCRIPT >",
    "\x1b[31mred\x1b]0;title\x07",
    "\u202eright to left\u2066",
    "\ud800 alone",
    "\udfff",
    "\u2028\u2029\x00\x7f\ufeff",
    '"; }{ \\" \\u003c',
    "&lt;b&gt; &amp;",
    "{{ 7 * 7 }} ${7 * 7}",
    "<a href=javascript:alert(1)>",
    "𝕏👩‍👩‍👧 中文",
)
"""Texts that a model may write."""


def synthetic_metrics(step: int, **more: float) -> dict[str, float]:
    return {"reward/mean": step / 100, "policy/grad_norm": 1.0 + step % 3, STEP_TIME_METRIC: 2.0, **more}


def write_metrics(folder: Path, rows: Sequence[Mapping[str, float]], total: int, after: int = 0) -> None:
    """Write rows of the steps after `after` like the trackers of a run: metrics.jsonl and diagnosis.json."""
    folder.mkdir(parents=True, exist_ok=True)
    with Trackers({"jsonl": JsonlTracker(folder), "diagnosis": Diagnosis(folder, RULES)}) as trackers:
        trackers.begin(after, total)
        for step, row in enumerate(rows, after + 1):
            trackers.log(row, step)


def write_synthetic_run(
    folder: Path,
    steps: int = 3,
    *,
    total: int | None = None,
    name: str = "a run",
    config: Mapping[str, Any] | None = None,
    rollouts: int = 16,
    **made_up: Any,
) -> Path:
    """Create a run of that many steps with `rollouts` rollouts each. `made_up` are arguments of made_up_run."""
    with RunFolder(folder, {"project_name": "a project", "run_name": name}, allow_resume=True):
        metrics = [synthetic_metrics(step) for step in range(1, steps + 1)]
        write_metrics(folder, metrics, steps if total is None else total)
        (folder / "config.yaml").write_text(yaml.safe_dump({"defaults": ["base"], **(config or {})}))
        if rollouts:
            synthetic_run(folder, steps, rollouts, **made_up)
    return folder
