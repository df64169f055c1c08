"""The documentation site builds without warnings, loads nothing from other hosts, and fits narrow and wide screens."""

from __future__ import annotations

import functools
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import urljoin

import pytest
from playwright.sync_api import Page, sync_playwright

from scripts import docs_hooks
from skyrl_train.config.keys import value_keys
from skyrl_train.environments.tools.browser import PROGRAMS

REPOSITORY = Path(__file__).resolve().parents[3]
DOCS = REPOSITORY / "docs"
PAGES = sorted(
    (path.parent if path.stem == "index" else path.with_suffix("")).relative_to(DOCS).as_posix()
    for path in DOCS.rglob("*.md")
)
"""Addresses of the pages in `docs`, relative to the site."""
RECIPES = sorted(f"recipes/{path.parent.name}" for path in REPOSITORY.glob("examples/*/README.md"))
"""Addresses of the pages that the hooks of mkdocs.yml make from the examples."""
URL = "https://git.example.com/owner/name"
"""Address of a repository that the site links to."""
CHROMIUM = next((path for name in PROGRAMS if (path := shutil.which(name))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: run scripts/browser_tools")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site. mkdocs.yml makes every warning an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = os.environ | {"DOCS_REPOSITORY": URL}
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """URL of a server for the site."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_site_has_all_pages_and_recipes(site: Path):
    built = {path.parent.relative_to(site).as_posix() for path in site.glob("**/index.html")}
    assert built == {*PAGES, *RECIPES, "recipes"}


def test_navigation_lists_every_recipe_once():
    pages = []
    for entry in docs_hooks.recipe_navigation():
        pages += [entry] if isinstance(entry, str) else [page for group in entry.values() for page in group]
    assert sorted(pages) == sorted(docs_hooks.RECIPES)


@pytest.mark.parametrize(
    ("page", "source"),
    [
        (".", "docs/index.md"),
        ("guides/tools", "docs/guides/tools.md"),
        ("recipes", "examples/README.md"),
        ("recipes/gsm8k", "examples/gsm8k/README.md"),
    ],
)
def test_edit_links_name_the_source(site: Path, page: str, source: str):
    html = (site / page / "index.html").read_text()
    (link,) = re.findall(r'<a href="?([^\s">]+)"? title="Edit this page"', html)
    assert urljoin(link, link) == f"{URL}/edit/main/{source}" and (REPOSITORY / source).is_file()


def test_links_work_on_site_and_in_repository():
    text = "[a](../../docs/guides/tools.md#arguments) [b](../quickstart/README.md) [c](../) [`d`](gsm8k.yaml) `[e](x)`"
    assert docs_hooks.rewrite_links(text, "recipes/gsm8k.md", URL) == (
        f"[a](../guides/tools.md#arguments) [b](quickstart.md) [c](index.md) "
        f"[`d`]({URL}/blob/main/examples/gsm8k/gsm8k.yaml) `[e](x)`"
    )
    text = "[a](../../examples/gsm8k/README.md) [b](../../pyproject.toml) [c](metrics.md) [d](https://x.org)"
    assert docs_hooks.rewrite_links(text, "reference/api.md", None) == (
        "[a](../recipes/gsm8k.md) b [c](metrics.md) [d](https://x.org)"
    )


@pytest.mark.parametrize(
    ("remote", "url"),
    [
        ("git@github.com:owner/name.git", "https://github.com/owner/name"),
        ("ssh://git@git.example.com:2222/group/sub/name.git", "https://git.example.com/group/sub/name"),
        ("https://user:secret@gitlab.com/owner/name", "https://gitlab.com/owner/name"),
        ("https://git.example.com:8443/owner/name.git", "https://git.example.com:8443/owner/name"),
        ("/srv/git/name.git", None),
        ("", None),
    ],
)
def test_repository_url_comes_from_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: str, url: str | None
):
    monkeypatch.delenv("DOCS_REPOSITORY", raising=False)
    monkeypatch.setattr(docs_hooks, "REPOSITORY", tmp_path)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    if remote:
        subprocess.run(["git", "-C", str(tmp_path), "remote", "add", "origin", remote], check=True)
    assert docs_hooks.repository_url() == url


def test_pages_load_nothing_from_other_hosts(site: Path):
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|iframe)[^>]*\ssrc=\"?([^\s\">]+)", page.read_text())
        loaded += re.findall(r"<link[^>]*rel=\"?stylesheet\"?[^>]*href=\"?([^\s\">]+)", page.read_text())
        loaded += re.findall(r"<link[^>]*href=\"?([^\s\">]+)\"?[^>]*rel=\"?(?:stylesheet|preconnect)", page.read_text())
        assert [address for address in loaded if "//" in address] == [], page.name


@pytest.fixture(scope="module")
def page(address: str) -> Iterator[Page]:
    """A page of Chromium. Asserts at the end that it only sent requests to the site."""
    with sync_playwright() as playwright:
        with playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"]) as browser:
            page = browser.new_page()
            requested: list[str] = []
            page.on("request", lambda request: requested.append(request.url))
            yield page
    assert [url for url in requested if not url.startswith((address, "data:"))] == []


@needs_chromium
def test_key_filter_searches_names_and_descriptions(page: Page, address: str):
    page.goto(f"{address}/reference/configuration/algorithm/")
    box, rows = page.locator(".key-filter"), page.locator("article tbody tr:visible")
    everything = rows.count()
    assert f"Filter {everything} keys" in str(box.get_attribute("placeholder"))
    box.fill("trainer.algorithm. clip high")
    found = rows.locator("td:first-child").all_inner_texts()
    assert "eps_clip_high" in found and len(found) < 12 < everything
    headings = page.locator("article h2:visible").all_inner_texts()
    assert "trainer.algorithm.sft" not in headings, "sections without a match are hidden"
    box.fill("")
    assert rows.count() == everything
    page.goto(f"{address}/reference/configuration/skyrl_keys/")
    box.fill("hf_export_config")
    assert rows.count() == 1, "a key of SkyRL that is not accepted is found, too"


@needs_chromium
def test_filter_of_first_page_finds_every_key(page: Page, address: str):
    page.goto(f"{address}/reference/configuration/")
    box, names = page.locator(".key-filter"), page.locator("article tbody td:last-child code:visible")
    assert f"Filter {len(value_keys())} keys" in str(box.get_attribute("placeholder"))
    box.fill("policy.optimizer lr")
    assert names.all_inner_texts() == ["lr"]
    page.locator("article tbody a:visible").click()
    assert page.url.endswith("/reference/configuration/policy/#trainerpolicyoptimizer_config")
    assert page.locator("[id='trainerpolicyoptimizer_config']").inner_text().startswith("trainer.policy.optimizer")


@needs_chromium
def test_search_finds_key_by_full_name(page: Page, address: str):
    page.goto(f"{address}/")
    # The theme listens to key presses, and may miss text that is filled in at once.
    page.locator("[data-md-component=search-query]").press_sequentially("trainer.algorithm.eps_clip_low")
    found = page.locator(".md-search-result__item")
    found.first.wait_for(timeout=30_000)
    assert any("Algorithm keys" in text for text in found.all_inner_texts())


@needs_chromium
def test_other_pages_have_no_key_filter(page: Page, address: str):
    backgrounds = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.goto(f"{address}/concepts/algorithms/")
        backgrounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(set(backgrounds)) == 2
    assert page.locator(".key-filter").count() == 0


LONG = {"reference/error_messages"}
"""Pages that are allowed to be longer than 12,000 px."""


@needs_chromium
@pytest.mark.slow
def test_no_page_is_longer_than_12000_pixels(page: Page, address: str):
    assert page.context.browser is not None
    with page.context.browser.new_context(
        viewport={"width": 1440, "height": 900},
        java_script_enabled=False,  # the site's scripts take most of the time and change no height
    ) as context:
        static = context.new_page()
        heights = {}
        for name in {*PAGES, *RECIPES, "recipes"} - LONG:
            static.goto(f"{address}/{name}/")
            heights[name] = static.evaluate("document.documentElement.scrollHeight")
    assert {name: height for name, height in heights.items() if height > 12_000} == {}


FORMULAS = ["concepts/algorithms", "concepts/async", "reference/graders", "torchrl/losses"]
"""Pages with formulas, which are inline code."""
SCROLLABLE = {"contributing/benchmarks", "guides/gpu", "guides/larger_models", "guides/report", "reference/models"} | {
    page for page in PAGES if page.startswith("reference/configuration")
}
"""Pages whose tables may scroll on wide screens, too: they have many columns, or keys and addresses without breaks."""
BOXES = "article :is(code, p, li, table, .md-typeset__scrollwrap)"
OVERFLOWING = """([boxes, mayScroll]) => [...document.querySelectorAll(boxes)].filter(box => {
  const style = getComputedStyle(box);
  if (style.display === "inline") {
    const within = box.closest("td, th, p, li, pre") ?? box.parentElement;
    return within.tagName !== "PRE" && box.getBoundingClientRect().right > within.getBoundingClientRect().right + 5;
  }
  const scrolls = ["auto", "scroll"].includes(style.overflowX);
  return box.scrollWidth > box.clientWidth + 5 && !(scrolls && (mayScroll || box.tagName === "CODE"));
}).map(box => `${box.tagName} ${box.scrollWidth} in ${box.clientWidth}: ${box.textContent.trim().slice(0, 40)}`)"""
"""Script that lists contents wider than their box, with 5 px for the padding of inline code."""


def overflowing_boxes(page: Page, address: str, names: Iterable[str], width: int) -> list[str]:
    page.set_viewport_size({"width": width, "height": 800})
    found = []
    for name in names:
        page.goto(f"{address}/{name}/")
        if page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"):
            found.append(f"{name} is wider than the screen")
        found += [f"{name}: {box}" for box in page.evaluate(OVERFLOWING, [BOXES, width < 1000 or name in SCROLLABLE])]
    return found


@needs_chromium
@pytest.mark.parametrize("width", [390, 1280])
def test_formulas_fit_into_their_boxes(page: Page, address: str, width: int):
    """Tables with formulas may scroll horizontally on a phone."""
    assert overflowing_boxes(page, address, FORMULAS, width) == []


@needs_chromium
@pytest.mark.on_demand
@pytest.mark.parametrize("width", [390, 1280])
def test_all_pages_fit_the_screen(page: Page, address: str, width: int):
    assert overflowing_boxes(page, address, PAGES, width) == []
