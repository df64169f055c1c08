from __future__ import annotations

import shutil

import pytest

from skyrl_train.environments.tools.sandbox import Sandbox


@pytest.fixture(scope="session")
def sandbox() -> Sandbox:
    """One that was probed; tests are skipped where bubblewrap is not installed (scripts/sandbox_tools installs it)."""
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed: scripts/sandbox_tools installs it")
    made = Sandbox()
    made.check()
    return made
