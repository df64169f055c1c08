"""The calls of a session in a browser: branches, tool results, tokens, keys, and hostile texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import pyarrow as pa
import pytest

from skyrl_train.report.rollout_files import write_rollouts
from skyrl_train.testing.synthetic_rollouts import synthetic_rollouts
from tests.integration.viewer.conftest import Shown, reported, shown, sync_api
from tests.integration.viewer.test_hostile import HOSTILE, INSPECT, clean
from tests.support.session_rollouts import REASONING, session_group, write_session_rollouts
from tests.support.viewer_runs import write_run

SAMPLE = {"tab": "rollouts", "how": "session", "step": 1, "uid": "7", "group": 0}
SUMMARIES = "call => [call.querySelector('.facts > :nth-child(2)').innerText, call.querySelector('.preview').innerText]"
TEXTS = {"hostile": HOSTILE[:-1], "harmless": ["harmless"], "long": ["harmless"] * 400}
"""Prompt -> the text in all fields of each call. The last hostile text is too long for a report."""
EXPAND_ALL = """async () => {
    const start = performance.now();
    document.querySelector('.session-buttons button').click();
    const count = selector => document.querySelectorAll(selector).length;
    while (count('.call .message') < 3 * count('.call')) await new Promise(requestAnimationFrame);
    return (performance.now() - start) / 1000;
}"""
"""Script that expands all calls and returns the number of seconds until they are shown."""
expect = sync_api.expect


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Reports of a run with real sessions, and of one with a session of each of `TEXTS`."""
    folder = tmp_path_factory.mktemp("sessions")
    real = write_run(folder / "real", "real", steps=2)
    write_session_rollouts(real, 1, [session_group()])
    records = write_run(folder / "records", "records", steps=2)
    table = synthetic_rollouts(len(TEXTS), samples_per_prompt=1, mean_tokens=6)
    table = table.set_column(table.schema.get_field_index("uid"), "uid", pa.array([*TEXTS]))
    sessions = [json.dumps({"calls": [*map(_call, range(len(texts)), texts)]}) for texts in TEXTS.values()]
    write_rollouts(records, 1, table.append_column("session", pa.array(sessions)))
    return {run.name: reported([run], run) for run in (real, records)}


@pytest.fixture(scope="module", autouse=True)
def open_shared_windows_first(addresses: dict[str, str]) -> None:
    """Replace the fixture of the other modules, and call the scripted model before the browser starts."""


@pytest.fixture
def window(addresses: dict[str, str], browser: Any, request: pytest.FixtureRequest) -> Iterator[Shown]:
    with shown(browser, addresses[request.param]) as window:
        yield window


def _call(number: int, text: str) -> dict[str, Any]:
    return {
        "parent": number - 1 if number else None,
        "previous": number - 1 if number else None,
        "messages": [{"role": "tool", "tool_call_id": text, "content": text}, {"role": text[:50], "content": text}],
        "answer": {
            "content": text,
            "reasoning": text,
            "errors": [text],
            "tool_calls": [{"id": text, "name": text, "arguments": {"argument": text, text[:50]: [text]}}],
        },
        "sequence": 0,
        "start": number,
        "stop": number + 1,
        "stop_reason": text,
        "prompt_tokens": 100,
        "retokenized_messages": 1,
    }


@pytest.mark.parametrize("window", ["real"], indirect=True)
def test_calls_are_shown_as_tree(window: Shown):
    page = window.open(urlencode({**SAMPLE, "sample": 0}))
    calls = page.locator(".call")
    expect(calls).to_have_count(6)
    facts = dict(
        page.eval_on_selector_all(
            ".session-facts > div", "all => all.map(one => [...one.children].map(part => part.innerText))"
        )
    )
    assert facts["calls"] == "6" and facts["branches"] == "1" and facts["retokenized messages"] == "0"
    assert facts["malformed tool calls"] == "1" and int(facts["tokens sampled"]) > 100
    labels = page.eval_on_selector_all(".call", f"calls => calls.map({SUMMARIES})")
    parallel = {labels[2][1], labels[3][1]}
    assert parallel == {"The left one.", "The right one."}
    assert labels == [
        ["first call", 'add {"a":1,"b":2}'],
        ["continues call 1", 'add {"a":3,"b":[4]}'],
        ["continues call 2", labels[2][1]],
        ["also continues call 2", labels[3][1]],
        ["branch: history rewritten", "<tool_call> {not JSON} </tool_call>"],
        ["continues call 5", "It is **seven**."],
    ]
    indents = page.eval_on_selector_all(".call", "calls => calls.map(call => call.getBoundingClientRect().x)")
    assert len({*indents[:3]}) == 1 and len({*indents[3:]}) == 1 and indents[3] > indents[0]

    page.keyboard.press("c")
    expect(page.locator(".message")).to_contain_text(["Summary: 7.", "{not JSON}", "Go on.", "seven"])
    expect(page.locator(".message.assistant .turn")).to_have_count(2)
    expect(page.locator(".message.user .answers")).to_have_count(0)
    page.keyboard.press("s")
    calls.nth(0).locator("summary").first.focus()
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    answers = page.locator(".call .message.assistant")
    expect(answers).to_have_count(2)
    expect(answers.nth(0).get_by_text(REASONING)).to_be_hidden()
    answers.nth(0).locator(".reasoning summary").click()
    expect(answers.nth(0).get_by_text(REASONING)).to_be_visible()
    expect(answers.nth(1).locator(".tool-call .text-block")).to_have_text(["3", "[\n  4\n]"])
    expect(calls.nth(1).locator(".message.tool .answers")).to_have_text("answer to add")
    expect(answers.nth(1)).to_contain_text("in the loss · advantage 0.5")
    page.get_by_role("button", name="Expand all").click()
    expect(answers).to_have_count(6)
    expect(calls.nth(4)).to_contain_text("The tool call is not valid JSON")
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.set_viewport_size({"width": 1200, "height": 800})
    answers.nth(5).get_by_role("button", name="Show tokens").click()
    expect(page.locator("[data-token].chosen")).to_have_text("I")
    marks = page.locator(".tokens .marker").all_inner_texts()
    assert sorted(mark for mark in marks if mark.startswith("call")) == [f"call {number}" for number in range(1, 7)]
    assert marks[-2:] == ["call 5", "call 6"] and marks.count("new prompt") == 2


@pytest.mark.parametrize("window", ["real"], indirect=True)
def test_failed_sessions_show_reason(window: Shown):
    page = window.open(urlencode({**SAMPLE, "sample": 1}))
    expect(page.locator(".failure")).to_contain_text("agent_crashed")
    expect(page.locator(".failure")).to_contain_text('File "<agent>", line 1\n␛[31mKeyError')
    expect(page.locator(".call")).to_contain_text("not in the loss")
    page.keyboard.press("j")
    expect(page.locator(".failure")).to_contain_text("no_call")
    expect(page.get_by_text("The program made no call.")).to_be_visible()


@pytest.mark.parametrize("window", ["records"], indirect=True)
def test_hostile_session_is_shown_as_text(window: Shown):
    names = {}
    for group, uid in ((1, "harmless"), (0, "hostile")):
        page = window.open(urlencode({**SAMPLE, "uid": uid, "group": group, "sample": 0, "markdown": "off"}))
        expect(page.locator(".call")).to_have_count(len(TEXTS[uid]))
        page.evaluate(EXPAND_ALL)
        texts, counts, bad = page.evaluate(
            INSPECT, ".call .message > .text-block, .reasoning > .text-block, .tool-call b"
        )
        names[uid] = {*counts}
        assert bad == []
    assert texts == [clean(text) for text in TEXTS["hostile"] for _ in range(5)]
    assert names["hostile"] == names["harmless"]


@pytest.mark.parametrize("window", ["records"], indirect=True)
def test_hundreds_of_calls_stay_fast(window: Shown):
    page = window.open(urlencode({**SAMPLE, "uid": "long", "group": 2, "sample": 0}))
    expect(page.locator(".call")).to_have_count(400)
    expect(page.locator(".call .message")).to_have_count(0)
    assert page.evaluate(EXPAND_ALL) < 5
