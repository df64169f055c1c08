"""The overview of a run, markers in its charts, links of findings, Markdown, and the comparison of a group."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.report.attempts import ATTEMPTS_FILE
from skyrl_train.report.rollout_files import write_rollouts
from skyrl_train.testing.synthetic_rollouts import synthetic_rollouts
from tests.integration.viewer.conftest import Shown, reported, shown, sync_api
from tests.integration.viewer.test_curves import PIXELS, chart
from tests.support.viewer_runs import metric_lines, with_messages, write_run

STEPS, SAVED, RESUMED = 20, (5, 10), 8
ERROR = "WorkerDied: rank 3 died: out of memory. Lower trainer.max_tokens_per_microbatch."
CONSTANT = {"policy/skipped": 0.0, "rollouts/failed": 0.0}
ANSWERS = (
    "**Step 1.** First `12 * 4` is _forty-eight_.\n\n1. Monday\n2. Tuesday\n\n```python\nprint(12 * 4)\n```\n\n#### 48",
    "**Step 1.** Then | a | b\n\n| day | sum |\n| --- | --: |\n| Monday | 24 |\n\n[text](https://198.51.100.7/x)",
    "plain <b>text</b>,  two  spaces\nand a line with * and _ and snake_case_name",
)
FINDING_PIXELS = """canvas => {
    const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    let seen = 0;
    for (let i = 0; i < data.length; i += 4) {
        const near = [179, 38, 30].every((value, at) => Math.abs(data[i + at] - value) < 12);
        if (near && data[i + 3] > 20 && data[i + 3] < 60) seen++;
    }
    return seen;
}"""
"""Script that counts translucent pixels in the color of findings."""
TEXT_OF = "element => element.textContent"
expect = sync_api.expect


def overview_run(folder: Path) -> Path:
    """Write a run that was resumed once, saved checkpoints and then failed, with Markdown in its rollouts."""
    run = write_run(folder, "overview", steps=STEPS, kept=(20,))
    noise = {"policy/policy_loss": 3e-9, "policy/lr": 1e-6}
    lines = [
        line
        | (CONSTANT | {name: value * (-1) ** line["step"] for name, value in noise.items()} if line["step"] else {})
        for line in metric_lines(STEPS, 0)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    start = lines[0]["time"]
    events: list[dict[str, Any]] = [
        {"event": "start", "time": start - 30, "host": "a"},
        {"event": "start", "time": start + 60 * RESUMED + 30, "host": "a"},
        {"event": "hardware", "time": start, "device": "gpu", "slots": 8, "nodes": 2, "accelerators": ["H100"]},
        {"event": "end", "time": start + 60 * STEPS + 15, "error": ERROR},
    ]
    (run / ATTEMPTS_FILE).write_text("".join(json.dumps(event) + "\n" for event in events))
    trainer = {
        "run_name": "overview",
        "max_steps": 40,
        "train_batch_size": 32,
        "policy": {"model": {"path": "Qwen/Qwen3-0.6B"}, "optimizer_config": {"lr": 1e-6}},
        "algorithm": {"advantage_estimator": "grpo", "policy_loss_type": "regular"},
    }
    generator, data = {"n_samples_per_prompt": 8, "backend": "vllm"}, {"train_data": ["/data/gsm8k/train.parquet"]}
    (run / "config.yaml").write_text(json.dumps({"trainer": trainer, "generator": generator, "data": data}))
    for step in SAVED:
        (run / f"global_step_{step}").mkdir()
    table = synthetic_rollouts(8, 20, samples_per_prompt=8, mean_tokens=6)
    question = {"role": "user", "content": "Calculate."}
    answers = [ANSWERS[row % len(ANSWERS)] for row in range(8)]
    write_rollouts(
        run, 20, with_messages(table, [[question, {"role": "assistant", "content": text}] for text in answers])
    )
    return run


@pytest.fixture(scope="module")
def overview_window(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    folder = tmp_path_factory.mktemp("overview")
    with shown(browser, reported([overview_run(folder / "run")], folder)) as window:
        yield window


def fact(page: Any, name: str) -> Any:
    return page.locator(".facts-grid div").filter(has=page.get_by_text(name, exact=True)).locator("dd")


def test_overview_shows_what_was_trained(overview_window: Shown):
    page = overview_window.open()
    tiles = page.locator(".tile")
    expect(tiles.nth(0)).to_contain_text("Failedstep 20 of 40")
    best = max(line["eval/gsm8k/avg_score"] for line in metric_lines(STEPS, 0) if "eval/gsm8k/avg_score" in line)
    expect(tiles.nth(1)).to_contain_text(f"{best:.3g}gsm8k at step 20 · first 0")
    # 30 s before step 0 up to step 8, and from 30 s after that to 15 s after step 20
    expect(tiles.nth(3)).to_contain_text("20 min 15 s")
    expect(tiles.nth(3)).to_contain_text("6 s per step · 2 attempts")
    expect(page.get_by_role("note")).to_contain_text(ERROR)
    for name, value in {
        "Model": "Qwen/Qwen3-0.6B",
        "Algorithm": "GRPO · regular loss",
        "Batch": "32 prompts × 8 samples",
        "Training data": "gsm8k/train.parquet",
        "Hardware": "8 × H100 on 2 nodes",
        "Checkpoints": "5, 10",
        "Resumed after": "8",
    }.items():
        expect(fact(page, name)).to_have_text(value)


def test_constant_metrics_are_in_collapsed_table(overview_window: Shown):
    page = overview_window.open()
    section = page.locator("details.section").filter(has_text="did not change")
    expect(section).not_to_have_attribute("open", "")
    section.locator("summary").click()
    values = dict(zip(*(section.locator(f"tbody {part}").all_inner_texts() for part in ("th", ".number")), strict=True))
    assert values.items() >= {"policy/skipped": "0", "rollouts/failed": "0", "policy/policy_loss": "0"}.items()
    assert "policy/lr" not in values and "reward/mean" not in values
    page.get_by_label("Find").fill("policy_loss")
    expect(chart(page, "policy/policy_loss").locator(".values b")).to_have_text("0")


def test_charts_mark_checkpoints_resumes_and_findings(overview_window: Shown):
    page = overview_window.open("smooth=0")
    expect(page.locator(".marker-legend > span")).to_have_text([" checkpoint", " resumed", " finding"])
    marked, plain = (chart(page, name) for name in ("response/truncated_fraction", "policy/kl"))
    assert marked.locator("canvas").evaluate(FINDING_PIXELS) > 2_000
    assert plain.locator("canvas").evaluate(FINDING_PIXELS) == 0
    muted = "90,101,112"
    assert plain.locator("canvas").evaluate(PIXELS)[muted] > 60, "two triangles and a dashed line"
    marked.get_by_role("button", name="truncated").click()
    expect(page.locator(".finding.holds")).to_contain_text("responses were truncated")


def test_finding_opens_its_curve_and_rollouts(overview_window: Shown):
    page = overview_window.open("tab=diagnosis")
    expect(page.locator(".finding code").first).to_have_text("generator.chat_template")
    page.get_by_role("button", name="Curve of response/truncated_fraction").click()
    expect(page.locator("figcaption").first).to_have_text("response/truncated_fraction")
    page.go_back()
    page.get_by_role("button", name="Rollouts of these steps").click()
    expect(page.get_by_label("stop")).to_have_value("length")
    expect(page.get_by_label("step from")).not_to_have_value("")
    assert "tab=rollouts" in page.url


def test_charts_have_units_and_descriptions(overview_window: Shown):
    page = overview_window.open()
    described = chart(page, "policy/entropy").locator(".described")
    expect(described).to_have_text("entropy of the policy's next-token distribution")
    expect(described).to_have_attribute("title", re.compile(r"\(nats\); healthy: "))


def test_markdown_is_rendered_and_can_be_raw(overview_window: Shown):
    page = overview_window.open("tab=rollouts&order=step")
    page.locator(".list li").first.wait_for()
    page.keyboard.press("j")
    answer = page.locator(".message.assistant > .text-block")
    expect(answer.locator("strong")).to_have_text("Step 1.")
    expect(answer.locator("em")).to_have_text("forty-eight")
    expect(answer.locator("li")).to_have_text(["1.Monday", "2.Tuesday"])
    expect(answer.locator("pre code")).to_have_text("print(12 * 4)")
    expect(answer.locator(".heading")).to_have_text("#### 48")  # which rewards of GSM8K read
    page.get_by_label("Markdown").uncheck()
    assert answer.evaluate(TEXT_OF) == ANSWERS[0] and answer.locator("strong").count() == 0
    page.keyboard.press("m")
    page.keyboard.press("j")
    expect(answer.locator("td")).to_have_text(["Monday", "24"], use_inner_text=True)
    expect(answer.locator(".link-text")).to_have_text("text (https://198.51.100.7/x)")
    assert answer.locator("a, img").count() == 0
    page.keyboard.press("j")
    expect(page.locator(".sample h2")).to_contain_text("sample 2")
    assert answer.evaluate(TEXT_OF) == ANSWERS[2], "text without Markdown keeps all characters"


def test_group_table_compares_samples(overview_window: Shown):
    page = overview_window.open("tab=rollouts&order=step")
    page.locator(".list li").first.wait_for()
    page.keyboard.press("j")
    page.keyboard.press("g")
    rows = page.get_by_role("table", name="Comparison of the samples").locator("tbody tr")
    expect(rows).to_have_count(8)
    expect(rows.nth(0)).to_contain_text("#### 48")
    expect(rows.nth(3)).to_contain_text("same text as sample 0")
    tokens = [int(text) for text in rows.locator(".bar").all_inner_texts()]
    cards = [int(text.split(" tokens")[0]) for text in page.locator(".group h3 .muted").all_inner_texts()]
    assert tokens == cards and max(tokens) > min(tokens)


@pytest.mark.parametrize("view", ["", "tab=rollouts", "tab=diagnosis", "tab=runs"])
def test_phone_window_needs_no_horizontal_scrolling(browser: Any, overview_window: Shown, view: str):
    page = overview_window.open(view)
    page.set_viewport_size({"width": 390, "height": 844})
    try:
        page.locator("main > *").first.wait_for()
        if view == "tab=rollouts":
            page.locator(".list button").first.click()
            page.get_by_role("button", name="Group").click()
            page.locator(".group article").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        if view == "tab=rollouts":
            page.get_by_role("button", name="All samples").click()
            expect(page.locator(".list li").first).to_be_visible()
    finally:
        page.set_viewport_size({"width": 1200, "height": 800})
