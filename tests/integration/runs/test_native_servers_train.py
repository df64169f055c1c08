"""A run whose engine is vLLM's or SGLang's own server."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from skyrl_train.testing.tiny_models import save_tiny_model
from tests.support.native_servers import TOKEN, NativeServerProcess

from .conftest import Run, metrics_of


@pytest.mark.on_demand
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_two_steps_with_probed_weights(run: Run, small: Callable[[Path], list[str]], tmp_path: Path, backend: str):
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed: scripts/cpu_engines does")
    model = save_tiny_model(tmp_path / "model", "qwen3")
    server = NativeServerProcess(backend, model, log=tmp_path / "server.log")
    try:
        run(
            "main_base",
            *small(tmp_path),
            f"trainer.policy.model.path={model}",
            f"generator.backend={backend}",
            "generator.run_engines_locally=false",
            f"generator.remote_inference_engine_urls=['{server.address}']",
            "generator.weight_sync_check=probe",
            "trainer.eval_before_train=true",
            "trainer.max_steps=2",
            SKYRL_API_KEY=TOKEN,
        )
    finally:
        server.stop()
    rows = metrics_of(tmp_path)
    assert {1, 2} <= set(rows)
    for step in (1, 2):
        assert rows[step]["weights/version"] == step
        assert rows[step]["weights/probe_gap"] <= 1e-4
        assert rows[step]["rollout/logprob_diff_max"] <= 1e-4
        assert rows[step]["rollouts/failed"] == 0
