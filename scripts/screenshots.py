"""Take the screenshots of the documentation: `skyrl-train watch` of finished runs in Chromium.

    python scripts/screenshots.py QUICKSTART_RUN TOOL_RUN ASYNC_RUN

Each argument is the folder of a run. Writes docs/images/*.png, each of at most MAX_BYTES.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from skyrl_train.environments.tools.browser import PROGRAMS

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
MAX_BYTES = 150_000
SIZE = {"width": 1200, "height": 760}
COLORS = 128
RUNS = ("quickstart", "tools", "async")


@dataclass(frozen=True)
class Picture:
    """A screenshot of some runs: the fragment of the page's URL, and the keys to press there."""

    name: str
    runs: Sequence[str]
    view: str
    keys: str = ""
    token: int | None = None
    """The index of the token to click, or None."""
    dark: bool = False


PICTURES = (
    Picture("overview", ["quickstart"], ""),
    Picture("compare", ["quickstart", "async"], ""),
    Picture("staleness", ["async"], "find=async"),
    Picture("group", ["quickstart"], "tab=rollouts&order=step", "jg"),
    Picture("tokens", ["quickstart"], "tab=rollouts&order=step&step_from=2&tokens_min=20", "jt", token=46),
    Picture("advantages", ["quickstart"], "tab=rollouts&order=step&shade=advantage&tokens_min=20", "jt", 46, dark=True),
    Picture("tool_calls", ["tools"], "tab=rollouts&order=-tokens&reward_min=1", "j"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    for name in RUNS:
        parser.add_argument(name, type=Path, help="a run's folder")
    folders = vars(parser.parse_args())
    IMAGES.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        program = next(filter(None, map(shutil.which, PROGRAMS)), None)
        browser = playwright.chromium.launch(executable_path=program, chromium_sandbox=os.geteuid() != 0)
        for picture in PICTURES:
            with watching([folders[name] for name in picture.runs]) as address:
                image = compress_png(take(browser, address, picture))
            if len(image) > MAX_BYTES:
                sys.exit(f"{picture.name}: has {len(image):,} bytes: must have at most {MAX_BYTES:,} to be committed.")
            (IMAGES / f"{picture.name}.png").write_bytes(image)
            print(f"docs/images/{picture.name}.png: {len(image) / 1000:.0f} kB")
        browser.close()


@contextmanager
def watching(runs: Sequence[Path]) -> Iterator[str]:
    """Run `skyrl-train watch`, and yield the URL that it prints."""
    command = [sys.executable, "-m", "skyrl_train.entrypoints.watch", *map(str, runs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield next(line.strip() for line in process.stdout if re.match(r"http://\S+token=", line))
        finally:
            process.send_signal(signal.SIGINT)


def take(browser: Any, address: str, picture: Picture) -> bytes:
    """Return the screenshot as PNG, image after the page has been drawn."""
    context = browser.new_context(viewport=SIZE, color_scheme="dark" if picture.dark else "light")
    page = context.new_page()
    page.goto(address)
    page.evaluate("view => { location.hash = view }", picture.view)
    page.locator(".list li, figure.chart, table").first.wait_for()
    for key in picture.keys:
        page.keyboard.press(key)
        page.locator(".sample h2").wait_for()
    if picture.token is not None:
        page.locator(f"[data-token='{picture.token}']").click()
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(300)
    image: bytes = page.screenshot()
    context.close()
    return image


def compress_png(png: bytes) -> bytes:
    """Return the PNG with a color palette, which makes it smaller."""
    target = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(COLORS).save(target, "PNG", optimize=True)
    return target.getvalue()


if __name__ == "__main__":
    main()
