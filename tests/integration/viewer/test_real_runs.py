"""The viewer page with real runs: one whose model calls a tool, and an asynchronous one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest

from skyrl_train.report.rollout_files import RolloutReader
from tests.integration.runs.conftest import arithmetic, command, small  # noqa: F401
from tests.integration.runs.test_async import ASYNC_OVERRIDES
from tests.integration.viewer.conftest import Shown, reported, shown, sync_api, watching
from tests.integration.viewer.test_curves import FIRST, PIXELS, chart

TOOL = Path(__file__).parents[3] / "examples" / "quickstart" / "tool.py"
SHORT = ["--warm-up-steps", "60", "trainer.max_steps=2", "trainer.eval_interval=2", "trainer.keep_rollouts=all"]
"""Enough training for tool calls, but not for correct answers."""
expect = sync_api.expect
pytestmark = [pytest.mark.on_demand, pytest.mark.slow, pytest.mark.timeout(960)]


def train(arguments: list[str]) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap: scripts/sandbox_tools installs it")
def test_tool_and_async_runs_in_report_and_watch(request: pytest.FixtureRequest, tmp_path: Path):
    train([sys.executable, str(TOOL), "--output", str(tmp_path / "tool"), *SHORT])
    overrides = request.getfixturevalue("small")(tmp_path / "async")
    train(command("main_base", [*ASYNC_OVERRIDES, *overrides]))
    runs = [tmp_path / "tool" / "grpo", tmp_path / "async" / "ckpts"]
    browser = request.getfixturevalue("browser")
    with shown(browser, reported(runs, tmp_path)) as window:
        assert_shows_both(window, runs)
    with watching(runs) as address, shown(browser, address) as window:
        assert_shows_both(window, runs)


def assert_shows_both(window: Shown, runs: list[Path]) -> None:
    page = window.open("smooth=0")
    expect(chart(page, "reward/mean").locator(".values li")).to_have_count(2)
    page = window.open("find=async&smooth=0")
    last = json.loads((runs[1] / "metrics.jsonl").read_text().splitlines()[-1])
    for name in ("async/staleness_max", "async/staleness_mean", "async/trainer_idle"):
        figure = chart(page, name)
        expect(figure.locator(".values li")).to_have_count(1)
        assert float(figure.locator(".values b").inner_text()) == pytest.approx(last[name], rel=1e-3)
        assert any(count > 20 for color, count in figure.locator("canvas").evaluate(PIXELS).items() if color != FIRST)
    row, turn, call = find_call(runs[0], embedded_groups(window))
    key = {name: row[name] for name in ("step", "uid", "group", "sample")}
    page = window.open(urlencode({"tab": "rollouts", **key}))
    card = page.locator(".message.assistant").nth(turn).locator(".tool-call").first
    expect(card.locator("b")).to_have_text(call["name"])
    for value in json.loads(call["arguments"]).values():
        expect(card.locator(".text-block").first).to_have_text(value)
    expect(page.locator(".message .answers").first).to_have_text(f"answer to {call['name']}")
    expect(page.locator(".message.assistant .turn").nth(turn)).to_contain_text("environment ")
    page = window.open(urlencode({"tab": "rollouts", **key, "how": "tokens", "token": row["prompt_tokens"]}))
    expect(page.locator("[data-token]")).to_have_count(row["prompt_tokens"] + row["response_tokens"])
    expect(page.locator("dl.token-facts")).to_contain_text(str(np.float32(row["rollout_logprobs"][0])))


def embedded_groups(window: Shown) -> set[tuple[int, int]] | None:
    """Return (step, group) of the first run's groups that a report has with all tokens; None for a server."""
    if not window.address.startswith("file:"):
        return None
    rollouts: list[dict[str, Any]] = json.loads(window.page.locator("#data").inner_text())["rollouts"]["0"]
    without_tokens = {(row["step"], row["group"]) for row in rollouts if row["tokens"] is None}
    return {(row["step"], row["group"]) for row in rollouts} - without_tokens


def find_call(run: Path, groups: set[tuple[int, int]] | None) -> tuple[dict[str, Any], int, dict[str, Any]]:
    """Return (rollout, index of the turn, call) of the first successful tool call with a result."""
    for row in RolloutReader(run).table().to_pylist():
        if groups is not None and (row["step"], row["group"]) not in groups:
            continue
        for number, turn in enumerate(row["turns"][:-1]):
            calls = json.loads(turn["tool_calls"] or "[]")
            if len(calls) == 1 and "error" not in calls[0]:
                return row, number, calls[0]
    raise AssertionError("the model never called the tool in the rollouts of the page")
