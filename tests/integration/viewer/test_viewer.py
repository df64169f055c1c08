"""The viewer of rollouts in a browser: filters, links, keys, groups side by side, tokens with their numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from skyrl_train.report.rollout_files import RolloutReader
from skyrl_train.testing.synthetic_rollouts import synthetic_vocabulary
from tests.integration.viewer.conftest import Shown, reported, shown, sync_api
from tests.support.rollout_examples import sampled_tokens
from tests.support.viewer_runs import write_run

STATUS = ".pager [role=status]"
FILTERS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "step_from=2&step_to=2": lambda row: row["step"] == 2,
    "reward_min=0.5&reward_max=0.75": lambda row: row["status"] == "ok" and 0.5 <= row["reward"] <= 0.75,
    "tokens_min=60": lambda row: sampled_tokens(row) >= 60,
    "tokens_max=20&source=math": lambda row: sampled_tokens(row) <= 20 and row["data_source"] == "math",
    "status=failed": lambda row: row["status"] == "failed",
    "stop_reason=length&source=tools": lambda row: row["stop_reason"] == "length" and row["data_source"] == "tools",
    "text=3+TIMES": lambda row: row["step"] == 3,
    "text=Calculator": lambda row: "calculator" in row["messages"],
}
SAMPLE = "tab=rollouts&step=1&uid=1001&group=1&sample=1"
TOKEN_FACTS = """async () => {
    const said = [];
    for (const token of document.querySelectorAll('[data-token]')) {
        token.dispatchEvent(new PointerEvent('pointerover', { bubbles: true }));
        await new Promise(requestAnimationFrame);
        const facts = [...document.querySelector('dl.token-facts').children];
        said.push(Object.fromEntries(facts.map(one => [...one.children].map(part => part.textContent))));
    }
    return said;
}"""
"""Script that points at each token and returns the facts that the page shows."""
expect = sync_api.expect


@pytest.fixture
def page_rollouts(window: Shown, runs: list[Path]) -> list[dict[str, Any]]:
    """The rollouts that the page has: all of the run, or the groups that fit into a report."""
    rows: list[dict[str, Any]] = RolloutReader(runs[0]).table().to_pylist()
    if window.address.startswith("file:"):
        embedded = json.loads(window.page.locator("#data").inner_text())["rollouts"]["0"]
        groups = {(row["step"], row["group"]) for row in embedded}
        rows = [row for row in rows if (row["step"], row["group"]) in groups]
        assert len(rows) == len(embedded)
    return rows


@pytest.mark.parametrize("query", FILTERS)
def test_filters_select_matching_rollouts(window: Shown, page_rollouts: list[dict[str, Any]], query: str):
    left = sum(map(FILTERS[query], page_rollouts))
    assert 0 < left < len(page_rollouts)
    page = window.open(f"tab=rollouts&{query}")
    expect(page.locator(STATUS)).to_have_text(f"1–{min(50, left)} of {left}")
    page.get_by_role("button", name="Clear").click()
    expect(page.locator(STATUS)).to_have_text(f"1–50 of {len(page_rollouts)}")
    assert page.url.endswith("#tab=rollouts")


def test_filters_are_stored_in_url(window: Shown):
    page = window.open("tab=rollouts")
    page.get_by_label("reward from").fill("0.75")
    page.get_by_label("source").select_option("gsm8k")
    page.get_by_label("order").select_option("longest")
    page.get_by_label("text").fill("2 times")
    expect(page).to_have_url(re.compile("reward_min=.*text="))
    assert set(page.url.partition("#")[2].split("&")) == {
        "tab=rollouts", "reward_min=0.75", "source=gsm8k", "order=-tokens", "text=2+times",
    }  # fmt: skip
    expect(page.locator(".list li").filter(has_not_text="step 2")).to_have_count(0)
    lengths = [int(text.split(" tokens")[0].split()[-1]) for text in page.locator(".list .facts").all_inner_texts()]
    assert lengths == sorted(lengths, reverse=True) and len(lengths) > 3


@pytest.mark.parametrize(("order", "sign"), [("reward", 1), ("-reward", -1)])
def test_failed_rollouts_are_sorted_last(window: Shown, page_rollouts: list[dict[str, Any]], order: str, sign: int):
    successful = [row for row in page_rollouts if row["status"] == "ok"]
    first = min(successful, key=lambda row: (sign * row["reward"], row["step"], row["group"], row["sample"]))
    page = window.open(f"tab=rollouts&order={order}")
    expect(page.locator(".list .facts > span:nth-child(2)").first).to_have_text(
        f"step {first['step']} · row {first['uid']} · {first['sample']}"
    )
    assert len(successful) < len(page_rollouts)


@pytest.mark.parametrize("view", ["tab=constructor", f"{SAMPLE}&how=toString", f"{SAMPLE}&how=tokens&shade=toString"])
def test_invalid_link_opens_default_view(report_window: Shown, view: str):
    page = report_window.open(view)
    expect(page.locator("figure.chart, .message.user, [data-token='0']").first).to_be_visible()
    assert report_window.bad == []


def test_pages_cover_all_rollouts(window: Shown, page_rollouts: list[dict[str, Any]]):
    page = window.open("tab=rollouts&order=step")
    seen: list[str] = []
    names = [f"step {row['step']} · row {row['uid']} · {row['sample']}" for row in page_rollouts]
    listed = page.locator(".list .facts > span:nth-child(2)")
    for first in range(0, len(page_rollouts), 50):
        expect(page.locator(STATUS)).to_have_text(
            f"{first + 1}–{min(first + 50, len(page_rollouts))} of {len(page_rollouts)}"
        )
        expect(listed).to_have_text(names[first : first + 50])  # rows appear after the range
        seen += listed.all_inner_texts()
        if first + 50 < len(page_rollouts):
            page.get_by_role("button", name="Next page").click()
    assert seen == names
    expect(page.get_by_role("button", name="Next page")).to_be_disabled()


def test_keys_move_across_pages(window: Shown, page_rollouts: list[dict[str, Any]]):
    page = window.open("tab=rollouts&order=step")
    expect(page.locator(STATUS)).to_have_text(f"1–50 of {len(page_rollouts)}")
    page.keyboard.press("j")
    expect(page.get_by_role("heading", name="step 1 · row 1000 · sample 0")).to_be_visible()
    page.keyboard.press("j")
    expect(page.get_by_role("heading", name="step 1 · row 1000 · sample 1")).to_be_visible()
    page.keyboard.press("k")
    expect(page.get_by_role("heading", name="step 1 · row 1000 · sample 0")).to_be_visible()
    page.locator(".list button").last.click()
    page.keyboard.press("j")
    expect(page.locator(STATUS)).to_have_text(f"51–100 of {len(page_rollouts)}")
    expect(page.locator(".list li").first.locator("[aria-current]")).to_have_count(1)
    page.keyboard.press("k")
    expect(page.locator(STATUS)).to_have_text(f"1–50 of {len(page_rollouts)}")
    expect(page.locator(".list li").last.locator("[aria-current]")).to_have_count(1)


def test_shortcuts_change_view_except_while_typing(window: Shown, page_rollouts: list[dict[str, Any]]):
    page = window.open("tab=rollouts")
    expect(page.locator(STATUS)).to_have_text(f"1–50 of {len(page_rollouts)}")
    page.keyboard.press("j")
    expect(page.locator(".sample h2")).to_be_visible()
    for key, shows in (("t", ".tokens"), ("g", ".group article"), ("c", ".conversation .turn")):
        page.keyboard.press(key)
        expect(page.locator(shows).first).to_be_visible()
    page.keyboard.press("/")
    page.keyboard.type("jt?")
    expect(page.get_by_label("text")).to_have_value("jt?")
    expect(page.locator(".conversation .turn").first).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    for key in ("j", "k", "c", "t", "g", "← →", "/", "?", "Escape"):
        expect(page.get_by_role("dialog", name="Keys").get_by_text(key, exact=True)).to_be_visible()
    page.keyboard.press("t")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog", name="Keys")).to_be_hidden()
    expect(page.locator(".conversation .turn").first).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_text("Choose a sample, or press j.")).to_be_visible()


def test_a_link_reopens_the_same_view(window: Shown):
    page = window.open("tab=rollouts")
    page.get_by_label("source").select_option("math")
    expect(page.locator(STATUS)).not_to_contain_text(" of 1")  # the range changes once the filter is applied
    page.locator(".list button").nth(2).click()
    page.get_by_role("button", name="Tokens", exact=True).click()
    page.get_by_label("advantage").check()
    page.locator("[data-token='12']").click()
    page.mouse.move(0, 0)
    heading, facts = page.locator(".sample h2").inner_text(), page.locator("dl.token-facts").inner_text()
    page = window.open(page.url.partition("#")[2])
    expect(page.locator(".sample h2")).to_have_text(heading)
    assert page.locator("dl.token-facts").inner_text() == facts
    expect(page.get_by_label("advantage")).to_be_checked()
    expect(page.get_by_label("source")).to_have_value("math")
    expect(page.locator(".token.chosen")).to_have_attribute("data-token", "12")


def test_back_button_restores_previous_view(window: Shown):
    page = window.open("tab=rollouts")
    page.locator(".list button").first.click()
    heading = page.locator(".sample h2")
    before = heading.inner_text()
    page.locator(".list button").nth(5).click()
    expect(heading).not_to_have_text(before)
    page.go_back()
    expect(heading).to_have_text(before)


def test_token_view_has_values_of_the_batch(window: Shown, runs: list[Path]):
    """The episode has two turns with a tool result between them. Values are compared bitwise."""
    (row,) = RolloutReader(runs[0]).table([1], filter=_named(group=1, sample=1)).to_pylist()
    prompt, ids, vocabulary = len(row["prompt_ids"]), [*row["prompt_ids"], *row["response_ids"]], synthetic_vocabulary()
    page = window.open(f"tab=rollouts&how=tokens&step=1&uid={row['uid']}&group=1&sample=1&token=0")
    expect(page.locator("[data-token]")).to_have_count(len(ids))
    for index, (token, facts) in enumerate(zip(ids, page.evaluate(TOKEN_FACTS), strict=True)):
        own = index - prompt
        sampled = any(turn["start"] <= own < turn["stop"] for turn in row["turns"])
        assert (facts["token"], facts["id"]) == (str(index), str(token))
        assert facts["text"] == vocabulary[token].replace(" ", "·")
        assert facts["in the loss"] == ("yes" if own >= 0 and row["trained"][own] else "no")
        assert _same(facts["log-prob in the engine"], row["rollout_logprobs"][own] if sampled else None)
        for name, column in (("log-prob in the trainer", "old_logprobs"), ("advantage", "advantages")):
            assert _same(facts[name], row[column][own] if own >= 0 else None), (name, index)
    trained = [prompt + own for own, is_trained in enumerate(row["trained"]) if is_trained]
    assert len(row["turns"]) == 2 and 0 < len(trained) < len(row["trained"])
    assert page.eval_on_selector_all(".token.trained", "all => all.map(one => +one.dataset.token)") == trained


def test_pointing_at_token_shows_its_values(report_window: Shown):
    page = report_window.open("tab=rollouts&how=tokens&step=1&uid=1001&group=1&sample=1&token=20")
    facts = page.locator("dl.token-facts")
    expect(facts).to_contain_text("token20")
    page.locator("[data-token='3']").hover()
    expect(facts).to_contain_text("token3id")
    page.mouse.move(5, 5)
    expect(facts).to_contain_text("token20")
    page.locator(".tokens").focus()
    for key, token in (("ArrowRight", 21), ("ArrowRight", 22), ("ArrowLeft", 21)):
        page.keyboard.press(key)
        expect(facts).to_contain_text(f"token{token}")
    assert page.url.endswith("token=21")


@pytest.mark.parametrize("shade", ["logprob", "gap", "advantage"])
def test_token_shading_is_proportional_to_value(report_window: Shown, runs: list[Path], shade: str):
    (row,) = RolloutReader(runs[0]).table([1], filter=_named(group=1, sample=0)).to_pylist()
    engine, trainer = (np.array(row[name], np.float64) for name in ("rollout_logprobs", "old_logprobs"))
    values, min_scale = {
        "logprob": (-engine, 3.0),
        "gap": (trainer - engine, 0.01),
        "advantage": (np.array(row["advantages"]), 1e-6),
    }[shade]
    page = report_window.open(f"tab=rollouts&how=tokens&step=1&uid={row['uid']}&group=1&sample=0&shade={shade}")
    page.locator("[data-token]").first.wait_for()
    read = "all => all.map(one => (one.matches('.negative') ? -1 : 1) * one.style.getPropertyValue('--strength'))"
    strengths = page.eval_on_selector_all("[data-token]", read)
    np.testing.assert_allclose(strengths[16:], values / max(min_scale, np.abs(values).max()), atol=6e-4)
    assert strengths[:16] == [0] * 16


def test_group_view_shows_samples_side_by_side(window: Shown, runs: list[Path]):
    page = window.open("tab=rollouts&how=group&step=2&uid=2003&group=3&sample=4")
    articles = page.locator(".group article")
    expect(articles).to_have_count(8)
    for row in RolloutReader(runs[0]).table([2], ["text", "sample"], pc.field("group") == 3).to_pylist():
        answers = articles.nth(row["sample"]).locator(".assistant > .text-block").all_text_contents()
        assert "".join(answers) == row["text"]
    assert len({round(articles.nth(number).bounding_box()["y"]) for number in range(8)}) == 1
    expect(page.locator(".sample .message.user")).to_have_count(1)
    expect(page.locator("article[aria-current=true]")).to_have_attribute("aria-label", "sample 4")
    articles.nth(1).get_by_role("button").click()
    expect(page.locator(".sample h2")).to_contain_text("sample 1")


@pytest.mark.defect("equal-answers-shown-as-prompt")
def test_report_group_view_handles_equal_responses(browser: Any, tmp_path: Path):
    run = write_run(tmp_path / "run", "alike", steps=2, kept=(1,))
    (file,) = (run / "rollouts").glob("step_*.parquet")
    table = pq.read_table(file)
    numbers = list(zip(table["group"].to_pylist(), table["sample"].to_pylist(), strict=True))
    alike = table.take([numbers.index((group, 1)) for group, _ in numbers])
    pq.write_table(alike.set_column(alike.column_names.index("sample"), "sample", table["sample"]), file)
    with shown(browser, reported([run], tmp_path)) as found:
        page = found.open("tab=rollouts&how=group&step=1&uid=1001&group=1&sample=1")
        articles = page.locator(".group article")
        expect(articles.nth(0).locator(".message h3")).to_have_text(["assistant", "tool", "assistant"])
        expect(articles.locator(".tool-call")).to_have_count(articles.count())
        expect(page.locator(".sample .message.user")).to_have_count(1)


def test_conversation_has_turns_and_calls(window: Shown):
    page = window.open("tab=rollouts&step=1&uid=1001&group=1&sample=1")
    expect(page.locator(".message h3")).to_have_text(["user", "assistant", "tool", "assistant"])
    call = page.locator(".message").nth(1).locator(".tool-call")
    expect(call).to_contain_text("calculator")
    expect(call.locator("div")).to_have_text(["expression17 * 3", "17 * 3"])
    expect(page.locator(".message.assistant .turn")).to_have_count(2)


def test_call_parsed_by_environment_is_shown(window: Shown):
    page = window.open("tab=rollouts&step=2&uid=2001&group=1&sample=1")
    expect(page.locator(".message h3")).to_have_text(["user", "assistant", "tool", "assistant"])
    asks, answer, last = (page.locator(".message").nth(index) for index in (1, 2, 3))
    expect(asks.locator(".tool-call")).to_have_text("call to python timeoutcodeprint(6 * 7)")
    expect(asks.locator(".turn")).to_contain_text("environment 0.25 s")
    expect(answer.locator(".answers")).to_have_text("answer to python")
    expect(answer.locator(".text-block")).to_have_text("42")
    expect(last.locator(".tool-call, .answers")).to_have_count(0)


def _named(*, group: int, sample: int) -> Any:
    return (pc.field("group") == group) & (pc.field("sample") == sample)


def _same(shown: str, value: float | None) -> bool:
    return shown == "–" if value is None else np.float32(shown) == np.float32(value)


def test_printed_address_authorizes_all_tabs(browser: Any, watch_address: str):
    server = watch_address.partition("#")[0]
    context = browser.new_context()
    page = context.new_page()
    page.goto(server)
    expect(page.get_by_role("alert")).to_contain_text("Open the address that skyrl-train watch printed")
    page.goto(watch_address)  # the same document with another fragment
    expect(page.locator(".pulse")).to_contain_text("2 runs")
    assert page.url == server and context.cookies() == []
    page.reload()
    expect(page.locator(".pulse")).to_contain_text("2 runs")
    other = context.new_page()
    other.goto(f"{server}#{SAMPLE}")
    expect(other.locator(".sample h2")).to_contain_text("row 1001")
    context.close()
