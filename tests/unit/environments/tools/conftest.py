from __future__ import annotations

import shutil

import pytest

from skyrl_train.environments.tools.sandbox import Sandbox


@pytest.fixture(scope="session")
def sandbox() -> Sandbox:
    """A sandbox that passed its check; skip the test if bubblewrap is not installed."""
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed: scripts/sandbox_tools installs it")
    sandbox = Sandbox()
    sandbox.check()
    return sandbox
