"""The page of `report` and `watch` as one HTML file. viewer/ builds its script and style, which a wheel brings along."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from skyrl_train.errors import ConfigError

FOLDER = Path(__file__).with_name("page")
SCRIPT, STYLE = FOLDER / "page.js", FOLDER / "page.css"
CHECKOUT = Path(__file__).resolve().parents[2]
_BUILD_S = 300
_HTML = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="referrer" content="no-referrer">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>skyrl-train</title>
<style>{style}</style>
</head>
<body>
<div id="page"></div>
<script type="application/json" id="data"></script>
<script>{script}</script>
</body>
</html>
"""


def page() -> str:
    """The HTML. It shows what is in its element `data`, and while that is empty, what /api says of where it came from.

    In a checkout the script and the style are built with npm first, if what they are made of is newer. Raises
    ConfigError if they are not there and cannot be built.
    """
    _ensure_built()
    style, script = STYLE.read_text(encoding="utf-8"), SCRIPT.read_text(encoding="utf-8")
    return _HTML.format(style=style, script=script)


def _ensure_built() -> None:
    build = CHECKOUT / "scripts" / "viewer"
    if not _old() or not build.is_file():
        _check(f"this installation lacks {FOLDER}: install a wheel, which has it, or build it in a checkout")
        return
    if shutil.which("npm") is None:
        _check("npm builds it, and is not on PATH: install Node.js 20 or later")
        return
    with _alone():
        if not _old():  # another process has built it meanwhile
            return
        done = subprocess.run([build], capture_output=True, text=True, timeout=_BUILD_S)
        if done.returncode != 0:
            raise ConfigError(
                f"the page of reports cannot be built; {build} said: {(done.stdout + done.stderr)[-2000:]}"
            )


def _check(reason: str) -> None:
    if not (SCRIPT.is_file() and STYLE.is_file()):
        raise ConfigError(f"the page of reports is not built; {reason}.")


def _old() -> bool:
    """Whether it is missing, or older than what it is made of."""
    if not (SCRIPT.is_file() and STYLE.is_file()):
        return True
    built = min(SCRIPT.stat().st_mtime, STYLE.stat().st_mtime)
    return any(file.stat().st_mtime > built for file in _sources())


def _sources() -> Iterator[Path]:
    viewer = CHECKOUT / "viewer"
    yield from (path for path in viewer.glob("src/**/*") if path.is_file())
    yield from (path for path in viewer.glob("*.*") if path.is_file())


@contextmanager
def _alone() -> Iterator[None]:
    """One build at a time."""
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
