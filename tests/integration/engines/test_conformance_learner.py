"""The cell of the table of models that this suite's SGLang engine covers; see tests/integration/models."""

from __future__ import annotations

import pytest

from tests.integration.models.agreement import assert_agrees_with_the_learner
from tests.support.engine_harness import EngineHarness


@pytest.mark.slow
@pytest.mark.parametrize("started", [pytest.param("sglang", id="Qwen3-sglang")], indirect=True, scope="package")
def test_logprobs_match_learner_before_and_after_sync(bench: EngineHarness):
    for seed in (1, 2):
        bench.run(bench.publish(bench.random_model(seed)))
        assert_agrees_with_the_learner(bench)
