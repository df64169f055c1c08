"""Texts of models, tools and users' code are shown as text: nothing runs or becomes an element."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pyarrow as pa
import pytest

from skyrl_train.report.rollout_files import write_rollouts, write_vocabulary
from skyrl_train.testing.synthetic_rollouts import synthetic_rollouts, synthetic_vocabulary
from tests.integration.viewer.conftest import Shown, reported, shown, sync_api, watching
from tests.support.viewer_runs import with_messages, write_run

RUN = "window.hacked=1;alert(1)"
HOSTILE = [
    f"<script>{RUN}</script>",
    f"</script><script>{RUN}</script>",
    f"</SCRIPT ><svg/onload={RUN}>",
    f"<!--<script>--></script><script>{RUN}</script>",
    f"<img src=x onerror={RUN}>",
    "<img src='http://198.51.100.7/pixel.png'>",
    f"<svg onload={RUN}><animate onbegin={RUN} attributeName=x></svg>",
    "<iframe srcdoc='<script>parent.hacked=1</script>'></iframe>",
    f"<iframe src='javascript:{RUN}'></iframe>",
    f"<a href='javascript:{RUN}'>click</a>",
    f"<details open ontoggle={RUN}>x</details>",
    "<style>body{display:none}</style>",
    "<link rel=stylesheet href=http://198.51.100.7/style.css>",
    "<meta http-equiv=refresh content='0;url=http://198.51.100.7/'>",
    "<base href=http://198.51.100.7/>",
    f"<form action=http://198.51.100.7/><input name=q autofocus onfocus={RUN}></form>",
    f"<math><mtext><table><mglyph><style><img src=x onerror={RUN}>",
    f"<template><script>{RUN}</script></template>",
    f"<video><source onerror={RUN}></video>",
    "</div></body></html>",
    "<dialog open>really?</dialog>",
    f"\" onmouseover=\"{RUN}\" x=\"",
    f"' onfocus='{RUN}' autofocus='",
    f"javascript:{RUN}",
    "https://198.51.100.7/steal?cookie",
    "[link](https://198.51.100.7/) ![picture](https://198.51.100.7/p.png)",
    f"{{{{constructor.constructor('{RUN}')()}}}}",
    f"${{{RUN}}} <%= 7*7 %> {{% raw %}} #{{7*7}}",
    '{"__proto__": {"hacked": 1}, "constructor": null}',
    "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x1b[2J\x1b[1;1H \x9b31m",
    "before\x00after \x08\x08\x08 \x7f \x85",
    "\r\nSet-Cookie: hacked=1\r\n\r",
    "user\u202egnp.exe\u202c \u2066isolate\u2069 \u200frtl\u200e \u061c",
    "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627 mixed 123",
    "line\u2028separator\u2029paragraph",
    "lone \ud800 high, low \udc00, reversed \udfff\ud800",
    "zero\u200bwidth\u00adsoft\ufeffmark\u2060joiner\u180e",
    "tags \U000e0041\U000e0042\U000e007f variation \U000e0100",
    "Z\u0335\u0321\u0322\u0334" + "\u0300" * 200 + " zalgo",
    "x" * 60_000 + f"<script>{RUN}</script>",
]  # fmt: skip
ROWS = 48
INSPECT = """selector => {
    const read = node => node.nodeType === Node.TEXT_NODE ? node.data
        : node.matches('.hidden-sign') ? String.fromCodePoint(parseInt(node.title.slice(2), 16))
        : node.matches('button.more') ? '' : [...node.childNodes].map(read).join('');
    const all = [...document.querySelectorAll('*:not(.hidden-sign)')];
    const bad = all.flatMap(one => [...one.attributes]
        .filter(({ name, value }) => /^(on|href$|src|action$)/.test(name) && value !== 'data:,')
        .map(({ name }) => `${one.localName} ${name}`));
    if (window.hacked) bad.push('hacked');
    const counted = {};
    for (const { localName } of all) counted[localName] = (counted[localName] || 0) + 1;
    return [[...document.querySelectorAll(selector)].map(read), counted, bad];
}"""
"""Script that returns the texts of elements with signs decoded, the number of elements by name, and forbidden ones."""
RENDERED = {
    *("bdi", "blockquote", "code", "del", "div", "em", "hr", "li", "p", "pre"),
    *("span", "strong", "table", "td", "th", "tr", "ul"),
}
"""Elements that rendered Markdown may consist of."""
expect = sync_api.expect


def clean(text: str) -> str:
    """Return the text with U+FFFD for lone surrogates, as servers and files have it."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


NAMES = [clean(text)[:200] for text in HOSTILE]
"""Names of rows, sources and metrics, in a form that a table can hold."""


def hostile_run(run: Path) -> Path:
    """Write a run in which each hostile text fills all fields of one rollout, followed by harmless rollouts."""
    texts = [*HOSTILE, *["harmless"] * (ROWS - len(HOSTILE))]
    names = [*NAMES, *[f"harmless {row}" for row in range(len(HOSTILE), ROWS)]]
    write_run(run, NAMES[0] + NAMES[32], steps=12)
    lines = [{"step": step, "time": 1.8e9, **{f"own/{name}": step + 0.5 for name in NAMES}} for step in range(13)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = with_messages(
        synthetic_rollouts(ROWS, 1, samples_per_prompt=1, mean_tokens=6), [conversation(text) for text in texts]
    )
    turns = [[{**row[-1], "start": 0}] for row in table["turns"].to_pylist()]
    ids = [[index + 1, *row[1:]] for index, row in enumerate(table["response_ids"].to_pylist())]
    replaced = {
        "turns": pa.array(turns, table.schema.field("turns").type),
        "response_ids": pa.array(ids, table.schema.field("response_ids").type),
        "env_extras": pa.array([json.dumps({"ground_truth": text}) for text in texts]),
        "env_metrics": pa.array([json.dumps({name: 1.0}) for name in names]),
        **{column: pa.array(names) for column in ("uid", "data_source", "stop_reason", "error", "detail")},
    }
    for column, values in replaced.items():
        table = table.set_column(table.schema.get_field_index(column), column, values)
    write_rollouts(run, 1, table)
    write_vocabulary(run, ["<end>", *map(clean, texts), *synthetic_vocabulary()[1 + ROWS :]])
    return run


def conversation(text: str) -> list[dict[str, Any]]:
    call = {"function": {"name": text, "arguments": json.dumps({"argument": text})}}
    return [
        {"role": "system", "content": [{"type": "text", "text": text}, {"type": "image_url", "image_url": text}]},
        {"role": "user", "content": text, text[:50]: text},
        {"role": "assistant", "content": text, "reasoning_content": text, "tool_calls": [call]},
        {"role": text[:50], "content": text},
        {"role": "assistant", "content": f"before {text} after"},
    ]


@pytest.fixture(scope="module", autouse=True)
def hostile_windows(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Shown]]:
    folder = tmp_path_factory.mktemp("hostile")
    run = hostile_run(folder / "run")
    with watching([run]) as address:
        with shown(browser, address) as watched, shown(browser, reported([run], folder)) as report:
            yield {"watch": watched, "report": report}


def test_rendered_markdown_has_only_harmless_elements(hostile_windows: dict[str, Shown]):
    window = hostile_windows["report"]
    page = window.open("tab=rollouts")
    expect(page.locator(".list li")).to_have_count(ROWS)
    rendered = 0
    for row, name in enumerate(NAMES):
        view = {"tab": "rollouts", "step": 1, "uid": name, "group": row, "sample": 0}
        page.evaluate("hash => { location.hash = hash }", urlencode(view))
        expect(page.locator(f".list li:nth-child({row + 1}) [aria-current]")).to_have_count(1)
        expect(page.locator(".sample .message")).to_have_count(5)
        assert page.evaluate(INSPECT, "h1")[2] == []
        names = page.eval_on_selector_all(".rendered *", "all => all.map(one => one.localName)")
        assert {*names} <= RENDERED, row
        rendered += len(names)
    assert rendered > 100
    assert window.bad == []


@pytest.mark.parametrize("kind", [pytest.param("watch", marks=pytest.mark.on_demand), "report"])
def test_model_output_never_becomes_element_or_script(hostile_windows: dict[str, Shown], kind: str):
    assert len(HOSTILE) == len(set(HOSTILE)) == 40
    window = hostile_windows[kind]
    page = window.open("tab=rollouts")
    expect(page.locator(".list li")).to_have_count(ROWS)
    elements = None
    for row, (text, name) in reversed([*enumerate(zip([*HOSTILE, "harmless"], [*NAMES, "harmless 40"], strict=True))]):
        view = {"tab": "rollouts", "step": 1, "uid": name, "group": row, "sample": 0, "markdown": "off"}
        page.evaluate("hash => { location.hash = hash }", urlencode(view))
        expect(page.locator(f".list li:nth-child({row + 1}) [aria-current]")).to_have_count(1)
        expect(page.locator(".sample .message")).to_have_count(5)
        if len(text) > 50_000:
            page.locator(".sample summary").click()
        while len(text) > 50_000 and page.locator(".more").count():
            page.locator(".more").first.click()
        texts, counts, bad = page.evaluate(INSPECT, ".message > .text-block")
        picture = json.dumps({"type": "image_url", "image_url": clean(text)}, ensure_ascii=False, indent=2)
        assert texts == [f"{clean(text)}\n{picture}", *[clean(text)] * 3, f"before {clean(text)} after"], row
        assert bad == []
        elements = elements or counts  # the elements around the harmless text
        assert counts == elements, row

        page.mouse.move(0, 0)
        page.evaluate("hash => { location.hash = hash }", urlencode({**view, "how": "tokens", "token": 16}))
        expect(page.locator("dl.token-facts")).to_contain_text("token16id")
        (token,), _, bad = page.evaluate(INSPECT, "[data-token='16']")
        assert token.replace("↵\n", "\n") == clean(text)
        assert bad == []
    assert window.bad == []


@pytest.mark.parametrize("kind", ["watch", "report"])
def test_names_are_shown_as_text(hostile_windows: dict[str, Shown], kind: str):
    window = hostile_windows[kind]
    page = window.open()
    page.locator("summary", has_text="own").click()
    captions = page.locator("figcaption")
    expect(captions).to_have_count(40)
    texts, _, bad = page.evaluate(INSPECT, "figcaption")
    assert sorted(texts) == sorted(f"own/{name}" for name in NAMES)
    assert bad == []
    assert page.evaluate(INSPECT, "h1")[0] == [NAMES[0] + NAMES[32]]
    page = window.open("tab=rollouts")
    expect(page.locator("label", has_text=re.compile("^source")).locator("option")).to_have_count(1 + ROWS)
    assert page.evaluate(INSPECT, "option")[2] == []
    assert window.bad == []


def test_escapes_and_bidi_controls_are_visible(hostile_windows: dict[str, Shown]):
    page = hostile_windows["report"].open(
        urlencode({"tab": "rollouts", "step": 1, "uid": NAMES[29], "group": 29, "sample": 0})
    )
    shown_text = page.locator(".message.user > .text-block").inner_text()
    assert shown_text.startswith("␛[31mred␛[0m ␛]0;title␇ ␛[2J␛[1;1H")
    page = hostile_windows["report"].open(
        urlencode({"tab": "rollouts", "step": 1, "uid": NAMES[32], "group": 32, "sample": 0})
    )
    assert "userU+202Egnp.exeU+202C" in page.locator(".message.user > .text-block").inner_text()


ADD_ELEMENT = """([name, content]) => {
    const added = document.createElement(name);
    if (name === 'script') added.textContent = content;
    else for (const [key, value] of Object.entries(content)) added.setAttribute(key, value);
    document.body.append(added);
    return new Promise(resolve => setTimeout(() => resolve(window.injected ?? null), 50));
}"""


def test_page_policy_blocks_injected_scripts(browser: Any, tmp_path: Path):
    run = write_run(tmp_path / "run", "run", steps=3)
    context = browser.new_context()
    refused: list[str] = []
    page = context.new_page()
    page.on("console", lambda message: refused.append(message.text))
    page.goto(reported([run], tmp_path))
    sync_api.expect(page.locator("figure.chart").first).to_be_visible()
    assert refused == []
    for element in (
        ["script", "window.injected = 1"],
        ["img", {"src": "x", "onerror": "window.injected = 1"}],
        ["img", {"src": "http://198.51.100.7/x.png"}],
        ["iframe", {"srcdoc": "<script>parent.injected = 1</script>"}],
    ):
        assert page.evaluate(ADD_ELEMENT, element) is None
    assert page.evaluate("fetch('http://198.51.100.7/').then(() => 'answered', () => 'refused')") == "refused"
    assert sum("Content Security Policy" in text for text in refused) >= 4
    context.close()
