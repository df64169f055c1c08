from __future__ import annotations

from pathlib import Path

import pytest

from skyrl_train.errors import DataError
from skyrl_train.report.curve import write_reward_curve
from skyrl_train.report.jsonl import JsonlTracker


def test_png_is_drawn_from_metrics_file(tmp_path: Path):
    tracker = JsonlTracker(tmp_path)
    for step in range(5):
        tracker.log({"reward/mean": step / 5, "eval/$x^{/avg_score": float("nan") if step else 0.5}, step)
    target = write_reward_curve(tmp_path)
    assert target == tmp_path / "reward_curve.png"
    assert target.read_bytes().startswith(b"\x89PNG")
    assert target.stat().st_size > 5000


def test_run_without_rewards_is_refused(tmp_path: Path):
    JsonlTracker(tmp_path).log({"policy/loss": 1.0}, 1)
    with pytest.raises(DataError, match="there is no curve to draw"):
        write_reward_curve(tmp_path)
