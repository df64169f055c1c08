"""The page of `skyrl-train report` and `skyrl-train watch` as one HTML file.

Its script and style are built from viewer/. Wheels contain the built files.
"""

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
"""Build script -> error of its failed build. A process tries each build once."""
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
"""Content security policy: only the page's own script and style, and connections to its own server if it has one."""


def render_page(data: Any = None) -> str:
    """Return the page as HTML.

    In a checkout, the script and the style are built with npm first if their sources are newer. If that fails, log a
    warning and use the existing files. A build can take minutes and blocks the caller.

    Args:
        data: JSON value that the page embeds and shows. If it is None, the page fetches its data from /api of the
            server that serves it.

    Raises:
        ConfigError: If the script and the style do not exist and cannot be built.
        ValueError: If `data` contains a number that is not finite.
    """
    _ensure_built()
    script, style = SCRIPT.read_text(encoding="utf-8"), STYLE.read_text(encoding="utf-8")
    embedded = "" if data is None else f'<script type="application/json" id="data">{_script_json(data)}</script>\n'
    server = "'self'" if data is None else "'none'"
    policy = _POLICY.format(script=_hash(script), style=_hash(style), server=server)
    return _HTML.format(policy=policy, style=style, script=script, data=embedded)


def _script_json(data: Any) -> str:
    """Return ASCII JSON that cannot end the script element around it."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _ensure_built() -> None:
    build = CHECKOUT / "scripts" / "viewer"
    if not build.is_file():
        _check_is_built(f"this installation lacks {FOLDER}: install a wheel, which contains it, or run a checkout")
        return
    if not _is_outdated():
        return
    if build in _failed:
        _check_is_built(_failed[build])
    elif reason := _build(build):
        _failed[build] = reason
        _check_is_built(reason)
        _log.warning(
            "The report viewer's page is older than its sources in viewer/, and could not be rebuilt: %s.", reason
        )


def _build(build: Path) -> str:
    """Build the page unless another process has just done it. Return the error, or "" on success."""
    if shutil.which("npm") is None:
        return "building it needs npm, which is not on PATH; install Node.js 18 or later"
    try:
        with _build_lock():
            reason = _run(build) if _is_outdated() else ""
    except OSError as error:  # for example a checkout that this user may not write
        reason = str(error)
    return f"{build} failed: {reason}" if reason else ""


def _run(build: Path) -> str:
    """Run a build script and return the error, or "" on success. Its processes end with this call at the latest."""
    with subprocess.Popen(
        [build], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=BUILD_TIMEOUT_S)
        except BaseException as error:  # also for Ctrl-C, which only this process gets
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                return f"it took more than {BUILD_TIMEOUT_S} s"
            raise
    return "" if process.returncode == 0 else output[-2000:].strip() or f"exit status {process.returncode}"


def _check_is_built(reason: str) -> None:
    if not (SCRIPT.is_file() and STYLE.is_file()):
        raise ConfigError(f"The report viewer's page is not built: {reason}.")


def _is_outdated() -> bool:
    """True if the script or the style is missing or older than a source file."""
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
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
