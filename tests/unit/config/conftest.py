from __future__ import annotations

import pytest

from skyrl_train.engines.vllm.model_runner import VARIABLE


@pytest.fixture(autouse=True)
def default_model_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset the choice of vLLM's model runner, which an engine of an earlier test in this process has set."""
    monkeypatch.delenv(VARIABLE, raising=False)
