"""Remote engines: a run connects to servers by address and sends them its weights."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skyrl_train.cluster.addresses import free_address
from tests.support.serve_process import serving

from .conftest import Run, metrics_of

TOKEN = "a-token-for-tests"


@pytest.fixture
def server(tiny_model_path: str, tmp_path: Path) -> Iterator[str]:
    """Start `serve` with one transformers engine and yield its host:port."""
    _, port = free_address()
    keys = [f"trainer.policy.model.path={tiny_model_path}", f"generator.http_endpoint_port={port}"]
    command = [sys.executable, "-m", "skyrl_train.entrypoints.serve", *keys, "data.train_data=[none]"]
    with serving(command, SKYRL_API_KEY=TOKEN):
        yield f"127.0.0.1:{port}"


@pytest.mark.slow
@pytest.mark.parametrize("route", ["broadcast", pytest.param("checkpoint", marks=pytest.mark.on_demand)])
def test_run_trains_with_a_remote_engine(
    run: Run, small: Callable[[Path], list[str]], server: str, tmp_path: Path, route: str
):
    run(
        "main_base",
        *small(tmp_path),
        "generator.run_engines_locally=false",
        f"generator.remote_inference_engine_urls=['{server}']",
        "generator.weight_sync_check=probe",
        f"generator.weight_sync_route={route}",
        "trainer.eval_before_train=false",
        "trainer.max_steps=2",
        SKYRL_API_KEY=TOKEN,
    )
    rows = metrics_of(tmp_path)
    assert set(rows) == {0, 1, 2}
    for step in sorted(rows)[1:]:
        values = rows[step]
        assert values["weights/version"] == step
        assert values["weights/probe_gap"] <= 1e-4
        assert values["rollout/logprob_diff_max"] <= 1e-4
