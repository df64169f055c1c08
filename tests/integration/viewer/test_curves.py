"""Curves, diagnosis and the comparison of runs in a browser."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.integration.viewer.conftest import Shown, shown, sync_api, watching
from tests.support.viewer_runs import metric_lines, write_run, write_step

PIXELS = """canvas => {
    const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    const seen = {};
    for (let i = 0; i < data.length; i += 4) {
        const color = data.slice(i, i + 3).join();
        if (data[i + 3] > 250) seen[color] = (seen[color] || 0) + 1;
    }
    return seen;
}"""
BAND = """canvas => {
    const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    let seen = 0;
    for (let i = 0; i < data.length; i += 4) {
        const near = [59, 130, 246].every((value, at) => Math.abs(data[i + at] - value) < 12);
        if (near && data[i + 3] > 20 && data[i + 3] < 100) seen++;
    }
    return seen;
}"""
"""Script that counts translucent pixels in the first run's color."""
CURVES = Path(__file__).parents[3] / "viewer" / "src" / "curves.ts"
FIRST, SECOND = "59,130,246", "249,115,22"
DARK, LIGHT = "rgb(20, 23, 27)", "rgb(255, 255, 255)"
expect = sync_api.expect


def chart(page: Any, title: str) -> Any:
    return page.locator("figure.chart").filter(has=page.get_by_text(title, exact=True)).first


def test_curves_of_two_runs_share_chart_and_legend(window: Shown):
    page = window.open()
    last = [metric_lines(steps, seed)[-1]["reward/mean"] for steps, seed in ((40, 0), (30, 1))]
    values = chart(page, "reward/mean").locator(".values li")
    expect(values).to_have_text([f"{name} {value:.4g}" for name, value in zip(("first", "second"), last, strict=True)])
    expect(chart(page, "evaluation by source").locator(".values li")).to_have_count(4)
    page.get_by_role("group", name="Runs").get_by_label("second").uncheck()
    expect(values).to_have_count(1)
    expect(page.locator("figure.chart", has_text="time of a step by part")).to_have_count(1)
    page = window.open(page.url.partition("#")[2])
    expect(page.get_by_role("group", name="Runs").get_by_label("second")).not_to_be_checked()


def test_slider_smooths_each_run_s_line(report_window: Shown):
    page = report_window.open("smooth=0")
    canvas = chart(page, "policy/grad_norm").locator("canvas")
    raw = canvas.evaluate(PIXELS)
    assert raw[FIRST] > 200 and raw[SECOND] > 150
    page.get_by_label("Smoothing").press("End")
    expect(page.locator("output")).to_have_text("0.99")
    assert 100 < canvas.evaluate(PIXELS)[FIRST] < 0.9 * raw[FIRST], "a smooth line is a shorter one"
    assert "smooth=0.99" in page.url


def test_all_main_curves_are_drawn(window: Shown):
    """The main section includes curves of asynchronous runs, mismatch, throughput and memory."""
    (main,) = re.findall(r"const MAIN = \[(.*?)\];", CURVES.read_text(encoding="utf-8"), re.DOTALL)
    names = ["evaluation by source" if "*" in name else name for name in re.findall(r'"(.+?)"', main)]
    page = window.open("smooth=0")
    section = page.locator("details.section").first
    parts = [f"time of a step by part, s · {run}" for run in ("first", "second")]
    expect(section.locator("figcaption")).to_have_text([*names, *parts])
    for canvas in section.locator("figure.chart canvas").all()[: len(names)]:
        seen = canvas.evaluate(PIXELS)
        assert seen.get(FIRST, 0) > 20 and seen.get(SECOND, 0) > 20
    for canvas in section.locator("figure.chart canvas").all()[len(names) :]:
        assert sum(count for color, count in canvas.evaluate(PIXELS).items() if count > 500) > 20_000, "areas"


def test_reward_quantiles_are_bands_around_mean(window: Shown):
    page = window.open("zoom=1~3&smooth=0&find=mean")
    names = ("reward/mean", "async/staleness_mean")
    banded, plain = (chart(page, name).locator("canvas").evaluate(BAND) for name in names)
    assert banded > 5_000 and plain < 0.1 * banded


def test_pointing_at_step_shows_its_values(report_window: Shown):
    page = report_window.open()
    figure = chart(page, "policy/entropy")
    figure.locator(".u-over").hover(position={"x": 100, "y": 50})
    expect(figure.locator(".values li")).to_have_count(3)
    point, *texts = figure.locator(".values li").all_inner_texts()
    step = int(point.removeprefix("step "))
    assert 0 < step < 30
    values = [metric_lines(steps, seed)[step]["policy/entropy"] for steps, seed in ((40, 0), (30, 1))]
    assert [float(text.split()[-1]) for text in texts] == pytest.approx(values, rel=1e-3)


def test_zoom_into_steps_and_back(report_window: Shown):
    page = report_window.open()
    box = chart(page, "reward/mean").locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + 40, box["y"] + 30)
    page.mouse.down()
    page.mouse.move(box["x"] + 140, box["y"] + 30, steps=4)
    page.mouse.up()
    page.wait_for_url("**zoom=*")
    page.get_by_role("button", name="Show all steps").click()
    assert "zoom" not in page.url


def test_search_finds_metrics_by_substring(window: Shown):
    page = window.open()
    expect(page.locator("figure.chart").first).to_be_visible()
    page.keyboard.press("/")
    page.keyboard.type("GRAD")
    expect(page.locator("figcaption")).to_have_text(
        ["policy/grad_norm", "policy/grad_norm"]
    )  # in the sections main and policy
    page.get_by_label("Find").fill("nothing")
    expect(page.get_by_text("No metric has “nothing” in its name.")).to_be_visible()


def test_differing_keys_and_findings_are_shown(window: Shown):
    page = window.open("tab=runs")
    row = page.locator("table.differing tbody tr", has_text="trainer.policy.optimizer_config.lr")
    expect(row.locator("td")).to_have_text(["1e-06", "3e-06"])
    page.get_by_role("button", name="Diagnosis 2").click()
    expect(page.locator(".finding.holds")).to_have_count(2)
    expect(page.locator(".finding").first).to_contain_text("60% of the responses were truncated")
    expect(page.locator(".finding").first).to_contain_text("generator.sampling_params.max_generate_length")


def test_theme_follows_system_until_chosen(browser: Any, report_address: str):
    with shown(browser, report_address, color_scheme="dark") as window:
        page = window.page
        back = page.locator("body")
        expect(back).to_have_css("background-color", DARK)
        page.emulate_media(color_scheme="light")
        expect(back).to_have_css("background-color", LIGHT)
        page.get_by_label("Theme").select_option("dark")
        expect(back).to_have_css("background-color", DARK)
        assert page.evaluate("Object.values(localStorage)") == ["dark"]
        # Chromium stores a file's local storage with a delay; a page that is reloaded earlier finds none.
        for _ in range(20):
            page.reload()
            if back.evaluate("body => getComputedStyle(body).backgroundColor") == DARK:
                break
            page.wait_for_timeout(250)
        expect(back).to_have_css("background-color", DARK)
        page.get_by_label("Theme").select_option("system")
        expect(back).to_have_css("background-color", LIGHT)


@pytest.mark.parametrize("view", ["", "tab=rollouts&step=1&uid=1001&group=1&sample=1&how=group", "tab=runs"])
def test_narrow_window_needs_no_horizontal_scrolling(browser: Any, report_address: str, view: str):
    with shown(browser, f"{report_address}#{view}") as window:
        window.page.set_viewport_size({"width": 1000, "height": 700})
        window.page.locator("main > *").first.wait_for()
        assert window.page.evaluate("document.documentElement.scrollWidth") <= 1000


def test_new_steps_of_active_run_appear(browser: Any, tmp_path: Path):
    run = write_run(tmp_path / "live", "live", steps=12, kept=(11, 12))
    line = metric_lines(13, 0)[-1]
    with watching([run]) as address, shown(browser, address) as window:
        page = window.open("tab=rollouts")
        expect(page.locator(".pulse")).to_contain_text("step 12")
        expect(page.locator(".pager [role=status]")).to_have_text("1–50 of 128")
        write_step(run, 13)
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        expect(page.locator(".pulse")).to_contain_text("step 13")
        expect(page.locator(".pager [role=status]")).to_have_text("1–50 of 192")
        expect(page.locator(".list li").first).to_contain_text("step 13")
        page.get_by_role("button", name="Curves").click()
        expect(chart(page, "policy/entropy").locator(".values")).to_contain_text(f"{line['policy/entropy']:.4g}")


@pytest.mark.defect("unreadable-run-hides-other-curves")
def test_unreadable_run_does_not_hide_others(browser: Any, tmp_path: Path):
    good, bad = (write_run(tmp_path / name, name, steps=4) for name in ("good", "bad"))
    (bad / "metrics.jsonl").unlink()
    (bad / "metrics.jsonl").mkdir()
    with watching([bad, good]) as address, shown(browser, address) as window:
        expect(chart(window.page, "reward/mean").locator(".values li")).to_have_count(1)
        expect(window.page.get_by_role("alert")).to_be_visible()
        window.bad.clear()  # the browser reports the response with status 500
