"""The page of `report` and `watch` as one HTML file. viewer/ builds its script and style, which wheels bring along."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import logging
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from skyrl_train.errors import ConfigError

FOLDER = Path(__file__).with_name("page")
SCRIPT, STYLE = FOLDER / "page.js", FOLDER / "page.css"
CHECKOUT = Path(__file__).resolve().parents[2]
BUILD_TIMEOUT_S = 300
_failed: dict[Path, str] = {}
"""What went wrong with a build, which this process does not try again."""
_log = logging.getLogger(__name__)
_HTML = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="referrer" content="no-referrer">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>skyrl-train</title>
<style>{style}</style>
</head>
<body>
<div id="page"></div>
{data}<script>{script}</script>
</body>
</html>
"""
_POLICY = (
    "default-src 'none'; script-src '{script}'; style-src '{style}'; connect-src {server}; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)
"""Nothing but its own script and style runs, and nothing is asked but its own server, if it needs one."""


def render_page(data: Any = None) -> str:
    """The HTML. It shows `data`, which JSON must be able to hold; without it, what /api says of where it came from.

    In a checkout the script and the style are built with npm first, if what they are made of is newer; if that cannot
    be, those that are there are taken, with a warning. Raises ConfigError if there are none, and ValueError for a
    number that is not finite.
    """
    _ensure_built()
    script, style = SCRIPT.read_text(encoding="utf-8"), STYLE.read_text(encoding="utf-8")
    inside = "" if data is None else f'<script type="application/json" id="data">{_embedded(data)}</script>\n'
    server = "'self'" if data is None else "'none'"
    policy = _POLICY.format(script=_hash(script), style=_hash(style), server=server)
    return _HTML.format(policy=policy, style=style, script=script, data=inside)


def _embedded(data: Any) -> str:
    """JSON in which nothing can end the element that holds it, and any text is ASCII."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _ensure_built() -> None:
    build = CHECKOUT / "scripts" / "viewer"
    if not build.is_file():
        _check_is_built(f"this installation lacks {FOLDER}: install a wheel, which has it, or build it in a checkout")
        return
    if not _is_outdated():
        return
    if build in _failed:
        _check_is_built(_failed[build])
    elif trouble := _build(build):
        _failed[build] = trouble
        _check_is_built(trouble)
        _log.warning("the page of reports is an older one than viewer/; %s", trouble)


def _build(build: Path) -> str:
    """Build it, unless another process has meanwhile; what went wrong, or ""."""
    if shutil.which("npm") is None:
        return "npm builds it, and is not on PATH: install Node.js 18 or later"
    try:
        with _build_lock():
            trouble = _run(build) if _is_outdated() else ""
    except OSError as error:  # of a checkout that this user may not write, too
        trouble = str(error)
    return f"{build} failed: {trouble}" if trouble else ""


def _run(build: Path) -> str:
    """What went wrong, or "". None of its processes outlives this call."""
    with subprocess.Popen(
        [build], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            said, _ = process.communicate(timeout=BUILD_TIMEOUT_S)
        except BaseException as error:  # Ctrl-C reaches this process alone
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                return f"it took more than {BUILD_TIMEOUT_S} s"
            raise
    return "" if process.returncode == 0 else said[-2000:].strip() or f"status {process.returncode}"


def _check_is_built(reason: str) -> None:
    if not (SCRIPT.is_file() and STYLE.is_file()):
        raise ConfigError(f"the page of reports is not built; {reason}.")


def _is_outdated() -> bool:
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
def _build_lock() -> Iterator[None]:
    """One build at a time."""
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
