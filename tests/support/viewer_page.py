"""The availability of the page of `report` and `watch` in tests."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from skyrl_train.report.viewer_page import SCRIPT, STYLE

VIEWER = Path(__file__).parents[2] / "scripts" / "viewer"
VIEWER_UNAVAILABLE = "the page is not built, and cannot be built here: scripts/viewer says what is missing"


def viewer_unavailable_reason() -> bool:
    """True if the page is neither built nor can be built. If it can and the build fails, tests fail too."""
    built = SCRIPT.is_file() and STYLE.is_file()
    return not built and subprocess.run([VIEWER, "--check"], capture_output=True, timeout=60).returncode != 0


requires_viewer = pytest.mark.skipif(viewer_unavailable_reason(), reason=VIEWER_UNAVAILABLE)
